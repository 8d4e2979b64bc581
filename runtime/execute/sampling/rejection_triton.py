"""Rejection sampling in Triton: a drafter's tokens in three launches, windows of them in four, for any number of rows.

Knows: the arithmetic of rejection.py, its torch reference, operation by operation, so that drafts, probabilities and
tokens have the same bits; that a kept draft needs no residual, and that few numbers of a residual need their noise. No
array but a drafter's probabilities has a number for each row and id. Does not know: filters (their threshold comes as a
number a row), penalties, edits, slots, windows' finish.
Shape letters: B requests, Q drafts of each, R = B * Q, T = B * (Q + 1) tokens of windows, V vocabulary, D draft ids.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.execute.sampling.draw_triton import (
    ANY_NUMBER,
    ANY_POINTER,
    EXACT,
    PURPOSE_STEP,
    best_with_noise,
    exp_weights,
    gumbel,
    inverse_temperature,
    log,
    ordered,
    random_words,
    row_key,
    split_rows,
    uniform,
    unordered,
)
from runtime.execute.sampling.limits_triton import is_finite

_BLOCK = 2048
_PARTS = 128  # programs of a row that one program reads at once at least: as many as 262,144 logits are cut into
_NUMBERS = [*ANY_NUMBER, "first", "count", "width", "probs_stride", "guess_stride", "index_stride", "proposals_stride"]
_POINTERS = [*ANY_POINTER, "ranks_ptr", "sums_ptr", "probs_ptr", "index_ptr", "proposals_ptr", "drawn_ptr", "out_ptr"]


@triton.jit
def _threshold(threshold_ptr, row, FILTERED: tl.constexpr):
    """The score that a row's filters ask for at least, -inf without any."""
    if FILTERED:
        threshold = tl.load(threshold_ptr + row)
    else:
        threshold = float("-inf")
    return threshold


@triton.jit
def _scores(row_ptr, column, inside, factor, threshold, FILTERED: tl.constexpr):
    """Scores of what survives the filters, -inf of the rest and outside."""
    score = tl.load(row_ptr + column, mask=inside, other=float("-inf")).to(tl.float32) * factor
    if FILTERED:
        score = tl.where(score >= threshold, score, float("-inf"))
    return score


@triton.jit
def _total(sums_ptr, row, parts, PARTS: tl.constexpr):
    """The sum of a row's weights as float32."""
    part = tl.arange(0, PARTS)
    return tl.maximum(tl.sum(tl.load(sums_ptr + row * parts + part, mask=part < parts, other=0), 0), 1).to(tl.float32)


@triton.jit
def _best_key(keys_ptr, row, parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(keys_ptr + row * parts + part, mask=part < parts, other=-9223372036854775808), 0)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _row_max_kernel(
    logits_ptr, ids_ptr, threshold_ptr, ranks_ptr, keys_ptr, temperature_ptr, seed_ptr, position_ptr, logits_stride,
    temperature_stride, seed_stride, position_stride, vocab, per_program, first, count,
    PURPOSE: tl.constexpr, DRAW: tl.constexpr, MAPPED: tl.constexpr, FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest score of a row's part, and if asked for its best with noise. ``count`` rows have the same request."""
    row, part = tl.program_id(0), tl.program_id(1)
    request = row // count
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    factor, is_random = inverse_temperature(tl.load(temperature_ptr + request * temperature_stride))
    threshold = _threshold(threshold_ptr, row, FILTERED)
    if DRAW:
        seed = tl.load(seed_ptr + request * seed_stride).to(tl.int64)
        position = tl.load(position_ptr + request * position_stride).to(tl.int64) + first + row % count
        low, high = row_key(seed, position, PURPOSE)
    largest = tl.full([BLOCK], -2147483648, tl.int32)  # below every score: lanes that saw nothing
    best = tl.full([BLOCK], -2147483648, tl.int32)
    best_column = tl.zeros([BLOCK], tl.int32)
    begin = part * per_program
    for start in range(begin, tl.minimum(begin + per_program, vocab), BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocab
        score = _scores(row_ptr, column, inside, factor, threshold, False)
        largest = tl.where(inside, tl.maximum(largest, ordered(score)), largest)
        if DRAW:
            if FILTERED:
                score = tl.where(score >= threshold, score, float("-inf"))
            token = column
            if MAPPED:
                token = tl.load(ids_ptr + column, mask=inside, other=0).to(tl.int32)
            rank = ordered(score + gumbel(random_words(low, high, token)) * is_random)
            better = (rank > best) & inside
            best = tl.where(better, rank, best)
            best_column = tl.where(better, column, best_column)
    at = row * tl.num_programs(1) + part
    tl.store(ranks_ptr + at, tl.max(largest, 0))
    if DRAW:
        tl.store(keys_ptr + at, tl.max((best.to(tl.int64) << 32) | (0x7FFFFFFF - best_column).to(tl.int64), 0))


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _weight_sum_kernel(
    logits_ptr, threshold_ptr, ranks_ptr, sums_ptr, largest_ptr, temperature_ptr, logits_stride, temperature_stride,
    vocab, per_program, count,
    FILTERED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The weights of a row's part, summed; and the row's largest score."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    factor, _ = inverse_temperature(tl.load(temperature_ptr + row // count * temperature_stride))
    threshold = _threshold(threshold_ptr, row, FILTERED)
    index = tl.arange(0, PARTS)
    ranks = tl.load(ranks_ptr + row * parts + index, mask=index < parts, other=-2147483648)
    largest = unordered(tl.max(ranks, 0))
    weights = tl.zeros([BLOCK], tl.int64)
    if is_finite(largest):
        begin = part * per_program
        for start in range(begin, tl.minimum(begin + per_program, vocab), BLOCK):
            column = start + tl.arange(0, BLOCK)
            score = _scores(row_ptr, column, column < vocab, factor, threshold, FILTERED)
            weights += exp_weights(score - largest)
    tl.store(sums_ptr + row * parts + part, tl.sum(weights, 0))
    if part == 0:
        tl.store(largest_ptr + row, largest)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _softmax_kernel(
    logits_ptr, threshold_ptr, sums_ptr, largest_ptr, keys_ptr, temperature_ptr, probs_ptr, index_ptr, logits_stride,
    temperature_stride, vocab, per_program, count,
    FILTERED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The probabilities of a row's part, and the draft token."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    out_ptr = probs_ptr + row.to(tl.int64) * vocab
    factor, is_random = inverse_temperature(tl.load(temperature_ptr + row // count * temperature_stride))
    threshold = _threshold(threshold_ptr, row, FILTERED)
    largest = tl.load(largest_ptr + row)
    total = _total(sums_ptr, row, parts, PARTS)
    begin = part * per_program
    for start in range(begin, tl.minimum(begin + per_program, vocab), BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocab
        score = _scores(row_ptr, column, inside, factor, threshold, FILTERED)
        probability = tl.div_rn(exp_weights(score - largest).to(tl.float32), total)  # 0 where the largest is no number
        tl.store(out_ptr + column, probability * is_random, mask=inside)
    if part == 0:
        best = 0x7FFFFFFF - (_best_key(keys_ptr, row, parts, PARTS) & 0xFFFFFFFF)
        tl.store(index_ptr + row, tl.where(is_finite(largest), best, 0))


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _residual_kernel(
    logits_ptr, threshold_ptr, sums_ptr, largest_ptr, probs_ptr, index_ptr, places_ptr, drawn_ptr, proposals_ptr,
    keys_ptr, temperature_ptr, seed_ptr, position_ptr, logits_stride, probs_stride, guess_stride, index_stride,
    proposals_stride, temperature_stride, seed_stride, position_stride, vocab, per_program, width,
    TOKEN: tl.constexpr, ACCEPT: tl.constexpr, FILTERED: tl.constexpr, MAPPED: tl.constexpr, SOME: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best of a row's part: of the residual where a sampled draft was rejected, of p where there is none. A draft
    that was kept is the best of all."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    window, place = row // width, row % width
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    factor, is_random = inverse_temperature(tl.load(temperature_ptr + row * temperature_stride))
    threshold = _threshold(threshold_ptr, row, FILTERED)
    largest = tl.load(largest_ptr + row)
    total = _total(sums_ptr, row, parts, PARTS)
    seed = tl.load(seed_ptr + row * seed_stride).to(tl.int64)
    position = tl.load(position_ptr + row * position_stride).to(tl.int64)

    has_guess = place < width - 1
    guess = tl.load(proposals_ptr + window * proposals_stride + place, mask=has_guess, other=0)
    probs_ptr += window.to(tl.int64) * probs_stride + place.to(tl.int64) * guess_stride
    guess_index = tl.load(index_ptr + window * index_stride + place, mask=has_guess, other=0)
    if SOME:
        has_guess &= tl.load(drawn_ptr + window) != 0
    q = tl.load(probs_ptr + guess_index, mask=has_guess, other=0.0)
    drawn = q > 0.0
    of_guess = tl.load(row_ptr + guess).to(tl.float32) * factor
    if FILTERED:
        of_guess = tl.where(of_guess >= threshold, of_guess, float("-inf"))
    p = tl.div_rn(exp_weights(of_guess - largest).to(tl.float32), total)
    low, high = row_key(seed, position, ACCEPT)
    coin = tl.minimum(uniform(random_words(low, high, tl.zeros([], tl.int32))), 0.999999940395355224609375)
    kept = drawn & (coin * q < p)  # p is 0 where the largest is no number

    best = tl.full([BLOCK], -2147483648, tl.int32)
    best_column = tl.zeros([BLOCK], tl.int32)
    if kept:
        best = tl.full([BLOCK], 2139095040, tl.int32)  # the rank of +inf
        best_column = tl.zeros([BLOCK], tl.int32) + guess.to(tl.int32)
    else:
        low, high = row_key(seed, position, TOKEN)
        reached = tl.full([], float("-inf"), tl.float32)
        begin = part * per_program
        for start in range(begin, tl.minimum(begin + per_program, vocab), BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < vocab
            score = _scores(row_ptr, column, inside, factor, threshold, FILTERED)
            if drawn:
                index = column
                there = inside
                if MAPPED:
                    index = tl.load(places_ptr + column, mask=inside, other=-1)
                    there = index >= 0
                of_p = tl.div_rn(exp_weights(score - largest).to(tl.float32), total)
                rest = of_p - tl.load(probs_ptr + index, mask=there, other=0.0)
                rest_log = log(tl.maximum(rest, 1.1754943508222875e-38))
                score = tl.where(rest > 0.0, rest_log, float("-inf"))
            words = random_words(low, high, column)
            best, best_column, reached = best_with_noise(
                best, best_column, reached, score, words, column, inside, is_random, start == begin
            )
    keys = (best.to(tl.int64) << 32) | (0x7FFFFFFF - best_column).to(tl.int64)
    tl.store(keys_ptr + row * parts + part, tl.max(keys, 0))


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _winner_kernel(
    logits_ptr, threshold_ptr, keys_ptr, out_ptr, temperature_ptr, seed_ptr, position_ptr, logits_stride,
    temperature_stride, seed_stride, position_stride, vocab, parts,
    TOKEN: tl.constexpr, FILTERED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's best; of p where rounding left nothing of a residual, which is as rare as p and q being the same."""
    row = tl.program_id(0)
    key = _best_key(keys_ptr, row, parts, PARTS)
    if (key >> 32) <= -2139095041:  # the rank of -inf
        row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
        factor, is_random = inverse_temperature(tl.load(temperature_ptr + row * temperature_stride))
        threshold = _threshold(threshold_ptr, row, FILTERED)
        seed = tl.load(seed_ptr + row * seed_stride).to(tl.int64)
        low, high = row_key(seed, tl.load(position_ptr + row * position_stride).to(tl.int64), TOKEN)
        bests = tl.full([BLOCK], -9223372036854775808, tl.int64)
        for start in range(0, vocab, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < vocab
            score = _scores(row_ptr, column, inside, factor, threshold, FILTERED)
            rank = ordered(score + gumbel(random_words(low, high, column)) * is_random)
            keys = (rank.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
            bests = tl.where(inside, tl.maximum(bests, keys), bests)
        key = tl.max(bests, 0)
    tl.store(out_ptr + row, key)


def _read_at_once(parts: int) -> int:
    return max(_PARTS, int(triton.next_power_of_2(parts)))


def _purpose(purpose: int) -> int:
    return (PURPOSE_STEP * (purpose + 1)) % 2**64


def draw_guesses(
    logits_RD: Tensor, ids_D: Tensor | None, temperature_B: Tensor, seed_B: Tensor, position_B: Tensor,
    threshold_R: Tensor | None, *, first: int, purpose: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(index int64 [R], probs float32 [R, D]) of rejection.draw_guesses.

    logits float32 or bfloat16, Q rows a request one after the other: drafts at ``position`` + ``first`` and on.
    temperature float32, seed int64, position any integers; ids int64. ``threshold_R`` float32: of the filters, if any.
    """
    rows, vocab = logits_RD.shape
    count = rows // temperature_B.shape[0]
    if logits_RD.stride(1) != 1:
        logits_RD = logits_RD.contiguous()
    device = logits_RD.device
    parts, per_program = split_rows(rows, vocab, _BLOCK)
    ranks_RP = torch.empty(rows, parts, dtype=torch.int32, device=device)
    keys_RP, sums_RP = torch.empty(2, rows, parts, dtype=torch.int64, device=device)
    largest_R = torch.empty(rows, dtype=torch.float32, device=device)
    probs_RD = torch.empty(rows, vocab, dtype=torch.float32, device=device)
    index_R = torch.empty(rows, dtype=torch.int64, device=device)
    threshold = largest_R if threshold_R is None else threshold_R
    columns = temperature_B, seed_B, position_B
    _row_max_kernel[(rows, parts)](
        logits_RD, keys_RP if ids_D is None else ids_D, threshold, ranks_RP, keys_RP, *columns, logits_RD.stride(0),
        *(column.stride(0) for column in columns), vocab, per_program, first, count,
        PURPOSE=_purpose(purpose), DRAW=True, MAPPED=ids_D is not None, FILTERED=threshold_R is not None, BLOCK=_BLOCK,
        num_warps=8,
        **EXACT,
    )  # fmt: skip
    _sum_weights(logits_RD, threshold_R, ranks_RP, sums_RP, largest_R, temperature_B, per_program)
    _softmax_kernel[(rows, parts)](
        logits_RD, threshold, sums_RP, largest_R, keys_RP, temperature_B, probs_RD, index_R, logits_RD.stride(0),
        temperature_B.stride(0), vocab, per_program, count,
        FILTERED=threshold_R is not None, PARTS=_read_at_once(parts), BLOCK=_BLOCK, num_warps=8,
        **EXACT,
    )  # fmt: skip
    return index_R, probs_RD


def window_candidates(
    logits_TV: Tensor, proposals_BQ: Tensor, probs_BQD: Tensor, index_BQ: Tensor, ids_D: Tensor | None,
    rows_B: Tensor | None, temperature_T: Tensor, seed_T: Tensor, position_T: Tensor, threshold_T: Tensor | None, *,
    token: int, accept: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(candidate int64 [T, 1], largest score float32 [T]) of each row of windows, for sampler.merge_and_check.

    logits float32 or bfloat16, after edits and penalties. proposals, index and ids int64, probs float32, rows bool: as
    rejection.Drafted has them. temperature float32, seed int64, position any integers. ``threshold_T`` float32: of the
    filters, if any. ``token`` and ``accept``: purposes of the noise and of the coin.
    """
    rows, vocab = logits_TV.shape
    if logits_TV.stride(1) != 1:
        logits_TV = logits_TV.contiguous()
    if proposals_BQ.stride(1) != 1:
        proposals_BQ = proposals_BQ.contiguous()
    probs_BQD, index_BQ = (part if part.stride(-1) == 1 else part.contiguous() for part in (probs_BQD, index_BQ))
    device = logits_TV.device
    parts, per_program = split_rows(rows, vocab, _BLOCK)
    ranks_TP = torch.empty(rows, parts, dtype=torch.int32, device=device)
    keys_TP, sums_TP = torch.empty(2, rows, parts, dtype=torch.int64, device=device)
    keys_T1 = torch.empty(rows, 1, dtype=torch.int64, device=device)
    largest_T = torch.empty(rows, dtype=torch.float32, device=device)
    filtered, threshold = threshold_T is not None, largest_T if threshold_T is None else threshold_T
    columns = temperature_T, seed_T, position_T
    strides = [column.stride(0) for column in columns]
    places_V = None
    if ids_D is not None:  # where each id of the target is among the draft ids, -1 where it is not
        places_D = torch.arange(ids_D.shape[0], dtype=torch.int32, device=device)
        places_V = torch.full((vocab,), -1, dtype=torch.int32, device=device).index_copy_(0, ids_D, places_D)
    _row_max_kernel[(rows, parts)](
        logits_TV, keys_TP, threshold, ranks_TP, keys_TP, *columns, logits_TV.stride(0), *strides, vocab, per_program,
        0, 1,
        PURPOSE=0, DRAW=False, MAPPED=False, FILTERED=False, BLOCK=_BLOCK, num_warps=8,
        **EXACT,
    )  # fmt: skip
    _sum_weights(logits_TV, threshold_T, ranks_TP, sums_TP, largest_T, temperature_T, per_program)
    _residual_kernel[(rows, parts)](
        logits_TV, threshold, sums_TP, largest_T, probs_BQD, index_BQ, ranks_TP if places_V is None else places_V,
        ranks_TP if rows_B is None else rows_B, proposals_BQ, keys_TP, *columns, logits_TV.stride(0),
        probs_BQD.stride(0), probs_BQD.stride(1), index_BQ.stride(0), proposals_BQ.stride(0), *strides, vocab,
        per_program, proposals_BQ.shape[1] + 1,
        TOKEN=_purpose(token), ACCEPT=_purpose(accept), FILTERED=filtered, MAPPED=places_V is not None,
        SOME=rows_B is not None, PARTS=_read_at_once(parts), BLOCK=_BLOCK, num_warps=8,
        **EXACT,
    )  # fmt: skip
    _winner_kernel[(rows,)](
        logits_TV, threshold, keys_TP, keys_T1, *columns, logits_TV.stride(0), *strides, vocab, parts,
        TOKEN=_purpose(token), FILTERED=filtered, PARTS=_read_at_once(parts), BLOCK=_BLOCK, num_warps=8,
        **EXACT,
    )  # fmt: skip
    return keys_T1, largest_T


def _sum_weights(
    logits_RV: Tensor, threshold_R: Tensor | None, ranks_RP: Tensor, sums_RP: Tensor, largest_R: Tensor,
    temperature_B: Tensor, per_program: int,
) -> None:  # fmt: skip
    rows, parts = ranks_RP.shape
    _weight_sum_kernel[(rows, parts)](
        logits_RV, largest_R if threshold_R is None else threshold_R, ranks_RP, sums_RP, largest_R, temperature_B,
        logits_RV.stride(0), temperature_B.stride(0), logits_RV.shape[1], per_program, rows // temperature_B.shape[0],
        FILTERED=threshold_R is not None, PARTS=_read_at_once(parts), BLOCK=_BLOCK, num_warps=8,
        **EXACT,
    )  # fmt: skip
