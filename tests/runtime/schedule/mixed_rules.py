"""What every plan with mixed steps keeps, checked plan by plan with nothing of the planner's own arithmetic.

Knows: the promises of planner.py and shares.py. Does not know: how they are kept.
"""

from __future__ import annotations

from runtime.schedule.config import MixedSteps, SchedulerConfig
from runtime.schedule.plan import StepKind, StepPlan
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.sequence import SequenceState
from runtime.schedule.states import State


class BrokenRule(AssertionError):
    """A plan kept a decode row waiting, went beyond its budget, left a bucket unfilled, or forgot the first in line."""


def most_tokens(config: SchedulerConfig, mixed: MixedSteps, rows: int, kv_tokens: int, width: int) -> int:
    """Tokens that a mixed step has where enough prompt tokens wait, found by looking at every total there is."""
    budget = rows * width + config.max_prefill_tokens
    row_limits = sorted({entry[0] for entry in mixed.budgets})
    if row_limits:
        row_limit = next((limit for limit in row_limits if rows <= limit), row_limits[-1])
        cells = [entry for entry in mixed.budgets if entry[0] == row_limit]
        budget = min(budget, next((total for _, limit, total in cells if kv_tokens <= limit), cells[-1][2]))
    totals = mixed.buckets or range(1, budget + rows * width + 2)
    least = min(total for total in totals if total > rows * width)
    most = max([least, *(total for total in totals if total <= budget)])
    return min(most, rows * width + config.max_prefill_tokens)


class MixedRules:
    """``before()`` and ``after(plan)`` around each plan of ``scheduler``, whose ``config.mixed`` is set."""

    def __init__(self, scheduler: Scheduler) -> None:
        assert scheduler.config.mixed is not None
        self._scheduler = scheduler
        self._mixed = scheduler.config.mixed
        self._waited = False  # rows that decode waited for the step before
        self._decoding: dict[int, int] = {}  # slot -> planned tokens
        self._left: dict[int, int] = {}  # by id: prompt tokens before the plan
        self._scoring: set[int] = set()

    def before(self) -> None:
        by_state, sequences = self._scheduler.resources.by_state, self._scheduler.resources.sequences.values()
        self._decoding = {s.slot: s.planned_tokens for s in by_state[State.DECODE].values()}
        self._planned = {s.request.request_id: s.planned_tokens for s in sequences}
        self._scoring = {s.request.request_id for s in sequences if s.scoring}
        self._left = {s.request.request_id: s.prefill_target - s.prefilled for s in by_state[State.PREFILL].values()}

    def after(self, plan: StepPlan | None) -> None:
        resources = self._scheduler.resources
        decoding = {s.slot for s in resources.by_state[State.DECODE].values()}
        if plan is None:
            self._waited = False
            if decoding:
                raise BrokenRule("rows decode, and nothing runs")
            return
        by_slot = {s.slot: s for s in resources.sequences.values() if s.slot and s.state is not State.EVICTING}
        chunk_slots = {chunk.slot for chunk in plan.chunks}
        waiting = decoding - chunk_slots - set(plan.slots[: plan.decode_rows])
        scored = bool(plan.chunks) and all(by_slot[slot].request.request_id in self._scoring for slot in chunk_slots)
        if waiting and (self._waited or not scored or plan.kind is not StepKind.PREFILL):
            raise BrokenRule(f"step {plan.step}: slots {waiting} decode, and wait: {plan}")
        self._waited = bool(waiting)
        rows = [by_slot[slot] for slot in plan.slots[: plan.decode_rows]]
        if any(row.request.request_id in self._scoring for row in map(by_slot.__getitem__, chunk_slots)) and rows:
            raise BrokenRule(f"step {plan.step}: prompt tokens are scored beside decode rows: {plan}")
        kept_waiting = [by_slot[slot] for slot in waiting]
        self._check_tokens(plan, rows or kept_waiting, by_slot)

    def _check_tokens(self, plan: StepPlan, rows: list[SequenceState], by_slot: dict[int, SequenceState]) -> None:
        config, given = self._scheduler.config, plan.prefill_tokens
        if given > config.max_prefill_tokens:
            raise BrokenRule(f"step {plan.step} has {given} tokens of prompts")
        if not plan.chunks:
            return
        most = config.max_prefill_tokens
        width = plan.width if plan.decode_rows else self._scheduler.planner._width()
        if rows:
            kv_tokens = sum(self._planned[row.request.request_id] for row in rows)
            most = most_tokens(config, self._mixed, len(rows), kv_tokens, width) - len(rows) * width
        if given > most:
            raise BrokenRule(f"step {plan.step} has {given} tokens of prompts, where {most} are in the budget: {plan}")
        ours = plan.kind is StepKind.PREFILL and bool(rows)  # scored prompts only
        everyone = not rows
        prefills = [
            s
            for s in self._scheduler.resources.sequences.values()
            if (s.state is State.PREFILL or s in [by_slot[chunk.slot] for chunk in plan.chunks])
            and (everyone or (s.request.request_id in self._scoring) is ours)
        ]
        wanting = [s for s in prefills if s.state is State.PREFILL]
        shares = {by_slot[chunk.slot].request.request_id: len(chunk.token_ids) for chunk in plan.chunks}
        first = min(prefills, key=lambda s: s.order)
        got = shares.get(first.request.request_id, 0)
        costly = self._mixed.costly_prefix if plan.kind is StepKind.MIXED else 0
        if wanting and not costly and given != most:
            raise BrokenRule(f"step {plan.step} has {given} tokens of prompts; {most} would fill it: {plan}")
        half = 1 if costly else -(-most // 2)
        if got < half and first in wanting:
            raise BrokenRule(f"step {plan.step}: the first in line gets {got} of {most} tokens: {plan}")
