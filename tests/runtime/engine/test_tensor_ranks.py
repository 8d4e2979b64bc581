"""Ranks in threads: what is told where one of them fails."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from runtime.engine import Engine
from tests.runtime.engine import tensor_ranks
from tests.runtime.engine.rig import request
from tests.runtime.engine.tensor_ranks import MetControl, tensor_rig


def _run(engine: Engine) -> None:
    engine.add(request(0, (1, 2, 3)))
    for _ in range(10):
        engine.step()


def test_the_error_of_the_rank_that_failed_is_raised() -> None:
    """Not that of rank 0, which finds a broken barrier."""

    def prepare(engine: Engine) -> None:
        if cast("MetControl", engine.control).rank == 1:
            raise ValueError("out of paper")

    with (
        pytest.raises(AssertionError, match="rank 1 failed: ValueError") as found,
        tensor_rig(2, prepare=prepare) as engine,
    ):
        _run(engine)
    assert isinstance(found.value.__cause__, ValueError)


def test_a_rank_that_stays_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 comes only when rank 0 has given up, however slow this machine is."""
    monkeypatch.setattr(tensor_ranks, "PATIENCE_S", 0.2)
    given_up = threading.Event()

    def prepare(engine: Engine) -> None:
        if cast("MetControl", engine.control).rank == 1:
            given_up.wait(10.0)

    def run(engine: Engine) -> None:
        try:
            _run(engine)
        finally:
            given_up.set()

    with pytest.raises(AssertionError, match="stayed away"), tensor_rig(2, prepare=prepare) as engine:
        run(engine)
