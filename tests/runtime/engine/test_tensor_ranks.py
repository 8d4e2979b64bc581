"""Ranks in threads: what is told where one of them fails, and what they exchange."""

from __future__ import annotations

import threading
from typing import cast

import pytest
import torch
from torch import Tensor

from runtime.engine import Engine
from runtime.execute.sampling.inputs import MOST_SHARED_TOP_K
from tests.runtime.engine import tensor_ranks
from tests.runtime.engine.rig import request, run
from tests.runtime.engine.tensor_ranks import MetCollectives, MetControl, tensor_rig
from tests.runtime.execute.sampling.sampling_fields import SamplingFields

VOCABULARY = 1024


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


@pytest.mark.parametrize(
    ("sampling", "candidates"),
    [
        pytest.param({}, True, id="greedy"),
        pytest.param({"temperature": 0.8}, True, id="all of the vocabulary"),
        pytest.param({"temperature": 0.8, "top_k": 5}, True, id="top-k"),
        pytest.param({"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}, True, id="all filters"),
        pytest.param({"temperature": 0.8, "top_p": 0.9}, False, id="top-p of all"),
        pytest.param({"logprobs": 2}, False, id="log-probabilities"),
    ],
)
def test_ranks_exchange_candidates_where_that_is_exact(sampling: SamplingFields, candidates: bool) -> None:
    """And whole rows of logits where it is not; either way the tokens are those of one rank."""
    gathered: list[tuple[torch.dtype, int]] = []

    class Noting(MetCollectives):
        def all_gather(self, x: Tensor) -> Tensor:
            gathered.append((x.dtype, x.shape[-1]))
            return super().all_gather(x)

    def answers(ranks: int) -> dict[int, tuple[int, ...]]:
        with tensor_rig(ranks, collectives=Noting, shape={"vocab_size": VOCABULARY}) as engine:
            gathered.clear()  # what was rehearsed
            asked = [request(number, (number + 1, 2, 3), **sampling) for number in range(3)]
            return {number: finished.token_ids for number, finished in run(engine, asked).items()}

    alone = answers(1)
    assert answers(2) == alone
    whole = [width for dtype, width in gathered if dtype.is_floating_point]
    keys = [width for dtype, width in gathered if dtype == torch.int64]
    assert len(whole) + len(keys) == len(gathered) > 0
    assert bool(keys) is candidates
    assert set(whole) == (set() if candidates else {VOCABULARY // 2})
    assert all(width <= 2 * MOST_SHARED_TOP_K for width in keys)
