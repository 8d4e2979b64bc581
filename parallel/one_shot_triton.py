"""The sum of every rank's rows in one launch, and where wanted the residual add and RMSNorm that follow it.

Knows: memory of all ranks that this GPU maps, and how programs of different GPUs wait for each other.
Does not know: process groups, which sums are small enough (parallel/symmetric.py).

A program has one row on every rank. It writes its part into the other ranks' memory, says so in a flag there, waits for
theirs in its own memory, and adds all parts in rank order: the result has the same bits everywhere. Parts are pushed,
so that what is waited for is read from the own memory.

Flags count a program's exchanges, so they are never reset, and each exchange uses the other one of two places. A rank
that is one exchange ahead writes into the place that nobody reads; it cannot be two ahead, since it waits for the
flags of the exchange between. That holds across graphs, eager launches and different numbers of rows: where to write is
told by a counter on the device, and programs of different rows share nothing.

Of dependent launches (models/kernels/dependent_launch.py) it keeps the rules. The launch after it begins while this one
still waits for the other ranks, and has its weights on the way.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MOST_WARPS = 16


@triton.jit
def _wait_until(flag_ptr, exchange):
    """Return once ``flag_ptr`` (int32) has reached ``exchange``, modulo 2**32; then what its writer wrote before it
    can be read."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred %early;
            .reg .s32 %seen, %ahead;
        again:
            ld.acquire.sys.global.s32 %seen, [$1];
            sub.s32 %ahead, %seen, $2;
            setp.lt.s32 %early, %ahead, 0;
            @%early bra again;
            mov.s32 $0, %seen;
        }
        """,
        "=r,l,r",
        [flag_ptr, exchange],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _one_shot_kernel(
    x_ptr,  # [rows, N], this rank's part
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    memory,  # WORLD addresses: each rank's parts [2, WORLD, ROWS, ROW_BYTES], then its flags int32 [ROWS, WORLD]
    exchanges_ptr,  # int32 [ROWS], of this rank
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
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
    place: tl.constexpr = ROWS * (ROW_BYTES * 8 // x_ptr.dtype.element_ty.primitive_bitwidth)  # elements of one part
    here = row.to(tl.int64) * (place // ROWS) + cols
    pointer: tl.constexpr = tl.pointer_type(x_ptr.dtype.element_ty)
    word: tl.constexpr = tl.pointer_type(tl.int32)
    if NORM:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + where, mask=mask, other=0.0)
    before = tl.load(exchanges_ptr + row)
    first = (before & 1) * WORLD  # of the parts of this exchange
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            theirs = tl.multiple_of(memory[rank].to(pointer), 16) + (first + RANK).to(tl.int64) * place
            tl.store(theirs + here, x, mask=mask)
    tl.debug_barrier()  # every thread's part is written before one thread says so
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            flags = (memory[rank] + 2 * WORLD * ROWS * ROW_BYTES).to(word) + row * WORLD
            tl.atomic_xchg(flags + RANK, before + 1, sem="release", scope="sys")
    if ADD:
        residual = tl.load(residual_ptr + where, mask=mask, other=0.0).to(tl.float32)
    mine = (memory[RANK] + 2 * WORLD * ROWS * ROW_BYTES).to(word) + row * WORLD
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            _wait_until(mine + rank, before + 1)
    parts = tl.multiple_of(memory[RANK].to(pointer), 16)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            total += x.to(tl.float32)
        else:
            part = tl.load(parts + (first + rank).to(tl.int64) * place + here, mask=mask, other=0.0, volatile=True)
            total += part.to(tl.float32)
    tl.store(exchanges_ptr + row, before + 1)
    result = total.to(x.dtype)
    if ADD:
        result = (result.to(tl.float32) + residual).to(x.dtype)
    if NORM:
        tl.store(residual_out_ptr + where, result, mask=mask)
        h = result.to(tl.float32)
        result = (h * tl.rsqrt(tl.sum(h * h, 0) / N + eps) * weight).to(x.dtype)
    tl.store(out_ptr + where, result, mask=mask)


def memory_bytes(world: int, rows: int, row_bytes: int) -> int:
    """What each rank needs for exchanges of at most so many rows: two places for every rank's part, and flags."""
    return 2 * world * rows * row_bytes + 4 * rows * world


def one_shot(
    x_TN: Tensor,
    memory: tuple[int, ...],
    exchanges: Tensor,
    *,
    rank: int,
    rows: int,
    row_bytes: int,
    residual_TN: Tensor | None = None,
    norm_N: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """(sum over ranks, the same) of ``x`` [T, N], or with ``norm_N`` (rms_norm(residual') * norm, residual'), where
    residual' = sum + residual, rounded to x's dtype after the sum and after the addition. Fresh tensors.

    T is at most ``rows``, a row of x at most ``row_bytes``. ``memory``: addresses, multiples of 16, of ``memory_bytes``
    of every rank as this GPU maps them; ``exchanges`` int32 [rows]: this rank's own. Both begin with zeros. All ranks
    launch the same sequence of calls, one after the other. ``residual_TN`` needs ``norm_N``.
    """
    tokens, width = x_TN.shape
    out_TN = torch.empty_like(x_TN)
    normed = norm_N is not None
    residual_out_TN = torch.empty_like(x_TN) if normed else out_TN
    block = triton.next_power_of_2(width)
    _one_shot_kernel[(tokens,)](
        x_TN,
        x_TN if residual_TN is None else residual_TN,
        x_TN if norm_N is None else norm_N,
        out_TN,
        residual_out_TN,
        memory,
        exchanges,
        eps,
        N=width,
        BLOCK=block,
        RANK=rank,
        WORLD=len(memory),
        ROWS=rows,
        ROW_BYTES=row_bytes,
        ADD=residual_TN is not None,
        NORM=normed,
        PDL=pdl,
        num_warps=max(1, min(MOST_WARPS, block // 512)),
        launch_pdl=pdl,
    )
    return out_TN, residual_out_TN
