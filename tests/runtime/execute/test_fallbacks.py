"""Fallbacks are all counted, and told at a limited rate."""

from __future__ import annotations

import logging

import pytest

from runtime.execute.fallbacks import QUIET_SECONDS, Fallbacks


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
