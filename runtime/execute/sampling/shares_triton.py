"""Top-k, top-p and min-p in Triton: on one rank two passes over the logits and four launches; on several what they
exchange instead of logits, a rank's share in four launches and the merge in one.

Knows: the definitions of filters.py and shares.py, the torch references, whose survivors are found exactly: counts and
weights are integers, so no order of reduction matters, and a row's token does not depend on its batch. Does not know:
how tokens are listed (listing_triton.py), how a threshold is found (threshold_triton.py), who carries the exchange.
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
    inverse_temperature,
    ordered,
    random_words,
    row_key,
    unordered,
)
from runtime.execute.sampling.inputs import MOST_SHARED_TOP_K
from runtime.execute.sampling.limits_triton import is_finite, limits, min_p_threshold
from runtime.execute.sampling.listing_triton import MOST_PARTS, list_tokens, parts_of
from runtime.execute.sampling.search_triton import SWEPT, block_of, highest_reaching
from runtime.execute.sampling.threshold_triton import find_threshold, mass_limit

PIECE = 256  # rows whose workspace exists at once


class Filtered(NamedTuple):
    """``keys`` int64 [B, 1]: each row's best surviving candidate. ``threshold`` and ``largest`` float32 [B]."""

    keys: Tensor
    threshold: Tensor
    largest: Tensor


def filtered_candidates(
    logits_BV: Tensor, vocab_start: int, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor,
    seed_B: Tensor, position_B: Tensor, *, purpose: int = 0,
) -> Filtered:  # fmt: skip
    """The best candidate of each row among what survives its filters, from logits before temperature.

    logits float32 or bfloat16; temperature, top_p and min_p float32, top_k int32, seed int64, position any integers.
    The threshold may lie between scores; the survivors, score >= threshold, are those of filters.survival_threshold.
    A greedy row keeps its largest. A row without finite logits, or with NaN or inf, has no candidate. Workspace:
    150 KiB a row, of 256 rows at most.
    """
    rows, vocab = logits_BV.shape
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    device = logits_BV.device
    found = Filtered(
        keys=torch.empty(rows, 1, dtype=torch.int64, device=device),
        threshold=torch.empty(rows, dtype=torch.float32, device=device),
        largest=torch.empty(rows, dtype=torch.float32, device=device),
    )
    for begin in range(0, rows, PIECE):
        piece = slice(begin, begin + PIECE)
        columns = [c[piece] for c in (temperature_B, top_k_B, top_p_B, min_p_B, seed_B, position_B)]
        space = list_tokens(logits_BV[piece], vocab_start, vocab, *columns, purpose=purpose, share=False)
        find_threshold(
            logits_BV[piece], vocab_start, *columns, *(out[piece] for out in found), space=space, purpose=purpose
        )
    return found


_NO_LIMIT = 2**31 - 1  # a vocabulary that no top_k reaches


@triton.jit
def _noisy(token, low, high, is_random):
    """Tokens packed with their noise; those below every token stay there."""
    score = unordered((token >> 32).to(tl.int32))
    ids = (0x7FFFFFFF - (token & 0xFFFFFFFF)).to(tl.int32)
    noisy = score + gumbel(random_words(low, high, ids)) * is_random
    packed = (ordered(noisy).to(tl.int64) << 32) | (token & 0xFFFFFFFF)
    return tl.where(token == -9223372036854775808, token, packed)


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _distinct_kernel(
    logits_ptr, bounds_ptr, partial_ptr, listed_ptr, list_ptr, share_ptr, temperature_ptr, top_k_ptr, seed_ptr,
    position_ptr, logits_stride, temperature_stride, top_k_stride, seed_stride, position_stride, vocab, vocab_start,
    parts,
    PURPOSE: tl.constexpr, PARTS: tl.constexpr, LISTED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """A row's largest distinct scores, how many tokens have each, and the best candidate among these."""
    row = tl.program_id(0)
    floor = tl.load(bounds_ptr + row * 4)
    ceiling = tl.load(bounds_ptr + row * 4 + 1)
    largest = tl.load(bounds_ptr + row * 4 + 3)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    factor, is_random = inverse_temperature(temperature)
    top_k = tl.load(top_k_ptr + row * top_k_stride)
    k, _top_p, _min_p = limits(temperature, top_k, 1.0, 0.0, 2147483647)
    entry = tl.arange(0, SIZE)
    words = tl.full([SIZE], -9223372036854775808, tl.int64)
    keys = tl.full([SIZE], -9223372036854775808, tl.int64)
    if (ceiling == float("-inf")) | (not is_finite(largest)):
        best = tl.full([], -9223372036854775808, tl.int64)
        if is_finite(largest):
            part = tl.arange(0, PARTS)
            partial = tl.load(partial_ptr + (row * parts + part) * 4 + 3, mask=part < parts, other=-9223372036854775808)
            best = tl.max(partial, 0)
        words = tl.where(entry == 0, (ordered(largest).to(tl.int64) << 32) | 1, words)
        keys = tl.where(entry == 0, best, keys)
    else:
        seed = tl.load(seed_ptr + row * seed_stride).to(tl.int64)
        low, high = row_key(seed, tl.load(position_ptr + row * position_stride).to(tl.int64), PURPOSE)
        listed = tl.load(listed_ptr + row)
        taken = tl.zeros([], tl.int32)
        place = tl.zeros([], tl.int32)
        if (listed <= TILE) & ((listed >= k) | (floor <= -3.4028234663852886e38)):
            slot = tl.arange(0, TILE)
            tokens = list_ptr + row.to(tl.int64) * LISTED + slot
            token = tl.load(tokens, mask=slot < listed, other=-9223372036854775808)
            rank = (token >> 32).to(tl.int32)
            drawn = _noisy(token, low, high, is_random)
            while (place < SIZE) & (taken < tl.minimum(k, listed)):
                top = tl.max(rank, 0)
                count = tl.sum((rank == top).to(tl.int32), 0)
                best = tl.max(tl.where(rank == top, drawn, -9223372036854775808), 0)
                rank = tl.where(rank == top, -2147483648, rank)
                words = tl.where(entry == place, (top.to(tl.int64) << 32) | count.to(tl.int64), words)
                keys = tl.where(entry == place, best, keys)
                taken += count
                place += 1
        else:  # the estimate missed, or thousands of tokens have the same score: two passes over the logits a score
            row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
            under = tl.full([], 9223372036854775807, tl.int64)
            while (place < SIZE) & (taken < tl.minimum(k, vocab)):
                highest = tl.full([BLOCK], -2147483648, tl.int64)
                for start in range(0, vocab, BLOCK):
                    rank = block_of(row_ptr, start, vocab, factor, vocab_start, False, BLOCK) >> 32
                    highest = tl.maximum(highest, tl.where(rank < under, rank, -2147483648))
                under = tl.max(highest, 0)
                counts = tl.zeros([BLOCK], tl.int32)
                bests = tl.full([BLOCK], -9223372036854775808, tl.int64)
                for start in range(0, vocab, BLOCK):
                    token = block_of(row_ptr, start, vocab, factor, vocab_start, False, BLOCK)
                    same = (token >> 32) == under
                    counts += same.to(tl.int32)
                    bests = tl.where(same, tl.maximum(bests, _noisy(token, low, high, is_random)), bests)
                count = tl.sum(counts, 0)
                words = tl.where(entry == place, (under << 32) | count.to(tl.int64), words)
                keys = tl.where(entry == place, tl.max(bests, 0), keys)
                taken += count
                place += 1
    share = share_ptr + row * 2 * SIZE + entry
    tl.store(share, words)
    tl.store(share + SIZE, keys)


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _merge_kernel(
    shares_ptr, keys_ptr, largest_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, temperature_stride,
    top_k_stride, top_p_stride, min_p_stride, entries,
    SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A row's threshold among the ranks' entries, and the best candidate of those that survive."""
    row = tl.program_id(0)
    slot = tl.arange(0, TILE)
    place = shares_ptr + row * 2 * entries + slot // SIZE * (2 * SIZE) + slot % SIZE
    word = tl.load(place, mask=slot < entries, other=-9223372036854775808)
    key = tl.load(place + SIZE, mask=slot < entries, other=-9223372036854775808)
    rank, count = (word >> 32).to(tl.int32), word & 0xFFFFFFFF
    largest = unordered(tl.max(rank, 0))
    best = tl.full([], -9223372036854775808, tl.int64)
    if is_finite(largest):
        k, p, m = limits(
            tl.load(temperature_ptr + row * temperature_stride), tl.load(top_k_ptr + row * top_k_stride),
            tl.load(top_p_ptr + row * top_p_stride), tl.load(min_p_ptr + row * min_p_stride), 2147483647,
        )  # fmt: skip
        reached = tl.full([], -2139095041, tl.int64)  # the rank of -inf
        threshold = tl.full([], float("-inf"), tl.float32)
        if k > 0:
            top = ordered(largest).to(tl.int64)
            reached = highest_reaching(rank, count, k.to(tl.int64), reached, top)
            if p < 1.0:
                weight = tl.where(rank >= reached.to(tl.int32), exp_weights(unordered(rank) - largest) * count, 0)
                limit = mass_limit(tl.sum(weight, 0), p)
                reached = highest_reaching(rank, weight, limit, reached, top)
            threshold = tl.maximum(unordered(reached.to(tl.int32)), min_p_threshold(largest, m))
        best = tl.max(tl.where(unordered(rank) >= threshold, key, -9223372036854775808), 0)
    tl.store(keys_ptr + row, best)
    tl.store(largest_ptr + row, largest)


def local_share(
    logits_BV: Tensor, vocab_start: int, temperature_B: Tensor, top_k_B: Tensor, seed_B: Tensor, position_B: Tensor, *,
    purpose: int = 0,
) -> Tensor:  # fmt: skip
    """A rank's share of each row, int64 [B, 2 * MOST_SHARED_TOP_K], from its logits (float32 or bfloat16, V >= 1).

    temperature float32, top_k int32 at most MOST_SHARED_TOP_K, seed int64, position any integers.
    """
    rows, vocab = logits_BV.shape
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    share_BX = torch.empty(rows, 2 * MOST_SHARED_TOP_K, dtype=torch.int64, device=logits_BV.device)
    for begin in range(0, rows, PIECE):
        piece = slice(begin, begin + PIECE)
        temperature, top_k, seed, position = columns = [
            column[piece] for column in (temperature_B, top_k_B, seed_B, position_B)
        ]
        logits_RV = logits_BV[piece]
        space = list_tokens(
            logits_RV, vocab_start, _NO_LIMIT, temperature, top_k,
            temperature,  # top-p and min-p are for the whole row to decide: not read for anything
            temperature, seed, position,
            purpose=purpose, share=True,
        )  # fmt: skip
        _distinct_kernel[(len(logits_RV),)](
            logits_RV, space.bounds, space.partial, space.listed, space.tokens, share_BX[piece], *columns,
            logits_RV.stride(0), *(column.stride(0) for column in columns), vocab, vocab_start, parts_of(vocab)[0],
            PURPOSE=(PURPOSE_STEP * (purpose + 1)) % 2**64, PARTS=MOST_PARTS, LISTED=space.tokens.shape[1],
            SIZE=MOST_SHARED_TOP_K, BLOCK=SWEPT, TILE=space.scratch.shape[1], num_warps=8,
            **EXACT,
        )  # fmt: skip
    return share_BX


def merge_shares(
    shares_BX: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor
) -> tuple[Tensor, Tensor]:
    """(best candidate int64 [B, 1], largest score float32 [B]) of all ranks' shares, side by side in any order."""
    rows = shares_BX.shape[0]
    entries = shares_BX.shape[1] // 2
    keys_B1 = torch.empty(rows, 1, dtype=torch.int64, device=shares_BX.device)
    largest_B = torch.empty(rows, dtype=torch.float32, device=shares_BX.device)
    columns = temperature_B, top_k_B, top_p_B, min_p_B
    _merge_kernel[(rows,)](
        shares_BX.contiguous(), keys_B1, largest_B, *columns, *(column.stride(0) for column in columns), entries,
        SIZE=MOST_SHARED_TOP_K, TILE=triton.next_power_of_2(entries), num_warps=4,
        **EXACT,
    )  # fmt: skip
    return keys_B1, largest_B
