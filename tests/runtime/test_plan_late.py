"""How long a turn is put off, by a scripted clock and a device that takes its time on it: no thread, no real second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from runtime.plan_late import LEAST_WAIT_S, MARGIN_S, MARGIN_SHARE, PlanLate

STEP, TURN = 10e-3, 0.4e-3


class Shape(NamedTuple):
    name: object
    tokens: int = 8


@dataclass
class Loop:
    """A front end, an engine and a device of one clock. ``step_s(n)``, ``turn_s(n)``: what step and turn n take."""

    depth: int = 1
    step_s: Callable[[int], float] = lambda step: STEP
    turn_s: Callable[[int], float] = lambda step: TURN
    shape_of: Callable[[int], object] = lambda step: "decode"
    tokens_of: Callable[[int], int] = lambda step: 8
    puts_off: bool = True
    now: float = 100.0
    idle: dict[int, float] = field(default_factory=dict)  # by the step that came too late
    planned_at: list[float] = field(default_factory=list)
    landed_at: list[float] = field(default_factory=list)  # on the host
    waits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.late = PlanLate(self.depth, lambda: self.now)

    def run(self, turns: int) -> Loop:
        ends: list[float] = []
        device_free = 0.0
        for step in range(turns):
            waited = 0.0
            while self.puts_off and (left := self.late.slack()) > 0:
                self.now += left / 2 if left > 1e-4 else left  # a front end asks again and again
                waited += left
            self.waits.append(waited)
            began = self.now
            self.planned_at.append(began)
            self.now += self.turn_s(step)
            if step and self.now > device_free:
                self.idle[step] = self.now - device_free
            device_free = max(self.now, device_free) + self.step_s(step)
            ends.append(device_free)
            launched, landed, name = self.now, None, self.shape_of(step)
            if step >= self.depth:
                landed = ends[step - self.depth]
                self.now = max(self.now, landed)
                self.landed_at.append(self.now)
            self.late.took(began, launched, None if name is None else Shape(name, self.tokens_of(step)), landed)
        return self

    def wait_of_arrival(self, at: float) -> float:
        """Seconds until the device begins the step that a request of ``at`` is in."""
        step = next(n for n, planned in enumerate(self.planned_at) if planned >= at)
        return self.landed_at[step - 1] - at


def arrivals(loop: Loop) -> Iterator[float]:
    """Some in each step of the second half."""
    for n in range(50, 90):
        yield loop.landed_at[n] + STEP * (0.05 + 0.11 * (n % 9))


def test_an_arrival_waits_for_the_step_in_flight_and_for_no_other() -> None:
    late, plain = Loop().run(100), Loop(puts_off=False).run(100)
    mean_late, mean_plain = (
        sum(map(loop.wait_of_arrival, arrivals(loop))) / len(list(arrivals(loop))) for loop in (late, plain)
    )
    assert not late.idle, "and the device had work all the time"
    assert late.landed_at[-1] == pytest.approx(plain.landed_at[-1]), "so that no step came later"
    assert mean_plain == pytest.approx(1.5 * STEP, rel=0.1)
    assert mean_late < 0.75 * STEP
    assert late.late.counters.plan_late_waits > 90
    assert late.late.counters.plan_late_us > 90 * 1e6 * (STEP - TURN - 3 * MARGIN_S)
    assert late.late.counters.plan_late_misses == 0


def test_with_two_steps_queued_results_are_wanted_when_the_first_of_them_ends() -> None:
    late, plain = Loop(depth=2).run(100), Loop(depth=2, puts_off=False).run(100)
    assert late.landed_at == pytest.approx(plain.landed_at), "no token is told later"
    assert not late.idle
    assert sum(late.waits) > 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_nothing_is_put_off_while_the_chain_is_filled_nor_without_one(depth: int) -> None:
    loop = Loop(depth=depth).run(depth + 1)
    assert not any(loop.waits)


def test_steps_too_short_to_wait_in_are_left_alone() -> None:
    loop = Loop(step_s=lambda step: TURN + MARGIN_S + LEAST_WAIT_S).run(100)
    assert not any(loop.waits)


def test_a_shape_that_was_not_seen_twice_has_no_known_end() -> None:
    loop = Loop(shape_of=lambda step: step).run(50)
    assert not any(loop.waits)


def test_a_new_shape_takes_no_less_than_one_with_fewer_tokens() -> None:
    """Steps with chunks come in many shapes, between steps that decode."""

    def mixed(step: int) -> bool:
        return step > 20 and step % 5 == 0

    loop = Loop(
        shape_of=lambda step: step if mixed(step) else "decode",
        tokens_of=lambda step: 512 if mixed(step) else 8,
        step_s=lambda step: 2 * STEP if mixed(step) else STEP,
    ).run(100)
    assert all(loop.waits[step] > STEP / 2 for step in range(10, 100)), "also the turn while a new one runs"
    assert not loop.idle
    fewer = Loop(shape_of=lambda step: step, tokens_of=lambda step: 512 - step).run(50)
    assert not any(fewer.waits), "of one with fewer tokens nothing is known"


def test_steps_that_become_shorter_cost_one_gap_and_then_none() -> None:
    """No estimate foresees it. What was lost is counted, and the shortest of the latest steps is believed."""
    loop = Loop(step_s=lambda step: STEP if step < 50 else STEP / 2).run(150)
    counters = loop.late.counters
    assert list(loop.idle) == [51]
    assert counters.plan_late_misses == 1
    assert counters.plan_late_idle_us == round(1e6 * loop.idle[51])
    assert loop.waits[120] > 0, "and turns are put off again"


def test_turns_that_become_longer_widen_the_margin() -> None:
    """A turn in twenty takes eight times as long: the first of them comes too late, the others have room."""
    loop = Loop(turn_s=lambda step: 8 * TURN if step % 20 == 10 and step > 20 else TURN).run(400)
    assert list(loop.idle) == [30]
    assert loop.late.margin > 8 * TURN


def test_a_void_step_is_nothing_to_wait_for() -> None:
    loop = Loop(shape_of=lambda step: "decode" if step < 50 else None).run(60)
    assert loop.waits[49] > 0
    assert not any(loop.waits[51:])


def test_a_wait_that_took_too_long_is_a_part_of_the_turn() -> None:
    """Whoever is woken late has less time: the margin learns of it."""
    loop = Loop().run(30)
    left = loop.late.slack()
    assert left > 0
    loop.now += left + 1e-3
    assert loop.late.slack() == 0.0
    loop.late.took(loop.now, loop.now, Shape("decode"), None)
    assert loop.late.margin == pytest.approx(MARGIN_S + MARGIN_SHARE * 1e-3)
