"""Parts of a sum in the other ranks' memory, flags beside them, and what follows a sum in a decoder.

Knows: where a row of a part lies, in this exchange or the next; how a program says to those of other GPUs that it has
written, and waits until they have. Does not know: which rank sends what to whom (one_shot_triton.py,
two_steps_triton.py).

Flags count a program's exchanges, so they are never reset, and each exchange uses the other one of two places. A rank
that is one exchange ahead writes into the place that nobody reads. It cannot be two ahead: to end the exchange between,
it has heard, from every other rank or from one that had heard from all, that they have begun that exchange, and so have
ended the one before. That holds across graphs, eager launches and different numbers of rows: where to write is told by
a counter on the device, and programs of different rows share nothing.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


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
    """Pointer to where ``rank``'s part of that row begins in the memory at ``address``.

    ``exchange``: how many there were of this row before.
    """
    width: tl.constexpr = ROW_BYTES * 8 // element.primitive_bitwidth
    place = (exchange & 1) * WORLD + rank
    # Nothing is known of an address that was an integer, and stores would be of one element each.
    start = tl.multiple_of(address.to(tl.pointer_type(element)), 16)
    return start + (place.to(tl.int64) * ROWS + row) * width


@triton.jit
def _flags_of(address, row, WORLD: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr):
    """Pointers to a row's flags, one a rank, in the memory at ``address``."""
    return (address + 2 * WORLD * ROWS * ROW_BYTES).to(tl.pointer_type(tl.int32)) + row * WORLD


@triton.jit
def tell(
    memory,
    row,
    exchange,
    MOST: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
):
    """Say to every other rank that this program has written what ``exchange``, counted from 1, wants of this row.

    ``MOST``: a power of two, WORLD at least. The flags are raised side by side: in turn, each would wait for the stores
    before it once more."""
    tl.debug_barrier()  # every thread has written before one thread says so
    ranks = tl.arange(0, MOST)
    addresses = tl.zeros((MOST,), tl.int64)
    for rank in tl.static_range(WORLD):
        addresses = tl.where(ranks == rank, memory[rank], addresses)
    flags = _flags_of(addresses, row, WORLD, ROWS, ROW_BYTES) + RANK
    tl.atomic_xchg(flags, exchange, mask=(ranks < WORLD) & (ranks != RANK), sem="release", scope="sys")


@triton.jit
def tell_one(
    address,
    row,
    exchange,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
):
    """``tell``, to the rank whose memory is at ``address``."""
    tl.debug_barrier()  # as above
    tl.atomic_xchg(_flags_of(address, row, WORLD, ROWS, ROW_BYTES) + RANK, exchange, sem="release", scope="sys")


@triton.jit
def wait_for(
    ranks,
    own_address,
    row,
    exchange,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
):
    """Return once ``ranks``, a number or a block of them, have said so; then what they wrote can be read."""
    _wait_until(_flags_of(own_address, row, WORLD, ROWS, ROW_BYTES) + ranks, exchange)
    tl.debug_barrier()  # each thread has waited for its share of the flags


@triton.jit
def _wait_until(flag_ptrs, exchange):
    """Return, in each thread, once its ``flag_ptrs`` (int32) have reached ``exchange``, modulo 2**32."""
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
        [flag_ptrs, exchange],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def others(MOST: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """[MOST]: every rank but this one, and one of them again where there is none."""
    ranks = tl.arange(0, MOST)
    return tl.where((ranks == RANK) | (ranks >= WORLD), (RANK + 1) % WORLD, ranks)


@triton.jit
def store_summed(
    summed,  # [BLOCK] of the parts' type
    residual,  # the same, with ADD; loaded before the program waited for others, as the weights are
    weight,  # the same, with NORM
    out_ptr,
    residual_out_ptr,
    where,  # of the row's elements
    mask,
    eps,
    N: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
):
    """The row's sum with residual added and normed as wanted, rounded after each of the three."""
    if ADD:
        summed = (summed.to(tl.float32) + residual.to(tl.float32)).to(summed.dtype)
    if NORM:
        tl.store(residual_out_ptr + where, summed, mask=mask)
        h = summed.to(tl.float32)
        summed = (h * tl.rsqrt(tl.sum(h * h, 0) / N + eps) * weight.to(tl.float32)).to(summed.dtype)
    tl.store(out_ptr + where, summed, mask=mask)
