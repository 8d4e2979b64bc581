"""The tokens that a drafter finds likeliest, the same on every rank, from shares of its vocabulary.

Knows: that one number a row, rank and token is enough. Does not know: who drafts, what becomes of a guess.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.drafters.draft_head import DraftHead
from runtime.execute.sampling.kernels import kernels_for as sampling_kernels
from runtime.execute.sampling.packed_argmax import pack, unpack
from runtime.speculate.draft_kernels import kernels_for


def likeliest(head: DraftHead, hidden_RN: Tensor) -> Tensor:
    """int64 [R], ids of the target; of equally likely ones on several ranks that with the lowest draft id. Graph-safe.

    With several ranks one all-gather of 8 bytes a row and rank.
    """
    keys_RP = best_keys(head.logits(hidden_RN), head.vocab.start)
    if head.collectives.size > 1:
        keys_RP = head.collectives.all_gather_keys(keys_RP, largest=True)
    return chosen(keys_RP, head.ids_V, head.size)


def best_keys(logits_RV: Tensor, vocab_start: int) -> Tensor:
    """Keys int64 [R, P] (packed_argmax.py), of which the largest of a row is its likeliest id's, from ``vocab_start``
    on: as candidates of a greedy draw."""
    if (kernels := sampling_kernels(logits_RV)) is None:
        score_R, id_R = logits_RV.max(-1)
        return pack(score_R.float(), id_R + vocab_start)[:, None]
    rows, device = len(logits_RV), logits_RV.device
    unread = torch.empty(rows, device=device), *(torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    return kernels.best_candidates(logits_RV, vocab_start, *unread, random=False)


def chosen(keys_RP: Tensor, ids_V: Tensor | None, size: int) -> Tensor:
    """The id, int64 [R], of each row's largest key, by ``ids_V`` where given. Where every logit is NaN or -inf that may
    be one of padding, for which no table of ``size`` ids has a row: then it is the last."""
    if (kernels := kernels_for(keys_RP)) is None:
        return chosen_in_torch(keys_RP, ids_V, size)
    return kernels.choose(keys_RP, ids_V, size)


def chosen_in_torch(keys_RP: Tensor, ids_V: Tensor | None, size: int) -> Tensor:
    """The reference of ``chosen``."""
    ids_R: Tensor = torch.clamp(unpack(keys_RP.amax(-1))[1], max=size - 1)
    return ids_R if ids_V is None else ids_V[ids_R]


def likeliest_few(head: DraftHead, hidden_RN: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` likeliest, at most ``head.size``: int64 [R, count], ids of the target, and their log-probabilities
    among the draft ids, float32 [R, count], descending; of equal ones that with the lowest draft id first. Graph-safe.

    With several ranks one all-gather of 8 * (count + 1) bytes a row and rank.
    """
    local_RV, collectives = head.logits(hidden_RN), head.collectives
    score_RC, id_RC = local_RV.topk(min(count, local_RV.shape[1]))
    total_R1 = local_RV.float().logsumexp(1, keepdim=True)
    if collectives.size == 1 and (kernels := kernels_for(score_RC)) is not None:
        return kernels.rank(score_RC, id_RC, total_R1, head.ids_V, head.size)
    keys_RC = pack(score_RC.float(), id_RC + head.vocab.start)
    if collectives.size > 1:
        total_key_R1 = pack(total_R1, torch.zeros_like(id_RC[:, :1]))
        shares_RX = collectives.all_gather_keys(torch.cat((keys_RC, total_key_R1), 1))
        shares_RSX = shares_RX.view(len(shares_RX), collectives.size, -1)
        keys_RC = shares_RSX[:, :, :-1].flatten(1)
        total_R1 = unpack(shares_RSX[:, :, -1])[0].logsumexp(1, keepdim=True)
    return ranked_in_torch(keys_RC, total_R1, count, head.ids_V, head.size)


def ranked_in_torch(
    keys_RC: Tensor, total_R1: Tensor, count: int, ids_V: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    """(ids, log-probabilities) of the ``count`` largest keys; the reference of draft_triton.rank, which one rank runs
    over all candidates that it has."""
    scores_RC, ids_RC = unpack(keys_RC.topk(count).values)
    ids_RC = torch.clamp(ids_RC, max=size - 1)
    return ids_RC if ids_V is None else ids_V[ids_RC], scores_RC - total_R1
