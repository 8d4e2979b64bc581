"""The token that a drafter finds likeliest, the same on every rank, from shares of the vocabulary.

Knows: that one number a row and rank is enough. Does not know: who drafts, what becomes of a guess.
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
