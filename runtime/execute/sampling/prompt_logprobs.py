"""Log-probabilities of prompt tokens on their way home: a side channel of the result ring.

Knows: how a step's values are laid out, and that nothing is allocated before the first request. Does not know: when an
entry may be used again (result_reader.py: as the ring's entry of the same number), the model, whose prompt it is.

A prompt can have as many values as it has tokens, far more than a decode step's rows, so they have separate memory:
``entries`` times room for every token of a full prefill step, once on the device and once, pinned, on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.execute.device.protocol import Device
from runtime.execute.sampling.logprobs import TokenLogprobs, token_logprobs
from runtime.schedule.plan import StepPlan
from runtime.schedule.request import MAX_TOP_LOGPROBS

PIECE = 256  # tokens whose logits exist at once, no more than a large decode bucket's, which memory was sized with


class PromptLogprobs(NamedTuple):
    """Host arrays for the S prompt tokens at positions [start, start + S) of one request, n likely tokens for each.

    chosen_S float32, rank_S int32, top_ids_SN int32, top_SN float32; meanings are those of logprobs.TokenLogprobs.
    """

    start: int
    chosen_S: npt.NDArray[np.float32]
    rank_S: npt.NDArray[np.int32]
    top_ids_SN: npt.NDArray[np.int32]
    top_SN: npt.NDArray[np.float32]


def score_words(tokens: int, top: int) -> int:
    """int32 words of one step: chosen [S], rank [S], top ids [S, n], top values [S, n]."""
    return tokens * (2 + 2 * top)


def _columns(words_X: Tensor, tokens: int, top: int) -> TokenLogprobs:
    """Those words as four views."""
    chosen, rank, ids, values = torch.split(words_X, [tokens, tokens, tokens * top, tokens * top])
    float32 = torch.float32
    return TokenLogprobs(chosen.view(float32), rank, ids.view(tokens, top), values.view(float32).view(tokens, top))


@dataclass(frozen=True, slots=True)
class StepPromptLogprobs:
    """One step's share of the channel: S ``tokens``, ``top`` likely ones for each, the same words on both sides."""

    plan: StepPlan
    tokens: int
    top: int
    device_X: Tensor
    host_X: Tensor

    @property
    def words(self) -> int:
        return self.device_X.numel()

    def fill(self, hidden_TN: Tensor, scored_2S: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
        """On the compute stream: score every token, PIECE at a time. Nothing is read by the host.

        scored_2S int64: where in T the token before each one is, and the token. ``logits_of``: hidden [R, N] -> all
        logits [R, V], the same on every rank.
        """
        columns = _columns(self.device_X, self.tokens, self.top)
        for begin in range(0, self.tokens, PIECE):
            rows_R, tokens_R = scored_2S[:, begin : begin + PIECE]
            values = token_logprobs(logits_of(hidden_TN.index_select(0, rows_R)), tokens_R, self.top)
            for column, value in zip(columns, values, strict=True):
                column[begin : begin + PIECE].copy_(value)

    def send(self) -> None:
        """On the copy stream."""
        self.host_X.copy_(self.device_X, non_blocking=True)

    def read(self) -> tuple[PromptLogprobs | None, ...]:
        """One entry a row, copied out of the pinned memory, which may be written again once the step is taken."""
        chosen, rank, ids, values = (c.numpy() for c in _columns(self.host_X, self.tokens, self.top))
        rows: list[PromptLogprobs | None] = []
        begin = 0
        for chunk in self.plan.chunks:
            if (scored := chunk.scored) is None:
                rows.append(None)
                continue
            here, top = slice(begin, begin + len(scored.token_ids)), scored.top
            begin = here.stop
            found = chosen[here], rank[here], ids[here, :top], values[here, :top]
            rows.append(PromptLogprobs(scored.start, *(column.copy() for column in found)))
        return (*rows, *(None for _ in self.plan.forks))


class PromptLogprobRing:
    """The channel: one entry a ring entry, allocated at the first claim and kept."""

    def __init__(self, device: Device, *, entries: int, max_tokens: int) -> None:
        self._device = device
        self._shape = (entries, score_words(max_tokens, MAX_TOP_LOGPROBS))
        self._sides_EX: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held on each side; 0 before the first request."""
        return 0 if self._sides_EX is None else self._sides_EX[0].nbytes

    def claim(self, plan: StepPlan, index: int) -> StepPromptLogprobs | None:
        """Entry ``index`` for what the chunks of ``plan`` score; None when that is nothing."""
        if not (tokens := plan.scored_tokens):
            return None
        if self._sides_EX is None:
            empty_EX = self._device.empty(*self._shape, dtype=torch.int32)
            self._sides_EX = (empty_EX, self._device.pinned(*self._shape, dtype=torch.int32))
        top = max(chunk.scored.top for chunk in plan.chunks if chunk.scored is not None)
        device_EX, host_EX = self._sides_EX
        words = score_words(tokens, top)
        return StepPromptLogprobs(plan, tokens, top, device_EX[index, :words], host_EX[index, :words])
