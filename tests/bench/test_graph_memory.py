"""What captured steps hold of memory stays what it was made: without a GPU, by the sizes and lives of their tensors."""

from __future__ import annotations

import re

import pytest

from tests.bench.graph_memory import MIB, Pool
from tests.torchrun import python

MOST_MIB = 350  # of 8B; docs/lab/measurements/mixed-load.md has what a GPU held


def test_all_graphs_of_8b_share_little_more_than_the_largest_step_needs() -> None:
    """In a process of its own, which plays a GPU to torch for good. Small steps add nothing but time."""
    told = python("tests.bench.graph_memory", "--fewest", "4096")
    assert told.returncode == 0, told.errors
    shared = [float(number) for number in re.findall(r"all graphs share +([\d.]+) MiB", told.output)]
    assert shared == sorted(shared)
    assert 288 < shared[-1] <= MOST_MIB, told.output


@pytest.mark.parametrize(
    ("events", "segments"),
    [
        ([(0, 96 * MIB), (0, 0), (1, 64 * MIB), (2, 32 * MIB)], [96]),  # both halves of what was freed
        ([(0, 64 * MIB), (1, 64 * MIB), (0, 0), (1, 0), (2, 96 * MIB)], [64, 64, 96]),  # segments are never joined
        ([(0, 12 * MIB), (1, 8 * MIB), (2, 9 * MIB), (1, 0), (2, 0), (3, 19 * MIB)], [12, 20]),  # but neighbours are
        ([(0, 100), (1, MIB), (2, MIB)], [2, 2]),
        ([(0, 3 * MIB), (1, 17 * MIB + 1)], [20, 18]),
    ],
)
def test_the_pool_is_cut_as_by_torch(events: list[tuple[int, int]], segments: list[int]) -> None:
    pool = Pool()
    pool.replay(events)
    assert [size // MIB for size in pool.segments] == segments
    pool.replay(events)  # the next graph has all of it
    assert [size // MIB for size in pool.segments] == segments
