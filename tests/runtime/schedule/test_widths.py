"""Steps of several tokens a row, whose width changes from step to step: what is counted, reserved, given back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest

from runtime.schedule.config import SchedulerConfig
from runtime.schedule.plan import Admit, Finished, Pause, Resume, StepKind, StepOutput, StepPlan, StepResult
from runtime.schedule.request import FinishReason, Request, SamplingParams
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.sequence import SequenceState
from runtime.schedule.states import State
from tests.runtime.schedule.configs import config_with
from tests.runtime.schedule.driver import Driver, ending_by_stop, prompt_of

PATTERNS = [(1,), (2,), (8,), (1, 4), (1, 8, 3), (32, 1)]


class Scripted:
    """One request of 3 prompt tokens over a device that gives what a test says, step by step."""

    def __init__(self, config: SchedulerConfig, max_tokens: int) -> None:
        self.scheduler = Scheduler(config)
        self.scheduler.submit(Admit(Request(0, prompt_of(3), SamplingParams(max_tokens=max_tokens))))
        self.sequence: SequenceState = self.scheduler.ledger.sequences[0]
        self.plans: deque[StepPlan | None] = deque()
        self.finished: tuple[Finished, ...] = ()

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        self.plans.append(plan)
        self.scheduler.check()
        return plan

    def land(self, *tokens: int, finish: FinishReason = FinishReason.NONE) -> StepOutput:
        """The oldest step gives these tokens."""
        plan, step = self.plans.popleft(), self.scheduler.step - len(self.plans) - 1
        result = None
        if plan is not None:
            assert len(tokens) <= plan.width
            columns = [*tokens, *[-1] * (plan.width - len(tokens))]
            result = StepResult(step, columns, [len(tokens)], [finish])
        output = self.scheduler.land(step, result)
        self.finished += output.finished
        self.scheduler.check()
        return output

    def state(self) -> State:
        return self.sequence.state

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.sequence.landed_tokens, self.sequence.planned_tokens, self.sequence.uncertain_tokens


def widths_of(plans: Sequence[StepPlan | None]) -> list[int]:
    return [0 if plan is None else plan.width for plan in plans]


# ---- the two bounds ----


def test_planned_tokens_are_those_landed_and_the_widths_in_flight() -> None:
    engine = Scripted(config_with(depth=3, widths=(1, 4)), max_tokens=20)
    assert widths_of([engine.plan() for _ in range(4)]) == [1, 1, 4, 1]
    assert engine.counts == (3, 3 + 1 + 1 + 4 + 1, 3)
    engine.land(5)
    assert engine.counts == (4, 4 + 1 + 4 + 1, 3)
    engine.plan()
    engine.land(6)
    assert engine.counts == (5, 5 + 4 + 1 + 4, 3 + 3)
    engine.plan()
    output = engine.land(7, 8)
    assert engine.counts == (7, 7 + 1 + 4 + 1, 3), "two of four"
    assert (output.width, output.tokens, output.counts) == (4, [7, 8, -1, -1], [2])
    assert engine.sequence.generated == (5, 6, 7, 8)


@pytest.mark.parametrize("width", [1, 4])
def test_a_live_row_without_a_token_gives_its_planned_tokens_back_and_goes_on(width: int) -> None:
    engine = Scripted(config_with(depth=1, widths=(width,)), max_tokens=20)
    engine.plan()
    engine.plan()
    engine.land(5)
    assert engine.counts == (4, 4 + width, width - 1)
    engine.plan()
    engine.land()
    assert engine.counts == (4, 4 + width, width - 1), "the step behind it"
    assert engine.state() is State.DECODE
    engine.plan()
    engine.land(6)
    assert engine.sequence.generated == (5, 6)


@pytest.mark.parametrize("widths", [(1,), (4,), (1, 4)], ids=str)
def test_a_draining_row_that_falls_short_becomes_a_row_again(widths: tuple[int, ...]) -> None:
    """Three steps in flight were surely enough for three tokens; one of them gives none."""
    engine = Scripted(config_with(depth=2, widths=widths), max_tokens=4)
    engine.plan()
    engine.plan()
    engine.plan()
    engine.land(5)
    engine.plan()
    engine.land()
    assert engine.state() is State.DECODE
    assert engine.plan() is not None
    engine.land(6)
    assert engine.plan() is None
    assert engine.state() is State.DRAINING
    engine.land()
    assert engine.state() is State.STALLED
    plan = engine.plan()
    assert plan is not None
    assert plan.kind is StepKind.DECODE
    engine.land(7)
    assert engine.plan() is None
    engine.land()  # the void one
    engine.plan()
    engine.land(8, finish=FinishReason.LENGTH)
    assert [ended.token_ids for ended in engine.finished] == [(5, 6, 7, 8)]
    assert engine.finished[0].reason is FinishReason.LENGTH


def test_a_draining_row_that_falls_short_while_it_is_to_pause_pauses() -> None:
    engine = Scripted(config_with(depth=1), max_tokens=3)
    engine.plan()
    engine.plan()
    engine.land(5)
    engine.plan()
    engine.land(6)
    assert engine.plan() is None
    assert engine.state() is State.DRAINING
    engine.scheduler.submit(Pause(0))
    engine.land()
    assert engine.state() is State.PAUSED
    assert engine.plan() is None
    engine.land()
    engine.scheduler.submit(Resume(0))
    assert engine.plan() is not None
    engine.land()
    assert engine.plan() is None
    engine.land(7, finish=FinishReason.LENGTH)
    assert [ended.token_ids for ended in engine.finished] == [(5, 6, 7)]


def test_a_row_that_stops_in_the_middle_of_a_wide_step_keeps_the_tokens_before() -> None:
    engine = Scripted(config_with(depth=1, widths=(8,)), max_tokens=20)
    engine.plan()
    engine.plan()
    engine.land(5)
    engine.plan()
    engine.land(6, 7, 8, finish=FinishReason.STOP)
    assert [(ended.token_ids, ended.reason) for ended in engine.finished] == [((5, 6, 7, 8), FinishReason.STOP)]
    engine.plan()
    engine.land()
    assert engine.scheduler.counters.ghost_rows == 1


# ---- blocks ----


@pytest.mark.parametrize("depth", [0, 2, 4])
@pytest.mark.parametrize("widths", PATTERNS, ids=str)
def test_blocks_are_reserved_for_the_largest_width_of_any_step(widths: tuple[int, ...], depth: int) -> None:
    """The driver checks at every step that rows have room for their drafts, however far they have come."""
    engine = Driver(depth=depth, widths=widths, block_size=2, blocks=300, max_model_len=400)
    engine.admit(0, prompt=5, max_tokens=380)
    engine.turn()
    assert len(engine.sequence(0).blocks) == -(-(5 + (depth + 1) * max(widths)) // 2)
    engine.finish()


@pytest.mark.parametrize("widths", PATTERNS, ids=str)
def test_the_last_row_of_the_longest_request_stays_within_the_block_table(widths: tuple[int, ...]) -> None:
    """The fake device has as many entries as the executor's table, and refuses a block beyond them."""
    engine = Driver(depth=2, widths=widths, block_size=4, max_model_len=30, blocks=40)
    engine.admit(0, prompt=3, max_tokens=100)
    held = 0
    while not engine.finished:
        held = max(held, len(engine.sequence(0).blocks))
        engine.turn()
    assert held == -(-(30 - 2 + max(widths)) // 4)
    engine.finish()
    assert engine.reason(0) is FinishReason.LENGTH


def test_a_request_whose_drafts_do_not_fit_the_pool_is_refused() -> None:
    engine = Driver(widths=(1, 32), blocks=11, block_size=4)
    engine.admit(0, prompt=10, max_tokens=5)
    assert engine.reason(0) is FinishReason.REJECTED
    assert engine.finished[0].detail == "10 prompt + 5 new tokens need 12 blocks of 4, the pool has 11"


# ---- whole lives ----


@pytest.mark.parametrize("depth", range(5))
@pytest.mark.parametrize("widths", PATTERNS, ids=str)
def test_a_batch_gets_the_same_tokens_whatever_the_widths(widths: tuple[int, ...], depth: int) -> None:
    """finish() compares with what each request gets alone. Two of five end by a stop id, in the middle of a step."""
    engine = Driver(depth=depth, widths=widths, block_size=2, blocks=250)
    for request_id in range(5):
        prompt, stop = ending_by_stop(request_id, length=5, after=11)
        engine.admit(request_id, prompt, max_tokens=7 + 4 * request_id, stop=stop if request_id > 2 else None)
    engine.finish()
    reasons = [engine.reason(request_id) for request_id in range(5)]
    assert reasons == [FinishReason.LENGTH] * 3 + [FinishReason.STOP] * 2
    if depth:
        assert engine.scheduler.counters.chain_breaks == {"start": 1}
