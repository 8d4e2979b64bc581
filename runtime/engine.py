"""The engine: events -> plan -> launch -> land. One on every rank, all running the same loop over the same plans.

Knows: the order of the four verbs and where the loop waits. Does not know: how any of them is done.

    turn N   agree on the events of step N        control plane: read L steps early, off the device's path
             submit them, plan step N             pure
             launch it                            behind everything in flight; nothing is waited for
             land step N - D                      the only wait of the loop; D = 0 is the serial engine
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

from parallel.control.interface import ControlPlane
from runtime.config import EngineConfig
from runtime.counters import engine_counters
from runtime.execute.executor import Executor
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.sampling.inputs import EVERY_FEATURE, SamplingVariant
from runtime.frontend.engine_protocol import Occupancy
from runtime.frontend.validation import check_quantum, check_request_ids, checked_request, checked_session, checked_turn
from runtime.groups.request_router import RequestRouter
from runtime.groups.step_sync import DpStepSync
from runtime.observe.observer import StepObserver
from runtime.plan_late import NeverLate, PlanLate
from runtime.replicate.event_codec import decode_events, encode_events
from runtime.replicate.pending_events import open_pending_events
from runtime.schedule.plan import (
    Admit,
    Branch,
    Cancel,
    Continue,
    Event,
    Extend,
    Finished,
    Pause,
    ResetPrefixCache,
    Resume,
    StepOutput,
    StepPlan,
)
from runtime.schedule.request import FinishReason, Request, SamplingParams
from runtime.schedule.scheduler import Scheduler
from runtime.watchdog.watchdog import Watchdog

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a front end must know of the model: ids are below ``vocab_size``, prompt + answer fit ``max_model_len``.

    ``widest``: the sampling variant that covers all for which there is memory.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    widest: SamplingVariant = EVERY_FEATURE

    def lacks_memory_for(self, sampling: SamplingParams) -> str | None:
        """Why this engine cannot draw so, and what to type; None where it can."""
        wanted = SamplingVariant.covering([sampling])
        if self.widest.covers(wanted):
            return None
        return (
            f"the request needs {wanted}, but beside the KV cache there is memory for {self.widest} only: start with a "
            "lower --memory-fraction or --max-num-seqs, with fewer speculative tokens where there are any, or with "
            "--warm penalised, which keeps memory for it"
        )


class _Flight(NamedTuple):
    """``launched`` without ``planned``: for the sake of other groups. Neither: a void step."""

    planned: StepPlan | None
    launched: LaunchSpec | None


class Engine:
    """``add``, ``cancel``, ``step`` and ``stop`` are the leader's, ``follow`` is everybody else's: engine_protocol.py
    says what they promise. Made by build.py. ``at_end`` is called once, when everything has landed and the
    device is at rest; not after an error. ``release``, called behind it, gives all memory back; after an error, too,
    where this rank is alone. ``thaw`` is called when the engine closes, after an error too, and may be
    called more than once (gc_freeze.py). ``groups`` and ``router`` are there where several groups share experts: what
    they launch together, and whose requests are whose. ``late``: whether the leader's turns may be put off, and for how
    long.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ServedModel,
        scheduler: Scheduler,
        executor: Executor,
        control: ControlPlane,
        observe: StepObserver | None = None,
        watchdog: Watchdog | None = None,
        at_end: Callable[[], None] | None = None,
        groups: DpStepSync | None = None,
        router: RequestRouter | None = None,
        thaw: Callable[[], None] | None = None,
        late: PlanLate | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.model_config = model
        self.scheduler = scheduler
        self.executor = executor
        self.control = control
        self.observe = observe or StepObserver()
        self._watchdog = watchdog
        self._at_end = at_end
        self._groups = groups
        self._router = router
        self._thaw = thaw
        self._release = release
        self._thread: threading.Thread | None = None  # that takes turns, where it is another than the one that opened
        self._late = late or NeverLate()
        self._in_flight: deque[_Flight] = deque()
        self._outbox = open_pending_events(config)
        self._announced: deque[list[Event]] = deque()  # of the leader: records that are not agreed yet, oldest first
        control.explain_with(scheduler.digest.recent)

    # ---- the loop ----

    def step(self) -> StepOutput:
        """One turn. The output is what landed in it, and what its events ended; with several groups, a turn later."""
        self._at("exchange")
        observe, turn = self.observe, self.scheduler.step
        self._late.begin()
        observe.agree(turn)
        ended = self._submit_agreed_events()
        self._at("plan")
        observe.plan()
        plan = self.scheduler.plan()
        observe.launch(plan, self.scheduler.counters.latest_break)
        spec = self._resolve(plan)
        if spec is not None:
            observe.resolved(spec)
            self.executor.launch(spec)
        self._in_flight.append(_Flight(plan, spec))
        if self._late.notes:
            self._late.launched(None if spec is None else spec.shape, 0 if spec is None else spec.shape.tokens)
        observe.launched()
        landing = len(self._in_flight) > self.scheduler.config.limits.depth
        launched = landing and self._in_flight[0].launched is not None
        output = self._land() if landing else StepOutput(self.scheduler.step)
        notices, closed = self.scheduler.take_notices()
        if ended or closed or notices:
            output = output._replace(finished=ended + output.finished + closed, notices=notices)
        return output if self._router is None else self._router.gather(turn, output, launched)

    def _at(self, place: str) -> None:
        """Where the watchdog finds this rank: in "exchange" and "land" it waits for others."""
        if self._watchdog is not None:
            self._watchdog.step, self._watchdog.place = self.scheduler.step, place

    def _submit_agreed_events(self) -> tuple[Finished, ...]:
        payload = b""
        if self._outbox:
            announced = self._outbox.portion()
            payload = encode_events(announced)
            self._announced.append(announced)
        agreed = self.control.exchange(self.scheduler.step, self.scheduler.digest.value, payload)
        events: Sequence[Event] = ()
        if agreed:
            events = decode_events(agreed, self._announced.popleft() if self._announced else None)
        if self._router is not None:
            events = self._router.mine(events)
        ended: tuple[Finished, ...] = ()
        for event in events:
            ended += self.scheduler.submit(event)
        return ended

    def _resolve(self, plan: StepPlan | None) -> LaunchSpec | None:
        """How this rank launches the step. Where groups share experts they agree on that first."""
        if self._groups is None:
            return None if plan is None else self.executor.resolve(plan)
        step = self.scheduler.step - 1
        needs = self.executor.needs(plan)
        self._at("exchange")
        agreed = self._groups.join(step, needs, self.scheduler.room_for_rows)
        self.scheduler.agreed_room(self._groups.room)
        self._at("plan")
        return None if agreed is None else self.executor.resolve(plan, agreed, step=step)

    def _land(self) -> StepOutput:
        flight = self._in_flight.popleft()
        step = self.scheduler.step - 1 - len(self._in_flight)
        self._at("land")
        self.observe.wait(step)
        result = None if flight.launched is None else self.executor.take(flight.launched)
        self._late.landed(self.executor.landed_at)
        self.observe.land(step)
        output = self.scheduler.land(step, None if flight.planned is None else result)
        self.observe.landed(step, self.scheduler.counters.ghost_rows)
        return output

    def follow(self) -> None:
        """Run the leader's turns until it stops, then land what is in flight."""
        while not self.control.stopped:
            self.step()
        self._drain()

    def stop(self) -> None:
        """Agree on the end: every rank takes the same last turn. Requests that have not ended are dropped."""
        self.control.stop()
        while not self.control.stopped:
            self.step()
        self._drain()

    def slack(self) -> float:
        """Seconds for which the leader may put off its next turn, to hear of requests that are in its plan then."""
        return self._late.slack()

    def wait(self, ready: Callable[[float], bool], timeout: float) -> None:
        """Instead of a turn while there is nothing to run: the leader waits for its callers, the others for it."""
        self.control.wait_for_events(ready, timeout)

    def _drain(self) -> None:
        while self._in_flight:
            self._land()

    def close(self) -> None:
        """Release the device, its threads and the control plane; write the timeline. Idempotent."""
        try:
            self.executor.close()
            at_end, self._at_end = self._at_end, None
            if at_end is not None:
                at_end()
            self._give_memory_back()
        finally:
            self._release_heap()
            if self._watchdog is not None:
                self._watchdog.stop()
            self.control.close()
            self.observe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """After an error the other ranks are told at once, and nothing is waited for: a collective may never end.

        With a watchdog this does not return: every rank writes its bundle and leaves.
        """
        if error is None:
            self.close()
            return
        if self._watchdog is not None:
            self._watchdog.ignore_signals()  # first: a long traceback takes milliseconds
        self._release_heap()
        self.observe.close(wait_s=0.0)
        if self._watchdog is not None:
            log.error("the engine of rank %d ends", self.control.rank, exc_info=error)
            self._watchdog.fail(error)
        self.control.abort(f"{type(error).__name__}: {error}")
        self.control.close()
        if self._watchdog is None and not self._turned_elsewhere():
            self._end_alone()

    def _end_alone(self) -> None:
        """After an error, with no other rank that a collective could wait for: a variable of a notebook may keep this
        engine, and the next one needs its memory.
        """
        with suppress(Exception):  # what the device has to say was said, or is worth less than the error itself
            self.executor.close()
            self._give_memory_back()

    def _turned_elsewhere(self) -> bool:
        """Whether another thread may be in the middle of a step: it needs the memory."""
        thread = self._thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    def _give_memory_back(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()

    def _release_heap(self) -> None:
        if self._thaw is not None:
            self._thaw()

    # ---- what the leader's front end calls ----

    @property
    def is_leader(self) -> bool:
        return self.control.rank == 0

    @property
    def stopped(self) -> bool:
        """The agreed end is in effect: it takes no further turn, and no other client."""
        return self.control.stopped

    @property
    def has_work(self) -> bool:
        """Whether taking a turn can change anything (leader)."""
        scheduler = self.scheduler
        running = scheduler.unfinished - scheduler.parked
        if self._outbox or self.control.pending or running or scheduler.chain.real:
            return True
        if self._router is None:
            return False
        return self._router.outstanding or any(flight.launched is not None for flight in self._in_flight)

    def add(self, request: Request) -> None:
        """Have a request announced, max_tokens cut to what fits behind its prompt.

        Raises RequestError, before any rank hears of it, for one that cannot be served as it stands (validation.py);
        what the scheduler refuses (a full queue, a pool too small) comes back as Finished(REJECTED) with the reason.
        """
        self._outbox.put(Admit(checked_request(request, self.model_config)))

    def start(self, request: Request, quantum: int, *, keep: bool = False) -> None:
        """Have a session announced: it generates ``quantum`` tokens, then waits for ``proceed`` or ``extend``.

        ``keep``: also when its answer is complete. ``StepOutput.notices`` say when it waits, and why something that was
        said to it changed nothing; ``cancel`` closes it. Raises RequestError as ``add`` does.
        """
        self._outbox.put(Admit(checked_session(request, quantum, self.model_config), quantum, keep))

    def proceed(self, request_id: int, epoch: int, tokens: int) -> None:
        """A session may generate ``tokens`` more; ``epoch`` 1 is its first turn. Raises RequestError for bad values."""
        check_request_ids(request_id)
        check_quantum(epoch, tokens)
        self._outbox.put(Continue(request_id, epoch, tokens))

    def extend(self, request_id: int, epoch: int, token_ids: Sequence[int], max_tokens: int, quantum: int) -> None:
        """Say ``token_ids`` to a parked session, and let it begin to answer. Raises RequestError for a bad value."""
        check_request_ids(request_id)
        said = checked_turn(token_ids, max_tokens, quantum, self.model_config)
        self._outbox.put(Extend(request_id, epoch, said, max_tokens, quantum))

    def fork(self, request_id: int, parent: int, *, scored: bool = False) -> None:
        """A new parked session that knows what the parked session ``parent`` knows.

        ``scored``: with log-probabilities of its tokens, even where its parent does without. Raises RequestError for
        what cannot be an id.
        """
        check_request_ids(request_id, parent)
        self._outbox.put(Branch(request_id, parent, scored))

    def bind_thread(self) -> None:
        """Called first by a thread other than the one that made the engine, before it takes turns: one thread does."""
        self._thread = threading.current_thread()
        self.executor.device.bind_thread()

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request; late by the horizon and by what is in flight. Unknown and ended ids are ignored.

        Raises RequestError for what cannot be an id, as ``pause`` and ``resume`` do.
        """
        check_request_ids(request_id)
        self._outbox.put(Cancel(request_id, reason))

    def pause(self, request_id: int) -> None:
        """Stop running a request for now; it keeps what it holds unless memory is short."""
        check_request_ids(request_id)
        self._outbox.put(Pause(request_id))

    def resume(self, request_id: int) -> None:
        """Undo ``pause``."""
        check_request_ids(request_id)
        self._outbox.put(Resume(request_id))

    def reset_prefix_cache(self) -> None:
        """Requests that are added from now on find no KV, and no recurrent state, that was computed before."""
        self._outbox.put(ResetPrefixCache())

    @property
    def agreements(self) -> tuple[tuple[int, ...], float]:
        """Turns by how long their events took to be agreed, in the buckets of AGREEMENT_BOUNDS; and their seconds."""
        return tuple(self.observe.agreements), self.observe.agreement_ns / 1e9

    @property
    def occupancy(self) -> Occupancy:
        """How full this rank's group is after the latest turn. A block that only a cached prefix needs is not used."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        waiting, idle = scheduler.waiting, scheduler.waiting + scheduler.parked
        return Occupancy(scheduler.unfinished - idle, waiting, pool.count - pool.free_count, pool.count)

    def silent_ranks(self, seconds: float) -> tuple[int, ...]:
        """Ranks of which the watchdog has heard nothing for longer; none in a world of one. From any thread."""
        return () if self._watchdog is None else self._watchdog.silent_ranks(seconds)

    def tell_verdict(self, hear: Callable[[str], object]) -> bool:
        """Have ``hear`` called with the reason when the watchdog ends the job, before the process leaves.

        False without a watchdog: nobody will call it. With one it is called whatever an engine's block raises.
        """
        if self._watchdog is None:
            return False
        self._watchdog.hear_verdict = hear
        return True

    @property
    def counters(self) -> Mapping[str, int | float]:
        """Everything counted so far, by name; a labelled counter is ``name{label}``."""
        return engine_counters(self.scheduler, self.executor, self._router, self._late.counters)
