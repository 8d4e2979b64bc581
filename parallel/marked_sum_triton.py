"""The sum of every rank's rows in one launch, through words that name their exchange, for messages of few rows.

Knows: how a program tells by the words themselves that another rank's part is there. Does not know: process groups,
which sums are small enough (symmetric.py), where words lie (marked_words_triton.py).

A program has one row on every rank. It writes its part into the other ranks' memory, reads theirs in its own until all
words are of this exchange, and adds all parts in rank order: the result has the same bits everywhere. Words of all
ranks are read in one go, over and over, since one after the other would be a trip to the L2 for each rank.

The launch before the sum may have PUSHED already: a product that stores each tile of its result into the others'
memory (marked_words_triton.py), while other tiles are still computed. Then this launch writes nothing.

Why two places are enough. Say A writes its part of exchange e + 1 of a row, from its sum or from the product before it,
where the parts of e - 1 were. It does so after its wait, hence after A's sum e, which had seen B's words of e. B wrote
those in its own sum e or the product before that, after B's launches before it had ended: whatever read the parts of
e - 1 on B was among them. The counter is on the device and shared with the other kinds of exchange, which keep the same
promise (parts_triton.py), so calls of any kind and any number of rows may follow each other, in graphs and out of
them; but between a product that pushes and its sum no other exchange of these rows may run.

A word that was never rewritten could be taken for one of now after 2**32 exchanges exactly; sums rewrite them.

Of dependent launches (models/kernels/dependent_launch.py) it keeps the rules. The launch after it begins while this one
still waits for the other ranks, and has its weights on the way.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parallel.marked_words_triton import next_marks, payload_of, with_mark, words_of_part
from parallel.places import WORD_BYTES, Places

MOST_WARPS = 16


@triton.jit
def _halves(words, element: tl.constexpr):
    """A word's two numbers, the lower one first, in float32."""
    low = words.to(tl.int16).to(element, bitcast=True)
    return low.to(tl.float32), (words >> 16).to(tl.int16).to(element, bitcast=True).to(tl.float32)


@triton.jit
def _marked_sum_kernel(
    x_ptr,  # int32 [rows, WORDS]: two numbers a word, here and below
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    memory,  # WORLD addresses, with a layout that parallel/places.py knows
    exchanges_ptr,  # int32 [ROWS], of this rank
    eps,
    BF16: tl.constexpr,  # bfloat16, otherwise float16
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    PUSHED: tl.constexpr,
    PDL: tl.constexpr,
):
    element: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < WORDS
    where = row.to(tl.int64) * WORDS + cols
    if NORM:
        weight_low, weight_high = _halves(tl.load(weight_ptr + cols, mask=mask, other=0), element)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + where, mask=mask, other=0)
    mark = next_marks(exchanges_ptr, row, ROWS)
    if not PUSHED:
        words = with_mark(x, mark)
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                theirs = words_of_part(memory[rank], mark, RANK, row, WORLD, ROWS, ROW_BYTES)
                tl.store(theirs + cols, words, mask=mask)
    if ADD:
        low_before, high_before = _halves(tl.load(residual_ptr + where, mask=mask, other=0), element)
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    missing = 1
    while missing != 0:
        low = tl.zeros((BLOCK,), tl.float32)
        high = tl.zeros((BLOCK,), tl.float32)
        late = tl.zeros((BLOCK,), tl.int32)
        for rank in tl.static_range(WORLD):
            payload = x
            if rank != RANK:
                mine = words_of_part(memory[RANK], mark, rank, row, WORLD, ROWS, ROW_BYTES)
                seen = tl.load(mine + cols, mask=mask, other=0, volatile=True)
                late |= (seen >> 32).to(tl.int32) ^ mark
                payload = seen.to(tl.int32)
            low_part, high_part = _halves(payload, element)
            low += low_part
            high += high_part
        missing = tl.max(((late != 0) & mask).to(tl.int32), 0)
    tl.debug_barrier()  # every thread has read the count before one thread changes it
    tl.store(exchanges_ptr + row, mark)
    low, high = low.to(element), high.to(element)
    if ADD:
        low = (low.to(tl.float32) + low_before).to(element)
        high = (high.to(tl.float32) + high_before).to(element)
    if NORM:
        tl.store(residual_out_ptr + where, payload_of(low, high), mask=mask)
        low_kept, high_kept = low.to(tl.float32), high.to(tl.float32)
        scale = tl.rsqrt(tl.sum(low_kept * low_kept + high_kept * high_kept, 0) / (2 * WORDS) + eps)
        low = (low_kept * scale * weight_low).to(element)
        high = (high_kept * scale * weight_high).to(element)
    tl.store(out_ptr + where, payload_of(low, high), mask=mask)


def marked_sum(
    x_TN: Tensor,
    places: Places,
    *,
    residual_TN: Tensor | None = None,
    norm_N: Tensor | None = None,
    eps: float = 0.0,
    pushed: bool = False,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """As parallel/one_shot_triton.py ``one_shot``, for a type of 16 bits, an even width and places of marked
    words.

    ``pushed``: the launch before this one has put x into the places of the other ranks.
    """
    tokens, width = x_TN.shape
    out_TN = torch.empty_like(x_TN)
    normed = norm_N is not None
    kept_TN = torch.empty_like(x_TN) if normed else out_TN
    given = (x_TN, x_TN if residual_TN is None else residual_TN, x_TN if norm_N is None else norm_N, out_TN, kept_TN)
    words = 2 * width // WORD_BYTES
    block = triton.next_power_of_2(words)
    _marked_sum_kernel[(tokens,)](
        *(tensor.view(torch.int32) for tensor in given),
        eps=eps,
        BF16=x_TN.dtype == torch.bfloat16,
        WORDS=words,
        BLOCK=block,
        **places.arguments(),
        ADD=residual_TN is not None,
        NORM=normed,
        PUSHED=pushed,
        PDL=pdl,
        num_warps=max(1, min(MOST_WARPS, block // 128)),
        launch_pdl=pdl,
    )
    return out_TN, kept_TN
