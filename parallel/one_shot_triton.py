"""The sum of every rank's rows in one launch, and where wanted the residual add and RMSNorm that follow it.

Knows: that every rank sends its part to every other. Does not know: process groups, which sums that is good for
(symmetric.py), where parts lie and how programs of different GPUs wait for each other (parts_triton.py).

A program has one row on every rank. It writes its part into the other ranks' memory, says so in a flag there, waits for
theirs in its own memory, and adds all parts in rank order: the result has the same bits everywhere. Parts are pushed,
so that what is waited for is read from the own memory.

Of dependent launches (models/kernels/dependent_launch.py) it keeps the rules. The launch after it begins while this one
still waits for the other ranks, and has its weights on the way.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parallel.parts_triton import others, row_of_part, store_summed, tell, wait_for
from parallel.places import Places

MOST_WARPS = 16


@triton.jit
def _one_shot_kernel(
    x_ptr,  # [rows, N], this rank's part
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    memory,  # WORLD addresses, with a layout that parallel/places.py knows
    exchanges_ptr,  # int32 [ROWS], of this rank
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,  # WORLD, or the next power of two
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    where = row.to(tl.int64) * N + cols
    element: tl.constexpr = x_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + cols, mask=mask & NORM, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + where, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + where, mask=mask & ADD, other=0.0)
    before = tl.load(exchanges_ptr + row, cache_modifier=".cg")
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            theirs = row_of_part(memory[rank], before, RANK, row, element, WORLD, ROWS, ROW_BYTES)
            tl.store(theirs + cols, x, mask=mask)
    tell(memory, row, before + 1, MOST, RANK, WORLD, ROWS, ROW_BYTES)
    wait_for(others(MOST, RANK, WORLD), memory[RANK], row, before + 1, WORLD, ROWS, ROW_BYTES)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(WORLD):
        part = x
        if rank != RANK:
            begin = row_of_part(memory[RANK], before, rank, row, element, WORLD, ROWS, ROW_BYTES)
            part = tl.load(begin + cols, mask=mask, other=0.0, volatile=True)
        total += part.to(tl.float32)
    tl.store(exchanges_ptr + row, before + 1)
    store_summed(
        total.to(element), residual, weight, out_ptr, residual_out_ptr, where, mask, eps, N=N, ADD=ADD, NORM=NORM
    )


def one_shot(
    x_TN: Tensor,
    places: Places,
    *,
    residual_TN: Tensor | None = None,
    norm_N: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """(sum over ranks, the same) of ``x`` [T, N], or with ``norm_N`` (rms_norm(residual') * norm, residual'), where
    residual' = sum + residual, rounded to x's dtype after the sum and after the addition. Fresh tensors.

    T is at most ``places.rows``, a row of x at most ``places.row_bytes``. All ranks launch the same sequence of calls,
    one after the other. ``residual_TN`` needs ``norm_N``.
    """
    return launch(_one_shot_kernel, x_TN, places, residual_TN, norm_N, eps, pdl)


def launch(
    kernel: Any,
    x_TN: Tensor,
    places: Places,
    residual_TN: Tensor | None,
    norm_N: Tensor | None,
    eps: float,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """``one_shot`` by a ``kernel`` with the arguments of ``_one_shot_kernel``."""
    tokens, width = x_TN.shape
    out_TN = torch.empty_like(x_TN)
    normed = norm_N is not None
    residual_out_TN = torch.empty_like(x_TN) if normed else out_TN
    block = triton.next_power_of_2(width)
    kernel[(tokens,)](
        x_TN,
        x_TN if residual_TN is None else residual_TN,
        x_TN if norm_N is None else norm_N,
        out_TN,
        residual_out_TN,
        eps=eps,
        N=width,
        BLOCK=block,
        MOST=triton.next_power_of_2(len(places.memory)),
        **places.arguments(),
        ADD=residual_TN is not None,
        NORM=normed,
        PDL=pdl,
        num_warps=max(1, min(MOST_WARPS, block // 512)),
        launch_pdl=pdl,
    )
    return out_TN, residual_out_TN
