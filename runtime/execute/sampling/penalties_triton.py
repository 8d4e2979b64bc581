"""Penalties and the min_tokens mask in one launch: logits in, shaped float32 logits out.

Knows: the formulas of runtime/execute/sampling/penalties.py, its torch reference, bit for bit (true divisions, no fused
multiply-add). Does not know: slots, draws.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.execute.sampling.draw_triton import ANY_NUMBER, ANY_POINTER, EXACT
from runtime.execute.sampling.inputs import SamplingInputs

_BLOCK = 2048


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
    _shape_kernel[(rows, triton.cdiv(vocab, _BLOCK))](
        logits_BV, shaped_BV, counts_BV, prompt_BV, *penalties, stop_ids_BK, position_B, min_length_B,
        logits_BV.stride(0), counts_BV.stride(0), prompt_BV.stride(0), *(column_B.stride(0) for column_B in penalties),
        stop_ids_BK.stride(0), stop_ids_BK.stride(1), stop_ids_BK.shape[1], position_B.stride(0),
        min_length_B.stride(0), vocab, vocab_start,
        PENALTIES=seen is not None, MIN_TOKENS=min_tokens, BLOCK=_BLOCK, num_warps=8,
        **EXACT,
    )  # fmt: skip
    return shaped_BV
