"""The engine: agree, plan, launch, land. Every rank has one, and all take the same turns over the same plans.

Knows: the order of these four, and where a turn waits. Does not know: how any of them is done.

    turn N   agree on the events of step N    announced L turns before, off the device's critical path
             plan step N                      a pure function of agreed events and landed results
             launch it                        after everything in flight, without a wait
             land step N - D                  the only wait of a turn; D = 0 is the serial engine
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter_ns, sleep
from typing import Any, Self

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
from runtime.observe.observer import InFlight, StepObserver
from runtime.plan_late import PlanLate, PlanLateCounters
from runtime.replicate.event_codec import decode_events, encode_events
from runtime.replicate.held_arrivals import LEAST_HELD, HeldArrivals, reports
from runtime.replicate.pending_events import open_pending_events
from runtime.schedule.plan import (
    Admit,
    Branch,
    Cancel,
    Compile,
    Continue,
    Event,
    Extend,
    Finished,
    Pause,
    ResetPrefixCache,
    Resume,
    StepOutput,
    StepPlan,
    Tabled,
)
from runtime.schedule.request import FinishReason, Request, SamplingParams
from runtime.schedule.scheduler import Scheduler
from runtime.watchdog.watchdog import Watchdog

log = logging.getLogger(__name__)

# The phases of a turn at whose beginning the watchdog is given a new place; in "exchange" and "land" a rank waits.
_PLACES = {"agree": "exchange", "plan": "plan", "wait": "land"}
_VOID_TURN_SECONDS = 0.5e-3  # of the leader's, while ranks compile and nothing runs


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a front end must know of the model: ids are below ``vocab_size``, prompt + answer fit ``max_model_len``.

    ``widest``: the sampling variant that covers all for which there is memory. ``quantization``: whose FP8 codes its
    weights are.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    widest: SamplingVariant = EVERY_FEATURE
    quantization: str | None = None

    def lacks_memory_for(self, sampling: SamplingParams) -> str | None:
        """Why this engine cannot sample so, and what to type; None if it can."""
        wanted = SamplingVariant.covering([sampling])
        if self.widest.covers(wanted):
            return None
        return (
            f"the request needs {wanted}, but beside the KV cache there is memory for {self.widest} only: start with a "
            "lower --memory-fraction or --max-num-seqs, with fewer speculative tokens where there are any, or with "
            "--warm penalised, which keeps memory for it"
        )


class Engine:
    """One rank's engine, made by build.py. The leader's front end calls ``add``, ``cancel``, ``step`` and ``stop``
    (engine_protocol.py has their contracts); the other ranks call ``follow``.

    ``at_end`` is called once, when everything has landed and the device is at rest; not after an error. ``release``
    then frees all device memory; also after an error, if no other rank waits. ``thaw`` is called when the engine
    closes, also after an error, and perhaps more than once (gc_freeze.py). ``groups`` and ``router``, with several
    data-parallel groups: what they launch together, and which requests are whose. ``late``: how long the leader may
    postpone a turn; None: not at all.
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
        self.stopped = False  # takes no further turn
        self._chain = scheduler.chain
        self._in_flight: dict[int, InFlight] = {}  # by step, oldest first
        self.observe.in_flight = self._in_flight
        self._outbox = open_pending_events(config)
        checker = None if executor.grammars is None else executor.grammars.checker
        most = max(LEAST_HELD, config.data_parallel * config.max_num_seqs)
        self._held = HeldArrivals(self._outbox.put, control.world, most, checker)
        self._compiling: dict[int, Future[Any]] = {}  # grammars, by number
        self._texts: dict[int, str] = {}  # of those that were compiled
        self._announced: deque[list[Event]] = deque()  # the leader's records that are not agreed yet, oldest first
        self._watchdog = watchdog
        self._at_end = at_end or _nothing
        self._groups = groups
        self._router = router
        self._thaw = thaw or _nothing
        self._late = late
        self._late_counters = PlanLateCounters() if late is None else late.counters
        self._release = release or _nothing
        self._tables_due = 0  # tables of grammars that are being made
        self._thread: threading.Thread | None = None  # takes the turns, if not the one that made the engine
        control.explain_with(scheduler.digest.recent)

    # ---- the loop ----

    def step(self) -> StepOutput:
        """One turn. Returns what landed in it, and what its events ended; with several groups, a turn later."""
        scheduler, turn = self.scheduler, self._chain.step
        flight = self._in_flight[turn] = InFlight(turn, self._enter("agree"))
        ended = self._submit_agreed_events(turn)
        flight.agreed_at = self._enter("plan")
        flight.plan = scheduler.plan()
        flight.break_reason = scheduler.counters.latest_break
        flight.planned_at = self._enter("resolve")
        flight.launch = self._resolve(turn, flight.plan)
        if flight.launch is not None:
            self._enter("launch", flight.launch.shape.label)
            self.executor.launch(flight.launch)
        flight.launched_at = self._enter(None)
        oldest = next(iter(self._in_flight.values()))
        landing = len(self._in_flight) > scheduler.config.limits.depth
        output = self._land(oldest) if landing else StepOutput(turn + 1)
        if self._held.ended:
            ended += tuple(self._held.ended)
            self._held.ended.clear()
        if ended or scheduler.news:
            notices, closed = scheduler.take_notices()
            output = output._replace(finished=ended + output.finished + closed, notices=notices)
        if self._late is not None:
            shape = None if flight.launch is None else flight.launch.shape
            landed_at = self.executor.landed_at if landing else None
            self._late.took(flight.began_at / 1e9, flight.launched_at / 1e9, shape, landed_at)
        if self._router is not None:
            output = self._router.gather(turn, output, landing and oldest.launch is not None)
        if output.finished:
            self._held.over(output.finished)
        return output

    def _submit_agreed_events(self, turn: int) -> tuple[Finished, ...]:
        """Announce what callers asked for, and submit what all ranks have agreed on; returns the requests it ended."""
        payload = b""
        if self._tables_due:
            self._announce_tables()
        if self._compiling or self._held.expects:
            self._report_grammars()
        if self._outbox.count:
            self._announced.append(self._outbox.portion())
            payload = encode_events(self._announced[-1])
        agreed = self.control.exchange(turn, self.scheduler.digest.value, payload)
        if not agreed:
            return ()
        events: Sequence[Event] = decode_events(agreed, self._announced.popleft() if self._announced else None)
        if self._router is not None:
            events = self._router.mine(events)
        ended = tuple(finished for event in events for finished in self.scheduler.submit(event))
        if (grammars := self.executor.grammars) is not None:
            for event in events:
                if isinstance(event, Admit) and event.request.sampling.grammar:
                    self._tables_due += grammars.maker is not None and grammars.maker.want(event.request)
                elif isinstance(event, Tabled):
                    grammars.hold(event.key, event.table, self.scheduler.ledger.tables.places)
                elif isinstance(event, Compile):
                    for number in event.dropped:
                        grammars.drop(self._texts.pop(number))
                    self._texts[event.number] = event.grammar
                    self._compiling[event.number] = grammars.begin(event.grammar, event.regular)
        return ended

    def _report_grammars(self) -> None:
        """Report which grammars this rank has compiled; the leader reads all reports, and admits requests by them."""
        own = reports(self._compiling)
        if not self.is_leader:
            for report in own:
                self.control.send_message(report)
            return
        self._held.read_verdicts()
        others = self.control.take_messages() if self._router is None else self._router.take_reports()
        for rank, report in [(0, report) for report in own] + others:
            self._held.reported(rank, report)
        if len(self._held) and not self._busy:
            sleep(_VOID_TURN_SECONDS)

    def _announce_tables(self) -> None:
        """Queue grammar tables made since the last turn as events (leader)."""
        grammars = self.executor.grammars
        if grammars is not None and grammars.maker is not None:
            for key, table in grammars.maker.made():
                self._tables_due -= 1
                if table:
                    self._outbox.put(Tabled(key, table))

    def _resolve(self, turn: int, plan: StepPlan | None) -> LaunchSpec | None:
        """How this rank launches the step. Groups that share experts agree on it first."""
        if self._groups is None:
            return None if plan is None else self.executor.resolve(plan)
        needs = self.executor.needs(plan)
        self._at("exchange")
        agreed = self._groups.join(turn, needs, self.scheduler.room_for_rows)
        self.scheduler.agreed_room(self._groups.room)
        self._at("plan")
        return None if agreed is None else self.executor.resolve(plan, agreed, step=turn)

    def _land(self, flight: InFlight) -> StepOutput:
        """Wait for the oldest step in flight, and give its rows their tokens."""
        ghosts_before = self.scheduler.counters.ghost_rows
        flight.landing_at = self._enter("wait")
        result = None if flight.launch is None else self.executor.take(flight.launch)
        flight.taken_at = self._enter("land")
        output = self.scheduler.land(flight.step, None if flight.plan is None else result)
        flight.ghosts = self.scheduler.counters.ghost_rows - ghosts_before
        flight.landed_at = self._enter(None)
        self.observe.landed(flight)
        del self._in_flight[flight.step]
        return output

    def _enter(self, phase: str | None, label: str = "") -> int:
        """A phase of the turn begins, or only ends (None), for the watchdog and a profiler; returns the time in ns."""
        if phase in _PLACES:
            self._at(_PLACES[phase])
        if self.observe.phases is not None:
            self.observe.phases.enter(f"{phase} {label}" if label else phase)
        return perf_counter_ns()

    def _at(self, place: str) -> None:
        """Gives the watchdog the step and the place that this rank has reached."""
        if self._watchdog is not None:
            self._watchdog.step, self._watchdog.place = self._chain.step, place

    def follow(self) -> None:
        """Take turns until the leader's ``stop`` is agreed, then land what is in flight."""
        while not self.control.stopped:
            self.step()
        for flight in list(self._in_flight.values()):
            self._land(flight)
        self.stopped = True

    def stop(self) -> None:
        """Agree on the end: every rank takes the same last turn. Requests that have not ended are dropped."""
        self.control.stop()
        self.follow()

    def slack(self) -> float:
        """Seconds for which the leader may postpone its next turn, so that requests that arrive meanwhile are in it."""
        return 0.0 if self._late is None else self._late.slack()

    def wait(self, ready: Callable[[float], bool], timeout: float) -> None:
        """Instead of a turn, if nothing runs: the leader waits for its callers, the other ranks wait for the leader."""
        self.control.wait_for_events(ready, timeout)

    def close(self) -> None:
        """Release the device, its threads and the control plane; write the timeline. Idempotent."""
        try:
            self.executor.close()
            at_end, self._at_end = self._at_end, _nothing
            at_end()
            self._free_memory()
        finally:
            self._thaw()
            if self._watchdog is not None:
                self._watchdog.stop()
            self.control.close()
            self.stopped = True
            self.observe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """After an error, inform the other ranks at once and wait for nothing: a collective may never end.

        With a watchdog this does not return: every rank writes its bundle, and its process ends.
        """
        if error is None:
            self.close()
            return
        if self._watchdog is not None:
            self._watchdog.ignore_signals()  # first: a long traceback takes milliseconds
        self._thaw()
        self.observe.close(wait_s=0.0)
        if self._watchdog is not None:
            log.error("the engine of rank %d ends", self.control.rank, exc_info=error)
            self._watchdog.fail(error)
        self.control.abort(f"{type(error).__name__}: {error}")
        self.control.close()
        self.stopped = True
        thread = self._thread  # it may be in the middle of a turn, and use the memory
        in_turn = thread is not None and thread is not threading.current_thread() and thread.is_alive()
        if self._watchdog is None and not in_turn:
            with suppress(Exception):  # the error itself says more; a notebook may need the memory for another engine
                self.executor.close()
                self._free_memory()

    def _free_memory(self) -> None:
        release, self._release = self._release, _nothing
        release()

    # ---- what the leader's front end calls ----

    @property
    def is_leader(self) -> bool:
        return self.control.rank == 0

    @property
    def has_work(self) -> bool:
        """Whether a turn can change anything (leader)."""
        return bool(self._busy or len(self._held) or self._held.ended)

    @property
    def compiling(self) -> int:
        """Answers that wait for their grammars (leader)."""
        return len(self._held)

    @property
    def _busy(self) -> bool:
        """Whether there is work besides requests that wait for their grammars."""
        scheduler = self.scheduler
        running = scheduler.unfinished - scheduler.parked
        if self._outbox.count or self.control.pending or running or self._chain.real:
            return True
        if self._router is None:
            return False
        return self._router.outstanding or any(flight.launch is not None for flight in self._in_flight.values())

    def add(self, request: Request) -> None:
        """Announce a request, its max_tokens cut to what fits after the prompt.

        Raises RequestError at once if it cannot be served as it stands (validation.py). What the scheduler refuses (a
        full queue, a pool too small) comes back as Finished(REJECTED) with the reason.
        """
        arrival = Admit(checked_request(request, self.model_config))
        if request.sampling.grammar and self.executor.grammars is not None:
            self._held.add(arrival)
        else:
            self._outbox.put(arrival)

    def start(self, request: Request, quantum: int, *, keep: bool = False) -> None:
        """Announce a session: it generates ``quantum`` tokens, then waits for ``proceed`` or ``extend``.

        ``keep``: it also waits when its answer is complete. ``StepOutput.notices`` say when it waits, and why a verb
        changed nothing; ``cancel`` closes it. Raises RequestError as ``add`` does.
        """
        self._outbox.put(Admit(checked_session(request, quantum, self.model_config), quantum, keep))

    def proceed(self, request_id: int, epoch: int, tokens: int) -> None:
        """A session may generate ``tokens`` more; ``epoch`` 1 is its first turn. Raises RequestError for bad values."""
        check_request_ids(request_id)
        check_quantum(epoch, tokens)
        self._outbox.put(Continue(request_id, epoch, tokens))

    def extend(self, request_id: int, epoch: int, token_ids: Sequence[int], max_tokens: int, quantum: int) -> None:
        """A parked session gets ``token_ids`` and begins to answer them. Raises RequestError for a bad value."""
        check_request_ids(request_id)
        said = checked_turn(token_ids, max_tokens, quantum, self.model_config)
        self._outbox.put(Extend(request_id, epoch, said, max_tokens, quantum))

    def fork(self, request_id: int, parent: int, *, scored: bool = False) -> None:
        """A new parked session with all tokens of the parked session ``parent``.

        ``scored``: with log-probabilities of its tokens, even if its parent has none. Raises RequestError for bad ids.
        """
        check_request_ids(request_id, parent)
        self._outbox.put(Branch(request_id, parent, scored))

    def bind_thread(self) -> None:
        """Called once by the thread that takes all turns, if it did not make the engine."""
        self._thread = threading.current_thread()
        self.executor.device.bind_thread()

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request, after the horizon and the steps in flight. Unknown and ended ids are ignored.

        Raises RequestError for a bad id, as ``pause`` and ``resume`` do.
        """
        check_request_ids(request_id)
        self._about(Cancel(request_id, reason))

    def pause(self, request_id: int) -> None:
        """Leave a request out of the plans for now; it keeps its blocks unless memory is short."""
        check_request_ids(request_id)
        self._about(Pause(request_id))

    def resume(self, request_id: int) -> None:
        """Undo ``pause``."""
        check_request_ids(request_id)
        self._about(Resume(request_id))

    def _about(self, event: Cancel | Pause | Resume) -> None:
        if not self._held.about(event):
            self._outbox.put(event)

    def reset_prefix_cache(self) -> None:
        """Later requests find no KV and no recurrent state that was computed before."""
        self._outbox.put(ResetPrefixCache())

    @property
    def agreements(self) -> tuple[tuple[int, ...], float]:
        """Landed steps by how long their events took to be agreed, in the buckets of AGREEMENT_BOUNDS; the seconds."""
        return tuple(self.observe.agreements), self.observe.agreement_ns / 1e9

    @property
    def occupancy(self) -> Occupancy:
        """How full this rank's group is after the latest turn. Blocks that only cached prefixes hold are not in use."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        waiting, idle = scheduler.waiting + len(self._held), scheduler.waiting + scheduler.parked
        return Occupancy(scheduler.unfinished - idle, waiting, pool.count - pool.free_count, pool.count)

    def silent_ranks(self, seconds: float) -> tuple[int, ...]:
        """Ranks that the watchdog has received nothing from for longer; none in a world of one. From any thread."""
        return () if self._watchdog is None else self._watchdog.silent_ranks(seconds)

    def call_on_verdict(self, callback: Callable[[str], object]) -> bool:
        """Have ``callback`` called with the reason when the watchdog ends the job, before the process ends, whatever
        the engine's block raises. False without a watchdog, which never calls it."""
        if self._watchdog is None:
            return False
        self._watchdog.on_verdict = callback
        return True

    @property
    def counters(self) -> Mapping[str, int | float]:
        """Everything counted so far, by name; a labelled counter is ``name{label}``."""
        counted = engine_counters(self.scheduler, self.executor, self._router, self._late_counters)
        return counted | {"grammar_wait_seconds": self._held.waited}
