"""``draft_sample_method`` probabilistic, in engines on the twin: guesses are drawn from what a serial oracle says,
round by round; tokens are the same at every depth and number of ranks; greedy requests have those without speculation.

That the tokens are distributed as the target's follows from that and from tests/.../sampling/test_rejection.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.execute.proposer import Proposed, ProposerParts
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.rejection import Drafted
from runtime.execute.slot_state import SlotColumns
from runtime.schedule.plan import StepKind
from runtime.schedule.request import Request
from runtime.schedule.speculation import Speculation
from runtime.speculate.guesses import ProbabilisticProposer
from tests.models.drafters import serial_oracle
from tests.plant import Op, plant
from tests.runtime.engine.conftest import long
from tests.runtime.engine.lives import Life, live, same
from tests.runtime.engine.rig import request
from tests.runtime.engine.tensor_ranks import tensor_rig
from tests.runtime.speculate.recorded import VOCABULARY, Drafter, Recorder, target_states
from tests.runtime.speculate.test_drafted import IDS, ROOM, people, prompt, sequences, serial

Mutate = Callable[[Proposed], Proposed]


class DrawnRecorder(Recorder):
    """With the distributions of all guesses that were drawn, by id of the target."""

    def __init__(self, *arguments: Any, mutate: Mutate | None = None) -> None:
        super().__init__(*arguments)
        self.mutate = mutate
        self.drawn: dict[tuple[int, int], Tensor] = {}

    def draw(self, rows_B: Tensor, columns: SlotColumns, count: int, variant: SamplingVariant) -> Proposed:
        inner: Any = self.inner
        proposed: Proposed = inner.draw(rows_B, columns, count, variant)
        proposed = self.mutate(proposed) if self.mutate else proposed
        drafted = proposed.drafted
        assert drafted is not None
        ids = torch.arange(VOCABULARY) if drafted.ids_D is None else drafted.ids_D
        for row, live_row in enumerate((columns.finished == 0).tolist()):
            key = int(columns.seed[row]), int(columns.length[row])
            if live_row:
                self.rounds[key] = tuple(proposed.tokens_BQ[row].tolist())
            if live_row and float(columns.temperature[row]) > 0:
                whole_QV = torch.zeros(count, VOCABULARY)
                whole_QV[:, ids] = drafted.probs_BQD[row]
                self.drawn[key] = whole_QV
        return proposed

    def room(self, rows: int, count: int) -> Drafted:
        inner: Any = self.inner
        room: Drafted = inner.room(rows, count)
        return room


class DrawnDrafter(Drafter):
    """Whose proposers draw. ``mutate``: what is done to what they propose."""

    mutate: Mutate | None = None

    def __call__(self, parts: ProposerParts) -> Recorder:
        plain: Any = super().__call__(parts)
        recorder = DrawnRecorder(ProbabilisticProposer(parts.device, plain.inner), parts.model, mutate=self.mutate)
        if parts.model.collectives.rank == 0:
            self.recorder = recorder
        return recorder

    def distributions(self, tokens: tuple[int, ...], guesses: tuple[int, ...], temperature: float) -> Tensor:
        """What the serial oracle draws each guess from."""
        assert self.recorder is not None
        target = self.recorder.model
        weights = {name: tensor.to(target.dtype) for name, tensor in self.tensors.items()}
        hidden_LN, features_LF = target_states(target, tokens[:-1])
        embedding = target.embedding.weight.data
        if self.kind == "mtp":
            states = list(hidden_LN)
            for number in range(len(guesses)):
                so_far = (*tokens, *guesses[:number])
                states.append(serial_oracle.mtp_state(weights, self.config, embedding, so_far, states))
            out_QN = torch.stack(states[len(hidden_LN) :])
        else:
            mask = self.config["dflash_config"]["mask_token_id"]
            block = embedding[torch.tensor([tokens[-1], *[mask] * len(guesses)])]
            out_QN = serial_oracle.dflash_block(weights, self.config, features_LF, block)[1:]
        scores_QV = out_QN @ target.lm_head.weight.data.T / temperature
        if self.ids is not None:
            others = [id_ for id_ in range(VOCABULARY) if id_ not in self.ids]
            scores_QV[:, others] = float("-inf")
        return scores_QV.softmax(1)


def check_drawn(drafter: DrawnDrafter, requests: list[Request], life: Life) -> int:
    """Every distribution is the oracle's; returns how many rounds were looked at."""
    recorder, whole = drafter.recorder, sequences(requests, life)
    assert isinstance(recorder, DrawnRecorder)
    for (seed, known), found_QV in recorder.drawn.items():
        tokens, guesses = whole[seed][:known], recorder.rounds[seed, known]
        expected_QV = drafter.distributions(tokens, guesses, 0.7)
        assert torch.allclose(found_QV.double(), expected_QV, atol=1e-5), f"request {seed}, {known} tokens known"
    return len(recorder.drawn)


def guests(count: int = 5) -> list[Request]:
    """Half of them are greedy."""
    return [
        request(i, prompt((5, 17, 1, 30)[i % 4], i), temperature=0.7 * (i % 2), max_tokens=24, stops=())
        for i in range(count)
    ]


LIMITS: dict[str, Any] = {"rows": 3, "max_prefill_tokens": 8, "prefix_caching": False, **ROOM}


@pytest.mark.parametrize(("kind", "ids"), [("dflash", None), ("mtp", IDS), long("mtp", None), long("dflash", IDS)])
def test_guesses_are_drawn_from_what_the_oracle_says(kind: str, ids: Any, tmp_path: Path) -> None:
    """On the rows that draw; the greedy ones have the tokens without speculation."""
    drafter, requests = DrawnDrafter(kind, tmp_path, ids=ids), guests()
    life = live(requests, depth=2, widths=(4,), proposer=drafter, **LIMITS)
    assert check_drawn(drafter, requests, life) > 10
    alone = serial(tuple(requests))
    for one in requests:
        same = life.answers[one.request_id] == alone.answers[one.request_id]
        assert same == (one.sampling.greedy), "other tokens than without, of the same distribution"
    assert life.counters["spec_num_accepted_tokens"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mtp", pytest.param("dflash", marks=pytest.mark.long)])
def test_tokens_are_the_same_at_every_depth_and_on_two_ranks(kind: str, tmp_path: Path) -> None:
    drafter, requests = DrawnDrafter(kind, tmp_path, ids=IDS), guests()
    first = live(requests, depth=0, widths=(4,), proposer=drafter, **LIMITS)
    rounds = drafter.rounds
    for depth in (3,) if kind == "mtp" else (1, 2, 4):
        life = live(requests, depth=depth, widths=(4,), proposer=drafter, **LIMITS)
        assert (life.answers, drafter.rounds) == (first.answers, rounds), f"depth {depth}"
    two = live(requests, depth=2, widths=(4,), proposer=drafter, over=partial(tensor_rig, 2), **LIMITS)
    assert (two.answers, drafter.rounds) == (first.answers, rounds)


def test_filters_penalties_stop_ids_log_probabilities_and_forks(tmp_path: Path) -> None:
    """Everything that p is made of, in windows; and answers that end in the middle of one."""
    params: dict[str, Any] = {"temperature": 0.9, "top_k": 6, "top_p": 0.9, "repetition_penalty": 1.2}
    requests = [request(i, prompt(9, i), max_tokens=30, stops=(3,), logprobs=2, **params) for i in range(4)]
    asked: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, "stops": (), "bad_words_token_ids": ((4,),)}
    requests.append(request(9, prompt(9, 9), n=3, **asked))
    drafter = DrawnDrafter("mtp", tmp_path)
    lives = [live(requests, depth=depth, widths=(5,), proposer=drafter, **LIMITS) for depth in (0, 3)]
    assert lives[0].answers == lives[1].answers
    for request_id, (tokens, _) in lives[0].answers.items():
        assert len(lives[0].logprobs.get(request_id, tokens)) == len(tokens)
        assert (request_id < 4) == (3 in tokens[-1:]) or len(tokens) in (12, 30)
        assert request_id < 9 or 4 not in tokens, "a bad word is never kept"


# ---- beside chunks of prompts ----


def newcomers() -> list[Request]:
    """More than there are rows, the first and another one greedy; most prompts are in pieces."""
    lengths = (5, 40, 17, 33)
    return [
        request(i, prompt(lengths[i % 4], i), temperature=0.7 * (i % 4 > 0), max_tokens=12, stops=(), logprobs=1)
        for i in range(8)
    ]


def check_beside(drafter: DrawnDrafter, *, depth: int, **limits: Any) -> None:
    """Tokens, log-probabilities and guesses of every round are those of an engine whose rows never decode beside a
    chunk.

    Tokens depend on where rounds begin. So all steps of rows that decode are windows, in both engines: then a round
    begins where the one before it ended, and guess, coin and token are drawn by seed and position, from distributions
    that follow from the tokens before. Nothing is left that neighbours in a step could change.
    """
    requests = newcomers()
    how: dict[str, Any] = {"rows": 3, "prefix_caching": False, "proposer": drafter, **ROOM}
    apart = live(requests, depth=0, widths=(4,), max_prefill_tokens=8, **how)
    rounds = drafter.rounds
    policy = Speculation(4, mixed_percent=100)
    life = live(requests, depth=depth, speculation=policy, max_prefill_tokens=16, **(how | limits))
    widths = Counter((plan.kind, plan.width) for plan in life.real_plans if plan.kind is not StepKind.PREFILL)
    assert widths[StepKind.MIXED, 4] > 5
    assert {width for _, width in widths} == {4}, "every step is a window"
    same(life, apart)
    assert drafter.rounds == rounds
    assert check_drawn(drafter, requests, life) > 10
    assert life.counters["spec_num_accepted_tokens"] > 5


@pytest.mark.parametrize(
    ("kind", "ids", "depth", "buckets"),
    [long("mtp", None, 0, ()), ("dflash", IDS, 2, (8, 16, 28)), long("mtp", IDS, 2, ())],
)
def test_a_round_beside_chunks_is_the_round_without(
    kind: str, ids: Any, depth: int, buckets: tuple[int, ...], tmp_path: Path
) -> None:
    check_beside(DrawnDrafter(kind, tmp_path, ids=ids), depth=depth, prefill_buckets=buckets)


@pytest.mark.parametrize("buckets", [pytest.param((), marks=pytest.mark.long), (8, 16, 28)], ids=["kernels", "graphs"])
def test_narrower_windows_beside_chunks_draw_from_what_the_oracle_says(
    buckets: tuple[int, ...], tmp_path: Path
) -> None:
    """Of three widths, whose distributions lie in one memory; greedy requests have the tokens without speculation."""
    drafter, requests = DrawnDrafter("mtp", tmp_path), guests(8)
    narrower = (4, ((1, 900), (2, 1000), (9, 3900))), (2, ((9, 1000),))
    rule = Speculation(6, costs=((1, 500), (9, 5900)), mixed_percent=100, narrower=narrower)
    how: dict[str, Any] = LIMITS | {"rows": 4, "speculation": rule, "prefill_buckets": buckets}
    life = live(requests, depth=2, proposer=drafter, **how)
    mixed = Counter(plan.width for plan in life.real_plans if plan.kind is StepKind.MIXED)
    assert min(mixed[2], mixed[4]) > 2
    assert mixed[6] > 0
    assert check_drawn(drafter, requests, life) > 10
    alone = serial(tuple(requests))
    for one in requests:
        assert (life.answers[one.request_id] == alone.answers[one.request_id]) >= one.sampling.greedy
    assert life.counters["spec_num_accepted_tokens"] > 5


def greedy_beside(propose: Op, rows: int, variant: SamplingVariant) -> None:
    """Beside chunks the likeliest tokens are guessed."""
    propose(rows, SamplingVariant())


def of_a_neighbour(proposed: Op, *given: Any) -> Proposed:
    """Guesses are judged by the distributions of the row before."""
    right: Proposed = proposed(*given)
    if (drafted := right.drafted) is None:
        return right
    return right._replace(drafted=drafted._replace(probs_BQD=drafted.probs_BQD.roll(1, 0)))


def of_last_step(proposed: Op, emitting_R: Tensor, decodes_R: Tensor, variant: SamplingVariant) -> Proposed:
    """Rows with chunks are judged by what their places in memory hold, as if they had guesses: half of the ids."""
    right: Proposed = proposed(emitting_R, decodes_R, variant)
    if (drafted := right.drafted) is None:
        return right
    left_D = 0.5 * (torch.arange(VOCABULARY) < VOCABULARY // 2)
    probs_BQD = torch.where(decodes_R[:, None, None], drafted.probs_BQD, left_D)
    return right._replace(drafted=drafted._replace(probs_BQD=probs_BQD, rows_B=None))


@pytest.mark.parametrize(
    ("part", "mutant"),
    [("mixed.propose", greedy_beside), ("mixed.proposed", of_a_neighbour), ("mixed.proposed", of_last_step)],
)
def test_other_distributions_beside_chunks_are_seen(
    part: str, mutant: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, mutant, part=part)
    with pytest.raises(AssertionError, match="request"):
        check_beside(DrawnDrafter("mtp", tmp_path), depth=2)


def aliased(proposed: Proposed) -> Proposed:
    """The distribution of the guess before."""
    assert proposed.drafted is not None
    return proposed._replace(drafted=proposed.drafted._replace(probs_BQD=proposed.drafted.probs_BQD.roll(1, 1)))


def test_a_mutant_with_anothers_distribution_is_seen(tmp_path: Path) -> None:
    """In what rounds gain, too: a guess is kept by the ratio of p and q, and this is another guess's q. Greedy requests
    are judged without q, so their rounds and texts stay right."""
    drafter, requests = DrawnDrafter("mtp", tmp_path), people(4, temperature=0.7)
    requests += [replace(one, request_id=9 + i) for i, one in enumerate(people(2, temperature=0.0))]
    right = live(requests, depth=2, widths=(4,), proposer=drafter, **LIMITS)
    drafter.mutate = aliased
    life = live(requests, depth=2, widths=(4,), proposer=drafter, **LIMITS)
    for one in requests:
        same = life.rounds[one.request_id] == right.rounds[one.request_id]
        assert same == one.sampling.greedy
        assert same == (life.answers[one.request_id] == right.answers[one.request_id])
    with pytest.raises(AssertionError, match="tokens known"):
        check_drawn(drafter, requests, life)
