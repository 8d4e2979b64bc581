"""Every group's tokens, with their choices of experts, on every rank of an exchange: one launch, and no copy after it.

Knows: which words a row has, and where each of them belongs when it has come. Does not know: process groups, which
exchanges are small enough (symmetric_exchange.py), where rows lie while they travel (peer_buffers.py). The way back, a
sum of which each rank keeps its own rows, is a form of the sum (all_reduce_triton.py, SCATTER).

A program has one row of each group. A row travels as words of 32 bits, hidden state first, then the float32 weights and
the int32 ids of its choices, so one kernel serves every type of hidden state. It goes into the other ranks' places,
which are empty until it is there, and what makes that safe is said in all_reduce_triton.py: a program sends its row to
every other rank, waits for theirs and empties where they were, as a sum in one step does. SCATTER does so, too, by
other rows. So gathers and scatter-sums can follow each other in one memory in any order, with different numbers of
rows, in graphs and outside, as long as all of its ranks launch the same sequence and no launch waits for one that is
behind it in its stream. The sums inside a group wait in memory of their own.

No word that travels is 0x80008000, which reads as empty: zero goes in its place. Only hidden states have it, as two
minus zeros side by side or as minus 4.6e-41: a weight is no negative number, NaN has other bits, an id is -1 or more.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parallel.comm.all_reduce_triton import MOST_WARPS, MOST_WARPS_OF_MANY
from parallel.comm.matmul_push_triton import empty_like, is_empty, row_of_part, sendable
from parallel.comm.peer_buffers import PeerBuffers

_THREADS = 32  # of a warp
_VECTOR = 4  # words of the widest load and store


@triton.jit(do_not_specialize=["tokens"])  # which differs from rank to rank and from step to step
def _gather_kernel(
    hidden_ptr,  # int32 [tokens, H]: as words
    weights_ptr,  # int32 [tokens, C]
    ids_ptr,  # int32 [tokens, C]
    numbers_ptr,  # int32, by id
    hidden_out_ptr,  # of WORLD times as many rows as there are programs
    weights_out_ptr,
    numbers_out_ptr,
    tokens,
    memory,  # WORLD addresses, with a layout that parallel/comm/peer_buffers.py knows
    exchanges_ptr,  # int32 [ROWS], of this rank
    H: tl.constexpr,
    C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    LANES: tl.constexpr,  # for the choices of all others, and no fewer than there are threads
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
    before = tl.load(exchanges_ptr + row, cache_modifier=".cg")
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            theirs = row_of_part(memory[rank], before, RANK, row, tl.int32, WORLD, ROWS, ROW_BYTES)
            tl.store(theirs + cols, hidden, mask=wide)
            tl.store(theirs + H + choices, weights, mask=asked)
            tl.store(theirs + H + C + choices, ids, mask=asked)
    at = (RANK * rows + row).to(tl.int64)
    tl.store(hidden_out_ptr + at * H + cols, hidden, mask=wide)
    tl.store(weights_out_ptr + at * C + choices, weights, mask=asked)
    numbers = tl.load(numbers_ptr + ids, mask=asked & (ids >= 0), other=-1)
    tl.store(numbers_out_ptr + at * C + choices, numbers, mask=asked)

    # Of all others at once. No word is read by two threads, of which one might see it come before the other.
    other = tl.arange(0, OTHERS)[:, None]
    ranks = other + (other >= RANK).to(tl.int32)
    wide = wide[None, :] & (other < WORLD - 1)
    hidden_from = row_of_part(memory[RANK], before, ranks, row, tl.int32, WORLD, ROWS, ROW_BYTES) + cols[None, :]
    lanes = tl.arange(0, LANES)
    other, choices = lanes // BLOCK_C, lanes % BLOCK_C
    ranks_of_choices = other + (other >= RANK).to(tl.int32)
    asked = (choices < C) & (other < WORLD - 1)
    weights_from = row_of_part(memory[RANK], before, ranks_of_choices, row, tl.int32, WORLD, ROWS, ROW_BYTES)
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
        late = tl.max((is_empty(weights) | is_empty(ids)).to(tl.int32), 0)
        missing = late | tl.max(is_empty(hidden).to(tl.int32))
    tl.store(hidden_from, empty_like(hidden), mask=wide)
    tl.store(weights_from, empty_like(weights), mask=asked)
    tl.store(ids_from, empty_like(ids), mask=asked)
    tl.debug_barrier()  # every thread has read the count before one thread changes it
    tl.store(exchanges_ptr + row, before + 1)
    at = (ranks * rows + row).to(tl.int64)
    tl.store(hidden_out_ptr + at * H + cols[None, :], hidden, mask=wide)
    at = (ranks_of_choices * rows + row).to(tl.int64) * C + choices
    tl.store(weights_out_ptr + at, weights, mask=asked)
    tl.store(numbers_out_ptr + at, tl.load(numbers_ptr + ids, mask=asked & (ids >= 0), other=-1), mask=asked)


def gathered(
    hidden_TN: Tensor,
    weights_TC: Tensor,
    ids_TC: Tensor,
    rows: int,
    numbers_E: Tensor,
    places: PeerBuffers,
    *,
    pdl: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``hidden``, ``weights`` float32 and numbers int32 of R * rows tokens, rank 0's first. Fresh tensors.

    A rank's T tokens are filled up to ``rows`` with zeros and ids of -1; a number is ``numbers_E[id]``, int32, -1 for
    an id of -1. All three are contiguous, ids int32 and -1 or more. ``rows`` is at most ``places.rows``; a row of
    ``hidden`` is a multiple of 16 bytes, and with 8 more for each choice at most ``places.row_bytes``. All ranks launch
    the same sequence of calls, with the same ``rows``, one after the other; T may differ.
    """
    ranks, (tokens, choices) = len(places.memory), ids_TC.shape
    hidden_YN = hidden_TN.new_empty(ranks * rows, hidden_TN.shape[1])
    weights_YC = weights_TC.new_empty(ranks * rows, choices)
    numbers_YC = ids_TC.new_empty(ranks * rows, choices)
    words_TH = hidden_TN.view(torch.int32)
    block_h = max(_THREADS * _VECTOR, triton.next_power_of_2(words_TH.shape[1]))
    warps = max(1, min(MOST_WARPS if ranks <= 4 else MOST_WARPS_OF_MANY, block_h // (2 * _THREADS * _VECTOR)))
    others, block_c = (triton.next_power_of_2(count) for count in (ranks - 1, choices))
    _gather_kernel[(rows,)](
        words_TH,
        weights_TC.view(torch.int32),
        ids_TC,
        numbers_E,
        hidden_YN.view(torch.int32),
        weights_YC.view(torch.int32),
        numbers_YC,
        tokens,
        H=words_TH.shape[1],
        C=choices,
        BLOCK_H=block_h,
        BLOCK_C=block_c,
        LANES=max(others * block_c, _THREADS * warps),
        OTHERS=others,
        **places.arguments(),
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return hidden_YN, weights_YC, numbers_YC
