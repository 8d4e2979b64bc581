"""Which of a row's tokens survive top-k, top-p and min-p, and which survivor is drawn: one program a row.

Knows: what decides about a threshold: sums over a few listed tokens, over many, or over all of a row's logits.
filters.py is the torch reference. Does not know: how it is searched for (search_triton.py), how tokens were chosen for
the list (listing_triton.py), ranks.

A token is a packed (score, id); the score's part, as an ordered integer, is called its rank here.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from runtime.execute.sampling.draw_triton import (
    ANY_NUMBER,
    ANY_POINTER,
    EXACT,
    PURPOSE_STEP,
    exp_weights,
    gumbel,
    inverse_temperature,
    ordered,
    random_words,
    row_key,
    unordered,
)
from runtime.execute.sampling.limits_triton import is_finite, limits
from runtime.execute.sampling.listing_triton import MOST_PARTS, Workspace, parts_of
from runtime.execute.sampling.search_triton import SWEPT, amounts, block_of, highest_reaching, reach


@triton.jit
def mass_limit(total, p):
    """filters.mass_limit of a row whose top-p is on."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def best_survivor(token, threshold, low, high, is_random):
    """The best of those tokens whose score is at least the threshold, packed with its noise."""
    score = unordered((token >> 32).to(tl.int32))
    ids = (0x7FFFFFFF - (token & 0xFFFFFFFF)).to(tl.int32)
    noisy = score + gumbel(random_words(low, high, ids)) * is_random
    drawn = (ordered(noisy).to(tl.int64) << 32) | (token & 0xFFFFFFFF)
    return tl.max(tl.where(score >= threshold, drawn, -9223372036854775808), 0)


@triton.jit
def _threshold_of_few(list_ptr, listed, floor, least, largest, k, p, total, above, number, TILE: tl.constexpr):
    """(whether the list holds the threshold, the threshold), of at most TILE listed tokens.

    ``number`` tokens of weight ``above`` lie over the list's. What is not under the floor is in the list or over it.
    """
    slot = tl.arange(0, TILE)
    there = slot < listed
    rank = (tl.load(list_ptr + slot, mask=there, other=-9223372036854775808) >> 32).to(tl.int32)
    bottom, top = ordered(floor).to(tl.int64), ordered(largest).to(tl.int64)
    reached = tl.full([], -2139095041, tl.int64)  # the rank of -inf: nothing is cut
    holds = tl.full([], 1, tl.int1)
    if k > 0:
        if number + listed < k:  # the k-th lies under the floor, where min-p ends the row, or nothing but -inf is left
            holds = ((least >= floor) & (p >= 1.0)) | (floor <= -3.4028234663852886e38)
        else:
            holds = number < k
            reached = highest_reaching(rank, there.to(tl.int64), k - number, bottom, top)
    if p < 1.0:
        weight = exp_weights(unordered(rank) - largest)
        weight = tl.where(there & (rank >= reached.to(tl.int32)), weight, 0)
        here = tl.sum(weight, 0)
        if k > 0:
            total = here
        limit = mass_limit(total, p)
        if above + here < limit:
            holds &= least >= floor
        else:
            holds &= above < limit
            reached = highest_reaching(rank, weight, limit - above, tl.maximum(bottom, reached), top)
    return holds, tl.maximum(unordered(reached.to(tl.int32)), least)


@triton.jit
def _threshold_of_many(
    source_ptr, size, scratch_ptr, factor, floor, ceiling, guess_low, guess_high, least, largest, k, p, total, above,
    number,
    LIST: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``_threshold_of_few`` of a list of any length, or of all of a row's logits, which always hold the threshold."""
    # A list's tokens lie under its ceiling, which is much nearer than the row's largest score.
    top = ordered(tl.minimum(largest, ceiling)).to(tl.int64)
    holds = tl.full([], 1, tl.int1)
    if LIST:
        bottom = ordered(floor).to(tl.int64)
    else:
        smallest = tl.full([BLOCK], 2147483647, tl.int32)
        for start in range(0, size, BLOCK):
            rank = (block_of(source_ptr, start, size, factor, 0, LIST, BLOCK) >> 32).to(tl.int32)
            smallest = tl.minimum(smallest, tl.where(rank == -2147483648, 2147483647, rank))
        bottom = tl.min(smallest, 0).to(tl.int64)
    reached = tl.full([], -2139095041, tl.int64)
    if k > 0:
        if number + size < k:
            holds = ((least >= floor) & (p >= 1.0)) | (floor <= -3.4028234663852886e38)
        else:
            holds = number < k
            lowest = tl.full([], -2147483647, tl.int32)
            reached = reach(
                source_ptr, size, scratch_ptr, factor, largest, lowest, k - number, bottom, top, tl.zeros([], tl.int64),
                size, tl.zeros([], tl.int32), False, LIST, BLOCK, TILE,
            )  # fmt: skip
    if (p < 1.0) & holds:
        cut = reached.to(tl.int32)
        low, high = tl.maximum(bottom, reached), top
        # One pass for the sum of all, and for the parts of it above both ends of the estimate.
        first = tl.minimum(tl.maximum(ordered(guess_low).to(tl.int64), low), high)
        second = tl.minimum(tl.maximum(ordered(guess_high).to(tl.int64), first), high)
        weight, weight_1, weight_2 = (
            tl.zeros([BLOCK], tl.int64),
            tl.zeros([BLOCK], tl.int64),
            tl.zeros([BLOCK], tl.int64),
        )
        counted_1, counted_2 = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        for start in range(0, size, BLOCK):
            rank = (block_of(source_ptr, start, size, factor, 0, LIST, BLOCK) >> 32).to(tl.int32)
            amount = amounts(rank, largest, cut, True)
            weight += amount
            weight_1 += tl.where(rank >= first.to(tl.int32), amount, 0)
            weight_2 += tl.where(rank >= second.to(tl.int32), amount, 0)
            counted_1 += (rank >= first.to(tl.int32)).to(tl.int32)
            counted_2 += (rank >= second.to(tl.int32)).to(tl.int32)
        here = tl.sum(weight, 0)
        if (k > 0) | (not LIST):
            total = here
        limit = mass_limit(total, p)
        if above + here < limit:
            holds = least >= floor
        else:
            holds = above < limit
            target = limit - above
            over, at_or_above_low, above_high = tl.zeros([], tl.int64), size, tl.zeros([], tl.int32)
            if tl.sum(weight_2, 0) >= target:
                low, at_or_above_low = second, tl.sum(counted_2, 0)
            else:
                if tl.sum(weight_1, 0) >= target:
                    low, at_or_above_low = first, tl.sum(counted_1, 0)
                    high, above_high, over = second - 1, tl.sum(counted_2, 0), tl.sum(weight_2, 0)
                elif first > low:
                    high, above_high, over = first - 1, tl.sum(counted_1, 0), tl.sum(weight_1, 0)
            reached = reach(
                source_ptr, size, scratch_ptr, factor, largest, cut, target, low, high, over, at_or_above_low,
                above_high, True, LIST, BLOCK, TILE,
            )  # fmt: skip
    return holds, tl.maximum(unordered(reached.to(tl.int32)), least)


@triton.jit
def _draw(
    source_ptr, size, factor, vocab_start, threshold, low, high, is_random, LIST: tl.constexpr, BLOCK: tl.constexpr
):
    """The best survivor among a source's tokens."""
    best = tl.full([], -9223372036854775808, tl.int64)
    for start in range(0, size, BLOCK):
        token = block_of(source_ptr, start, size, factor, vocab_start, LIST, BLOCK)
        best = tl.maximum(best, best_survivor(token, threshold, low, high, is_random))
    return best


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _threshold_kernel(
    logits_ptr, bounds_ptr, partial_ptr, listed_ptr, list_ptr, guess_ptr, scratch_ptr, keys_ptr, threshold_ptr,
    largest_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, logits_stride,
    temperature_stride, top_k_stride, top_p_stride, min_p_stride, seed_stride, position_stride, vocab, vocab_start,
    parts,
    PURPOSE: tl.constexpr, PARTS: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A row's threshold and best survivor."""
    row = tl.program_id(0)
    floor = tl.load(bounds_ptr + row * 4)
    ceiling = tl.load(bounds_ptr + row * 4 + 1)
    least = tl.load(bounds_ptr + row * 4 + 2)
    largest = tl.load(bounds_ptr + row * 4 + 3)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    factor, is_random = inverse_temperature(temperature)
    threshold = largest
    best = tl.full([], -9223372036854775808, tl.int64)
    if is_finite(largest):
        total = tl.zeros([], tl.int64)
        above = tl.zeros([], tl.int64)
        number = tl.zeros([], tl.int32)
        if floor < float("inf"):
            part = tl.arange(0, PARTS)
            partial = partial_ptr + (row * parts + part) * 4
            total = tl.sum(tl.load(partial, mask=part < parts, other=0), 0)
            above = tl.sum(tl.load(partial + 1, mask=part < parts, other=0), 0)
            number = tl.sum(tl.load(partial + 2, mask=part < parts, other=0), 0).to(tl.int32)
            if ceiling < float("inf"):
                best = tl.max(tl.load(partial + 3, mask=part < parts, other=-9223372036854775808), 0)
        if ceiling == float("-inf"):
            threshold = ceiling  # every token survives, and the best of all was drawn
        else:
            k, p, _min_p = limits(
                temperature, tl.load(top_k_ptr + row * top_k_stride), tl.load(top_p_ptr + row * top_p_stride),
                tl.load(min_p_ptr + row * min_p_stride), vocab,
            )  # fmt: skip
            seed = tl.load(seed_ptr + row * seed_stride).to(tl.int64)
            low, high = row_key(seed, tl.load(position_ptr + row * position_stride).to(tl.int64), PURPOSE)
            row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
            tokens = list_ptr + row.to(tl.int64) * LISTED
            scratch = scratch_ptr + row * TILE
            listed = tl.load(listed_ptr + row)
            guess_low, guess_high = tl.load(guess_ptr + row * 2), tl.load(guess_ptr + row * 2 + 1)
            holds = listed <= LISTED
            if listed <= TILE:
                holds, threshold = _threshold_of_few(
                    tokens, listed, floor, least, largest, k, p, total, above, number, TILE
                )
            elif holds:
                holds, threshold = _threshold_of_many(
                    tokens, listed, scratch, factor, floor, ceiling, guess_low, guess_high, least, largest, k, p, total,
                    above, number, True, BLOCK, TILE,
                )  # fmt: skip
            if holds:
                drawn = _draw(tokens, listed, factor, vocab_start, threshold, low, high, is_random, True, BLOCK)
                best = tl.maximum(best, drawn)
            else:
                none = tl.zeros([], tl.int32)
                holds, threshold = _threshold_of_many(
                    row_ptr,
                    vocab + none,  # of 1 it would be a constant, and could not change in a loop
                    scratch, factor, floor, largest, guess_low, guess_high, least, largest, k, p, total, total * 0,
                    none, False, BLOCK, TILE,
                )  # fmt: skip
                best = _draw(row_ptr, vocab, factor, vocab_start, threshold, low, high, is_random, False, BLOCK)
    tl.store(keys_ptr + row, best)
    tl.store(threshold_ptr + row, threshold)
    tl.store(largest_ptr + row, largest)


def find_threshold(
    logits_BV: Tensor, vocab_start: int, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor,
    seed_B: Tensor, position_B: Tensor, keys_B1: Tensor, threshold_B: Tensor, largest_B: Tensor, *, space: Workspace,
    purpose: int,
) -> None:  # fmt: skip
    """Fill each row's best surviving candidate (int64), threshold and largest score (float32) from what was listed."""
    rows, vocab = logits_BV.shape
    columns = temperature_B, top_k_B, top_p_B, min_p_B, seed_B, position_B
    _threshold_kernel[(rows,)](
        logits_BV, space.bounds, space.partial, space.listed, space.tokens, space.guess, space.scratch, keys_B1,
        threshold_B, largest_B, *columns, logits_BV.stride(0), *(column.stride(0) for column in columns), vocab,
        vocab_start, parts_of(vocab)[0],
        PURPOSE=(PURPOSE_STEP * (purpose + 1)) % 2**64, PARTS=MOST_PARTS, LISTED=space.tokens.shape[1], BLOCK=SWEPT,
        TILE=space.scratch.shape[1], num_warps=8,
        **EXACT,
    )  # fmt: skip
