"""Proposers with weights, in engines on the twin: the tokens of W = 1, and every round's guesses those of the oracle.

Equal tokens alone would say nothing: a proposer that reads a stale state guesses worse, and the text stays right. So
the guesses of each round are compared with those of a serial oracle, which has neither pages nor slots.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import product, starmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.engine import Engine
from runtime.execute.proposer import Observed, Proposed
from runtime.execute.slot_state import SlotColumns
from runtime.schedule.plan import TRASH_BLOCK, StepKind
from runtime.schedule.request import FinishReason, Request
from runtime.schedule.speculation import Speculation
from runtime.speculate.dflash import DFlashProposer
from runtime.speculate.mtp import MTPProposer
from tests.models.tiny_delta import FAMILIES
from tests.models.tiny_nemotron import NEMOTRON
from tests.plant import reference_kernels
from tests.runtime.engine.conftest import long
from tests.runtime.engine.lives import Life, live, same
from tests.runtime.engine.rig import request
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.speculate.recorded import FOUR_HEADS, SHAPE, VOCABULARY, Drafter, check_rounds
from tests.selection import covering

KINDS = ("mtp", "dflash")
ROOM: dict[str, Any] = {"shape": SHAPE, "blocks": 400}
LIMITS_OF_EVICTION: dict[str, Any] = {"blocks": 24, "rows": 6, "prefix_caching": False}


def prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(VOCABULARY, (length,), generator=generator).tolist())


def people(count: int, lengths: tuple[int, ...] = (5, 17, 1, 30), **sampling: Any) -> list[Request]:
    """Half of them draw at random."""
    params: dict[str, Any] = {"max_tokens": 24, "stops": ()} | sampling
    return [
        request(i, prompt(lengths[i % len(lengths)], i), **({"temperature": 1.0 * (i % 2)} | params))
        for i in range(count)
    ]


@cache
def serial(requests: tuple[Request, ...]) -> Life:
    return live(list(requests), depth=0, shape=SHAPE)


def drafted(drafter: Drafter, requests: list[Request], width: int, *, depth: int, **limits: Any) -> Life:
    """A life with windows, whose answers are those of the serial engine without."""
    how: dict[str, Any] = {"widths": (width,), "proposer": drafter} | ROOM | limits
    life = live(requests, depth=depth, **how)
    same(life, serial(tuple(requests)))
    return life


def sequences(requests: list[Request], life: Life) -> dict[int, tuple[int, ...]]:
    return {one.request_id: (*one.prompt_token_ids, *life.answers[one.request_id][0]) for one in requests}


@pytest.mark.parametrize(
    ("of_kind", "depth"),
    [
        (("mtp", 5), 2),
        (("dflash", 3), 0),
        *starmap(long, product([("mtp", 2), ("mtp", 5), ("dflash", 3), ("dflash", 8)], (0, 2))),
    ],
    ids=str,
)
def test_rounds_guess_what_the_oracle_does(of_kind: tuple[str, int], depth: int, tmp_path: Path) -> None:
    """Prompts in chunks of 8 tokens, rows that come and go, blocks of 4 tokens."""
    kind, width = of_kind
    drafter, requests = Drafter(kind, tmp_path), people(6)
    life = drafted(drafter, requests, width, depth=depth, rows=4, max_prefill_tokens=8, block_size=4)
    looked_at = check_rounds(drafter, sequences(requests, life))
    assert looked_at >= 6 * 23 / width
    assert life.counters["spec_num_accepted_tokens"] > 5, "windows of which more than a token was kept"


@pytest.mark.parametrize(("kind", "depth"), covering(KINDS, (1, 4), at_once=0, turned=3))
def test_rounds_are_the_same_at_every_depth(kind: str, depth: int, tmp_path: Path) -> None:
    """Round by round, not on average: the same guesses behind the same tokens, and none more or less."""
    drafter, requests = Drafter(kind, tmp_path), people(5)
    limits: dict[str, Any] = {"rows": 3, "max_prefill_tokens": 8, "prefix_caching": False}
    drafted(drafter, requests, 5, depth=0, **limits)
    serial_rounds = drafter.rounds
    life = drafted(drafter, requests, 5, depth=depth, **limits)
    assert drafter.rounds == serial_rounds
    assert life.counters["chained_steps"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_windows_and_single_tokens_in_turn(kind: str, tmp_path: Path) -> None:
    """Steps of width 1 show their tokens, too."""
    drafter, requests = Drafter(kind, tmp_path), people(4)
    life = drafted(drafter, requests, 4, depth=2, widths=(4, 1, 1))
    assert check_rounds(drafter, sequences(requests, life)) > 10


@pytest.mark.parametrize(
    ("kind", "at", "buckets"), covering(KINDS, [(3, 100), (2, 0)], [(), (8, 16, 19)], at_once=1), ids=str
)
def test_rows_that_decode_beside_chunks(
    kind: str, at: tuple[int, int], buckets: tuple[int, ...], tmp_path: Path
) -> None:
    """They gain a token in such steps, or have windows there, too, and are shown their tokens as others are."""
    depth, percent = at
    drafter, requests = Drafter(kind, tmp_path), people(8, (5, 40, 17, 33))
    limits: dict[str, Any] = {"rows": 3, "max_prefill_tokens": 16, "prefill_buckets": buckets}
    policy = Speculation(5, mixed_percent=percent)
    life = drafted(drafter, requests, 1, depth=depth, speculation=policy, **limits)
    mixed = [plan.width for plan in life.real_plans if plan.kind is StepKind.MIXED]
    assert mixed.count(5) > 3 if percent else set(mixed) == {1}
    assert check_rounds(drafter, sequences(requests, life)) > 20


@pytest.mark.parametrize(("kind", "depth"), [("mtp", 2), pytest.param("dflash", 3, marks=pytest.mark.long)])
def test_trees_beside_chunks_guess_what_the_oracle_does(kind: str, depth: int, tmp_path: Path) -> None:
    """Paths of several nodes are kept in such steps, so their places, masks and entries are read afterwards."""
    drafter, requests = Drafter(kind, tmp_path, top_k=4), people(8, (5, 40, 17, 33))
    limits: dict[str, Any] = {"rows": 3, "max_prefill_tokens": 48, "tree": 16}
    life = drafted(drafter, requests, 1, depth=depth, speculation=Speculation(5, mixed_percent=100), **limits)
    assert sum(plan.kind is StepKind.MIXED and plan.width == 5 for plan in life.real_plans) > 3
    assert check_rounds(drafter, sequences(requests, life)) > 20


@pytest.mark.parametrize(("kind", "depth"), [pytest.param("mtp", 0, marks=pytest.mark.long), ("dflash", 2)])
def test_rows_that_are_evicted_are_shown_everything_again(kind: str, depth: int, tmp_path: Path) -> None:
    drafter, requests = Drafter(kind, tmp_path), people(6, (20,), max_tokens=40)
    life = drafted(drafter, requests, 6, depth=depth, **LIMITS_OF_EVICTION)
    assert life.counters["evictions"] > 0
    check_rounds(drafter, sequences(requests, life), every=3)


def check_prefix_hits(drafter: Drafter, width: int, *, depth: int, **limits: Any) -> None:
    """Requests share 41 tokens, so that of 40 in whole blocks each has the same successor, which is a part of an MTP
    layer's and an EAGLE-3 head's entries; two of them come when the blocks are published."""
    shared = prompt(41, 99)
    requests = [request(i, (*shared, *prompt(5, i)), max_tokens=16, stops=()) for i in range(4)]
    life = drafted(drafter, requests, width, depth=depth, rows=2, block_size=4, **limits)
    assert life.counters["prefix_hit_tokens"] >= 2 * 40
    found = sequences(requests, life)
    assert check_rounds(drafter, found) > 4 * 15 / width
    assert {request for request, _ in drafter.rounds} == found.keys()


@pytest.mark.parametrize(("kind", "tree", "depth"), covering(KINDS, (None, 16), (0, 2), at_once=1))
def test_a_prefix_hit_restores_the_drafters_entries(kind: str, tree: int | None, depth: int, tmp_path: Path) -> None:
    """Nobody shows the proposer the tokens of the prefix again, and it guesses as if it had seen them."""
    drafter = Drafter(kind, tmp_path, top_k=4 if tree else 0)
    check_prefix_hits(drafter, 5, depth=depth, **({"tree": tree} if tree else {}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_hit_leaves_the_tokens_right(kind: str, tmp_path: Path) -> None:
    """An MTP layer's entry depends on the next token: behind a block's end another sequence's may stand."""
    drafter, shared = Drafter(kind, tmp_path), prompt(32, 7)
    requests = [request(i, (*shared, *prompt(3, i)), max_tokens=16, stops=()) for i in range(4)]
    assert drafted(drafter, requests, 3, depth=2, rows=2).counters["prefix_hit_tokens"] > 0


@pytest.mark.parametrize("kind", ["mtp", pytest.param("dflash", marks=pytest.mark.long)])
def test_windows_that_reach_past_the_context(kind: str, tmp_path: Path) -> None:
    requests = people(3, (20,), max_tokens=100, temperature=0.0)
    life = live(requests, depth=2, widths=(8,), proposer=Drafter(kind, tmp_path), max_model_len=64, **ROOM)
    same(life, live(requests, depth=0, shape=SHAPE, max_model_len=64))
    assert {len(tokens) for tokens, _ in life.answers.values()} == {44}


@pytest.mark.parametrize("kind", KINDS)
def test_stop_ids_penalties_and_forks(kind: str, tmp_path: Path) -> None:
    requests = people(4, stops=(3,), temperature=0.8, repetition_penalty=1.2, presence_penalty=0.3, max_tokens=30)
    requests.append(request(9, prompt(9, 9), n=3, temperature=1.0, max_tokens=12, stops=()))
    life = live(requests, depth=2, widths=(5,), proposer=Drafter(kind, tmp_path), **ROOM)
    same(life, live([answer for one in requests for answer in one.answers()], depth=0, shape=SHAPE))
    assert life.counters["forks"] == 2


def check_forks(drafter: Drafter, *, depth: int, **how: Any) -> None:
    """Answers to prompts that end within a block, each of which goes on differently: each has entries of its own."""
    requests = [request(10 * i, prompt(9 + 3 * i, i), n=4, temperature=1.0, max_tokens=20, stops=()) for i in range(2)]
    limits: dict[str, Any] = {"shape": SHAPE, "prefix_caching": False, "block_size": 8}
    life = live(requests, depth=depth, proposer=drafter, **(limits | how))
    assert life.counters["forks"] == 6
    answers = [answer for one in requests for answer in one.answers()]
    assert check_rounds(drafter, sequences(answers, life)) > 20


FORKS: dict[str, dict[str, Any]] = {
    "eager": {"depth": 0, "widths": (4,)},
    "mixed windows": {"depth": 2, "speculation": Speculation(4, mixed_percent=100), "max_prefill_tokens": 7},
    "captured": {"depth": 2, "speculation": Speculation(4), "max_prefill_tokens": 16, "prefill_buckets": (8, 16, 24)},
}


@pytest.mark.parametrize(("kind", "how"), covering(KINDS, tuple(FORKS), at_once=1))
def test_answers_that_fork_guess_what_the_oracle_does(kind: str, how: str, tmp_path: Path) -> None:
    check_forks(Drafter(kind, tmp_path), **FORKS[how])


@pytest.mark.parametrize("kind", ["mtp", pytest.param("dflash", marks=pytest.mark.long)])
def test_two_ranks_guess_as_one(kind: str, tmp_path: Path) -> None:
    """Shares of the vocabulary, split heads: the same guesses in every round, on every rank."""
    drafter, requests = Drafter(kind, tmp_path), people(3)
    limits: dict[str, Any] = {"rows": 3, "max_prefill_tokens": 16}
    drafted(drafter, requests, 4, depth=0, **limits)
    of_one_rank = drafter.rounds
    drafted(drafter, requests, 4, depth=2, over=partial(tensor_rig, 2), **limits)
    assert drafter.rounds == of_one_rank


def check_gains_in_float32(drafter: Drafter, **limits: Any) -> None:
    """Every round guesses and gains the same at any depth and on any number of ranks, as reference kernels compute it;
    the texts are those without a drafter."""
    how: dict[str, Any] = {"rows": 3, "max_prefill_tokens": 16, "kernels": reference_kernels(), "dtype": torch.float32}
    how |= ROOM | {"shape": SHAPE | FOUR_HEADS} | limits
    found = None
    plain = live(people(3, max_tokens=14), depth=0, **{**how, "tree": 0})
    for depth, ranks in ((0, 1), (2, 1), (0, 2), (2, 4)):
        over = partial(tensor_rig, ranks) if ranks > 1 else None
        life = live(people(3, max_tokens=14), depth=depth, over=over, widths=(4,), proposer=drafter, **how)
        assert life.answers == plain.answers
        found = found or (life.rounds, drafter.rounds)
        assert (life.rounds, drafter.rounds) == found, f"depth {depth}, {ranks} ranks"
    assert max(map(max, life.rounds.values())) > 1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tree"), covering(KINDS, (0, 12), at_once=0))
def test_every_round_gains_the_same_in_float32_at_any_depth_and_on_one_two_and_four_ranks(
    kind: str, tree: int, tmp_path: Path
) -> None:
    check_gains_in_float32(Drafter(kind, tmp_path, top_k=4 if tree else 0, **FOUR_HEADS), tree=tree)


IDS = (1, 2, 5, 7, 8)  # of nine


@pytest.mark.parametrize("kind", [pytest.param("mtp", marks=pytest.mark.long), "dflash"])
def test_a_reduced_draft_vocabulary_guesses_among_its_ids(kind: str, tmp_path: Path) -> None:
    """The tokens are those without, and guesses the likeliest of these ids; on two ranks the same ones, though one of
    them holds most of the rows in the whole head."""
    drafter, requests = Drafter(kind, tmp_path, ids=IDS), people(4)
    limits: dict[str, Any] = {"rows": 3, "max_prefill_tokens": 16}
    life = drafted(drafter, requests, 4, depth=0, **limits)
    assert check_rounds(drafter, sequences(requests, life)) > 20
    assert set().union(*drafter.rounds.values()) <= set(IDS)
    of_one_rank = drafter.rounds
    drafted(drafter, requests, 4, depth=2, over=partial(tensor_rig, 2), **limits)
    assert drafter.rounds == of_one_rank


def test_the_target_ids_must_be_those_of_the_rows(tmp_path: Path) -> None:
    """A head whose ids are one off: the text is right, the guesses are not."""

    class Shifted(MTPProposer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            assert self.head.ids_V is not None
            self.head.ids_V -= 1

    drafter, requests = Drafter("mtp", tmp_path, Shifted, ids=IDS), people(3)
    life = drafted(drafter, requests, 4, depth=2)
    with pytest.raises(AssertionError, match="tokens known"):
        check_rounds(drafter, sequences(requests, life))


@pytest.mark.parametrize(
    ("target", "kind", "depth"),
    [
        pytest.param("nemotron", "dflash", 0, marks=pytest.mark.long),
        ("nemotron", "dflash", 2),
        pytest.param("qwen3.5", "dflash", 2, marks=pytest.mark.long),
    ],
)
def test_targets_with_recurrent_layers(target: str, kind: str, depth: int, tmp_path: Path) -> None:
    """Features behind a Mamba-2 block and one of experts alone, or behind gated delta nets; evictions, a cancel."""
    shape = (FAMILIES | {"nemotron": NEMOTRON})[target] | SHAPE
    drafter = Drafter(kind, tmp_path, target_layers={"nemotron": 6, "qwen3.5": 3}[target])
    requests = people(5)

    def act(engine: Engine, turn: int) -> None:
        if turn == 6:
            engine.cancel(0)

    limits: dict[str, Any] = {"rows": 4, "max_prefill_tokens": 8, "block_size": 4, "blocks": 36}
    life = live(requests, act, depth=depth, widths=(5,), proposer=drafter, shape=shape, **limits)
    alone = live(requests, depth=0, shape=shape)
    same(life, alone, but={0})
    assert life.finished[0].reason is FinishReason.CANCELLED
    assert min(life.counters[name] for name in ("evictions", "spec_num_accepted_tokens")) > 0
    assert check_rounds(drafter, sequences(requests, alone), every=5) > 5


# ---- mutants: each leaves the text right, and guesses something else ----


class StaleHidden(MTPProposer):
    """The hidden state of one observation before."""

    def observe(self, observed: Observed) -> None:
        before = self._hidden_SN.clone()
        super().observe(observed)
        if observed.advanced is not None:
            self._hidden_SN, self._later = before, self._hidden_SN


class WrongRow(MTPProposer):
    """The hidden state of a window's last token, kept or not."""

    def observe(self, observed: Observed) -> None:
        if (advanced := observed.advanced) is not None:
            ends = torch.arange(1, len(advanced.rows_B) + 1) * advanced.width - 1
            observed = replace(observed, advanced=advanced._replace(last_B=ends))
        super().observe(observed)


class OwnToken(MTPProposer):
    """An entry of a token itself in place of its successor."""

    def observe(self, observed: Observed) -> None:
        super().observe(replace(observed, next_ids_T=observed.inputs.token_ids_T))


class StaleGuesses(DFlashProposer):
    """The guesses of the round before."""

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        found = super().propose(rows_B, columns, count)
        late, self._late = getattr(self, "_late", found), found
        return late


class ShiftedFeatures(DFlashProposer):
    """A neighbour's features."""

    def observe(self, observed: Observed) -> None:
        assert observed.features_TF is not None
        super().observe(replace(observed, features_TF=observed.features_TF.roll(1, 0)))


class OwnNoise(DFlashProposer):
    """A block's own entries stay, but for its first token's."""

    def observe(self, observed: Observed) -> None:
        if (advanced := observed.advanced) is not None:
            first_T = torch.arange(len(observed.kept_T)) % advanced.width == 0
            kept_kv_slots_T = torch.where(first_T, observed.kept_kv_slots_T, TRASH_BLOCK)
            observed = replace(observed, kept_T=observed.kept_T & first_T, kept_kv_slots_T=kept_kv_slots_T)
        super().observe(observed)


class SwappedLayers(DFlashProposer):
    """The right features in the wrong order."""

    def observe(self, observed: Observed) -> None:
        assert observed.features_TF is not None
        first, second = observed.features_TF.chunk(2, 1)
        super().observe(replace(observed, features_TF=torch.cat((second, first), 1)))


@pytest.mark.parametrize(
    "mutant", [StaleHidden, WrongRow, OwnToken, StaleGuesses, ShiftedFeatures, OwnNoise, SwappedLayers]
)
def test_mutants_are_seen_in_the_guesses_only(mutant: Any, tmp_path: Path) -> None:
    drafter = Drafter("mtp" if issubclass(mutant, MTPProposer) else "dflash", tmp_path, mutant)
    requests = people(4)
    life = drafted(drafter, requests, 5, depth=2)  # the text is right
    with pytest.raises(AssertionError, match="tokens known"):
        check_rounds(drafter, sequences(requests, life))
