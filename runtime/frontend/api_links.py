"""Connections to the API processes: messages that never block rank 0, and a thread that says how its engine is doing.

Knows: when an API process is lost: it died, hangs, breaks the protocol, or reads nothing any more. Does not know: what
an order asks for, what follows when a process is lost (engine_server.py), how messages are encoded (serve_messages.py).

The beat thread sends twice a second: how long the engine has made no progress, and which ranks are silent.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from runtime.frontend.engine_protocol import EngineProtocol, Occupancy
from runtime.frontend.framing import BadFrame, FrameReader
from runtime.frontend.serve_messages import (
    MAX_FRAME,
    Alive,
    Beat,
    Columns,
    Drop,
    Ended,
    Opened,
    ResetPrefixCache,
    Scored,
    Step,
    Submit,
    ToApi,
    framed,
    from_api,
)
from runtime.schedule.plan import StepOutput

_BEAT_SECONDS = 0.5
_SILENT_SECONDS = 3.0  # a rank that said nothing for so long is named
_QUIET_SECONDS = 20.0  # of an API process, which speaks every second: after that it hangs
_QUIET_AT_START = 120.0  # until its first word, while it imports and loads a tokenizer
_MOST_UNSENT = 64 << 20  # bytes that an API process may leave unread before it is given up
_READ_BYTES = 1 << 20


class ServedEngine(EngineProtocol, Protocol):
    """What serving needs of an engine beyond its turns."""

    @property
    def occupancy(self) -> Occupancy: ...
    @property
    def agreements(self) -> tuple[tuple[int, ...], float]: ...
    def silent_ranks(self, seconds: float) -> tuple[int, ...]:
        """Ranks without a sign of life for longer. From any thread."""
        ...

    def call_on_verdict(self, callback: Callable[[str], object]) -> object:
        """The callback gets the reason when the watchdog ends the job, before the process leaves."""
        ...


class ApiLink:
    """Rank 0's end of the connection to one API process. ``send`` never blocks, and may be called in any thread."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self.lost: str | None = None  # why nothing is sent any more
        self.heard = False  # the API process has sent bytes
        self._quiet = 0.0
        self._reader = FrameReader(MAX_FRAME)
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def behind(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._unsent)

    def send(self, message: ToApi) -> None:
        self.send_frame(framed(message))

    def send_frame(self, frame: bytes) -> None:
        with self._lock:
            if self.lost is not None:
                return
            self._unsent.append(memoryview(frame))
            self._unsent_bytes += len(frame)
            self._flush()
            if self._unsent_bytes > _MOST_UNSENT:
                self.lost = f"it has not read {self._unsent_bytes >> 20} MiB of answers"

    def flush(self) -> None:
        with self._lock:
            if self.lost is None:
                self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self.socket.send(self._unsent[0])
                self._unsent_bytes -= sent
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self.lost = f"its connection broke: {error.strerror}"

    def receive(self, passed: float = 0.0) -> list[Submit | Drop | ResetPrefixCache]:
        """What has come, _READ_BYTES at most: the rest waits for the next turn. ``passed``: seconds since the last one.

        Sets ``lost`` at the end of the connection, for what is no message, and after too long a silence.
        """
        orders: list[Submit | Drop | ResetPrefixCache] = []
        self._quiet += passed
        try:
            if self.lost is None and not (data := self.socket.recv(_READ_BYTES)):
                self.lost = "it ended"
            if self.lost is None:
                self.heard, self._quiet = True, 0.0
                messages = [from_api(body) for body in self._reader.bodies(data)]
                orders = [message for message in messages if not isinstance(message, Alive)]
        except BlockingIOError:
            if self._quiet > (_QUIET_SECONDS if self.heard else _QUIET_AT_START):
                self.lost = f"it has said nothing for {self._quiet:.0f} s"
        except BadFrame as error:
            self.lost = f"it broke the protocol: {error}"
        except OSError as error:
            self.lost = f"its connection broke: {error.strerror}"
        return orders

    def close(self) -> None:
        with self._lock:
            self.lost = self.lost or "closed"
            self.socket.close()


class News:
    """What one API process receives of a turn."""

    def __init__(self) -> None:
        self.opened: list[Opened] = []
        self.scored: list[Scored] = []
        self.ended: list[Ended] = []

    def step(self, columns: Columns | None) -> Step | None:
        if columns is None and not (self.opened or self.scored or self.ended):
            return None
        return Step(columns, tuple(self.opened), tuple(self.scored), tuple(self.ended))


class Beats:
    """The beat thread: from before the engine is loaded until the end, even while its thread waits for another rank.

    ``add`` connections, ``attend`` an engine once there is one; ``progress`` is called by the engine's thread.
    """

    def __init__(self) -> None:
        self._links: tuple[ApiLink, ...] = ()
        self._engine: ServedEngine | None = None
        self._turns = 0
        self._place, self._number = "load", 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="api beats", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def speak_to(self, links: Sequence[ApiLink]) -> None:
        self._links = tuple(links)

    def attend(self, engine: ServedEngine) -> None:
        self._engine = engine

    def progress(self, place: str, step: int) -> None:
        self._turns += 1
        self._place, self._number = place, step

    def _run(self) -> None:
        seen, since = -1, time.monotonic()
        while not self._stopping.wait(_BEAT_SECONDS):
            now = time.monotonic()
            engine, loading = self._engine, self._engine is None
            if loading or self._turns != seen:
                seen, since = self._turns, now
            silent = () if engine is None else engine.silent_ranks(_SILENT_SECONDS)
            frame = framed(Beat(now - since, self._place, self._number, silent))
            for link in self._links:
                link.send_frame(frame)


def columns_of(output: StepOutput) -> Columns | None:
    """Of a step with rows; as lists, for columns may be tuples or arrays."""
    if not len(output.request_ids):
        return None
    return Columns(_listed(output.request_ids), _listed(output.tokens), _listed(output.counts), output.width)


def _listed(column: Sequence[int]) -> list[int]:
    as_list = getattr(column, "tolist", None)
    return list(column) if as_list is None else as_list()
