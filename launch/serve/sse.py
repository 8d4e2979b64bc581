"""A stream of server-sent events as an ASGI response: one ``send`` an event.

Knows: the form of events, which end of a stream clients notice. Does not know: what the events say.

Rules that clients of the field need (docs/serving.md): an event is ``data: `` and one line of JSON. Nothing else is
sent between events, above all no comments, unless asked for. A failure is ``event: error`` with an OpenAI error object,
then [DONE]: some clients count anything else, even a closed connection, as success. (/v1/responses has other events,
and no [DONE].)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from launch.serve.errors import ApiError
from runtime.frontend.remote_engine import ClientGone

log = logging.getLogger("lockstride.api")

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class EventStream:
    """``events`` yields each event, of which ``frame`` makes what is sent. An ApiError that it raises ends the stream
    as a failure.

    ``left`` is called when the stream is over, whatever ended it. ``comment_seconds``: silence after which a comment
    is sent, 0 for never. ``end``: what is sent last.
    """

    def __init__(
        self,
        events: AsyncGenerator[Any, None],
        left: Callable[[], object],
        comment_seconds: float = 0.0,
        frame: Callable[[Any], bytes] = event,
        end: bytes = DONE,
    ) -> None:
        self._events = events
        self._left = left
        self._comment_seconds = comment_seconds
        self._frame = frame
        self._end = end

    async def each(self) -> AsyncGenerator[Any, None]:
        """What ``events`` yields, for a caller that sends it otherwise, or not at all."""
        try:
            async for data in self._events:
                yield data
        finally:
            self._left()

    def translated(
        self, into: Callable[[AsyncIterable[Any]], AsyncGenerator[Any, None]], frame: Callable[[Any], bytes]
    ) -> EventStream:
        """A stream of what ``into`` makes of the events; nothing follows the last one."""
        return EventStream(into(self._events), self._left, self._comment_seconds, frame, b"")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                async for data in self._each(send):
                    await send({"type": "http.response.body", "body": self._frame(data), "more_body": True})
            except ClientGone:
                raise
            except Exception as error:
                if isinstance(error, ApiError):
                    told = error
                else:
                    log.exception("a stream failed that should not have")
                    told = ApiError(500, "an internal error; the server's log has it", kind="internal_server_error")
                failed = b"event: error\n" + event(told.body)
                await send({"type": "http.response.body", "body": failed, "more_body": True})
            await send({"type": "http.response.body", "body": self._end, "more_body": False})
        except ClientGone:
            pass  # the client has gone
        finally:
            self._left()

    def _each(self, send: Send) -> AsyncGenerator[Any, None]:
        return self._events if self._comment_seconds <= 0 else self._with_comments(send)

    async def _with_comments(self, send: Send) -> AsyncGenerator[Any, None]:
        """The events; between two that are far apart, comments."""
        following = asyncio.ensure_future(anext(self._events, None))
        try:
            while True:
                done, _ = await asyncio.wait((following,), timeout=self._comment_seconds)
                if not done:
                    await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
                    continue
                data = following.result()
                if data is None:
                    return
                yield data
                following = asyncio.ensure_future(anext(self._events, None))
        finally:
            following.cancel()
