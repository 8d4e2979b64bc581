"""Searches for a threshold among tokens, and what they are made of: a few in registers, or a source of any size.

Knows: exact sums of integers over a list's or a row's tokens, a quarter of the range a pass until few are
left. Does not know: what is searched for (threshold_triton.py, shares_triton.py), who wrote the list
(listing_triton.py).

A token is a packed (score, id); the score's part, as an ordered integer, is called its rank here.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from runtime.execute.sampling.draw_triton import exp_weights, ordered, unordered

SWEPT = 1024  # tokens at a time of a search through many


@triton.jit
def highest_reaching(rank, amount, target, low, high):
    """The highest t in [low, high] (int64) whose ranks >= t reach the target together; low if there is none."""
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        if tl.sum(tl.where(rank >= middle.to(tl.int32), amount, 0), 0) >= target:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def block_of(source_ptr, start, size, factor, vocab_start, LIST: tl.constexpr, BLOCK: tl.constexpr):
    """A block of tokens, from a list or made of logits; those past ``size`` are below every token."""
    index = start + tl.arange(0, BLOCK)
    if LIST:
        token = tl.load(source_ptr + index, mask=index < size, other=-9223372036854775808)
    else:
        score = tl.load(source_ptr + index, mask=index < size, other=0.0).to(tl.float32) * factor
        token = (ordered(score).to(tl.int64) << 32) | (0x7FFFFFFF - (index + vocab_start)).to(tl.int64)
        token = tl.where(index < size, token, -9223372036854775808)
    return token


@triton.jit
def amounts(rank, largest, floor, BY_WEIGHT: tl.constexpr):
    """Each token's weight, or 1; 0 under the floor."""
    counts = rank >= floor
    if BY_WEIGHT:
        amount = tl.where(counts, exp_weights(unordered(rank) - largest), 0)
    else:
        amount = counts.to(tl.int64)
    return amount


@triton.jit
def reach(
    source_ptr, size, scratch_ptr, factor, largest, floor, target, low, high, over, at_or_above_low, above_high,
    BY_WEIGHT: tl.constexpr, LIST: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``highest_reaching`` of a source of any size, whose tokens under ``floor`` do not count; ``low`` reaches it.

    ``over``: the amount above ``high``; ``above_high``, ``at_or_above_low``: at most so many tokens less than those are
    between the two.
    """
    while (low < high) & (at_or_above_low - above_high > TILE):
        step = tl.maximum((high - low + 1) >> 2, 1)
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        amount_1, amount_2, amount_3 = (
            tl.zeros([BLOCK], tl.int64),
            tl.zeros([BLOCK], tl.int64),
            tl.zeros([BLOCK], tl.int64),
        )
        count_1, count_2, count_3 = (
            tl.zeros([BLOCK], tl.int32),
            tl.zeros([BLOCK], tl.int32),
            tl.zeros([BLOCK], tl.int32),
        )
        for start in range(0, size, BLOCK):
            rank = (block_of(source_ptr, start, size, factor, 0, LIST, BLOCK) >> 32).to(tl.int32)
            amount = amounts(rank, largest, floor, BY_WEIGHT)
            amount_1 += tl.where(rank >= first.to(tl.int32), amount, 0)
            amount_2 += tl.where(rank >= second.to(tl.int32), amount, 0)
            amount_3 += tl.where(rank >= third.to(tl.int32), amount, 0)
            count_1 += (rank >= first.to(tl.int32)).to(tl.int32)
            count_2 += (rank >= second.to(tl.int32)).to(tl.int32)
            count_3 += (rank >= third.to(tl.int32)).to(tl.int32)
        if tl.sum(amount_3, 0) >= target:
            low, at_or_above_low = third, tl.sum(count_3, 0)
        elif tl.sum(amount_2, 0) >= target:
            low, at_or_above_low = second, tl.sum(count_2, 0)
            high, above_high, over = third - 1, tl.sum(count_3, 0), tl.sum(amount_3, 0)
        elif tl.sum(amount_1, 0) >= target:
            low, at_or_above_low = first, tl.sum(count_1, 0)
            high, above_high, over = second - 1, tl.sum(count_2, 0), tl.sum(amount_2, 0)
        else:
            high, above_high, over = first - 1, tl.sum(count_1, 0), tl.sum(amount_1, 0)
    if low < high:
        gathered = tl.zeros([], tl.int32)
        for start in range(0, size, BLOCK):
            rank = (block_of(source_ptr, start, size, factor, 0, LIST, BLOCK) >> 32).to(tl.int32)
            inside = (rank >= low.to(tl.int32)) & (rank <= high.to(tl.int32))
            place = gathered + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(scratch_ptr + place, rank, mask=inside & (place < TILE))
            gathered += tl.sum(inside.to(tl.int32), 0)
        tl.debug_barrier()  # other threads wrote what this one reads
        slot = tl.arange(0, TILE)
        rank = tl.load(scratch_ptr + slot, mask=slot < gathered, other=-2147483648)
        amount = tl.where(slot < gathered, amounts(rank, largest, floor, BY_WEIGHT), 0)
        low = highest_reaching(rank, amount, target - over, low, high)
        tl.debug_barrier()  # they all have read it
    return low
