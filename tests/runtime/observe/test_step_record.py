"""Records survive packing, and a long run keeps its latest ones."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest

from runtime.execute.launch_spec import LaunchSpec, StepShape
from runtime.observe.observer import RECENT, InFlight, StepObserver
from runtime.observe.step_record import StepLog, StepRecord
from runtime.schedule.plan import StepKind, StepPlan


def record(step: int, *, timed: bool = True, break_reason: str | None = None) -> StepRecord:
    """A decode step of which no two fields are equal."""
    found = StepRecord(step, 10**15 + step * 1000, "decode", 8, 5, 1, 64, 4, 21, break_reason, 11, 12, 13, 14, 15)
    found.land_ns, found.seen_at_ns, found.read_at_ns = 16, 17, 18
    if timed:
        found.device_started_ms, found.device_ended_ms = step + 0.25, step + 0.75
    return found


def test_packing_keeps_every_field() -> None:
    log = StepLog(4)
    stored = [record(0, break_reason="start"), StepRecord(1, 5, break_reason="paused"), record(2, timed=False)]
    stored[2].exchange_rows = stored[2].gained = None
    for one in stored:
        log.add(one)
    assert list(log.records()) == stored
    assert (len(log), log.dropped) == (3, 0)


def test_the_oldest_make_room() -> None:
    log = StepLog(10)
    for step in range(35):
        log.add(record(step))
    assert [kept.step for kept in log.records()] == list(range(25, 35))
    assert list(log.records())[-1] == record(34)
    assert (len(log), log.dropped) == (10, 25)


def test_a_record_that_changes_later_is_kept_as_it_was() -> None:
    log, one = StepLog(2), record(0)
    log.add(one)
    one.rows = 99
    assert next(log.records()).rows == 5


def take_turns(observe: StepObserver, steps: int, depth: int) -> None:
    """An engine's flights, without an engine: a mark each nanosecond."""
    now = itertools.count(1)
    for step in range(steps + depth):
        if step < steps:
            plan = StepPlan(step, StepKind.DECODE, (1, 2, 3), (0, 0, 0), 1)
            launch = LaunchSpec(plan, plan.kind, "decode", StepShape("decode", 4))
            began, agreed, planned, launched = itertools.islice(now, 4)
            observe.in_flight[step] = InFlight(step, began, agreed, planned, launched, plan=plan, launch=launch)
        if step >= depth:
            flight = observe.in_flight[step - depth]
            flight.landing_at, flight.taken_at, flight.landed_at = next(now), next(now), next(now)
            flight.ghosts = 1
            observe.landed(flight)
            del observe.in_flight[flight.step]


@pytest.mark.parametrize("depth", [0, 2])
def test_recent_holds_the_latest_steps_in_order(depth: int) -> None:
    observe = StepObserver()
    assert observe.recent() == []
    take_turns(observe, 10, depth)
    assert [found.step for found in observe.recent()] == list(range(10))
    observe = StepObserver()
    take_turns(observe, RECENT + 100, depth)
    recent = observe.recent()
    assert [found.step for found in recent] == list(range(100, RECENT + 100))
    assert {(found.role, found.bucket, found.rows, found.ghosts) for found in recent} == {("decode", 4, 3, 1)}
    assert all(before.began_at_ns < after.began_at_ns for before, after in pairwise(recent))


def test_a_step_in_flight_is_among_the_recent() -> None:
    """What a watchdog wants to see most: the step that does not land."""
    observe = StepObserver()
    take_turns(observe, 3, 0)
    plan = StepPlan(3, StepKind.PREFILL, (1,), (0,), 1)
    observe.in_flight[3] = InFlight(3, 100, 110, plan=plan, break_reason="start")
    last = observe.recent()[-1]
    assert (last.step, last.role, last.break_reason, last.land_at_ns) == (3, "prefill", "start", 0)
    assert (last.began_at_ns, last.agree_ns, last.plan_ns, last.launch_ns) == (100, 10, 0, 0)
