"""Which cases of a grid `make test` runs, and which are left to `make test-all`.

Knows: covering arrays. Two cases of a grid mostly run the same code; what one of them alone can show is a value, or two
values that meet. Does not know: what the values are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, islice, product
from typing import Any

import pytest


def covering(*axes: Sequence[Any], at_once: int = 2, turned: int = 0) -> list[Any]:
    """All combinations of ``axes``, most of them marked ``long``.

    Those that are not have, for any ``at_once`` axes, every combination of their values: with 0 one case is left, with
    1 every value, with 2 every pair; where there is a choice, values that few others have. Which ones is the same in
    every run; another ``turned`` may give others.
    """
    cases = [*product(*(range(len(axis)) for axis in axes))]
    cases = cases[turned % len(cases) :] + cases[: turned % len(cases)]
    groups = [*combinations(range(len(axes)), at_once)]
    shown = {case: {(group, tuple(case[axis] for axis in group)) for group in groups} for case in cases}
    missing, chosen = set().union(*shown.values()), set[tuple[int, ...]]()
    times = Counter[tuple[int, int]]()  # that a value was chosen, by axis
    while missing:
        best = max(cases, key=lambda case: (len(shown[case] & missing), -sum(times[at] for at in enumerate(case))))
        chosen.add(best)
        times.update(enumerate(best))
        missing -= shown[best]
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(axes, case, strict=True)), marks=() if case in chosen else pytest.mark.long
        )
        for case in sorted(cases)
    ]


Row = dict[str, Any]  # axis -> value
Met = tuple[tuple[str, Any], ...]  # values of some axes, in the order of the axes

TRIES = 8  # rows of which the best one is taken


def covering_rows(
    axes: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool] = lambda row: True,
    *,
    at_once: int = 2,
    asked: Callable[[Row], bool] = lambda row: True,
    sparing: Sequence[Any] = (),
) -> list[Row]:
    """A few of all combinations of ``axes``: any ``at_once`` values that may meet, and for which ``asked`` is
    true, do so in at least one of them.

    ``allowed`` gets values of some axes and says whether they may meet; what it refuses it refuses with further values,
    too. ``sparing``: values that no row has without need, for they take long. The product of the axes is never
    enumerated, so it may be large; the rows are the same in every run.
    """
    cover = _Cover(axes, allowed, at_once, sparing)
    cover.missing = {some: None for some in cover.missing if asked(dict(some))}
    rows: list[Row] = []
    while cover.missing:
        rows.append(cover.best_row())
        cover.add(rows[-1])
    return rows


class _Cover:
    """``missing``: combinations of ``at_once`` values that no row has yet."""

    def __init__(
        self, axes: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], at_once: int, sparing: Sequence[Any]
    ) -> None:
        self._axes, self._allowed, self._at_once, self._sparing = axes, allowed, at_once, sparing
        self._times = Counter[tuple[str, Any]]()  # rows with a value
        self.missing: dict[Met, None] = {}  # an ordered set
        for names in combinations(axes, at_once):
            for values in product(*(axes[name] for name in names)):
                if self._completed(dict(zip(names, values, strict=True)), lambda row, name: axes[name]) is not None:
                    self.missing[tuple(zip(names, values, strict=True))] = None

    def add(self, row: Row) -> None:
        met = [(name, row[name]) for name in self._axes]
        self._times.update(met)
        for some in combinations(met, self._at_once):
            self.missing.pop(some, None)

    def best_row(self) -> Row:
        """Of a few rows, each with another missing combination, the one with the most of them."""
        tries = [row for some in islice(self.missing, TRIES) if (row := self._completed(dict(some), self._by_gain))]

        def gain(row: Row) -> int:
            return sum(some in self.missing for some in combinations(row.items(), self._at_once))

        return max(tries, key=gain)

    def _completed(self, row: Row, ordered: Callable[[Row, str], Sequence[Any]]) -> Row | None:
        """``row`` with a value of each axis: the first in the order of ``ordered`` with which all may meet."""
        if not self._allowed(row):
            return None
        name = next((name for name in self._axes if name not in row), None)
        if name is None:
            return {name: row[name] for name in self._axes}
        for value in ordered(row, name):
            if (whole := self._completed({**row, name: value}, ordered)) is not None:
                return whole
        return None

    def _by_gain(self, row: Row, name: str) -> Sequence[Any]:
        """Values of an axis: those with which ``row`` has the most missing combinations, of these the rarest so far."""
        before = [other for other in self._axes if other in row]

        def order(value: Any) -> tuple[int, bool, int]:
            gain = 0
            for others in combinations(before, self._at_once - 1):
                values = {**{other: row[other] for other in others}, name: value}
                gain += tuple((axis, values[axis]) for axis in self._axes if axis in values) in self.missing
            return -gain, value in self._sparing, self._times[name, value]

        return sorted(self._axes[name], key=order)
