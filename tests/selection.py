"""Which cases of a grid `make test` runs, and which are left to `make test-all`.

Knows: covering arrays. Two cases of a grid mostly run the same code; what one of them alone can show is a value, or two
values that meet. Does not know: what the values are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(*axes: Sequence[Any], at_once: int = 2, turned: int = 0) -> list[Any]:
    """All combinations of ``axes``, most of them marked ``long``.

    Those that are not have, for any ``at_once`` axes, every combination of their values: with 1 every value, with 2
    every pair; where there is a choice, values that few others have. Which ones is the same in every run; another
    ``turned`` may give others.
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
