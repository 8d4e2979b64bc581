"""What a drafter does outside its layers, in Triton, one launch each: rows laid out, a token chosen, a state kept, a
round's script drawn.

Knows: the arithmetic of draft_rows.py, guesses.py, mtp.py and synthetic.py, which hold the torch references; that a
row's record can be made of its parts' records, in any grouping. Does not know: drafters,
which words of a record mean what (columns come as tensors, strides included).

    record    int64 [count + 1]: the keys (packed_argmax.py) of some ids' most probable, best first, NO_CANDIDATE where
              there are fewer ids, and after them the key of (the logarithm of all their weights' sum, id 0)

All are plain launches, without programmatic dependent launch, as those of step_io_triton.py.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.execute.sampling.draw_triton import EXACT, PURPOSE_STEP, ordered, random_words, row_key, score_of, uniform

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False


_BLOCK = 2048  # logits of a program, which keeps them in registers while it takes out the best one by one
_NONE = tl.constexpr(-9223372036854775808)  # packed_argmax.NO_CANDIDATE
_NOTHING = tl.constexpr(-9187343241983295489)  # the key of (-inf, id 0): the logarithm of a sum of nothing
_NAN = tl.constexpr(0x7FC00000)  # what draw_triton.ordered makes of NaN, above every other score


@triton.jit
def _log_sum(values):
    """logsumexp, with torch's answers where a value is infinite or NaN."""
    largest = tl.max(values, 0)
    base = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    return tl.log(tl.sum(tl.exp(values - base), 0)) + base


@triton.jit
def _total_key(total, largest):
    """The key of a logarithm, which is NaN if the ``largest`` of what was summed is: maxima of floats pass it over."""
    total = tl.where(largest == _NAN, float("nan"), total)
    return (ordered(total).to(tl.int64) << 32) | 0x7FFFFFFF


@triton.jit(do_not_specialize=["vocab", "vocab_start"], do_not_specialize_on_alignment=["logits_ptr"])
def _shortlist_kernel(
    logits_ptr, records_ptr, logits_stride, vocab, vocab_start, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """The record of one part of a row's logits."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    score = tl.load(logits_ptr + row * logits_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    record_ptr = records_ptr + (row * parts + part) * (COUNT + 1)
    rank = ordered(score)
    tl.store(record_ptr + COUNT, _total_key(_log_sum(score), tl.max(rank, 0)))
    keys = (rank.to(tl.int64) << 32) | (0x7FFFFFFF - (column + vocab_start)).to(tl.int64)
    keys = tl.where(inside, keys, _NONE)
    for index in range(COUNT):
        best = tl.max(keys, 0)
        tl.store(record_ptr + index, best)
        keys = tl.where(keys == best, _NONE, keys)


@triton.jit(do_not_specialize=["parts", "size"])
def _merge_kernel(
    records_ptr, map_ptr, out_ptr, out_logprob_ptr, parts, size,
    COUNT: tl.constexpr, FINAL: tl.constexpr, MAPPED: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One record of ``parts`` records, or, of the last ones (FINAL), ids and log-probabilities."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = records_ptr + row * parts * (COUNT + 1)
    part = tl.arange(0, PARTS)
    totals = tl.load(row_ptr + part * (COUNT + 1) + COUNT, mask=part < parts, other=_NOTHING)
    largest = tl.max((totals >> 32).to(tl.int32), 0)
    total = _log_sum(score_of(totals))
    lane = tl.arange(0, KEYS)
    place = lane // COUNT * (COUNT + 1) + lane % COUNT
    keys = tl.load(row_ptr + place, mask=lane < parts * COUNT, other=_NONE)
    if FINAL:
        total = score_of(_total_key(total, largest))
    else:
        tl.store(out_ptr + row * (COUNT + 1) + COUNT, _total_key(total, largest))
    for index in range(COUNT):
        best = tl.max(keys, 0)
        if FINAL:
            token = tl.minimum(0x7FFFFFFF - (best & 0xFFFFFFFF), size - 1)
            if MAPPED:
                token = tl.load(map_ptr + token)
            tl.store(out_ptr + row * COUNT + index, token)
            tl.store(out_logprob_ptr + row * COUNT + index, score_of(best) - total)
        else:
            tl.store(out_ptr + row * (COUNT + 1) + index, best)
        keys = tl.where(keys == best, _NONE, keys)


def shortlist(logits_RV: Tensor, vocab_start: int, count: int, *, merged: bool) -> Tensor:
    """int64 [R, P * (count + 1)]: records of P parts of each row, of ids from ``vocab_start`` on; P is 1 where
    ``merged``. Logits of any float type."""
    rows, vocab = logits_RV.shape
    if logits_RV.stride(1) != 1:
        logits_RV = logits_RV.contiguous()
    parts = triton.cdiv(vocab, _BLOCK)
    records = torch.empty(rows, parts * (count + 1), dtype=torch.int64, device=logits_RV.device)
    _shortlist_kernel[(rows, parts)](
        logits_RV, records, logits_RV.stride(0), vocab, vocab_start, COUNT=count, BLOCK=_BLOCK, num_warps=4
    )
    if not merged or parts == 1:
        return records
    found = torch.empty(rows, count + 1, dtype=torch.int64, device=logits_RV.device)
    _merge(records, count, None, 0, found, None)
    return found


def ranked(records_RX: Tensor, count: int, ids_V: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
    """guesses.ranked_in_torch: (ids int64, log-probabilities float32), [R, count] each, best first."""
    shape, device = (len(records_RX), count), records_RX.device
    ids_RC = torch.empty(shape, dtype=torch.int64, device=device)
    logprobs_RC = torch.empty(shape, dtype=torch.float32, device=device)
    _merge(records_RX.contiguous(), count, ids_V, size, ids_RC, logprobs_RC)
    return ids_RC, logprobs_RC


def _merge(
    records_RX: Tensor, count: int, ids_V: Tensor | None, size: int, out: Tensor, out_logprobs: Tensor | None
) -> None:
    rows, width = records_RX.shape
    parts = width // (count + 1)
    _merge_kernel[(rows,)](
        records_RX, records_RX if ids_V is None else ids_V, out, out if out_logprobs is None else out_logprobs, parts,
        size,
        COUNT=count, FINAL=out_logprobs is not None, MAPPED=ids_V is not None, PARTS=triton.next_power_of_2(parts),
        KEYS=triton.next_power_of_2(parts * count), num_warps=4,
    )  # fmt: skip


_PAGES = 1024  # of a row's page table that one program copies
_WIDTH = 1024  # numbers of a state that one program copies


@triton.jit(do_not_specialize=["rows", "count", "positions", "mask_token"])
def _lay_out_drafts_kernel(
    rows_ptr, last_token_ptr, length_ptr, finished_ptr, pages_ptr, live_ptr, out_pages_ptr, position_ptr, kv_slot_ptr,
    entries_ptr, token_ptr, rows, count, positions, mask_token, words, last_token_stride, max_blocks,
    BLOCK_SIZE: tl.constexpr, CHAIN: tl.constexpr, COUNT: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(rows_ptr + row)
    page_index = part * PAGES + tl.arange(0, PAGES)
    in_table = page_index < max_blocks
    pages = tl.load(pages_ptr + slot * max_blocks + page_index, mask=in_table, other=0)
    tl.store(out_pages_ptr + row * max_blocks + page_index, pages, mask=in_table)
    if part == 0:
        live = tl.load(finished_ptr + row * words) == 0
        length = tl.where(live, tl.load(length_ptr + row * words), 2)
        number = tl.arange(0, COUNT)
        inside = number < count
        if CHAIN:
            place = length - 2 + number
            at = number * rows + row
        else:
            place = length - 1 + number
            at = row * count + number
        page_of = place // BLOCK_SIZE
        there = inside & live & (page_of < max_blocks)
        page = tl.load(pages_ptr + slot * max_blocks + page_of, mask=there, other=0)
        kv_slot = page.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE
        if CHAIN:
            kv_slot = tl.where(number == 0, length % BLOCK_SIZE, kv_slot)
            tl.store(entries_ptr + at, place + 1, mask=inside)
        else:
            token = tl.where(number == 0, tl.load(last_token_ptr + row * last_token_stride), mask_token)
            tl.store(token_ptr + at, token, mask=inside)
            tl.store(entries_ptr + row, length - 1 + count)
        tl.store(position_ptr + at, tl.minimum(place, positions - 1).to(tl.int64), mask=inside)
        tl.store(kv_slot_ptr + at, kv_slot, mask=inside)
        tl.store(live_ptr + row, live)


@triton.jit(do_not_specialize=["parts", "size"], do_not_specialize_on_alignment=["token_ptr"])
def _choose_kernel(keys_ptr, ids_ptr, token_ptr, parts, size, MAPPED: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    key = tl.max(tl.load(keys_ptr + row * parts + part, mask=part < parts, other=-9223372036854775808), 0)
    token = tl.minimum(0x7FFFFFFF - (key & 0xFFFFFFFF), size - 1)
    if MAPPED:
        token = tl.load(ids_ptr + token)
    tl.store(token_ptr + row, token)


@triton.jit(do_not_specialize_on_alignment=["last_ptr", "gained_ptr"])
def _keep_newest_kernel(bank_ptr, state_ptr, rows_ptr, last_ptr, gained_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if tl.load(gained_ptr + row):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        state = tl.load(state_ptr + tl.load(last_ptr + row) * width + column, mask=column < width, other=0.0)
        tl.store(bank_ptr + tl.load(rows_ptr + row) * width + column, state, mask=column < width)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["seed_ptr", "position_ptr", "kept_ptr"])
def _script_kernel(
    seed_ptr, position_ptr, rates_ptr, kept_ptr, seed_stride, position_stride, count,
    PURPOSE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    seed = tl.load(seed_ptr + row * seed_stride).to(tl.int64)
    low, high = row_key(seed, tl.load(position_ptr + row * position_stride).to(tl.int64), PURPOSE)
    number = tl.arange(0, COUNT)
    coin = tl.minimum(uniform(random_words(low, high, tl.zeros([COUNT], tl.int32))), 0.999999940395355224609375)
    rate = tl.load(rates_ptr + number, mask=number < count, other=0.0)
    tl.store(kept_ptr + row, tl.sum(((coin < rate) & (number < count)).to(tl.int32), 0))


def lay_out(
    rows_B: Tensor, last_token_B: Tensor, length_B: Tensor, finished_B: Tensor, block_table_SP: Tensor, count: int, *,
    block_size: int, positions: int, mask_token: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Parts of DraftRows of slots ``rows_B`` (int64, contiguous): live_B, page_table_BP, positions, kv_slots, entries,
    and tokens_BQ, which means nothing of a chain. ``mask_token``: of blocks; None of chains.

    last_token int64, length and finished int32: columns of gathered records. Block table int32, contiguous.
    """
    chain, rows, max_blocks = mask_token is None, len(rows_B), block_table_SP.shape[1]
    shape = (count, rows) if chain else (rows, count)

    def empty(*sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=rows_B.device)

    live_B, pages_BP = empty(rows, dtype=torch.bool), empty(rows, max_blocks, dtype=torch.int32)
    place, kv_slots, entries = empty(*shape), empty(*shape), empty(*(shape if chain else (rows,)), dtype=torch.int32)
    tokens = place if chain else empty(*shape)
    pages = min(_PAGES, triton.next_power_of_2(max_blocks))
    _lay_out_drafts_kernel[(rows, triton.cdiv(max_blocks, pages))](
        *(rows_B, last_token_B, length_B, finished_B, block_table_SP),
        *(live_B, pages_BP, place, kv_slots, entries, tokens), rows, count, positions,
        0 if mask_token is None else mask_token, length_B.stride(0), last_token_B.stride(0), max_blocks,
        BLOCK_SIZE=block_size, CHAIN=chain, COUNT=triton.next_power_of_2(count), PAGES=pages, num_warps=4,
    )  # fmt: skip
    return live_B, pages_BP, place, kv_slots, entries, tokens


def choose(keys_RP: Tensor, ids_V: Tensor | None, size: int) -> Tensor:
    """int64 [R]: the id of each row's largest key (packed_argmax.py; int64), at most size - 1, by ``ids_V`` (int64)
    where given."""
    rows, parts = keys_RP.shape
    token_R = torch.empty(rows, dtype=torch.int64, device=keys_RP.device)
    _choose_kernel[(rows,)](
        keys_RP.contiguous(), token_R if ids_V is None else ids_V, token_R, parts, size,
        MAPPED=ids_V is not None, PARTS=triton.next_power_of_2(parts), num_warps=1,
    )  # fmt: skip
    return token_R


def keep(bank_SN: Tensor, state_TN: Tensor, rows_B: Tensor, last_B: Tensor, gained_B: Tensor) -> None:
    """mtp.keep_newest_in_torch of a contiguous bank. Rows that gained are of different slots."""
    width = bank_SN.shape[1]
    block = min(_WIDTH, triton.next_power_of_2(width))
    _keep_newest_kernel[(len(rows_B), triton.cdiv(width, block))](
        bank_SN, state_TN.contiguous(), rows_B, last_B, gained_B, width, BLOCK=block, num_warps=4
    )


def script(seed_B: Tensor, position_B: Tensor, rates_Q: Tensor, *, purpose: int) -> Tensor:
    """synthetic.kept_in_torch: int32 [B]. Seed int64 and position int32, of any stride; rates float32, contiguous."""
    kept_B = torch.empty(len(seed_B), dtype=torch.int32, device=seed_B.device)
    _script_kernel[(len(seed_B),)](
        seed_B, position_B, rates_Q, kept_B, seed_B.stride(0), position_B.stride(0), len(rates_Q),
        PURPOSE=(PURPOSE_STEP * (purpose + 1)) % 2**64, COUNT=triton.next_power_of_2(len(rates_Q)), num_warps=1,
        **EXACT,
    )  # fmt: skip
    return kept_B
