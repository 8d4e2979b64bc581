"""The observer: what was measured of the latest steps, by host and device, joined by step number.

Knows: a step's marks, the ring of recent records, the timeline, NVTX ranges. Does not know: when a mark is set (the
engine notes its times in a ``InFlight`` and hands it over once, landed), how to wait for anything: device times come
from the landing worker with the result.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.result_reader import StepTiming
from runtime.observe.step_record import AGREEMENT_BOUNDS, StepRecord
from runtime.observe.timeline import Timeline
from runtime.schedule.plan import StepPlan


class Ranges(Protocol):
    """A stack of named ranges, of the calling thread."""

    def push(self, name: str, /) -> object: ...
    def pop(self) -> object: ...


class NvtxRanges:
    """Ranges that Nsight Systems shows; a fraction of a microsecond each without a profiler. Needs CUDA."""

    def __init__(self) -> None:
        from torch.cuda import nvtx

        self.push: Callable[[str], object] = nvtx.range_push
        self.pop: Callable[[], object] = nvtx.range_pop


class Phases:
    """Ranges that follow one another: each phase ends the one before it. None: no phase."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges, self._inside = ranges, False

    def enter(self, name: str | None) -> None:
        if self._inside:
            self._ranges.pop()
        if name is not None:
            self._ranges.push(name)
        self._inside = name is not None


class _Range:
    """One range as a context that can be entered again and again."""

    def __init__(self, ranges: Ranges, name: str) -> None:
        self._ranges = ranges
        self._name = name

    def __enter__(self) -> None:
        self._ranges.push(self._name)

    def __exit__(self, *_: object) -> None:
        self._ranges.pop()


def open_ranges(wanted: bool) -> Ranges | None:
    """None if ranges are off, or where there is no CUDA to make them with."""
    if not wanted:
        return None
    import torch

    return NvtxRanges() if torch.cuda.is_available() else None


def around(ranges: Ranges | None, name: str) -> AbstractContextManager[object]:
    """A reusable context for one phase; nothing without ranges."""
    return nullcontext() if ranges is None else _Range(ranges, name)


_AGREEMENT_NS = tuple(round(bound * 1e9) for bound in AGREEMENT_BOUNDS)
RECENT = 256  # more than a watchdog's bundle shows
_ROLES = ("prefill", "decode", "mixed")  # by StepKind


@dataclass(slots=True)
class InFlight:
    """One step as the engine marks it, from the beginning of its turn to the end of its landing.

    ``*_at``: by time.perf_counter_ns, 0 until then. In its turn: ``began``; ``agreed``: its events are submitted;
    ``planned``; ``launched``. D turns later: ``landing``; ``taken``: its result is on the host; ``landed``.
    ``plan`` None: nothing could run. ``launch`` without a plan: for other groups; neither: a void step.
    ``break_reason``: why it is not chained, or void; None for a chained step. ``timing`` and ``read_at``: the device's
    times, and when the landing worker had read the results.
    """

    step: int
    began_at: int
    agreed_at: int = 0
    planned_at: int = 0
    launched_at: int = 0
    landing_at: int = 0
    taken_at: int = 0
    landed_at: int = 0
    plan: StepPlan | None = None
    launch: LaunchSpec | None = None
    break_reason: str | None = None
    ghosts: int = 0
    timing: StepTiming | None = None
    read_at: int = 0

    def record(self) -> StepRecord:
        """What is known of it now. Where groups share experts it may be wider than planned, or without a plan."""
        found = StepRecord(
            self.step,
            self.began_at,
            break_reason=self.break_reason,
            ghosts=self.ghosts,
            agree_ns=max(0, self.agreed_at - self.began_at),
            plan_ns=max(0, self.planned_at - self.agreed_at),
            launch_ns=max(0, self.launched_at - self.planned_at),
            land_at_ns=self.landing_at,
            wait_ns=max(0, self.taken_at - self.landing_at),
            land_ns=max(0, self.landed_at - self.taken_at),
        )
        plan, launch, timing = self.plan, self.launch, self.timing
        if plan is not None:
            found.role, found.rows = _ROLES[plan.kind], len(plan.slots)
        if launch is not None:
            shape = launch.shape
            found.bucket, found.width = shape.rows, shape.width
            if launch.shared_bucket:
                found.exchange_rows = shape.exchange
            elif plan is not None:
                found.role = shape.label
        if timing is not None:
            found.seen_at_ns, found.read_at_ns, found.gained = round(timing.seen_at * 1e9), self.read_at, timing.gained
            found.device_started_ms, found.device_ended_ms = timing.started_ms, timing.ended_ms
        return found


class StepObserver:
    """One an engine. ``timed``: the executor shall pass device times to ``on_timing``. ``phases``: a profiler's names
    for the phases of a turn; None without ``ranges``.

    ``in_flight``: the engine's, by step, oldest first. ``agreements``: landed steps by how long
    their events took to be agreed with the other ranks and submitted, in the buckets of AGREEMENT_BOUNDS and one
    beyond; ``agreement_ns`` the sum.
    """

    def __init__(
        self,
        *,
        ranges: Ranges | None = None,
        timeline: Timeline | None = None,
        on_timing: Callable[[StepTiming], None] | None = None,
    ) -> None:
        self.timed = timeline is not None or on_timing is not None
        self.phases = None if ranges is None else Phases(ranges)
        self.in_flight: dict[int, InFlight] = {}
        self.agreements = [0] * (len(AGREEMENT_BOUNDS) + 1)
        self.agreement_ns = 0
        self._timeline = timeline
        self._pass_on = on_timing
        self._landed: deque[StepRecord] = deque(maxlen=RECENT)

    def landed(self, flight: InFlight) -> None:
        """Keep what was measured of it; the engine's one call a step."""
        record = flight.record()
        self._landed.append(record)
        self.agreements[bisect_left(_AGREEMENT_NS, record.agree_ns)] += 1
        self.agreement_ns += record.agree_ns
        if self._timeline is not None:
            self._timeline.add(record)

    def on_timing(self, timing: StepTiming) -> None:
        """A step's device times, when the landing worker has read its results; before the engine can land it."""
        flight = self.in_flight[timing.step]
        flight.timing, flight.read_at = timing, perf_counter_ns()
        if self._pass_on is not None:
            self._pass_on(timing)

    def recent(self) -> list[StepRecord]:
        """The latest records, oldest first, with those in flight as far as they are known. From any thread."""
        flying = [flight.record() for flight in list(self.in_flight.values())]  # first: one may land meanwhile
        by_step = {record.step: record for record in [*flying, *self._landed.copy()]}
        return [by_step[step] for step in sorted(by_step)][-RECENT:]

    def close(self, wait_s: float = 30.0) -> None:
        """Write the timeline, where there is one; rank 0 waits up to ``wait_s`` for the others' parts. Idempotent."""
        if self._timeline is not None:
            self._timeline.close(wait_s)
