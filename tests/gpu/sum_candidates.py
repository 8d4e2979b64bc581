"""What parallel/one_shot_triton.py may become: sums over GPUs with residual and norm in one launch. Not used yet.

Knows: two protocols in place of its one. ``flagged`` has the count of the exchange in every word, so that no store has
to be waited for before a flag is raised (NCCL calls that LL): twice the bytes, a trip over the link less. ``two_steps``
sends a row's parts to one rank only, and the sum from there to all: 2 (size - 1) / size rows sent by each rank instead
of size - 1, and a second wait. Does not know: which sizes they are good for (bench_all_reduce.py).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parallel import one_shot_triton
from parallel.places import Places
from parallel.push_triton import row_of_part

_wait_until = one_shot_triton._wait_until


@triton.jit
def _halves(words):
    """A word's two bfloat16, the lower one first, in float32."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(value):
    return value.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _word(low, high):
    low_bits = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
    return (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16) | low_bits


@triton.jit
def _flagged_kernel(
    x_ptr,  # int32 [rows, N / 2]: two bfloat16 a word, here and below
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    memory,  # WORLD addresses of int64 [2, WORLD, ROWS, N / 2]: a word and above it the exchange it is of
    exchanges_ptr,  # int32 [ROWS], of this rank
    eps,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < WORDS
    where = row.to(tl.int64) * WORDS + cols
    long: tl.constexpr = tl.pointer_type(tl.int64)
    weight_low, weight_high = _halves(tl.load(weight_ptr + cols, mask=mask, other=0))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + where, mask=mask, other=0)
    mark = tl.load(exchanges_ptr + row, cache_modifier=".cg") + 1
    first = (((mark & 1) * WORLD).to(tl.int64) * ROWS + row) * WORDS
    flagged = (x.to(tl.int64) & 4294967295) | (mark.to(tl.int64) << 32)
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            theirs = tl.multiple_of(memory[rank].to(long), 16) + first + RANK * ROWS * WORDS
            tl.store(theirs + cols, flagged, mask=mask)
    if ADD:
        low_before, high_before = _halves(tl.load(residual_ptr + where, mask=mask, other=0))
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(WORLD):
        words = x
        if rank != RANK:
            mine = tl.multiple_of(memory[RANK].to(long), 16) + first + rank * ROWS * WORDS + cols
            seen = tl.load(mine, mask=mask, other=0, volatile=True)
            while tl.max(((seen >> 32).to(tl.int32) != mark).to(tl.int32) & mask.to(tl.int32), 0) != 0:
                seen = tl.load(mine, mask=mask, other=0, volatile=True)
            words = seen.to(tl.int32)
        low_part, high_part = _halves(words)
        low += low_part
        high += high_part
    tl.debug_barrier()  # every thread has read the count before one thread changes it
    tl.store(exchanges_ptr + row, mark)
    low, high = _rounded(low), _rounded(high)
    if ADD:
        low, high = _rounded(low + low_before), _rounded(high + high_before)
    tl.store(residual_out_ptr + where, _word(low, high), mask=mask)
    scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / (2 * WORDS) + eps)
    tl.store(out_ptr + where, _word(low * scale * weight_low, high * scale * weight_high), mask=mask)


def flagged_bytes(world: int, rows: int, width: int) -> int:
    """What each rank needs for ``flagged``."""
    return 2 * world * rows * width // 2 * 8


def flagged(
    x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, places: Places, *, pdl: bool
) -> tuple[Tensor, Tensor]:
    """As one_shot with a norm, for bfloat16 of an even width. ``places``: its memory is ``flagged_bytes``, all zero at
    first, of rows of this width; its counts are of no other protocol."""
    tokens, width = x_TN.shape
    out_TN, kept_TN = torch.empty_like(x_TN), torch.empty_like(x_TN)
    words = [
        tensor.view(torch.int32)
        for tensor in (x_TN, x_TN if residual_TN is None else residual_TN, norm_N, out_TN, kept_TN)
    ]
    block = triton.next_power_of_2(width // 2)
    _flagged_kernel[(tokens,)](
        *words,
        places.memory,
        places.exchanges,
        eps,
        WORDS=width // 2,
        BLOCK=block,
        RANK=places.rank,
        WORLD=len(places.memory),
        ROWS=places.rows,
        ADD=residual_TN is not None,
        PDL=pdl,
        num_warps=max(1, min(16, block // 128)),
        launch_pdl=pdl,
    )
    return out_TN, kept_TN


@triton.jit
def _two_steps_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    memory,  # as in one_shot_triton.py
    exchanges_ptr,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    where = row.to(tl.int64) * N + cols
    element: tl.constexpr = x_ptr.dtype.element_ty
    word: tl.constexpr = tl.pointer_type(tl.int32)
    flags_at: tl.constexpr = 2 * WORLD * ROWS * ROW_BYTES
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + where, mask=mask, other=0.0)
    before = tl.load(exchanges_ptr + row, cache_modifier=".cg")
    owner = row % WORLD
    mine = (memory[RANK] + flags_at).to(word) + row * WORLD
    result = x
    if owner == RANK:
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(WORLD):
            part = x
            if rank != RANK:
                _wait_until(mine + rank, before + 1)
                at = row_of_part(memory[RANK], before, rank, row, element, WORLD, ROWS, ROW_BYTES)
                part = tl.load(at + cols, mask=mask, other=0.0, volatile=True)
            total += part.to(tl.float32)
        result = total.to(element)
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                at = row_of_part(memory[rank], before, RANK, row, element, WORLD, ROWS, ROW_BYTES)
                tl.store(at + cols, result, mask=mask)
        tl.debug_barrier()  # every thread's share is written before one thread says so
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                flag = (memory[rank] + flags_at).to(word) + row * WORLD + RANK
                tl.atomic_xchg(flag, before + 1, sem="release", scope="sys")
    else:
        for rank in tl.static_range(WORLD):
            if owner == rank:  # never this rank
                at = row_of_part(memory[rank], before, RANK, row, element, WORLD, ROWS, ROW_BYTES)
                tl.store(at + cols, x, mask=mask)
                tl.debug_barrier()  # as above
                flag = (memory[rank] + flags_at).to(word) + row * WORLD + RANK
                tl.atomic_xchg(flag, before + 1, sem="release", scope="sys")
                _wait_until(mine + rank, before + 1)
                at = row_of_part(memory[RANK], before, rank, row, element, WORLD, ROWS, ROW_BYTES)
                result = tl.load(at + cols, mask=mask, other=0.0, volatile=True)
    tl.debug_barrier()  # every thread has read the count before one thread changes it
    tl.store(exchanges_ptr + row, before + 1)
    h = result.to(tl.float32)
    if ADD:
        h = (h + tl.load(residual_ptr + where, mask=mask, other=0.0).to(tl.float32)).to(element).to(tl.float32)
    tl.store(residual_out_ptr + where, h.to(element), mask=mask)
    out = (h * tl.rsqrt(tl.sum(h * h, 0) / N + eps) * weight).to(element)
    tl.store(out_ptr + where, out, mask=mask)


def two_steps(
    x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, places: Places, *, pdl: bool
) -> tuple[Tensor, Tensor]:
    """As one_shot with a norm, over the same places: the two may take turns."""
    tokens, width = x_TN.shape
    out_TN, kept_TN = torch.empty_like(x_TN), torch.empty_like(x_TN)
    block = triton.next_power_of_2(width)
    _two_steps_kernel[(tokens,)](
        x_TN,
        x_TN if residual_TN is None else residual_TN,
        norm_N,
        out_TN,
        kept_TN,
        eps=eps,
        N=width,
        BLOCK=block,
        **places.arguments(),
        ADD=residual_TN is not None,
        PDL=pdl,
        num_warps=max(1, min(16, block // 512)),
        launch_pdl=pdl,
    )
    return out_TN, kept_TN
