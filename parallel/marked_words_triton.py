"""Parts of a sum as words that name their exchange, from the kernel that makes them into the other ranks' memory.

Knows: how two 16-bit numbers and the exchange make one word, where the words of a row lie. Does not know: what makes
the rows, or when somebody may read them (marked_sum_triton.py).

A word is eight bytes and stored at once, so nobody sees a half of it: NCCL's LL protocol. Twice the bytes of the part
travel, but nothing has to be waited for before a flag is raised, which is a trip over the link there and back.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def payload_of(low, high):
    """int32: ``low`` and above it ``high``, both of a 16-bit type."""
    low_bits = low.to(tl.int16, bitcast=True).to(tl.int32) & 65535
    return (high.to(tl.int16, bitcast=True).to(tl.int32) << 16) | low_bits


@triton.jit
def with_mark(payload, mark):
    """int64: the int32 ``payload`` under the int32 ``mark``."""
    return (payload.to(tl.int64) & 4294967295) | (mark.to(tl.int64) << 32)


@triton.jit
def words_of_part(address, mark, rank, row, WORLD: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr):
    """Pointers, shaped as ``row``, to the first word of ``rank``'s part of that row in the memory at ``address``.

    ``mark``: the exchange it is of, which is how many there were of this row before, and one.
    """
    place = (mark & 1) * WORLD + rank
    # Nothing is known of an address that was an integer, and stores would be of one word each.
    start = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
    return start + (place.to(tl.int64) * ROWS + row) * (ROW_BYTES // 4)


@triton.jit
def next_marks(exchanges_ptr, rows, M):
    """What marks the next exchange of each of ``rows``, of which those below M exist. Called after ``gdc_wait``."""
    # Not from an L1 that may have held its line since before the last exchange: a wrong count is a wrong place.
    return tl.load(exchanges_ptr + rows, mask=rows < M, other=0, cache_modifier=".cg") + 1


@triton.jit
def push(
    tile,  # [R, C] of a 16-bit type, C even
    rows,  # int32 [R]
    first_column,  # even
    mask,  # [R, 1]: the rows that exist
    marks,  # int32 [R]: of these rows' exchange
    memory,  # WORLD addresses
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
):
    """Store columns of this rank's part into every other rank's memory."""
    pairs: tl.constexpr = tile.shape[1] // 2
    low, high = tl.split(tl.reshape(tile, (tile.shape[0], pairs, 2)))
    words = with_mark(payload_of(low, high), marks[:, None])
    columns = first_column // 2 + tl.arange(0, pairs)
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            begin = words_of_part(memory[rank], marks, RANK, rows, WORLD, ROWS, ROW_BYTES)
            tl.store(begin[:, None] + columns[None, :], words, mask=mask)
