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

The launch before the sum may have PUSHED already: a product that stores each tile of its result into the others'
memory, too (push_triton.py), while other tiles are still computed. This launch then writes no part and only says that
it is there: the product has ended by then, and a release on behalf of the whole system covers what came before it,
other programs' stores included. Two places are still enough. Say A's product is for exchange e + 1 of a row, and so
writes where the parts of e - 1 were. It writes after its wait, hence after A's sum e, for which A saw B's flag e. B
raised that in its own sum e, which had waited for B's launches before it: whatever read the parts of e - 1 on B had
ended. Nothing but the counter names the exchange, so between a product that pushes and its sum no other exchange of
these rows may run.

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

from parallel.places import Places
from parallel.push_triton import row_of_part

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
    memory,  # WORLD addresses, with a layout that parallel/places.py knows
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
    PUSHED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    where = row.to(tl.int64) * N + cols
    element: tl.constexpr = x_ptr.dtype.element_ty
    word: tl.constexpr = tl.pointer_type(tl.int32)
    if NORM:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + where, mask=mask, other=0.0)
    before = tl.load(exchanges_ptr + row)
    if not PUSHED:
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                theirs = row_of_part(memory[rank], before, RANK, row, element, WORLD, ROWS, ROW_BYTES)
                tl.store(theirs + cols, x, mask=mask)
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
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            total += x.to(tl.float32)
        else:
            part_row = row_of_part(memory[RANK], before, rank, row, element, WORLD, ROWS, ROW_BYTES)
            part = tl.load(part_row + cols, mask=mask, other=0.0, volatile=True)
            total += part.to(tl.float32)
    if PUSHED:  # otherwise there was a barrier since
        tl.debug_barrier()  # every thread has read the count before one thread changes it
    tl.store(exchanges_ptr + row, before + 1)
    result = total.to(x.dtype)
    if ADD:
        result = (result.to(tl.float32) + residual).to(x.dtype)
    if NORM:
        tl.store(residual_out_ptr + where, result, mask=mask)
        h = result.to(tl.float32)
        result = (h * tl.rsqrt(tl.sum(h * h, 0) / N + eps) * weight).to(x.dtype)
    tl.store(out_ptr + where, result, mask=mask)


def one_shot(
    x_TN: Tensor,
    places: Places,
    *,
    residual_TN: Tensor | None = None,
    norm_N: Tensor | None = None,
    eps: float = 0.0,
    pushed: bool = False,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """(sum over ranks, the same) of ``x`` [T, N], or with ``norm_N`` (rms_norm(residual') * norm, residual'), where
    residual' = sum + residual, rounded to x's dtype after the sum and after the addition. Fresh tensors.

    T is at most ``places.rows``, a row of x at most ``places.row_bytes``. All ranks launch the same sequence of calls,
    one after the other. ``pushed``: the launch before this one has put x into the places of the other ranks.
    ``residual_TN`` needs ``norm_N``.
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
        eps=eps,
        N=width,
        BLOCK=block,
        **places.arguments(),
        ADD=residual_TN is not None,
        NORM=normed,
        PUSHED=pushed,
        PDL=pdl,
        num_warps=max(1, min(MOST_WARPS, block // 512)),
        launch_pdl=pdl,
    )
    return out_TN, residual_out_TN
