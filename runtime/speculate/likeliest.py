"""The token that a drafter finds likeliest, the same on every rank, from shares of its vocabulary.

Knows: that one number a row and rank is enough. Does not know: who drafts, what becomes of a guess.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.drafters.draft_head import DraftHead
from runtime.execute.sampling.packed_argmax import pack, unpack


def likeliest(head: DraftHead, hidden_RN: Tensor) -> Tensor:
    """int64 [R], ids of the target; of equally likely ones on several ranks that with the lowest draft id. Graph-safe.

    With several ranks one all-gather of 8 bytes a row and rank.
    """
    score_R, id_R = head.logits(hidden_RN).max(-1)
    key_R1 = pack(score_R.float(), id_R + head.vocab.start)[:, None]
    if head.collectives.size > 1:
        key_R1 = head.collectives.all_gather(key_R1)
    # Where every logit is NaN or -inf the id may be one of padding; no table has a row for it.
    ids_R: Tensor = torch.clamp(unpack(key_R1.amax(-1))[1], max=head.size - 1)
    return head.target_ids(ids_R)
