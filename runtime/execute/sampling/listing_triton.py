"""The few tokens among which a row's top-k, top-p and min-p are settled, found in two passes over the logits: no sort.

Knows: how a threshold's place is estimated, and what is summed exactly so that a wrong estimate shows.
Does not know: the threshold (threshold_triton.py finds it, whatever was estimated here), what ranks exchange.

Three launches:

  survey   pass 1: the maxima of strided groups of columns, and one more column of each group
  bound    a row's program estimates from them where its threshold lies: a floor and a ceiling
  collect  pass 2: lists the tokens between the two, draws among those above, and sums what decides

A margin on both sides makes misses rare. Rows that are missed are contrived (two modes far apart with the threshold
between them, twenty thousand equal logits), or combine a top_k over 7,000 with top_p; find_threshold searches their
logits.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import NamedTuple

import torch
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
    gumbel_bound,
    inverse_temperature,
    ordered,
    random_words,
    row_key,
    unordered,
)
from runtime.execute.sampling.limits_triton import is_finite, limits, min_p_threshold

LISTED = 16384  # tokens a row that the last launch can settle; 8 bytes each
_SPARE = 400  # tokens that are listed beyond those that a threshold needs, at least
_AIMED = 6000  # tokens that a floor lies below, and a ceiling above, an estimated threshold deep in a row
# Up to so many tokens deep a list reaches up to the largest token: with a ceiling, all columns would be gone
# through once more for the draw among the tokens above it. The floor is nearer then, or the list would not hold them.
_SHALLOW = 9000
_NEARBY = 4000  # tokens below: five times what an estimate of the place is off by there (one sample stands for 73)
_GUESSED = 1000  # tokens between a threshold of top-p and either end of its estimate, which is off by some 650
_FEW = 11000  # up to so many tokens are listed up to the largest one, without a ceiling
FEWER = 2048  # so many tokens are settled in registers
_GROUPS = 128  # groups of columns a program of the survey
MOST_PARTS = 16  # most programs a row; the same for any number of rows
_BLOCK = 2048
_DRAWN = 1024  # of a block, where noise is added


class Workspace(NamedTuple):
    """What the launches leave for one another, for B rows of P parts.

    bounds float32 [B, 4]: floor, ceiling, min-p threshold, largest score. partial int64 [B, P, 4]: of a part's tokens,
    the weight of all, weight and number of those at or above the ceiling, and the best of these; reached int32 [B]: the
    best score with noise among these so far, as an ordered integer. listed int32 [B]: tokens in [floor, ceiling), of
    which ``tokens`` int64 [B, LISTED] has as many as it holds, (score, id) packed in no
    order. guess float32 [B, 2]: two scores between which top-p's threshold probably lies, equal if unknown.
    scratch int32 [B, FEWER], of the last launch alone.
    """

    bounds: Tensor
    partial: Tensor
    reached: Tensor
    listed: Tensor
    tokens: Tensor
    guess: Tensor
    scratch: Tensor


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _survey_kernel(
    logits_ptr, maxima_ptr, others_ptr, temperature_ptr, logits_stride, temperature_stride, vocab, per_program, parts,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part's groups, each every GROUPS-th column: their largest scores, as ordered integers, and one score more."""
    row, part = tl.program_id(0), tl.program_id(1)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    first = part * per_program
    width = tl.minimum(per_program, vocab - first)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(first, first + width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        score = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, score, propagate_nan=tl.PropagateNan.ALL)
    factor, _ = inverse_temperature(tl.load(temperature_ptr + row * temperature_stride))
    group = tl.arange(0, GROUPS)
    place = (row * parts + part) * GROUPS + group
    tl.store(maxima_ptr + place, tl.max(tl.reshape(ordered(best * factor), [BLOCK // GROUPS, GROUPS]), 0))
    held = (width - group + (GROUPS - 1)) // GROUPS
    picked = ((group * 40503 + part * 9973) & 0xFFFF) % tl.maximum(held, 1)
    column = first + group + GROUPS * picked
    other = tl.load(row_ptr + column, mask=held > 0, other=float("-inf")).to(tl.float32)
    tl.store(others_ptr + place, other * factor)


@triton.jit
def _crossing(top, top_mass, top_count, body, body_mass, body_count, mass, count, low, high):
    """(score that estimated mass and count at or above it reach, the next one tried that they do not)."""
    low, high = ordered(low).to(tl.int64), ordered(high).to(tl.int64)
    for _ in range(20):
        middle = (low + high) >> 1
        score = unordered(middle.to(tl.int32))
        above = tl.sum(tl.where(top >= score, top_mass, 0.0) + tl.where(body >= score, body_mass, 0.0), 0)
        number = tl.sum(tl.where(top >= score, top_count, 0.0) + tl.where(body >= score, body_count, 0.0), 0)
        reached = (above >= mass) & (number >= count)
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return unordered(low.to(tl.int32)), unordered(high.to(tl.int32))


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _bound_kernel(
    maxima_ptr, others_ptr, bounds_ptr, reached_ptr, listed_ptr, guess_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    min_p_ptr, temperature_stride, top_k_stride, top_p_stride, min_p_stride, vocab, whole_vocab, per_program, parts,
    SHARE: tl.constexpr, SMALL: tl.constexpr, FEW: tl.constexpr, GUESSED: tl.constexpr, SPARE: tl.constexpr,
    AIMED: tl.constexpr, SHALLOW: tl.constexpr, NEARBY: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Where the row's threshold lies, by estimate. With SHARE, of top-k alone: the rest is for the whole row to decide.

    Groups are a sample: their maxima stand for themselves, the other column of each for the rest of its group.
    """
    row = tl.program_id(0)
    slot = tl.arange(0, TILE)
    there = slot < parts * GROUPS
    rank = tl.load(maxima_ptr + row * parts * GROUPS + slot, mask=there, other=-2139095041)
    largest = unordered(tl.max(rank, 0))
    k, p, m = limits(
        tl.load(temperature_ptr + row * temperature_stride), tl.load(top_k_ptr + row * top_k_stride),
        tl.load(top_p_ptr + row * top_p_stride), tl.load(min_p_ptr + row * min_p_stride), whole_vocab,
    )  # fmt: skip
    floor = tl.full([], float("inf"), tl.float32)  # as it stays where the row cannot be drawn from: nothing to collect
    ceiling = tl.full([], float("inf"), tl.float32)
    least = tl.full([], float("-inf"), tl.float32)
    tl.store(guess_ptr + row * 2, float("inf"))
    tl.store(guess_ptr + row * 2 + 1, float("inf"))
    if is_finite(largest):
        if not SHARE:
            least = min_p_threshold(largest, m)
        bottom = tl.where((k > 0) & (p < 1.0), float("-inf"), least)  # top-p's mass is that of all top-k survivors
        by_mass = (p < 1.0) & (k == 0) & (not SHARE)
        if (k == 0) & (not by_mass) & (least == float("-inf")):
            floor = tl.full([], float("-inf"), tl.float32)  # every token survives
            ceiling = tl.full([], float("-inf"), tl.float32)
        elif vocab <= SMALL:
            floor = bottom
        else:
            top = tl.where(there, unordered(rank), float("-inf"))
            body = tl.load(others_ptr + row * parts * GROUPS + slot, mask=there, other=float("-inf"))
            part = slot // GROUPS
            width = tl.minimum(per_program, vocab - part * per_program)
            held = (width - slot % GROUPS + (GROUPS - 1)) // GROUPS
            top_count = tl.where(top > float("-inf"), 1.0, 0.0)
            body_count = tl.where((body < top) & (body > float("-inf")), (held - 1).to(tl.float32), 0.0)
            top_mass = tl.exp(top - largest) * top_count
            body_mass = tl.exp(body - largest) * body_count
            total = tl.sum(top_mass + body_mass, 0)
            every = tl.sum(top_count + body_count, 0)
            finite = tl.minimum(
                tl.min(tl.where(top_count > 0, top, largest), 0), tl.min(tl.where(body_count > 0, body, largest), 0)
            )
            mass, count = total * 0.0, k.to(tl.float32) * 1.5 + SPARE
            if by_mass:
                mass = total * tl.minimum(p * 1.6, 1.0 - (1.0 - p) / 1.6)
                count = tl.full([], SPARE, tl.float32)
                finite = tl.maximum(finite, largest - 45.0)  # nothing below has any weight
            floor = bottom
            if (k > 0) | by_mass:
                reached, _ = _crossing(
                    top, top_mass, top_count, body, body_mass, body_count, mass, count, finite, largest
                )
                floor = tl.maximum(bottom, tl.where(every >= count, reached, -3.4028234663852886e38))
            number = tl.sum(tl.where(top >= floor, top_count, 0.0) + tl.where(body >= floor, body_count, 0.0), 0)
            middle = k.to(tl.float32)
            if by_mass & (number > SMALL):  # more than the last launch settles in registers
                score, _ = _crossing(
                    top, top_mass, top_count, body, body_mass, body_count, total * p, 1.0, finite, largest
                )
                middle = tl.sum(tl.where(top >= score, top_count, 0.0) + tl.where(body >= score, body_count, 0.0), 0)
                # As if tokens lay evenly between the floor and the estimated threshold, and as densely beyond it.
                reach = (score - floor) * (GUESSED / tl.maximum(number - middle, 1.0))
                tl.store(guess_ptr + row * 2, score - reach)
                tl.store(guess_ptr + row * 2 + 1, score + reach)
            if number > FEW:
                if (k > 0) & (p < 1.0) & (not SHARE):  # two thresholds deep in one row: for the last launch to search
                    floor = tl.full([], float("inf"), tl.float32)
                elif (k > 0) | by_mass:
                    zero, margin = total * 0.0, tl.where(middle > SHALLOW, AIMED, NEARBY).to(tl.float32)
                    floor, _ = _crossing(
                        top, top_mass, top_count, body, body_mass, body_count, zero, middle + margin, finite, largest
                    )
                    _, ceiling = _crossing(
                        top, top_mass, top_count, body, body_mass, body_count, zero, middle - AIMED, finite, largest
                    )
                    floor = tl.maximum(floor, bottom)
                    ceiling = tl.where(middle > SHALLOW, tl.maximum(ceiling, floor), float("inf"))
                else:
                    ceiling = floor  # min-p alone: the floor is the threshold
    tl.store(bounds_ptr + row * 4, floor)
    tl.store(bounds_ptr + row * 4 + 1, ceiling)
    tl.store(bounds_ptr + row * 4 + 2, least)
    tl.store(bounds_ptr + row * 4 + 3, largest)
    tl.store(reached_ptr + row, -2139095041)  # -inf
    tl.store(listed_ptr + row, 0)


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _collect_kernel(
    logits_ptr, bounds_ptr, partial_ptr, reached_ptr, listed_ptr, list_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    seed_ptr, position_ptr, logits_stride, temperature_stride, top_k_stride, top_p_stride, seed_stride, position_stride,
    vocab, vocab_start, per_program, parts,
    PURPOSE: tl.constexpr, SHARE: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """List the part's tokens in [floor, ceiling), draw among those at or above the ceiling, and sum for top-p."""
    row, part = tl.program_id(0), tl.program_id(1)
    floor = tl.load(bounds_ptr + row * 4)
    if floor < float("inf"):
        ceiling = tl.load(bounds_ptr + row * 4 + 1)
        largest = tl.load(bounds_ptr + row * 4 + 3)
        factor, is_random = inverse_temperature(tl.load(temperature_ptr + row * temperature_stride))
        by_mass = is_random > 0
        if not SHARE:
            top_k = tl.load(top_k_ptr + row * top_k_stride)
            by_mass &= ((top_k <= 0) | (top_k >= vocab)) & (tl.load(top_p_ptr + row * top_p_stride) < 1.0)
        row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
        first, last = part * per_program, tl.minimum((part + 1) * per_program, vocab)
        # A thread has four neighbouring columns of a block, a lane: sums of four, and places in the list, are its own.
        lane = tl.arange(0, BLOCK // 4)
        columns = first + lane[:, None] * 4 + tl.arange(0, 4)[None, :]
        total = tl.zeros([BLOCK // 4], tl.int64)
        above = tl.zeros([BLOCK // 4], tl.int64)
        counted = tl.zeros([BLOCK // 4], tl.int32)
        ahead = tl.load(row_ptr + columns, mask=columns < last, other=float("nan"))
        for start in range(0, last - first, BLOCK):
            score = ahead.to(tl.float32) * factor
            after = columns + (start + BLOCK)
            ahead = tl.load(row_ptr + after, mask=after < last, other=float("nan"))
            counted += tl.sum(((score >= floor) & (score < ceiling)).to(tl.int32), 1)
            if not SHARE:  # noqa: SIM102 (settled when compiling; the inner one when running)
                if by_mass:
                    weight = exp_weights(score - largest)
                    total += tl.sum(weight, 1)
                    above += tl.sum(tl.where(score >= ceiling, weight, 0), 1)
        found = tl.sum(counted, 0)
        if found > 0:
            begin = tl.atomic_add(listed_ptr + row, found, sem="relaxed")
            place = begin + tl.cumsum(counted, 0) - counted
            for start in range(0, last - first, BLOCK):  # of what the loop before has just brought into the caches
                column = columns + start
                score = tl.load(row_ptr + column, mask=column < last, other=float("nan")).to(tl.float32) * factor
                listed = (score >= floor) & (score < ceiling)
                one = listed.to(tl.int32)
                places = place[:, None] + tl.cumsum(one, 1) - one
                key = (ordered(score).to(tl.int64) << 32) | (0x7FFFFFFF - (column + vocab_start)).to(tl.int64)
                tl.store(list_ptr + row.to(tl.int64) * LISTED + places, key, mask=listed & (places < LISTED))
                place += tl.sum(one, 1)
        number = tl.zeros([DRAWN], tl.int32)
        best = tl.full([DRAWN], -2147483648, tl.int32)
        best_column = tl.zeros([DRAWN], tl.int32)
        if ceiling < float("inf"):
            seed = tl.load(seed_ptr + row * seed_stride).to(tl.int64)
            low, high = row_key(seed, tl.load(position_ptr + row * position_stride).to(tl.int64), PURPOSE)
            reached = unordered(tl.load(reached_ptr + row))  # by other parts so far: it saves work and changes nothing
            for start in range(first, last, DRAWN):
                drawn = start + tl.arange(0, DRAWN)
                inside = drawn < last
                candidate = tl.load(row_ptr + drawn, mask=inside, other=float("nan")).to(tl.float32) * factor
                survives = candidate >= ceiling
                number += survives.to(tl.int32)
                words = random_words(low, high, drawn + vocab_start)
                worth = survives & (candidate + gumbel_bound(words) * is_random >= reached)
                if tl.sum(worth.to(tl.int32), 0) > 0:
                    noisy = candidate + gumbel(words) * is_random
                    rank = ordered(tl.where(survives, noisy, float("-inf")))
                    better = (rank > best) & inside
                    best = tl.where(better, rank, best)
                    best_column = tl.where(better, drawn, best_column)
                    reached = tl.maximum(reached, unordered(tl.max(best, 0)))
            tl.atomic_max(reached_ptr + row, ordered(reached), sem="relaxed")
        keys = (best.to(tl.int64) << 32) | (0x7FFFFFFF - (best_column + vocab_start)).to(tl.int64)
        place = (row * parts + part) * 4
        if not SHARE:
            tl.store(partial_ptr + place, tl.sum(total, 0))
            tl.store(partial_ptr + place + 1, tl.sum(above, 0))
        tl.store(partial_ptr + place + 2, tl.sum(number, 0).to(tl.int64))
        tl.store(partial_ptr + place + 3, tl.max(keys, 0))


def _workspace(rows: int, parts: int, device: torch.device) -> Workspace:
    return Workspace(
        bounds=torch.empty(rows, 4, dtype=torch.float32, device=device),
        partial=torch.empty(rows, parts, 4, dtype=torch.int64, device=device),
        reached=torch.empty(rows, dtype=torch.int32, device=device),
        listed=torch.empty(rows, dtype=torch.int32, device=device),
        tokens=torch.empty(rows, LISTED, dtype=torch.int64, device=device),
        guess=torch.empty(rows, 2, dtype=torch.float32, device=device),
        scratch=torch.empty(rows, FEWER, dtype=torch.int32, device=device),
    )


def parts_of(vocab: int) -> tuple[int, int]:
    """(programs a row, columns a program), whole blocks each. The number of rows does not matter: nothing is compiled
    anew for it, and a row is cut the same in every batch."""
    blocks = triton.cdiv(vocab, _BLOCK)
    each = triton.cdiv(blocks, MOST_PARTS)
    return triton.cdiv(blocks, each), each * _BLOCK


def list_tokens(
    logits_BV: Tensor, vocab_start: int, whole_vocab: int, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor,
    min_p_B: Tensor, seed_B: Tensor, position_B: Tensor, *, purpose: int, share: bool,
) -> Workspace:  # fmt: skip
    """The first three launches. ``share``: the logits are one rank's of ``whole_vocab``, and only top-k bounds them."""
    rows, vocab = logits_BV.shape
    device = logits_BV.device
    parts, per_program = parts_of(vocab)
    space = _workspace(rows, parts, device)
    maxima_BG = torch.empty(rows, parts * _GROUPS, dtype=torch.int32, device=device)
    others_BG = torch.empty(rows, parts * _GROUPS, dtype=torch.float32, device=device)
    _survey_kernel[(rows, parts)](
        logits_BV, maxima_BG, others_BG, temperature_B, logits_BV.stride(0), temperature_B.stride(0), vocab,
        per_program, parts,
        GROUPS=_GROUPS, BLOCK=_BLOCK, num_warps=8,
        **EXACT,
    )  # fmt: skip
    _bound_kernel[(rows,)](
        maxima_BG, others_BG, space.bounds, space.reached, space.listed, space.guess, temperature_B, top_k_B, top_p_B,
        min_p_B, temperature_B.stride(0), top_k_B.stride(0), top_p_B.stride(0), min_p_B.stride(0), vocab, whole_vocab,
        per_program, parts,
        SHARE=share, SMALL=FEWER, FEW=_FEW, GUESSED=_GUESSED, SPARE=_SPARE, AIMED=_AIMED, SHALLOW=_SHALLOW,
        NEARBY=_NEARBY, GROUPS=_GROUPS, TILE=triton.next_power_of_2(parts * _GROUPS), num_warps=8,
        **EXACT,
    )  # fmt: skip
    _collect_kernel[(rows, parts)](
        logits_BV, *space[:-2], temperature_B, top_k_B, top_p_B, seed_B, position_B, logits_BV.stride(0),
        temperature_B.stride(0), top_k_B.stride(0), top_p_B.stride(0), seed_B.stride(0), position_B.stride(0), vocab,
        vocab_start, per_program, parts,
        PURPOSE=(PURPOSE_STEP * (purpose + 1)) % 2**64, SHARE=share, LISTED=LISTED, BLOCK=_BLOCK,
        DRAWN=min(_DRAWN, _BLOCK), num_warps=8,
        **EXACT,
    )  # fmt: skip
    return space
