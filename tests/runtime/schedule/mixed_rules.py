"""What every plan with mixed steps keeps, checked plan by plan with nothing of the planner's own arithmetic.

Knows: the promises of planner.py, budget.py and shares.py. Does not know: how they are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runtime.schedule.config import MixedSteps
from runtime.schedule.plan import StepKind, StepPlan
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.sequence import NOT_WAITING, SequenceState
from runtime.schedule.states import State


class BrokenRule(AssertionError):
    """A plan kept a decode row waiting, went beyond its budget, left a bucket unfilled, or forgot the first in line."""


class MixedRules:
    """``before()`` and ``after(plan)`` around each plan of ``scheduler``, whose ``config.mixed`` is set."""

    def __init__(self, scheduler: Scheduler) -> None:
        assert scheduler.config.mixed is not None
        self._scheduler = scheduler
        self._mixed: MixedSteps = scheduler.config.mixed
        self._waited = False  # rows that decode waited for the step before
        self._planned: dict[int, int] = {}  # by id, before the plan
        self._waiting: list[int] = []  # tokens that each of those in the queue is to compute
        self._in_line: set[int] = set()  # who they are
        self._scoring: set[int] = set()
        self._left: dict[tuple[int, int], int] = {}  # by slot and epoch: prompt tokens to be prefilled
        self._sits_out: set[int] = set()  # slots of requests with a grammar, of which a step is in flight

    def before(self) -> None:
        sequences = self._scheduler.ledger.sequences
        self._planned = {request_id: sequence.planned_tokens for request_id, sequence in sequences.items()}
        waiting = [s for s in sequences.values() if s.state is State.WAITING]
        self._waiting = [self._to_compute(sequence) for sequence in waiting]
        self._in_line = {sequence.request.request_id for sequence in waiting}
        self._scoring = {request_id for request_id, sequence in sequences.items() if sequence.scoring}
        landed_after = self._scheduler.chain.landed_after
        constrained = [s for s in sequences.values() if s.constrained and s.slot]
        self._sits_out = {s.slot for s in constrained if not landed_after(s.last_step)}
        prefilling = self._scheduler.ledger.by_state[State.PREFILL].values()
        self._left = {(s.slot, s.epoch): s.prefill_target - s.prefilled for s in prefilling}

    def after(self, plan: StepPlan | None) -> None:
        ledger = self._scheduler.ledger
        decoding = {s.slot for s in ledger.by_state[State.DECODE].values()} - self._sits_out
        if plan is None:
            self._waited = False
            waits_for_pages = ledger.windows and ledger.chain.real  # of a window, which chunks in flight hold
            writers = (_waits_for_a_writer(s) for s in ledger.by_state[State.PREFILL].values())
            if decoding or not (waits_for_pages or all(writers)):
                raise BrokenRule(f"slots {decoding} decode, others prefill, and nothing runs")
            return
        by_slot = {s.slot: s for s in ledger.sequences.values() if s.slot and s.state is not State.EVICTING}
        rows = [by_slot[slot] for slot in plan.slots[: plan.decode_rows]]
        cut = {by_slot[chunk.slot]: len(chunk.token_ids) for chunk in plan.chunks}
        begun = {*cut, *rows, *(by_slot[fork.slot] for fork in plan.forks)}
        waiting = [by_slot[slot] for slot in decoding if by_slot[slot] not in begun]
        scored = [self._scores(sequence) for sequence in cut]
        if waiting and (self._waited or plan.kind is not StepKind.PREFILL or not all(scored)):
            raise BrokenRule(f"step {plan.step}: slots {[s.slot for s in waiting]} decode, and wait: {plan}")
        if rows and any(scored):
            raise BrokenRule(f"step {plan.step}: prompt tokens are scored beside decode rows: {plan}")
        self._waited = bool(waiting)
        self._check_window(plan, rows)
        if cut and not ledger.windows:  # whose pages may cut a chunk short
            self._check_shares(plan, rows or waiting, cut)

    def _scores(self, sequence: SequenceState) -> bool:
        return sequence.request.request_id in self._scoring

    def _check_shares(self, plan: StepPlan, rows: list[SequenceState], cut: dict[SequenceState, int]) -> None:
        """``rows`` decode beside the step, or wait for it."""
        prefills = {**dict.fromkeys(self._scheduler.ledger.by_state[State.PREFILL].values(), 0), **cut}
        given, mosts = sum(cut.values()), self._mosts(plan, rows, prefills)
        if not mosts:
            raise BrokenRule(f"step {plan.step} has chunks, the next one whose number {self._mixed.stride} divides has")
        most = max(mosts)
        wave = self._wave(plan)
        room = self._scheduler.config.limits.max_prefill_tokens
        if self._mixed.buckets:
            room = min(room, self._mixed.buckets[-1] - plan.decode_rows * plan.row_tokens)
        if given > max(most, min(most + wave // 4, room)):
            raise BrokenRule(f"step {plan.step} has {given} tokens of prompts, where {most} are allowed: {plan}")
        going = [s for s in prefills if not _waits_for_a_writer(s)]
        kind = [s for s in going if not rows or self._scores(s) is (plan.kind is StepKind.PREFILL)]
        stopped = {sequence for sequence in cut if _stopped(sequence)}
        wanting = [s for s in kind if s.state is State.PREFILL and s not in stopped]
        if wanting and plan.kind is StepKind.MIXED and self._mixed.costly_prefix:
            total = plan.decode_rows * plan.row_tokens + given
            if (
                self._mixed.buckets
                and total not in self._mixed.buckets
                and given < self._scheduler.config.limits.max_prefill_tokens
                and not wave
            ):
                raise BrokenRule(f"step {plan.step} has {total} tokens, which is no bucket: {plan}")
        elif wanting and given not in mosts:
            raise BrokenRule(f"step {plan.step} has {given} tokens of prompts; {most} would fill it: {plan}")
        first = min(kind, key=lambda s: s.order)
        shared_out = given - wave // 4  # what fills a wave of long chunks comes on top, and is nobody's half
        if first in wanting and cut.get(first, 0) < min(-(-shared_out // 2), wave or given):
            raise BrokenRule(f"step {plan.step}: the first in line gets {cut.get(first)} of {given} tokens: {plan}")

    def _wave(self, plan: StepPlan) -> int:
        """Tokens of a wave of attention, where chunks may be cut to such; else none."""
        mixed = self._mixed
        starts = [chunk.start for chunk in plan.chunks]
        applies = plan.kind is StepKind.MIXED and mixed.costly_prefix and max(starts) >= mixed.long_prefix
        return mixed.tile * mixed.wave if applies else 0

    def _to_compute(self, sequence: SequenceState) -> int:
        return 0 if sequence.expects_fork else min(sequence.landed_tokens, self._mixed.long_prompt)

    def _mosts(self, plan: StepPlan, rows: list[SequenceState], prefills: dict[SequenceState, int]) -> set[int]:
        """What ``_most`` says with those who came to wait during the plan and without: rows that lost their blocks to
        others before tokens were counted, or after. Nothing where few wait and it is no step for their chunks."""
        waiting = self._scheduler.ledger.by_state[State.WAITING].items()
        came = [self._to_compute(sequence) for request_id, sequence in waiting if request_id not in self._in_line]
        either = [(known, self._stride(rows, prefills, known)) for known in (self._waiting, self._waiting + came)]
        return {self._most(plan, rows, prefills, known, stride) for known, stride in either if plan.step % stride == 0}

    def _stride(self, rows: list[SequenceState], prefills: dict[SequenceState, int], waiting: list[int]) -> int:
        """Of so many steps one has chunks."""
        if not rows:
            return 1
        all_of_it = self._waiting_tokens(rows, prefills, waiting, self._scheduler.config.limits.max_model_len)
        return self._mixed.stride if all_of_it <= self._window_room(rows) - len(rows) else 1

    def _most(
        self,
        plan: StepPlan,
        rows: list[SequenceState],
        prefills: dict[SequenceState, int],
        waiting: list[int],
        stride: int,
    ) -> int:
        """Tokens of chunks where enough wait, found by looking at every total that a step may have."""
        config, mixed = self._scheduler.config, self._mixed
        planner = self._scheduler.planner
        if not rows:
            fitting = [total for total in mixed.buckets or (planner.room,) if total <= planner.room]
            return min(config.limits.max_prefill_tokens, max(fitting, default=min(mixed.buckets, default=1)))
        if plan.decode_rows:
            width = plan.width
        elif planner.speculation is None:  # of rows beside chunks, if there were any
            width = planner._width()
        else:
            width = planner.speculation.mixed_width(len(rows), self._window_room(rows), self._most_windows)
        decoding = len(rows) * config.limits.row_tokens(width)
        budget = decoding + config.limits.max_prefill_tokens
        budget = min(budget, self._tabled(rows, budget), planner.room)
        totals_there_are: Sequence[int] = mixed.buckets or range(1, budget + decoding + 2)
        if mixed.calm:
            calm = dict(mixed.calm)
            tokens = self._waiting_tokens(rows, prefills, waiting, mixed.long_prompt)
            wanted = decoding + stride * max(calm[covering(calm, len(rows))], -(-tokens // mixed.drain_steps))
            enough = [total for total in totals_there_are if total >= wanted]
            budget = min([budget, *enough[:1]])
        least = min(total for total in totals_there_are if total > decoding)
        total = max([least, *(total for total in totals_there_are if total <= budget)])
        return min(total - decoding, config.limits.max_prefill_tokens)

    def _tabled(self, rows: list[SequenceState], otherwise: int) -> int:
        """Tokens that the table of budgets allows beside ``rows``."""
        if not self._mixed.budgets:
            return otherwise
        row_limit = covering((entry[0] for entry in self._mixed.budgets), len(rows))
        totals = {kv_tokens: total for limit, kv_tokens, total in self._mixed.budgets if limit == row_limit}
        kv_tokens = sum(self._planned[row.request.request_id] for row in rows)
        return totals[covering(totals, kv_tokens)]

    def _window_room(self, rows: list[SequenceState]) -> int:
        """Tokens of which windows may take their share."""
        most = len(rows) + self._scheduler.config.limits.max_prefill_tokens
        return min(most, self._tabled(rows, most))

    @property
    def _most_windows(self) -> int | None:
        """That windows may have, so that the largest captured step has room for a prompt, too."""
        return max(self._mixed.buckets) - 1 if self._mixed.buckets else None

    def _check_window(self, plan: StepPlan, rows: list[SequenceState]) -> None:
        """A window beside chunks takes its share of the step's tokens at most, and has no more rows than any window."""
        policy = self._scheduler.config.speculation
        if policy is None or plan.kind is not StepKind.MIXED or plan.width == 1:
            return
        taken, most = len(rows) * plan.row_tokens, self._most_windows
        share = policy.mixed_percent * self._window_room(rows)
        too_many = policy.most_rows is not None and len(rows) > policy.most_rows
        if 100 * taken > share or (most is not None and taken > most) or too_many:
            raise BrokenRule(
                f"step {plan.step} has {len(rows)} rows of {plan.row_tokens} tokens beside chunks: {policy}"
            )

    def _waiting_tokens(
        self, rows: list[SequenceState], prefills: Iterable[SequenceState], known: list[int], most: int
    ) -> int:
        """As it was when the plan was begun, but for ``known``, who wait: nobody was seated for it, nothing cut."""
        before = [s for s in prefills if (s.slot, s.epoch) in self._left]
        tokens = sum(min(self._left[s.slot, s.epoch], most) for s in before)
        decoding = self._scheduler.ledger.by_state[State.DECODE].values()
        idle = sum(s.slot in self._sits_out and (s.slot, s.epoch) not in self._left for s in decoding)
        free = self._scheduler.config.limits.rows - len(before) - len(rows) - idle
        return tokens + (sum(known) * min(free, len(known)) // len(known) if known else 0)


def _waits_for_a_writer(sequence: SequenceState) -> bool:
    """It gets nothing of the step: another prompt is writing its next block."""
    return sequence.state is State.PREFILL and sequence.waits_since != NOT_WAITING


def _stopped(sequence: SequenceState) -> bool:
    """Its chunk ends where recurrent state is kept: what is left of its share goes to the others."""
    return sequence.stop_at == sequence.prefilled > 0


def covering(limits: Iterable[int], number: int) -> int:
    """The first limit that covers ``number``, or the last."""
    ascending = sorted(set(limits))
    return next((limit for limit in ascending if number <= limit), ascending[-1])
