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
from runtime.engine import Engine
from runtime.schedule.request import Request, SamplingParams
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
    with pytest.raises(KeyboardInterrupt):
        engine_over(tmp_path)
    assert set(threading.enumerate()) <= before, "earlier ones may end meanwhile"


def test_an_interrupted_engine_that_a_variable_names_holds_neither_threads_nor_memory(tmp_path: Path) -> None:
    """As in a notebook, whose next cell opens another one."""
    before = set(threading.enumerate())
    engine = engine_over(tmp_path)
    add_and_step(engine)
    with pytest.raises(KeyboardInterrupt), engine:
        raise KeyboardInterrupt
    assert set(threading.enumerate()) <= before
    assert {tensor.untyped_storage().nbytes() for tensor in engine.executor.pool.paged} == {0}
    engine.close()


def test_nothing_is_taken_from_a_thread_that_still_takes_turns(tmp_path: Path) -> None:
    """Of an AsyncEngine that nobody closed: a step over memory that was given back would end the process."""
    engine, bound, end = engine_over(tmp_path), threading.Event(), threading.Event()

    def turns() -> None:
        engine.bind_thread()
        add_and_step(engine)
        bound.set()
        end.wait()

    thread = threading.Thread(target=turns)
    thread.start()
    bound.wait()
    with pytest.raises(KeyboardInterrupt), engine:
        raise KeyboardInterrupt
    assert 0 not in {tensor.untyped_storage().nbytes() for tensor in engine.executor.pool.paged}
    end.set()
    thread.join()
    engine.close()


def engine_over(folder: Path) -> Engine:
    config = EngineConfig(
        model=str(tiny_folder(folder)), load_format="dummy", device="cpu", max_num_seqs=2, num_blocks=40
    )
    control, alone = SingleRankControl(), SingleRank()
    return build.build_engine(config, control=control, collectives=alone, agree_min=int, device="cpu")


def add_and_step(engine: Engine) -> None:
    """One step is in flight then."""
    engine.add(Request(0, (5, 6, 7), SamplingParams(max_tokens=8, seed=0), ()))
    engine.step()
