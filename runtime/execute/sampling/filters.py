"""Top-k, top-p and min-p: which tokens of a row may be drawn.

Knows: the filters as thresholds on the scaled logits, decided with exact integer sums, so that a row's survivors are
the same in every batch, on every platform and for every algorithm (this sort, or the search in draw_triton.py).
Does not know: noise, penalties, who asked.

Semantics (those of Hugging Face and vLLM, except that equal logits are never separated):
  top-k   a token survives if its logit is >= the k-th largest, so ties with the k-th all survive (as in both).
  top-p   among the top-k survivors, renormalised: a token survives if the probability of the strictly more likely ones
          is < p. The most likely always survives. (The others break ties at the boundary by sort order.)
  min-p   a token survives if its probability is >= min_p times the largest (renormalising does not change that):
          its logit is at most -log(min_p) under the largest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.execute.sampling.exact_math import exp_weights, log
from runtime.execute.sampling.inputs import SamplingInputs

_LEAST_NORMAL = torch.finfo(torch.float32).tiny
_NO_LIMIT = 2**63 - 1


def survival_threshold(scaled_BV: Tensor, rows: SamplingInputs) -> tuple[Tensor, Tensor]:
    """(threshold_B, largest_B) of float32 logits after temperature: a token survives if its logit is >= the threshold.

    ``largest_B`` is the row's maximum, NaN where the row holds one. Rows with every filter off get -inf.
    """
    vocab = scaled_BV.shape[1]
    ordered_BV = scaled_BV.sort(dim=1, descending=True).values  # NaN first
    largest_B1 = ordered_BV[:, :1]

    k_B1 = torch.where(rows.top_k > 0, rows.top_k, vocab).clamp(max=vocab).to(torch.int64)[:, None]
    in_top_k_BV = ordered_BV >= ordered_BV.gather(1, k_B1 - 1)

    shifted_BV = ordered_BV - largest_B1
    kept_weights_BV = exp_weights(shifted_BV) * in_top_k_BV
    before_BV = kept_weights_BV.cumsum(1) - kept_weights_BV
    in_top_p_BV = before_BV < mass_limit(kept_weights_BV.sum(1), rows.top_p)[:, None]

    in_min_p_BV = shifted_BV >= min_p_gap(rows.min_p)[:, None]
    kept_BV = in_top_k_BV & in_top_p_BV & in_min_p_BV
    count_B1 = kept_BV.sum(1, keepdim=True).clamp(min=1)
    threshold_B1 = ordered_BV.gather(1, count_B1 - 1)
    return threshold_B1[:, 0], largest_B1[:, 0]


def mass_limit(total_B: Tensor, top_p_B: Tensor) -> Tensor:
    """The weight (int64) that the more likely tokens must stay under; at least 1, and no limit where top-p is off."""
    limit_B = (total_B.to(torch.float64) * top_p_B.to(torch.float64)).ceil().to(torch.int64).clamp(min=1)
    return torch.where(top_p_B >= 1.0, _NO_LIMIT, limit_B)


def min_p_gap(min_p_B: Tensor) -> Tensor:
    """log(min_p): how far (a number <= 0) a surviving logit may lie from the largest; -inf where min-p is off."""
    return torch.where(min_p_B > 0.0, log(min_p_B.clamp(min=_LEAST_NORMAL)), float("-inf"))
