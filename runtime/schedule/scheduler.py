"""The scheduler: three verbs over a ledger and a planner.

Knows: what an event and a landed result change. planner.py makes the steps, ledger.py keeps what requests hold.
Does not know: devices, time, other ranks.
It is a pure state machine: the same events and results in the same order give the same plans on every rank (law 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from runtime.schedule import admission, prefix
from runtime.schedule.chain import Flight
from runtime.schedule.config import SchedulerConfig
from runtime.schedule.ledger import Ledger
from runtime.schedule.plan import (
    Admit,
    Branch,
    Cancel,
    Compile,
    Continue,
    Event,
    Extend,
    Finished,
    Notice,
    Pause,
    ResetPrefixCache,
    StepKind,
    StepOutput,
    StepPlan,
    StepResult,
    Tabled,
)
from runtime.schedule.planner import Planner
from runtime.schedule.request import FinishReason
from runtime.schedule.sequence import SequenceState
from runtime.schedule.sessions import Sessions
from runtime.schedule.states import State

__all__ = ["Scheduler"]

_ERROR = int(FinishReason.ERROR)


class Scheduler:
    """``submit(event)``, ``plan()``, ``land(step, result)``; see chain.py for the rules they keep."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.ledger = Ledger(config)
        self.planner = Planner(self.ledger)
        self.sessions = Sessions(self.ledger)
        self.pool = self.ledger.pool
        self.slots = self.ledger.slots
        self.chain = self.ledger.chain
        self.digest = self.ledger.digest
        self.counters = self.ledger.counters
        self.news = self.ledger.news  # for ``take_notices``
        self._why_void = "start"  # of the latest void step
        self._rows_reported: tuple[SequenceState, ...] = ()  # of the latest plain output, and their request ids
        self._ids_reported: list[int] = []
        self._steady: SteadyRows | None = None  # of the latest landing, where the one before had the same rows

    @property
    def step(self) -> int:
        """The number that the next plan will have."""
        return self.chain.step

    @property
    def unfinished(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self.ledger.sequences)

    @property
    def parked(self) -> int:
        """Sessions that wait for a Continue or Extend."""
        return len(self.ledger.by_state[State.PARKED])

    @property
    def waiting(self) -> int:
        """Requests without a slot: those in the queue, and answers that are joining others."""
        return self.ledger.waiting + len(self.ledger.by_state[State.JOINING])

    def check(self) -> None:
        """Raise AccountingError unless all that requests hold is accounted for. For tests and debugging."""
        self.ledger.check()

    def submit(self, event: Event) -> tuple[Finished, ...]:
        """Apply one agreed event; returns the requests that it ended at once."""
        if isinstance(event, Admit):
            return admission.arrive(self.ledger, event.request, event.quantum, keep=event.keep)
        if isinstance(event, Continue | Extend | Branch):
            self.sessions.submit(event)
            return ()
        if isinstance(event, ResetPrefixCache):
            prefix.reset(self.ledger)
            return ()
        if isinstance(event, Tabled):
            self.digest.fold(self.step, "table", (crc32(event.key), crc32(event.table)))
            self.ledger.tables.add(event.key)
            return ()
        if isinstance(event, Compile):
            self.digest.fold(
                self.step, "grammar", (event.number, crc32(event.grammar.encode()), event.regular, *event.dropped)
            )
            return ()
        sequence = self.ledger.sequences.get(event.request_id)
        self.digest.fold(self.step, type(event).__name__, (event.request_id, sequence is not None))
        if sequence is None:
            return ()
        if isinstance(event, Cancel):
            self.counters.cancels += 1
            return (self.ledger.end(sequence, event.reason),)
        if isinstance(event, Pause):
            self.ledger.pause(sequence)
        else:
            self.ledger.resume(sequence)
        return ()

    @property
    def room_for_rows(self) -> int:
        """Tokens that a step may have because of the decode rows after the latest plan (planner.py)."""
        return self.planner.room_for_rows

    def agreed_room(self, room: int) -> None:
        """The least ``room_for_rows`` of all groups that launch steps together: the next plan keeps to it."""
        if room != self.planner.room:
            self.planner.room = room
            self.digest.fold(self.step, "room", (room,))

    def take_notices(self) -> tuple[tuple[Notice, ...], tuple[Finished, ...]]:
        """Session notifications since the last call, and sessions that were closed for lack of room: all ``news``."""
        closed = tuple([one for one in self.news if isinstance(one, Finished)])
        notices = tuple([one for one in self.news if not isinstance(one, Finished)])
        self.news.clear()
        return notices, closed

    def plan(self) -> StepPlan | None:
        """The next step, or None for a void one (its number is used up and it is landed like the others)."""
        plan, rows = self.planner.plan() or (None, ())
        if plan is not None and plan.chunks:
            prefix.planned(self.ledger, plan, rows)
        self._count(plan)
        self.chain.launch(Flight(self.chain.step, plan, rows, self.slots.version))
        return plan

    def _count(self, plan: StepPlan | None) -> None:
        """Counts the step and why it was not chained, before it joins the chain."""
        counters, chain = self.counters, self.chain
        if plan is None:
            counters.void_steps += 1
            self._why_void = counters.latest_break = self.planner.why_void()
            return
        if plan.kind is StepKind.DECODE:
            counters.decode_steps += 1
        else:
            counters.prefill_tokens += plan.prefill_tokens
            if plan.kind is StepKind.MIXED:
                counters.mixed_steps += 1
                counters.mixed_prompt_tokens += plan.prefill_tokens
            else:
                counters.prefill_steps += 1
        if chain.real:
            counters.chained_steps += 1
            counters.latest_break = None
        else:
            counters.latest_break = reason = "serial" if chain.depth == 0 else self._why_void
            counters.chain_breaks[reason] = counters.chain_breaks.get(reason, 0) + 1

    def land(self, step: int, result: StepResult | None) -> StepOutput:
        """Take the oldest step in flight off the chain and apply its result, which is None exactly for a void step."""
        flight = self.chain.land(step)
        if flight.plan is not None and result is not None:
            output = self._apply(flight, flight.plan, result)
        else:
            output = StepOutput(step)
        if step in self.ledger.fenced:
            self.ledger.landed(step)
            self.sessions.landed(step)
        return output

    # ---- landing ----

    def _apply(self, flight: Flight, plan: StepPlan, result: StepResult) -> StepOutput:
        """Give each live row its tokens, end those that are done, and drop the ghosts."""
        width, tokens, counts = plan.width, result.tokens, result.counts
        wide = width > 1
        self.digest.fold(flight.step, "land", (*tokens, *(counts if wide else ()), *result.finish))
        ends = any(result.finish)
        if ends and _ERROR in result.finish:
            self._distrust_broken(flight, plan, result)
        same_slots = flight.slot_version == self.slots.version
        all_continue = same_slots and not ends and all(counts)
        if all_continue and not wide:
            return self._apply_plain(flight, result)
        self._steady, decode_rows = None, plan.decode_rows
        if all_continue and decode_rows == len(flight.rows):
            return self._apply_windows(flight, width, result)
        rows: list[SequenceState | None] = list(flight.rows)
        ghosts = [] if same_slots else self._drop_ghosts(rows, plan, result)
        done: list[Finished] = []
        gains: list[int] = []  # of live rows
        last_gains: list[int] = []  # of those that ended
        barren: list[tuple[SequenceState, int]] = []
        for i in range(len(rows)) if wide else self._apply_to_plain_rows(flight, ghosts, result):
            sequence, count, code = rows[i], counts[i], result.finish[i]
            if sequence is None:
                continue
            if count == 1:
                sequence.tokens.append(tokens[i * width])
            elif count:
                sequence.tokens.extend(tokens[i * width : i * width + count])
            elif i < decode_rows:
                barren.append((sequence, width))
            elif plan.draws(i):
                barren.append((sequence, 1))
            if wide and i < decode_rows:
                sequence.planned_tokens += count - width
                sequence.uncertain_tokens -= width - 1
                if count:  # a session's row stays a row after the end of its quota, and appends nothing
                    sequence.rounds += 1
                    sequence.accepted += count - 1
                    gains.append(count)
                    if code:
                        last_gains.append(count)
            if code:
                done += self._end_or_park(sequence, FinishReason(code))
            elif len(sequence.tokens) > sequence.publish_at:
                self._gained(sequence, plan, i)
        for sequence, hoped_for in barren:
            self._gained_nothing(sequence, hoped_for)
        if gains:
            self._windows_landed(width, gains, last_gains)
        return StepOutput(
            step=flight.step,
            request_ids=[-1 if s is None else s.request.request_id for s in rows],
            tokens=tokens,
            counts=counts,
            width=width,
            finished=tuple(done),
            logprobs=result.logprobs,
            prompt_logprobs=result.prompt_logprobs,
        )

    def _apply_plain(self, flight: Flight, result: StepResult) -> StepOutput:
        """The same for a step in which every row is live, appended one token and continues, as in most steps."""
        steady = self._steady
        if steady is not None and steady.rows is flight.rows:
            steady.land(result.tokens)
            return self._all_continue(flight, 1, result)
        for sequence, token in zip(flight.rows, result.tokens, strict=True):
            tokens = sequence.tokens
            tokens.append(token)
            if len(tokens) > sequence.publish_at:
                prefix.gained(self.ledger, sequence)
        again = flight.rows is self._rows_reported
        self._steady = SteadyRows(flight.rows, self.ledger) if again else None
        return self._all_continue(flight, 1, result)

    def _apply_to_plain_rows(self, flight: Flight, ghosts: Sequence[int], result: StepResult) -> list[int]:
        """The same for such rows of a step of width 1; returns the indices of the others.

        A mixed step always has a few others: rows with chunks, ghosts, and rows that end.
        """
        rows, tokens, others = flight.rows, result.tokens, set(ghosts)
        if not all(result.counts):
            others.update([row for row, count in enumerate(result.counts) if not count])
        if any(result.finish):
            others.update([row for row, code in enumerate(result.finish) if code])
        in_order, begin = sorted(others), 0
        for end in (*in_order, len(rows)):
            for sequence, token in zip(rows[begin:end], tokens[begin:end], strict=True):
                held = sequence.tokens
                held.append(token)
                if len(held) > sequence.publish_at:
                    prefix.gained(self.ledger, sequence)
            begin = end + 1
        return in_order

    def _apply_windows(self, flight: Flight, width: int, result: StepResult) -> StepOutput:
        """The same for a verification step of ``width``: every row is live, appended some tokens and continues."""
        landed, counts, begin, hoped_for = result.tokens, result.counts, 0, width - 1
        for sequence, count in zip(flight.rows, counts, strict=True):
            tokens = sequence.tokens
            tokens.extend(landed[begin : begin + count])
            begin += width
            sequence.planned_tokens += count - width
            sequence.uncertain_tokens -= hoped_for
            sequence.rounds += 1
            sequence.accepted += count - 1
            if len(tokens) > sequence.publish_at:
                prefix.gained(self.ledger, sequence)
        self._windows_landed(width, counts)
        return self._all_continue(flight, width, result)

    def _windows_landed(self, width: int, gains: Sequence[int], last_gains: Sequence[int] = ()) -> None:
        """Live rows of a verification step appended so many tokens each; ``last_gains``: of those that ended."""
        kept = self.counters.proposed(width, gains, last_gains)
        if self.planner.speculation is not None:
            self.planner.speculation.landed(width, len(gains), kept)

    def _all_continue(self, flight: Flight, width: int, result: StepResult) -> StepOutput:
        """Output of a step whose rows are all live and continue."""
        if flight.rows is not self._rows_reported:
            self._rows_reported = flight.rows
            self._ids_reported = [sequence.request.request_id for sequence in flight.rows]
        return StepOutput(
            step=flight.step,
            request_ids=self._ids_reported,
            tokens=result.tokens,
            counts=result.counts,
            width=width,
            logprobs=result.logprobs,
            prompt_logprobs=result.prompt_logprobs,
        )

    def _end_or_park(self, sequence: SequenceState, reason: FinishReason) -> tuple[Finished, ...]:
        """A request ends. A session at the end of its quota parks, unless its answer is complete and it is not kept."""
        session, detail = sequence.session, ""
        if reason is FinishReason.ERROR:
            known, prompt = sequence.landed_tokens, len(sequence.request.prompt_token_ids)
            after = f"after {known} tokens ({prompt} of them prompt)"
            detail = f"the logits {after} are not finite: no token can be drawn"
            if sequence.request.sampling.grammar:
                detail = f"{after} its grammar and its other limits leave no token, or took too much work; or {detail}"
        elif session is not None:
            complete = reason is FinishReason.STOP or sequence.landed_tokens >= session.budget_length
            if session.keep or not complete:
                self.sessions.over(sequence, session, reason)
                return ()
        return (self.ledger.end(sequence, reason, detail),)

    def _distrust_broken(self, flight: Flight, plan: StepPlan, result: StepResult) -> None:
        """Evicts blocks of rows with non-finite logits, ghosts included, before the rest of the step is applied."""
        for sequence, slot, epoch, code in zip(flight.rows, plan.slots, plan.epochs, result.finish, strict=True):
            if code == _ERROR:
                prefix.distrust(self.ledger, sequence, ghost=self._is_ghost(slot, epoch))

    def _drop_ghosts(self, rows: list[SequenceState | None], plan: StepPlan, result: StepResult) -> list[int]:
        """Sets ghosts to None in ``rows``; returns their indices."""
        epochs, pairs = self.slots.epochs, enumerate(zip(plan.slots, plan.epochs, strict=True))
        ghosts = [i for i, (slot, epoch) in pairs if epochs[slot] != epoch]
        for i in ghosts:
            rows[i] = None
            self.counters.ghost_rows += 1
            self.counters.wasted_tokens += result.counts[i]
        return ghosts

    def _is_ghost(self, slot: int, epoch: int) -> bool:
        return self.slots.epochs[slot] != epoch

    def _gained_nothing(self, sequence: SequenceState, width: int) -> None:
        """A live row of ``width`` appended no token. Steps in flight that were to end it may not be enough now."""
        if width == 1:  # the loop above corrects the counts of wide rows only
            sequence.planned_tokens -= 1
        certain = sequence.planned_tokens - sequence.uncertain_tokens
        over = sequence.session is not None and sequence.session.over is not None
        if sequence.state is State.DRAINING and certain < sequence.max_length and not over:
            self.ledger.fall_short(sequence)

    def _gained(self, sequence: SequenceState, plan: StepPlan, row: int) -> None:
        """Publish the row's full blocks if the step sampled a token for it, as all rows but inner prefill chunks do."""
        if plan.draws(row):
            prefix.gained(self.ledger, sequence)


class SteadyRows:
    """``land`` for consecutive steps of ``rows``, all live and continuing; discarded after any other landing.

    A row whose ``publish_at`` is passed publishes its blocks (prefix.py), in the order of rows. Rows are checked only
    when that may be so: with 256 rows, a check in each step and the look-up of tokens would be half of the landing.
    """

    def __init__(self, rows: tuple[SequenceState, ...], ledger: Ledger) -> None:
        self.rows = rows
        self._ledger = ledger
        self._appends = [sequence.tokens.append for sequence in rows]
        self._landings = 0
        self._due: dict[int, list[int]] = {}  # by landing, the rows to look at then
        for row in range(len(rows)):
            self._look_again(row)

    def land(self, tokens: Sequence[int]) -> None:
        """Append one token to each row."""
        for append, token in zip(self._appends, tokens, strict=True):
            append(token)
        self._landings += 1
        for row in sorted(self._due.pop(self._landings, ())):
            sequence = self.rows[row]
            if len(sequence.tokens) > sequence.publish_at:
                prefix.gained(self._ledger, sequence)
            self._look_again(row)

    def _look_again(self, row: int) -> None:
        sequence = self.rows[row]
        landings = max(1, sequence.publish_at + 1 - len(sequence.tokens))
        self._due.setdefault(self._landings + landings, []).append(row)
