"""Drawing the next token of every row on the device, and deciding whether the row ends with it.

Knows: the order of things: logits processors, stop ids masked under min_length, temperature, filters, Gumbel-argmax
(the argmax of logit + Gumbel noise is a draw from the softmax; Gumbel 1954), stop check. Greedy is the same with no
noise.
Does not know: slots, steps, the ranks' exchange; how noise is made (counter_rng.py).

Every function is graph-safe: fixed shapes, nothing is read back by the host. A row's token is a function of its
logits and parameters: neither the batch, its place there, the feature variant nor the tensor-parallel degree matters.
On CUDA the Triton kernels next to this file do the same arithmetic in a few launches; without Triton, torch does it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from runtime.execute.sampling import shares
from runtime.execute.sampling.counter_rng import Purpose, gumbel_noise, row_keys
from runtime.execute.sampling.filters import survival_threshold
from runtime.execute.sampling.inputs import MOST_SHARED_TOP_K, SamplingInputs, SamplingVariant
from runtime.execute.sampling.kernels import kernels_for
from runtime.execute.sampling.packed_argmax import NO_CANDIDATE, pack, unpack
from runtime.execute.sampling.penalties import shape_logits
from runtime.schedule.request import FinishReason

MIN_TEMPERATURE = 1e-6
_CODES = (int(FinishReason.STOP), int(FinishReason.LENGTH), int(FinishReason.ERROR))


class Draw(NamedTuple):
    """``token_B`` int64; ``ok_B`` bool: the row's logits were usable. A row that is not ok has token 0.

    Not usable: any NaN or +inf, or nothing but -inf (or finite logits that overflow when divided by the temperature).
    """

    token_B: Tensor
    ok_B: Tensor


class Verdict(NamedTuple):
    """``count_B`` int32: tokens the row gained, 0 or 1. ``finish_B`` int32: a FinishReason value."""

    count_B: Tensor
    finish_B: Tensor


def sample(logits_BV: Tensor, rows: SamplingInputs, features: SamplingVariant) -> Draw:
    """One token a row from full logits (float32 or bfloat16; not modified). Ties go to the lowest id."""
    return merge_best(*_candidates(logits_BV, 0, rows, features))


def sample_and_check(logits_BV: Tensor, rows: SamplingInputs, features: SamplingVariant) -> tuple[Draw, Verdict]:
    """``sample`` and ``stop_check`` in the fewest launches."""
    return merge_and_check(*_candidates(logits_BV, 0, rows, features), rows=rows)


def local_share(
    logits_BV: Tensor, vocab_start: int, rows: SamplingInputs, features: SamplingVariant, vocab_size: int | None = None
) -> Tensor:
    """Top candidates of this rank's vocabulary shard, for the all-gather; int64 [B, X].

    logits_BV are the logits of ids [vocab_start, vocab_start + V); those at or past ``vocab_size`` are padding and
    ignored. Gather the results of all ranks along the last dim, in any order, and give them to ``merge_shares``: the
    token is the one that ``sample`` draws from the full logits. Without filters a share is candidates of the row
    (packed score and global id), of which only the largest counts, so that it may travel alone; with bounded ones it is
    what shares.py says. Raises ValueError when a feature needs the whole row.
    """
    if not features.vocabulary_parallel:
        raise ValueError(f"{features}: needs whole rows of logits: gather them and call sample()")
    if vocab_size is not None:
        logits_BV = logits_BV[:, : max(0, vocab_size - vocab_start)]
    size = 2 * MOST_SHARED_TOP_K if features.filters else 1
    if logits_BV.shape[1] == 0:
        return torch.full((logits_BV.shape[0], size), NO_CANDIDATE, dtype=torch.int64, device=logits_BV.device)
    if not features.filters:
        return _candidates(logits_BV, vocab_start, rows, features)[0]
    if (kernels := kernels_for(logits_BV)) is not None:
        return kernels.local_share(
            shaped(logits_BV, vocab_start, rows, features), vocab_start, rows.temperature, rows.top_k, rows.seed,
            rows.position,
            purpose=int(Purpose.TOKEN),
        )  # fmt: skip
    return shares.local_share(*_scores(logits_BV, vocab_start, rows, features), vocab_start, _bounded_top_k(rows))


def merge_shares(shares_BX: Tensor, rows: SamplingInputs, features: SamplingVariant) -> tuple[Draw, Verdict]:
    """The draw and its verdict from all ranks' ``local_share``, one after the other in any order."""
    if not features.filters:
        return merge_and_check(shares_BX, rows=rows)
    if (kernels := kernels_for(shares_BX)) is not None:
        merged = kernels.merge_shares(shares_BX, rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    else:
        merged = shares.merge_shares(shares_BX, _bounded_top_k(rows), rows)
    return merge_and_check(*merged, rows=rows)


def merge_best(keys_BP: Tensor, evidence_B: Tensor | None = None) -> Draw:
    """The winner among each row's candidates (int64 [B, P], in any order; of parts, of ranks, or of both).

    ``evidence_B``: finite exactly where the row is usable; without it the best score says so.
    """
    score_B, token_B = unpack(keys_BP.amax(dim=1))
    ok_B = (score_B if evidence_B is None else evidence_B).isfinite()
    return Draw(torch.where(ok_B, token_B, 0), ok_B)


def stop_check(token_B: Tensor, rows: SamplingInputs, ok_B: Tensor) -> Verdict:
    """Whether each row ends with the token just drawn.

    A finished row gains nothing and reports NONE. Otherwise, first match: ERROR if its logits were not usable (it
    gains nothing); STOP if the token is one of its stop ids and position >= min_length; LENGTH if the sequence is now
    max_length tokens long. The stop token itself counts as gained.
    """
    live_B = rows.finished == 0
    is_stop_B = (token_B[:, None] == rows.stop_ids).any(dim=1) & (rows.position >= rows.min_length)
    is_full_B = rows.position + 1 >= rows.max_length
    finish_B = torch.where(is_full_B, int(FinishReason.LENGTH), int(FinishReason.NONE))
    finish_B = torch.where(is_stop_B, int(FinishReason.STOP), finish_B)
    finish_B = torch.where(ok_B, finish_B, int(FinishReason.ERROR))
    finish_B = torch.where(live_B, finish_B, int(FinishReason.NONE))
    return Verdict((ok_B & live_B).to(torch.int32), finish_B.to(torch.int32))


def merge_and_check(keys_BP: Tensor, evidence_B: Tensor | None = None, *, rows: SamplingInputs) -> tuple[Draw, Verdict]:
    """``merge_best`` and ``stop_check`` together; one launch on CUDA."""
    if (kernels := kernels_for(keys_BP)) is None:
        draw = merge_best(keys_BP, evidence_B)
        return draw, stop_check(draw.token_B, rows, draw.ok_B)
    token_B, ok_B, count_B, finish_B = kernels.conclude(
        keys_BP, rows.stop_ids, rows.position, rows.min_length, rows.max_length, rows.finished,
        codes=_CODES, evidence_B=evidence_B,
    )  # fmt: skip
    return Draw(token_B, ok_B), Verdict(count_B, finish_B)


def _candidates(
    logits_BV: Tensor, vocab_start: int, rows: SamplingInputs, features: SamplingVariant
) -> tuple[Tensor, Tensor | None]:
    """(candidates int64 [B, P], evidence or None) of a share of the logits; what ``merge_best`` takes. A few launches
    on CUDA, which make float32 logits only where they are changed."""
    if (kernels := kernels_for(logits_BV)) is None:
        scaled_BV, noisy_BV = _scores(logits_BV, vocab_start, rows, features)
        largest_B = None
        if features.filters:
            threshold_B, largest_B = survival_threshold(scaled_BV, rows)
            noisy_BV = torch.where(scaled_BV >= threshold_B[:, None], noisy_BV, float("-inf"))
        score_B, index_B = noisy_BV.max(dim=1)
        return pack(score_B, index_B + vocab_start)[:, None], largest_B
    logits_BV, drawn = shaped(logits_BV, vocab_start, rows, features), (rows.seed, rows.position)
    purpose = int(Purpose.TOKEN)
    if not features.filters:
        random = features.random
        of_parts = kernels.best_candidates
        return of_parts(logits_BV, vocab_start, rows.temperature, *drawn, random=random, purpose=purpose), None
    limits = rows.temperature, rows.top_k, rows.top_p, rows.min_p
    keys_B1, _, largest_B = kernels.filtered_candidates(logits_BV, vocab_start, *limits, *drawn, purpose=purpose)
    return keys_B1, largest_B


def _scores(
    logits_BV: Tensor, vocab_start: int, rows: SamplingInputs, features: SamplingVariant
) -> tuple[Tensor, Tensor]:
    """Float32 scores (after processors, mask and temperature) without and with noise, in torch."""
    scaled_BV = scaled(shaped(logits_BV, vocab_start, rows, features).to(torch.float32), rows, features)
    return scaled_BV, scaled_BV + _noise(scaled_BV, vocab_start, rows) if features.random else scaled_BV


def shaped(logits_BV: Tensor, vocab_start: int, rows: SamplingInputs, features: SamplingVariant) -> Tensor:
    """Logits after processors and the min_tokens mask, before temperature and filters; without either as they are."""
    for processor in rows.processors:
        logits_BV = processor.apply(logits_BV, vocab_start, rows, features)
    if features.min_tokens and not features.penalties:  # which mask stop ids in their own launch
        logits_BV = shape_logits(logits_BV, vocab_start, rows, None, min_tokens=True)
    return logits_BV


def is_random(rows: SamplingInputs) -> Tensor:
    """bool [B]: not greedy."""
    return rows.temperature >= MIN_TEMPERATURE


def _bounded_top_k(rows: SamplingInputs) -> Tensor:
    """top_k of rows that are filtered by it, 1 of greedy ones, 0 of those without a filter."""
    return torch.where(is_random(rows), rows.top_k.clamp(min=0), 1)


def scaled(logits_BV: Tensor, rows: SamplingInputs, features: SamplingVariant) -> Tensor:
    """Logits times 1 / temperature; greedy rows are multiplied by 1."""
    if not features.random:
        return logits_BV
    factor_B = torch.where(is_random(rows), rows.temperature.clamp(min=MIN_TEMPERATURE).reciprocal(), 1.0)
    return logits_BV * factor_B[:, None]


def _noise(score_BV: Tensor, vocab_start: int, rows: SamplingInputs) -> Tensor:
    """Gumbel noise of the row's draw, 0 for greedy rows."""
    last = vocab_start + score_BV.shape[1]
    ids_V = torch.arange(vocab_start, last, dtype=torch.int32, device=score_BV.device)
    noise_BV = gumbel_noise(row_keys(rows.seed, rows.position, Purpose.TOKEN), ids_V)
    return noise_BV.mul_(is_random(rows)[:, None])
