"""The planner over a ledger, without events or results: what it plans, and that it launches nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.schedule import admission
from runtime.schedule.chain import Flight
from runtime.schedule.config import MixedSteps, SchedulerConfig
from runtime.schedule.ledger import Ledger
from runtime.schedule.plan import StepKind, StepPlan
from runtime.schedule.planner import Planner
from runtime.schedule.request import Request, SamplingParams
from runtime.schedule.states import State
from tests.runtime.schedule.configs import config_with
from tests.runtime.schedule.driver import prompt_of

DEEP = config_with(depth=8)


def planner_of(config: SchedulerConfig, *, requests: int = 1, kind: type[Planner] = Planner) -> Planner:
    ledger = Ledger(config)
    for request_id in range(requests):
        assert (
            admission.arrive(ledger, Request(request_id, prompt_of(3, request_id), SamplingParams(max_tokens=40))) == ()
        )
    return kind(ledger)


def launch_next(planner: Planner) -> StepPlan:
    planned = planner.plan()
    assert planned is not None
    plan, rows = planned
    planner.ledger.chain.launch(Flight(plan.step, plan, rows, planner.ledger.slots.version))
    return plan


def test_a_plan_comes_with_the_sequences_of_its_rows_and_is_not_launched() -> None:
    planner = planner_of(DEEP, requests=2)
    planned = planner.plan()
    assert planned is not None
    plan, rows = planned
    assert (plan.kind, plan.step, plan.width, plan.slots) == (StepKind.PREFILL, 0, 1, (1, 2))
    assert [sequence.slot for sequence in rows] == [1, 2]
    assert (len(planner.ledger.chain), planner.ledger.chain.step) == (0, 0)


def test_nothing_to_plan() -> None:
    planner = planner_of(DEEP, requests=0)
    assert planner.plan() is None
    assert planner.why_void() == "start"


def test_what_is_paused_is_not_planned() -> None:
    planner = planner_of(DEEP)
    planner.ledger.pause(planner.ledger.sequences[0])
    assert planner.plan() is None
    assert planner.why_void() == "paused"


@pytest.mark.parametrize("widths", [(1,), (2,), (1, 4), (1, 8, 3), (32, 1)], ids=str)
def test_decode_steps_take_their_widths_in_turn_and_prefills_have_one(widths: tuple[int, ...]) -> None:
    planner = planner_of(config_with(DEEP, widths=widths, blocks=200))
    ledger = planner.ledger
    assert launch_next(planner).width == 1
    sequence = ledger.sequences[0]
    assert (sequence.planned_tokens, sequence.uncertain_tokens) == (4, 0)
    seen = [launch_next(planner).width for _ in range(2)]
    admission.arrive(ledger, Request(1, prompt_of(3, 1), SamplingParams(max_tokens=40)))
    assert launch_next(planner).kind is StepKind.PREFILL, "which takes no turn"
    seen += [launch_next(planner).width for _ in range(5)]
    assert seen == [widths[n % len(widths)] for n in range(7)]
    assert sequence.planned_tokens == 3 + 1 + sum(seen)
    assert sequence.planned_tokens - sequence.uncertain_tokens == 3 + 1 + 7, "at least a token each"
    ledger.check()


def test_the_width_is_one_method_that_a_policy_replaces() -> None:
    class NarrowWhenBusy(Planner):
        def _width(self) -> int:
            return 1 if len(self._decoding) > 1 else self.limits.width

    planner = planner_of(config_with(DEEP, widths=(4,)), kind=NarrowWhenBusy)
    assert [launch_next(planner).width for _ in range(3)] == [1, 4, 4]
    admission.arrive(planner.ledger, Request(1, prompt_of(3, 1), SamplingParams(max_tokens=40)))
    assert [launch_next(planner).width for _ in range(3)] == [1, 1, 1]
    planner.ledger.check()


def test_widths_enter_the_digest() -> None:
    """Two ranks whose plans differ in nothing but a width disagree."""

    def digest(*widths: int) -> int:
        planner = planner_of(config_with(DEEP, widths=(*widths, 4), blocks=200))
        for _ in range(3):
            launch_next(planner)
        return planner.ledger.digest.value

    assert len({digest(1, 1), digest(1, 2), digest(2, 1), digest(2, 2)}) == 4
    assert digest(3, 1, 2) == digest(3, 1, 3), "the third was not planned yet"


def test_depth_horizon_and_budgets_enter_the_digest() -> None:
    """Ranks that measured or were given other ones disagree before they plan anything."""
    mixed = MixedSteps(buckets=(16, 32), budgets=((4, 64, 32),))
    configs = [
        config_with(depth=1),
        config_with(depth=2),
        replace(config_with(depth=1), horizon=1),
        config_with(depth=1, mixed=mixed),
        config_with(depth=1, mixed=replace(mixed, budgets=((4, 64, 16),))),
    ]
    assert len({Ledger(config).digest.value for config in configs}) == len(configs)
    assert Ledger(configs[0]).digest.value == Ledger(config_with(depth=1)).digest.value


def test_a_row_drains_when_the_steps_in_flight_are_surely_enough() -> None:
    """Seven more tokens after the prompt's: however wide the steps are, it takes seven to be sure."""
    for widths in ((1,), (4,), (1, 4), (8, 1)):
        planner = planner_of(config_with(DEEP, depth=20, widths=widths, blocks=200), requests=0)
        admission.arrive(planner.ledger, Request(0, prompt_of(3), SamplingParams(max_tokens=8)))
        plans = [launch_next(planner) for _ in range(8)]
        assert [plan.kind for plan in plans] == [StepKind.PREFILL] + [StepKind.DECODE] * 7
        assert planner.plan() is None
        assert planner.ledger.sequences[0].state is State.DRAINING
