"""Bodies on their way in: bytes within limits, then turns in which they become requests.

Knows: how many bytes one body and all of them may have, whose turn it is. Does not know: how long a body may take
(http_protocol.py), what it says (bodies.py, requests.py).

Bodies that are not decoded yet share memory: one that needs more than there is takes it from the largest, so a small
one always gets in. Short bodies are decoded on the event loop, others in two threads: one for up to _MEDIUM bytes, one
for more, so that the former never wait for the latter. In each, clients have turns one after the other.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from launch.serve.errors import ApiError, unavailable
from runtime.number_text import is_whole_number

_SHORT = 16 << 10  # bytes up to which a body is decoded and tokenised on the event loop
_MEDIUM = 256 << 10  # of which tokenising takes a second at most
_Made = TypeVar("_Made")


class Turns:
    """One at a time; of several clients that wait, each in turn."""

    def __init__(self) -> None:
        self._taken = False
        self.waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def of(self, client: Hashable) -> AsyncIterator[bool]:
        """Yields whether it had to wait."""
        if waits := self._taken:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting.setdefault(client, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if not mine.cancelled():
                    self._next(client)
                raise
        self._taken = True
        try:
            yield waits
        finally:
            self._next(client)

    def _next(self, served: Hashable) -> None:
        if served in self.waiting:
            self.waiting.move_to_end(served)
        while self.waiting:
            client, futures = self.waiting.popitem(last=False)
            following = futures.popleft()
            if futures:
                self.waiting[client] = futures  # after all others
            if not following.done():
                following.set_result(None)
                return
        self._taken = False


class _Body:
    """``movable``: its memory can be taken from it."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.movable = True
        self.dropped = False


class Incoming:
    """Of one API process. ``longest``: bytes of a body; ``total``: of all that are not decoded yet."""

    def __init__(self, longest: int, total: int, retry_after: int) -> None:
        self._longest = longest
        self._total = max(total, longest)
        self._retry_after = retry_after
        self._bodies: set[_Body] = set()
        self.held = 0
        self.on_loop, self.medium, self.large = Turns(), Turns(), Turns()
        # One each: memory that a text needed while it was tokenised is used again for the next one.
        self._threads = {turns: ThreadPoolExecutor(1, "bodies") for turns in (self.medium, self.large)}

    async def take(self, request: Request, client: Hashable, use: Callable[[bytearray], _Made]) -> _Made:
        """``use`` of the body, in its turn. ``client``: whose turn that is.

        Raises ApiError 413 or 503 as soon as it is known to be too long for itself or with the others, ClientDisconnect
        where the client left, and what ``use`` raises.
        """
        body = _Body()
        self._bodies.add(body)
        try:
            await self._receive(request, body)
            return await self._use(request, client, body, use)
        finally:
            self.held -= len(body.data)
            self._bodies.remove(body)

    async def _receive(self, request: Request, body: _Body) -> None:
        declared = request.headers.get("content-length", "0")
        if is_whole_number(declared) and int(declared[:20]) > self._longest:
            raise self._too_long()
        async for part in request.stream():
            if len(body.data) + len(part) > self._longest:
                raise self._too_long()
            while self.held + len(part) > self._total and not body.dropped:
                self._drop_largest(body, len(body.data) + len(part))
            if body.dropped:
                raise self._no_memory()
            body.data += part
            self.held += len(part)

    def _drop_largest(self, one: _Body, size: int) -> None:
        """``one`` itself, which is to have ``size`` bytes, unless another has as many."""
        others = (other for other in self._bodies if other is not one and other.movable)
        largest = max(others, key=lambda other: len(other.data), default=one)
        if len(largest.data) < size:
            largest = one
        largest.dropped = True
        self.held -= len(largest.data)
        largest.data.clear()

    async def _use(self, request: Request, client: Hashable, body: _Body, use: Callable[[bytearray], _Made]) -> _Made:
        size = len(body.data)
        turns = self.on_loop if size < _SHORT else self.medium if size <= _MEDIUM else self.large
        async with turns.of(client) as waited:
            if waited and await request.is_disconnected():
                raise ClientDisconnect  # it left meanwhile
            if body.dropped:
                raise self._no_memory()
            body.movable = False
            if turns is not self.on_loop:
                return await asyncio.get_running_loop().run_in_executor(self._threads[turns], use, body.data)
            made = use(body.data)
            await asyncio.sleep(0)  # a thousand that come at once delay nothing else, above all no probe
            return made

    def _too_long(self) -> ApiError:
        return ApiError(
            413, f"the body is longer than {self._longest} bytes (--max-body-bytes)", code="request_too_large"
        )

    def _no_memory(self) -> ApiError:
        return unavailable(
            f"unfinished bodies have {self._total} bytes together (--max-bodies-bytes), and this was the largest",
            "too_many_bodies",
            self._retry_after,
        )
