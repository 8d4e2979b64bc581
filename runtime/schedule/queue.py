"""The waiting queue: priority first, then first come, first served; bounded.

Knows: order, lanes, and how many wait. Does not know: who fits, or who may pass whom (planner.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from runtime.schedule.sequence import NOT_QUEUED, SequenceState
from runtime.schedule.states import State


def _one_lane(_sequence: SequenceState) -> int:
    return 0


_KEPT = 64  # entries of those who have left, and as many again as there are of those who wait


class WaitingQueue:
    """Heaps with lazy deletion: an entry counts only while its sequence is WAITING, so leaving costs nothing.

    Those who have left are dropped when they reach the top, or when they are most of a heap: with its prompt an entry
    may be large, and whoever waits in front of it may wait for long.

    ``lane_of`` says in which of ``lanes`` a sequence waits; its answer does not change while the sequence waits. Who
    comes back to another lane has left an entry behind, which does not count any more. Lanes keep nobody's place: the
    heads are those of the whole line wherever everybody's turn is in order.
    """

    def __init__(self, lanes: int = 1, lane_of: Callable[[SequenceState], int] = _one_lane) -> None:
        self._heaps: list[list[tuple[tuple[int, int], SequenceState]]] = [[] for _ in range(lanes)]
        self._lane_of = lane_of
        self._most = [_KEPT] * lanes  # entries, before those who have left are dropped

    def push(self, sequence: SequenceState) -> None:
        """Join, or join again; the place in line is the sequence's own and never lost."""
        lane = self._lane_of(sequence)
        if sequence.queued_in != lane:
            sequence.queued_in = lane
            heapq.heappush(self._heaps[lane], (sequence.order, sequence))
            if len(self._heaps[lane]) > self._most[lane]:
                self._compact(lane)

    def _compact(self, lane: int) -> None:
        waiting = []
        for entry in self._heaps[lane]:
            if self._waits(entry[1], lane):
                waiting.append(entry)
            elif entry[1].queued_in == lane:
                entry[1].queued_in = NOT_QUEUED
        heapq.heapify(waiting)
        self._heaps[lane], self._most[lane] = waiting, 2 * len(waiting) + _KEPT

    @staticmethod
    def _waits(sequence: SequenceState, lane: int) -> bool:
        return sequence.state is State.WAITING and sequence.queued_in == lane

    def heads(self) -> list[SequenceState]:
        """Who is next in each lane, in the order of the line; they are left in place."""
        heads = []
        for lane, heap in enumerate(self._heaps):
            while heap and not self._waits(heap[0][1], lane):
                self._drop_head(lane)
            if heap:
                heads.append(heap[0])
        return [sequence for _, sequence in sorted(heads)]

    def head(self) -> SequenceState | None:
        """Who is next of all, left in place."""
        return next(iter(self.heads()), None)

    def pop(self, head: SequenceState) -> None:
        """Drop the entry of one of the ``heads``."""
        self._drop_head(head.queued_in)

    def _drop_head(self, lane: int) -> None:
        _, head = heapq.heappop(self._heaps[lane])
        if head.queued_in == lane:
            head.queued_in = NOT_QUEUED
