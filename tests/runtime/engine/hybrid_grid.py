"""The lives of test_hybrid_lifecycle.py: each hybrid family with each proposer, kind of sampling and depth.

Knows: their names, and which of them `make test` runs; docs/draw_recurrent.py shows it. Does not know: what is in a
life (hybrid_lives.py).
"""

from __future__ import annotations

from typing import Any

from tests.selection import covering

GATED_DELTA, MAMBA_2 = ("qwen3.5", "qwen3-next", "qwen3.5-moe"), ("nemotron-h",)
PROPOSERS = ("ngram", "mtp", "dflash", "eagle3", "replay", "tree")
MODES = ("greedy", "filtered")
DEPTHS = (2, 0, 1, 3, 4)  # the first one is what a family has twice, where it has the others once


def lives() -> list[Any]:
    """The whole grid: (family, proposer, mode, depth). What is not long: each family with each proposer once. Modes and
    depths turn, so that every family meets all of them, and every proposer both modes and three depths or more."""
    found = []
    for number, family in enumerate((*GATED_DELTA, *MAMBA_2)):
        found += covering([family], PROPOSERS, MODES, DEPTHS, at_once=1, turned=13 * number)
    return found
