"""Rejection sampling with draft probabilities (Leviathan et al. 2023, Chen et al. 2023): draft tokens sampled from a
drafter's distribution q are kept so that every token is distributed as the target's p.

Knows: how a draft token is sampled from q, that it is kept with probability min(1, p / q), and that another comes from
the residual max(0, p - q) otherwise. Then the token is another one than the draft, so that acceptance.py, which
compares, is right for these draws, too. Does not know: who drafts, slots, windows.

Three separate streams of noise: DRAFT samples the draft, ACCEPT tosses the coin, TOKEN draws from the residual,
or from p without a draft. All are keyed by the position of the token. A draft that was not checked leaves its
position's numbers for the round that does: they have decided nothing yet.

q has the request's temperature, its top-k, top-p and min-p, taken of q, and the mask of its grammar's table, if any
(AllowedGuesses). Penalties, ``min_tokens``, biases and bad words are in p only: a draft that these rule out is never
kept. Weights are integers (exact_math.py), so a total is the same in any order of summation. Graph-safe. On CUDA the
kernels of rejection_triton.py do it; the torch code here is their reference.

Shape letters: B rows, Q draft tokens of each, R = B * Q, W = Q + 1 tokens of a window, V vocabulary, D draft ids.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.execute.sampling.counter_rng import Purpose, gumbel_noise, row_keys, uniform_draws
from runtime.execute.sampling.exact_math import exp_weights, log
from runtime.execute.sampling.filters import survival_threshold
from runtime.execute.sampling.inputs import SamplingInputs, SamplingVariant
from runtime.execute.sampling.kernels import SamplingKernels, kernels_for
from runtime.execute.sampling.sampler import Draw, Verdict, is_random, merge_and_check, scaled, shaped, stop_check

_LEAST_NORMAL = torch.finfo(torch.float32).tiny


class Drafted(NamedTuple):
    """What drafts were sampled from. probs_BQD float32, by draft id; all 0 where one was not (greedy rows,
    logits that were not usable). index_BQ int64: the draft ids of the drafts. ids_D int64: the target's id of every
    draft id, all different; None where they are the same. rows_B bool: rows that have drafts, whatever the others'
    numbers are; None: all."""

    probs_BQD: Tensor
    index_BQ: Tensor
    ids_D: Tensor | None
    rows_B: Tensor | None = None


class Distribution(NamedTuple):
    """scores_BV float32: after temperature, -inf where filtered out. probs_BV float32: their softmax; 0 in rows that
    are not ``ok_B`` (NaN, +inf, or nothing but -inf)."""

    scores_BV: Tensor
    probs_BV: Tensor
    ok_B: Tensor


def distribution(logits_BV: Tensor, rows: SamplingInputs, features: SamplingVariant) -> Distribution:
    """What rows draw from, of logits (float32 or bfloat16) after edits and penalties."""
    scores_BV = scaled(logits_BV.to(torch.float32), rows, features)
    largest_B = scores_BV.amax(1)
    if features.filters:
        threshold_B = survival_threshold(scores_BV, rows)[0]
        scores_BV = torch.where(scores_BV >= threshold_B[:, None], scores_BV, float("-inf"))
    ok_B = largest_B.isfinite()
    weights_BV = exp_weights(torch.where(ok_B[:, None], scores_BV - largest_B[:, None], float("-inf")))
    total_B = weights_BV.sum(1).clamp(min=1)
    return Distribution(scores_BV, weights_BV.to(torch.float32) / total_B.to(torch.float32)[:, None], ok_B)


def draw_guesses(
    logits_RD: Tensor, ids_D: Tensor | None, rows: SamplingInputs, features: SamplingVariant, first: int = 0
) -> tuple[Tensor, Tensor]:
    """(draft ids int64 [R], probs_RD of Drafted) of the next Q draft tokens a row, from a drafter's logits (float32 or
    bfloat16) by draft id, all of them.

    ``rows``: of B; ``position``: of the first draft of a round. ``first``: so many were taken in this round before. A
    greedy row gets the most probable id; one whose logits are not usable gets draft id 0.
    """
    count = logits_RD.shape[0] // rows.position.shape[0]
    if (kernels := kernels_for(logits_RD)) is not None:
        threshold_R = None
        if features.filters:  # which are the same at any position
            threshold_R = _threshold(kernels, logits_RD, rows if count == 1 else _each(rows, count, first))
        columns = rows.temperature, rows.seed, rows.position
        return kernels.draw_guesses(logits_RD, ids_D, *columns, threshold_R, first=first, purpose=int(Purpose.DRAFT))
    rows = _each(rows, count, first)
    found = distribution(logits_RD, rows, features)
    random_R = is_random(rows)
    scores_RD = found.scores_BV + _noise(rows, Purpose.DRAFT, random_R, logits_RD.shape[1], ids_D)
    return torch.where(found.ok_B, scores_RD.max(1).indices, 0), found.probs_BV * random_R[:, None]


def _each(rows: SamplingInputs, count: int, first: int) -> SamplingInputs:
    """Of every draft token, ``count`` a row, the first of which is so many after ``position``."""
    if count > 1:
        rows = rows.select(torch.arange(rows.position.shape[0], device=rows.seed.device).repeat_interleave(count))
    offset_R = torch.arange(first, first + count, device=rows.seed.device).repeat(rows.position.shape[0] // count)
    return replace(rows, position=rows.position.to(torch.int64) + offset_R)


def draw_window(
    logits_TV: Tensor, rows: SamplingInputs, features: SamplingVariant, proposals_BQ: Tensor, drafted: Drafted
) -> tuple[Draw, Verdict]:
    """A token for each of the T = B * W rows of windows, row-major: the draft that follows it where that is kept.

    logits_TV: the target's, all of them; ``rows`` as for ``sample_and_check``. Of rows without a sampled draft token
    (the last of each window, greedy ones) it is sampled from p; in greedy rows the most likely one.
    """
    logits_TV = shaped(logits_TV, 0, rows, features)
    if (kernels := kernels_for(logits_TV)) is not None:
        candidates_T1, largest_T = kernels.window_candidates(
            logits_TV, proposals_BQ, *drafted, rows.temperature, rows.seed, rows.position,
            _threshold(kernels, logits_TV, rows) if features.filters else None,
            token=int(Purpose.TOKEN), accept=int(Purpose.ACCEPT),
        )  # fmt: skip
        return merge_and_check(candidates_T1, largest_T, rows=rows)
    (batch, count), vocab = proposals_BQ.shape, logits_TV.shape[1]
    target = distribution(logits_TV, rows, features)
    probs_BQV = target.probs_BV.view(batch, count + 1, vocab)[:, :count]
    p_BQ = probs_BQV.gather(2, proposals_BQ[:, :, None])[:, :, 0]
    q_BQ = drafted.probs_BQD.gather(2, drafted.index_BQ[:, :, None])[:, :, 0]
    coin_BQ = uniform_draws(rows.seed, rows.position, Purpose.ACCEPT).view(batch, count + 1)[:, :count]
    drawn_BQ = q_BQ > 0 if drafted.rows_B is None else (q_BQ > 0) & drafted.rows_B[:, None]
    kept_BQ = drawn_BQ & (coin_BQ * q_BQ < p_BQ)

    residual_BQV = _less(probs_BQV, drafted).clamp_(min=0)
    # Where rounding leaves nothing of a residual, p and q are the same but for rounding.
    rest_BQ = drawn_BQ & (residual_BQV.amax(2) > 0)
    logs_BQV = torch.where(residual_BQV > 0, log(residual_BQV.clamp(min=_LEAST_NORMAL)), float("-inf"))
    scores_BWV = target.scores_BV.view(batch, count + 1, vocab).clone()
    scores_BWV[:, :count] = torch.where(rest_BQ[:, :, None], logs_BQV, scores_BWV[:, :count])
    scores_TV = scores_BWV.view(-1, vocab) + _noise(rows, Purpose.TOKEN, is_random(rows), vocab)
    token_BW = scores_TV.max(1).indices.view(batch, count + 1)
    token_BW[:, :count] = torch.where(kept_BQ, proposals_BQ, token_BW[:, :count])
    draw = Draw(torch.where(target.ok_B, token_BW.view(-1), 0), target.ok_B)
    return draw, stop_check(draw.token_B, rows, draw.ok_B)


def _less(probs_BQV: Tensor, drafted: Drafted) -> Tensor:
    """p - q, over the target's ids; a new tensor."""
    if drafted.ids_D is None:
        return probs_BQV - drafted.probs_BQD
    found_BQV = probs_BQV.clone(memory_format=torch.contiguous_format)
    return found_BQV.index_copy_(2, drafted.ids_D, found_BQV.index_select(2, drafted.ids_D) - drafted.probs_BQD)


def _threshold(kernels: SamplingKernels, logits_BV: Tensor, rows: SamplingInputs) -> Tensor:
    """float32 [B]: scores of at least that survive the filters."""
    limits = rows.temperature, rows.top_k, rows.top_p, rows.min_p
    return kernels.filtered_candidates(logits_BV, 0, *limits, rows.seed, rows.position, purpose=int(Purpose.TOKEN))[1]


def _noise(rows: SamplingInputs, purpose: Purpose, random_B: Tensor, size: int, ids_V: Tensor | None = None) -> Tensor:
    """Gumbel noise by the target's ids, 0 for greedy rows."""
    if ids_V is None:
        ids_V = torch.arange(size, device=random_B.device)
    return gumbel_noise(row_keys(rows.seed, rows.position, purpose), ids_V.to(torch.int32)).mul_(random_B[:, None])
