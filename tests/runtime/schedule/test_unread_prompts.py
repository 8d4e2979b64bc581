"""What waits is not read: planning and landing touch no token id of a prompt before there is room for it.

So what a step costs the host does not grow with how many prompts wait, or how long they are. Only whoever is next in
line is looked up in the prefix index, when a row and a slot are free and blocks have come back since.

Knows: how many token ids of a prompt are read in each turn. Does not know: what that costs (bench.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any, Unpack

import pytest

from runtime.schedule.config import MixedSteps
from runtime.schedule.request import FinishReason
from runtime.schedule.states import State
from tests.runtime.schedule.configs import Limits
from tests.runtime.schedule.driver import Driver, prompt_of

MIXED = MixedSteps(long_prompt=20)
SHAPES = pytest.mark.parametrize(
    ("prefix_caching", "mixed"), [(caching, mixed) for caching in (False, True) for mixed in (None, MIXED)]
)


class Watched(array):  # type: ignore[type-arg]
    """Packed token ids that count how many of them were read. Slices are plain arrays: copies, read once."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.read += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__iter__()

    def tobytes(self) -> bytes:
        self.read += len(self)
        return super().tobytes()

    def tolist(self) -> list[int]:
        self.read += len(self)
        return super().tolist()


def watched(token_ids: Iterable[int]) -> Watched:
    return Watched("i", token_ids)


class Line:
    """A driver, and prompts that wait in its queue; requests 0 and 1 run before they come.

    ``endless``: those run on. Else each ends after some tokens, and the next in line gets its row.
    """

    def __init__(self, waiting: int, *, endless: bool, **limits: Unpack[Limits]) -> None:
        roomy: Limits = {"rows": 2, "slots": 4, "max_model_len": 256, "max_prefill_tokens": 8, **limits}
        self.engine = Driver(**roomy)
        for request_id in range(2):
            self.engine.admit(request_id, 5, max_tokens=200 if endless else 6 + 3 * request_id)
            self.engine.turns_until(State.DECODE, request_id)
        self.waiting = list(range(10, 10 + 3 * waiting, 3))
        self.prompts = {i: watched(prompt_of((9, 30, 14)[i % 7 % 3], i)) for i in self.waiting}
        for i in self.waiting:
            scores = 1 if i % 4 == 3 else None
            self.engine.admit(i, self.prompts[i], max_tokens=4, n=1 + (i % 5 == 0), prompt_logprobs=scores)

    def turn(self) -> dict[int, int]:
        """How many token ids of which prompts a turn reads."""
        before = {i: prompt.read for i, prompt in self.prompts.items()}
        self.engine.turn()
        return {i: prompt.read - before[i] for i, prompt in self.prompts.items() if prompt.read > before[i]}


def test_a_watched_prompt_counts_what_is_read() -> None:
    ids = watched(range(10))
    assert (len(ids), bool(ids), ids.read) == (10, True, 0)
    assert (ids[3], ids.read) == (3, 1)
    assert (ids[2:5].tolist(), ids[10:].tolist(), ids.read) == ([2, 3, 4], [], 4)
    assert (tuple(ids)[-1], ids.read) == (9, 14)
    assert (len(ids.tobytes()), len(ids.tolist()), ids.read) == (40, 10, 34)


@SHAPES
def test_behind_full_rows_nothing_is_read(prefix_caching: bool, mixed: MixedSteps | None) -> None:
    """Through block ends, a request that comes, one that leaves the queue, a pause of another, and their landings."""
    line = Line(20, endless=True, prefix_caching=prefix_caching, mixed=mixed)
    engine = line.engine
    late = watched(prompt_of(12, 5))
    for turn in range(40):
        if turn == 10:
            engine.admit(1000, late, max_tokens=4)
        elif turn == 20:
            engine.cancel(line.waiting[0])
            engine.pause(line.waiting[1])
        elif turn == 30:
            engine.resume(line.waiting[1])
        assert line.turn() == {}
    assert late.read == 0
    assert engine.scheduler.waiting > 20
    assert all(len(engine.steps_of(i)) > 35 for i in range(2)), "the rows that they wait for run all the time"


@SHAPES
def test_beside_a_prompt_in_chunks_nothing_is_read(prefix_caching: bool, mixed: MixedSteps | None) -> None:
    """The last row has a long prompt, of which every step computes a few tokens."""
    line = Line(20, endless=True, rows=3, slots=6, prefix_caching=prefix_caching, mixed=mixed)
    while line.engine.scheduler.planner.prefill.row_free:
        line.turn()
    assert line.engine.sequence(line.waiting[0]).slot
    assert any(line.engine.sequence(i).state is State.PREFILL for i in line.waiting)
    behind = line.waiting[2:]
    for _ in range(3):
        assert not line.turn().keys() & set(behind)


@pytest.mark.parametrize("mixed", [None, MIXED])
def test_without_prefix_caching_a_prompt_is_read_once_when_it_gets_its_row(mixed: MixedSteps | None) -> None:
    """Although every row that ends, and every block that comes back, may be one for the next in line."""
    line = Line(12, endless=False, prefix_caching=False, blocks=40, mixed=mixed)
    once = [i for i in line.waiting if i % 5 and i % 4 != 3]  # neither a second answer nor scores look at it later
    while line.engine.scheduler.unfinished:
        before = {i: line.engine.state(i) for i in line.waiting}
        for i, read in line.turn().items():
            assert read >= 1
            assert line.engine.state(i) is not State.WAITING
            if i in once:
                assert (before[i], read) == (State.WAITING, len(line.prompts[i]))
    line.engine.finish()


def reads_of(waiting: int, turns: int, **limits: Unpack[Limits]) -> list[dict[int, int]]:
    line = Line(waiting, endless=False, **limits)
    return [line.turn() for _ in range(turns)]


@SHAPES
@pytest.mark.parametrize("blocks", [16, 200])
def test_what_a_turn_reads_does_not_grow_with_the_queue(
    prefix_caching: bool, mixed: MixedSteps | None, blocks: int
) -> None:
    """Rows end and are given away, and with few blocks the next in line does not fit at once and is looked up again."""
    limits: Limits = {"prefix_caching": prefix_caching, "mixed": mixed, "blocks": blocks}
    short, long = reads_of(12, 40, **limits), reads_of(100, 40, **limits)
    assert long == short
    assert sum(map(bool, long)) > 4, "some of them got rows"
    assert max(map(len, long)) <= 3, "of a turn's prompts: those that got the rows, and the next in line"


def test_a_prompt_that_leaves_the_queue_was_never_read() -> None:
    line = Line(3, endless=True)
    for i in line.waiting:
        line.engine.cancel(i)
        assert line.engine.reason(i) is FinishReason.CANCELLED
        assert line.prompts[i].read == 0
