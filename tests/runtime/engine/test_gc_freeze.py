"""What is alive when an engine is ready is not looked at again while it runs, and is freed once it is closed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime import gc_freeze
from runtime.build import build_engine
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.execute.device.cpu_twin import TwinDevice
from runtime.gc_freeze import freeze_heap
from tests.runtime.engine.rig import request, run, tiny_folder

MOST_IMMORTAL = 1_000  # 375 of Python 3.12, none of others; an engine freezes more than ten thousand


class Ring:
    """Refers to itself: only the garbage collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What all tests keep frozen (tests/conftest.py) is not, during these."""
    assert len(gc_freeze._holders) == 1, "a test before this one left an engine open"
    monkeypatch.setattr(gc_freeze, "_holders", set())
    gc.unfreeze()
    yield
    assert frozen() == 0
    gc.freeze()


def frozen() -> int:
    """Objects that somebody froze. Python 3.12 counts its few hundred immortal ones, too, after each collection."""
    count = gc.get_freeze_count()
    return count if count > MOST_IMMORTAL else 0


def engine_over(folder: Path) -> Engine:
    config = EngineConfig(
        model=str(folder), load_format="dummy", device="cpu", max_num_seqs=2, num_blocks=40, max_model_len=64
    )
    return build_engine(config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu")


def gone(refs: Sequence[weakref.ref[Any]]) -> bool:
    gc.collect()
    return all(ref() is None for ref in refs)


@pytest.mark.slow
def test_what_was_alive_is_collected_only_afterwards() -> None:
    ring = Ring()
    refs = [weakref.ref(ring)]
    thaw = freeze_heap()
    del ring
    assert not gone(refs), "the collector looked at what was frozen"
    thaw()
    assert gone(refs)


def test_what_comes_later_is_collected_as_ever() -> None:
    thaw = freeze_heap()
    refs = [weakref.ref(Ring())]
    assert gone(refs)
    thaw()


def test_what_was_garbage_is_not_kept() -> None:
    refs = [weakref.ref(Ring())]
    thaw = freeze_heap()
    assert refs[0]() is None
    thaw()


@pytest.mark.slow
def test_the_last_one_thaws() -> None:
    ring = Ring()
    refs = [weakref.ref(ring)]
    del ring
    first, second = freeze_heap(), freeze_heap()
    first()
    first()  # once more is no second holder's
    assert frozen() > 0
    second()
    assert gone(refs)


@pytest.mark.slow  # all that pytest holds is collected again and again
def test_closed_engines_leave_nothing_behind(tmp_path: Path) -> None:
    """One after the other in one process: weights and KV of each are gone, though graphs and model are in cycles."""
    folder = tiny_folder(tmp_path)
    for i in range(2):
        with engine_over(folder) as engine:
            assert frozen() > 10_000, "torch alone has more objects"
            run(engine, [request(i, (3, 4, 5))])
            executor = engine.executor
            held = (*executor.pool.paged, *executor._model.parameters(), *executor._model.modules())
            refs = [weakref.ref(one) for one in held]
            assert len(refs) > 20
            del executor, held
        assert frozen() == 0
        del engine
        assert gone(refs)


@pytest.mark.slow
def test_a_closed_engine_that_somebody_holds_has_no_memory(tmp_path: Path) -> None:
    with engine_over(tiny_folder(tmp_path)) as engine:
        run(engine, [request(0, (3, 4, 5))])
        held = [*engine.executor.pool.paged, *engine.executor._model.parameters()]
        assert min(tensor.untyped_storage().nbytes() for tensor in held) > 0
    assert max(tensor.untyped_storage().nbytes() for tensor in held) == 0


@pytest.mark.slow
def test_memory_is_free_before_the_next_engine_measures_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any other collection: the last engine's weights would be sized around, or leave no room at all."""
    folder = tiny_folder(tmp_path)
    gc.disable()
    try:
        with engine_over(folder) as engine:
            run(engine, [request(0, (3, 4, 5))])
            refs = [weakref.ref(one) for one in (*engine.executor.pool.paged, *engine.executor._model.parameters())]
        del engine
        seen: list[bool] = []

        def measured(*_: object) -> None:
            seen.append(all(ref() is None for ref in refs))

        monkeypatch.setattr(TwinDevice, "release_unused", measured)
        with engine_over(folder):
            assert seen[0]
    finally:
        gc.enable()


@pytest.mark.slow
def test_an_engine_that_ends_with_an_error_thaws(tmp_path: Path) -> None:
    engine = engine_over(tiny_folder(tmp_path))
    assert frozen() > 0
    with pytest.raises(RuntimeError, match="the front end failed"), engine:
        raise RuntimeError("the front end failed")
    assert frozen() == 0
    engine.close()
