"""SIGTERM and SIGINT as a question that the loop asks, instead of an end in the middle of something.

Knows: which signal came, when, and the exit code that says so. Does not know: what is to be finished first.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ECHO_SECONDS = 1.0  # a terminal and torchrun both pass a Ctrl-C on: the second one soon after means nothing


class Interrupts:
    """While entered, a first signal asks to finish up, and one that comes a second or more later to hurry."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.at: float | None = None  # time.monotonic() of the first
        self.hurry = False
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """143 after SIGTERM, 130 after SIGINT, 0 without a signal."""
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # Python sets handlers nowhere else
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.at is None:
            self.signal, self.at = number, now
        elif now - self.at >= _ECHO_SECONDS:
            self.hurry = True


@contextmanager
def notes_sigterm() -> Iterator[list[int]]:
    """SIGTERM only adds its number to the yielded list: for a part that is short, and must not be left half done."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def raises_on_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit(143), as Ctrl-C raises KeyboardInterrupt: for a part that has nothing to finish first.

    Once: after it, and after any other error, SIGTERM is ignored, so that the ranks can still tell each other why.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    except BaseException:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    signal.signal(signal.SIGTERM, before)


def _raise(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
