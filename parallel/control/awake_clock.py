"""The clock of a control plane: it stands while this process does, so that others are not blamed for its absence.

Knows: that a plane looks at its links several times a second while it waits for others. Does not know: what ends when.

A whole job may be stopped for minutes and then continue: scontrol suspend, gang scheduling, docker pause. Then no rank
was late, but by time.monotonic, which runs meanwhile, every deadline is over. If one rank alone was stopped, the clocks
of the others run, and they name it.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class AwakeClock:
    """Seconds, as ``clock`` counts them, but that the time between two readings counts as ``longest`` at most."""

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._longest = longest
        self._read_at = clock()
        self._away = 0.0

    def __call__(self) -> float:
        now = self._clock()
        excess = now - self._read_at - self._longest
        if excess > 0.0:
            self._away += excess
        self._read_at = now
        return now - self._away


def clock_within(deadline: float) -> AwakeClock:
    """For deadlines of so many seconds. A plane that waits reads it at least every half of one, and of a second."""
    return AwakeClock(min(1.0, deadline / 2))
