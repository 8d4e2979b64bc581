"""Rows of a rank's part of a sum, from the kernel that makes them straight into the other ranks' memory.

Knows: at which address a row of a part lies, in this exchange or the next; what may be sent. Does not know: what makes
the rows, or when somebody may read them (all_reduce_triton.py).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from parallel.comm.peer_buffers import EMPTY

_EMPTY_16 = tl.constexpr(EMPTY)
_EMPTY_32 = tl.constexpr((EMPTY << 16) | (EMPTY & 65535))  # what two of them are as one number


@triton.jit
def is_empty(values):
    """Of each element whether nobody has put anything there, by its bits."""
    if values.dtype.primitive_bitwidth == 16:
        empty = values.to(tl.int16, bitcast=True) == _EMPTY_16
    else:
        empty = values.to(tl.int32, bitcast=True) == _EMPTY_32
    return empty


@triton.jit
def empty_like(values):
    if values.dtype.primitive_bitwidth == 16:
        empty = tl.full(values.shape, _EMPTY_16, tl.int16).to(values.dtype, bitcast=True)
    else:
        empty = tl.full(values.shape, _EMPTY_32, tl.int32).to(values.dtype, bitcast=True)
    return empty


@triton.jit
def sendable(values):
    """``values`` with zero for what would read as empty: minus zero; of 32 bits minus 4.6e-41, or two minus zeros."""
    return tl.where(is_empty(values), 0, values)


@triton.jit
def row_of_part(
    address,
    exchange,
    rank,
    row,
    element: tl.constexpr,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
):
    """Pointers, shaped as ``row``, to where ``rank``'s part of that row begins in the memory at ``address``.

    ``exchange``: how many there were of this row before.
    """
    width: tl.constexpr = ROW_BYTES * 8 // element.primitive_bitwidth
    place = (exchange & 1) * WORLD + rank
    # Nothing is known of an address that was an integer, and stores would be of one element each.
    start = tl.multiple_of(address.to(tl.pointer_type(element)), 16)
    return start + (place.to(tl.int64) * ROWS + row) * width


@triton.jit
def counted(exchanges_ptr, rows, M):
    """How many exchanges there were of each of ``rows``, of which those below M exist. Called after ``gdc_wait``."""
    # Not from an L1 that may have held its line since before the last exchange: a wrong count is a wrong place.
    return tl.load(exchanges_ptr + rows, mask=rows < M, other=0, cache_modifier=".cg")


@triton.jit
def push(
    tile,  # [R, C]
    rows,  # int32 [R]
    columns,  # int32 [C]
    mask,  # [R, 1]: the rows that exist
    exchanges,  # int32 [R]: of these rows, before this one
    memory,  # WORLD addresses
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
):
    """Store columns of this rank's part into every other rank's memory."""
    tile = sendable(tile)
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            begin = row_of_part(memory[rank], exchanges, RANK, rows, tile.dtype, WORLD, ROWS, ROW_BYTES)
            tl.store(begin[:, None] + columns[None, :], tile, mask=mask)
