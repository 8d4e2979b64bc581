"""Limits of all-reduce kernels from times, among them those of docs/lab/measurements/all-reduce.md."""

from __future__ import annotations

import pytest

from launch.tune.all_reduce import Times, limits_from, table, widened
from parallel.comm.symmetric_all_reduce import SIZE_LIMITS, SizeLimits

KIB = 1 << 10
# Rows of 8 KiB, 1 to 2048 of them, between four to 8192: one-shot, two-shot, NCCL with the norm.
TWO = (
    (2.6, 4.1, 7.8), (2.6, 4.2, 8.0), (2.7, 4.2, 8.1), (2.9, 4.4, 8.4), (3.2, 4.6, 8.6),
    (3.5, 4.8, 9.7), (4.2, 5.3, 11.4), (5.7, 6.7, 15.2), (8.9, 8.8, 28.2), (15.5, 15.3, 33.9),
    (27.3, 28.1, 49.5), (51.2, 52.3, 82.4),
)  # fmt: skip
FOUR = (
    (4.0, 5.0, 10.8), (4.0, 5.3, 11.6), (4.0, 5.3, 11.7), (4.3, 5.5, 11.9), (4.9, 5.7, 12.2),
    (6.1, 6.1, 12.5), (8.7, 7.0, 15.3), (14.4, 9.2, 19.2), (24.3, 13.5, 28.5), (42.4, 23.2, 41.5),
    (78.9, 42.2, 61.8), (151.3, 82.2, 103.8), (302.2, 163.7, 186.0), (604.3, 328.1, 351.6),
)  # fmt: skip


def times(of_sizes: tuple[tuple[float, float, float], ...]) -> list[Times]:
    return [Times(8 * KIB << power, *us) for power, us in enumerate(of_sizes)]


def test_the_times_of_h200s_give_the_limits_in_use() -> None:
    longest = Times(64 << 20, 205.6, 208.3, 275.5)
    assert limits_from([*times(TWO), longest]) == SizeLimits(64 << 20, 0)
    assert SIZE_LIMITS[2] == SizeLimits(2 * longest.size, 0), "twice what was measured"
    in_use = SIZE_LIMITS[4]
    assert limits_from(times(FOUR)) == SizeLimits(in_use.one_shot, 64 << 20)
    assert in_use.two_shot == 2 * (64 << 20), "twice what was measured"


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ((), SizeLimits(0, 0)),
        (((9.0, 9.0, 5.0),), SizeLimits(0, 0)),
        (((9.0, 4.0, 5.0), (3.0, 4.0, 5.0)), SizeLimits(0, 16 * KIB)),  # one-shot again later does not count
        (((3.0, 4.0, 5.0), (9.0, 9.0, 5.0), (9.0, 4.0, 5.0)), SizeLimits(8 * KIB, 0)),
        (((4.0, 4.0, 5.0), (5.05, 9.0, 5.0)), SizeLimits(16 * KIB, 0)),  # a hundredth is noise
    ],
)
def test_limits_end_where_another_way_is_faster(
    measured: tuple[tuple[float, float, float], ...], expected: SizeLimits
) -> None:
    assert limits_from(times(measured)) == expected


@pytest.mark.parametrize(
    ("measured", "found", "expected"),
    [
        ((), (0, 0), (0, 0)),  # nothing is known
        (((3.0, 4.0, 5.0),), (8, 0), (32, 64)),  # one-shot to the end: what is larger is as before
        (((3.0, 4.0, 5.0), (5.0, 4.0, 9.0)), (8, 16), (8, 64)),  # two-shot to the end, one-shot not
        (((3.0, 4.0, 5.0), (5.0, 6.0, 4.0)), (8, 0), (8, 0)),  # NCCL has won
    ],
)
def test_a_narrow_model_lowers_no_limit_that_it_does_not_reach(
    measured: tuple[tuple[float, float, float], ...], found: tuple[int, int], expected: tuple[int, int]
) -> None:
    limits = limits_from(times(measured))
    assert limits == SizeLimits(*(KIB * number for number in found))
    before = SizeLimits(32 * KIB, 64 * KIB)
    assert widened(limits, times(measured), before) == SizeLimits(*(KIB * number for number in expected))


def test_two_shot_that_wins_by_little_at_one_size_takes_what_one_shot_had() -> None:
    """NCCL loses at every size: no larger sum goes to it."""
    measured = times((*TWO[:8], (9.0, 8.8, 28.2), *TWO[9:]))
    limits = limits_from(measured)
    assert limits == SizeLimits(1024 * KIB, 16 << 20)
    assert widened(limits, measured, SIZE_LIMITS[2]) == SizeLimits(1024 * KIB, SIZE_LIMITS[2].one_shot)


def test_a_reader_sees_every_size_and_what_follows() -> None:
    told = table(times(FOUR), 4, None, limits_from(times(FOUR)))
    assert "| 256 | 6.1 | 6.1 | 12.5 |" in told
    assert told.endswith("limits before: NCCL for all; after: one-shot up to 256 KiB, two-shot up to 65536 KiB")
