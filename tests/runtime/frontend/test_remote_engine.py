"""Who hears of a step first: whoever got a first token or ended, then the others, a few at a time, in their order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from runtime.frontend.framing import pack_ids
from runtime.frontend.remote_engine import (
    _AT_ONCE,
    MOST_AT_ONCE,
    ClientGone,
    EngineLost,
    Mailbox,
    RemoteEngine,
    SequenceRequest,
    Update,
)
from runtime.frontend.serve_messages import Columns, Drop, Ended, Opened, Step, framed
from runtime.schedule.request import FinishReason, SamplingParams

ROWS = 3 * _AT_ONCE + 2


class Silent(asyncio.WriteTransport):
    def write(self, data: object) -> None:
        pass


def engine_of(rows: int) -> tuple[RemoteEngine, list[Mailbox]]:
    engine = RemoteEngine(lambda settings: None, lambda why: None)
    engine.connection_made(Silent())
    asked = SequenceRequest((1, 2, 3), SamplingParams(max_tokens=9), ())
    return engine, [engine.submit([asked], 0.0) for _ in range(rows)]


def step_of(rows: Sequence[int], token: int, opened: Sequence[int] = (), ended: Sequence[int] = ()) -> bytes:
    columns = Columns([100 + row for row in rows], [token] * len(rows), [1] * len(rows), 1)
    ends = tuple(Ended(row, FinishReason.LENGTH, pack_ids(range(1, token + 1)), "", 0.0, None) for row in ended)
    return framed(Step(columns, tuple(Opened(row, 100 + row) for row in opened), (), ends))


def taken(mailboxes: Sequence[Mailbox]) -> list[list[Update]]:
    """What each has been told since the last call."""
    found = []
    for mailbox in mailboxes:
        found.append(list(mailbox._updates))
        mailbox._updates.clear()
    return found


def told(mailboxes: Sequence[Mailbox]) -> list[int]:
    return [row for row, updates in enumerate(taken(mailboxes)) if updates]


def test_first_tokens_and_ends_are_told_before_all_others() -> None:
    async def steps() -> None:
        engine, mailboxes = engine_of(ROWS)
        early = range(ROWS - 1)
        engine.data_received(step_of(early, 1, opened=early))
        assert told(mailboxes) == [*early], "first tokens wait for nobody"
        engine.data_received(step_of(range(ROWS), 2, opened=[ROWS - 1], ended=[ROWS - 2]))
        assert told(mailboxes) == [ROWS - 2, ROWS - 1], "an end, and a first token"
        for turn in range(0, ROWS - 2, _AT_ONCE):
            await asyncio.sleep(0)
            assert told(mailboxes) == [*range(turn, min(turn + _AT_ONCE, ROWS - 2))]
        await asyncio.sleep(0)
        assert told(mailboxes) == []
        assert engine.live == ROWS - 1

    asyncio.run(steps())


def test_a_step_tells_what_is_left_of_the_one_before() -> None:
    async def steps() -> None:
        engine, mailboxes = engine_of(ROWS)
        engine.data_received(step_of(range(ROWS), 1, opened=range(ROWS)))
        engine.data_received(step_of(range(ROWS), 2))
        await asyncio.sleep(0)
        engine.data_received(step_of(range(ROWS), 3, ended=[ROWS - 1]))
        tokens = [[token for update in updates for token in update.token_ids] for updates in taken(mailboxes)]
        assert tokens[:-1] == [[1, 2]] * (ROWS - 1), "the third waits for its turn"
        assert tokens[-1] == [1, 2, 3], "an end waits for nobody, and comes behind what was before it"
        for _ in range(ROWS):
            await asyncio.sleep(0)
        assert told(mailboxes) == [*range(ROWS - 1)]

    asyncio.run(steps())


def test_a_lost_engine_is_heard_of_behind_its_last_tokens() -> None:
    async def steps() -> None:
        engine, mailboxes = engine_of(ROWS)
        engine.data_received(step_of(range(ROWS), 1, opened=range(ROWS)))
        engine.data_received(step_of(range(ROWS), 2))
        engine.connection_lost(None)
        for mailbox in mailboxes:
            assert [update.token_ids for update in await mailbox.take()] == [(1,), (2,)]
            with pytest.raises(EngineLost):
                await mailbox.take()

    asyncio.run(steps())


def test_of_one_request_a_few_updates_are_taken_at_once() -> None:
    """Between them the event loop has its turn, however many there are."""

    async def steps() -> None:
        engine = RemoteEngine(lambda settings: None, lambda why: None)
        engine.connection_made(Silent())
        asked = SequenceRequest((1, 2, 3), SamplingParams(max_tokens=9), ())
        mailbox = engine.submit([asked] * (2 * MOST_AT_ONCE + 1), 0.0)
        every = range(len(mailbox.live))
        engine.data_received(step_of(every, 1, opened=every))
        turns = list[str]()

        async def other() -> None:
            for _ in range(3):
                turns.append("other")
                await asyncio.sleep(0)

        task, found = asyncio.ensure_future(other()), list[int]()
        for _ in range(3):
            updates = await mailbox.take()
            found += [update.choice for update in updates]
            turns.append(str(len(updates)))
        await task
        assert found == list(every)
        assert turns == ["other", "32", "other", "32", "other", "1"]

    assert MOST_AT_ONCE == 32
    asyncio.run(steps())


def test_a_stream_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client may be slow for a while; what it never reads would be held for as long as the engine generates."""
    monkeypatch.setattr("runtime.frontend.remote_engine.MOST_UNREAD", 5)

    async def steps() -> None:
        engine, (slow, other) = engine_of(2)
        sent: list[bytes] = []
        monkeypatch.setattr(engine._transport, "write", sent.append)
        engine.data_received(step_of([0, 1], 1, opened=[0, 1]))
        for token in range(2, 9):
            await other.take()
            engine.data_received(step_of([0, 1], token))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert sent == [framed(Drop((0,), FinishReason.CANCELLED))]
        assert len(await slow.take()) == 5
        with pytest.raises(ClientGone):
            await slow.take()

    asyncio.run(steps())
