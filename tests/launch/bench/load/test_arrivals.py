"""Arrival schedules: reproducible, of the asked rate and burstiness."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest

from launch.bench.load.datasets import arrival_offsets, burst_offsets, stretched


def gaps(offsets: list[float]) -> list[float]:
    return [after - before for before, after in pairwise([0.0, *offsets])]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
def test_a_schedule_has_its_seed_s_moments_and_exactly_its_rate(burstiness: float) -> None:
    offsets = arrival_offsets(2000, 8.0, burstiness, seed=3)
    assert offsets == arrival_offsets(2000, 8.0, burstiness, seed=3)
    assert offsets == sorted(offsets)
    assert offsets[-1] == pytest.approx(250.0)
    variation = statistics.pstdev(gaps(offsets)) * 8.0
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.1), "k of the gamma distribution"
    if math.isfinite(burstiness):
        assert offsets != arrival_offsets(2000, 8.0, burstiness, seed=4)


def test_without_a_rate_all_arrive_at_once() -> None:
    assert arrival_offsets(3, math.inf, 1.0, seed=0) == [0.0, 0.0, 0.0]


def test_bursts_arrive_together_at_the_mean_rate_of_their_requests() -> None:
    offsets = burst_offsets(96, 8.0, 1.0, seed=1, size=16)
    moments = sorted(set(offsets))
    assert [offsets.count(moment) for moment in moments] == [16] * 6
    assert offsets[-1] == pytest.approx(12.0)
    assert offsets == sorted(offsets)


@pytest.mark.parametrize(("count", "size"), [(100, 64), (10, 64), (97, 16)])
def test_a_last_burst_that_is_not_whole_keeps_the_rate(count: int, size: int) -> None:
    assert burst_offsets(count, 10.0, 1.0, seed=0, size=size)[-1] == pytest.approx(count / 10)


def test_a_schedule_is_stretched_to_another_end() -> None:
    assert stretched([0.0, 1.0, 4.0], 2.0) == [0.0, 0.5, 2.0]
    assert stretched([0.0, 0.0], 2.0) == [0.0, 0.0]
