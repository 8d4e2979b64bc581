"""The waiting queue: priority first, then first come, first served; bounded.

Knows: order, queue classes (lanes), counts. Does not know: which requests fit, or may pass others (planner.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from runtime.schedule.sequence import NOT_QUEUED, SequenceState
from runtime.schedule.states import State


def _one_lane(_sequence: SequenceState) -> int:
    return 0


_KEPT = 64  # stale entries of a heap, and as many again as there are waiting ones


class WaitingQueue:
    """Heaps with lazy deletion: an entry counts only while its sequence is WAITING, so leaving costs nothing.

    Entries of sequences that have left are dropped at the top of a heap, or when they are most of it: with its prompt
    an entry may be large, and may stay under a waiting one for long.

    ``lane_of`` gives the lane, of ``lanes``, in which a sequence waits; it does not change while the sequence waits. A
    sequence that comes back to another lane leaves a stale entry. A lane keeps no place in line: ``heads`` are in the
    order of the whole queue.
    """

    def __init__(self, lanes: int = 1, lane_of: Callable[[SequenceState], int] = _one_lane) -> None:
        self._heaps: list[list[tuple[tuple[int, int], SequenceState]]] = [[] for _ in range(lanes)]
        self._lane_of = lane_of
        self._most = [_KEPT] * lanes  # entries, before stale ones are dropped

    def push(self, sequence: SequenceState) -> None:
        """Join, or join again; a sequence never loses its place in line."""
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
        """The next sequence of each lane, in queue order; they stay in place."""
        heads = []
        for lane, heap in enumerate(self._heaps):
            while heap and not self._waits(heap[0][1], lane):
                self._drop_head(lane)
            if heap:
                heads.append(heap[0])
        return [sequence for _, sequence in sorted(heads)]

    def head(self) -> SequenceState | None:
        """The next sequence of all, which stays in place."""
        return next(iter(self.heads()), None)

    def pop(self, head: SequenceState) -> None:
        """Drop the entry of one of the ``heads``."""
        self._drop_head(head.queued_in)

    def _drop_head(self, lane: int) -> None:
        _, head = heapq.heappop(self._heaps[lane])
        if head.queued_in == lane:
            head.queued_in = NOT_QUEUED
