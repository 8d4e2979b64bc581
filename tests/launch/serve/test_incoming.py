"""Bodies on their way: their memory, and whose turn it is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from launch.serve.errors import ApiError
from launch.serve.incoming import Incoming, Turns

PATIENCE = 120.0


class Sender:
    """A client whose request's body comes part by part, as ``send`` says."""

    def __init__(self, incoming: Incoming, client: str = "a", use: Callable[[bytearray], Any] = len) -> None:
        self._parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
        self.taken = asyncio.ensure_future(incoming.take(Request(scope, self._parts.get), client, use))

    async def send(self, size: int, *, more: bool = True) -> None:
        self._parts.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})
        await asyncio.sleep(0.001)

    async def leave(self) -> None:
        self._parts.put_nowait({"type": "http.disconnect"})
        await asyncio.sleep(0.001)

    async def refused(self) -> tuple[int, str | None]:
        with pytest.raises(ApiError) as raised:
            await asyncio.wait_for(self.taken, PATIENCE)
        return raised.value.status, raised.value.code


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), PATIENCE))


def test_bodies_that_are_not_whole_share_memory_and_the_largest_gives_its_own() -> None:
    async def body() -> None:
        incoming = Incoming(longest=40_000, total=100_000, retry_after=1)
        large = [Sender(incoming) for _ in range(3)]
        for size, one in zip((30_000, 38_000, 31_000), large, strict=True):
            await one.send(size)
        assert incoming.held == 99_000
        small = Sender(incoming, "b")
        await small.send(2000)
        assert incoming.held == 99_000 - 38_000 + 2000, "the largest has none any more"
        await small.send(10, more=False)
        assert await small.taken == 2010
        await large[1].send(1)
        assert await large[1].refused() == (503, "too_many_bodies")
        for one in (large[0], large[2]):
            await one.leave()
            with pytest.raises(ClientDisconnect):
                await one.taken
        assert incoming.held == 0

    run(body)


def test_the_largest_of_all_is_refused_itself() -> None:
    async def body() -> None:
        incoming = Incoming(longest=60_000, total=100_000, retry_after=1)
        first, second = Sender(incoming), Sender(incoming)
        await first.send(50_000)
        await second.send(40_000)
        await second.send(11_000)
        assert await second.refused() == (503, "too_many_bodies")
        await first.send(5, more=False)
        assert await first.taken == 50_005
        assert incoming.held == 0

    run(body)


def test_a_body_that_waits_for_its_turn_counts_and_may_lose_its_memory() -> None:
    async def body() -> None:
        incoming = Incoming(longest=400_000, total=700_000, retry_after=1)
        async with incoming.large.of("another"):
            waits = Sender(incoming)
            await waits.send(350_000, more=False)
            assert incoming.held == 350_000
            others = [Sender(incoming, "b") for _ in range(2)]
            for one in others:
                await one.send(200_000)
            assert incoming.held == 400_000
        assert await waits.refused() == (503, "too_many_bodies")
        for one in others:
            await one.leave()
            with pytest.raises(ClientDisconnect):
                await one.taken

    run(body)


@pytest.mark.parametrize(("size", "on_loop"), [(16 << 10, False), ((16 << 10) - 1, True)])
def test_long_bodies_are_used_beside_the_event_loop(size: int, on_loop: bool) -> None:
    async def body() -> None:
        incoming = Incoming(longest=1 << 20, total=1 << 20, retry_after=1)
        sender = Sender(incoming, use=lambda data: threading.get_ident())
        await sender.send(size, more=False)
        assert (await sender.taken == threading.get_ident()) == on_loop

    run(body)


def test_the_large_ones_share_a_thread_and_the_others_another() -> None:
    """So that memory which one of them needed is there for the next, not held for each of many threads."""

    async def body() -> None:
        incoming, threads = Incoming(longest=1 << 20, total=1 << 23, retry_after=1), list[set[int]]()
        for size in (300 << 10, 20 << 10):
            senders = [Sender(incoming, str(i), lambda data: threading.get_ident()) for i in range(4)]
            for one in senders:
                await one.send(size, more=False)
            threads.append(set(await asyncio.gather(*(one.taken for one in senders))))
        assert [len(found) for found in threads] == [1, 1]
        assert len({threading.get_ident()}.union(*threads)) == 3

    run(body)


def test_a_small_body_does_not_wait_for_large_ones() -> None:
    async def body() -> None:
        incoming, may_end = Incoming(longest=1 << 20, total=1 << 23, retry_after=1), threading.Event()
        large = [Sender(incoming, use=lambda data: may_end.wait(PATIENCE)) for _ in range(3)]
        for one in large:
            await one.send(300 << 10, more=False)
        small = Sender(incoming, "b")
        await small.send(20 << 10, more=False)
        assert await small.taken == 20 << 10
        assert not any(one.taken.done() for one in large)
        may_end.set()
        assert await asyncio.gather(*(one.taken for one in large)) == [True] * 3

    run(body)


def test_clients_have_turns_one_after_the_other() -> None:
    async def body() -> None:
        turns, order = Turns(), list[str]()

        async def work(client: str) -> None:
            async with turns.of(client):
                order.append(client)
                await asyncio.sleep(0)

        asked = [asyncio.ensure_future(work(client)) for client in ("a", "a", "a", "b", "b", "c")]
        await asyncio.sleep(0)
        asked[4].cancel()  # the second of b
        await asyncio.gather(*asked, return_exceptions=True)
        assert order == ["a", "b", "c", "a", "a"]
        async with turns.of("d") as waited:
            assert not waited

    run(body)


def test_a_turn_that_comes_as_its_task_is_cancelled_goes_to_the_next() -> None:
    async def body() -> None:
        turns, order = Turns(), list[str]()

        async def work(client: str) -> None:
            async with turns.of(client):
                order.append(client)

        async with turns.of("first"):
            cancelled, other = asyncio.ensure_future(work("a")), asyncio.ensure_future(work("b"))
            await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, other, return_exceptions=True)
        assert order == ["b"]

    run(body)
