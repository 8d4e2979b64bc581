"""Top-k, top-p and min-p on a GPU: the reference's tokens, in two passes over the logits and four launches.

Knows: the definitions of runtime/execute/sampling/filters.py, its torch reference, whose survivors it finds exactly:
counts and weights are integers, so no order of reduction matters, and a row's token does not depend on its batch.
Does not know: how tokens are listed (listing_triton.py), how a threshold is found among them (threshold_triton.py), who
asked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from runtime.execute.sampling.listing_triton import list_tokens
from runtime.execute.sampling.threshold_triton import find_threshold

PIECE = 256  # rows whose workspace exists at once


class Filtered(NamedTuple):
    """``keys`` int64 [B, 1]: each row's best surviving candidate. ``threshold`` and ``largest`` float32 [B]."""

    keys: Tensor
    threshold: Tensor
    largest: Tensor


def filtered_candidates(
    logits_BV: Tensor, vocab_start: int, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor,
    seed_B: Tensor, position_B: Tensor, *, purpose: int = 0,
) -> Filtered:  # fmt: skip
    """The best candidate of each row among what survives its filters, from logits before temperature.

    logits float32 or bfloat16; temperature, top_p and min_p float32, top_k int32, seed int64, position any integers.
    The threshold may lie between scores; the survivors, score >= threshold, are those of filters.survival_threshold.
    A greedy row keeps its largest. A row without finite logits, or with NaN or inf, has no candidate. Workspace:
    150 KiB a row, of 256 rows at most.
    """
    rows, vocab = logits_BV.shape
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    device = logits_BV.device
    found = Filtered(
        keys=torch.empty(rows, 1, dtype=torch.int64, device=device),
        threshold=torch.empty(rows, dtype=torch.float32, device=device),
        largest=torch.empty(rows, dtype=torch.float32, device=device),
    )
    for begin in range(0, rows, PIECE):
        piece = slice(begin, begin + PIECE)
        columns = [c[piece] for c in (temperature_B, top_k_B, top_p_B, min_p_B, seed_B, position_B)]
        space = list_tokens(logits_BV[piece], vocab_start, vocab, *columns, purpose=purpose, share=False)
        find_threshold(
            logits_BV[piece], vocab_start, *columns, *(out[piece] for out in found), space=space, purpose=purpose
        )
    return found
