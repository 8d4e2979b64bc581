"""The sum of every rank's rows in one launch, and where wanted the residual add and RMSNorm that follow it.

Knows: which rank sends what to whom, and how a program tells that another rank's part is there. Does not know: process
groups, which sums are small enough (all_reduce_dispatch.py), where parts lie (peer_buffers.py).

A program has one row on every rank. It writes its part into the other ranks' memory, reads theirs in its own, and adds
all parts in rank order: the result has the same bits everywhere. Parts are pushed, so that what is waited for is read
from the own memory. In TWO_STEPS a row's parts go only to the rank whose row it is, and the sum from there to all: of
``size`` ranks each sends 2 (size - 1) / size messages instead of size - 1, and waits twice.

No flag says that a part is there. Where nothing is, memory holds an EMPTY that nobody sends, and who reads a part reads
it until none of it is empty, then empties it for the exchange after the next (the Lamport buffers of TensorRT-LLM's
all-reduce). So nothing depends on the order in which stores arrive, and no store has to be waited for before a flag is
raised, which is a trip over the link there and back. Parts of all ranks are read in one go: one after the other would
be a trip to the L2 for each.

With SCATTER a part has rows for every rank, and each rank keeps the sum of its own: a program sends every other rank
another row instead of the same one, and waits for as many. All that is said here holds for it as for one step.

The launch before the sum may have PUSHED already: a product that stores each tile of its result into the others'
memory, too (matmul_push_triton.py), while other tiles are still computed. This launch then writes no part.

Two places are enough. Say A writes its part of exchange e + 2 of a row, from its sum or from the product before it,
where its part of e was. It does so after its wait, hence after A's sum e + 1, which had B's part, or had it through the
rank whose row it is. B sent that after its launches before had ended, its sum e among them, which emptied the place.
Where to write is told by a counter on the device, and programs of different rows share nothing: so this holds across
graphs, eager launches, both numbers of steps and different numbers of rows, as long as between a product that pushes
and its sum no other exchange of these rows runs.

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

from parallel.comm.matmul_push_triton import empty_like, is_empty, row_of_part, sendable
from parallel.comm.peer_buffers import PeerBuffers

MOST_WARPS = 16
MOST_WARPS_OF_MANY = 8  # between more than four ranks, whose parts a thread holds: with 16 it has half the registers


@triton.jit
def _sum_kernel(
    x_ptr,  # [rows, N], this rank's part; SCATTER: [WORLD * rows, N], a part for every rank, rank 0's first
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    memory,  # WORLD addresses, with a layout that parallel/comm/peer_buffers.py knows
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
    PUSHED: tl.constexpr,  # and not TWO_STEPS
    TWO_STEPS: tl.constexpr,
    SCATTER: tl.constexpr,  # in one step, and not PUSHED
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    rows = tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    where = row.to(tl.int64) * N + cols
    element: tl.constexpr = x_ptr.dtype.element_ty
    if NORM:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    parts = tl.tuple(())
    if SCATTER:
        for rank in tl.static_range(WORLD):  # all are read before one is stored, or each would be a trip to the L2
            theirs = (rank * rows + row).to(tl.int64) * N + cols
            parts += (sendable(tl.load(x_ptr + theirs, mask=mask, other=0.0)),)
        x = parts[RANK]
    else:
        x = sendable(tl.load(x_ptr + where, mask=mask, other=0.0))
    before = tl.load(exchanges_ptr + row, cache_modifier=".cg")
    owner = row % WORLD
    if not PUSHED:
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                theirs = row_of_part(memory[rank], before, RANK, row, element, WORLD, ROWS, ROW_BYTES)
                asked = mask
                if TWO_STEPS:
                    asked = mask & (owner == rank)
                sent = x
                if SCATTER:
                    sent = parts[rank]
                tl.store(theirs + cols, sent, mask=asked)
    if ADD:
        residual = tl.load(residual_ptr + where, mask=mask, other=0.0).to(tl.float32)
    result = x
    if (not TWO_STEPS) or owner == RANK:
        total = tl.zeros((BLOCK,), tl.float32)
        missing = 1
        while missing != 0:
            total = tl.zeros((BLOCK,), tl.float32)
            late = tl.zeros((BLOCK,), tl.int1)
            for rank in tl.static_range(WORLD):
                part = x
                if rank != RANK:
                    mine = row_of_part(memory[RANK], before, rank, row, element, WORLD, ROWS, ROW_BYTES)
                    part = tl.load(mine + cols, mask=mask, other=0.0, volatile=True)
                    late |= is_empty(part)
                total += part.to(tl.float32)
            missing = tl.max(late.to(tl.int32), 0)
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                mine = row_of_part(memory[RANK], before, rank, row, element, WORLD, ROWS, ROW_BYTES)
                tl.store(mine + cols, empty_like(x), mask=mask)
        result = total.to(element)
        if TWO_STEPS:
            result = sendable(result)
            for rank in tl.static_range(WORLD):
                if rank != RANK:
                    theirs = row_of_part(memory[rank], before, RANK, row, element, WORLD, ROWS, ROW_BYTES)
                    tl.store(theirs + cols, result, mask=mask)
    else:
        mine = row_of_part(memory[RANK], before, owner, row, element, WORLD, ROWS, ROW_BYTES)
        missing = 1
        while missing != 0:
            result = tl.load(mine + cols, mask=mask, other=0.0, volatile=True)
            missing = tl.max(is_empty(result).to(tl.int32), 0)
        tl.store(mine + cols, empty_like(x), mask=mask)
    tl.debug_barrier()  # every thread has read the count before one thread changes it
    tl.store(exchanges_ptr + row, before + 1)
    if ADD:
        result = (result.to(tl.float32) + residual).to(element)
    if NORM:
        tl.store(residual_out_ptr + where, result, mask=mask)
        h = result.to(tl.float32)
        result = (h * tl.rsqrt(tl.sum(h * h, 0) / N + eps) * weight.to(tl.float32)).to(element)
    tl.store(out_ptr + where, result, mask=mask)


def summed(
    x_TN: Tensor,
    places: PeerBuffers,
    *,
    residual_TN: Tensor | None = None,
    norm_N: Tensor | None = None,
    eps: float = 0.0,
    pushed: bool = False,
    two_steps: bool = False,
    scatter: bool = False,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """(sum over ranks, the same) of ``x`` [T, N], or with ``norm_N`` (rms_norm(residual') * norm, residual'), where
    residual' = sum + residual, rounded to x's dtype after the sum and after the addition. Fresh tensors.

    T is at most ``places.rows``, a row of x at most ``places.row_bytes``; x is of a 16-bit type or float32. All ranks
    launch the same sequence of calls, one after the other. ``pushed``: the launch before this one has put x into the
    places of the other ranks. ``two_steps``, and not ``pushed``, changes no bit but a zero's sign. ``scatter``, and
    neither of these: x is [ranks * T, N], and each rank has the sum of its own T rows. ``residual_TN`` needs
    ``norm_N``.
    """
    ranks = len(places.memory)
    tokens, width = x_TN.shape[0] // (ranks if scatter else 1), x_TN.shape[1]
    out_TN = x_TN.new_empty(tokens, width)
    normed = norm_N is not None
    residual_out_TN = torch.empty_like(out_TN) if normed else out_TN
    block = triton.next_power_of_2(width)
    most_warps = MOST_WARPS if ranks <= 4 else MOST_WARPS_OF_MANY
    _sum_kernel[(tokens,)](
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
        TWO_STEPS=two_steps,
        SCATTER=scatter,
        PDL=pdl,
        num_warps=max(1, min(most_warps, block // 512)),
        launch_pdl=pdl,
    )
    return out_TN, residual_out_TN
