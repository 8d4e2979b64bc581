"""The tokens that a drafter finds likeliest, the same on every rank, from shares of its vocabulary.

Knows: that one number a row, rank and token is enough. Does not know: who drafts, what becomes of a guess.
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


def likeliest_few(head: DraftHead, hidden_RN: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` likeliest, at most ``head.size``: int64 [R, count], ids of the target, and their log-probabilities
    among the draft ids, float32 [R, count], descending; of equal ones that with the lowest draft id first. Graph-safe.

    With several ranks one all-gather of 8 * (count + 1) bytes a row and rank.
    """
    local_RV, collectives = head.logits(hidden_RN), head.collectives
    score_RC, id_RC = local_RV.topk(min(count, local_RV.shape[1]))
    keys_RC = pack(score_RC.float(), id_RC + head.vocab.start)
    total_R1 = local_RV.float().logsumexp(1, keepdim=True)
    if collectives.size > 1:
        shares_RX = collectives.all_gather(torch.cat((keys_RC, pack(total_R1, torch.zeros_like(id_RC[:, :1]))), 1))
        shares_RSX = shares_RX.view(len(shares_RX), collectives.size, -1)
        keys_RC = shares_RSX[:, :, :-1].flatten(1)
        total_R1 = unpack(shares_RSX[:, :, -1])[0].logsumexp(1, keepdim=True)
    scores_RC, ids_RC = unpack(keys_RC.topk(count).values)
    return head.target_ids(torch.clamp(ids_RC, max=head.size - 1)), scores_RC - total_R1
