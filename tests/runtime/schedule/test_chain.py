"""The transition table, the order of launched steps, fences and slots."""

from __future__ import annotations

import pytest

from runtime.schedule.chain import Chain, ChainError, Flight, advance
from runtime.schedule.fence import Fence
from runtime.schedule.plan import StepKind, StepPlan, StepResult
from runtime.schedule.request import Request
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.sequence import SequenceState
from runtime.schedule.slots import AccountingError, SlotPool
from runtime.schedule.states import TRANSITIONS, IllegalTransition, State, Trigger
from tests.runtime.schedule.configs import ROOMY
from tests.runtime.schedule.driver import Driver

LEGAL = [(state, trigger) for state in State for trigger in Trigger if trigger in TRANSITIONS[state]]
ILLEGAL = [(state, trigger) for state in State for trigger in Trigger if trigger not in TRANSITIONS[state]]


def sequence_in(state: State) -> SequenceState:
    sequence = SequenceState(Request(17, (1, 2, 3)), arrival=0, max_length=9)
    sequence.state = state
    return sequence


def everything_of(sequence: SequenceState) -> dict[str, object]:
    return {name: getattr(sequence, name) for name in SequenceState.__slots__}


# ---- the table ----


@pytest.mark.parametrize(("state", "trigger"), LEGAL, ids=lambda member: member.name)
def test_a_legal_trigger_moves_along_the_table(state: State, trigger: Trigger) -> None:
    sequence = sequence_in(state)
    advance(sequence, trigger)
    assert sequence.state is TRANSITIONS[state][trigger]


@pytest.mark.parametrize(("state", "trigger"), ILLEGAL, ids=lambda member: member.name)
def test_an_illegal_trigger_is_named_and_changes_nothing(state: State, trigger: Trigger) -> None:
    sequence = sequence_in(state)
    before = everything_of(sequence)
    with pytest.raises(IllegalTransition, match=f"request 17: '{trigger.value}' is not possible while {state.value}"):
        advance(sequence, trigger)
    assert everything_of(sequence) == before


def test_every_state_is_reached_and_only_ended_is_final() -> None:
    reached, frontier = {State.WAITING}, [State.WAITING]
    while frontier:
        following = set(TRANSITIONS[frontier.pop()].values()) - reached
        reached |= following
        frontier.extend(following)
    assert reached == set(State)
    assert [state for state in State if not TRANSITIONS[state]] == [State.ENDED]


def test_everybody_can_be_ended_at_any_moment() -> None:
    assert all(Trigger.END in TRANSITIONS[state] for state in State if state is not State.ENDED)


# ---- the steps in flight ----


def flight(step: int, *, void: bool = False) -> Flight:
    plan = None if void else StepPlan(step, StepKind.DECODE, (1,), (0,), 1)
    return Flight(step, plan, (), 0)


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_depth_plus_one_steps_fit(depth: int) -> None:
    chain = Chain(depth)
    for step in range(depth + 1):
        chain.launch(flight(step))
    with pytest.raises(ChainError, match=rf"step {depth + 1} was planned with {depth + 1} steps in flight"):
        chain.launch(flight(depth + 1))
    assert len(chain) == depth + 1
    chain.land(0)
    chain.launch(flight(depth + 1))


def test_steps_land_in_order_and_once() -> None:
    chain = Chain(2)
    chain.launch(flight(0))
    chain.launch(flight(1))
    with pytest.raises(ChainError, match="step 1 cannot land: next to land is 0"):
        chain.land(1)
    assert chain.land(0).step == 0
    with pytest.raises(ChainError, match="step 0 cannot land: next to land is 1"):
        chain.land(0)
    assert chain.land(1).step == 1
    with pytest.raises(ChainError, match="step 2 cannot land: next to land is nothing"):
        chain.land(2)


def test_void_steps_have_numbers_but_are_not_work() -> None:
    chain = Chain(2)
    chain.launch(flight(0))
    chain.launch(flight(1, void=True))
    assert (len(chain), chain.real) == (2, 1)
    chain.land(0)
    assert (len(chain), chain.real) == (1, 0)
    assert not chain.landed_after(1)
    chain.land(1)
    assert chain.landed_after(1)


def test_the_scheduler_keeps_the_order_too() -> None:
    scheduler = Scheduler(ROOMY)
    for _ in range(3):
        scheduler.plan()
    with pytest.raises(
        ChainError, match="step 3 was planned with 3 steps in flight; at chain depth 2 it is planned with 2"
    ):
        scheduler.plan()
    with pytest.raises(ChainError, match="step 2 cannot land: next to land is 0"):
        scheduler.land(2, None)
    assert scheduler.step == 3
    scheduler.land(0, None)
    scheduler.plan()


def test_a_result_that_came_early_is_not_looked_at_early() -> None:
    """Law 1 has two sides: the plan of step N must not know step N - D either."""
    scheduler = Scheduler(ROOMY)
    for _ in range(3):
        scheduler.plan()
    scheduler.land(0, None)
    scheduler.land(1, None)
    with pytest.raises(ChainError, match="step 3 was planned with 1 steps in flight; at chain depth 2 it is planned"):
        scheduler.plan()


def test_a_result_of_the_wrong_shape_is_not_taken_for_a_step() -> None:
    engine = Driver(depth=0)
    engine.admit(0)
    plan = engine.scheduler.plan()
    assert plan is not None
    with pytest.raises(ValueError, match="zip"):
        engine.scheduler.land(plan.step, StepResult(plan.step, (), (), ()))


# ---- fences and slots ----


def test_a_fence_opens_when_its_step_lands_in_the_order_things_were_held() -> None:
    fence: Fence[str] = Fence()
    fence.hold(5, "first")
    fence.hold(7, "later")
    fence.hold(5, "second")
    assert (fence.landed(4), fence.landed(5), fence.landed(5)) == ([], ["first", "second"], [])
    assert fence.held() == ["later"]


def test_a_slot_is_stale_at_once_and_free_behind_its_fence() -> None:
    slots = SlotPool(2)
    slot, version = slots.take(), slots.version
    assert slot == 1, "slot 0 is padding"
    slots.end(slot)
    slots.retire_after(3, slot)
    assert (slots.epochs[slot], slots.free_count, slots.fenced_count) == (1, 1, 1)
    assert slots.version != version
    slots.check([])
    slots.landed(2)
    assert slots.free_count == 1
    slots.landed(3)
    assert (slots.free_count, slots.fenced_count) == (2, 0)


@pytest.mark.parametrize("live", [[], [1, 2], [1, 1]])
def test_a_lost_or_doubled_slot_is_an_accounting_error(live: list[int]) -> None:
    slots = SlotPool(2)
    slots.take()
    with pytest.raises(AccountingError, match=r"slots 1\.\.2 are not each accounted for once"):
        slots.check(live)
