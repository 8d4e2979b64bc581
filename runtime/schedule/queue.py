"""The waiting queue: priority first, then first come, first served; bounded.

Knows: order and how many wait. Does not know: who fits (scheduler.py).
"""

from __future__ import annotations

import heapq

from runtime.schedule.sequence import SequenceState
from runtime.schedule.states import State


class WaitingQueue:
    """A heap with lazy deletion: an entry counts only while its sequence is WAITING, so leaving costs nothing."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], SequenceState]] = []

    def push(self, sequence: SequenceState) -> None:
        """Join, or join again; the place in line is the sequence's own and never lost."""
        if not sequence.queued:
            sequence.queued = True
            heapq.heappush(self._heap, (sequence.order, sequence))

    def head(self) -> SequenceState | None:
        """Who is next, left in place."""
        while self._heap:
            sequence = self._heap[0][1]
            if sequence.state is State.WAITING:
                return sequence
            self.pop()
        return None

    def pop(self) -> None:
        """Drop the entry at the head."""
        heapq.heappop(self._heap)[1].queued = False
