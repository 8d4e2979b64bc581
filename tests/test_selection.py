"""What is selected of a grid covers it."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.selection import Row, covering, covering_rows

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


MANY: dict[str, tuple[object, ...]] = {f"axis {i}": tuple(range(size)) for i, size in enumerate((9, 7, 5, 4, 3, 2))}


def met(rows: list[Row], at_once: int) -> set[tuple[tuple[str, object], ...]]:
    return {some for row in rows for some in combinations(row.items(), at_once)}


def small(row: Row) -> bool:
    """No row has the last value of the third axis with a value above 3 of the first."""
    return row.get("axis 2") != 4 or row.get("axis 0", 0) <= 3


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_rows_have_all_values_that_may_meet_and_no_others(at_once: int) -> None:
    whole = [dict(zip(MANY, values, strict=True)) for values in product(*MANY.values())]
    rows = covering_rows(MANY, small, at_once=at_once)
    assert met(rows, at_once) == met([row for row in whole if small(row)], at_once)
    assert all(small(row) for row in rows)
    assert len(rows) <= {1: 10, 2: 66, 3: 370}[at_once], "few more than the largest axes have combinations: 9, 63, 315"
    assert rows == covering_rows(MANY, small, at_once=at_once)


def test_values_that_cannot_be_completed_are_left_out() -> None:
    """Of three axes one may be 1: of two that are, nothing is known before the third is chosen."""
    rows = covering_rows(dict.fromkeys("abc", (0, 1)), lambda row: len(row) < 3 or sum(row.values()) < 2)
    assert (("a", 1), ("b", 1)) not in met(rows, 2)
    assert (("a", 1), ("b", 0)) in met(rows, 2)


def test_rows_have_what_is_asked_for() -> None:
    def asked(row: Row) -> bool:
        return row.get("axis 0") in (None, 0, 1, 2, 3)

    rows = covering_rows(MANY, small, asked=asked)
    assert met(rows, 2) >= {some for some in met(covering_rows(MANY, small), 2) if asked(dict(some))}
    assert len(rows) < 50


def test_a_value_that_takes_long_is_in_no_more_rows_than_it_needs() -> None:
    rows = covering_rows(MANY | {"long": (False, "yes")}, small, sparing=["yes"])
    assert 9 <= len([row for row in rows if row["long"] == "yes"]) <= 14
