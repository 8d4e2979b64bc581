"""Tokens seen by slot and what they, and min_tokens, do to logits.

Knows: the formulas of Hugging Face and vLLM: repetition (Keskar et al. 2019) over prompt and output, frequency and
presence (OpenAI) over the output only; how tokens are entered into the tables.
Does not know: which row has which slot (slot_state.py owns the tables; the caller gathers by its own slots tensor).
With tensor parallelism a rank may hold only its share of the vocabulary: ``vocab_start`` is the first id of the share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.execute.sampling.inputs import SamplingInputs
from runtime.schedule.plan import PADDING_SLOT

MOST_COUNTED = 32767  # an int16 count stays there instead of wrapping


class SeenTokens(NamedTuple):
    """Tables by slot, or rows of them: ``counts`` int16 [N, V], times generated; ``prompt`` bool [N, V]."""

    counts: Tensor
    prompt: Tensor

    def select(self, index_B: Tensor) -> SeenTokens:
        """The rows ``index_B`` (int64), as fresh tensors."""
        return SeenTokens(self.counts.index_select(0, index_B), self.prompt.index_select(0, index_B))


def reset_slots_(tables: SeenTokens, slots_N: Tensor) -> None:
    """Forget what ``slots_N`` (int64; pad with slot 0) have seen."""
    tables.counts.index_fill_(0, slots_N, 0)
    tables.prompt.index_fill_(0, slots_N, False)


def load_tokens_(
    tables: SeenTokens, slots_T: Tensor, tokens_T: Tensor, in_prompt_T: Tensor, live_T: Tensor, vocab_start: int = 0
) -> None:
    """Enter the known tokens of freshly reset slots: the prompt's, and the generated ones of a recomputed request.

    slots_T and tokens_T int64, in_prompt_T and live_T bool; tokens may repeat, a generated one of a slot MOST_COUNTED
    times at most. Fixed shape: pad with live False.
    What is not live, or not in this share of the vocabulary, goes to slot 0, which nobody reads.
    """
    vocab = tables.counts.shape[1]
    column_T, inside_T = _columns(tokens_T, live_T, vocab_start, vocab)
    prompt_slots_T = torch.where(inside_T & in_prompt_T, slots_T, PADDING_SLOT)
    tables.prompt.view(-1).index_fill_(0, prompt_slots_T * vocab + column_T, True)
    generated_T = (inside_T & ~in_prompt_T).to(torch.int16)
    tables.counts.view(-1).scatter_add_(0, slots_T * vocab + column_T, generated_T)


def count_tokens_(tables: SeenTokens, slots_B: Tensor, tokens_B: Tensor, live_B: Tensor, vocab_start: int = 0) -> None:
    """Count one drawn token a row; rows that are not live count nothing.

    slots_B int64, of which only slot 0 may repeat; tokens_B int64; live_B bool.
    """
    vocab = tables.counts.shape[1]
    column_B, inside_B = _columns(tokens_B, live_B, vocab_start, vocab)
    flat, index_B = tables.counts.view(-1), slots_B * vocab + column_B
    counted_B = (flat.gather(0, index_B).to(torch.int32) + inside_B).clamp(max=MOST_COUNTED)
    flat.scatter_(0, index_B, counted_B.to(torch.int16))


def apply_penalties(logits_BV: Tensor, seen: SeenTokens, rows: SamplingInputs) -> Tensor:
    """Penalised copy of float32 logits: repetition, then frequency, then presence. ``seen``: the rows' [B, V] counts.

    Positive logits of seen tokens are divided by the repetition penalty, others multiplied. Rows with neutral
    penalties come out as they went in.
    """
    generated_BV = seen.counts > 0
    repetition_BV = torch.where(generated_BV | seen.prompt, rows.repetition_penalty[:, None], 1.0)
    penalised_BV = torch.where(logits_BV > 0, logits_BV / repetition_BV, logits_BV * repetition_BV)
    penalised_BV -= seen.counts * rows.frequency_penalty[:, None]
    penalised_BV -= generated_BV * rows.presence_penalty[:, None]
    return penalised_BV


def mask_stop_ids(logits_BV: Tensor, rows: SamplingInputs, vocab_start: int = 0) -> Tensor:
    """Copy of the logits with the stop ids of rows under their min_length at -inf (NaN and +inf still show as NaN)."""
    vocab = logits_BV.shape[1]
    early_B1 = (rows.position < rows.min_length)[:, None]
    column_BK, masked_BK = _columns(rows.stop_ids.to(torch.int64), early_B1 & (rows.stop_ids >= 0), vocab_start, vocab)
    return logits_BV.scatter_add(1, column_BK, torch.where(masked_BK, float("-inf"), 0.0))


def _columns(tokens: Tensor, live: Tensor, vocab_start: int, vocab: int) -> tuple[Tensor, Tensor]:
    """(column of each token, clamped into the share; whether the token is live and in the share)."""
    column = tokens - vocab_start
    return column.clamp(0, vocab - 1), live & (column >= 0) & (column < vocab)


def _count_one_more_(counts_BXV: Tensor, ids_BX1: Tensor, counted_BX1: Tensor | bool = True) -> None:
    """Of each of X tokens a row one id, where ``counted_BX1``."""
    below_BX1 = counts_BXV.gather(2, ids_BX1) < MOST_COUNTED
    counts_BXV.scatter_add_(2, ids_BX1, (below_BX1 & counted_BX1).to(counts_BXV.dtype))


def seen_in_tree(seen: SeenTokens, tokens_BN: Tensor, generations: Sequence[Tensor]) -> SeenTokens:
    """``seen_in_window`` where the tokens are the nodes of trees, the root seen already: what each node has seen,
    [B * N, V]. ``generations`` (draft_tree.py): each node, its parent, ..., as many as a path has nodes but the root.
    """
    (rows, vocab), nodes = seen.counts.shape, tokens_BN.shape[1]
    counts_BNV = seen.counts.unsqueeze(1).repeat(1, nodes, 1)
    for node_BN in generations:
        counted_BN = node_BN > 0  # the root is counted in its row
        _count_one_more_(counts_BNV, tokens_BN.gather(1, node_BN)[:, :, None], counted_BN[:, :, None])
    prompt_BNV = seen.prompt.unsqueeze(1).expand(-1, nodes, -1)
    return SeenTokens(counts_BNV.reshape(-1, vocab), prompt_BNV.reshape(rows * nodes, vocab))


def seen_in_window(seen: SeenTokens, proposals_BQ: Tensor) -> SeenTokens:
    """What each of a window's W = Q + 1 tokens has seen, [B * W, V]: what its row has, and the proposals before it.

    ``seen``: the rows' [B, V]; proposals_BQ int64, ids of the whole vocabulary.
    """
    (rows, vocab), queries = seen.counts.shape, proposals_BQ.shape[1]
    counts_BWV = seen.counts.unsqueeze(1).repeat(1, queries + 1, 1)
    for index in range(queries):  # a proposal is seen by every token behind it
        ids_BQ1 = proposals_BQ[:, index, None, None].expand(-1, queries - index, 1)
        _count_one_more_(counts_BWV[:, index + 1 :], ids_BQ1)
    prompt_BWV = seen.prompt.unsqueeze(1).expand(-1, queries + 1, -1)
    return SeenTokens(counts_BWV.reshape(-1, vocab), prompt_BWV.reshape(rows * (queries + 1), vocab))
