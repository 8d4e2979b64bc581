"""Edits of logits that name tokens: allowed_token_ids, logit_bias and bad_words, by slot.

Knows: the tables that hold them, and what they do to logits: ids that are not allowed go to -inf, then biases are
added, then the last token of a bad word goes to -inf where the tokens before it were just generated. Penalties come
after, as in vLLM. Does not know: which row has which slot (the caller says), how the tables are filled (packing.py,
staging.py).

The tables are written when a request that uses them is seated, and once more when another takes over its slot. The
device alone moves ``recent_SH`` on, so a steady step needs nothing from the host. logit_edits_triton.py is the same in
one launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from runtime.execute.device.protocol import Device
from runtime.execute.sampling.draft_tree import DraftTree, generations
from runtime.schedule.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS

HISTORY = MAX_BAD_WORD_TOKENS - 1  # generated tokens that a bad word may have to be compared with
NO_ID = -1  # fills unused places; no token has this id
WORD_BITS = 32
BIASES, BAD_WORDS, MASKED = range(3)  # columns of ``sizes``


class LogitEdits(NamedTuple):
    """Tables by slot; slot 0, of padding, edits nothing.

    ``sizes_S3`` int32: biases, bad words, and whether ``allowed_SW`` counts; what is beyond them is left over from
    others. ``bias_ids_SK`` int32 and ``biases_SK`` float32: different ids. ``bad_SMP`` int32: token ids of bad words,
    right-aligned, NO_ID before them. ``allowed_SW`` int32: bit i % 32 of word i / 32 is set where id i is allowed.
    ``recent_SH`` int32: the newest generated tokens, the newest last, NO_ID before the first.
    """

    sizes_S3: Tensor
    bias_ids_SK: Tensor
    biases_SK: Tensor
    bad_SMP: Tensor
    allowed_SW: Tensor
    recent_SH: Tensor

    @classmethod
    def empty(cls, device: Device, slots: int, vocab_size: int) -> LogitEdits:
        """Tables of slots that edit nothing."""
        return cls(
            device.zeros(slots, 3, dtype=torch.int32),
            device.zeros(slots, MAX_LOGIT_BIAS, dtype=torch.int32),
            device.zeros(slots, MAX_LOGIT_BIAS, dtype=torch.float32),
            device.zeros(slots, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS, dtype=torch.int32),
            device.zeros(slots, mask_words(vocab_size), dtype=torch.int32),
            device.zeros(slots, HISTORY, dtype=torch.int32),
        )


class RowEdits(NamedTuple):
    """What applies to R rows of logits: the tables, each row's slot (int64 [R]), and what was generated before its
    token (int32 [R, HISTORY], as ``recent_SH``)."""

    tables: LogitEdits
    slots_R: Tensor
    recent_RH: Tensor


def mask_words(vocab_size: int) -> int:
    """Words of ``allowed_SW`` for so many ids."""
    return -(-vocab_size // WORD_BITS)


def edits_of(tables: LogitEdits, slots_B: Tensor) -> RowEdits:
    """Of rows that draw one token each: one row a slot (int64)."""
    return RowEdits(tables, slots_B, tables.recent_SH.index_select(0, slots_B))


def edits_in_window(tables: LogitEdits, slots_B: Tensor, proposals_BQ: Tensor) -> RowEdits:
    """Of a window's W = Q + 1 tokens a row, B * W rows: each comes after the proposals before it (int64)."""
    width = proposals_BQ.shape[1] + 1
    known_BX = torch.cat((tables.recent_SH.index_select(0, slots_B), proposals_BQ.to(torch.int32)), dim=1)
    recent_BWH = known_BX.unfold(1, HISTORY, 1)
    return RowEdits(tables, slots_B.repeat_interleave(width), recent_BWH.reshape(-1, HISTORY))


def edits_in_tree(tables: LogitEdits, slots_B: Tensor, tokens_BN: Tensor, tree: DraftTree) -> RowEdits:
    """``edits_in_window`` where the tokens are the nodes of trees, the root generated already: each node comes after
    its ancestors and itself."""
    recent_BH, nodes = tables.recent_SH.index_select(0, slots_B), tokens_BN.shape[1]
    newest_first = []
    for age, node_BN in enumerate(generations(tree.parents_BN, HISTORY)):
        older_BN = (HISTORY - 1 - age + tree.depth_BN).clamp(max=HISTORY - 1)  # of the row, where the path is shorter
        found_BN = torch.where(tree.depth_BN > age, tokens_BN.gather(1, node_BN), recent_BH.gather(1, older_BN))
        newest_first.append(found_BN.to(torch.int32))
    recent_BNH = torch.stack(newest_first[::-1], 2)
    return RowEdits(tables, slots_B.repeat_interleave(nodes), recent_BNH.reshape(-1, HISTORY))


def remember_(tables: LogitEdits, slots_B: Tensor, tokens_B: Tensor, gained_B: Tensor) -> None:
    """Move the newest tokens on by one drawn token a row (int64), where ``gained_B`` (bool); only slot 0 may repeat."""
    recent_BH = tables.recent_SH.index_select(0, slots_B)
    moved_BH = torch.cat((recent_BH[:, 1:], tokens_B[:, None].to(torch.int32)), dim=1)
    tables.recent_SH.index_copy_(0, slots_B, torch.where(gained_B[:, None], moved_BH, recent_BH))


def edit_logits(logits_RV: Tensor, edits: RowEdits, vocab_start: int = 0) -> Tensor:
    """Edited float32 copy of the logits of ids from ``vocab_start`` on; NaN and +inf still show as NaN.

    Rows whose slot edits nothing come out as they went in.
    """
    tables, slots_R = edits.tables, edits.slots_R
    vocab = logits_RV.shape[1]
    edited_RV = logits_RV.to(torch.float32)
    sizes_R3 = tables.sizes_S3.index_select(0, slots_R)
    ids_V = torch.arange(vocab_start, vocab_start + vocab, device=logits_RV.device)
    words_RV = tables.allowed_SW.index_select(0, slots_R).index_select(1, ids_V // WORD_BITS)
    barred_RV = (sizes_R3[:, MASKED, None] > 0) & ((words_RV >> (ids_V % WORD_BITS)) & 1 == 0)
    edited_RV = torch.where(barred_RV, edited_RV + float("-inf"), edited_RV)
    edited_RX = torch.nn.functional.pad(edited_RV, (0, 1))  # a last column for what is not to be written
    ids_RK = tables.bias_ids_SK.index_select(0, slots_R)
    used_RK = torch.arange(MAX_LOGIT_BIAS, device=ids_RK.device) < sizes_R3[:, BIASES, None]
    biases_RK = tables.biases_SK.index_select(0, slots_R)
    edited_RX = edited_RX.scatter_add(1, _columns(ids_RK, used_RK, vocab_start, vocab), biases_RK)
    bad_RMP = tables.bad_SMP.index_select(0, slots_R)
    before_RMH = bad_RMP[:, :, :-1]
    follows_RM = ((before_RMH == edits.recent_RH[:, None]) | (before_RMH == NO_ID)).all(dim=2)
    used_RM = torch.arange(MAX_BAD_WORDS, device=ids_RK.device) < sizes_R3[:, BAD_WORDS, None]
    columns_RM = _columns(bad_RMP[:, :, -1], used_RM & follows_RM, vocab_start, vocab)
    bans_RM = torch.full(columns_RM.shape, float("-inf"), device=edited_RX.device)
    return edited_RX.scatter_add(1, columns_RM, bans_RM)[:, :vocab]


def _columns(ids: Tensor, used: Tensor, vocab_start: int, vocab: int) -> Tensor:
    """The column of each id (int64); the one past the last for what is not used or not in this share."""
    column = ids.to(torch.int64) - vocab_start
    return torch.where(used & (column >= 0) & (column < vocab), column, vocab)
