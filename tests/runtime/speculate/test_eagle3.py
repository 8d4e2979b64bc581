"""EAGLE-3 heads in engines on the twin: the tokens of W = 1, and every round's guesses those of an oracle without
pages, slots or a draft vocabulary split over ranks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.checkpoint import WeightsError
from models.drafters.draft_config import Eagle3Config
from models.drafters.load import load_eagle3, load_head
from models.registry import config_from_dict
from runtime.execute.proposer import Observed, ProposerParts
from runtime.schedule.plan import StepKind
from runtime.schedule.speculation import Speculation
from runtime.speculate.guesses import ProbabilisticProposer
from runtime.speculate.methods import check_drafter, proposer_for
from runtime.speculate.mtp import Eagle3Proposer
from runtime.speculate.tree import TreeProposer
from runtime.speculative_config import SpeculativeConfigError, speculative_config
from tests.models.drafters import serial_oracle
from tests.models.drafters.tiny_drafters import eagle3_config, eagle3_tensors, write
from tests.runtime.engine.lives import Life, live, same
from tests.runtime.engine.rig import TINY, request, rig, run
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.speculate.recorded import (
    FOUR_HEADS,
    SHAPE,
    SIZES,
    VOCABULARY,
    Drafter,
    Recorder,
    as_wide,
    check_rounds,
)
from tests.runtime.speculate.test_drafted import (
    LIMITS_OF_EVICTION,
    check_forks,
    check_gains_in_float32,
    check_prefix_hits,
    drafted,
    people,
    prompt,
    sequences,
)

IDS = (0, 2, 3, 5, 7, 8)  # of nine
LIMITS: dict[str, Any] = {"rows": 4, "max_prefill_tokens": 8, "block_size": 4}


class Head(Drafter):
    """A folder with an EAGLE-3 head. ``extra``: further tensors in it; ``top_k``: as Drafter's."""

    def __init__(
        self,
        folder: Path,
        proposer: type[Eagle3Proposer] = Eagle3Proposer,
        extra: dict[str, Tensor] | None = None,
        top_k: int = 0,
        **changes: Any,
    ) -> None:
        self._top_k = top_k
        self.kind, self.folder = "eagle3", folder
        self.config = eagle3_config(**(SIZES | changes))
        self.tensors = eagle3_tensors(self.config, IDS) | (extra or {})
        write(folder, self.config, self.tensors)
        self._proposer = proposer
        self.recorder: Recorder | None = None

    def __call__(self, parts: ProposerParts) -> Recorder:
        config = Eagle3Config.from_folder(self.folder)
        draft, head = load_eagle3(parts.model, config, self.folder), load_head(parts.model, config, self.folder)
        inner: Any = self._proposer(parts, draft, head)
        if self._top_k:
            inner = TreeProposer(parts, inner, self._top_k)
        recorder = Recorder(inner, parts.model, parts.limits.width - 1)
        if parts.model.collectives.rank == 0:
            self.recorder = recorder
        return recorder

    def expected(self, tokens: Any, count: int, hidden_LN: Tensor, features_LF: Tensor) -> tuple[int, ...]:
        assert self.recorder is not None
        target = self.recorder.model
        weights = as_wide(self.tensors, target.dtype)
        embedding = target.embedding.weight.data
        return tuple(serial_oracle.eagle3_guesses(weights, self.config, embedding, tokens, features_LF, count))


def checked(head: Head, count: int = 5, width: int = 4, *, depth: int = 2, every: int = 1, **limits: Any) -> Life:
    requests = people(count)
    life = drafted(head, requests, width, depth=depth, **(LIMITS | limits))
    assert check_rounds(head, sequences(requests, life), every) > 10
    return life


OWN_EMBEDDING = {"embed_tokens.weight": torch.randn(VOCABULARY, 24, generator=torch.Generator().manual_seed(4))}


@pytest.mark.parametrize(
    ("depth", "how"),
    [
        pytest.param(0, {}, marks=pytest.mark.long),
        (2, {}),
        (2, {"norm_before_residual": True}),
        (0, {"extra": OWN_EMBEDDING}),
    ],
    ids=str,
)
def test_rounds_guess_what_the_oracle_does(depth: int, how: dict[str, Any], tmp_path: Path) -> None:
    """Prompts in chunks of 8 tokens, rows that come and go, blocks of 4 tokens; a head of six ids."""
    head = Head(tmp_path, **how)
    life = checked(head, depth=depth)
    assert set().union(*head.rounds.values()) <= set(IDS)
    assert life.counters["spec_num_accepted_tokens"] > 0


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.long), 4])
def test_rounds_are_the_same_at_every_depth(depth: int, tmp_path: Path) -> None:
    head, limits = Head(tmp_path), {"rows": 3, "prefix_caching": False}
    checked(head, depth=0, **limits)
    rounds = head.rounds
    checked(head, depth=depth, every=5, **limits)
    assert head.rounds == rounds


def test_two_ranks_guess_as_one(tmp_path: Path) -> None:
    """Split heads, MLP and draft vocabulary, an embedding of its own: the same guesses in every round."""
    head = Head(tmp_path, extra=OWN_EMBEDDING)
    checked(head, 3, depth=0)
    rounds = head.rounds
    drafted(head, people(3), 4, depth=2, over=partial(tensor_rig, 2), **LIMITS)
    assert head.rounds == rounds


@pytest.mark.long  # of other drafters: test_drafted.py
@pytest.mark.parametrize("tree", [0, 12], ids=["chain", "tree"])
def test_every_round_gains_the_same_in_float32_at_any_depth_and_on_one_two_and_four_ranks(
    tree: int, tmp_path: Path
) -> None:
    head = Head(tmp_path, extra=OWN_EMBEDDING, top_k=4 if tree else 0, **FOUR_HEADS)
    check_gains_in_float32(head, tree=tree)


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.long), 2])
def test_trees_grow_around_what_the_oracle_guesses(depth: int, tmp_path: Path) -> None:
    """So the head was shown the features of the path that was kept, and no others; more is kept than of a chain."""
    head = Head(tmp_path, top_k=4)
    life = checked(head, depth=depth, tree=16)
    chain = checked(Head(tmp_path), depth=depth)
    kept, of_chain = (
        one.counters["spec_num_accepted_tokens"] / one.counters["spec_num_drafts"] for one in (life, chain)
    )
    assert kept > 1.5 * of_chain


def test_two_ranks_grow_the_trees_of_one(tmp_path: Path) -> None:
    head = Head(tmp_path, top_k=4, extra=OWN_EMBEDDING)
    one = checked(head, 3, depth=0, tree=12)
    rounds = head.rounds
    two = drafted(head, people(3), 4, depth=2, over=partial(tensor_rig, 2), tree=12, **LIMITS)
    assert head.rounds == rounds
    assert two.rounds == one.rounds


class RootFeatures(Eagle3Proposer):
    """A mutant: the state of the root, however long the path was."""

    def observe(self, observed: Observed) -> None:
        if (advanced := observed.advanced) is not None:
            roots = torch.arange(len(advanced.rows_B)) * advanced.width
            observed = replace(observed, advanced=advanced._replace(last_B=roots))
        super().observe(observed)


def test_a_tree_whose_path_is_not_shown_is_seen_in_the_guesses_only(tmp_path: Path) -> None:
    head = Head(tmp_path, RootFeatures, top_k=4)
    with pytest.raises(AssertionError, match="tokens known"):
        checked(head, tree=16)  # the text is right


def test_a_tree_of_more_tokens_a_place_than_the_head_has_is_refused(tmp_path: Path) -> None:
    head = Head(tmp_path)
    keys: dict[str, Any] = {"method": "eagle3", "model": str(head.folder), "num_speculative_tokens": 3}
    wide = speculative_config({**keys, "tree_size": 12, "tree_top_k": 7})
    model = config_from_dict({**TINY, **SHAPE})
    with pytest.raises(SpeculativeConfigError, match=r"tree_top_k is 7, but the drafter guesses among 6 ids"):
        check_drafter(wide, model)
    check_drafter(speculative_config({**keys, "tree_size": 12, "tree_top_k": 6}), model)


def test_windows_and_single_tokens_in_turn_and_evictions(tmp_path: Path) -> None:
    head = Head(tmp_path)
    checked(head, 4, widths=(4, 1, 1))
    requests = people(6, (20,), max_tokens=40)
    life = drafted(head, requests, 6, depth=2, **LIMITS_OF_EVICTION)
    assert life.counters["evictions"] > 0
    check_rounds(head, sequences(requests, life), every=3)


def test_windows_beside_chunks_guess_what_the_oracle_does(tmp_path: Path) -> None:
    head, requests = Head(tmp_path), people(8, (5, 40, 17, 33))
    limits: dict[str, Any] = {"rows": 3, "max_prefill_tokens": 16, "prefill_buckets": (8, 16, 19)}
    life = drafted(head, requests, 1, depth=2, speculation=Speculation(4, mixed_percent=100), **limits)
    assert sum(plan.kind is StepKind.MIXED and plan.width == 4 for plan in life.real_plans) > 3
    assert check_rounds(head, sequences(requests, life), every=2) > 10


@pytest.mark.parametrize(
    ("depth", "how"), [pytest.param(0, {}, marks=pytest.mark.long), (2, {}), (2, {"tree": 16})], ids=str
)
def test_a_prefix_hit_restores_the_heads_entries(depth: int, how: dict[str, Any], tmp_path: Path) -> None:
    check_prefix_hits(Head(tmp_path, top_k=4 if how else 0), 5, depth=depth, **how)


def test_prefix_hits_stop_ids_penalties_and_forks_leave_the_tokens_right(tmp_path: Path) -> None:
    params: dict[str, Any] = {"temperature": 0.8, "repetition_penalty": 1.2, "max_tokens": 30, "stops": (3,)}
    shared = prompt(32, 7)
    requests = [request(i, (*shared, *prompt(3, i)), **params) for i in range(4)]
    how: dict[str, Any] = {"depth": 2, "widths": (5,), "proposer": Head(tmp_path), "shape": SHAPE, "blocks": 400}
    life = live(requests, rows=2, **how)
    same(life, live(requests, depth=0, shape=SHAPE))
    assert life.counters["prefix_hit_tokens"] > 0
    several = request(9, prompt(9, 9), n=3, temperature=1.0, max_tokens=12, stops=())
    life = live([several], **how)
    same(life, live(list(several.answers()), depth=0, shape=SHAPE))
    assert life.counters["forks"] == 2


def test_answers_that_fork_guess_what_the_oracle_does(tmp_path: Path) -> None:
    check_forks(Head(tmp_path), depth=2, widths=(4,))


def test_drawn_guesses_are_the_same_at_every_depth(tmp_path: Path) -> None:
    class Drawn(Head):
        def __call__(self, parts: ProposerParts) -> Any:
            return ProbabilisticProposer(parts.device, super().__call__(parts).inner)  # type: ignore[arg-type]

    limits: dict[str, Any] = {"shape": SHAPE, "blocks": 400, "prefix_caching": False} | LIMITS
    lives = [live(people(4), depth=depth, widths=(4,), proposer=Drawn(tmp_path), **limits) for depth in (0, 2)]
    assert lives[0].answers == lives[1].answers


class NormedState(Eagle3Proposer):
    """The second guess reads the final-normed state."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        draft: Any = self._draft
        step = draft.step
        draft.step = lambda *given: (step(*given)[0],) * 2


class SwappedLayers(Eagle3Proposer):
    def states(self, observed: Observed) -> Tensor:
        assert observed.features_TF is not None
        return self._states(torch.cat(observed.features_TF.chunk(2, 1)[::-1], 1))


class DraftIds(Eagle3Proposer):
    """Ids of the draft vocabulary in place of the target's."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.head.ids_V = None


@pytest.mark.parametrize("mutant", [NormedState, SwappedLayers, DraftIds])
def test_mutants_are_seen_in_the_guesses_only(mutant: type[Eagle3Proposer], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="tokens known"):
        checked(Head(tmp_path, mutant), 3)


def test_other_spellings_and_what_a_folder_lacks(tmp_path: Path) -> None:
    """vLLM's ``layers.0``; a tensor too few or too many is named."""
    head = Head(tmp_path)
    spelled = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in head.tensors.items()}
    write(tmp_path, head.config, spelled)
    checked(head, 3, every=4)
    write(tmp_path, head.config, {**spelled, "layers.1.hidden_norm.weight": torch.ones(24)})
    with pytest.raises(WeightsError, match=r"does not have.*layers\.1"):
        checked(head, 1)
    del spelled["layers.0.hidden_norm.weight"]
    write(tmp_path, head.config, spelled)
    with pytest.raises(WeightsError, match=r"no file holds.*hidden_norm"):
        checked(head, 1)


def test_scripted_acceptance_over_a_head_without_weights(tmp_path: Path) -> None:
    """By the options' way, as a bench takes it."""
    (tmp_path / "config.json").write_text(json.dumps(eagle3_config(**SIZES)), encoding="utf-8")
    keys = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3}
    scripted = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3}
    proposer = proposer_for(speculative_config(keys | scripted), load_format="dummy", seed=1)
    requests = [request(i, range(1, 6 + i), max_tokens=31, stops=()) for i in range(3)]
    with rig(depth=2, widths=(4,), proposer=proposer, shape=SHAPE, max_model_len=64) as engine:
        run(engine, requests)
        engine.stop()
        counters = dict(engine.counters)
    assert counters["spec_num_accepted_tokens"] == 2 * counters["spec_num_drafts"] == 3 * 20
