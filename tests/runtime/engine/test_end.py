"""An engine that ends by an error: what it does first, and in which order."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime import build
from runtime.config import EngineConfig
from tests.runtime.engine.rig import rig, tiny_folder


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


def test_a_start_that_fails_behind_the_executor_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that stayed would hold the device's graphs and their memory, which the next start needs."""

    def interrupted(*arguments: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "agree_depth_and_horizon", interrupted)
    before = set(threading.enumerate())
    config = EngineConfig(
        model=str(tiny_folder(tmp_path)), load_format="dummy", device="cpu", max_num_seqs=2, num_blocks=40
    )
    with pytest.raises(KeyboardInterrupt):
        build.build_engine(config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu")
    assert set(threading.enumerate()) <= before, "earlier ones may end meanwhile"
