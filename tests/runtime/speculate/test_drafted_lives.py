"""Lives of requests with drafters of weights: answers, ends and scores are those of the serial engine without.

Knows: random lives (tests/runtime/engine/random_lives.py) over each kind of drafter, chains and trees, widths up to 32,
depths 0 to 4. Does not know: what is guessed (test_drafted.py, test_eagle3.py, test_own_mtp.py), n-gram lookup and all
that recurrent layers can meet (in tests/runtime/engine: test_speculation.py, test_lives.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from runtime.schedule.plan import StepKind
from runtime.schedule.request import FinishReason
from runtime.schedule.speculation import Speculation
from tests.models.tiny_delta import FAMILIES
from tests.runtime.engine.lives import Life, live, same
from tests.runtime.engine.mixed_corners import Corners, paths_in_turn
from tests.runtime.engine.random_lives import RandomLife, random_life
from tests.runtime.speculate.recorded import SHAPE, VOCABULARY, Drafter, OwnLayer, check_rounds
from tests.runtime.speculate.test_drafted import sequences
from tests.runtime.speculate.test_eagle3 import Head

KINDS = ("mtp", "dflash", "eagle3", "own mtp")
WIDTHS = (4, 8, 16, 32)
TREES = {4: 12, 8: 24, 16: 32, 32: 33}  # tokens of a tree, by the longest path that a row gains


def drawn(seed: int) -> RandomLife:
    """Every other one is cut as by a stop string that the host found, the others as by a caller who left."""
    life = random_life(seed).over(VOCABULARY).with_windows(4, 60)
    return replace(life, cut_as=FinishReason.STOP) if seed % 2 else life


@cache
def serial(seed: int) -> Life:
    return live(drawn(seed).requests, depth=0, shape=SHAPE)


def drafter_of(kind: str, width: int, folder: Path, top_k: int = 0) -> Drafter:
    if kind == "eagle3":
        return Head(folder, top_k=top_k)
    if kind == "own mtp":
        return OwnLayer(FAMILIES["qwen3-next"], folder, top_k=top_k)
    changes: dict[str, Any] = {"block_size": width} if kind == "dflash" else {}
    return Drafter(kind, folder, top_k=top_k, **changes)


def lived(kind: str, width: int, depth: int, seed: int, folder: Path, *, tree: bool = False) -> tuple[Life, Life]:
    """A life with windows, or trees, and the serial one. With the fewest blocks that serve a request. Of even seeds
    rows beside chunks have windows, too, but for trees over recurrent layers."""
    one, drafter = drawn(seed), drafter_of(kind, width, folder, top_k=4 if tree else 0)
    size, tokens = one.limits["block_size"], TREES[width] if tree else width
    how: dict[str, Any] = {
        "proposer": drafter,
        "speculation": Speculation(width, mixed_percent=0 if seed % 2 or (tree and kind == "own mtp") else 100),
        "blocks": -(-(128 + width * depth + tokens) // size) + 1,
        "shape": SHAPE,
        **({"tree": tokens} if tree else {}),
    }
    alone = serial(seed)
    if kind == "own mtp":  # the target is another
        how |= {"folder": drafter.folder, "shape": None}
        alone = live(one.requests, depth=0, folder=drafter.folder)
    life = live(one.first, one.act, depth=depth, later=one.later, **(one.limits | how))
    same(life, alone, but=one.cut)
    return life, alone


FULL = (  # chains and trees of most widths and depths; other kinds and events in test_lives.py
    ("eagle3", 16, 4, 109, False),
    ("mtp", 8, 2, 109, True),
    ("dflash", 16, 2, 46, True),
)
MORE = (
    ("dflash", 16, 1, 109, False),
    ("mtp", 4, 0, 46, False),
    ("mtp", 32, 3, 46, False),
    ("eagle3", 4, 4, 46, True),
    ("own mtp", 4, 2, 109, True),
    ("own mtp", 32, 3, 46, False),
    ("dflash", 32, 3, 46, False),
    ("mtp", 16, 4, 109, False),
    ("eagle3", 32, 2, 46, False),
    ("own mtp", 16, 2, 109, False),
    ("dflash", 16, 3, 109, True),
    ("mtp", 8, 2, 46, True),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "width", "depth", "seed", "tree"),
    [*FULL, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)],
)
def test_lives_that_hold_everything(kind: str, width: int, depth: int, seed: int, tree: bool, tmp_path: Path) -> None:
    """Evictions, pauses, cancels or stop strings, echoed prompts, in one life; of seed 46 also windows or trees beside
    chunks."""
    life, alone = lived(kind, width, depth, seed, tmp_path, tree=tree)
    for name in ("evictions", "pauses", "mixed_steps", "spec_num_accepted_tokens"):
        assert life.counters[name] > 0, name
    assert life.counters["ghost_rows"] > 0 or depth == 0
    beside = any(plan.kind is StepKind.MIXED and plan.width > 1 for plan in life.real_plans)
    assert beside == (seed == 46), "rows beside chunks have a window, or a token"
    assert any(life.answers[i][0] != alone.answers[i][0] for i in drawn(seed).cut), "somebody is cut short"
    assert any(entry[2] for entries in life.logprobs.values() for entry in entries), "top-n log-probabilities"
    assert any(score[2] for scores in life.scores.by_request.values() for score in scores.values()), "of prompts, too"


@pytest.mark.long
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_lives(kind: str, width: int, seed: int, tree: bool, tmp_path: Path) -> None:
    life, _ = lived(kind, width, (seed + width // 8) % 5, seed, tmp_path, tree=tree)
    assert life.counters["spec_num_drafts"] > 0


@pytest.mark.long  # of a target alone: tests/runtime/engine/test_mixed_windows.py
@pytest.mark.parametrize("kind", ["mtp", "dflash", "eagle3"])
def test_the_corners_of_what_steps_with_chunks_share_by_both_paths(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states and features as well: what a larger step left behind is in nobody's guess."""
    corners, drafter = Corners(4, VOCABULARY), drafter_of(kind, 4, tmp_path)
    paths_in_turn(monkeypatch, replayed_first=kind == "mtp")
    policy = Speculation(4, mixed_percent=100)
    how: dict[str, Any] = {"proposer": drafter, "speculation": policy, "shape": SHAPE, **corners.limits}
    life = live(corners.first, corners.act, depth=2, **how)
    corners.check(life)
    same(life, live(corners.everybody, depth=0, shape=SHAPE))
    assert check_rounds(drafter, sequences(corners.everybody, life), every=5) > 10
