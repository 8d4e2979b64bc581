"""The MTP layer of a hybrid model's own checkpoint, in engines on the twin: the tokens of W = 1, and every round's
guesses those of an oracle without pages, slots or recurrent state between rounds.

Gated attention, zero-centred norms, experts and a shared one, or Nemotron-H's blocks: what the layer has beside that of
test_drafted.py, where every kind of life is.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from models.drafters.load import load_own_mtp
from models.layers.decoder import Decoder
from parallel.layers.experts import ExpertSplit
from runtime.engine import Engine
from runtime.execute.proposer import Observed
from runtime.schedule.config import SnapshotPolicy
from runtime.speculate.mtp import MTPProposer
from tests.models.tiny_delta import FAMILIES
from tests.models.tiny_nemotron import NEMOTRON
from tests.runtime.engine.conftest import long
from tests.runtime.engine.lives import Life, live, same
from tests.runtime.engine.rig import request
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.engine.test_hybrid import on_banks
from tests.runtime.engine.test_poison import fill_with_nan, idle_blocks
from tests.runtime.speculate.recorded import FOUR_HEADS, OwnLayer, Recorder, check_rounds
from tests.runtime.speculate.test_drafted import check_gains_in_float32, people, prompt, sequences

HYBRIDS = {**FAMILIES, "nemotron-h": NEMOTRON}


def drafted(drafter: OwnLayer, width: int, *, depth: int, count: int = 5, **how: Any) -> Life:
    """A life with windows, whose answers are those of the serial engine without."""
    requests = people(count)
    limits: dict[str, Any] = {
        "rows": 3,
        "max_prefill_tokens": 8,
        "block_size": 4,
        "blocks": 400,
        "folder": drafter.folder,
    } | how
    life = live(requests, depth=depth, widths=(width,), proposer=drafter, **limits)
    same(life, live(requests, depth=0, folder=drafter.folder))
    return life


@pytest.mark.parametrize(
    ("family", "depth"),
    [case if case in (("qwen3-next", 0), ("nemotron-h", 2)) else long(*case) for case in product(HYBRIDS, (0, 2))],
)
def test_rounds_guess_what_the_oracle_does(family: str, depth: int, tmp_path: Path) -> None:
    """Prompts in chunks of 8 tokens, rows that come and go, blocks of 4 tokens."""
    drafter = OwnLayer(HYBRIDS[family], tmp_path)
    life = drafted(drafter, 4, depth=depth)
    assert check_rounds(drafter, sequences(people(5), life)) >= 5 * 23 / 4
    assert life.counters["spec_num_accepted_tokens"] > 5, "windows of which more than a token was kept"


def test_trees_grow_around_what_the_oracle_guesses(tmp_path: Path) -> None:
    """Of hidden states along the path that was kept, behind recurrent state that took in this path."""
    drafter = OwnLayer(FAMILIES["qwen3-next"], tmp_path, top_k=4)
    life = drafted(drafter, 4, depth=2, tree=12)
    assert check_rounds(drafter, sequences(people(5), life)) > 15
    assert life.counters["spec_num_accepted_tokens"] > 20, "nodes were kept"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "whole"),
    [long("qwen3-next", False), ("qwen3-next", True), long("nemotron-h", False)],
    ids=["shares", "whole experts", "blocks"],
)
def test_two_ranks_guess_as_one(family: str, whole: bool, tmp_path: Path) -> None:
    """The layer is split as its target is: heads, the shared expert, and experts either way."""
    drafter = OwnLayer(HYBRIDS[family], tmp_path)
    drafted(drafter, 4, depth=0, count=3)
    of_one_rank = drafter.rounds
    split = ExpertSplit(whole=whole)
    drafted(drafter, 4, depth=2, count=3, over=partial(tensor_rig, 2), experts=split)
    assert drafter.rounds == of_one_rank
    layers = drafter.recorder.inner._draft.layers  # type: ignore[union-attr]
    held = {"qwen3-next": (4, 32, 24) if whole else (8, 16, 24), "nemotron-h": (10, 12, 24)}
    assert layers[-1].mlp.experts.gate_up.data.shape == held[family], "with two parts of the shared expert beside eight"


@pytest.mark.long  # of a separate checkpoint: test_drafted.py
@pytest.mark.parametrize(("family", "tree"), [("qwen3-next", 0), ("qwen3.5", 12)])
def test_every_round_gains_the_same_in_float32_at_any_depth_and_on_one_two_and_four_ranks(
    family: str, tree: int, tmp_path: Path
) -> None:
    """With experts and as a chain, or dense and as a tree; four ranks have a head of each kind."""
    shape = FAMILIES[family] | FOUR_HEADS | {"linear_num_key_heads": 4}
    drafter = OwnLayer(shape, tmp_path, top_k=4 if tree else 0)
    check_gains_in_float32(drafter, tree=tree, shape=None, folder=drafter.folder)


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.long), 2])
def test_what_belongs_to_nobody_reaches_no_guess(depth: int, tmp_path: Path) -> None:
    """NaN in the null slot, in free slots and in idle blocks before every turn; rows are evicted meanwhile."""
    drafter = OwnLayer(FAMILIES["qwen3-next"], tmp_path)

    def poison(engine: Engine, turn: int) -> None:
        on_banks(engine, [0, *engine.scheduler.slots._free], float("nan"))
        fill_with_nan(engine, idle_blocks(engine))

    limits: dict[str, Any] = {"rows": 5, "buckets": (3, 5), "blocks": 40}
    life = drafted(drafter, 4, depth=depth, act=poison, **limits)
    assert life.counters["evictions"] > 0
    check_rounds(drafter, sequences(people(5), life))


def test_a_prefix_hit_goes_on_from_a_snapshot(tmp_path: Path) -> None:
    """The layer's entries of the prefix come with its blocks, its newest hidden state with the tokens behind it.

    Prompts have a token more in common than blocks, because the last entry of a block depends on it.
    """
    drafter, shared = OwnLayer(FAMILIES["qwen3-next"], tmp_path), prompt(33, 7)
    requests = [request(i, (*shared, *prompt(2 + i, i)), max_tokens=16, stops=()) for i in range(4)]
    limits: dict[str, Any] = {"folder": drafter.folder, "rows": 2, "max_prefill_tokens": 12, "block_size": 4}
    given: dict[str, Any] = {"widths": (4,), "proposer": drafter, "snapshots": SnapshotPolicy(6, 2, 1)}
    life = live(requests, depth=2, **limits, **given)
    alone = live(requests, depth=0, folder=drafter.folder, prefix_caching=False)
    same(life, alone)
    assert life.counters["snapshot_restores"] >= 2
    assert life.counters["spec_num_accepted_tokens"] > 0
    check_rounds(drafter, sequences(requests, life), every=2)


class OwnState(MTPProposer):
    """The state before the newest token's."""

    def observe(self, observed: Observed) -> None:
        before = self._hidden_SN.clone()
        super().observe(observed)
        if observed.advanced is not None:
            self._hidden_SN.copy_(before)


class Ungated(MTPProposer):
    """The shared expert counts half, whatever its gate says."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        draft: Any = self._draft
        mlp = draft.layers[0].mlp
        mlp.router.weight.data[mlp.router.experts].zero_()


@pytest.mark.parametrize("mutant", [OwnState, Ungated])
def test_mutants_are_seen_in_the_guesses_only(mutant: type[MTPProposer], tmp_path: Path) -> None:
    class Mutated(OwnLayer):
        def __call__(self, parts: Any) -> Recorder:
            model: Decoder = parts.model
            self.recorder = Recorder(mutant(parts, load_own_mtp(model, self.folder)), model)
            return self.recorder

    drafter = Mutated(FAMILIES["qwen3.5-moe"], tmp_path)
    life = drafted(drafter, 4, depth=2)
    with pytest.raises(AssertionError, match="tokens known"):
        check_rounds(drafter, sequences(people(5), life))
