"""SIGTERM, SIGHUP and SIGINT as a question that the loop asks, instead of an end in the middle of something.

Knows: which signal came, when, and the exit code that says so. Does not know: what is to be finished first.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_ENDS = (signal.SIGTERM, signal.SIGHUP)  # the latter: of a terminal that was closed
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
        """143 after SIGTERM, 129 after SIGHUP, 130 after SIGINT, 0 without a signal."""
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # Python sets handlers nowhere else
            self._before = _handled((*_ENDS, signal.SIGINT), self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _restore(self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.at is None:
            self.signal, self.at = number, now
        elif now - self.at >= _ECHO_SECONDS:
            self.hurry = True


def _handled(numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], object]) -> dict[int, Any]:
    """Sets ``handler``; returns those before it. A SIGHUP that nohup has this process ignore stays ignored."""
    hung_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return {number: signal.signal(number, handler) for number in numbers if number != signal.SIGHUP or hung_up}


def _restore(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)


@contextmanager
def notes_sigterm() -> Iterator[list[int]]:
    """SIGTERM and SIGHUP only add their number to the yielded list: for a part that is short, and must not be left half
    done.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = _handled(_ENDS, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        _restore(before)


@contextmanager
def raises_on_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit(143), SIGHUP SystemExit(129), as Ctrl-C raises KeyboardInterrupt: for a part that has
    nothing to finish first.

    Once: after it, and after any other error, both are ignored, so that the ranks can still report why.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _handled(_ENDS, _raise)
    try:
        yield
    except BaseException:
        _restore(dict.fromkeys(before, signal.SIG_IGN))
        raise
    _restore(before)


def _raise(number: int, frame: FrameType | None) -> None:
    _restore(dict.fromkeys(_ENDS, signal.SIG_IGN))
    raise SystemExit(128 + number)
