"""uvicorn's HTTP protocol with two bounds that it lacks, on the size of a request's head and on the time it takes, and
deaf to offers of another protocol.

Knows: the hooks of uvicorn's httptools protocol. Does not know: the application.

Without them a client that sends headers for ever, or one byte a minute, holds memory or a connection for ever. And a
client that offers HTTP/2 with its first request (``Upgrade: h2c``: Java's HttpClient, curl --http2) would lose that
request's body: httptools takes what follows such a head for the other protocol (uvicorn issue 2722). A server may go on
in HTTP/1.1 (RFC 9110, 7.8), so the parser never sees the offer.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
_END_OF_HEAD = b"\r\n\r\n"
_OFFER = re.compile(rb"(?i)(?<=\n)upgrade(?=:)")
_NO_OFFER = b"noffer-"  # as long, so that nothing else moves
_CUT_OFFER = re.compile(rb"(?i)\n(upgrade|upgrad|upgra|upgr|upg|up|u)\Z")
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
        self._held = b""  # the beginning of a header's name that may turn out to be an offer
        self._tail = b""  # the last bytes before that

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.seconds, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += self._bytes_of_head(data)
            if self._head_bytes > MAX_HEAD_BYTES:  # before the parser has it: a request that is whole begins in there
                if not self.transport.is_closing():
                    self._end(_TOO_LARGE)
                return
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(self.seconds, self._give_up)
            data = self._without_offer(data)
        super().data_received(data)

    def _bytes_of_head(self, data: bytes) -> int:
        """How much of ``data`` is no body."""
        before = self._tail + self._held
        end = (before + data).find(_END_OF_HEAD)
        return len(data) if end < 0 else end + len(_END_OF_HEAD) - len(before)

    def _without_offer(self, data: bytes) -> bytes:
        """``data`` of a head, with its offer of another protocol under a name that nobody knows."""
        before = len(self._tail)
        data, self._held = self._tail + self._held + data, b""
        end = data.find(_END_OF_HEAD)
        head, rest = (data, b"") if end < 0 else (data[:end], data[end:])
        head = _OFFER.sub(_NO_OFFER, head)
        if not rest and (cut := _CUT_OFFER.search(head)) is not None:
            self._held, head = cut.group(1), head[: cut.start(1)]
        self._tail = b"" if rest else head[1 - len(_END_OF_HEAD) :]
        return (head + rest)[before:]

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._tail = self._held = b""
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
        if self._answers:  # what has come since, an empty line perhaps, is no reason to cut off an answer
            self._head_timer = self.loop.call_later(self.seconds, self._give_up)
        elif not self.transport.is_closing():
            self._end(_TOO_SLOW)

    @property
    def _answers(self) -> bool:
        """Whether an earlier request is being answered on this connection."""
        return self.cycle is not None and not self.cycle.response_complete

    def _end(self, response: bytes) -> None:
        if not self._answers:
            self.transport.write(response)
        self.transport.close()
