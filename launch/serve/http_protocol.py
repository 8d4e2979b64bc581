"""uvicorn's HTTP protocol with two bounds that it lacks: on the size of a request's head, and on the time it takes.

Knows: the hooks of uvicorn's httptools protocol. Does not know: the application.

Without them a client that sends headers for ever, or one byte a minute, holds memory or a connection for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedHeaders(HttpToolsProtocol):
    """A head of at most MAX_HEAD_BYTES within ``seconds``, counted from the connection or from its first byte."""

    seconds = 30.0

    @classmethod
    def within(cls, seconds: float) -> type[BoundedHeaders]:
        return type(cls.__name__, (cls,), {"seconds": seconds})

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.seconds, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(self.seconds, self._give_up)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._end(_TOO_LARGE)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._end(_TOO_SLOW)

    def _end(self, response: bytes) -> None:
        cycle = self.cycle
        if cycle is None or cycle.response_complete:  # else an earlier request is being answered on this connection
            self.transport.write(response)
        self.transport.close()
