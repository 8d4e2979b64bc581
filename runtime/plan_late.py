"""Delays rank 0's next turn while the device is busy, so that requests that arrive meanwhile are in its plan.

Knows: when steps were launched and landed on rank 0's clock, how long steps of each shape took lately, how long a turn
takes from its beginning to its launch. Does not know: how rank 0 waits for arrivals (runtime/frontend), plans, devices.

    device   |---- step N ----------------------------|---- step N + 1 ------
    rank 0   lands N - 1, sends |  reads arrivals  ... | turn N + 1: agree, plan, launch | lands N
                                 <------ slack ------->  <--------- margin -------------->

Without it turn N + 1 is taken as soon as N - 1 has landed, and what arrives while N runs waits for two steps. No
clock enters a plan: rank 0's clock decides *when* a turn begins only, and the other ranks wait for its record.
A wrong estimate costs nothing but idle time of the device, which is counted and widens the margin.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

MARGIN_S = 0.3e-3  # at least; more by what turns take
MARGIN_SHARE = 1.5  # of the longest turn lately
LEAST_WAIT_S = 0.3e-3  # shorter ones are not worth being woken for
FORGET = 0.99  # of the longest turn, and of what late turns added, each turn: half of it in 70
MOST_MARGIN_S = 20e-3  # that one turn can ask for
_SAMPLES = 8  # of a shape, of which the shortest counts
_ENOUGH = 2


@dataclass(slots=True)
class PlanLateCounters:
    """plan_late_waits: turns that were delayed; plan_late_us: by how much in all. plan_late_misses: those of them whose
    step was launched after the one before it had ended; plan_late_idle_us: for how long the device had nothing then.
    """

    plan_late_waits: int = 0
    plan_late_us: int = 0
    plan_late_misses: int = 0
    plan_late_idle_us: int = 0


class Shape(Hashable, Protocol):
    """Equal for steps that take about equally long. ``tokens``: of the forward pass."""

    @property
    def tokens(self) -> int: ...


class _Launched(NamedTuple):
    """A step in flight, and when its launch returned. ``waited``: its turn was delayed."""

    shape: Shape
    at: float
    waited: bool


class PlanLate:
    """One an engine; its thread's. All times are of ``clock``, in seconds. ``depth``: D, steps that stay queued."""

    def __init__(self, depth: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.counters = PlanLateCounters()
        self._depth = depth
        self._clock = clock
        self._flights: deque[_Launched | None] = deque()  # None: a void step
        self._durations: dict[Shape, deque[float]] = {}
        self._ended_at = 0.0  # when the device was done with the step that landed last
        self._longest = 0.0  # turn, slowly forgotten
        self._extra = 0.0  # margin that late turns asked for
        self._asked_at = 0.0  # the first ``slack`` since the latest turn that was positive; 0.0: none was
        self._until = 0.0

    @property
    def margin(self) -> float:
        """Seconds that a turn needs before the step in flight ends."""
        return MARGIN_S + MARGIN_SHARE * self._longest + self._extra

    def slack(self) -> float:
        """Seconds for which the next turn may be delayed; 0 if it should begin now.

        Until the oldest step in flight is about to end: then its results are wanted, and with D = 1 the next step.
        """
        now = self._clock()
        if self._asked_at:
            return max(0.0, self._until - now)
        if not self._depth or len(self._flights) < self._depth:
            return 0.0  # the chain is being filled
        oldest = self._flights[0]
        if oldest is None:
            return 0.0
        until = max(self._ended_at, oldest.at) + self._shortest(oldest) - self.margin
        if until - now < LEAST_WAIT_S:
            return 0.0
        self._asked_at, self._until = now, until
        return until - now

    def _shortest(self, flight: _Launched) -> float:
        """What the step takes at least. One of a new shape as long as the shortest of those with no more tokens."""
        known = self._durations.get(flight.shape, ())
        if len(known) >= _ENOUGH:
            return min(known)
        smaller = [
            min(times)
            for shape, times in self._durations.items()
            if len(times) >= _ENOUGH and shape.tokens <= flight.shape.tokens
        ]
        return min(smaller, default=0.0)

    def took(self, began: float, launched: float, shape: Shape | None, landed: float | None) -> None:
        """A turn is over: when it ``began``, when it had ``launched`` a step of ``shape`` (None: no step), and when the
        oldest step in flight had ended, if it ``landed``.
        """
        waited, self._asked_at = self._asked_at, 0.0
        if waited:
            began = min(began, self._until)  # being woken late is a part of what a turn takes
            self.counters.plan_late_waits += 1
            self.counters.plan_late_us += round(1e6 * (began - waited))
        took = min(launched - began, MOST_MARGIN_S)  # a late capture takes a second
        self._longest = max(took, FORGET * self._longest)
        self._extra *= FORGET
        self._flights.append(None if shape is None else _Launched(shape, launched, bool(waited)))
        if landed is not None and (oldest := self._flights.popleft()) is not None:
            self._landed(oldest, landed)

    def _landed(self, flight: _Launched, at: float) -> None:
        """The device was done with it."""
        began = max(self._ended_at, flight.at)
        idle = flight.at - self._ended_at
        if flight.waited and idle > 0:
            self.counters.plan_late_misses += 1
            self.counters.plan_late_idle_us += round(1e6 * idle)
            self._extra = min(MOST_MARGIN_S, 2 * self._extra + idle)
        self._durations.setdefault(flight.shape, deque(maxlen=_SAMPLES)).append(at - began)
        self._ended_at = at
