"""uvicorn's HTTP protocol with bounds that it lacks, on what a request has besides its body, on the time that its head
and its body take, and on connections; and deaf to offers of another protocol.

Knows: the hooks of uvicorn's httptools protocol. Does not know: the application, how many bytes a body may have.

Without them a client that sends headers or trailers for ever, or one byte a minute, holds memory or a connection for
ever, and connections without a request leave no file descriptor for a probe. And a client that offers HTTP/2 with its
first request (``Upgrade: h2c``: Java's HttpClient, curl --http2) would lose that request's body: httptools takes what
follows such a head for the other protocol (uvicorn issue 2722). A server may go on in HTTP/1.1 (RFC 9110, 7.8), so the
parser never sees the offer.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from launch.serve.errors import ApiError

MAX_HEAD_BYTES = 64 << 10  # also of trailers, and of what a chunk has besides its bytes
CROWDED = "crowded"  # in a scope's state: of a connection on which probes alone are answered
_END_OF_HEAD = b"\r\n\r\n"
_OFFER = re.compile(rb"(?i)(?<=\n)upgrade(?=:)")
_NO_OFFER = b"noffer-"  # as long, so that nothing else moves
_CUT_OFFER = re.compile(rb"(?i)\n(upgrade|upgrad|upgra|upgr|upg|up|u)\Z")
_FOR_PROBES = 16  # connections
_OTHER_FILES = 48  # at least, where a process may have several times as many


class Connections:
    """Those of one process that may have ``files`` open: too many of them never keep a probe out.

    Beyond most of ``files``, a new connection closes the one that has waited longest for its client to send a request.
    Where all have one that is being answered, it is ``CROWDED``; of those there are a few.
    """

    def __init__(self, files: int) -> None:
        self.most = max(files // 2, files - _FOR_PROBES - _OTHER_FILES)
        self._open: set[BoundedHttp] = set()
        self._waiting: dict[BoundedHttp, None] = {}  # the one that has waited longest comes first

    def made(self, one: BoundedHttp) -> bool:
        """Whether it is crowded."""
        self._open.add(one)
        if len(self._open) > self.most and self._waiting:
            self.lost(longest := next(iter(self._waiting)))
            longest.transport.abort()
        self._waiting[one] = None
        if len(self._open) > self.most + _FOR_PROBES:
            one.transport.abort()
        return len(self._open) > self.most

    def waits(self, one: BoundedHttp) -> None:
        """Its last request was answered."""
        if one in self._open:
            self._waiting[one] = None

    def asks(self, one: BoundedHttp) -> None:
        """It has sent a whole request."""
        self._waiting.pop(one, None)

    def lost(self, one: BoundedHttp) -> None:
        self._open.discard(one)
        self._waiting.pop(one, None)


class BoundedHttp(HttpToolsProtocol):
    """A head of at most MAX_HEAD_BYTES within ``head_seconds``, counted from the connection or from its first byte;
    then its body within ``body_seconds``."""

    head_seconds = 30.0
    body_seconds = 60.0
    seats = Connections(1 << 16)

    @classmethod
    def within(cls, head_seconds: float, body_seconds: float, files: int) -> type[BoundedHttp]:
        """``files``: that the process may have open."""
        limits = {"head_seconds": head_seconds, "body_seconds": body_seconds, "seats": Connections(files)}
        return type(cls.__name__, (cls,), limits)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_bytes = 0
        self._in_head = True
        self._timer: asyncio.TimerHandle | None = None  # of a head or a body
        self._framing = 0  # bytes of a message besides its head and body, since the last one that began with a chunk
        self._crowded: bool | None = None  # None: it has no seat yet
        self._held = b""  # the beginning of a header's name that may turn out to be an offer
        self._tail = b""  # the last bytes before that

    def take_seat(self, transport: Any) -> None:
        """Of TCP: a client that never ends its handshake holds a file, too."""
        self.transport = transport
        self._crowded = self.seats.made(self)
        if self._crowded:
            self.app_state = {**self.app_state, CROWDED: True}

    def connection_made(self, transport: Any) -> None:
        if self._crowded is None:
            self.take_seat(transport)
        super().connection_made(transport)
        self._time(self.head_seconds, self._give_up_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.seats.lost(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += self._bytes_of_head(data)
            if self._head_bytes > MAX_HEAD_BYTES:  # before the parser has it: a request that is whole begins in there
                self._end(_TOO_LARGE)
                return
            if self._timer is None:
                self._time(self.head_seconds, self._give_up_head)
            data = self._without_offer(data)
        else:
            self._framing += len(data)
        super().data_received(data)
        self._framing = max(0, self._framing)
        if self._framing > MAX_HEAD_BYTES:
            self._end(_TOO_LARGE)

    def _bytes_of_head(self, data: bytes) -> int:
        """How much of ``data`` is no body."""
        before = self._tail + self._held
        end = (before + data).find(_END_OF_HEAD)
        return len(data) if end < 0 else end + len(_END_OF_HEAD) - len(before)

    def _without_offer(self, data: bytes) -> bytes:
        """``data`` of a head, with its offer of another protocol under an unknown name."""
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

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # the others are trailers, which nothing reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes, self._framing = False, 0, 0
        self._tail = self._held = b""
        self._stop_timer()
        super().on_headers_complete()
        self.cycle.keep_alive = self.cycle.keep_alive and not self._crowded
        self._time(self.body_seconds, self._give_up_body)

    def on_chunk_header(self) -> None:
        self._framing = 0

    def on_body(self, body: bytes) -> None:
        self._framing -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_timer()
        self.seats.asks(self)
        super().on_message_complete()
        self._in_head = True

    def on_response_complete(self) -> None:
        if self._in_head and not self.pipeline:
            self.seats.waits(self)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._end(_NO_HTTP)

    def _time(self, seconds: float, end: Any) -> None:
        self._timer = self.loop.call_later(seconds, end)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up_head(self) -> None:
        self._timer = None
        if self._answers:  # what has come since, an empty line perhaps, is no reason to cut off an answer
            self._time(self.head_seconds, self._give_up_head)
        else:
            self._end(_TOO_SLOW)

    def _give_up_body(self) -> None:
        self._timer = None
        if self.pipeline:  # an earlier request is answered: meanwhile nothing is read
            self._time(self.body_seconds, self._give_up_body)
        else:
            self._end(_TOO_SLOW)

    @property
    def _answers(self) -> bool:
        """Whether an earlier request is being answered on this connection."""
        return self.cycle is not None and not self.cycle.response_complete

    def _end(self, response: bytes) -> None:
        """Closes the connection; with ``response`` where that would be taken for the right request's."""
        if self.transport.is_closing():
            return
        may_answer = not self._answers if self._in_head else not (self.pipeline or self.cycle.response_started)
        if may_answer:
            self.transport.write(response)
        self.transport.close()


class TlsHandshake(asyncio.Protocol):
    """A connection until its handshake is over, within ``head_seconds`` of the ``BoundedHttp`` that then takes it."""

    def __init__(self, tls: ssl.SSLContext, http: BoundedHttp) -> None:
        self._tls = tls
        self._http = http
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self._http.take_seat(self)
        try:
            socket = transport.get_extra_info("socket").dup()
        except OSError:  # no file is left
            self._http.seats.lost(self._http)
        else:
            self._task = self._http.loop.create_task(self._shake_hands(socket))
        transport.abort()  # nothing was read

    def abort(self) -> None:
        """Also of one that does not get its seat: its task comes later."""
        self._http.loop.call_soon(lambda: self._task and self._task.cancel())

    async def _shake_hands(self, socket: Any) -> None:
        http = self._http
        try:
            await http.loop.connect_accepted_socket(
                lambda: http, socket, ssl=self._tls, ssl_handshake_timeout=http.head_seconds
            )
        except (OSError, asyncio.CancelledError):
            http.seats.lost(http)


def with_tls(kind: type[BoundedHttp], certificate: str, key: str | None) -> Callable[..., TlsHandshake]:
    """``kind`` over TLS."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    return lambda **named: TlsHandshake(tls, kind(**named))


def _whole(status: HTTPStatus, message: str) -> bytes:
    """A response, with OpenAI's error object."""
    body = ApiError(status, message).body
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


_TOO_LARGE = _whole(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head or the trailers have more than {MAX_HEAD_BYTES} bytes"
)
_TOO_SLOW = _whole(HTTPStatus.REQUEST_TIMEOUT, "the request did not come in time")
_NO_HTTP = _whole(HTTPStatus.BAD_REQUEST, "the request is no HTTP/1.1")
