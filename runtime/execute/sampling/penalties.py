"""Tokens seen by slot and what they, and min_tokens, do to logits.

Knows: the formulas of Hugging Face and vLLM: repetition (Keskar et al. 2019) over prompt and output, frequency and
presence (OpenAI) over the output only; how tokens are entered into the tables.
Does not know: which row has which slot, how arrays reach the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.execute.sampling.draft_tree import generations
from runtime.execute.sampling.inputs import SamplingInputs, SamplingVariant
from runtime.execute.sampling.kernels import kernels_for
from runtime.execute.slots.feature import RowView, SlotFeature
from runtime.schedule.plan import PADDING_SLOT, SlotWrite

MOST_COUNTED = 32767  # an int16 count stays there instead of wrapping


class SeenTokens(NamedTuple):
    """Tables by slot, or rows of them: ``counts`` int16 [N, V], times generated; ``prompt`` bool [N, V]."""

    counts: Tensor
    prompt: Tensor

    def select(self, index_B: Tensor) -> SeenTokens:
        """The rows ``index_B`` (int64), as fresh tensors."""
        return SeenTokens(self.counts.index_select(0, index_B), self.prompt.index_select(0, index_B))

    def apply(self, logits_NV: Tensor, vocab_start: int, rows: SamplingInputs, variant: SamplingVariant) -> Tensor:
        """Also masks stop ids, in the same launch. These have the whole vocabulary, the logits may be a shard."""
        shard = slice(vocab_start, vocab_start + logits_NV.shape[1])
        seen = SeenTokens(self.counts[:, shard], self.prompt[:, shard])
        return shape_logits(logits_NV, vocab_start, rows, seen, min_tokens=variant.min_tokens)


class PenaltyFeature(SlotFeature[SeenTokens]):
    name = "penalties"

    @property
    def late_bytes(self) -> int:
        return 3 * self.slots * self.vocab_size

    def make(self, slots: int) -> SeenTokens:
        shape = slots, self.vocab_size
        return SeenTokens(self.device.zeros(*shape, dtype=torch.int16), self.device.zeros(*shape, dtype=torch.bool))

    def write(self, writes: Sequence[SlotWrite]) -> dict[str, npt.NDArray[Any]]:
        writes = [write for write in writes if write.sampling.penalised]
        if not writes:
            return {}
        self.need()
        known, reset_K = [_to_count(write) for write in writes], np.array([write.slot for write in writes])
        in_prompt = [np.arange(len(ids)) < write.prompt_length for write, ids in zip(writes, known, strict=True)]
        return {
            "reset_K": reset_K,
            "seen_slots_T": np.repeat(reset_K, [len(tokens) for tokens in known]),
            "seen_T": np.concatenate(known),
            "in_prompt_T": np.concatenate(in_prompt),
        }

    def load(self, staged: Mapping[str, Tensor]) -> None:
        if "reset_K" in staged:
            reset_slots_(self.need(), staged["reset_K"])
            load_tokens_(self.need(), staged["seen_slots_T"], staged["seen_T"], staged["in_prompt_T"])

    def processor(self, view: RowView, in_place: bool) -> SeenTokens:
        return seen_before(self.need().select(view.slots_B), view)

    def advance(self, slots_B: Tensor, tokens_BW: Tensor, count_B: Tensor) -> None:
        for index in range(tokens_BW.shape[1]):  # in order: a token may repeat
            count_tokens_(self.need(), slots_B, tokens_BW[:, index], count_B > index)


def _to_count(write: SlotWrite) -> npt.NDArray[np.int64]:
    """Its known tokens; of those generated each MOST_COUNTED times at most."""
    tokens = np.array(write.token_ids, np.int64)
    generated = tokens[write.prompt_length :]
    if len(generated) <= MOST_COUNTED:
        return tokens
    counted = [np.full(min(n, MOST_COUNTED), i) for i, n in zip(*np.unique(generated, return_counts=True), strict=True)]
    return np.concatenate((tokens[: write.prompt_length], *counted))


def reset_slots_(tables: SeenTokens, slots_N: Tensor) -> None:
    """Forget what ``slots_N`` (int64; pad with slot 0) have seen."""
    tables.counts.index_fill_(0, slots_N, 0)
    tables.prompt.index_fill_(0, slots_N, False)


def load_tokens_(tables: SeenTokens, slots_T: Tensor, tokens_T: Tensor, in_prompt_T: Tensor) -> None:
    """Enter the known tokens of freshly reset slots: the prompt's, and the generated ones of a recomputed request.

    slots_T and tokens_T int64, in_prompt_T bool; tokens may repeat, a generated one of a slot MOST_COUNTED times at
    most.
    """
    vocab = tables.counts.shape[1]
    prompt_slots_T = torch.where(in_prompt_T, slots_T, PADDING_SLOT)  # generated tokens: to slot 0, which is not read
    tables.prompt.view(-1).index_fill_(0, prompt_slots_T * vocab + tokens_T, True)
    tables.counts.view(-1).scatter_add_(0, slots_T * vocab + tokens_T, (~in_prompt_T).to(torch.int16))


def count_tokens_(tables: SeenTokens, slots_B: Tensor, tokens_B: Tensor, live_B: Tensor) -> None:
    """Count one sampled token a row; rows that are not live count nothing.

    slots_B int64, of which only slot 0 may repeat; tokens_B int64; live_B bool.
    """
    vocab = tables.counts.shape[1]
    column_B, inside_B = _columns(tokens_B, live_B, 0, vocab)
    flat, index_B = tables.counts.view(-1), slots_B * vocab + column_B
    counted_B = (flat.gather(0, index_B).to(torch.int32) + inside_B).clamp(max=MOST_COUNTED)
    flat.scatter_(0, index_B, counted_B.to(torch.int16))


def shape_logits(
    logits_BV: Tensor, vocab_start: int, rows: SamplingInputs, seen: SeenTokens | None, *, min_tokens: bool
) -> Tensor:
    """Float32 copy of float32 or bfloat16 logits: penalised if there are tokens ``seen`` (of the same ids), then with
    stop ids masked under min_length if ``min_tokens``. One launch on CUDA."""
    if (kernels := kernels_for(logits_BV)) is not None:
        return kernels.shape_logits(logits_BV, vocab_start, rows, seen, min_tokens=min_tokens)
    logits_BV = logits_BV.to(torch.float32)
    if seen is not None:
        logits_BV = apply_penalties(logits_BV, seen, rows)
    return mask_stop_ids(logits_BV, rows, vocab_start) if min_tokens else logits_BV


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


def seen_before(seen: SeenTokens, view: RowView) -> SeenTokens:
    """What each sample comes after, [B * W, V]: what its row has ``seen`` ([B, V], the newest token included), and the
    draft tokens before it, or the nodes above it and its own. Draft tokens are ids of the whole vocabulary."""
    (rows, vocab), (_, tokens_BW, tree, _) = seen.counts.shape, view
    if (width := tokens_BW.shape[1]) == 1:
        return seen
    counts_BWV = seen.counts.unsqueeze(1).repeat(1, width, 1)
    if tree is None:
        for index in range(1, width):  # a draft token is seen by every token after it
            ids_BQ1 = tokens_BW[:, index, None, None].expand(-1, width - index, 1)
            _count_one_more_(counts_BWV[:, index:], ids_BQ1)
    else:
        for node_BW in generations(tree.parents_BN, view.width - 1):
            counted_BW = node_BW > 0  # the root is counted in its row
            _count_one_more_(counts_BWV, tokens_BW.gather(1, node_BW)[:, :, None], counted_BW[:, :, None])
    prompt_BWV = seen.prompt.unsqueeze(1).expand(-1, width, -1)
    return SeenTokens(counts_BWV.reshape(-1, vocab), prompt_BWV.reshape(rows * width, vocab))
