"""Steps whose windows are trees: tokens, ends and log-probabilities are those of one token a step.

A proposer that knows the answers puts them among wrong tokens at every place (``KnownAnswers``); trees grow from that
as from a drafter's candidates. Everything is computed exactly (lives.py), so answers are compared bit for bit with the
serial engine, one token a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product, starmap
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.execute.cache.block_copy import EntryMover
from runtime.execute.proposer import Candidates, MakeProposer, Observed, Proposed, ProposerParts
from runtime.execute.sampling.draft_tree import DraftTree
from runtime.execute.slot_state import SlotColumns
from runtime.schedule import reservation
from runtime.schedule.ledger import Ledger
from runtime.schedule.request import FinishReason, Request
from runtime.schedule.sequence import SequenceState
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculate.tree import branching
from runtime.speculative_config import speculative_config
from tests.plant import Op, plant
from tests.runtime.engine.conftest import long
from tests.runtime.engine.lives import Life, ending, live, oracle, people, prompt, same
from tests.runtime.engine.random_lives import RandomLife, random_life
from tests.runtime.engine.replay_proposer import mixed, script_of
from tests.runtime.engine.rig import request
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.selection import covering

RANKS = 3  # candidates a place
SHAPES = [(2, 3), (3, 3), (4, 12), (6, 16), (8, 32), (5, 33)]  # (W, tokens of a tree)
WIDE = [(16, 32), (32, 33)]
ONE_OF = {16: 60, 32: 240}  # places one has no right candidate, by W: whole paths are kept, and others are not


class KnownAnswers:
    """Of three candidates a place one is right, mostly; which one, and how likely it seems, is drawn by position.

    Of ``one_of`` places one has no right candidate and four have it behind another; elsewhere the likeliest is right.
    """

    name = "known answers"
    layers = ()
    reads_hidden = False

    def __init__(self, parts: ProposerParts, script: Mapping[int, Sequence[int]], one_of: int = 10) -> None:
        table = torch.zeros(max(script) + 1, max(map(len, script.values())), dtype=torch.int64)
        for seed, tokens in script.items():
            table[seed, : len(tokens)] = torch.tensor(tokens)
        self._script_SL, self._one_of = table.to(parts.device.torch_device), one_of
        self._vocab = parts.model.config.vocab_size

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        raise AssertionError("a tree grows from candidates")

    def candidates(self, rows_B: Tensor, columns: SlotColumns, count: int, top_k: int) -> Candidates:
        seeds, longest = self._script_SL.shape
        seed_B1 = columns.seed.clamp(0, seeds - 1)[:, None]
        position_BQ = columns.length.to(torch.int64)[:, None] + torch.arange(count, device=columns.length.device)
        right_BQ = self._script_SL[seed_B1, position_BQ.clamp(max=longest - 1)]
        drawn_BQ = mixed(seed_B1 * 1009 + position_BQ)
        last_BQ = self._one_of - 1 - drawn_BQ % self._one_of
        rank_BQ = torch.where(last_BQ > 4, 0, torch.where(last_BQ > 0, 1 + drawn_BQ % 2, RANKS))
        ids_BQC = (right_BQ - rank_BQ)[:, :, None] + torch.arange(top_k, device=right_BQ.device)
        shares_BQC = 1.0 + drawn_BQ[:, :, None] % 4 * torch.arange(top_k, 0, -1, device=right_BQ.device)
        return Candidates(ids_BQC % self._vocab, (shares_BQC / shares_BQC.sum(-1, keepdim=True)).log())

    def observe(self, observed: Observed) -> None:
        raise AssertionError("it reads nothing of the target")


def trees(
    requests: list[Request],
    shape: tuple[int, int],
    *,
    depth: int,
    but: set[int] | None = None,
    serial: dict[str, Any] | None = None,
    every: list[Request] | None = None,
    policy: dict[str, Any] | None = None,
    **limits: Any,
) -> Life:
    """A life with such trees, compared with the serial one. ``every``: also those that come later."""
    alone = oracle(every or requests, **(serial or {}))
    script = script_of(every or requests, {i: tokens for i, (tokens, _) in alone.answers.items()})
    width, size = shape
    one_of = ONE_OF.get(width, 10)
    how: dict[str, Any] = {
        "proposer": branching(lambda parts: KnownAnswers(parts, script, one_of), RANKS),
        "speculation": Speculation(width, **(policy or {})),
        "tree": size,
    }
    life = live(requests, depth=depth, **({"blocks": 400} | how | limits))
    same(life, alone, but=but or ())
    return life


def some(count: int, more: int = 7, **sampling: Any) -> list[Request]:
    """Each of ``more`` tokens than the one before."""
    requests = people(count, **sampling)
    return [
        replace(r, sampling=replace(r.sampling, max_tokens=3 + more * i, temperature=1.0 * (i % 2)))
        for i, r in enumerate(requests)
    ]


@pytest.mark.parametrize(("depth", "shape"), covering(range(5), SHAPES, at_once=1), ids=str)
def test_answers_and_log_probabilities_are_those_without(depth: int, shape: tuple[int, int]) -> None:
    life = trees(some(5), shape, depth=depth)
    counters = life.counters
    assert counters["spec_num_draft_tokens"] == (shape[0] - 1) * counters["spec_num_drafts"]
    assert counters["spec_num_accepted_tokens"] > 0.4 * counters["spec_num_drafts"]
    assert max(map(max, life.rounds.values())) >= min(shape[0], 5), "long paths are kept"


@pytest.mark.parametrize(("depth", "shape"), covering((0, 2, 4), WIDE, at_once=1), ids=str)
def test_whole_paths_of_wide_trees_are_kept(depth: int, shape: tuple[int, int]) -> None:
    life = trees(some(5, more=20), shape, depth=depth)
    counters = life.counters
    assert counters["spec_num_draft_tokens"] == (shape[0] - 1) * counters["spec_num_drafts"]
    gains = {gain for gains in life.rounds.values() for gain in gains}
    assert max(gains) == shape[0]
    assert len(gains) > 4, "and others are cut somewhere"


def test_every_round_gains_the_same_at_any_depth_and_on_any_ranks() -> None:
    requests = some(4)
    serial = trees(requests, (5, 16), depth=0)
    for depth in (2, 4):
        assert trees(requests, (5, 16), depth=depth).rounds == serial.rounds
    for ranks in (2, 4):
        assert trees(requests, (5, 16), depth=2, over=partial(tensor_rig, ranks)).rounds == serial.rounds


@pytest.mark.parametrize("at", [0, 1, 5, 9])
def test_a_stop_id_within_a_path_cuts_the_rest(at: int) -> None:
    requests = ending(at, people(6))
    life = trees(requests, (6, 16), depth=2)
    for one in requests:
        tokens, reason = life.answers[one.request_id]
        assert (len(tokens), reason) == (at + 1, FinishReason.STOP)


def test_penalties_and_min_tokens_look_at_a_nodes_ancestors() -> None:
    draws: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.8, "frequency_penalty": 0.6, "top_k": 20}
    few: dict[str, Any] = {"max_tokens": 30, "min_tokens": 9, "logprobs": 2, "stops": (7, 9)}
    requests = [request(i, prompt(10, i), temperature=0.7 * (i % 2), **draws, **few) for i in range(4)]
    trees(requests, (5, 16), depth=2)


def test_bad_words_look_at_a_nodes_ancestors() -> None:
    requests = [
        request(
            i,
            prompt(10, i),
            max_tokens=30,
            temperature=1.5 * (i % 2),
            allowed_token_ids=(i + 3, i + 5, i + 8),
            bad_words_token_ids=((i + 3, i + 3), (i + 5, i + 8, i + 5), (i + 8, i + 8), (i + 8, i + 5, i + 3, i + 8)),
            logit_bias=((i + 5, 1.5),),
            stops=(),
        )
        for i in range(4)
    ]
    trees(requests, (5, 16), depth=2)


def test_a_tree_that_reaches_past_the_context() -> None:
    requests = people(3, length=20, max_tokens=100)
    life = trees(requests, (6, 32), depth=2, serial={"max_model_len": 64}, max_model_len=64)
    assert [(len(tokens), reason) for tokens, reason in life.answers.values()] == [(44, FinishReason.LENGTH)] * 3


def drawn(seed: int, sooner: int = 2) -> RandomLife:
    """Every other one is cut as by a stop string that the host found, the others as by a caller who left."""
    life = random_life(seed).with_windows(sooner, 100)
    return replace(life, cut_as=FinishReason.STOP) if seed % 2 else life


@pytest.mark.parametrize(
    ("seed", "depth"),
    [*covering(range(3), (0, 2, 4), at_once=0, turned=4), *starmap(long, product(range(3, 30), (0, 2, 4)))],
)
def test_random_lives(depth: int, seed: int) -> None:
    """Arrivals, pauses, cancels, evictions, prefix hits, forks, scored and chunked prompts, penalties; mixed steps."""
    shapes = SHAPES + WIDE
    shape = shapes[(seed + depth) % len(shapes)]
    life = drawn(7000 + seed, sooner=8 if shape[0] >= 8 else 2)
    policy = {"most_rows": 3} if seed % 2 else {}
    trees(
        life.first, shape, depth=depth, but=life.cut, every=life.requests, policy=policy, later=life.later,
        act=life.act, **life.limits,
    )  # fmt: skip


@pytest.mark.parametrize(("seed", "depth"), [(7009, 2), *starmap(long, product(range(7000, 7009), range(5)))])
def test_lives_of_the_largest_trees_that_hold_everything(depth: int, seed: int) -> None:
    """32 tokens in the fewest blocks that serve a request; what a cancelled tree reserved comes back."""
    life = drawn(seed)
    size = life.limits["block_size"]
    limits = life.limits | {"blocks": -(-(128 + 8 * depth + 32) // size) + 1}
    ran = trees(
        life.first, (8, 32), depth=depth, but=life.cut, every=life.requests, policy={"mixed_percent": 100},
        later=life.later, act=life.act, **limits,
    )  # fmt: skip
    assert max(map(max, ran.rounds.values())) == 8, "whole paths are kept"
    if seed == 7009:
        for name in ("evictions", "pauses", "prefix_hit_tokens", "mixed_steps", "ghost_rows"):
            assert ran.counters[name] > 0, name
        alone = oracle(life.requests)
        short = {i for i in life.cut if ran.answers[i][0] != alone.answers[i][0]}
        assert short, "somebody is cut short"
        assert {ran.answers[i][1] for i in short} == {FinishReason.STOP}


def test_an_eviction_under_pressure_recomputes_what_trees_gained() -> None:
    requests = [request(i, prompt(20, i), max_tokens=60, logprobs=1, temperature=1.0, stops=()) for i in range(6)]
    life = trees(requests, (5, 16), depth=2, blocks=30, rows=6)
    assert life.counters["evictions"] > 0


# ---- acceptance by a script ----


def scripted_tree(size: int | None) -> MakeProposer:
    keys = {"method": "synthetic", "num_speculative_tokens": 4, "synthetic_acceptance_rates": [0.8, 0.6, 0.3, 0.3]}
    return proposer_for(speculative_config({**keys, "tree_size": size}))


def test_scripted_acceptance_keeps_as_many_of_a_tree_as_of_a_chain() -> None:
    requests = [request(i, range(3 + i, 12), max_tokens=60, stops=()) for i in range(4)]
    chain = live(requests, depth=0, proposer=scripted_tree(None), speculation=Speculation(5))
    for depth in (0, 2):
        how: dict[str, Any] = {"proposer": scripted_tree(16), "speculation": Speculation(5), "tree": 16}
        tree = live(requests, depth=depth, **how)
        assert tree.rounds == chain.rounds
        assert {len(tokens) for tokens, _ in tree.answers.values()} == {60}


# ---- mutants: what must not stay unseen ----


def wrong_text(depth: int = 2, **limits: Any) -> None:
    """Of a life in which a mutant is planted."""
    with pytest.raises(AssertionError):
        trees(some(5), (6, 16), depth=depth, **limits)


def test_entries_that_are_not_moved_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EntryMover, "move", lambda *_: None)
    wrong_text()


def test_blocks_for_the_longest_path_alone_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant reserves what a chain of W writes; the last nodes of a tree then go where nobody finds them."""

    def kv_to_hold(ledger: Ledger, sequence: SequenceState) -> int:
        limits = ledger.limits
        return min(sequence.landed_tokens + limits.width, sequence.max_length - 2 + limits.width)

    def wake_at(ledger: Ledger, sequence: SequenceState) -> int:
        return len(sequence.blocks) * ledger.limits.block_size + 2 - ledger.limits.width

    monkeypatch.setattr(reservation, "wake_at_latest", wake_at)
    monkeypatch.setattr(reservation, "kv_to_hold", kv_to_hold)
    wrong_text(depth=0, block_size=4)


def test_a_node_that_sees_a_sibling_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutant(lay_out: Op, parents_BQ: Tensor, depth: int) -> DraftTree:
        tree: DraftTree = lay_out(parents_BQ, depth)
        return tree._replace(seen_BN=tree.seen_BN | 16)  # everybody sees node 5

    plant(monkeypatch, mutant, part="window.lay_out")
    wrong_text()


def test_a_wrong_parent_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the mask: with other parents everywhere it would be another tree, no worse a guess than this one."""

    def mutant(lay_out: Op, parents_BQ: Tensor, depth: int) -> DraftTree:
        tree, wrong = lay_out(parents_BQ, depth), lay_out((parents_BQ - 1).clamp(min=0), depth)
        found: DraftTree = tree._replace(seen_BN=wrong.seen_BN)
        return found

    plant(monkeypatch, mutant, part="window.lay_out")
    wrong_text()


def test_a_wrong_depth_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutant(lay_out: Op, parents_BQ: Tensor, depth: int) -> DraftTree:
        tree: DraftTree = lay_out(parents_BQ, depth)
        number = torch.arange(tree.depth_BN.shape[1]).clamp(max=depth)
        return tree._replace(depth_BN=number.expand_as(tree.depth_BN))

    plant(monkeypatch, mutant, part="window.lay_out")
    wrong_text()
