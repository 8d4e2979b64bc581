"""Prompt lookup (Saxena 2023; vLLM's ``ngram``): what followed the latest tokens the last time they stood together.

Knows: how the longest run of a sequence's latest tokens is found earlier in it, and what is proposed from there.
Does not know: who keeps the histories (runtime/execute/slot_state.py), what becomes of a proposal.

Of all runs of ``low`` to ``high`` tokens that end a sequence, the longest that also stands earlier counts, and of its
places the earliest, as in vLLM. Where fewer than ``count`` tokens follow it, those are proposed again and again:
the sequence repeats itself. Where nothing is found the latest token is proposed: a draft as good as any.
On CUDA one Triton program a row looks; the torch code is its reference and runs elsewhere.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from runtime.execute.proposer import Observed, Proposed, ProposerParts
from runtime.execute.slot_state import SlotColumns


class _Lookup(Protocol):
    """ngram_triton.look_up, and its reference here."""

    def __call__(
        self, history_SL: Tensor, rows_B: Tensor, length_B: Tensor, count: int, low: int, high: int
    ) -> Tensor: ...


class NgramProposer:
    """``low`` to ``high``: tokens of a run that is looked for, 1 <= low <= high. Without weights or caches."""

    name = "ngram"
    layers: tuple[int, ...] = ()
    reads_hidden = False

    def __init__(self, parts: ProposerParts, low: int, high: int) -> None:
        assert parts.tables.history_SL is not None  # an executor with a proposer keeps histories
        self._history_SL = parts.tables.history_SL
        self._low, self._high = low, high

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        look: _Lookup = (_triton_kernel() if rows_B.is_cuda else None) or look_up_in_torch
        return Proposed(look(self._history_SL, rows_B, columns.length, count, self._low, self._high))

    def observe(self, observed: Observed) -> None:
        """It reads tokens only, which the histories have."""


def look_up_in_torch(history_SL: Tensor, rows_B: Tensor, length_B: Tensor, count: int, low: int, high: int) -> Tensor:
    """int64 [B, count]: what followed the run that ends the first ``length_B`` (int32) tokens of slots ``rows_B``
    (int64), of ``history_SL`` (int32). A sequence without a token gets whatever its slot holds at position 0."""
    history_BL = history_SL.index_select(0, rows_B)
    positions = history_BL.shape[1]
    last_B1 = length_B.to(torch.int64)[:, None] - 1
    end_L = torch.arange(positions, device=history_SL.device)
    going_BL = end_L < last_B1  # a run ends there, before the one that ends the sequence
    run_BL = torch.zeros_like(history_BL)
    for back in range(min(high, positions)):
        tail_B1 = history_BL.gather(1, (last_B1 - back).clamp(min=0))
        same_BL = history_BL[:, : positions - back] == tail_B1
        going_BL = going_BL & torch.cat((same_BL.new_zeros(len(rows_B), back), same_BL), 1)
        run_BL += going_BL
    score_BL = torch.where(run_BL >= low, run_BL.to(torch.int64) * positions + (positions - 1 - end_L), 0)
    best_B1 = score_BL.amax(1, keepdim=True)
    start_B1 = torch.where(best_B1 > 0, positions - best_B1 % positions, last_B1)  # after the run's end
    period_B1 = (last_B1 + 1 - start_B1).clamp(min=1)
    at_BQ = start_B1 + torch.arange(count, device=history_SL.device) % period_B1
    return history_BL.gather(1, at_BQ.clamp(0, positions - 1)).to(torch.int64)


@cache
def _triton_kernel() -> _Lookup | None:
    try:
        from runtime.speculate.ngram_triton import look_up
    except ImportError:
        return None
    return look_up
