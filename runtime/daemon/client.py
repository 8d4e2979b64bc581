"""SlotClient: a program's end of a daemon's socket, with tagged frames; and the same for asyncio.

Knows: how calls become lines, and which session each frame belongs to. Does not know: the daemon.

    with SlotClient("/tmp/slots.sock") as client:
        chat = client.start("def gcd(a, b):", max_tokens=64, quantum=16, keep=True, text=True)
        for frame in chat.answer():                      # quantum after quantum, until the answer is complete
            if frame.kind is Kind.TEXT: print(frame.text, end="")
        chat.extend("\\n\\ndef lcm(a, b):", max_tokens=64, quantum=16)
    async with AsyncSlotClient("/tmp/slots.sock") as client:
        chat = await client.start([1, 2, 3], max_tokens=64, quantum=16)
        async for frame in chat.answer(): ...

A call waits for the daemon's answer to its line. Frames of other sessions that come meanwhile are kept.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Generic, Self, TypeVar

from runtime.daemon.frames import Frame, FrameReader, Kind
from runtime.daemon.verbs import ALIASES, ALIASES_OF_BATCHES
from runtime.frontend.framing import BadFrame

_READ_BYTES: Final = 1 << 16
_FINAL: Final = (Kind.DONE, Kind.CLOSED)
_LATE: Final = ("SCHED_DRAIN", "SCHED_PROBE")  # they are answered when they are over

Prompt = str | Sequence[int]
C = TypeVar("C", "SlotClient", "AsyncSlotClient")


class SlotError(RuntimeError):
    """The daemon refused a line, or is gone. The text is the daemon's."""


def _line(verb: str, request: int | None = None, slot: int | None = None, *arguments: object, **options: Any) -> str:
    words: list[object] = [] if request is None else ["REQ", request]
    words += [verb] if slot is None else ["SLOT", slot, verb]
    words += [argument for argument in arguments if argument is not None]
    words += [f"{name}={_value(value)}" for name, value in options.items()]
    return " ".join(map(str, words))


def _verb_of(line: str) -> str:
    """As its answer names it."""
    words = line.replace("=", " ").split()
    while words and words[0] in ("REQ", "SLOT", "slot"):
        del words[:2]
    verb = words[0] if words else ""
    return ALIASES.get(verb, ALIASES_OF_BATCHES.get(verb, verb))


def _value(value: Any) -> str:
    if isinstance(value, str | list | tuple):
        return json.dumps(value)
    return str(int(value) if isinstance(value, bool) else value)


def _prompt(prompt: Prompt) -> str:
    return json.dumps(prompt if isinstance(prompt, str) else list(prompt))


class _Desk:
    """Frames by the session or the line that they answer."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._expected = 0
        self.answers: deque[Frame] = deque()  # ACK, STATS, and ERROR of a line
        self._given_up: deque[str] = deque()  # verbs of lines whose answers are still to come, and are dropped then
        self.of_sessions: dict[int, deque[Frame]] = {}
        self.loose: deque[Frame] = deque()  # of sessions that this client did not begin
        self.latest_request = 0
        self.taken = 0  # how often bytes came

    def take(self, data: bytes) -> list[Frame]:
        self.taken += 1
        found = list(self._reader.frames(data))
        for frame in found:
            if frame.sequence != self._expected:
                raise BadFrame(f"frame {frame.sequence} came where {self._expected} was due: one is lost")
            self._expected = (frame.sequence + 1) % (1 << 32)
            if frame.kind in (Kind.ACK, Kind.STATS) or (frame.kind is Kind.ERROR and not frame.epoch):
                if not self._answers_given_up(frame):
                    self.answers.append(frame)
            else:
                self.of_sessions.get(frame.request, self.loose).append(frame)
        return found

    def _answers_given_up(self, frame: Frame) -> bool:
        """Whether it answers a line that was given up. Answers come in the order of the lines, except those of _LATE,
        which name their verb, as each ACK does."""
        if frame.kind is Kind.ERROR:
            late = [verb for verb in self._given_up if verb in _LATE and frame.text.startswith(f"{verb}: ")]
            found = late or [verb for verb in self._given_up if verb not in _LATE]
        else:
            verb = "STATS" if frame.kind is Kind.STATS else frame.answer["verb"]
            found = [verb] if verb in self._given_up else []
        if found:
            self._given_up.remove(found[0])
        return bool(found)

    def give_up(self, line: str) -> None:
        """The caller of the latest line does not wait for its answer any more."""
        if not self.answers:
            self._given_up.append(_verb_of(line))
        self.answers.clear()

    def abandon(self, request: int) -> None:
        """A CANCEL of this session followed a line that was given up: the answers to both are dropped."""
        self._given_up.append("CANCEL")
        self.of_sessions[request] = deque(maxlen=0)

    def new_request(self) -> int:
        self.latest_request += 1
        self.of_sessions[self.latest_request] = deque()
        return self.latest_request


def _answer_of(frame: Frame) -> dict[str, Any]:
    if frame.kind is Kind.ERROR:
        raise SlotError(frame.text)
    return dict(frame.answer)


class _Session(Generic[C]):
    """A session of a client of kind C. ``epoch``: its turns, as the daemon counts them; ``quantum``: of CONTINUE.

    ``parent``: of a fork, which runs only when a verb starts it. Its answer is complete if its parent's is.
    """

    def __init__(
        self, client: C, request: int, quantum: int, answer: dict[str, Any], parent: _Session[C] | None = None
    ) -> None:
        self.request, self.quantum = request, quantum
        self.epoch, self.slot = int(answer["epoch"]), int(answer.get("place", -1))
        self._client: C = client
        self.finished: bool = parent is not None and parent.finished  # its answer is complete, or it is closed
        self.running = parent is None  # frames come

    def _next(self) -> Frame | None:
        """Its next frame, if it is there. Raises SlotError for one of its verbs that came too late."""
        frames: deque[Frame] = self._client.desk.of_sessions[self.request]
        if not frames:
            return None
        frame = frames.popleft()
        self.running = self.running and frame.kind not in (Kind.ERROR, Kind.QUANTUM_DONE, *_FINAL)
        if frame.kind is Kind.ERROR:
            self.epoch = max(self.epoch, frame.epoch)  # of an EXTEND that was refused the turn is over
            raise SlotError(frame.text)
        self.finished = self.finished or frame.kind in _FINAL
        return frame


class SlotSession(_Session["SlotClient"]):
    def frames(self) -> Iterator[Frame]:
        """Until its quantum is over: the last is QUANTUM_DONE, DONE or CLOSED."""
        while True:
            while (frame := self._next()) is None:
                self._client.read()
            yield frame
            if frame.kind is Kind.QUANTUM_DONE or frame.kind in _FINAL:
                return

    def answer(self) -> Iterator[Frame]:
        """Quantum after quantum, until the answer is complete or the session closed; none if it already is."""
        while not self.finished:
            if not self.running:
                self.proceed()
            yield from self.frames()

    def tokens(self) -> list[int]:
        """All ids of ``answer``."""
        return [token for frame in self.answer() if frame.kind is Kind.TOKEN for token in frame.tokens]

    def proceed(self, tokens: int | None = None) -> None:
        """One more quantum. Raises SlotError."""
        self._client.command(_line("CONTINUE", self.request, None, tokens or self.quantum, self.epoch))
        self.running = True

    def extend(self, prompt: Prompt, *, max_tokens: int, quantum: int | None = None) -> None:
        """The next turn. Raises SlotError."""
        self.quantum = quantum or self.quantum
        answer = self._client.command(_line("EXTEND", self.request, None, _prompt(prompt), max_tokens, self.quantum))
        self.epoch, self.finished, self.running = int(answer["epoch"]), False, True

    def fork(self) -> SlotSession:
        """Another session with this one's context."""
        request = self._client.desk.new_request()
        answer = self._client.command(_line("FORK", request, None, self.request), opens=request)
        return SlotSession(self._client, request, self.quantum, answer, self)

    def close(self) -> None:
        """End it, whatever it does."""
        self._client.command(_line("CANCEL", self.request))
        for _ in self.frames():
            pass


class SlotClient:
    """A connection to the daemon at ``path``. ``facts``: what it said of itself: model, max_model_len, places.

    Raises OSError if no daemon listens, and SlotError. One thread at a time.
    """

    def __init__(self, path: str | Path, *, timeout: float | None = None) -> None:
        self.desk = _Desk()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(str(path))
            self.facts = self.command("TAGGED 1")
        except BaseException:
            self._socket.close()
            raise

    def start(
        self, prompt: Prompt, *, max_tokens: int, quantum: int, slot: int | None = None, **options: Any
    ) -> SlotSession:
        """A new session. ``options``: keep, text, seed, temperature, stop and the others of the verb START."""
        request = self.desk.new_request()
        line = _line("START", request, slot, _prompt(prompt), max_tokens, quantum, **options)
        return SlotSession(self, request, quantum, self.command(line, opens=request))

    def command(self, line: str, *, opens: int | None = None) -> dict[str, Any]:
        """Send any line of the protocol and wait for its answer. Raises SlotError, and TimeoutError: what the line asks
        for may be done all the same, and its answer is dropped. A connection that takes no whole line is closed.
        ``opens``: the session that the line opens; it is closed again if the wait for the answer is given up."""
        self._say(line)
        try:
            while not self.desk.answers:
                self.read()
        except BaseException:
            self.desk.give_up(line)
            if opens is not None:
                with suppress(OSError):  # then the connection is closed, and its sessions with it
                    self._say(_line("CANCEL", opens))
                self.desk.abandon(opens)
            raise
        return _answer_of(self.desk.answers.popleft())

    def _say(self, line: str) -> None:
        try:
            self._socket.sendall(line.encode() + b"\n")
        except BaseException:
            self._socket.close()
            raise

    def read(self) -> list[Frame]:
        """Wait for bytes, and sort their frames. Raises SlotError if the daemon is gone."""
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise SlotError("the daemon has closed the connection")
        return self.desk.take(data)

    def close(self) -> None:
        """The daemon closes all its sessions."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncSlotSession(_Session["AsyncSlotClient"]):
    """One session of an AsyncSlotClient; calls as those of SlotSession."""

    async def frames(self) -> AsyncIterator[Frame]:
        while True:
            while (frame := self._next()) is None:
                await self._client.wait()
            yield frame
            if frame.kind is Kind.QUANTUM_DONE or frame.kind in _FINAL:
                return

    async def answer(self) -> AsyncIterator[Frame]:
        while not self.finished:
            if not self.running:
                await self.proceed()
            async for frame in self.frames():
                yield frame

    async def tokens(self) -> list[int]:
        return [token async for frame in self.answer() if frame.kind is Kind.TOKEN for token in frame.tokens]

    async def proceed(self, tokens: int | None = None) -> None:
        await self._client.command(_line("CONTINUE", self.request, None, tokens or self.quantum, self.epoch))
        self.running = True

    async def extend(self, prompt: Prompt, *, max_tokens: int, quantum: int | None = None) -> None:
        self.quantum = quantum or self.quantum
        line = _line("EXTEND", self.request, None, _prompt(prompt), max_tokens, self.quantum)
        answer = await self._client.command(line)
        self.epoch, self.finished, self.running = int(answer["epoch"]), False, True

    async def fork(self) -> AsyncSlotSession:
        request = self._client.desk.new_request()
        answer = await self._client.command(_line("FORK", request, None, self.request), opens=request)
        return AsyncSlotSession(self._client, request, self.quantum, answer, self)

    async def close(self) -> None:
        await self._client.command(_line("CANCEL", self.request))


class AsyncSlotClient:
    """SlotClient for asyncio: any number of tasks, each with its sessions. ``async with`` connects.

    One line waits for its answer at a time. So give SCHED_DRAIN and SCHED_PROBE, whose answer comes when they are over,
    a connection whose other tasks can wait; MODE auto is answered at once.
    """

    def __init__(self, path: str | Path) -> None:
        self.desk = _Desk()
        self.facts: dict[str, Any] = {}
        self._path = str(path)
        self._saying = asyncio.Lock()  # a line and its answer belong together
        self._news = asyncio.Condition()
        self._gone: SlotError | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def connect(self) -> Self:
        """Raises OSError if no daemon listens."""
        reader, self._writer = await asyncio.open_unix_connection(self._path)
        self._reading = asyncio.ensure_future(self._read(reader))
        try:
            self.facts = await self.command("TAGGED 1")
        except BaseException:
            await self.close()
            raise
        return self

    async def _read(self, reader: asyncio.StreamReader) -> None:
        why = "the daemon has closed the connection"
        try:
            while data := await reader.read(_READ_BYTES):
                self.desk.take(data)
                async with self._news:
                    self._news.notify_all()
        except (OSError, BadFrame) as error:
            why = f"the connection broke: {error}"
        self._gone = SlotError(why)
        async with self._news:
            self._news.notify_all()

    async def wait(self) -> None:
        """For bytes to come. Raises SlotError if none will."""
        if self._gone is not None:
            raise self._gone
        seen = self.desk.taken
        async with self._news:
            if self.desk.taken == seen and self._gone is None:
                await self._news.wait()

    async def start(
        self, prompt: Prompt, *, max_tokens: int, quantum: int, slot: int | None = None, **options: Any
    ) -> AsyncSlotSession:
        request = self.desk.new_request()
        line = _line("START", request, slot, _prompt(prompt), max_tokens, quantum, **options)
        return AsyncSlotSession(self, request, quantum, await self.command(line, opens=request))

    async def command(self, line: str, *, opens: int | None = None) -> dict[str, Any]:
        """As SlotClient's. What a line asks for is done even if its task is cancelled while it waits."""
        assert self._writer is not None, "connect first"
        async with self._saying:
            self._writer.write(line.encode() + b"\n")
            try:
                await self._writer.drain()
                while not self.desk.answers:
                    await self.wait()
            except BaseException:
                self.desk.give_up(line)
                if opens is not None:
                    self._writer.write(_line("CANCEL", opens).encode() + b"\n")
                    self.desk.abandon(opens)
                raise
            return _answer_of(self.desk.answers.popleft())

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
        await self.close()
