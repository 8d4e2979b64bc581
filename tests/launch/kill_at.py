"""A process that is killed at one place, played in this process: its disk stops changing there, and stays as it is.

Knows: which calls change files. Does not know: who makes them, or what has to be true afterwards.

Between two changes the disk is the same whenever a kill comes, so the places of a run are its changes: before each one,
and in the middle of each write. A sync changes nothing that a kill could show, and returns at once here.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

_CHANGES = ("mkdir", "rename", "replace", "unlink", "rmdir", "ftruncate")


class Killed(BaseException):
    """The process ends here. No ``except Exception`` stops it, and a ``finally`` changes no file."""


class Disk:
    """Changes below ``folder``. At place ``at`` the process is killed; None: never. ``places`` counts those passed."""

    def __init__(self, folder: Path, at: int | None) -> None:
        self._folder, self._at = str(folder.resolve()), at
        self.places = 0
        self.killed = ""  # the change that did not happen, or only by half
        self.opened: set[int] = set()  # descriptors that no file object closes
        self._lock = threading.Lock()

    def pass_place(self, what: str) -> bool:
        """Count one place; returns True when the process is killed here, or was before."""
        with self._lock:
            if not self.killed and self.places == self._at:
                self.killed = what
            self.places += 1
            return bool(self.killed)

    def has(self, path: int | str | Path, dir_fd: int | None = None) -> bool:
        """Whether ``path``, a name or a descriptor, is one of ``folder``'s."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        return os.path.abspath(os.fspath(path)).startswith(f"{self._folder}/")

    def write(self, real: Callable[[bytes], Any], data: bytes) -> None:
        """With a place before ``data`` and one in its middle. Raises Killed."""
        if self.pass_place("a write"):
            raise Killed
        if self.pass_place("the middle of a write"):
            real(data[: len(data) // 2])
            raise Killed
        real(data)


class _File(io.FileIO):
    """An open file whose writes are counted. After the kill a write is lost, and says nothing of it."""

    disk: Disk

    def write(self, data: Any) -> int:
        whole = bytes(data)
        if not self.disk.killed:
            self.disk.write(super().write, whole)
        return len(whole)

    def truncate(self, size: int | None = None) -> int:
        if self.disk.pass_place("truncation"):
            raise Killed
        return super().truncate(size)


@contextlib.contextmanager
def kill_at(place: int | None, folder: Path) -> Iterator[Disk]:
    """Within it, a process is killed at change number ``place`` of what is below ``folder``; its locks go with it.

    Raises nothing at the end: ``killed`` of what it yields says whether and where the kill came.
    """
    disk = Disk(folder, place)
    changes = {name: _change(disk, name, getattr(os, name)) for name in _CHANGES}
    syncs = {name: lambda fd: None for name in ("fsync", "fdatasync")}
    with contextlib.ExitStack() as patches:
        for name, call in {
            **changes,
            **syncs,
            "open": _open_fd(disk, os.open),
            "write": _write(disk, os.write),
        }.items():
            patches.enter_context(mock.patch.object(os, name, call))
        patches.enter_context(mock.patch.object(io, "open", _open(disk, io.open)))
        patches.enter_context(mock.patch.object(threading, "excepthook", _excepthook(threading.excepthook)))
        patches.enter_context(contextlib.suppress(Killed))
        yield disk
    if disk.killed:
        for fd in disk.opened:
            with contextlib.suppress(OSError):  # closed already
                if disk.has(fd):
                    os.close(fd)


def kill_everywhere(run: Callable[[int], str]) -> int:
    """Call ``run`` with place after place, until it was not killed there any more; returns how many there are.

    ``run`` plays a life from its beginning, checks what a kill at that place has left, resumes and checks the end. It
    returns ``killed`` of its disk.
    """
    for place in itertools.count():
        try:
            killed = run(place)
        except Exception as error:
            error.add_note(f"killed at place {place}")
            raise
        if not killed:
            return place
    raise AssertionError("there is always another place")


def _change(disk: Disk, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, *rest: Any, **options: Any) -> Any:
        if disk.has(path, options.get("dir_fd")) and disk.pass_place(f"{name} of {path}"):
            raise Killed
        return real(path, *rest, **options)

    return call


def _open_fd(disk: Disk, real: Callable[..., int]) -> Callable[..., int]:
    def call(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        creates = bool(flags & os.O_CREAT) and not os.path.exists(path)
        if creates and disk.has(path) and disk.pass_place(f"creation of {path}"):
            raise Killed
        fd = real(path, flags, *rest, **options)
        disk.opened.add(fd)
        return fd

    return call


def _write(disk: Disk, real: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
    def call(fd: int, data: Any) -> int:
        if not disk.has(fd):
            return real(fd, data)
        for line in bytes(data).splitlines(keepends=True):  # how many a call has depends on the speed of threads
            disk.write(lambda part: real(fd, part), line)
        return len(data)

    return call


def _open(disk: Disk, real: Callable[..., Any]) -> Callable[..., Any]:
    """``open`` and all that pathlib makes of it."""

    def call(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if not set(mode) & set("wxa+") or not disk.has(file):
            return real(file, mode, *rest, **options)
        if isinstance(file, int):
            disk.opened.discard(file)
        elif disk.pass_place(f"open of {file}"):
            raise Killed
        raw = _File(file, mode.replace("b", "").replace("t", ""))
        raw.disk = disk
        stream = io.BufferedWriter(raw)
        return stream if "b" in mode else io.TextIOWrapper(stream, *rest[1:], **options)

    return call


def _excepthook(real: Callable[[threading.ExceptHookArgs], Any]) -> Callable[[threading.ExceptHookArgs], Any]:
    def hook(arguments: threading.ExceptHookArgs) -> None:
        if not issubclass(arguments.exc_type, Killed):
            real(arguments)

    return hook
