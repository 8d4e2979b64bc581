"""Filters by radix search, as they were before listing: fourteen launches, seven passes. Only to be measured against.

Knows: top-k, top-p and min-p thresholds by histograms of digits of 11, 11 and 10 bits, then a draw over whole rows.
Does not know: anything of today's filters but the functions of one element that both share.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.execute.sampling.draw_triton import (
    EXACT,
    PURPOSE_STEP,
    exp_weights,
    gumbel,
    inverse_temperature,
    log,
    ordered,
    random_words,
    row_key,
    split_rows,
    unordered,
)

_BINS = 2048
_DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, width) of each digit of a 32-bit score
_BLOCK = 2048


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


@triton.jit(do_not_specialize=["position_stride"])
def _best_kernel(
    logits_ptr,
    keys_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    threshold_ptr,
    logits_stride,
    temperature_stride,
    seed_stride,
    position_stride,
    vocab,
    vocab_start,
    per_program,
    PURPOSE: tl.constexpr,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    if RANDOM:
        factor, is_random = inverse_temperature(tl.load(temperature_ptr + row * temperature_stride))
        seed = tl.load(seed_ptr + row * seed_stride).to(tl.int64)
        low, high = row_key(seed, tl.load(position_ptr + row * position_stride).to(tl.int64), PURPOSE)
    if FILTERED:
        threshold = tl.load(threshold_ptr + row)
    best = tl.full([BLOCK], -2147483648, tl.int32)  # below every score: lanes that saw nothing
    best_column = tl.zeros([BLOCK], tl.int32)
    for start in range(part * per_program, tl.minimum((part + 1) * per_program, vocab), BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocab
        score = tl.load(row_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if RANDOM:
            score = score * factor
        noisy = score
        if RANDOM:
            noisy = score + gumbel(random_words(low, high, column + vocab_start)) * is_random
        if FILTERED:
            noisy = tl.where(score >= threshold, noisy, float("-inf"))
        rank = ordered(noisy)
        better = (rank > best) & inside
        best = tl.where(better, rank, best)
        best_column = tl.where(better, column, best_column)
    keys = (best.to(tl.int64) << 32) | (0x7FFFFFFF - (best_column + vocab_start)).to(tl.int64)
    tl.store(keys_ptr + row * tl.num_programs(1) + part, tl.max(keys, 0))


def best_candidates(
    logits_BV: Tensor,
    vocab_start: int,
    temperature_B: Tensor,
    seed_B: Tensor,
    position_B: Tensor,
    *,
    random: bool,
    purpose: int = 0,
    threshold_B: Tensor | None = None,
) -> Tensor:
    """Candidates int64 [B, P], of which the largest of a row is its best; P depends on the shape alone.

    temperature float32, seed int64, position any integer type; with ``random`` False they are not read.
    ``threshold_B`` float32, contiguous: only scores (before noise) at or above it survive.
    """
    rows, vocab = logits_BV.shape
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    parts, per_program = split_rows(rows, vocab)
    keys_BP = torch.empty(rows, parts, dtype=torch.int64, device=logits_BV.device)
    _best_kernel[(rows, parts)](
        logits_BV,
        keys_BP,
        temperature_B,
        seed_B,
        position_B,
        temperature_B if threshold_B is None else threshold_B,
        logits_BV.stride(0),
        temperature_B.stride(0),
        seed_B.stride(0),
        position_B.stride(0),
        vocab,
        vocab_start,
        per_program,
        PURPOSE=(PURPOSE_STEP * (purpose + 1)) % 2**64,
        RANDOM=random,
        FILTERED=threshold_B is not None,
        BLOCK=_BLOCK,
        num_warps=8,
        **EXACT,
    )
    return keys_BP
