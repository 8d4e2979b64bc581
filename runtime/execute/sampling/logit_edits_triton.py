"""Penalties with the min_tokens mask, and edits of logits that name tokens, in one launch each: logits in, float32
logits out; edits also in place.

Knows: the arithmetic of penalties.py and logit_edits.py, the torch references, bit for bit (true divisions, no fused
multiply-add). Does not know: slots, draws.

A program of edits has a block of a row's columns. It stores the block, masked, then changes the few of them that the
row's biases name, then those that its bad words do: a barrier lies between, for the second looks at what the first
wrote. In place, programs of rows without edits end at once.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.execute.sampling.draw_triton import ANY_NUMBER, ANY_POINTER, EXACT
from runtime.execute.sampling.inputs import SamplingInputs
from runtime.execute.sampling.token_tables_triton import state_after, table_of
from runtime.grammar_tables.token_table import SINK
from runtime.schedule.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS

_SHAPED = 2048


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _shape_kernel(
    logits_ptr, out_ptr, counts_ptr, prompt_ptr, repetition_ptr, frequency_ptr, presence_ptr, stop_ids_ptr,
    position_ptr, min_length_ptr, logits_stride, counts_stride, prompt_stride, repetition_stride, frequency_stride,
    presence_stride, stop_ids_stride, stop_id_stride, stop_ids, position_stride, min_length_stride, vocab, vocab_start,
    PENALTIES: tl.constexpr, MIN_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    score = tl.load(logits_ptr + row * logits_stride + column, mask=inside, other=0.0).to(tl.float32)
    if PENALTIES:
        count = tl.load(counts_ptr + row * counts_stride + column, mask=inside, other=0)
        prompt = tl.load(prompt_ptr + row * prompt_stride + column, mask=inside, other=0)
        seen = (count > 0) | (prompt != 0)
        repetition = tl.where(seen, tl.load(repetition_ptr + row * repetition_stride), 1.0)
        score = tl.where(score > 0, tl.div_rn(score, repetition), score * repetition)
        score = score - count.to(tl.float32) * tl.load(frequency_ptr + row * frequency_stride)
        score = score - (count > 0).to(tl.float32) * tl.load(presence_ptr + row * presence_stride)
    if MIN_TOKENS:  # noqa: SIM102 (settled when compiling; the inner one when running)
        if tl.load(position_ptr + row * position_stride) < tl.load(min_length_ptr + row * min_length_stride):
            for index in range(stop_ids):
                stop = tl.load(stop_ids_ptr + row * stop_ids_stride + index * stop_id_stride)
                score = tl.where(column + vocab_start == stop, score + float("-inf"), score)
    tl.store(out_ptr + row * vocab + column, score, mask=inside)


def shape_logits(
    logits_BV: Tensor, vocab_start: int, params: SamplingInputs, seen: tuple[Tensor, Tensor] | None, *, min_tokens: bool
) -> Tensor:
    """penalties.shape_logits. Columns of ``params`` may be strided."""
    rows, vocab = logits_BV.shape
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    shaped_BV = torch.empty(rows, vocab, dtype=torch.float32, device=logits_BV.device)
    counts_BV, prompt_BV = seen if seen is not None else (logits_BV, logits_BV)
    penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    stop_ids_BK, position_B, min_length_B = params.stop_ids, params.position, params.min_length
    _shape_kernel[(rows, triton.cdiv(vocab, _SHAPED))](
        logits_BV, shaped_BV, counts_BV, prompt_BV, *penalties, stop_ids_BK, position_B, min_length_B,
        logits_BV.stride(0), counts_BV.stride(0), prompt_BV.stride(0), *(column_B.stride(0) for column_B in penalties),
        stop_ids_BK.stride(0), stop_ids_BK.stride(1), stop_ids_BK.shape[1], position_B.stride(0),
        min_length_B.stride(0), vocab, vocab_start,
        PENALTIES=seen is not None, MIN_TOKENS=min_tokens, BLOCK=_SHAPED, num_warps=8,
        **EXACT,
    )  # fmt: skip
    return shaped_BV


_BLOCK = 2048
_BLOCK_IN_PLACE = 8192  # most programs have nothing to do
_BIASES_AT_ONCE = 256
_WORDS_AT_ONCE = 32


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _edit_kernel(
    logits_ptr, out_ptr, slots_ptr, recent_ptr, states_ptr, sizes_ptr, bias_ids_ptr, biases_ptr, bad_ptr, allowed_ptr,
    pool_ptr, rows_ptr, logits_stride, out_stride, recent_stride, allowed_stride, vocab, vocab_start,
    COPY: tl.constexpr, OF_SLOTS: tl.constexpr, NOTHING: tl.constexpr, MOST_BIASES: tl.constexpr,
    MOST_BAD_WORDS: tl.constexpr, BAD_WORD_TOKENS: tl.constexpr, BIASES_AT_ONCE: tl.constexpr,
    WORDS_AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    slot = tl.load(slots_ptr + row)
    biases = tl.load(sizes_ptr + slot * 3)
    bad_words = tl.load(sizes_ptr + slot * 3 + 1)
    masked = tl.load(sizes_ptr + slot * 3 + 2)
    begin, following, classes = table_of(rows_ptr, slot)
    out_ptr += row * out_stride
    last = tl.minimum(first + BLOCK, vocab)
    edits = bad_words + masked + classes
    if COPY:
        edits += 1  # of all rows
    if edits > 0:
        column = first + tl.arange(0, BLOCK)
        inside = column < vocab
        token = column + vocab_start
        score = tl.load(logits_ptr + row * logits_stride + column, mask=inside, other=0.0).to(tl.float32)
        if masked > 0:
            word = tl.load(allowed_ptr + slot * allowed_stride + token // 32, mask=inside, other=0)
            barred = (word >> (token % 32)) & 1 == 0
            if not OF_SLOTS:  # no row that is masked so has a table
                forced = tl.load(states_ptr + row)
                barred = tl.where(forced > 0, token != forced - 1, barred)
            score = tl.where(barred, score + float("-inf"), score)
        if classes > 0:
            if OF_SLOTS:
                state = tl.load(rows_ptr + slot * 4 + 3)
            else:
                state = tl.load(states_ptr + row)
            of = tl.load(pool_ptr + begin + token, mask=inside, other=0).to(tl.int32)
            after = tl.load(pool_ptr + following + state * classes + of, mask=inside, other=0)
            score = tl.where(after == NOTHING, score + float("-inf"), score)
        tl.store(out_ptr + column, score, mask=inside)
    if COPY:  # noqa: SIM102 (settled when compiling; the inner one when running)
        if biases > 0:
            tl.debug_barrier()
            for start in range(0, biases, BIASES_AT_ONCE):
                index = start + tl.arange(0, BIASES_AT_ONCE)
                used = index < biases
                at = tl.load(bias_ids_ptr + slot * MOST_BIASES + index, mask=used, other=-1) - vocab_start
                here = used & (at >= first) & (at < last)
                bias = tl.load(biases_ptr + slot * MOST_BIASES + index, mask=here, other=0.0)
                tl.store(out_ptr + at, tl.load(out_ptr + at, mask=here, other=0.0) + bias, mask=here)
    if bad_words > 0:
        tl.debug_barrier()
        place = tl.arange(0, BAD_WORD_TOKENS)
        before = place < BAD_WORD_TOKENS - 1
        if OF_SLOTS:
            recent = tl.load(recent_ptr + slot * recent_stride + place, mask=before, other=-1)
        else:
            recent = tl.load(recent_ptr + row * recent_stride + place, mask=before, other=-1)
        for start in range(0, bad_words, WORDS_AT_ONCE):
            index = start + tl.arange(0, WORDS_AT_ONCE)
            used = index < bad_words
            word_ptr = bad_ptr + (slot * MOST_BAD_WORDS + index) * BAD_WORD_TOKENS
            ids = tl.load(word_ptr[:, None] + place[None, :], mask=used[:, None] & before[None, :], other=-1)
            differs = (ids != -1) & (ids != recent[None, :])
            follows = tl.sum(differs.to(tl.int32), 1) == 0
            at = tl.load(word_ptr + BAD_WORD_TOKENS - 1, mask=used, other=-1) - vocab_start
            here = used & follows & (at >= first) & (at < last)
            banned = tl.load(out_ptr + at, mask=here, other=0.0).to(tl.float32) + float("-inf")
            tl.store(out_ptr + at, banned, mask=here)


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _advance_kernel(
    recent_ptr, pool_ptr, rows_ptr, slots_ptr, tokens_ptr, count_ptr, tokens_stride,
    HISTORY: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    count = tl.load(count_ptr + row)
    tokens_ptr += row * tokens_stride
    if count > 0:
        place = tl.arange(0, PLACES)
        inside = place < HISTORY
        recent_ptr += slot * HISTORY
        moved = place + count
        older = tl.load(recent_ptr + moved, mask=moved < HISTORY, other=0)
        newer = tl.load(tokens_ptr + moved - HISTORY, mask=inside & (moved >= HISTORY), other=0)
        tl.debug_barrier()  # all is read before any is overwritten
        tl.store(recent_ptr + place, tl.where(moved < HISTORY, older, newer.to(tl.int32)), mask=inside)
        begin, following, classes = table_of(rows_ptr, slot)
        if classes > 0:
            state = tl.load(rows_ptr + slot * 4 + 3)
            for index in range(count):
                state = state_after(pool_ptr, begin, following, classes, state, tl.load(tokens_ptr + index))
            tl.store(rows_ptr + slot * 4 + 3, state)


def edit_logits(
    logits_RV: Tensor, edits: tuple[Any, Tensor, Tensor | None, Tensor | None, bool], vocab_start: int = 0, *,
    in_place: bool = False,
) -> Tensor:  # fmt: skip
    """Edited float32 or bfloat16 logits [R, V]: in place, or a float32 copy. ``edits``: RowEdits of logit_edits.py."""
    (*tables, allowed_SW, recent_SH, (pool_PE, rows_S4, _)), slots_R, recent_RH, states_R, _ = edits
    rows, vocab = logits_RV.shape
    if logits_RV.stride(1) != 1:
        logits_RV = logits_RV.contiguous()
    edited_RV = logits_RV if in_place else logits_RV.new_empty(rows, vocab, dtype=torch.float32)
    recent = recent_SH if recent_RH is None else recent_RH
    if recent.shape[1] != (history := MAX_BAD_WORD_TOKENS - 1) or recent.stride(1) != 1:
        raise ValueError(f"recent tokens are {tuple(recent.shape)}: they must be {history} a row, side by side")
    block = _BLOCK_IN_PLACE if in_place else _BLOCK
    _edit_kernel[(rows, triton.cdiv(vocab, block))](
        logits_RV, edited_RV, slots_R, recent, rows_S4 if states_R is None else states_R, *tables, allowed_SW, pool_PE,
        rows_S4, logits_RV.stride(0), edited_RV.stride(0), recent.stride(0), allowed_SW.stride(0), vocab, vocab_start,
        COPY=not in_place, OF_SLOTS=recent_RH is None, NOTHING=SINK, MOST_BIASES=MAX_LOGIT_BIAS,
        MOST_BAD_WORDS=MAX_BAD_WORDS, BAD_WORD_TOKENS=MAX_BAD_WORD_TOKENS, BIASES_AT_ONCE=_BIASES_AT_ONCE,
        WORDS_AT_ONCE=_WORDS_AT_ONCE, BLOCK=block, num_warps=8,
        **EXACT,
    )  # fmt: skip
    return edited_RV


def advance_edits(tables: tuple[Any, ...], slots_B: Tensor, tokens_BW: Tensor, count_B: Tensor) -> None:
    """``tables``: LogitEdits of logit_edits.py."""
    *_, recent_SH, (pool_PE, rows_S4, _) = tables
    if tokens_BW.stride(1) != 1:
        tokens_BW = tokens_BW.contiguous()
    _advance_kernel[(len(slots_B),)](
        recent_SH, pool_PE, rows_S4, slots_B, tokens_BW, count_B, tokens_BW.stride(0),
        HISTORY=recent_SH.shape[1], PLACES=triton.next_power_of_2(recent_SH.shape[1]), num_warps=1,
    )  # fmt: skip
