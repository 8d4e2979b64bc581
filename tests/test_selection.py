"""What is selected of a grid covers it."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.selection import covering

AXES = (("attention", "hybrid"), (0, 1, 2, 4), ("launched", "captured", "in turns"))


@pytest.mark.parametrize("turned", [0, 1, 7, 24])
@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_every_case_is_there_and_what_is_not_long_covers_the_grid(at_once: int, turned: int) -> None:
    cases = covering(*AXES, at_once=at_once, turned=turned)
    assert [case.values for case in cases] == [*product(*AXES)]
    chosen = [case.values for case in cases if not case.marks]
    for axes in combinations(range(len(AXES)), at_once):
        assert {tuple(case[axis] for axis in axes) for case in chosen} == {*product(*(AXES[axis] for axis in axes))}
    assert len(chosen) == {1: 4, 2: 12, 3: 24}[at_once]
