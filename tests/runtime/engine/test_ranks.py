"""Several ranks run the same engine: the same tokens as one rank alone, and an error with a name when one differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.engine.rig import rig, run, tiny_folder
from tests.runtime.engine.test_depths import mixture, outcome
from tests.torchrun import Ran, torchrun

SEED = 21


def start(world: int, folder: Path, output: Path, depth: int = 2, **options: object) -> Ran:
    words = (str(folder), str(SEED), str(output), str(depth), json.dumps(options))
    return torchrun(world, "tests.runtime.engine.ranks", *words)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


@pytest.mark.multiprocess
@pytest.mark.parametrize(("world", "options"), [(2, {}), (4, {}), (4, {"speculative_config": NGRAM})], ids=str)
def test_any_number_of_ranks_draws_the_same_tokens(world: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Greedy, random, filtered and penalised rows, with an odd vocabulary and fewer key/value heads than ranks; one
    token a row and step, or windows."""
    with rig(depth=0) as engine:
        alone = outcome(run(engine, mixture(SEED)))
    ran = start(world, tiny_folder(tmp_path / "model"), tmp_path / "found.json", **options)
    assert ran.returncode == 0, ran.said[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rows"] == {str(i): [list(tokens), int(reason)] for i, (tokens, reason) in sorted(alone.items())}
    assert found["counters"]["chain_breaks{start}"] == 1
    assert bool(found["counters"]["spec_num_drafts"]) == bool(options)


@pytest.mark.multiprocess
def test_ranks_of_the_deterministic_mode_all_reduce_in_rank_order(tmp_path: Path) -> None:
    """The start refuses other collectives (build.py), and the sums come out right."""
    with rig(depth=0) as engine:
        alone = outcome(run(engine, mixture(SEED)))
    ran = start(2, tiny_folder(tmp_path / "model"), tmp_path / "found.json", deterministic=True)
    assert ran.returncode == 0, ran.said[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rows"] == {str(i): [list(tokens), int(reason)] for i, (tokens, reason) in sorted(alone.items())}


@pytest.mark.multiprocess
def test_a_rank_that_decides_differently_is_named(tmp_path: Path) -> None:
    ran = start(2, tiny_folder(tmp_path / "model"), tmp_path / "found.wrong")
    assert ran.returncode != 0
    assert not (tmp_path / "found.wrong").exists()
    assert "Disagreement" in ran.said, ran.said[-3000:]
    assert "rank 1" in ran.said
    assert "4711" in ran.said, "both decisions are told"
