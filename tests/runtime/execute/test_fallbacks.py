"""Fallbacks are all counted, and told at a limited rate."""

from __future__ import annotations

import logging

import pytest

from models.kernels.reference import ReferenceKernels
from parallel.comm.collectives import SingleRank
from runtime.execute.fallbacks import QUIET_SECONDS, Fallbacks
from tests.runtime.engine.rig import request, rig, run


def test_every_one_is_counted_and_one_a_minute_is_told(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    fallbacks = Fallbacks(clock=lambda: now[0])
    with caplog.at_level(logging.INFO, "runtime.execute.fallbacks"):
        for _ in range(50):
            fallbacks.take("eager_prefill", "the prompt is scored")
        fallbacks.take("torch_sampling", "there is no Triton")
        now[0] += QUIET_SECONDS
        fallbacks.take("eager_prefill", "the prompt is scored")
    assert fallbacks.counts == {"eager_prefill": 51, "torch_sampling": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "fallback eager_prefill, 1 so far: the prompt is scored",
        "fallback torch_sampling, 1 so far: there is no Triton",
        "fallback eager_prefill, 51 so far: the prompt is scored",
    ]


class SlowPrefill(ReferenceKernels):
    """Kernels whose prefill attention is not the usual one."""

    slower_prefill = "FlashInfer is not built on this machine"


class SlowGroup(SingleRank):
    slower = "all-reduces go through NCCL"


def test_an_engine_counts_what_stands_and_what_each_prefill_takes() -> None:
    with rig(kernels=SlowPrefill(), collectives=SlowGroup()) as engine:
        run(engine, [request(i, range(3 + i, 40 + i), max_tokens=3) for i in range(4)])
        counted = engine.counters
        assert counted["fallbacks{nccl_all_reduce}"] == 1
        chunked = counted["prefill_steps"] + counted["mixed_steps"]
        assert counted["fallbacks{reference_prefill}"] == chunked > 1
    with rig() as engine:
        run(engine, [request(0, range(9), max_tokens=3)])
        assert [name for name in engine.counters if name.startswith("fallbacks")] == []
