"""Fallbacks are all counted, and told at a limited rate."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from parallel.comm.collectives import SingleRank
from runtime.build import _executor_config
from runtime.config import EngineConfig
from runtime.execute.executor import Executor
from runtime.execute.fallbacks import QUIET_SECONDS, Fallbacks
from tests.plant import Kernels, kernels_with, reference_kernels
from tests.runtime.engine.rig import request, rig, run


def test_every_one_is_counted_and_one_a_minute_is_told(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    fallbacks = Fallbacks(clock=lambda: now[0])
    with caplog.at_level(logging.INFO, "runtime.execute.fallbacks"):
        for _ in range(50):
            fallbacks.take("eager_prefill_scored", "the prompt is scored")
        fallbacks.take("torch_sampling", "there is no Triton")
        now[0] += QUIET_SECONDS
        fallbacks.take("eager_prefill_scored", "the prompt is scored")
    assert fallbacks.counts == {"eager_prefill_scored": 51, "torch_sampling": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "fallback eager_prefill_scored, 1 so far: the prompt is scored",
        "fallback torch_sampling, 1 so far: there is no Triton",
        "fallback eager_prefill_scored, 51 so far: the prompt is scored",
    ]


def test_one_that_was_told_silences_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """Prefills of three kinds within a minute: one is captured, one is scored, one is too long."""
    scored = request(1, range(20), max_tokens=2, prompt_logprobs=1)
    with caplog.at_level(logging.INFO, "runtime.execute.fallbacks"), rig(prefill_buckets=(8, 16), mixed=None) as engine:
        for one in (request(0, range(7), max_tokens=2), scored, request(2, range(50, 83), max_tokens=2), scored):
            run(engine, [one])
        counted = {name: count for name, count in engine.counters.items() if name.startswith("fallbacks")}
    assert counted == {"fallbacks{eager_prefill_scored}": 2, "fallbacks{eager_prefill_beyond_buckets}": 1}
    scored_prompts, too_long = [record.getMessage() for record in caplog.records]
    assert scored_prompts.startswith("fallback eager_prefill_scored, 1 so far: log-probabilities of prompt tokens need")
    assert too_long == "fallback eager_prefill_beyond_buckets, 1 so far: 33 tokens; the largest captured prefill has 16"


SLOWER = "FlashInfer is not built on this machine"  # why prefill attention is not the usual one


class SlowGroup(SingleRank):
    slower = "all-reduces go through NCCL"


def test_prefill_attention_is_counted_by_its_own_name() -> None:
    """Only ever ours in FlashInfer's place: where ours was chosen, nothing falls back to FlashInfer."""
    with rig(kernels=kernels_with(slower_prefill=SLOWER, prefill_name="triton")) as engine:
        run(engine, [request(i, range(3 + i, 40 + i), max_tokens=3) for i in range(2)])
        counted = engine.counters
        assert counted["fallbacks{triton_prefill}"] == counted["prefill_steps"] + counted["mixed_steps"] > 1


def test_an_engine_counts_what_stands_and_what_each_prefill_takes() -> None:
    with rig(kernels=kernels_with(slower_prefill=SLOWER), collectives=SlowGroup()) as engine:
        run(engine, [request(i, range(3 + i, 40 + i), max_tokens=3) for i in range(4)])
        counted = engine.counters
        assert counted["fallbacks{nccl_all_reduce}"] == 1
        chunked = counted["prefill_steps"] + counted["mixed_steps"]
        assert counted["fallbacks{reference_prefill}"] == chunked > 1
    with rig() as engine:
        run(engine, [request(0, range(9), max_tokens=3)])
        assert [name for name in engine.counters if name.startswith("fallbacks")] == []


def test_prefills_that_were_to_be_captured_and_are_not_are_counted() -> None:
    """A GPU that has no kernels of its own, and prefill attention that reads lengths on the host."""
    kernels = kernels_with(slower="Triton is not installed", repeat_prefill=lambda *_: None)
    with rig(kernels=kernels, prefill_buckets=(8, 64)) as engine:
        run(engine, [request(i, range(3 + i, 40 + i), max_tokens=3) for i in range(2)])
        counted = engine.counters
        chunked = counted["prefill_steps"] + counted["mixed_steps"]
        assert counted["fallbacks{eager_prefill_attention}"] == chunked > 1
        assert counted["fallbacks{torch_kernels}"] == 1


class Standing:
    """What an executor looks at, at the end of its start-up, on a GPU."""

    _count_standing_fallbacks = Executor._count_standing_fallbacks

    def __init__(self, *, slower: dict[str, str], mixes: bool, kernels: Kernels | None = None) -> None:
        self.fallbacks = Fallbacks()
        self.mixes = mixes
        self._config = SimpleNamespace(slower=slower, mixed=True)
        self._model = SimpleNamespace(collectives=SingleRank(), kernels=kernels or reference_kernels())
        self.device = SimpleNamespace(torch_device=torch.device("cuda"))
        self.tables = SimpleNamespace(columns=SimpleNamespace(records=torch.zeros(1)))  # of a CPU: no Triton there
        cast(Any, self)._count_standing_fallbacks()


def test_what_stands_is_counted_by_what_takes_its_place() -> None:
    found = Standing(slower={"nccl_exchange": "the ranks are on several nodes"}, mixes=False)
    assert found.fallbacks.counts == {"nccl_exchange": 1, "separate_prefill": 1, "torch_sampling": 1}
    assert Standing(slower={}, mixes=True).fallbacks.counts == {"torch_sampling": 1}
    untuned = kernels_with(slower_kernels={"untuned_products": "out of memory"})
    found = Standing(slower={}, mixes=True, kernels=untuned)
    assert found.fallbacks.counts == {"untuned_products": 1, "torch_sampling": 1}


@pytest.mark.parametrize("slower", ["exchanges go through NCCL", None])
def test_a_slower_exchange_between_groups_is_told_to_the_executor(slower: str | None) -> None:
    exchange = cast(Any, SimpleNamespace(slower=slower))
    config = EngineConfig(model="m", device="cpu", data_parallel=2)
    made = _executor_config(config, config.step_limits(64, 4), int, None, None, exchange, 1)
    assert made.slower == ({} if slower is None else {"nccl_exchange": slower})
