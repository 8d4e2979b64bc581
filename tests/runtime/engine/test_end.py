"""An engine that ends by an error: what it does first, and in which order."""

from __future__ import annotations

import logging
from typing import Any

from tests.runtime.engine.rig import rig


class Recorder(logging.Handler):
    """The part of a Watchdog that an engine calls at its end, and a log handler: what came, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.came.append("log")

    def ignore_signals(self) -> None:
        self.came.append("ignore signals")

    def fail(self, error: BaseException) -> None:
        self.came.append(f"fail: {error}")


def test_signals_are_ignored_before_a_traceback_is_made() -> None:
    """torchrun sends SIGTERM as soon as it sees another rank's end: it must not be quicker than the bundle."""
    recorder, logger = Recorder(), logging.getLogger("runtime.engine")
    logger.addHandler(recorder)
    try:
        with rig() as engine:
            watched: Any = engine
            watched._watchdog = recorder
            engine.__exit__(ValueError, ValueError("bad"), None)
            watched._watchdog = None
    finally:
        logger.removeHandler(recorder)
    assert recorder.came == ["ignore signals", "log", "fail: bad"]
