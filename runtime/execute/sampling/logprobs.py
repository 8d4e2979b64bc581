"""Log-probabilities of drawn and of likely tokens.

Knows: the raw model logits, before penalties, temperature and filters (vLLM's default, logprobs_mode "raw_logprobs").
Does not know: whether they are wanted; the caller checks that (SamplingVariant.logprobs).
Sums are exact (integer weights), so the same row gives the same bits in any batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from runtime.execute.sampling import exact_math
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.kernels import kernels_for
from runtime.execute.sampling.packed_argmax import pack, unpack
from runtime.execute.slots.feature import SlotFeature
from runtime.schedule.request import MAX_TOP_LOGPROBS


class TokenLogprobs(NamedTuple):
    """For each of B rows: the chosen token's log-probability, its rank and the n most likely tokens, best first.

    rank 1 is the most likely; it is 1 + the number of strictly more likely tokens, so ties share the better rank.
    Equal top tokens are ordered by id. A vocabulary smaller than n leaves ids -1 and -inf at the end.
    """

    chosen: Tensor  # float32 [B]
    rank: Tensor  # int32 [B]
    top_ids: Tensor  # int32 [B, n]
    top_values: Tensor  # float32 [B, n]


class LogprobFeature(SlotFeature[tuple[()]]):
    name = "logprobs"

    def make(self, slots: int) -> tuple[()]:
        return ()

    def report(self, logits_TV: Tensor, tokens_T: Tensor, variant: SamplingVariant) -> TokenLogprobs:
        return token_logprobs(logits_TV, tokens_T, variant.top_logprobs)


def token_logprobs(logits_BV: Tensor, tokens_B: Tensor, top_n: int = 0) -> TokenLogprobs:
    """Log-probabilities under softmax(logits). tokens_B int64, the tokens that stand at these rows' next position.

    Serves generated tokens (row = sequence) and prompt tokens (row = prompt position) alike. ``top_n`` is static.
    Raises ValueError if top_n is not in 0..20.
    """
    if not 0 <= top_n <= MAX_TOP_LOGPROBS:
        raise ValueError(f"top_n is {top_n}; it must be between 0 and {MAX_TOP_LOGPROBS}")
    if (kernels := kernels_for(logits_BV)) is not None:
        return TokenLogprobs(*kernels.token_logprobs(logits_BV, tokens_B, top_n))
    logits_BV = logits_BV.to(torch.float32)
    largest_B1 = logits_BV.amax(1, keepdim=True)
    log_total_B1 = _log_of_sum(logits_BV - largest_B1)
    chosen_B1 = logits_BV.gather(1, tokens_B[:, None])
    rank_B = (logits_BV > chosen_B1).sum(1, dtype=torch.int32) + 1
    top_ids, top_logits = _top(logits_BV, top_n)
    return TokenLogprobs(
        chosen=((chosen_B1 - largest_B1) - log_total_B1)[:, 0],
        rank=rank_B,
        top_ids=top_ids,
        top_values=torch.where(top_ids >= 0, (top_logits - largest_B1) - log_total_B1, float("-inf")),
    )


def _log_of_sum(shifted_BV: Tensor) -> Tensor:
    """log(sum(exp(x))) of x <= 0 with maximum 0, [B, 1]."""
    total_B1 = exact_math.exp_weights(shifted_BV).sum(1, keepdim=True)
    return exact_math.log(total_B1.to(torch.float32).mul_(2.0**-exact_math.WEIGHT_BITS).clamp_(min=1.0))


def _top(logits_BV: Tensor, top_n: int) -> tuple[Tensor, Tensor]:
    """(ids int32, logits float32) of the ``top_n`` largest, [B, top_n]; ties by id, which plain topk leaves open."""
    rows, vocab = logits_BV.shape
    ids_V = torch.arange(vocab, dtype=torch.int64, device=logits_BV.device)
    keys = pack(logits_BV, ids_V).topk(min(top_n, vocab), dim=1).values
    values, ids = unpack(keys)
    missing = (rows, top_n - keys.shape[1])
    return (
        torch.cat((ids.to(torch.int32), ids.new_full(missing, -1, dtype=torch.int32)), 1),
        torch.cat((values, values.new_full(missing, float("-inf"))), 1),
    )
