"""Log-probabilities of drawn and of likely tokens; those of prompt tokens are a side channel of the result ring.

Knows: the raw model logits, before penalties, temperature and filters (vLLM's default, logprobs_mode "raw_logprobs"),
how a step's values are laid out, and that nothing is allocated before the first request. Does not know: when an
entry may be used again (result_reader.py: as the ring's entry of the same number), the model, whose prompt it is.

A prompt can have as many values as it has tokens, far more than a decode step's rows, so they have separate memory:
``entries`` times room for every token of a full prefill step, once on the device and once, pinned, on the host.

Sums are exact (integer weights), so the same row gives the same bits in any batch.
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
from runtime.execute.sampling import exact_math
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.sampling.kernels import kernels_for
from runtime.execute.sampling.packed_argmax import pack, unpack
from runtime.execute.slots.feature import SlotFeature
from runtime.schedule.plan import StepPlan
from runtime.schedule.request import MAX_TOP_LOGPROBS


class TokenLogprobs(NamedTuple):
    """For each of B rows: the chosen token's log-probability, its rank and the n most likely tokens, best first.

    rank 1 is the most likely; it is 1 + the number of strictly more likely tokens, so ties share the better rank.
    Equal top tokens are ordered by id. A vocabulary smaller than n leaves ids -1 and -inf at the end.
    """

    chosen: Tensor  # float32 [B]
    rank: Tensor  # int32 [B]
    top_ids: Tensor  # int32 [B, n]
    top_values: Tensor  # float32 [B, n]


class LogprobFeature(SlotFeature[tuple[()]]):
    name = "logprobs"
    reads_logits = True

    def make(self, slots: int) -> tuple[()]:
        return ()

    def report(self, logits_TV: Tensor, tokens_T: Tensor, variant: SamplingVariant) -> TokenLogprobs:
        return token_logprobs(logits_TV, tokens_T, variant.top_logprobs)


def token_logprobs(logits_BV: Tensor, tokens_B: Tensor, top_n: int = 0) -> TokenLogprobs:
    """Log-probabilities under softmax(logits). tokens_B int64, the tokens that stand at these rows' next position.

    Serves generated tokens (row = sequence) and prompt tokens (row = prompt position) alike. ``top_n`` is static.
    Raises ValueError if top_n is not in 0..20.
    """
    if not 0 <= top_n <= MAX_TOP_LOGPROBS:
        raise ValueError(f"top_n is {top_n}; it must be between 0 and {MAX_TOP_LOGPROBS}")
    if (kernels := kernels_for(logits_BV)) is not None:
        return TokenLogprobs(*kernels.token_logprobs(logits_BV, tokens_B, top_n))
    logits_BV = logits_BV.to(torch.float32)
    largest_B1 = logits_BV.amax(1, keepdim=True)
    log_total_B1 = _log_of_sum(logits_BV - largest_B1)
    chosen_B1 = logits_BV.gather(1, tokens_B[:, None])
    rank_B = (logits_BV > chosen_B1).sum(1, dtype=torch.int32) + 1
    top_ids, top_logits = _top(logits_BV, top_n)
    return TokenLogprobs(
        chosen=((chosen_B1 - largest_B1) - log_total_B1)[:, 0],
        rank=rank_B,
        top_ids=top_ids,
        top_values=torch.where(top_ids >= 0, (top_logits - largest_B1) - log_total_B1, float("-inf")),
    )


def _log_of_sum(shifted_BV: Tensor) -> Tensor:
    """log(sum(exp(x))) of x <= 0 with maximum 0, [B, 1]."""
    total_B1 = exact_math.exp_weights(shifted_BV).sum(1, keepdim=True)
    return exact_math.log(total_B1.to(torch.float32).mul_(2.0**-exact_math.WEIGHT_BITS).clamp_(min=1.0))


def _top(logits_BV: Tensor, top_n: int) -> tuple[Tensor, Tensor]:
    """(ids int32, logits float32) of the ``top_n`` largest, [B, top_n]; ties by id, which plain topk leaves open."""
    rows, vocab = logits_BV.shape
    ids_V = torch.arange(vocab, dtype=torch.int64, device=logits_BV.device)
    keys = pack(logits_BV, ids_V).topk(min(top_n, vocab), dim=1).values
    values, ids = unpack(keys)
    missing = (rows, top_n - keys.shape[1])
    return (
        torch.cat((ids.to(torch.int32), ids.new_full(missing, -1, dtype=torch.int32)), 1),
        torch.cat((values, values.new_full(missing, float("-inf"))), 1),
    )


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
