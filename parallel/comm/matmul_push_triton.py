"""Device functions by which a matmul kernel pushes its tile of a partial sum straight into the peers' buffers.

Knows: the address of a row of a contribution, which values may be sent, how a sentinel differs from data. Does not
know: what makes the rows, when they may be read (all_reduce_triton.py).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from parallel.comm.peer_buffers import SENTINEL

_SENTINEL_16 = tl.constexpr(SENTINEL)
_SENTINEL_32 = tl.constexpr((SENTINEL << 16) | (SENTINEL & 65535))  # two of them side by side, as one number


@triton.jit
def is_sentinel(values):
    """Whether each element is the sentinel, compared as bits: it is not written yet."""
    if values.dtype.primitive_bitwidth == 16:
        found = values.to(tl.int16, bitcast=True) == _SENTINEL_16
    else:
        found = values.to(tl.int32, bitcast=True) == _SENTINEL_32
    return found


@triton.jit
def sentinel_like(values):
    """Sentinels in the shape and dtype of ``values``."""
    if values.dtype.primitive_bitwidth == 16:
        filled = tl.full(values.shape, _SENTINEL_16, tl.int16).to(values.dtype, bitcast=True)
    else:
        filled = tl.full(values.shape, _SENTINEL_32, tl.int32).to(values.dtype, bitcast=True)
    return filled


@triton.jit
def sendable(values):
    """``values`` with zero for what equals the sentinel: minus zero; in 32 bits minus 4.6e-41, or two minus zeros."""
    return tl.where(is_sentinel(values), 0, values)


@triton.jit
def part_row(
    address, use, rank, row,
    element: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr,
):  # fmt: skip
    """Pointers, shaped as ``row``, to ``rank``'s contribution to that row in the buffers at ``address``.

    ``use``: how often the row was used before.
    """
    width: tl.constexpr = ROW_BYTES * 8 // element.primitive_bitwidth
    slot = (use & 1) * WORLD + rank
    # Triton knows nothing of an address that was an integer: without the hint it would store element by element.
    start = tl.multiple_of(address.to(tl.pointer_type(element)), 16)
    return start + (slot.to(tl.int64) * ROWS + row) * width


@triton.jit
def load_use_counts(use_counts_ptr, rows, M):
    """How often each of ``rows`` below M was used before. Call it after ``gdc_wait``."""
    # Past the L1, whose line may be older than the last use: a stale counter means the wrong buffer.
    return tl.load(use_counts_ptr + rows, mask=rows < M, other=0, cache_modifier=".cg")


@triton.jit
def push(
    tile,  # [R, C]
    rows,  # int32 [R]
    columns,  # int32 [C]
    mask,  # [R, 1]: which rows exist
    use_counts,  # int32 [R]: how often these rows were used before
    memory,  # WORLD addresses
    RANK: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr,
):  # fmt: skip
    """Stores some columns of this rank's contribution into every peer's buffers."""
    tile = sendable(tile)
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            begin = part_row(memory[rank], use_counts, RANK, rows, tile.dtype, WORLD, ROWS, ROW_BYTES)
            tl.store(begin[:, None] + columns[None, :], tile, mask=mask)
