"""All-reduce of every rank's rows in one kernel, fused on request with the residual add and RMSNorm that follow.

Knows: which rank sends what to which peer, and how a program sees that a peer's contribution has arrived. Does not
know: process groups, which all-reduces are small enough (symmetric_all_reduce.py), the layout of buffers
(peer_buffers.py).

A program handles the same row on every rank. It pushes its partial sum into the peers' buffers, polls its own, and adds
all contributions in rank order, so every rank gets the same bits. Data is pushed rather than pulled, so that polling
reads local memory. A one-shot all-reduce sends every row to every peer. A two-shot one (TWO_SHOT) is a reduce-scatter
and an all-gather: a row goes to the rank that owns it, and the sum from there to all. Each of ``size`` ranks then sends
2 (size - 1) / size messages instead of size - 1, and waits twice.

Arrival needs no flag. Buffers hold SENTINEL, a value that is never sent, until data arrives; a reader polls until it
sees no sentinel, then writes the sentinel back for the use after next (the Lamport buffers of TensorRT-LLM's
all-reduce). So correctness does not depend on the order in which stores arrive, and no release fence is needed, which
would cost one NVLink round trip. All peers' contributions are polled together: one after the other would cost an L2
latency each.

More than 512 rows (MANY) are shared out among programs that all run at once: one that waited for others might never
start while a peer polls for its row. Such a program pushes its next row before it waits for this one, so that the links
stay busy. Rows beyond the buffers go in several launches.

With SCATTER the kernel is a reduce-scatter: the input has rows for every rank, a program sends each peer another row,
and each rank keeps its part of the sum. Everything else is as for one-shot.

With PUSHED the matmul before this launch has pushed its tiles already (matmul_push_triton.py) while it computed others.
This launch then sends nothing.

Why two buffers are enough: say rank A writes its contribution to use e + 2 of a row over that of use e, from its
all-reduce or from the matmul before it. A does so after its wait, hence after its own use e + 1, which received B's
contribution, directly or through the row's owner. B sent that after its earlier launches had ended, use e among them,
which restored the sentinel. The buffer is chosen by a counter on the device, and programs of different rows share
nothing. So this holds across graphs, eager launches, one-shot and two-shot, and different numbers of rows, as long as
no other use of the same rows runs between a matmul that pushes and its all-reduce.

The kernel keeps the rules of dependent launches (models/kernels/dependent_launch.py). The launch after it may start,
and prefetch weights, while this one still waits for peers.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parallel.comm.matmul_push_triton import is_sentinel, part_row, sendable, sentinel_like
from parallel.comm.peer_buffers import PeerBuffers
from parallel.comm.quantise_triton import store_codes
from parallel.comm.quantised import Quantised

MAX_WARPS = 16
MOST_AT_ONCE = 512  # rows with a program each
PROGRAMS_OF_MANY = 256  # few enough to run at once, two a multiprocessor of an H100; of more than 8 warps one
PROGRAMS_OF_TWO_SHOTS = 128  # four ranks' 8,192 rows take 5% longer with twice as many, which wait for each other
MAX_WARPS_OF_MANY = 8  # above four ranks a thread holds their contributions: 16 warps would halve its registers


@triton.jit
def _push_row(
    x_ptr, row, parts_apart,
    before,  # how often the row was used
    mask,  # [BLOCK], nothing where there is no such row
    memory,
    N: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr, PUSHED: tl.constexpr, TWO_SHOT: tl.constexpr, SCATTER: tl.constexpr,
):  # fmt: skip
    """Sends the peers what they need of a row; returns this rank's own part, [BLOCK]."""
    cols = tl.arange(0, BLOCK)
    parts = tl.tuple(())
    if SCATTER:
        for rank in tl.static_range(WORLD):  # load all before the first store, or each would cost an L2 latency
            theirs = (rank * parts_apart + row).to(tl.int64) * N + cols
            parts += (sendable(tl.load(x_ptr + theirs, mask=mask, other=0.0)),)
        x = parts[RANK]
    else:
        x = sendable(tl.load(x_ptr + row.to(tl.int64) * N + cols, mask=mask, other=0.0))
    if not PUSHED:
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                theirs = part_row(memory[rank], before, RANK, row, x_ptr.dtype.element_ty, WORLD, ROWS, ROW_BYTES)
                asked = mask
                if TWO_SHOT:
                    asked = mask & (row % WORLD == rank)
                sent = x
                if SCATTER:
                    sent = parts[rank]
                tl.store(theirs + cols, sent, mask=asked)
    return x


@triton.jit
def _finish_row(
    row,
    x,  # [BLOCK], this rank's part, which is on its way to the peers
    before,  # how often the row was used
    weight, residual_ptr, out_ptr, codes_ptr, scale_ptr, pitch, residual_out_ptr, memory, use_counts_ptr, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, TWO_SHOT: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Waits for the peers' parts of a row, adds them, and writes what becomes of the sum."""
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    where = row.to(tl.int64) * N + cols
    owner = row % WORLD
    if ADD:
        residual = tl.load(residual_ptr + where, mask=mask, other=0.0).to(tl.float32)
    result = x
    if (not TWO_SHOT) or owner == RANK:
        total = tl.zeros((BLOCK,), tl.float32)
        missing = 1
        while missing != 0:
            total = tl.zeros((BLOCK,), tl.float32)
            late = tl.zeros((BLOCK,), tl.int1)
            for rank in tl.static_range(WORLD):
                part = x
                if rank != RANK:
                    mine = part_row(memory[RANK], before, rank, row, x.dtype, WORLD, ROWS, ROW_BYTES)
                    part = tl.load(mine + cols, mask=mask, other=0.0, volatile=True)
                    late |= is_sentinel(part)
                total += part.to(tl.float32)
            missing = tl.max(late.to(tl.int32), 0)
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                mine = part_row(memory[RANK], before, rank, row, x.dtype, WORLD, ROWS, ROW_BYTES)
                tl.store(mine + cols, sentinel_like(x), mask=mask)
        result = total.to(x.dtype)
        if TWO_SHOT:
            result = sendable(result)
            for rank in tl.static_range(WORLD):
                if rank != RANK:
                    theirs = part_row(memory[rank], before, RANK, row, x.dtype, WORLD, ROWS, ROW_BYTES)
                    tl.store(theirs + cols, result, mask=mask)
    else:
        mine = part_row(memory[RANK], before, owner, row, x.dtype, WORLD, ROWS, ROW_BYTES)
        missing = 1
        while missing != 0:
            result = tl.load(mine + cols, mask=mask, other=0.0, volatile=True)
            missing = tl.max(is_sentinel(result).to(tl.int32), 0)
        tl.store(mine + cols, sentinel_like(x), mask=mask)
    tl.debug_barrier()  # every thread has read the counter before one thread changes it
    tl.store(use_counts_ptr + row, before + 1)
    if ADD:
        result = (result.to(tl.float32) + residual).to(x.dtype)
    if NORM:
        tl.store(residual_out_ptr + where, result, mask=mask)
        h = result.to(tl.float32)
        result = (h * tl.rsqrt(tl.sum(h * h, 0) / N + eps) * weight.to(tl.float32)).to(x.dtype)
    tl.store(out_ptr + where, result, mask=mask)
    if CODES > 0:
        store_codes(result, row, 0, codes_ptr, scale_ptr, pitch, N, CODES)


@triton.jit(do_not_specialize=["rows", "parts_apart"])
def _all_reduce_kernel(
    x_ptr,  # [rows, N], this rank's partial sums; SCATTER: rows for every rank, rank 0's first
    residual_ptr, weight_ptr, out_ptr,
    codes_ptr,  # of the result, where CODES
    scale_ptr, pitch, residual_out_ptr,
    memory,  # WORLD addresses of peer buffers (parallel/comm/peer_buffers.py)
    use_counts_ptr,  # int32 [ROWS], of this rank
    rows,  # with MANY; else there is a program for each
    parts_apart,  # with SCATTER: how many rows of x lie between one rank's and the next one's
    eps,
    N: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
    PUSHED: tl.constexpr,  # and not TWO_SHOT
    TWO_SHOT: tl.constexpr,
    SCATTER: tl.constexpr,  # in one step, and not PUSHED
    MANY: tl.constexpr,  # and not PUSHED
    CODES: tl.constexpr,  # with NORM: also stores FP8 codes, a scale for each CODES columns; 0: does not
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    weight = 0.0
    if NORM:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    before = tl.load(use_counts_ptr + row, cache_modifier=".cg")
    x = _push_row(
        x_ptr, row, parts_apart, before, mask, memory,
        N, BLOCK, RANK, WORLD, ROWS, ROW_BYTES, PUSHED, TWO_SHOT, SCATTER,
    )  # fmt: skip
    if MANY:
        for turn in range(tl.cdiv(rows - row, programs)):
            this = row + turn * programs
            following = this + programs
            next_before = tl.load(use_counts_ptr + following, mask=following < rows, other=0, cache_modifier=".cg")
            next_x = _push_row(
                x_ptr, following, parts_apart, next_before, mask & (following < rows), memory,
                N, BLOCK, RANK, WORLD, ROWS, ROW_BYTES, PUSHED, TWO_SHOT, SCATTER,
            )  # fmt: skip
            _finish_row(
                this, x, before, weight, residual_ptr, out_ptr, codes_ptr, scale_ptr, pitch, residual_out_ptr, memory,
                use_counts_ptr, eps,
                N, BLOCK, RANK, WORLD, ROWS, ROW_BYTES, ADD, NORM, TWO_SHOT, CODES,
            )  # fmt: skip
            x, before = next_x, next_before
    else:
        _finish_row(
            row, x, before, weight, residual_ptr, out_ptr, codes_ptr, scale_ptr, pitch, residual_out_ptr, memory,
            use_counts_ptr, eps,
            N, BLOCK, RANK, WORLD, ROWS, ROW_BYTES, ADD, NORM, TWO_SHOT, CODES,
        )  # fmt: skip


def all_reduce_rows(
    x_TN: Tensor, buffers: PeerBuffers, *, residual_TN: Tensor | None = None, norm_N: Tensor | None = None,
    eps: float = 0.0, pushed: bool = False, two_shot: bool = False, scatter: bool = False,
    into: Quantised | None = None, pdl: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sum over ranks of ``x`` [T, N], returned twice; with ``norm_N``, (rms_norm(residual') * norm, residual')
    where residual' = sum + residual, rounded to x's dtype after the sum and again after the addition. Fresh tensors.

    A row of x has at most ``buffers.row_bytes``; x has a 16-bit dtype or float32. ``residual_TN`` needs ``norm_N``. All
    ranks launch the same sequence of calls, one after the other.
    ``pushed``: the launch right before this one pushed x into the peers' buffers. ``two_shot``, not with ``pushed``,
    changes no bit but the sign of zeros. ``scatter``, with neither of the two: x is [ranks * T, N], and each rank gets
    its T rows of the sum. ``into``, with ``norm_N``, gets the first result as codes, too. With
    ``pushed`` T is at most ``buffers.rows``; otherwise more rows take several launches.
    """
    ranks = len(buffers.memory)
    tokens, width = x_TN.shape[0] // (ranks if scatter else 1), x_TN.shape[1]
    out_TN = x_TN.new_empty(tokens, width) if into is None or into.numbers is None else into.numbers
    normed = norm_N is not None
    residual_out_TN = torch.empty_like(out_TN) if normed else out_TN
    block = triton.next_power_of_2(width)
    warps = max(1, min(MAX_WARPS if ranks <= 4 else MAX_WARPS_OF_MANY, block // 512))
    programs = min(PROGRAMS_OF_MANY // (2 if warps > 8 else 1), PROGRAMS_OF_TWO_SHOTS if two_shot else PROGRAMS_OF_MANY)
    launches = 1 if pushed else -(-tokens // buffers.rows)
    each = -(-tokens // max(1, launches))
    for start in range(0, tokens, max(1, each)):
        rows = min(each, tokens - start)
        here = slice(start, start + rows) if launches > 1 else slice(None)
        many = rows > MOST_AT_ONCE and not pushed
        _all_reduce_kernel[(programs if many else rows,)](
            x_TN[start:] if scatter and launches > 1 else x_TN[here],
            x_TN if residual_TN is None else residual_TN[here], x_TN if norm_N is None else norm_N, out_TN[here],
            *((out_TN, out_TN, 0) if into is None else (into.codes[start:], into.scale[:, start:], into.memory[2])),
            residual_out_TN[here],
            rows=rows, parts_apart=tokens, eps=eps, N=width, BLOCK=block,
            **buffers.arguments(),
            ADD=residual_TN is not None, NORM=normed, PUSHED=pushed, TWO_SHOT=two_shot, SCATTER=scatter, MANY=many,
            CODES=0 if into is None else into.group, PDL=pdl, num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
    return out_TN, residual_out_TN
