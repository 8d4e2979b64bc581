"""The most probable tokens of a row with their log-probabilities, in Triton: two launches on one rank, four on several.

Knows: records, and that a row's record can be made of its parts' records, in any grouping. Does not know: drafters,
what becomes of a candidate. The torch references are in likeliest.py.

    record    int64 [count + 1]: the keys (packed_argmax.py) of some ids' most probable, best first, NO_CANDIDATE where
              there are fewer ids, and after them the key of (the logarithm of all their weights' sum, id 0)

Plain launches, without programmatic dependent launch, as those of draft_triton.py.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.execute.sampling.draw_triton import ordered, score_of

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
    """likeliest.ranked_in_torch: (ids int64, log-probabilities float32), [R, count] each, best first."""
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
