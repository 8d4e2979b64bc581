"""Dispatch between DP groups in one kernel: every group's tokens and routing on every rank, and no copy afterwards.

Knows: the words of a row, and where each belongs on arrival. Does not know: process groups, which exchanges are small
enough (symmetric_exchange.py), the layout of buffers (peer_buffers.py). Combine, the way back, is the reduce-scatter of
all_reduce_triton.py (SCATTER).

A program handles one row of each group, or of more than 512 rows several. A row travels as 32-bit words: hidden state,
then the float32 weights and the int32 ids of its experts; so one kernel serves every dtype of hidden state. The program
pushes its row into the peers' buffers, polls its own for theirs, and restores the sentinel, exactly as a one-shot
all-reduce does; all_reduce_triton.py says why that is safe, and how many rows are shared out among programs. Dispatches
and reduce-scatters may therefore follow each other over the same buffers in any order, with different numbers of rows,
in graphs and outside, as long as all ranks launch the same sequence and no launch waits for a later one in its
stream. All-reduces inside a group have separate buffers.

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

from parallel.comm.all_reduce_triton import MAX_WARPS, MAX_WARPS_OF_MANY, MOST_AT_ONCE, PROGRAMS_OF_MANY
from parallel.comm.matmul_push_triton import is_sentinel, part_row, sendable, sentinel_like
from parallel.comm.peer_buffers import PeerBuffers

_THREADS = 32  # of a warp
_VECTOR = 4  # words of the widest load and store


@triton.jit
def _push_row(
    row,  # of this launch; ``there``: whether it has such a row
    there,
    token,  # which of this rank's that is
    tokens,
    before,  # how often the row was used
    hidden_ptr, weights_ptr, ids_ptr, memory,
    H: tl.constexpr, C: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr,
):  # fmt: skip
    """Sends a token to every peer; returns its hidden state [BLOCK_H], weights and ids [BLOCK_C]."""
    cols, choices = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_C)
    wide, asked = (cols < H) & there, (choices < C) & there
    real = token < tokens
    at = token.to(tl.int64)
    hidden = sendable(tl.load(hidden_ptr + at * H + cols, mask=wide & real, other=0))
    weights = sendable(tl.load(weights_ptr + at * C + choices, mask=asked & real, other=0))
    ids = sendable(tl.load(ids_ptr + at * C + choices, mask=asked & real, other=-1))
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            theirs = part_row(memory[rank], before, RANK, row, tl.int32, WORLD, ROWS, ROW_BYTES)
            tl.store(theirs + cols, hidden, mask=wide)
            tl.store(theirs + H + choices, weights, mask=asked)
            tl.store(theirs + H + C + choices, ids, mask=asked)
    return hidden, weights, ids


@triton.jit
def _finish_row(
    row, token, total, hidden, weights, ids, before, local_ptr, hidden_out_ptr, weights_out_ptr, local_out_ptr, memory,
    use_counts_ptr,
    H: tl.constexpr, C: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, LANES: tl.constexpr,
    OTHERS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr,
):  # fmt: skip
    """Writes this rank's token, waits for the peers' of the same number, and writes those."""
    cols, choices = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_C)
    wide, asked = cols < H, choices < C
    at = (RANK * total + token).to(tl.int64)
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
    their_hidden = tl.zeros((OTHERS, BLOCK_H), tl.int32)
    their_weights = tl.zeros((LANES,), tl.int32)
    their_ids = tl.zeros((LANES,), tl.int32)
    missing = 1
    while missing != 0:
        their_hidden = tl.load(hidden_from, mask=wide, other=0, volatile=True)
        their_weights = tl.load(weights_from, mask=asked, other=0, volatile=True)
        their_ids = tl.load(ids_from, mask=asked, other=0, volatile=True)
        late = tl.max((is_sentinel(their_weights) | is_sentinel(their_ids)).to(tl.int32), 0)
        missing = late | tl.max(is_sentinel(their_hidden).to(tl.int32))
    tl.store(hidden_from, sentinel_like(their_hidden), mask=wide)
    tl.store(weights_from, sentinel_like(their_weights), mask=asked)
    tl.store(ids_from, sentinel_like(their_ids), mask=asked)
    tl.debug_barrier()  # every thread has read the counter before one thread changes it
    tl.store(use_counts_ptr + row, before + 1)
    at = (ranks * total + token).to(tl.int64)
    tl.store(hidden_out_ptr + at * H + cols[None, :], their_hidden, mask=wide)
    at = (ranks_of_choices * total + token).to(tl.int64) * C + choices
    tl.store(weights_out_ptr + at, their_weights, mask=asked)
    tl.store(local_out_ptr + at, tl.load(local_ptr + their_ids, mask=asked & (their_ids >= 0), other=-1), mask=asked)


@triton.jit(do_not_specialize=["tokens", "first", "rows", "total"])  # they differ between ranks, launches and steps
def _gather_kernel(
    hidden_ptr,  # int32 [tokens, H], as words
    weights_ptr,  # int32 [tokens, C]
    ids_ptr,  # int32 [tokens, C]
    local_ptr,  # int32, by expert id
    hidden_out_ptr,  # [WORLD * total, ...], like the next two
    weights_out_ptr, local_out_ptr, tokens,
    first,  # row of all that this launch begins with
    rows,  # of this launch, with MANY; else there is a program for each
    total,  # rows of all launches, from each rank
    memory,  # WORLD addresses of peer buffers (parallel/comm/peer_buffers.py)
    use_counts_ptr,  # int32 [ROWS], of this rank
    H: tl.constexpr, C: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr,
    LANES: tl.constexpr,  # for the choices of all peers, and at least one a thread
    OTHERS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr,
    MANY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    programs = tl.num_programs(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    before = tl.load(use_counts_ptr + row, cache_modifier=".cg")
    hidden, weights, ids = _push_row(
        row, True, first + row, tokens, before, hidden_ptr, weights_ptr, ids_ptr, memory,
        H, C, BLOCK_H, BLOCK_C, RANK, WORLD, ROWS, ROW_BYTES,
    )  # fmt: skip
    if MANY:
        for turn in range(tl.cdiv(rows - row, programs)):
            this = row + turn * programs
            following = this + programs
            there = following < rows
            next_before = tl.load(use_counts_ptr + following, mask=there, other=0, cache_modifier=".cg")
            next_hidden, next_weights, next_ids = _push_row(
                following, there, first + following, tokens, next_before, hidden_ptr, weights_ptr, ids_ptr, memory,
                H, C, BLOCK_H, BLOCK_C, RANK, WORLD, ROWS, ROW_BYTES,
            )  # fmt: skip
            _finish_row(
                this, first + this, total, hidden, weights, ids, before,
                local_ptr, hidden_out_ptr, weights_out_ptr, local_out_ptr, memory, use_counts_ptr,
                H, C, BLOCK_H, BLOCK_C, LANES, OTHERS, RANK, WORLD, ROWS, ROW_BYTES,
            )  # fmt: skip
            hidden, weights, ids, before = next_hidden, next_weights, next_ids, next_before
    else:
        _finish_row(
            row, first + row, total, hidden, weights, ids, before,
            local_ptr, hidden_out_ptr, weights_out_ptr, local_out_ptr, memory, use_counts_ptr,
            H, C, BLOCK_H, BLOCK_C, LANES, OTHERS, RANK, WORLD, ROWS, ROW_BYTES,
        )  # fmt: skip


def dispatch_rows(
    hidden_TN: Tensor, weights_TC: Tensor, ids_TC: Tensor, rows: int, local_E: Tensor, buffers: PeerBuffers, *,
    pdl: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``hidden``, ``weights`` float32 and local expert numbers int32 of R * rows tokens, rank 0's first. Fresh tensors.

    A rank's T tokens are padded to ``rows`` with zeros and ids of -1. A local number is ``local_E[id]``, int32, or -1
    for an id of -1. All inputs are contiguous, ids int32 and at least -1; a row of ``hidden`` is a multiple of 16
    bytes, and with 8 more bytes for each choice at most ``buffers.row_bytes``. More rows than ``buffers.rows`` take
    several launches. All ranks launch the same sequence of calls, with the same ``rows``, one after the other; T may
    differ.
    """
    ranks, (tokens, choices) = len(buffers.memory), ids_TC.shape
    hidden_YN = hidden_TN.new_empty(ranks * rows, hidden_TN.shape[1])
    weights_YC = weights_TC.new_empty(ranks * rows, choices)
    local_YC = ids_TC.new_empty(ranks * rows, choices)
    words_TH = hidden_TN.view(torch.int32)
    block_h = max(_THREADS * _VECTOR, triton.next_power_of_2(words_TH.shape[1]))
    warps = max(1, min(MAX_WARPS if ranks <= 4 else MAX_WARPS_OF_MANY, block_h // (2 * _THREADS * _VECTOR)))
    others, block_c = (triton.next_power_of_2(count) for count in (ranks - 1, choices))
    each = -(-rows // -(-rows // buffers.rows))
    for first in range(0, rows, each):
        here = min(each, rows - first)
        many = here > MOST_AT_ONCE
        _gather_kernel[(PROGRAMS_OF_MANY // (2 if warps > 8 else 1) if many else here,)](
            words_TH, weights_TC.view(torch.int32), ids_TC, local_E, hidden_YN.view(torch.int32),
            weights_YC.view(torch.int32), local_YC, tokens, first, here, rows,
            H=words_TH.shape[1], C=choices, BLOCK_H=block_h, BLOCK_C=block_c,
            LANES=max(others * block_c, _THREADS * warps), OTHERS=others,
            **buffers.arguments(),
            MANY=many, PDL=pdl, num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
    return hidden_YN, weights_YC, local_YC
