"""What ranks that hold shares of the vocabulary exchange instead of logits, where top-k bounds every filtered row.

Knows: that a rank's MOST_SHARED_TOP_K largest distinct scores, with the number of tokens that have each and the best
candidate among these, settle top-k, top-p and min-p of the whole row exactly, ties included. (A top-k of at most that
many tokens ends within so many distinct scores of a rank; weights of equal scores are equal; and of equal scores only
the one with the largest noise can win.) shares_triton.py does the same on a GPU.
Does not know: who carries the exchange, how noise is made. Graph-safe: the shape is fixed.

A row's share is int64 [2, N]: words, each an ordered score and a count, and keys (packed_argmax.py). A row without a
filter has one entry: its largest score, and its best candidate of all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.execute.sampling.exact_math import exp_weights
from runtime.execute.sampling.filters import mass_limit, min_p_gap
from runtime.execute.sampling.inputs import MOST_SHARED_TOP_K, SamplingInputs
from runtime.execute.sampling.packed_argmax import NO_CANDIDATE, pack, unpack

_LAST_ID = 2**31 - 1  # a word is packed as a candidate whose id is this less the count


def local_share(scaled_BV: Tensor, noisy_BV: Tensor, vocab_start: int, k_B: Tensor) -> Tensor:
    """A rank's share of each row, int64 [B, 2 * MOST_SHARED_TOP_K], of float32 scores without and with noise.

    ``k_B``: top_k at most MOST_SHARED_TOP_K, 0 where the row has no filter.
    """
    rows, vocab = scaled_BV.shape
    size = MOST_SHARED_TOP_K
    ids_V = torch.arange(vocab_start, vocab_start + vocab, device=scaled_BV.device)
    keys_BV = pack(noisy_BV, ids_V)
    ordered_BV, index_BV = (scaled_BV + 0.0).sort(dim=1, descending=True)  # NaN first; no two signs of zero
    new_BV = torch.ones_like(ordered_BV, dtype=torch.int64)
    new_BV[:, 1:] = ordered_BV[:, 1:] != ordered_BV[:, :-1]
    place_BV = (new_BV.cumsum(1) - 1).clamp(max=size)  # the last one takes what is left over
    count_BX = torch.zeros(rows, size + 1, dtype=torch.int64, device=scaled_BV.device)
    count_BX.scatter_add_(1, place_BV, torch.ones_like(place_BV))
    empty_BX = torch.full_like(count_BX, NO_CANDIDATE)
    keys_BX = empty_BX.scatter_reduce(1, place_BV, keys_BV.gather(1, index_BV), "amax")
    word_BV = pack(ordered_BV, _LAST_ID - count_BX.gather(1, place_BV))
    words_BX = empty_BX.scatter_reduce(1, place_BV, word_BV, "amax")
    alone_BN = torch.full_like(words_BX[:, :size], NO_CANDIDATE)
    whole_word_BN, whole_key_BN = alone_BN.clone(), alone_BN
    whole_word_BN[:, 0] = words_BX[:, 0]
    whole_key_BN[:, 0] = keys_BV.amax(1)
    filtered_B1 = k_B[:, None] > 0
    words_BN = torch.where(filtered_B1, words_BX[:, :size], whole_word_BN)
    keys_BN = torch.where(filtered_B1, keys_BX[:, :size], whole_key_BN)
    return torch.cat((words_BN, keys_BN), 1)


def merge_shares(shares_BX: Tensor, k_B: Tensor, rows: SamplingInputs) -> tuple[Tensor, Tensor]:
    """(best candidate int64 [B, 1], largest score float32 [B], finite where the row is usable) of all ranks' shares.

    ``shares_BX``: those of the ranks, one after the other, in any order. ``k_B``: as for ``local_share``; of rows
    without a filter top_p and min_p are off.
    """
    words_BE, keys_BE = shares_BX.view(shares_BX.shape[0], -1, 2, MOST_SHARED_TOP_K).movedim(2, 0).flatten(2)
    words_BE, order_BE = words_BE.sort(dim=1, descending=True)
    score_BE, rest_BE = unpack(words_BE)
    count_BE = torch.where(words_BE == NO_CANDIDATE, 0, _LAST_ID - rest_BE)
    score_BE = torch.where(words_BE == NO_CANDIDATE, float("-inf"), score_BE)
    largest_B1 = score_BE[:, :1]

    def least_kept(kept_BE: Tensor) -> Tensor:
        """Entries are kept from the first on; an equal score next to the last one kept is kept, too."""
        return score_BE.gather(1, kept_BE.sum(1, keepdim=True).clamp(min=1) - 1)

    before_BE = count_BE.cumsum(1) - count_BE
    in_top_k_BE = (score_BE >= least_kept(before_BE < k_B[:, None])) | (k_B[:, None] == 0)
    shifted_BE = score_BE - largest_B1
    weight_BE = exp_weights(shifted_BE) * count_BE * in_top_k_BE
    limit_B = mass_limit(weight_BE.sum(1), torch.where(k_B > 0, rows.top_p, 1.0))
    in_top_p_BE = weight_BE.cumsum(1) - weight_BE < limit_B[:, None]
    gap_B = min_p_gap(torch.where(k_B > 0, rows.min_p, 0.0))
    in_min_p_BE = shifted_BE >= gap_B[:, None]
    survives_BE = score_BE >= least_kept(in_top_k_BE & in_top_p_BE & in_min_p_BE)
    best_B = torch.where(survives_BE, keys_BE.gather(1, order_BE), NO_CANDIDATE).amax(1)
    return best_B[:, None], largest_B1[:, 0]
