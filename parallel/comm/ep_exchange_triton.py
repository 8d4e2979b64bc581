"""Dispatch between DP groups in one kernel: every group's tokens and routing on every rank, and no copy afterwards.

Knows: the words of a row, and where each belongs on arrival. Does not know: process groups, which exchanges are small
enough (symmetric_exchange.py), the layout of buffers (peer_buffers.py). Combine, the way back, is the reduce-scatter of
all_reduce_triton.py (SCATTER).

A program handles one row of each group. A row travels as 32-bit words: hidden state, then the float32 weights and the
int32 ids of its experts; so one kernel serves every dtype of hidden state. The program pushes its row into the peers'
buffers, polls its own for theirs, and restores the sentinel, exactly as a one-shot all-reduce does;
all_reduce_triton.py says why that is safe. Dispatches and reduce-scatters may therefore follow each other over the same
buffers in any order, with different numbers of rows, in graphs and outside, as long as all ranks launch the same
sequence and no launch waits for one behind it in its stream. All-reduces inside a group have buffers of their own.

No word that travels is 0x80008000, the sentinel: zero takes its place. Only hidden states contain it, as two adjacent
minus zeros or as minus 4.6e-41: a weight is not negative, its NaN has other bits, and an id is at least -1.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parallel.comm.all_reduce_triton import MAX_WARPS, MAX_WARPS_OF_MANY
from parallel.comm.matmul_push_triton import is_sentinel, part_row, sendable, sentinel_like
from parallel.comm.peer_buffers import PeerBuffers

_THREADS = 32  # of a warp
_VECTOR = 4  # words of the widest load and store


@triton.jit(do_not_specialize=["tokens"])  # it differs between ranks and steps
def _gather_kernel(
    hidden_ptr,  # int32 [tokens, H], as words
    weights_ptr,  # int32 [tokens, C]
    ids_ptr,  # int32 [tokens, C]
    local_ptr,  # int32, by expert id
    hidden_out_ptr,  # [WORLD * programs, ...], like the next two
    weights_out_ptr,
    local_out_ptr,
    tokens,
    memory,  # WORLD addresses of peer buffers (parallel/comm/peer_buffers.py)
    use_counts_ptr,  # int32 [ROWS], of this rank
    H: tl.constexpr,
    C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    LANES: tl.constexpr,  # for the choices of all peers, and at least one a thread
    OTHERS: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    rows = tl.num_programs(0)
    cols, choices = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_C)
    wide, asked = cols < H, choices < C
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    real = row < tokens
    at = row.to(tl.int64)
    hidden = sendable(tl.load(hidden_ptr + at * H + cols, mask=wide & real, other=0))
    weights = sendable(tl.load(weights_ptr + at * C + choices, mask=asked & real, other=0))
    ids = sendable(tl.load(ids_ptr + at * C + choices, mask=asked & real, other=-1))
    before = tl.load(use_counts_ptr + row, cache_modifier=".cg")
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            theirs = part_row(memory[rank], before, RANK, row, tl.int32, WORLD, ROWS, ROW_BYTES)
            tl.store(theirs + cols, hidden, mask=wide)
            tl.store(theirs + H + choices, weights, mask=asked)
            tl.store(theirs + H + C + choices, ids, mask=asked)
    at = (RANK * rows + row).to(tl.int64)
    tl.store(hidden_out_ptr + at * H + cols, hidden, mask=wide)
    tl.store(weights_out_ptr + at * C + choices, weights, mask=asked)
    numbers = tl.load(local_ptr + ids, mask=asked & (ids >= 0), other=-1)
    tl.store(local_out_ptr + at * C + choices, numbers, mask=asked)

    # All peers at once. No word is read by two threads: one might see it arrive before the other does.
    other = tl.arange(0, OTHERS)[:, None]
    ranks = other + (other >= RANK).to(tl.int32)
    wide = wide[None, :] & (other < WORLD - 1)
    hidden_from = part_row(memory[RANK], before, ranks, row, tl.int32, WORLD, ROWS, ROW_BYTES) + cols[None, :]
    lanes = tl.arange(0, LANES)
    other, choices = lanes // BLOCK_C, lanes % BLOCK_C
    ranks_of_choices = other + (other >= RANK).to(tl.int32)
    asked = (choices < C) & (other < WORLD - 1)
    weights_from = part_row(memory[RANK], before, ranks_of_choices, row, tl.int32, WORLD, ROWS, ROW_BYTES)
    weights_from += H + choices
    ids_from = weights_from + C
    hidden = tl.zeros((OTHERS, BLOCK_H), tl.int32)
    weights = tl.zeros((LANES,), tl.int32)
    ids = tl.zeros((LANES,), tl.int32)
    missing = 1
    while missing != 0:
        hidden = tl.load(hidden_from, mask=wide, other=0, volatile=True)
        weights = tl.load(weights_from, mask=asked, other=0, volatile=True)
        ids = tl.load(ids_from, mask=asked, other=0, volatile=True)
        late = tl.max((is_sentinel(weights) | is_sentinel(ids)).to(tl.int32), 0)
        missing = late | tl.max(is_sentinel(hidden).to(tl.int32))
    tl.store(hidden_from, sentinel_like(hidden), mask=wide)
    tl.store(weights_from, sentinel_like(weights), mask=asked)
    tl.store(ids_from, sentinel_like(ids), mask=asked)
    tl.debug_barrier()  # every thread has read the counter before one thread changes it
    tl.store(use_counts_ptr + row, before + 1)
    at = (ranks * rows + row).to(tl.int64)
    tl.store(hidden_out_ptr + at * H + cols[None, :], hidden, mask=wide)
    at = (ranks_of_choices * rows + row).to(tl.int64) * C + choices
    tl.store(weights_out_ptr + at, weights, mask=asked)
    tl.store(local_out_ptr + at, tl.load(local_ptr + ids, mask=asked & (ids >= 0), other=-1), mask=asked)


def dispatch_rows(
    hidden_TN: Tensor,
    weights_TC: Tensor,
    ids_TC: Tensor,
    rows: int,
    local_E: Tensor,
    buffers: PeerBuffers,
    *,
    pdl: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``hidden``, ``weights`` float32 and local expert numbers int32 of R * rows tokens, rank 0's first. Fresh tensors.

    A rank's T tokens are padded to ``rows`` with zeros and ids of -1. A local number is ``local_E[id]``, int32, or -1
    for an id of -1. All inputs are contiguous, ids int32 and at least -1. ``rows`` is at most ``buffers.rows``; a row
    of ``hidden`` is a multiple of 16 bytes, and with 8 more bytes for each choice at most ``buffers.row_bytes``. All
    ranks launch the same sequence of calls, with the same ``rows``, one after the other; T may differ.
    """
    ranks, (tokens, choices) = len(buffers.memory), ids_TC.shape
    hidden_YN = hidden_TN.new_empty(ranks * rows, hidden_TN.shape[1])
    weights_YC = weights_TC.new_empty(ranks * rows, choices)
    local_YC = ids_TC.new_empty(ranks * rows, choices)
    words_TH = hidden_TN.view(torch.int32)
    block_h = max(_THREADS * _VECTOR, triton.next_power_of_2(words_TH.shape[1]))
    warps = max(1, min(MAX_WARPS if ranks <= 4 else MAX_WARPS_OF_MANY, block_h // (2 * _THREADS * _VECTOR)))
    others, block_c = (triton.next_power_of_2(count) for count in (ranks - 1, choices))
    _gather_kernel[(rows,)](
        words_TH,
        weights_TC.view(torch.int32),
        ids_TC,
        local_E,
        hidden_YN.view(torch.int32),
        weights_YC.view(torch.int32),
        local_YC,
        tokens,
        H=words_TH.shape[1],
        C=choices,
        BLOCK_H=block_h,
        BLOCK_C=block_c,
        LANES=max(others * block_c, _THREADS * warps),
        OTHERS=others,
        **buffers.arguments(),
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return hidden_YN, weights_YC, local_YC
