"""The tokens that a drafter finds likeliest, the same on every rank, from shares of the vocabulary.

Knows: that one number a row, rank and token is enough. Does not know: who drafts, what becomes of a guess.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.layers.decoder import Decoder
from runtime.execute.sampling.packed_argmax import pack, unpack


def likeliest(target: Decoder, hidden_RN: Tensor) -> Tensor:
    """int64 [R], by the target's head; of equal ones on several ranks that with the lowest id. Graph-safe.

    With several ranks one all-gather of 8 bytes a row and rank.
    """
    shard, local_RV = target.vocab_shard, target.logits(hidden_RN)
    score_R, id_R = local_RV.max(-1)
    key_R1 = pack(score_R.float(), id_R + shard.start)[:, None]
    if target.collectives.size > 1:
        key_R1 = target.collectives.all_gather(key_R1)
    # Where every logit is NaN or -inf the id may be one of padding; no table has a row for it.
    ids_R: Tensor = torch.clamp(unpack(key_R1.amax(-1))[1], max=shard.vocab_size - 1)
    return ids_R


def likeliest_few(target: Decoder, hidden_RN: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` likeliest, int64 [R, count], and their log-probabilities, float32 [R, count], descending; of equal
    ones that with the lowest id first. Graph-safe.

    With several ranks one all-gather of 8 * (count + 1) bytes a row and rank.
    """
    shard, local_RV = target.vocab_shard, target.logits(hidden_RN)
    score_RC, id_RC = local_RV.topk(min(count, local_RV.shape[1]))
    keys_RC = pack(score_RC.float(), id_RC + shard.start)
    total_R1 = local_RV.float().logsumexp(1, keepdim=True)
    if (ranks := target.collectives.size) > 1:
        shares_RX = target.collectives.all_gather(
            torch.cat((keys_RC, pack(total_R1, torch.zeros_like(id_RC[:, :1]))), 1)
        )
        shares_RSX = shares_RX.view(len(shares_RX), ranks, -1)
        keys_RC = shares_RSX[:, :, :-1].flatten(1)
        total_R1 = unpack(shares_RSX[:, :, -1])[0].logsumexp(1, keepdim=True)
    scores_RC, ids_RC = unpack(keys_RC.topk(count).values)
    return torch.clamp(ids_RC, max=shard.vocab_size - 1), scores_RC - total_R1
