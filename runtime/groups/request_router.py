"""Requests dealt out to groups, and their outputs brought back together on rank 0.

Knows: which events are this group's, when a group's output of a turn has come. Does not know: how loads are agreed
(step_sync.py), how outputs travel (parallel/control).

    turn N      every rank: ``mine`` of the agreed events              an arrival is one group's, the rest is for all
                first rank of each other group: ``gather`` sends rank 0 its group's output
    turn N + 1  rank 0: ``gather`` returns what all groups put out in turn N

A turn later, because then it is all there: a group sends its output of turn N before it proposes numbers for turn
N + 1, on one connection that keeps the order, and rank 0 cannot finish turn N + 1 without those. So what rank 0 returns
does not depend on speed, and no rank waits for it. Only what a broken connection has delayed comes later, whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from runtime.groups.load_balancer import LoadBalancer
from runtime.groups.output_codec import decode_output, encode_output
from runtime.groups.output_merge import merge_outputs
from runtime.schedule.plan import Admit, Event, StepOutput


class Channel(Protocol):
    """To rank 0: what a rank sends comes in order, and before the numbers it proposes afterwards."""

    rank: int
    world: int

    def send_message(self, payload: bytes) -> None: ...
    def take_messages(self) -> list[tuple[int, bytes]]: ...


class RequestRouter:
    """One a rank, where there are several groups. ``gather`` ends each turn.

    ``idle_steps``: by group, those that it launched for the others' sake, of those that rank 0 has put out.
    """

    def __init__(self, channel: Channel, assignment: LoadBalancer) -> None:
        self.assignment = assignment
        self.idle_steps = [0] * assignment.groups
        self._channel = channel
        self._group_size = channel.world // assignment.groups
        self._leads = channel.rank == 0
        self._speaks = not self._leads and channel.rank % self._group_size == 0
        self._elsewhere: set[int] = set()  # unfinished requests of other groups; kept by rank 0
        self._held = StepOutput(0)  # rank 0's own, of the turn before
        self._held_launched = False
        self._came: dict[int, list[tuple[int, StepOutput]]] = {}  # by turn: group, output
        self._ready: deque[StepOutput] = deque()  # not empty only after something came late

    def mine(self, events: Iterable[Event]) -> list[Event]:
        """Of agreed ``events`` those that this group's scheduler is to see.

        Arrivals of other groups are not among them. All else is: a scheduler ignores ids that it does not know.
        """
        found: list[Event] = []
        for event in events:
            if isinstance(event, Admit) and self.assignment.assign(event.request) != self.assignment.index:
                if self._leads:
                    self._elsewhere.update(event.request.answer_ids)
                continue
            found.append(event)
        return found

    def gather(self, turn: int, output: StepOutput, launched: bool) -> StepOutput:
        """Called last in ``turn`` with this group's output; returns what the engine's caller gets.

        ``launched``: whether groups had launched the step that landed in this turn.
        """
        self.assignment.ended(output.finished)
        if self._leads:
            return self._all_of_the_turn_before(turn, output, launched)
        if self._speaks and _says_something(output):
            for payload in encode_output(turn, output):
                self._channel.send_message(payload)
        return output

    @property
    def outstanding(self) -> bool:
        """Whether rank 0 has something to put out yet, or expects it (rank 0 only)."""
        return bool(self._elsewhere or self._came or self._ready or _says_something(self._held))

    def _all_of_the_turn_before(self, turn: int, output: StepOutput, launched: bool) -> StepOutput:
        for rank, payload in self._channel.take_messages():
            told_in, told = decode_output(payload)
            self._elsewhere.difference_update(one.request_id for one in told.finished)
            if told_in < turn - 1:
                self._ready.append(told)
            else:
                self._came.setdefault(told_in, []).append((rank // self._group_size, told))
        came = sorted(self._came.pop(turn - 1, []), key=lambda one: one[0])
        if self._held_launched:
            self._count_idle({0} if self._held.request_ids else set(), came)
        merged = merge_outputs([self._held, *(told for _, told in came)])
        self._held, self._held_launched = output, launched
        if not self._ready:
            return merged
        if _says_something(merged):
            self._ready.append(merged)
        return self._ready.popleft()

    def _count_idle(self, at_work: set[int], came: Iterable[tuple[int, StepOutput]]) -> None:
        at_work |= {group for group, told in came if told.request_ids}
        for group in range(self.assignment.groups):
            self.idle_steps[group] += group not in at_work


def _says_something(output: StepOutput) -> bool:
    return bool(output.request_ids or output.finished)
