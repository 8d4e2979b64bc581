"""Log-probabilities, ranks and top tokens in three launches and no [B, V] temporary.

Knows: the definitions of logprobs.py, its torch reference, bit for bit: weights are integers,
ranks are counts, and the top tokens are the largest packed candidates, so no order of reduction matters.
Does not know: which tokens were drawn or why.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.execute.sampling.draw_triton import ANY_NUMBER, ANY_POINTER, EXACT, exp_weights, log, ordered, score_of
from runtime.schedule.request import MAX_TOP_LOGPROBS

_BLOCK = 2048  # columns a program; it keeps them in registers while it takes its best tokens out one by one


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _gather_kernel(
    logits_ptr, tokens_ptr, keys_ptr, above_ptr, logits_stride, vocab, top,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The part's ``top`` best candidates, and how many of its logits are larger than the chosen token's."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    logits = tl.load(logits_ptr + row * logits_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    chosen = tl.load(logits_ptr + row * logits_stride + tl.load(tokens_ptr + row)).to(tl.float32)
    tl.store(above_ptr + row * parts + part, tl.sum((logits > chosen).to(tl.int32), 0))
    keys = (ordered(logits).to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
    keys = tl.where(inside, keys, -9223372036854775808)
    for index in range(top):
        best = tl.max(keys, 0)
        tl.store(keys_ptr + (row * parts + part) * top + index, best)
        keys = tl.where(keys == best, -9223372036854775808, keys)


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _weigh_kernel(
    logits_ptr, keys_ptr, weights_ptr, logits_stride, vocab, top,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The part's sum of exp(logit - largest)."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    index = tl.arange(0, PARTS)
    firsts = tl.load(keys_ptr + (row * parts + index) * top, mask=index < parts, other=-9223372036854775808)
    largest = score_of(tl.max(firsts, 0))
    column = part * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * logits_stride + column, mask=column < vocab, other=float("-inf"))
    tl.store(weights_ptr + row * parts + part, tl.sum(exp_weights(logits.to(tl.float32) - largest), 0))


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _report_kernel(
    logits_ptr, tokens_ptr, keys_ptr, above_ptr, weights_ptr, chosen_ptr, rank_ptr, top_ids_ptr, top_values_ptr,
    logits_stride, parts, top, top_n,
    PARTS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, PARTS)
    weights = tl.load(weights_ptr + row * parts + index, mask=index < parts, other=0)
    total = tl.sum(weights, 0).to(tl.float32) * 5.684341886080802e-14  # 2**-44
    log_total = log(tl.maximum(total, 1.0))
    above = tl.load(above_ptr + row * parts + index, mask=index < parts, other=0)
    tl.store(rank_ptr + row, tl.sum(above, 0) + 1)

    slots = tl.arange(0, KEYS)
    keys = tl.load(keys_ptr + row * parts * top + slots, mask=slots < parts * top, other=-9223372036854775808)
    largest = score_of(tl.max(keys, 0))
    chosen = tl.load(logits_ptr + row * logits_stride + tl.load(tokens_ptr + row)).to(tl.float32)
    tl.store(chosen_ptr + row, (chosen - largest) - log_total)
    for place in range(top_n):
        best = tl.max(keys, 0)
        missing = best == -9223372036854775808  # fewer tokens than asked for
        token = tl.where(missing, -1, 0x7FFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32)
        value = tl.where(missing, float("-inf"), (score_of(best) - largest) - log_total)
        tl.store(top_ids_ptr + row * top_n + place, token)
        tl.store(top_values_ptr + row * top_n + place, value)
        keys = tl.where(keys == best, -9223372036854775808, keys)


def token_logprobs(logits_BV: Tensor, tokens_B: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(chosen float32 [B], rank int32 [B], top_ids int32 [B, top_n], top_values float32 [B, top_n]).

    logits float32 or bfloat16, tokens int64 contiguous. Workspace: 8 * (top_n + 1) bytes for every 2048 logits.
    """
    rows, vocab = logits_BV.shape
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    device, parts, top = logits_BV.device, triton.cdiv(vocab, _BLOCK), max(1, top_n)
    keys_BPN = torch.empty(rows, parts, top, dtype=torch.int64, device=device)
    above_BP = torch.empty(rows, parts, dtype=torch.int32, device=device)
    weights_BP = torch.empty(rows, parts, dtype=torch.int64, device=device)
    chosen_B = torch.empty(rows, dtype=torch.float32, device=device)
    rank_B = torch.empty(rows, dtype=torch.int32, device=device)
    top_ids_BN = torch.empty(rows, top_n, dtype=torch.int32, device=device)
    top_values_BN = torch.empty(rows, top_n, dtype=torch.float32, device=device)
    grid, stride, padded = (rows, parts), logits_BV.stride(0), triton.next_power_of_2(parts)
    _gather_kernel[grid](
        logits_BV, tokens_B, keys_BPN, above_BP, stride, vocab, top, BLOCK=_BLOCK, num_warps=4, **EXACT
    )
    _weigh_kernel[grid](
        logits_BV, keys_BPN, weights_BP, stride, vocab, top, PARTS=padded, BLOCK=_BLOCK, num_warps=4, **EXACT
    )
    _report_kernel[(rows,)](
        logits_BV, tokens_B, keys_BPN, above_BP, weights_BP, chosen_B, rank_B, top_ids_BN, top_values_BN, stride, parts,
        top, top_n,
        PARTS=padded,
        KEYS=triton.next_power_of_2(parts * max(top, MAX_TOP_LOGPROBS)),  # the same for any number of likely tokens
        num_warps=4,
        **EXACT,
    )  # fmt: skip
    return chosen_B, rank_B, top_ids_BN, top_values_BN
