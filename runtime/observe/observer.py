"""The observer: where the engine is, how long it took, and what the device says of it, joined by step number.

Knows: the order of the engine's marks, the ring of recent records. Does not know: how to wait for anything: host times
are read where the engine passes by, device times come from the landing worker with the result.

    turn N       agree(N) ... plan() ... launch(plan, why) ... resolved(spec) ... launched()
                 wait(N - D) ... land(N - D) ... landed(N - D, ghosts so far)

Each mark ends the phase before it. All of a step's marks together cost about a microsecond.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from time import perf_counter_ns

from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.result_reader import StepTiming
from runtime.observe.ranges import Ranges
from runtime.observe.step_record import AGREEMENT_BOUNDS, VOID, StepRecord
from runtime.observe.timeline import Timeline
from runtime.schedule.plan import StepPlan

_AGREEMENT_NS = tuple(round(bound * 1e9) for bound in AGREEMENT_BOUNDS)
RECENT = 256  # more than can ever be in flight (chain_depth is at most 64), and than a watchdog's bundle shows
_ROLES = ("prefill", "decode", "mixed")  # by StepKind


class StepObserver:
    """One an engine; the marks are its thread's. ``timed``: the executor shall pass device times to ``on_timing``.

    ``agreements``: turns by how long their events took to be agreed with the other ranks and submitted, in the buckets
    of AGREEMENT_BOUNDS and one beyond; ``agreement_ns`` the sum.
    """

    def __init__(
        self,
        *,
        ranges: Ranges | None = None,
        timeline: Timeline | None = None,
        on_timing: Callable[[StepTiming], None] | None = None,
    ) -> None:
        self.timed = timeline is not None or on_timing is not None
        self._ranges = ranges
        self._timeline = timeline
        self._pass_on = on_timing
        self._ring = [StepRecord(-1, 0)] * RECENT
        self._turn = self._ring[0]
        self._ghosts = 0
        self.agreements = [0] * (len(AGREEMENT_BOUNDS) + 1)
        self.agreement_ns = 0

    def recent(self) -> list[StepRecord]:
        """The latest records, oldest first, with those in flight. From any thread; a step in flight goes on growing."""
        return sorted((record for record in self._ring if record.step >= 0), key=lambda record: record.step)

    # ---- the engine's marks ----

    def agree(self, step: int) -> None:
        """The turn of ``step`` begins: its events are agreed and submitted."""
        self._turn = self._ring[step % RECENT] = StepRecord(step, perf_counter_ns())
        if self._ranges is not None:
            self._ranges.push("agree")

    def plan(self) -> None:
        turn = self._turn
        turn.agree_ns = agreed = perf_counter_ns() - turn.began_at_ns
        self.agreements[bisect_left(_AGREEMENT_NS, agreed)] += 1
        self.agreement_ns += agreed
        self._next("plan")

    def launch(self, plan: StepPlan | None, break_reason: str | None) -> None:
        """``break_reason``: why ``plan`` is not chained, or why there is none; None for a chained step."""
        turn = self._turn
        turn.plan_ns = perf_counter_ns() - turn.began_at_ns - turn.agree_ns
        turn.break_reason = break_reason
        if plan is not None:
            turn.role = _ROLES[plan.kind]
            turn.rows = len(plan.slots)
        self._next("resolve")

    def resolved(self, spec: LaunchSpec) -> None:
        """How the step is launched; where groups share experts perhaps wider than planned, or without a plan."""
        turn = self._turn
        turn.bucket, turn.width = spec.shape.rows, spec.shape.width
        label = spec.shape.label
        self._next("launch", label)
        if spec.shared_bucket:
            turn.exchange_rows = spec.shape.exchange
        elif turn.role != VOID:
            turn.role = label

    def launched(self) -> None:
        turn = self._turn
        turn.launch_ns = perf_counter_ns() - turn.began_at_ns - turn.agree_ns - turn.plan_ns
        if self._ranges is not None:
            self._ranges.pop()

    def wait(self, step: int) -> None:
        """``step`` is the next to land, as soon as the device is done with it."""
        self._ring[step % RECENT].land_at_ns = perf_counter_ns()
        if self._ranges is not None:
            self._ranges.push("wait")

    def land(self, step: int) -> None:
        record = self._ring[step % RECENT]
        record.wait_ns = perf_counter_ns() - record.land_at_ns
        self._next("land")

    def landed(self, step: int, ghosts_so_far: int) -> None:
        """``ghosts_so_far``: of all steps up to this one."""
        record = self._ring[step % RECENT]
        record.land_ns = perf_counter_ns() - record.land_at_ns - record.wait_ns
        record.ghosts = ghosts_so_far - self._ghosts
        self._ghosts = ghosts_so_far
        if self._ranges is not None:
            self._ranges.pop()
        if self._timeline is not None:
            self._timeline.add(record)

    def _next(self, *phase: str) -> None:
        if self._ranges is not None:
            self._ranges.pop()
            self._ranges.push(" ".join(phase))

    # ---- the landing worker's ----

    def on_timing(self, timing: StepTiming) -> None:
        """A step's device times, when the worker has read its results; before the engine can land it."""
        record = self._ring[timing.step % RECENT]
        record.seen_at_ns, record.read_at_ns = round(timing.seen_at * 1e9), perf_counter_ns()
        record.gained = timing.gained
        record.device_started_ms, record.device_ended_ms = timing.started_ms, timing.ended_ms
        if self._pass_on is not None:
            self._pass_on(timing)

    def close(self, wait_s: float = 30.0) -> None:
        """Write the timeline, where there is one; rank 0 waits up to ``wait_s`` for the others' parts. Idempotent."""
        if self._timeline is not None:
            self._timeline.close(wait_s)
