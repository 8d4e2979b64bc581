"""How one rank's engine gets on: where it is, how long it has made no progress there, and how long it may.

Knows: what counts as progress, phases with separate limits.
Does not know: who looks at it and when (watchdog.py), other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from parallel.control.interface import ControlPlane


class Progress:
    """Set ``place`` and ``step`` while the engine works; the turns of ``control`` count by themselves.

    ``limit``: seconds without progress that are fine where the engine is. The engine's thread only stores into
    attributes here; any thread may read.
    """

    def __init__(self, control: ControlPlane, limit: float) -> None:
        self.place = "load"
        self.step = 0
        self.limit = limit
        self.turns = -1  # with the ends of phases, when they were last looked at
        self._control = control
        self._marks = 0
        self._since = time.monotonic()

    @contextmanager
    def phase(self, place: str, limit: float) -> Iterator[None]:
        """A part of the program with a separate limit: ``with watchdog.phase("load", 600): ...``

        ``phase("idle", math.inf)`` is for a front end that waits for its user.
        """
        before = self.place, self.limit
        self.place, self.limit = place, limit
        self._marks += 1
        try:
            yield
        finally:
            self._marks += 1
            self.place, self.limit = before

    def still_for(self, now: float) -> float:
        """Seconds until ``now``, by time.monotonic, since the first observer saw the latest progress."""
        turns = self._control.turns + self._marks
        if turns != self.turns:
            self.turns, self._since = turns, now
        return now - self._since

    def was_away(self, seconds: float, now: float) -> None:
        """This process was stopped for so long until ``now``, by time.monotonic: no time to make progress in."""
        self._since = min(self._since + seconds, now)
