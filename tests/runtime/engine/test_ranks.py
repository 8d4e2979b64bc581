"""Several ranks run the same engine: the same tokens as one rank alone, and an error with a name when one differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.drafters import tiny_drafters as drafters
from tests.runtime.engine.rig import TINY, rig, run, tiny_folder
from tests.runtime.engine.test_depths import mixture, outcome
from tests.torchrun import Ran, torchrun

SEED = 21


def start(world: int, folder: Path, output: Path, depth: int = 2, **options: object) -> Ran:
    words = (str(folder), str(SEED), str(output), str(depth), json.dumps(options))
    return torchrun(world, "tests.runtime.engine.ranks", *words)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


def check_tokens(alone: dict[int, Any], ran: Ran, found: Path) -> dict[str, int]:
    """The leader wrote what one engine alone draws, over one unbroken chain. Returns its counters."""
    assert ran.returncode == 0, ran.said[-3000:]
    written = json.loads(found.read_text())
    assert written["rows"] == {str(i): [list(tokens), int(reason)] for i, (tokens, reason) in sorted(alone.items())}
    counters: dict[str, int] = written["counters"]
    assert counters["chain_breaks{start}"] == 1
    return counters


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("world", "options"),
    [(2, {}), pytest.param(4, {}, marks=pytest.mark.long), (4, {"speculative_config": NGRAM})],
    ids=str,
)
def test_any_number_of_ranks_draws_the_same_tokens(world: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Greedy, random, filtered and penalised rows, with an odd vocabulary and fewer key/value heads than ranks; one
    token a row and step, or windows."""
    with rig(depth=0) as engine:
        alone = outcome(run(engine, mixture(SEED)))
    found = tmp_path / "found.json"
    counters = check_tokens(alone, start(world, tiny_folder(tmp_path / "model"), found, **options), found)
    assert bool(counters["spec_num_drafts"]) == bool(options)


def written_drafter(method: str, folder: Path) -> Path:
    """A folder below ``folder`` with the config of a drafter for the rig's tiny target."""
    sizes = {key: value for key, value in TINY.items() if key in drafters.SIZES}
    (folder / "drafter").mkdir()
    config = getattr(drafters, f"{method}_config")(**sizes)
    (folder / "drafter" / "config.json").write_text(json.dumps(config))
    return folder / "drafter"


TREE = {"num_speculative_tokens": 4, "tree_size": 33, "tree_top_k": 6}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("world", "keys"),
    [
        (2, {"method": "dflash", **TREE}),
        (2, {"method": "eagle3", "num_speculative_tokens": 3}),
        pytest.param(4, {"method": "mtp", **TREE}, marks=pytest.mark.long),
        pytest.param(4, {"method": "eagle3", **TREE}, marks=pytest.mark.long),
        pytest.param(4, {"method": "dflash", "num_speculative_tokens": 7}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_drafters_of_any_number_of_ranks_leave_the_tokens_right(
    world: int, keys: dict[str, Any], tmp_path: Path
) -> None:
    """Drafters with weights, in processes: every rank grows the same chain or tree from its share of the vocabulary."""
    with rig(depth=0) as engine:
        alone = outcome(run(engine, mixture(SEED)))
    keys = keys | {"model": str(written_drafter(keys["method"], tmp_path)), "disable_by_batch_size": 8}
    found = tmp_path / "found.json"
    ran = start(world, tiny_folder(tmp_path / "model"), found, speculative_config=keys)
    counters = check_tokens(alone, ran, found)
    assert counters["spec_num_drafts"] > 10
    assert counters["spec_num_accepted_tokens"] > 0 or "tree_size" not in keys


@pytest.mark.multiprocess
def test_ranks_of_the_deterministic_mode_all_reduce_in_rank_order(tmp_path: Path) -> None:
    """The start refuses other collectives (build.py), and the sums come out right."""
    with rig(depth=0) as engine:
        alone = outcome(run(engine, mixture(SEED)))
    found = tmp_path / "found.json"
    check_tokens(alone, start(2, tiny_folder(tmp_path / "model"), found, deterministic=True), found)


@pytest.mark.multiprocess
def test_a_rank_that_decides_differently_is_named(tmp_path: Path) -> None:
    ran = start(2, tiny_folder(tmp_path / "model"), tmp_path / "found.wrong")
    assert ran.returncode != 0
    assert not (tmp_path / "found.wrong").exists()
    assert "Disagreement" in ran.said, ran.said[-3000:]
    assert "rank 1" in ran.said
    assert "4711" in ran.said, "both decisions are told"
