"""The lives of test_hybrid_lifecycle.py: each hybrid family with each proposer, kind of sampling and depth.

Knows: their names, and which of them `make test` runs. Does not know: what makes something happen (hybrid_lives.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.selection import covering

GATED_DELTA, MAMBA_2 = ("qwen3.5", "qwen3-next", "qwen3.5-moe"), ("nemotron-h",)
PROPOSERS = ("ngram", "mtp", "dflash", "eagle3", "replay", "tree")
MODES = ("greedy", "filtered")
DEPTHS = (2, 0, 1, 3, 4)  # the first one is what a family has twice, where it has the others once


THIRDS = (
    ("finish", "pause", "evict"),
    ("stop id", "staggered admission", "several in one step"),
    ("all ending", "cancel", "block boundary"),
)  # of what happens in a life
WHOLE = tuple(name for third in THIRDS for name in third)


def lives() -> list[Any]:
    """The whole grid: (family, proposer, mode, depth, what happens). What is not long: each family with each proposer
    once. Modes and depths turn, so that every family meets all of them, and every proposer both modes and three depths
    or more. The families of one recurrence share out what happens: together they have all of it with each proposer,
    and each of them has it twice. What one leaves to the others is long.
    """
    found = []
    for recurrence in (GATED_DELTA, MAMBA_2):
        for number, family in enumerate(recurrence):
            turned = 13 * len(GATED_DELTA) if recurrence is MAMBA_2 else 13 * number
            for case in covering([family], PROPOSERS, MODES, DEPTHS, at_once=1, turned=turned):
                if case.marks or len(recurrence) == 1:
                    found.append(_life(case.values, "whole", WHOLE, case.marks))
                    continue
                own = THIRDS[(number + PROPOSERS.index(case.values[1])) % len(THIRDS)]
                rest = tuple(name for name in WHOLE if name not in own)
                found += [_life(case.values, "a third", own), _life(case.values, "the rest", rest, pytest.mark.long)]
    return found


def _life(case: Sequence[Any], name: str, happens: tuple[str, ...], marks: Any = ()) -> Any:
    return pytest.param(*case, happens, marks=marks, id="-".join(map(str, (*case, name))))
