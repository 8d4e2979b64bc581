"""Draft trees: how they grow, against a search over all paths; who sees whom; which path draws take; drafters' trees.

That an engine's answers stay the same is tests/runtime/engine/test_trees.py's; tests/gpu/test_trees_gpu.py is Triton's.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.inputs import MOST_TREE_TOKENS
from runtime import speculative_config as options
from runtime.config import EngineConfig
from runtime.execute.proposer import Candidates, Observed
from runtime.execute.sampling.draft_tree import NO_GUESS, lay_out, walk
from runtime.speculate.dflash import DFlashProposer
from runtime.speculate.mtp import MTPProposer
from runtime.speculate.tree import FLOOR, grow
from tests.plant import Op, plant
from tests.runtime.engine.conftest import long
from tests.runtime.engine.lives import Life
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.speculate.recorded import Drafter, check_rounds
from tests.runtime.speculate.test_drafted import IDS, drafted, people, sequences


def some_candidates(rows: int, places: int, ranks: int, seed: int = 0) -> Candidates:
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.randn(rows, places, ranks, generator=generator).mul(2).log_softmax(-1)
    ids = torch.rand(rows, places, 40, generator=generator).argsort(-1)[:, :, :ranks]
    return Candidates(ids, logprobs.sort(-1, descending=True).values)


def paths_of(tokens_BQ: Tensor, parents_BQ: Tensor) -> list[list[tuple[int, ...]]]:
    """Of each node but the root: the tokens on the way to it."""
    found = []
    for tokens, parents in zip(tokens_BQ.tolist(), parents_BQ.tolist(), strict=True):
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*paths[parent], token))
        found.append(paths[1:])
    return found


@pytest.mark.parametrize(("places", "ranks", "count"), [(1, 4, 3), (4, 5, 15), (3, 2, 14), (7, 3, 31), (5, 3, 5)])
def test_a_tree_is_the_likeliest_path_and_the_heaviest_others(places: int, ranks: int, count: int) -> None:
    found = some_candidates(4, places, ranks)
    grown = paths_of(*grow(found, count))
    for row, paths in enumerate(grown):
        lists = found.ids_BQC[row].tolist(), found.logprobs_BQC[row].double()
        likeliest = [tuple(ids[0] for ids in lists[0][:end]) for end in range(1, places + 1)]
        assert paths[:places] == likeliest
        weighed = {}
        for depth in range(1, places + 1):
            for chosen in itertools.product(range(ranks), repeat=depth):
                path = tuple(lists[0][place][rank] for place, rank in enumerate(chosen))
                weighed[path] = float(sum(lists[1][place, rank] for place, rank in enumerate(chosen)))
        others = sorted((path for path in weighed if path not in likeliest), key=lambda path: -weighed[path])
        assert paths[places:] == others[: count - places], "in this order"


def test_logits_that_are_not_finite_make_a_tree_as_well() -> None:
    found = some_candidates(2, 3, 3)
    logprobs = found.logprobs_BQC.clone()
    logprobs[0], logprobs[1, :, 1:] = float("nan"), float("-inf")
    tokens, parents = grow(found._replace(logprobs_BQC=logprobs), 12)
    assert tokens.shape == parents.shape == (2, 12)
    assert bool((parents < torch.arange(1, 13)).all())
    assert all(len(set(paths)) == 12 for paths in paths_of(tokens, parents))
    assert abs(FLOOR) * MOST_TREE_TOKENS < torch.finfo(torch.float32).max


def test_layout_and_walk_against_lists() -> None:
    """Of 33 nodes, the most that a mask has bits for."""
    found = some_candidates(6, 6, 4, seed=1)
    tokens, parents = grow(found, 32)
    tree = lay_out(parents, 6)
    tokens_BN = torch.nn.functional.pad(tokens, (1, 0), value=39)
    generator = torch.Generator().manual_seed(2)
    rank_BN = (torch.rand(6, 33, generator=generator) ** 3 * 4).long()
    place_BN = tree.depth_BN.clamp(max=5)
    drawn_BN = found.ids_BQC.gather(1, place_BN[:, :, None].expand(-1, -1, 4)).gather(2, rank_BN[:, :, None])[:, :, 0]
    way, first = walk(tokens_BN, tree, drawn_BN, 6), walk(tokens_BN, tree, drawn_BN, 6, scripted=True)
    lengths = set()
    for row, of_nodes in enumerate(paths_of(tokens, parents)):
        numbers = {(): 0} | {path: node for node, path in enumerate(of_nodes, 1)}
        for path, node in numbers.items():
            ancestors = [numbers[path[:end]] for end in range(1, len(path) + 1)]
            assert int(tree.depth_BN[row, node]) == len(path)
            assert int(tree.seen_BN[row, node]) & 0xFFFFFFFF == sum(1 << (n - 1) for n in ancestors)
        path = ()
        while (longer := (*path, int(drawn_BN[row, numbers[path]]))) in numbers:
            path = longer
        lengths.add(len(path))
        nodes = [numbers[path[: min(end, len(path))]] for end in range(7)]
        assert way.nodes_BW[row].tolist() == nodes
        assert way.guesses_BQ[row].tolist() == [*path, *[NO_GUESS] * (6 - len(path))]
        assert first.nodes_BW[row].tolist() == list(range(7))
    assert len(lengths) > 2


# ---- drafters ----


def treed(drafter: Drafter, *, depth: int, width: int = 5, size: int = 16, **limits: Any) -> Life:
    return drafted(drafter, people(5), width, depth=depth, tree=size, rows=3, max_prefill_tokens=8, **limits)


@pytest.mark.parametrize(
    ("kind", "depth", "ids"), [long("mtp", 0, None), ("mtp", 2, IDS), long("dflash", 0, IDS), long("dflash", 2, None)]
)
def test_trees_grow_around_what_the_oracle_guesses(
    kind: str, depth: int, ids: tuple[int, ...] | None, tmp_path: Path
) -> None:
    """So drafters were shown the tokens of the path that was kept, and no others; more is kept than of a chain. Also
    where they guess among some ids only; here a place of the tree has all of these."""
    drafter = Drafter(kind, tmp_path, ids=ids, top_k=5 if ids else 4)
    life = treed(drafter, depth=depth)
    assert check_rounds(drafter, sequences(people(5), life), every=2 if ids else 1) > 15
    assert ids is None or set().union(*drafter.rounds.values()) <= set(ids)
    chain = drafted(Drafter(kind, tmp_path, ids=ids), people(5), 5, depth=depth, rows=3, max_prefill_tokens=8)
    kept, of_chain = (
        life.counters["spec_num_accepted_tokens"] / life.counters["spec_num_drafts"] for life in (life, chain)
    )
    assert kept > 1.5 * of_chain


class RolledFeatures(DFlashProposer):
    """A mutant: the features of the path's neighbours."""

    def observe(self, observed: Observed) -> None:
        assert observed.features_TF is not None
        if observed.advanced is not None and observed.advanced.width > 1:
            rolled = observed.features_TF.view(-1, observed.advanced.width, observed.features_TF.shape[1]).roll(1, 1)
            observed = replace(observed, features_TF=rolled.flatten(0, 1))
        super().observe(observed)


class FirstNode(MTPProposer):
    """A mutant: the hidden state of the root, however long the path was."""

    def observe(self, observed: Observed) -> None:
        if (advanced := observed.advanced) is not None:
            roots = torch.arange(len(advanced.rows_B)) * advanced.width
            observed = replace(observed, advanced=advanced._replace(last_B=roots))
        super().observe(observed)


@pytest.mark.parametrize("mutant", [RolledFeatures, FirstNode])
def test_mutants_are_seen_in_the_guesses_only(mutant: Any, tmp_path: Path) -> None:
    drafter = Drafter("mtp" if issubclass(mutant, MTPProposer) else "dflash", tmp_path, mutant, top_k=4)
    life = treed(drafter, depth=2)  # the text is right
    with pytest.raises(AssertionError, match="tokens known"):
        check_rounds(drafter, sequences(people(5), life))


def test_features_that_were_not_taken_along_the_path_show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def in_order(shown: Op, window: Any, accepted: Any) -> Any:
        rows, width = accepted.tokens_BW.shape
        first_T = (torch.arange(rows)[:, None] * window.tokens + torch.arange(width)).reshape(-1)
        return shown(window, accepted)._replace(path_T=first_T)

    plant(monkeypatch, in_order, part="window.shown")
    drafter = Drafter("dflash", tmp_path, top_k=4)
    life = treed(drafter, depth=0)
    with pytest.raises(AssertionError, match="tokens known"):
        check_rounds(drafter, sequences(people(5), life))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ids"), [pytest.param("mtp", IDS, marks=pytest.mark.long), ("dflash", None)])
def test_two_ranks_grow_the_trees_of_one(kind: str, ids: tuple[int, ...] | None, tmp_path: Path) -> None:
    drafter = Drafter(kind, tmp_path, ids=ids, top_k=4)
    one = treed(drafter, depth=0)
    of_one_rank = drafter.rounds
    two = treed(drafter, depth=2, over=partial(tensor_rig, 2))
    assert drafter.rounds.keys() == of_one_rank.keys()
    assert drafter.rounds == of_one_rank
    assert two.rounds == one.rounds


# ---- options ----

TREE = {"method": "dflash", "model": "models/demo/dflash", "num_speculative_tokens": 7, "tree_size": 16}


def test_a_mask_has_bits_for_the_largest_tree() -> None:
    assert options.MOST_TREE_TOKENS == MOST_TREE_TOKENS == 33


def test_a_tree_is_named_in_labels_and_prints_as_one_may_type_it() -> None:
    config = options.speculative_config(TREE)
    assert (config.width, config.tree_size, config.tree_top_k) == (8, 16, 8)
    assert config.label == "dflash tree of 16"
    assert options.speculative_config(str(config)) == config
    engine = EngineConfig(model="m", device="cpu", speculative_config=TREE)
    limits = engine.step_limits(256, 2)
    assert (limits.width, limits.tree, limits.window, limits.tokens_ahead) == (8, 16, 16, 2 * 8 + 16)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tree_size": 34}, 'tree_size is 34, but must be at most 33: type "tree_size": 33'),
        ({"tree_size": 1}, "tree_size is 1, but must be at least 2"),
        ({"tree_size": 7}, 'num_speculative_tokens is 7: a tree holds its likeliest path, .* "tree_size": 8 or more'),
        ({"tree_size": None, "tree_top_k": 4}, "tree_top_k is 4, but there is no tree"),
        ({"tree_top_k": 0}, "tree_top_k is 0, but must be at least 1"),
        ({"num_speculative_tokens": 2, "tree_top_k": 3}, 'trees of 13 at most: type "tree_size": 13 or less'),
        ({"method": "ngram", "model": None}, "method 'ngram' has one token a place.* mtp, dflash, eagle3"),
        ({"draft_sample_method": "probabilistic"}, "'probabilistic', but tree_size is 16: .*leave one of them out"),
        ({"speculative_token_tree": "[(0,), (0, 0)]"}, "a tree whose shape is fixed.* type its tokens"),
    ],
)
def test_trees_that_cannot_be_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(options.SpeculativeConfigError, match=said):
        options.speculative_config({**TREE, **given})
