"""Top-k, top-p and min-p thresholds by radix search: no sort, no [B, V] temporary.

Knows: the definitions of runtime/execute/sampling/filters.py, its torch reference, whose survivors it finds exactly:
counts and weights are integers, so the order in which atomics add them does not matter.
Does not know: noise, who asked.

A threshold is the largest score t such that what is at or above t (their number, or their probability weight) reaches a
target. Scores are searched as order-preserving 32-bit integers, 11, 11 and 10 bits at a time: every program adds its
columns to a histogram of the row by their next digit, then one program a row picks the digit and goes on below it.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.execute.sampling.draw_triton import EXACT, exp_weights, inverse_temperature, log, ordered, split_rows

_BINS = 2048
_DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, width) of each digit of a 32-bit score
_BLOCK = 2048


@triton.jit
def unordered(rank):
    """The score of an ordered int32."""
    return (rank ^ ((rank >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _largest(maxima_ptr, row, parts, PARTS: tl.constexpr):
    """The row's largest score from the programs' own; NaN if there was one."""
    index = tl.arange(0, PARTS)
    ranks = tl.load(maxima_ptr + row * parts + index, mask=index < parts, other=-2147483648)
    return unordered(tl.max(ranks, 0))


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["floor_ptr"])
def _histogram_kernel(
    logits_ptr,
    histogram_ptr,
    maxima_ptr,
    prefix_ptr,
    floor_ptr,
    temperature_ptr,
    bound_ptr,
    logits_stride,
    temperature_stride,
    bound_stride,
    vocab,
    per_program,
    parts,
    BY_WEIGHT: tl.constexpr,
    FIRST: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add this program's columns to the row's histogram. ``bound`` is top_p (BY_WEIGHT) or top_k.

    The first pass over a row by number also leaves its largest score, whether or not the row uses top-k.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    bound = tl.load(bound_ptr + row * bound_stride)
    if BY_WEIGHT:
        active = bound < 1.0
        largest = _largest(maxima_ptr, row, parts, PARTS)
        floor = tl.load(floor_ptr + row)
    else:
        active = (bound > 0) & (bound < vocab)
        floor = tl.where(active, -2147483648, 2147483647)  # nothing counts in a row that is only read for its largest
    if not FIRST:
        prefix = tl.load(prefix_ptr + row).to(tl.uint32, bitcast=True)
    if active | (FIRST and not BY_WEIGHT):
        factor, _ = inverse_temperature(tl.load(temperature_ptr + row * temperature_stride))
        best = tl.full([BLOCK], -2147483648, tl.int32)
        for start in range(part * per_program, tl.minimum((part + 1) * per_program, vocab), BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < vocab
            score = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + column, mask=inside, other=0.0)
            score = score.to(tl.float32) * factor
            rank = ordered(score)
            unsigned = rank.to(tl.uint32, bitcast=True) ^ 0x80000000
            counted = inside & (rank >= floor)
            if FIRST:
                best = tl.maximum(best, tl.where(inside, rank, -2147483648))
            else:
                counted &= (unsigned >> (SHIFT + WIDTH)) == prefix
            digit = ((unsigned >> SHIFT) & ((1 << WIDTH) - 1)).to(tl.int32)
            if BY_WEIGHT:
                amount = exp_weights(score - largest)
                counted &= amount > 0
            else:
                amount = tl.full([BLOCK], 1, tl.int64)
            tl.atomic_add(histogram_ptr + row.to(tl.int64) * BINS + digit, amount, mask=counted, sem="relaxed")
        if FIRST and not BY_WEIGHT:
            tl.store(maxima_ptr + row * parts + part, tl.max(best, 0))


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["floor_ptr", "largest_ptr"])
def _select_kernel(
    histogram_ptr,
    maxima_ptr,
    prefix_ptr,
    target_ptr,
    floor_ptr,
    bound_ptr,
    min_p_ptr,
    threshold_ptr,
    largest_ptr,
    bound_stride,
    min_p_stride,
    vocab,
    parts,
    BY_WEIGHT: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BINS: tl.constexpr,
):
    """Pick the row's digit and clear its histogram; the last pass writes the floor, or everything that is asked for."""
    row = tl.program_id(0)
    bound = tl.load(bound_ptr + row * bound_stride)
    if BY_WEIGHT:
        active = bound < 1.0
    else:
        active = (bound > 0) & (bound < vocab)
    floor = tl.full([], -2147483648, tl.int32)
    if BY_WEIGHT:
        floor = tl.load(floor_ptr + row)
    if active:
        bins = tl.arange(0, BINS)
        row_histogram = histogram_ptr + row.to(tl.int64) * BINS + bins
        amounts = tl.load(row_histogram)
        tl.store(row_histogram, tl.zeros([BINS], tl.int64))
        at_or_above = tl.sum(amounts, 0) - tl.cumsum(amounts, 0) + amounts
        if FIRST:
            prefix = tl.zeros([], tl.uint32)
            if BY_WEIGHT:
                limit = tl.sum(amounts, 0).to(tl.float64) * bound.to(tl.float64)
                target = tl.maximum(tl.ceil(limit).to(tl.int64), 1)
            else:
                target = bound.to(tl.int64)
        else:
            prefix = tl.load(prefix_ptr + row).to(tl.uint32, bitcast=True)
            target = tl.load(target_ptr + row)
        digit = tl.max(tl.where(at_or_above >= target, bins, 0), 0)
        prefix = (prefix << WIDTH) | digit.to(tl.uint32)
        tl.store(prefix_ptr + row, prefix.to(tl.int32, bitcast=True))
        tl.store(target_ptr + row, target - tl.sum(tl.where(bins > digit, amounts, 0), 0))
        if LAST:
            floor = (prefix ^ 0x80000000).to(tl.int32, bitcast=True)
    if LAST and not BY_WEIGHT:
        tl.store(floor_ptr + row, floor)
    if LAST and BY_WEIGHT:
        largest = _largest(maxima_ptr, row, parts, PARTS)
        min_p = tl.load(min_p_ptr + row * min_p_stride)
        threshold = tl.where(floor == -2147483648, float("-inf"), unordered(floor))
        if min_p > 0.0:
            threshold = tl.maximum(threshold, _min_p_threshold(largest, min_p))
        tl.store(threshold_ptr + row, threshold)
        tl.store(largest_ptr + row, largest)


@triton.jit
def _min_p_threshold(largest, min_p):
    """The smallest score whose distance from the largest is at least log(min_p); at most the largest itself."""
    gap = log(tl.maximum(min_p, 1.1754943508222875e-38))
    low = tl.full([], -2139095041, tl.int64)  # the rank of -inf
    high = ordered(largest).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        if unordered(middle.to(tl.int32)) - largest >= gap:
            high = middle
        else:
            low = middle + 1
    return unordered(high.to(tl.int32))


def survival_threshold(
    logits_BV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor
) -> tuple[Tensor, Tensor]:
    """(threshold_B, largest_B) float32 of logits / temperature: a token survives if its score is >= the threshold.

    As filters.survival_threshold, from logits before temperature (float32 or bfloat16). The threshold may lie between
    scores; the survivors are the same. Workspace: 16 KiB a row.
    """
    rows, vocab = logits_BV.shape
    device = logits_BV.device
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    parts, per_program = split_rows(rows, vocab, _BLOCK)
    histogram_BD = torch.zeros(rows, _BINS, dtype=torch.int64, device=device)
    maxima_BP = torch.empty(rows, parts, dtype=torch.int32, device=device)
    prefix_B, floor_B = torch.empty(2, rows, dtype=torch.int32, device=device)
    target_B = torch.empty(rows, dtype=torch.int64, device=device)
    threshold_B, largest_B = torch.empty(2, rows, dtype=torch.float32, device=device)
    most_parts = triton.next_power_of_2(triton.cdiv(vocab, _BLOCK))  # for any number of rows: one compilation
    for by_weight, bound_B in ((False, top_k_B), (True, top_p_B)):
        for shift, width in _DIGITS:
            first, last = shift + width == 32, shift == 0
            _histogram_kernel[(rows, parts)](
                logits_BV,
                histogram_BD,
                maxima_BP,
                prefix_B,
                floor_B,
                temperature_B,
                bound_B,
                logits_BV.stride(0),
                temperature_B.stride(0),
                bound_B.stride(0),
                vocab,
                per_program,
                parts,
                BY_WEIGHT=by_weight,
                FIRST=first,
                SHIFT=shift,
                WIDTH=width,
                PARTS=most_parts,
                BINS=_BINS,
                BLOCK=_BLOCK,
                num_warps=8,
                **EXACT,
            )
            _select_kernel[(rows,)](
                histogram_BD,
                maxima_BP,
                prefix_B,
                target_B,
                floor_B,
                bound_B,
                min_p_B,
                threshold_B,
                largest_B,
                bound_B.stride(0),
                min_p_B.stride(0),
                vocab,
                parts,
                BY_WEIGHT=by_weight,
                FIRST=first,
                LAST=last,
                WIDTH=width,
                PARTS=most_parts,
                BINS=_BINS,
                num_warps=4,
                **EXACT,
            )
    return threshold_B, largest_B
