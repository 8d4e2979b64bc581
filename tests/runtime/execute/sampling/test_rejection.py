"""Rejection sampling: sequences are distributed as the target's, whatever the drafter, and guesses are kept as often as
the overlap of both distributions says.

Target and drafter are tables: what follows depends on the token before. Rounds go on until every sequence has three
tokens, so that a guess that nobody looked at is drawn again in the round that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from runtime.execute.sampling.acceptance import accept
from runtime.execute.sampling.inputs import SamplingInputs, SamplingVariant
from runtime.execute.sampling.rejection import Drafted, distribution, draw_guesses, draw_window
from runtime.execute.sampling.sampler import sample
from runtime.schedule.request import SamplingParams
from tests.runtime.execute.sampling import sampling_reference as reference
from tests.runtime.execute.sampling.sampling_cases import rows_for

VOCABULARY, START, SEQUENCES, TOKENS = 5, 2, 8_000, 3
Probabilities = npt.NDArray[np.float64]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other over small tensors take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tables(seed: int, likeness: float = 0.0) -> tuple[Tensor, Tensor]:
    """Logits of target and drafter behind each token; with likeness 1 the drafter is the target."""
    rng = np.random.default_rng(seed)
    target, other = rng.normal(0, 1.5, (2, VOCABULARY, VOCABULARY)).astype(np.float32)
    return torch.from_numpy(target), torch.from_numpy((likeness * target + (1 - likeness) * other).astype(np.float32))


def many(params: SamplingParams, length: int = 5) -> SamplingInputs:
    rows = rows_for([params], [length]).select(torch.zeros(SEQUENCES, dtype=torch.int64))
    return replace(rows, seed=torch.arange(SEQUENCES) * 7919)


def repeated(rows: SamplingInputs, positions_BW: Tensor) -> SamplingInputs:
    width = positions_BW.shape[1]
    each = rows.select(torch.arange(len(positions_BW)).repeat_interleave(width))
    return replace(each, position=positions_BW.reshape(-1))


@dataclass
class Played:
    """``tokens``: the first three of every sequence. ``kept``: of the first round, guesses that were kept."""

    tokens: Tensor
    kept: Tensor


Mutate = Callable[[Drafted], Drafted]


def play(
    params: SamplingParams, target: Tensor, draft: Tensor, *, width: int = 4, ids: Sequence[int] | None = None,
    mutate: Mutate = lambda drafted: drafted,
) -> Played:  # fmt: skip
    variant = SamplingVariant.covering([params])
    ids_D = None if ids is None else torch.tensor(ids)
    rows, newest = many(params), torch.full((SEQUENCES,), START)
    length = rows.position.to(torch.int64)
    begin, found, first = length.clone(), torch.zeros(SEQUENCES, TOKENS + width, dtype=torch.int64), None
    while int((length - begin).min()) < TOKENS:
        guesses, parts = [newest], []
        for number in range(width - 1):
            logits_BD = draft[guesses[-1]] if ids_D is None else draft[guesses[-1]][:, ids_D]
            index_B, probs_BD = draw_guesses(logits_BD, ids_D, replace(rows, position=length), variant, number)
            parts.append((index_B, probs_BD))
            guesses.append(index_B if ids_D is None else ids_D[index_B])
        tokens_BW = torch.stack(guesses, 1)
        index_BQ, probs_BQD = (torch.stack(part, 1) for part in zip(*parts, strict=True))
        windows = repeated(rows, length[:, None] + torch.arange(width))
        drafted = mutate(Drafted(probs_BQD, index_BQ, ids_D))
        draw, verdict = draw_window(target[tokens_BW.view(-1)], windows, variant, tokens_BW[:, 1:], drafted)
        accepted = accept(draw, verdict, tokens_BW[:, 1:])
        count = accepted.count_B.to(torch.int64)
        first = count - 1 if first is None else first
        going = length - begin < TOKENS
        count = torch.where(going, count, 0)
        at = (length - begin)[:, None] + torch.arange(width)
        inside = torch.arange(width) < count[:, None]
        row, column = inside.nonzero(as_tuple=True)
        found[row, at[row, column]] = accepted.tokens_BW[row, column]
        newest = torch.where(going, accepted.tokens_BW.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0], newest)
        length = length + count
    assert first is not None
    return Played(found[:, :TOKENS], first)


def exact(logits: Tensor, params: SamplingParams) -> Probabilities:
    """[V, V]: of each token behind each."""
    shaped = [reference.shape(row.numpy().astype(np.float64), params, [], []) for row in logits]
    return np.stack([reference.probabilities(row, params) for row in shaped])


def misfit(tokens: Tensor, behind: Probabilities) -> float:
    """Chi-square of all sequences of three tokens, as a share of what chance explains; more than 1 is none."""
    chain = behind[START][:, None, None] * behind[:, :, None] * behind[None, :, :]
    cell = (tokens[:, 0] * VOCABULARY + tokens[:, 1]) * VOCABULARY + tokens[:, 2]
    observed = np.bincount(cell.numpy(), minlength=VOCABULARY**3)
    expected = chain.reshape(-1) * len(tokens)
    assert (observed[expected == 0] == 0).all(), "a token that the target never draws"
    statistic, degrees = reference.chi_square(observed, expected)
    return float(statistic / reference.chi_square_bound(degrees))


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.7),
    SamplingParams(temperature=1.4, top_k=4, top_p=0.9, min_p=0.1),
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_sequences_are_distributed_as_the_targets(params: SamplingParams, seed: int) -> None:
    target, draft = tables(seed, likeness=0.5 * seed)
    assert misfit(play(params, target, draft).tokens, exact(target, params)) < 1


@pytest.mark.parametrize("ids", [(0, 1, 4), (4, 2), (3,)])
def test_a_drafter_of_some_ids_changes_nothing(ids: tuple[int, ...]) -> None:
    target, draft = tables(3)
    assert misfit(play(PARAMS[0], target, draft, ids=ids).tokens, exact(target, PARAMS[0])) < 1


def off(kept: Tensor, target: Tensor, draft: Tensor, params: SamplingParams) -> list[float]:
    """How far the first guess of windows of three, and both, are from being kept as often as the distributions overlap,
    as a share of what chance explains: the first with probability sum(min(p, q)), the second given it likewise."""
    p, q = exact(target, params), exact(draft, params)
    overlap = np.minimum(p, q)
    once = overlap[START].sum()
    twice = (overlap[START] * overlap.sum(1)).sum()
    return [
        abs(found.double().mean().item() - rate) / (1e-9 + 5 * np.sqrt(max(0, rate * (1 - rate)) / SEQUENCES))
        for rate, found in ((once, kept >= 1), (twice, kept == 2))
    ]


@pytest.mark.parametrize(("seed", "likeness"), [(5, 0.6), (6, 0.0)])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_guesses_are_kept_as_often_as_the_distributions_overlap(
    params: SamplingParams, seed: int, likeness: float
) -> None:
    target, draft = tables(seed, likeness)
    assert max(off(play(params, target, draft, width=3).kept, target, draft, params)) < 1


def test_a_drafter_that_is_the_target_is_always_right() -> None:
    target, _ = tables(7)
    assert (play(PARAMS[0], target, target).kept == 3).all()


MUTANTS: dict[str, Mutate] = {
    "the next position's": lambda d: d._replace(probs_BQD=d.probs_BQD.roll(1, 1)),
    "a neighbour's": lambda d: d._replace(probs_BQD=d.probs_BQD.roll(1, 0)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_probabilities_of_something_else_are_seen(mutant: str) -> None:
    """Aliased draft probabilities give texts that read well."""
    target, draft = tables(0)
    assert misfit(play(PARAMS[0], target, draft, mutate=MUTANTS[mutant]).tokens, exact(target, PARAMS[0])) > 2


@pytest.mark.parametrize("mutant", MUTANTS)
def test_with_probabilities_of_something_else_guesses_are_kept_at_other_rates(mutant: str) -> None:
    """A reader of acceptance rates would see it. The first guess of all rows is drawn from the same distribution, so a
    neighbour's shows in the second."""
    target, draft = tables(6)
    kept = play(PARAMS[0], target, draft, width=3, mutate=MUTANTS[mutant]).kept
    first, second = off(kept, target, draft, PARAMS[0])
    assert second > 5
    assert (first > 3) == (mutant == "the next position's")


def test_greedy_rows_are_those_of_sample_and_keep_by_comparison() -> None:
    params = SamplingParams(temperature=0.0)
    target, draft = tables(9, likeness=0.7)
    variant = SamplingVariant(random=True, filters=True)
    rows = replace(many(params), position=torch.arange(SEQUENCES) % 97)
    rows = rows.select(torch.arange(60))
    before = torch.arange(60) % VOCABULARY
    index_B, probs_BD = draw_guesses(draft[before], None, rows, variant)
    assert torch.equal(index_B, draft[before].argmax(1))
    assert not probs_BD.any()
    tokens_BW = torch.stack((before, index_B), 1)
    windows = repeated(rows, rows.position[:, None] + torch.arange(2))
    drafted = Drafted(probs_BD[:, None], index_B[:, None], None)
    draw, _ = draw_window(target[tokens_BW.view(-1)], windows, variant, index_B[:, None], drafted)
    assert torch.equal(draw.token_B, sample(target[tokens_BW.view(-1)], windows, variant).token_B)


def test_rows_that_cannot_be_used() -> None:
    """A drafter's NaN leaves the target's draw; the target's own is an error, as ever."""
    target, _ = tables(11)
    variant = SamplingVariant(random=True)
    rows = many(PARAMS[0]).select(torch.arange(3))
    broken = torch.full((3, VOCABULARY), float("nan"))
    index_B, probs_BD = draw_guesses(broken, None, rows, variant)
    assert not probs_BD.any()
    logits = torch.stack((target[0], target[1]) * 3)
    logits[2] = float("nan")
    logits[4] = float("-inf")
    windows = repeated(rows, rows.position[:, None] + torch.arange(2))
    drafted = Drafted(probs_BD[:, None], index_B[:, None], None)
    draw, _ = draw_window(logits, windows, variant, index_B[:, None], drafted)
    assert draw.ok_B.tolist() == [True, True, False, True, False, True]
    usable = draw.ok_B
    assert torch.equal(draw.token_B[usable], sample(logits, windows, variant).token_B[usable])


def test_a_distribution_is_the_softmax_of_what_survives_in_any_batch() -> None:
    params = PARAMS[-1]
    target, _ = tables(13)
    rows, variant = many(params).select(torch.arange(VOCABULARY)), SamplingVariant.covering([params])
    found = distribution(target, rows, variant).probs_BV
    np.testing.assert_allclose(found.numpy(), exact(target, params), atol=1e-6)
    for row in range(VOCABULARY):
        alone = distribution(target[row : row + 1], rows.select(torch.tensor([row])), variant).probs_BV
        assert torch.equal(alone[0], found[row])
