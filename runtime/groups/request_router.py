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
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from runtime.execute.result_reader import StepLogprobs
from runtime.groups.load_balancer import LoadBalancer
from runtime.groups.output_codec import decode_output, encode_output
from runtime.replicate.held_arrivals import REPORT
from runtime.schedule.plan import Admit, Event, StepOutput


def merge_outputs(outputs: Sequence[StepOutput]) -> StepOutput:
    """Of one step, or of none: ``step`` is the first's, ``width`` the largest (one group may prefill while another
    decodes more tokens a row). Requests are different in all of them."""
    rows = [output for output in outputs if output.request_ids]
    width = max(output.width for output in rows or outputs)
    finished = tuple(chain.from_iterable(output.finished for output in outputs))
    if not rows:
        return StepOutput(outputs[0].step, width=width, finished=finished)
    return StepOutput(
        step=outputs[0].step,
        request_ids=_joined(output.request_ids for output in rows),
        tokens=_joined(_widened_tokens(output, width) for output in rows),
        counts=_joined(output.counts for output in rows),
        width=width,
        finished=finished,
        logprobs=_merged_logprobs(rows, width),
        prompt_logprobs=_merged_scores(rows),
    )


def _joined(columns: Any) -> list[int]:
    return list(chain.from_iterable(columns))


def _widened_tokens(output: StepOutput, width: int) -> Sequence[int]:
    """Its tokens, row-major, with ``width`` columns; those past a row's count mean nothing."""
    if output.width == width:
        return output.tokens
    missing, own = [0] * (width - output.width), output.width
    rows = (output.tokens[at : at + own] for at in range(0, len(output.tokens), own))
    return _joined((*row, *missing) for row in rows)


def _merged_logprobs(outputs: Sequence[StepOutput], width: int) -> StepLogprobs | None:
    """Rows of a group that reported none mean nothing, and so do likely tokens beyond those that a group reported."""
    present = [output.logprobs for output in outputs if output.logprobs is not None]
    if not present:
        return None
    top = max(columns.top_ids_BWN.shape[-1] for columns in present)
    parts = [_widened(output, width, top) for output in outputs]
    return StepLogprobs(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _widened(output: StepOutput, width: int, top: int) -> StepLogprobs:
    columns, rows = output.logprobs, len(output.request_ids)
    if columns is None:  # of no tokens, to be filled up
        floats, ids = np.zeros((rows, 0, 0), np.float32), np.zeros((rows, 0, 0), np.int32)
        columns = StepLogprobs(floats.reshape(rows, 0), ids.reshape(rows, 0), ids, floats)
    fills = np.nan, 0, -1, np.nan
    return StepLogprobs(*(_padded(values, (width, top), fill) for values, fill in zip(columns, fills, strict=True)))


def _padded(values: npt.NDArray[Any], sizes: tuple[int, ...], fill: float) -> npt.NDArray[Any]:
    """``values`` with ``fill`` up to such sizes of the dimensions after the first."""
    more = [(0, size - own) for size, own in zip(sizes, values.shape[1:], strict=False)]
    return np.pad(values, ((0, 0), *more), constant_values=fill)


def _merged_scores(outputs: Sequence[StepOutput]) -> tuple[Any, ...] | None:
    if all(output.prompt_logprobs is None for output in outputs):
        return None
    scores = (output.prompt_logprobs or (None,) * len(output.request_ids) for output in outputs)
    return tuple(chain.from_iterable(scores))


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
        self._reports: list[tuple[int, bytes]] = []

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

    def take_reports(self) -> list[tuple[int, bytes]]:
        """Messages about grammars (runtime/replicate/held_arrivals.py) since the last call: (rank, payload)."""
        found, self._reports = self._reports, []
        return found

    @property
    def outstanding(self) -> bool:
        """Whether rank 0 has something to put out yet, or expects it (rank 0 only)."""
        return bool(self._elsewhere or self._came or self._ready or _says_something(self._held))

    def _all_of_the_turn_before(self, turn: int, output: StepOutput, launched: bool) -> StepOutput:
        for rank, payload in self._channel.take_messages():
            if payload.startswith(REPORT):
                self._reports.append((rank, payload))
                continue
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
