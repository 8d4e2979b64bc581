"""The tokens that a drafter finds most probable, the same on every rank, from shares of its vocabulary.

Knows: that one number a row, rank and token is enough. Does not know: who drafts, what becomes of a draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.drafters.draft_head import DraftHead
from runtime.execute.sampling.kernels import kernels_for as sampling_kernels
from runtime.execute.sampling.packed_argmax import NO_CANDIDATE, pack, unpack
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
    """Keys int64 [R, P] (packed_argmax.py), the largest of a row is that of its best id, from ``vocab_start``
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
    """The ``count`` best, at most ``head.size``: int64 [R, count], ids of the target, and their log-probabilities
    among the draft ids, float32 [R, count], descending; of equal ones that with the lowest draft id first. Graph-safe.

    With several ranks one all-gather of 8 * (count + 1) bytes a row and rank.
    """
    logits_RV, collectives = head.logits(hidden_RN), head.collectives
    kernels = kernels_for(logits_RV)
    if kernels is None:
        records_RX = shortlist_in_torch(logits_RV, head.vocab.start, count)
    else:
        records_RX = kernels.shortlist(logits_RV, head.vocab.start, count, merged=collectives.size > 1)
    if collectives.size > 1:
        records_RX = collectives.all_gather_keys(records_RX)
    return (ranked_in_torch if kernels is None else kernels.ranked)(records_RX, count, head.ids_V, head.size)


def shortlist_in_torch(logits_RV: Tensor, vocab_start: int, count: int) -> Tensor:
    """int64 [R, count + 1]: keys of the ``count`` most probable ids, from ``vocab_start`` on, best first, then that of
    (the logarithm of what all ids' weights sum up to, id 0). Where there are fewer ids, NO_CANDIDATE."""
    rows, vocab = logits_RV.shape
    scores_RV = logits_RV.float()
    ids_V = torch.arange(vocab_start, vocab_start + vocab, device=logits_RV.device)
    keys_RC = pack(scores_RV, ids_V).topk(min(count, vocab)).values
    missing_RX = keys_RC.new_full((rows, count - keys_RC.shape[1]), NO_CANDIDATE)
    total_R1 = scores_RV.logsumexp(1, keepdim=True)
    return torch.cat((keys_RC, missing_RX, pack(total_R1, torch.zeros_like(keys_RC[:, :1]))), 1)


def ranked_in_torch(records_RX: Tensor, count: int, ids_V: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
    """(ids, log-probabilities) of the ``count`` best of all ids, from records of parts of them, side by side."""
    records_RPX = records_RX.view(len(records_RX), -1, count + 1)
    total_R1 = unpack(records_RPX[:, :, -1])[0].logsumexp(1, keepdim=True)
    scores_RC, ids_RC = unpack(records_RPX[:, :, :-1].flatten(1).topk(count).values)
    ids_RC = torch.clamp(ids_RC, max=size - 1)
    return ids_RC if ids_V is None else ids_V[ids_RC], scores_RC - total_R1
