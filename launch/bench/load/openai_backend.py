"""An OpenAI-compatible server under load: streamed completions over HTTP, with the standard library alone.

Knows: the completions endpoint, server-sent events, connections that are kept. Does not know: schedules (generator.py),
which server it is. Prompts are sent as token ids, so that every server gets the same ones; ``ignore_eos`` is sent for
requests that have it, which vLLM and SGLang understand.

An event loop in another thread sends and reads; a chunk's time is taken when its bytes were read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from launch.bench.load.journal import Journal, Served
from launch.errors import BenchError, UsageError
from runtime.frontend.client import PromptRequest

log = logging.getLogger("lockstride")

_LINE_BYTES = 1 << 24  # most of one event
_CONNECT_SECONDS = 30.0
_ASK_AGAIN = 1.0  # seconds between two looks at a server that is not ready
_WAKE_SECONDS = 1.0  # longest wait at a stretch, so that Ctrl-C is noticed


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    """One event of a streamed completion."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class Answer(msgspec.Struct, array_like=True):
    """What came of one request: when each portion of tokens was read, and when it was over, in perf_counter's time."""

    moments: list[float] = []
    tokens: int | None = None
    reason: str = ""
    error: str = ""
    ended: float = 0.0


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class _NotReady(ValueError):
    """The server answers that it cannot serve yet."""


class OpenAIServer:
    """A server's address, its model's name, and connections to it, with the key of OPENAI_API_KEY or
    LOCKSTRIDE_API_KEY. ``patience``: seconds that it may take to listen and load. Raises UsageError or BenchError."""

    def __init__(self, base_url: str, endpoint: str, model: str | None = None, patience: float = 0.0) -> None:
        try:
            parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
            host, port = parts.hostname, parts.port
            if parts.scheme not in ("http", "https") or not host:
                raise ValueError
        except ValueError:
            raise UsageError(f"--base-url {base_url} is no address such as http://localhost:8000") from None
        self.host, self.secure = host, parts.scheme == "https"
        self.port = port or (443 if self.secure else 80)
        self.path = parts.path.rstrip("/") + endpoint
        self._root = parts.path.rstrip("/")
        self._key = _authorization(os.environ)
        self._idle: list[_Connection] = []
        self._running: set[Future[None]] = set()  # a loop and its transports refer weakly to what waits for bytes
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="openai", daemon=True)
        self._thread.start()
        try:
            self.model = model or self._first_model(base_url, patience)
            if model and patience:
                with contextlib.suppress(BenchError):  # a server need not list its models
                    self._first_model(base_url, patience)
        except BaseException:
            self.close()
            raise

    def _first_model(self, base_url: str, patience: float) -> str:
        """Asked once a second until the server listens, and is not loading any more."""
        until, told = time.monotonic() + patience, False
        while True:
            asked = asyncio.run_coroutine_threadsafe(self._get(f"{self._root}/v1/models"), self.loop)
            error = asked.exception()
            loading = isinstance(error, (OSError, asyncio.IncompleteReadError, _NotReady))
            if not loading or time.monotonic() + _ASK_AGAIN > until:
                break
            if not told:
                log.info("waiting for %s, up to %g s (--ready-check-timeout-sec): %s", base_url, patience, error)
            told = True
            time.sleep(_ASK_AGAIN)
        try:
            return str(json.loads(asked.result())["data"][0]["id"])
        except (OSError, ValueError, LookupError, TypeError, asyncio.IncompleteReadError) as error:
            raise BenchError(
                f"{base_url}/v1/models names no model ({type(error).__name__}: {error}): is the server running? "
                "If it does not list its models, type --served-model-name NAME"
            ) from None

    async def _get(self, path: str) -> bytes:
        async with asyncio.timeout(_CONNECT_SECONDS):
            connection = await self._connect()
            try:
                head = f"GET {path} HTTP/1.1\r\nHost: {self.host}\r\n{self._key}\r\n"
                connection.writer.write(head.encode())
                status, headers = await _head(connection.reader)
                body = b"\n".join([line async for line in _body_lines(connection.reader, headers)])
                if status in (401, 403):
                    raise BenchError(
                        f"{self.host}:{self.port} answers HTTP {status} to GET {path}: set OPENAI_API_KEY to a key of "
                        "this server"
                    )
                if status != 200:
                    raise (_NotReady if status in (502, 503, 504) else ValueError)(f"HTTP {status}")
                return body
            finally:
                connection.writer.close()

    async def _connect(self) -> _Connection:
        context = ssl.create_default_context() if self.secure else None
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=context, limit=_LINE_BYTES)
        return _Connection(reader, writer)

    def submit(self, body: bytes, answer: Answer, done: Callable[[], None]) -> None:
        """``complete`` in the thread; ``done`` is called there, too, when all is known."""
        running = asyncio.run_coroutine_threadsafe(self._submitted(body, answer, done), self.loop)
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _submitted(self, body: bytes, answer: Answer, done: Callable[[], None]) -> None:
        try:
            await self.complete(body, answer)
        finally:
            answer.ended = answer.moments[-1] if answer.moments else time.perf_counter()
            done()

    async def complete(self, body: bytes, answer: Answer) -> None:
        """One streamed completion. What goes wrong stands in ``answer.error``."""
        try:
            reused = bool(self._idle)
            connection = self._idle.pop() if reused else await self._connect()
            try:
                status, headers = await self._ask(connection, body)
            except (OSError, asyncio.IncompleteReadError):  # the server closed a connection that it had kept
                if not reused:
                    raise
                connection = await self._connect()
                status, headers = await self._ask(connection, body)
            try:
                await _read_answer(connection.reader, status, headers, answer)
            except BaseException:
                connection.writer.close()
                raise
            if headers.get("connection", "").lower() == "close" or not _is_framed(headers):
                connection.writer.close()
            else:
                self._idle.append(connection)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            answer.error = f"{type(error).__name__}: {error}"

    async def _ask(self, connection: _Connection, body: bytes) -> tuple[int, dict[str, str]]:
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n{self._key}\r\n"
        )
        try:
            connection.writer.write(head.encode() + body)
            await connection.writer.drain()
            return await _head(connection.reader)
        except BaseException:  # also when it is cancelled
            connection.writer.close()
            raise

    def close(self) -> None:
        """Close connections, also those of answers that have not ended, and end the thread."""

        async def close_all() -> None:
            running = asyncio.all_tasks() - {asyncio.current_task()}
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for connection in self._idle:
                connection.writer.close()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(close_all(), self.loop).result(_CONNECT_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CONNECT_SECONDS)
        self.loop.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers, names in lower case."""
    first = await reader.readuntil(b"\r\n")
    words = first.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise ValueError(f"the server answered {first[:80]!r}, which is no HTTP")
    headers: dict[str, str] = {}
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(words[1]), headers


def _is_framed(headers: dict[str, str]) -> bool:
    """Whether the body says where it ends."""
    return "chunked" in headers.get("transfer-encoding", "").lower() or "content-length" in headers


async def _pieces(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body as it comes, framing taken off."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
            pass
        return
    left = int(headers["content-length"]) if "content-length" in headers else None
    while left is None or left > 0:
        piece = await reader.read(1 << 16 if left is None else min(left, 1 << 16))
        if not piece:
            return
        left = None if left is None else left - len(piece)
        yield piece


async def _body_lines(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Lines without their ends; the rest of the body at last."""
    rest = b""
    async for piece in _pieces(reader, headers):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


async def _read_answer(reader: asyncio.StreamReader, status: int, headers: dict[str, str], answer: Answer) -> None:
    """Every event that brings a choice is a portion of tokens, as vLLM's client counts them."""
    if status != 200:
        text = b" ".join([line async for line in _body_lines(reader, headers)])
        answer.error = f"HTTP {status}: {text[:300].decode(errors='replace')}"
        return
    decode = msgspec.json.Decoder(_Chunk).decode
    async for line in _body_lines(reader, headers):
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        at = time.perf_counter()
        chunk = decode(line[5:])
        if chunk.error is not None:
            answer.error = f"the server says: {chunk.error}"
        if chunk.choices:
            answer.moments.append(at)
            answer.reason = chunk.choices[0].finish_reason or answer.reason
        if chunk.usage is not None:
            answer.tokens = chunk.usage.completion_tokens
    if not answer.moments and not answer.error:
        answer.error = "the server ended the answer without a token"


class Clients(Protocol):
    """Who asks the server: a thread of this process, or several processes (client_process.py)."""

    model: str

    def submit(self, body: bytes, answer: Answer, done: Callable[[], None]) -> None: ...
    def close(self) -> None: ...


class OpenAIBackend:
    """One run over a server."""

    def __init__(self, clients: Clients, requests: Sequence[PromptRequest]) -> None:
        self._clients = clients
        self._bodies = [_body(clients.model, one) for one in requests]
        self._wanted = [one.sampling.max_tokens if one.sampling.ignore_eos else None for one in requests]
        self._answers = [Answer() for _ in requests]
        self._ended: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()

    def begin(self) -> None:
        """Bodies are ready: nothing is left to do."""

    def send(self, number: int) -> None:
        answer = self._answers[number]
        self._clients.submit(self._bodies[number], answer, lambda: self._ended.put((answer.ended, number)))

    def advance(self, until: float) -> Sequence[tuple[float, int]]:
        wait = min(_WAKE_SECONDS, max(0.0, until - time.perf_counter()))
        try:
            found = [self._ended.get(timeout=wait) if wait else self._ended.get_nowait()]
        except queue.Empty:
            return ()
        while not self._ended.empty():
            found.append(self._ended.get())
        return sorted(found)

    def journal(self, started: float, ended: float, requests: Sequence[Served]) -> Journal:
        for one, answer, wanted in zip(requests, self._answers, self._wanted, strict=True):
            one.moments, one.ended = answer.moments, answer.ended
            one.reason, one.error = answer.reason, answer.error
            one.counts = _counts(len(answer.moments), answer.tokens)
            if not one.error and wanted is not None and one.tokens != wanted:
                one.error = f"ended by {one.reason or 'nothing'} after {one.tokens} of {wanted} tokens"
        return Journal(started, ended, requests)


def _counts(portions: int, tokens: int | None) -> list[int]:
    """Tokens of each portion: one, but for what the server's usage says beyond or below that, which the first ones get.

    A server may put several tokens into an event, or send an event without one; which is not said."""
    if tokens is None or not portions:
        return [1] * portions
    each, rest = divmod(tokens, portions)
    return [each + (place < rest) for place in range(portions)]


def _body(model: str, request: PromptRequest) -> bytes:
    sampling = request.sampling
    said: dict[str, Any] = {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sampling.ignore_eos:
        said["ignore_eos"] = True
    if sampling.temperature > 0:
        said |= {"top_p": sampling.top_p}
        said |= {"top_k": sampling.top_k} if sampling.top_k else {}
        said |= {"min_p": sampling.min_p} if sampling.min_p else {}
    return msgspec.json.encode(said)


def _authorization(environ: Mapping[str, str]) -> str:
    """A line of a request's head; nothing without a key."""
    key = environ.get("OPENAI_API_KEY") or environ.get("LOCKSTRIDE_API_KEY") or ""
    if not key:
        return ""
    if not key.isascii() or not key.isprintable():
        raise UsageError("OPENAI_API_KEY (or LOCKSTRIDE_API_KEY) has characters that no HTTP header can have")
    return f"Authorization: Bearer {key}\r\n"
