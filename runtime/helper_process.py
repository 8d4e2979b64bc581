"""A process beside rank 0 that answers messages, one after the other, so that the engine waits for none of them.

Knows: messages over pipes, another process in place of one that ended. Does not know: what it is asked.
"""

from __future__ import annotations

import logging
import os
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Final

from runtime.watchdog.parent_death import die_with_parent

_MOST_FAILURES: Final = 8  # processes in a row that did not begin; then there is no other one
_BEGINS_S: Final = 300.0  # imports and a tokenizer, on a disk that is slow
_LENGTH: Final = struct.Struct("<I")

log = logging.getLogger(__name__)


class HelperProcess:
    """``main``: a call, as ``module`` has it, that calls ``answer_all``. ``first``: makes the message that each process
    gets before others; called in a thread. ``patience_s``: after which one that does not answer is killed."""

    def __init__(self, module: str, main: str, first: Callable[[], bytes], patience_s: float | None = None) -> None:
        self._module, self._main, self._first, self._patience_s = module, main, first, patience_s
        self._queue: SimpleQueue[tuple[bytes, bytes] | None] = SimpleQueue()
        self._answers: deque[tuple[bytes, bytes | None]] = deque()
        self._failures = 0
        self._thread: threading.Thread | None = None

    @property
    def queued(self) -> int:
        """Messages that the process was not sent yet."""
        return self._queue.qsize()

    def start(self) -> None:
        """Have it start before the first message."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._module, daemon=True)
            self._thread.start()

    def ask(self, key: bytes, message: bytes) -> None:
        self.start()
        self._queue.put((key, message))

    def answers(self) -> list[tuple[bytes, bytes | None]]:
        """Since the last call: the message's key, and the answer; None if the process ended with it."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def close(self) -> None:
        self._queue.put(None)

    def _work(self) -> None:
        process = self._opened()
        while (job := self._queue.get()) is not None:
            if process is None and self._failures < _MOST_FAILURES:
                process = self._opened()
            answer = None if process is None else self._answer(process, job[1], self._patience_s)
            if answer is None:
                process = None
            self._answers.append((job[0], answer))
        if process is not None:
            _kill(process)

    def _opened(self) -> subprocess.Popen[bytes] | None:
        """It has a group of its own, so that Ctrl-C does not reach it, and ends when this thread does."""
        root = str(Path(__file__).resolve().parents[1])
        words = f"import sys; sys.path.insert(0, {root!r}); from {self._module} import *; {self._main}"
        self._failures += 1
        try:
            first = self._first()
            process = subprocess.Popen(
                [sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
            )
        except Exception as error:  # whatever reads the first message
            log.warning("a process of %s ended (%s)", self._module, error)
            return None
        if self._answer(process, first, _BEGINS_S) is None:
            return None
        self._failures = 0
        return process

    def _answer(self, process: subprocess.Popen[bytes], message: bytes, patience_s: float | None) -> bytes | None:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write(process.stdin, message)
            if not wait([process.stdout.fileno()], patience_s):  # of any descriptor, unlike select.select
                raise EOFError(f"no answer in {patience_s:.0f} s")
            return _read(process.stdout)
        except Exception as error:  # whatever it is: without an answer requests would wait for ever
            log.warning("a process of %s ended (%s)", self._module, error)
            _kill(process)
            return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(OSError):
        process.communicate()


def answer_all(opened: Callable[[bytes], Callable[[bytes], bytes]]) -> None:
    """In the process: ``opened`` gets its first message, and returns what answers each of the others."""
    die_with_parent()
    given, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    with suppress(EOFError, BrokenPipeError):
        answer = opened(_read(given))
        _write(answers, b"")
        while True:
            _write(answers, answer(_read(given)))


def _write(to: IO[bytes], said: bytes) -> None:
    to.write(_LENGTH.pack(len(said)) + said)
    to.flush()


def _read(of: IO[bytes]) -> bytes:
    """Raises EOFError."""
    if len(head := of.read(_LENGTH.size)) < _LENGTH.size:
        raise EOFError("no answer")
    if len(said := of.read(size := _LENGTH.unpack(head)[0])) < size:
        raise EOFError("half an answer")
    return said
