"""Slow-path fallbacks, counted by name and logged at a limited rate.

Each reason for a slow path has its own name, so that the log line of one reason does not silence another.
Knows: counts, and when each name was logged last. Does not know: what the slow paths are; their callers name them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

QUIET_SECONDS = 60.0  # between two log lines of one name


class Fallbacks:
    """``counts``: by name, how often each was taken. One thread takes them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: dict[str, int] = {}
        self._clock = clock
        self._told_at: dict[str, float] = {}

    def take(self, name: str, reason: str) -> None:
        """Count one. ``reason`` says why, and what to type where something can be done about it."""
        count = self.counts[name] = self.counts.get(name, 0) + 1
        now = self._clock()
        if name not in self._told_at or now - self._told_at[name] >= QUIET_SECONDS:
            self._told_at[name] = now
            log.info("fallback %s, %d so far: %s", name, count, reason)
