"""What is counted of requests' lives: exact numbers, life by life."""

from __future__ import annotations

import pytest

from runtime.schedule.request import FinishReason
from runtime.schedule.states import State
from tests.runtime.schedule.driver import Driver, ending_by_stop

ZERO = {"stop": 0, "length": 0, "error": 0, "cancelled": 0, "rejected": 0}


def finished(engine: Driver) -> dict[str, int]:
    return engine.scheduler.counters.finished


def test_before_anything_has_ended_every_reason_is_there_with_zero() -> None:
    assert finished(Driver()) == ZERO


def test_each_request_ends_in_one_reason() -> None:
    engine = Driver()
    prompt, stop = ending_by_stop(0, length=5, after=3)
    engine.admit(0, prompt, max_tokens=20, stop=stop)
    engine.admit(1, max_tokens=4)
    engine.admit(2, max_tokens=9)
    engine.device.breaks_at = {3: 6}
    engine.admit(3, max_tokens=9)
    engine.admit(4, prompt=64)
    engine.admit(5, max_tokens=0)
    engine.turns(4)
    engine.cancel(2)
    engine.finish()
    assert finished(engine) == {"stop": 1, "length": 1, "error": 1, "cancelled": 1, "rejected": 2}
    counters = engine.scheduler.counters
    assert (counters.admissions, counters.evictions, counters.cancels) == (4, 0, 1)
    assert sum(finished(engine).values()) == len(engine.finished) == 6


def test_every_refusal_is_counted() -> None:
    engine = Driver(rows=1, slots=1, blocks=12, max_waiting=1)
    for request_id, prompt, max_tokens in ((0, 0, 4), (1, 3, 0), (2, 64, 4), (3, 30, 20)):
        engine.admit(request_id, prompt=prompt, max_tokens=max_tokens)
    assert finished(engine) == ZERO | {"rejected": 4}
    engine.admit(4)
    engine.admit(5)  # one is waiting already
    assert finished(engine) == ZERO | {"rejected": 5}
    engine.finish()
    assert finished(engine) == ZERO | {"rejected": 5, "length": 1}


def test_who_was_evicted_takes_no_arrival_s_place_in_the_queue() -> None:
    """A front end keeps max_waiting requests that have no token yet; it cannot know of those that wait once more."""
    engine = Driver(blocks=12, block_size=2, prefix_caching=False, max_waiting=1)
    engine.admit(0, prompt=4, max_tokens=16)
    engine.turn()
    engine.admit(1, prompt=4, max_tokens=16)
    engine.turns_until(State.EVICTING, 1)
    engine.turns_until(State.WAITING, 1)
    engine.admit(2, max_tokens=2)
    assert engine.state(2) is State.WAITING
    engine.pause(1)
    engine.resume(1)
    engine.admit(3, max_tokens=2)
    assert engine.reason(3) is FinishReason.REJECTED, "one that never had a slot is waiting already"
    engine.finish()
    assert engine.scheduler.ledger.waiting_arrivals == 0


def test_cancels_are_those_that_ended_a_request() -> None:
    """A stop string that the host found is a cancel, too; unknown and ended requests are not."""
    engine = Driver()
    for request_id in range(3):
        engine.admit(request_id, max_tokens=20)
    engine.turns(4)
    engine.cancel(0)
    engine.cancel(0)
    engine.cancel(1, FinishReason.STOP)
    engine.cancel(77)
    engine.finish()
    engine.cancel(2)
    assert engine.scheduler.counters.cancels == 2
    assert finished(engine) == ZERO | {"cancelled": 1, "stop": 1, "length": 1}


def test_pauses_and_resumes_are_those_that_changed_something() -> None:
    engine = Driver(max_prefill_tokens=4)
    counters = engine.scheduler.counters
    engine.admit(0, max_tokens=12)
    engine.resume(0)
    engine.turns(3)
    engine.pause(0)
    engine.pause(0)
    engine.pause(9)
    assert (counters.pauses, counters.resumes) == (1, 0)
    engine.admit(1, prompt=20)
    engine.turn()
    assert engine.state(1) is State.PREFILL
    engine.pause(1)  # takes effect at the end of its prompt, and counts now
    assert (counters.pauses, counters.resumes) == (2, 0)
    engine.turns_until(State.PAUSED, 1)
    for request_id in (0, 0, 1, 9):
        engine.resume(request_id)
    assert (counters.pauses, counters.resumes) == (2, 2)
    engine.finish()


def test_an_evicted_request_is_admitted_twice() -> None:
    engine = Driver(blocks=12, block_size=2, prefix_caching=False)
    engine.admit(0, prompt=4, max_tokens=16)
    engine.admit(1, prompt=4, max_tokens=16)
    engine.finish()
    counters = engine.scheduler.counters
    assert (counters.evictions, counters.admissions) == (1, 3)
    assert finished(engine) == ZERO | {"length": 2}


def test_an_admission_that_did_not_fit_is_counted_once_for_each_attempt() -> None:
    """Nothing has changed until somebody ends, so nothing is tried again; then it fits, and the next one is tried."""
    engine = Driver(blocks=8, block_size=2, slots=4, prefix_caching=False)
    counters = engine.scheduler.counters
    engine.admit(0, prompt=8, max_tokens=6)
    engine.turns(2)
    assert counters.deferred_admissions == 0
    engine.admit(1, prompt=8, max_tokens=6)
    engine.admit(2, prompt=8, max_tokens=6)  # behind it in line: not tried
    engine.turns(3)
    assert counters.deferred_admissions == 1
    engine.turns_until(State.ENDED, 0)
    assert (counters.admissions, counters.deferred_admissions) == (1, 1)
    engine.turn()
    assert (counters.admissions, counters.deferred_admissions) == (2, 2)
    engine.finish()
    assert (counters.admissions, counters.deferred_admissions) == (3, 2)


def test_a_pause_is_a_reason_to_try_again() -> None:
    engine = Driver(blocks=8, block_size=2, prefix_caching=False)
    counters = engine.scheduler.counters
    engine.admit(0, prompt=8, max_tokens=6)
    engine.admit(1, prompt=8, max_tokens=6)
    engine.turns(2)
    assert (counters.deferred_admissions, counters.evictions) == (1, 0)
    engine.pause(0)
    engine.turn()
    assert counters.evictions == 1
    assert counters.deferred_admissions == 1 + 2, "before the eviction, and behind it: those blocks are still fenced"
    engine.turns_until(State.ENDED, 1)
    assert counters.deferred_admissions == 3
    engine.resume(0)
    engine.finish()


@pytest.mark.parametrize("rows", [1, 2])
def test_waiting_for_a_row_is_no_deferred_admission(rows: int) -> None:
    """There is nothing to try while all rows are taken."""
    engine = Driver(rows=rows, slots=2 * rows)
    for request_id in range(6):
        engine.admit(request_id)
    engine.finish()
    counters = engine.scheduler.counters
    assert (counters.admissions, counters.deferred_admissions) == (6, 0)
