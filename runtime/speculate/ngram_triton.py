"""Prompt lookup in Triton: one launch, one program a row, which reads no further than its row is long.

Knows: the arithmetic of ngram.py, which holds the torch reference. Does not know: proposers, who keeps the histories.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PLACES = 2048  # that a program looks at together


@triton.jit
def _look_up_kernel(
    history_ptr, rows_ptr, length_ptr, out_ptr, positions, length_stride, count,
    LOW: tl.constexpr, HIGH: tl.constexpr, PLACES: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tokens_ptr = history_ptr + tl.load(rows_ptr + row) * positions
    length = tl.load(length_ptr + row * length_stride)
    last = length - 1
    best = tl.zeros((PLACES,), dtype=tl.int64)
    for begin in range(0, last, PLACES):
        end = begin + tl.arange(0, PLACES)
        going = end < last
        run = tl.zeros((PLACES,), dtype=tl.int32)
        for back in tl.static_range(HIGH):
            tail = tl.load(tokens_ptr + last - back, mask=last >= back, other=-1)
            token = tl.load(tokens_ptr + end - back, mask=going & (end >= back), other=-2)
            going = going & (token == tail)
            run += going.to(tl.int32)
        score = run.to(tl.int64) * positions + (positions - 1 - end)
        best = tl.maximum(best, tl.where(run >= LOW, score, 0))
    highest = tl.max(best, axis=0)
    start = tl.where(highest > 0, positions - highest % positions, last)
    period = tl.maximum(length - start, 1)
    index = tl.arange(0, COUNT)
    at = tl.minimum(tl.maximum(start + index % period, 0), positions - 1)
    token = tl.load(tokens_ptr + at, mask=index < count, other=0)
    tl.store(out_ptr + row * count + index, token.to(tl.int64), mask=index < count)


def look_up(history_SL: Tensor, rows_B: Tensor, length_B: Tensor, count: int, low: int, high: int) -> Tensor:
    """ngram.look_up_in_torch of a contiguous history. ``length_B``: a column of records, of any stride."""
    proposed_BQ = torch.empty(len(rows_B), count, dtype=torch.int64, device=rows_B.device)
    _look_up_kernel[(len(rows_B),)](
        history_SL, rows_B, length_B, proposed_BQ, history_SL.shape[1], length_B.stride(0), count,
        LOW=low, HIGH=high, PLACES=_PLACES, COUNT=triton.next_power_of_2(count), num_warps=8,
    )  # fmt: skip
    return proposed_BQ
