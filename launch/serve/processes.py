"""The API processes of rank 0: started before the model is loaded, started again when they die, gone when it ends.

Knows: listening sockets, what a child inherits, how often a process may die. Does not know: what the processes do
(api_process.py), what becomes of their requests (runtime/frontend/engine_server.py).

Rank 0 holds the listening sockets, one for each process (SO_REUSEPORT): while a process is started again, connections
wait in the kernel.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from launch.errors import UsageError
from launch.serve.settings import ServerSettings, encoded
from runtime.client_socket import listen
from runtime.frontend.api_links import ApiLink
from runtime.frontend.serve_messages import Setup

_ROOT = Path(__file__).resolve().parents[2]
_BACKLOG = 2048
_LINK_BYTES = 4 << 20  # the kernel's buffer of a connection
_FREE_DEATHS = 3  # after more, the next start is put off
_WITHIN_SECONDS = 60.0
_LONGEST_PAUSE = 10.0  # seconds
_MOST_STARTS = 5  # of processes of which none has ever said a word
_END_SECONDS = 6.0

log = logging.getLogger("lockstride")


@dataclass(slots=True)
class _Child:
    index: int
    process: subprocess.Popen[bytes]
    link: ApiLink


class ApiProcesses:
    """``start`` once; ``links`` are their connections. ``replace`` is asked for a new one in place of a lost one."""

    def __init__(self, settings: ServerSettings, listeners: Sequence[socket.socket]) -> None:
        self._settings = settings
        self._listeners = list(listeners)
        self._metrics = [os.memfd_create(f"lockstride metrics {at}") for at in range(len(self._listeners))]
        self._children: dict[ApiLink, _Child] = {}
        self._deaths: deque[float] = deque()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._served = False  # one of them has said something
        self.given_up = threading.Event()  # none has, and they die again and again

    def start(self) -> list[ApiLink]:
        return [self._start(index).link for index in range(len(self._listeners))]

    def replace(self, lost: ApiLink, connect: Callable[[ApiLink], object]) -> None:
        """In another thread, for a dead process must be waited for; ``connect`` is called there."""
        threading.Thread(target=self._replace, args=(lost, connect), name="api restart", daemon=True).start()

    def close(self) -> None:
        """Wait for those that were said goodbye to; kill what does not leave."""
        with self._lock:
            self._closing.set()
            children = list(self._children.values())
        until = time.monotonic() + _END_SECONDS
        for child in children:
            try:
                child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.link.close()
        for listener in self._listeners:
            listener.close()
        for file in self._metrics:
            os.close(file)

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children.values()]

    def _start(self, index: int) -> _Child:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in (mine, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LINK_BYTES)
        listener = self._listeners[index]
        handed = (theirs.fileno(), listener.fileno())
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.serve.api_process", *map(str, handed)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"},
            pass_fds=(*handed, *self._metrics),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        link = ApiLink(mine)
        settings = msgspec.structs.replace(self._settings, index=index, metrics=tuple(self._metrics))
        link.send(Setup(encoded(settings)))
        child = _Child(index, process, link)
        self._children[link] = child
        return child

    def _replace(self, lost: ApiLink, connect: Callable[[ApiLink], object]) -> None:
        child = self._children.pop(lost, None)
        if child is None:
            return
        with suppress(OSError):
            child.process.kill()  # its connection is closed: nothing it does is received
        child.process.wait()
        self._served = self._served or lost.heard
        while not self._closing.wait(self._pause()):
            with self._lock, suppress(OSError):  # no process, no file: the next try may find one
                if self._closing.is_set():
                    return
                connect(self._start(child.index).link)
                return

    def _pause(self) -> float:
        """Seconds until the next start, after one more death: the more of them lately, the longer."""
        now = time.monotonic()
        with self._lock:
            self._deaths.append(now)
            while now - self._deaths[0] > _WITHIN_SECONDS:
                self._deaths.popleft()
            dead = len(self._deaths)
        if not self._served and dead > _MOST_STARTS:
            self.given_up.set()
        if dead <= _FREE_DEATHS:
            return 0.0
        pause = min(_LONGEST_PAUSE, 2.0 ** (dead - _FREE_DEATHS - 1))
        log.error("API processes died %d times within %g s: the next is started in %g s", dead, _WITHIN_SECONDS, pause)
        return pause


def listeners(host: str, port: int, uds: Path | None, processes: int) -> tuple[list[socket.socket], str]:
    """A listening socket for each process, and the address that clients type. Raises UsageError where it is taken.

    Port 0 takes a free one. A Unix socket is one, shared by all processes; its file is made for this user alone.
    """
    if uds is not None:
        return _unix_listeners(uds, processes)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made: list[socket.socket] = []
    try:
        for _ in range(processes):
            listener = socket.socket(family, socket.SOCK_STREAM)
            made.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if processes > 1:
                if len(made) == 1:
                    _refuse_taken(family, host, port)  # SO_REUSEPORT would share it with any process that asks
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((host, port))
            listener.listen(_BACKLOG)
            port = listener.getsockname()[1]
    except (OSError, OverflowError, UnicodeError) as error:
        for listener in made:
            listener.close()
        raise not_listening(host, port, error) from error
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    return made, f"http://{shown}:{port}"


def not_listening(host: str, port: int, error: Exception) -> UsageError:
    """What a user reads, and what to type instead."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        instead = "type another --port; 0 takes a free one"
    elif number in (errno.EACCES, errno.EPERM):
        instead = "type a --port of 1024 or above, which needs no privilege"
    else:
        instead = "type an address of this machine, 127.0.0.1 for this machine alone or 0.0.0.0 for all"
    return UsageError(f"--host {host} --port {port} cannot be listened on: {error}; {instead}")


def _refuse_taken(family: int, host: str, port: int) -> None:
    if port:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))


def _unix_listeners(path: Path, processes: int) -> tuple[list[socket.socket], str]:
    try:
        listener = listen(path, _BACKLOG)
    except OSError as error:
        raise UsageError(f"--uds {path} cannot be listened on: {error}") from error
    return [listener, *(listener.dup() for _ in range(processes - 1))], f"unix:{path}"
