"""All-gather of a few 64-bit keys a row in one kernel: what ranks with shares of a vocabulary exchange.

Knows: which words travel, and how a program sees that a peer's have arrived. Does not know: what a key means, process
groups, which gathers are small enough (symmetric_all_reduce.py), the layout of buffers (peer_buffers.py).

A program handles one row. It pushes its keys into the peers' buffers, polls its own for theirs, and restores the
sentinel, as a one-shot all-reduce does; all_reduce_triton.py says why two buffers are enough, and both may follow each
other over the same buffers in any order.

A key has arrived when neither of its halves is the sentinel, so a store that came in two pieces would do no harm. No
half of a key that is sent may equal it: those of runtime/execute/sampling/packed_argmax.py never do. The high half is
an ordered score, and 0x80008000 would be that of a NaN, which packs as another one; the low half is not negative.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parallel.comm.matmul_push_triton import is_sentinel, part_row
from parallel.comm.peer_buffers import SENTINEL, PeerBuffers

_THREADS = 32  # of a warp
_LANES_A_WARP = 256
_LEAST = tl.constexpr(-(2**63))
_HALF = SENTINEL & 0xFFFF
_SENTINEL_64 = tl.constexpr((SENTINEL << 48) | (_HALF << 32) | (_HALF << 16) | _HALF)


@triton.jit
def _gather_keys_kernel(
    keys_ptr,  # int64 [rows, width]
    out_ptr,  # int64 [rows, WORLD * X]
    memory,  # WORLD addresses of peer buffers (parallel/comm/peer_buffers.py)
    use_counts_ptr,  # int32 [ROWS], of this rank
    width,
    WIDTH: tl.constexpr,  # a power of two, at least width
    LARGEST: tl.constexpr,  # the largest key of a row travels alone: X is 1; else X is width
    LANES: tl.constexpr,  # powers of two from WORLD and X on, multiplied; at least one a thread
    RANK: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    from_row, to_row = keys_ptr + row.to(tl.int64) * width, out_ptr + row.to(tl.int64) * WORLD * width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    before = tl.load(use_counts_ptr + row, cache_modifier=".cg")
    each: tl.constexpr = 1 if LARGEST else WIDTH
    own = tl.arange(0, each)
    kept = own < width
    if LARGEST:
        columns = tl.arange(0, WIDTH)
        largest = tl.max(tl.load(from_row + columns, mask=columns < width, other=_LEAST), 0)
        keys = tl.full((1,), largest, tl.int64)
        to_row = out_ptr + row.to(tl.int64) * WORLD
        width = 1
    else:
        keys = tl.load(from_row + own, mask=kept, other=_LEAST)
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            theirs = part_row(memory[rank], before, RANK, row, tl.int64, WORLD, ROWS, ROW_BYTES)
            tl.store(theirs + own, keys, mask=kept)
    tl.store(to_row + RANK * width + own, keys, mask=kept)

    # No key is read by two threads: one might see it arrive before the other does.
    lanes = tl.arange(0, LANES)
    rank, column = lanes // each, lanes % each
    asked = (rank < WORLD) & (rank != RANK) & (column < width)
    mine = part_row(memory[RANK], before, rank, row, tl.int64, WORLD, ROWS, ROW_BYTES) + column
    found = tl.zeros((LANES,), tl.int64)
    missing = 1
    while missing != 0:
        found = tl.load(mine, mask=asked, other=0, volatile=True)
        late = is_sentinel(found.to(tl.int32)) | is_sentinel((found >> 32).to(tl.int32))
        missing = tl.max(late.to(tl.int32), 0)
    tl.store(mine, tl.full((LANES,), _SENTINEL_64, tl.int64), mask=asked)
    tl.debug_barrier()  # every thread has read the counter before one thread changes it
    tl.store(use_counts_ptr + row, before + 1)
    tl.store(to_row + rank * width + column, found, mask=asked)


def gather_keys(keys_RX: Tensor, buffers: PeerBuffers, *, largest: bool, pdl: bool) -> Tensor:
    """Every rank's keys of each row, int64 [R, ranks * X], rank 0's first; ``largest``: of a rank's keys of a row its
    largest alone, [R, ranks]. Fresh.

    ``keys_RX`` int64, contiguous, without a half that is the sentinel (see the module). R is at most ``buffers.rows``,
    and 8 X at most ``buffers.row_bytes`` where all travel. All ranks launch the same sequence of calls, one after the
    other.
    """
    ranks, (rows, width) = len(buffers.memory), keys_RX.shape
    out_RX = keys_RX.new_empty(rows, ranks if largest else ranks * width)
    padded = triton.next_power_of_2(width)
    lanes = triton.next_power_of_2(ranks) * (1 if largest else padded)
    warps = max(1, min(8, lanes // _LANES_A_WARP))
    _gather_keys_kernel[(rows,)](
        keys_RX, out_RX,
        width=width, WIDTH=padded, LARGEST=largest, LANES=max(lanes, _THREADS * warps),
        **buffers.arguments(),
        PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out_RX
