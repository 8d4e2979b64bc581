"""Clients in separate processes: one Python process cannot receive all events of a fast server.

Knows: how requests go to such a process and what comes back, and which process gets the next. Does not know: HTTP
(openai_backend.py), schedules, what is measured.

    parent to child    msgpack in frames (runtime/frontend/framing.py): first the server, then one Ask a request
    child to parent    the same: Told, when a request has ended, with the times of its portions

The times are of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from launch.bench.load.openai_backend import Answer, OpenAIServer
from runtime.frontend.framing import bodies_from, framed

_MOST_BYTES = 1 << 30  # of a frame
_END_SECONDS = 10.0
_ENDED = "its client process has ended"


class ServerAddress(msgspec.Struct, frozen=True, array_like=True):
    """What OpenAIServer is made of."""

    base_url: str
    endpoint: str
    model: str


class Ask(msgspec.Struct, frozen=True, array_like=True):
    number: int
    body: bytes


class Told(msgspec.Struct, frozen=True, array_like=True):
    """What came of request ``number``."""

    number: int
    answer: Answer


def _send(end: socket.socket, message: msgspec.Struct) -> None:
    end.sendall(framed(msgspec.msgpack.encode(message)))


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    end: socket.socket
    reader: threading.Thread
    asked: dict[int, tuple[Answer, Callable[[], None]]]


class ClientProcesses:
    """So many processes that ask one server. What one of them was asked has failed when it ends before its time."""

    def __init__(self, count: int, address: ServerAddress) -> None:
        self.model = address.model
        self._next = 0
        self._lock = threading.Lock()
        self._children: list[_Child] = []
        try:
            for _ in range(count):
                self._children.append(self._started(address))
        except BaseException:
            self.close()
            raise

    def _started(self, address: ServerAddress) -> _Child:
        ours, theirs = socket.socketpair()
        words = [sys.executable, "-m", "launch.bench.load.client_process", str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(  # in another process group: a terminal's Ctrl-C is for the parent, who ends it
                words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, process_group=0
            )
        _send(ours, address)
        asked: dict[int, tuple[Answer, Callable[[], None]]] = {}
        reader = threading.Thread(target=self._read, args=(ours, asked), name="client process", daemon=True)
        reader.start()
        return _Child(process, ours, reader, asked)

    def submit(self, body: bytes, answer: Answer, done: Callable[[], None]) -> None:
        """Ask the process that has least to do; ``done`` is called, in another thread, when ``answer`` is complete."""
        child = min(self._children, key=lambda one: len(one.asked))
        with self._lock:
            number, self._next = self._next, self._next + 1
            child.asked[number] = (answer, done)
        try:
            _send(child.end, Ask(number, body))
        except OSError:
            with self._lock:
                left = child.asked.pop(number, None)
            if left is not None:  # its reader has not reported yet
                answer.error = _ENDED
                done()

    def _read(self, end: socket.socket, asked: dict[int, tuple[Answer, Callable[[], None]]]) -> None:
        decode = msgspec.msgpack.Decoder(Told).decode
        for frame in bodies_from(end, _MOST_BYTES):
            told = decode(frame)
            with self._lock:
                answer, done = asked.pop(told.number)
            for name in Answer.__struct_fields__:
                setattr(answer, name, getattr(told.answer, name))
            done()
        with self._lock:
            left = list(asked.values())
            asked.clear()
        for answer, done in left:
            answer.error = _ENDED
            done()

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            with suppress(OSError):  # it has gone already
                child.end.shutdown(socket.SHUT_RDWR)  # wakes its reader, which a close does not
        for child in self._children:
            try:
                child.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.reader.join(_END_SECONDS)
            child.end.close()


def serve_parent(end: socket.socket) -> None:
    """The child's life: ask what the parent says until it is gone."""
    frames = bodies_from(end, _MOST_BYTES)
    if (frame := next(frames, None)) is None:
        return
    address = msgspec.msgpack.decode(frame, type=ServerAddress)
    server = OpenAIServer(address.base_url, address.endpoint, address.model)
    decode = msgspec.msgpack.Decoder(Ask).decode

    def ask(number: int, body: bytes) -> None:
        answer = Answer()
        server.submit(body, answer, lambda: tell(number, answer))

    def tell(number: int, answer: Answer) -> None:
        with suppress(OSError):  # the parent wants no more
            _send(end, Told(number, answer))

    for frame in frames:
        one = decode(frame)
        ask(one.number, one.body)
    server.close()


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as of_parent:
        serve_parent(of_parent)
