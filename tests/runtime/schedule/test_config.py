"""StepLimits and SchedulerConfig: which values are refused, and what follows from those that are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.schedule.config import LIMIT_RANGES, SchedulerConfig, StepLimits

LIMITS = StepLimits(rows=4, slots=8, block_size=4, max_model_len=64)


@pytest.mark.parametrize("name", LIMIT_RANGES)
def test_each_limit_has_a_range_and_its_ends_are_in_it(name: str) -> None:
    low, high = LIMIT_RANGES[name]
    roomy = replace(LIMITS, slots=65_535)
    for value in (low, high or 2**40):
        assert getattr(replace(roomy, **{name: value}), name) == value
    for value in (low - 1, *(() if high is None else (high + 1,))):
        with pytest.raises(ValueError, match=f"{name} is {value}, but must be {low} to"):
            replace(roomy, **{name: value})


def test_each_row_has_a_slot() -> None:
    assert replace(LIMITS, slots=4).slots == 4
    with pytest.raises(ValueError, match="slots is 3, but each of 4 rows needs one"):
        replace(LIMITS, slots=3)


def test_what_follows_from_them() -> None:
    """A row of width 3 may write up to position 64 + 3; with two steps behind the one that is planned it gains 9."""
    wide = replace(LIMITS, width=3, depth=2)
    assert (wide.max_blocks, wide.tokens_ahead) == (17, 9)
    assert (LIMITS.max_blocks, replace(LIMITS, depth=0).tokens_ahead) == (17, 1)


def test_a_tree_is_written_whole_by_the_last_step_in_flight() -> None:
    """Two steps gain three tokens each at most; the third writes all of its tree behind them."""
    wide = replace(LIMITS, width=3, depth=2, tree=12)
    assert (wide.window, wide.tokens_ahead, wide.max_blocks) == (12, 2 * 3 + 12, 19)
    assert replace(wide, tree=3).tokens_ahead == replace(wide, tree=0).tokens_ahead == 9
    with pytest.raises(ValueError, match="tree is 2, but a path of 3 tokens, the width, has to fit in"):
        replace(wide, tree=2)
    with pytest.raises(ValueError, match="tree is 34, but must be 0 to 33"):
        replace(wide, tree=34)


def test_decode_steps_are_as_wide_as_the_limits_unless_told_otherwise() -> None:
    wide = replace(LIMITS, width=4)
    assert SchedulerConfig(wide, blocks=9).widths == (4,)
    assert SchedulerConfig(wide, blocks=9, widths=(1, 3)).widths == (1, 3)


@pytest.mark.parametrize("widths", [(0,), (4, 0), (-1,), (1, 5)], ids=str)
def test_a_width_without_a_token_or_beyond_the_limits_is_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="room for 1 to 4 tokens"):
        SchedulerConfig(replace(LIMITS, width=4), blocks=9, widths=widths)
