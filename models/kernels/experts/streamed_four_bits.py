"""The experts of a sparse layer for very few tokens, with four-bit weights: as streamed.py, on tensor cores.

Knows: both launches, whose programs each sum a pair's tile in four warps that share K (matmul/four_bits.py).
Does not know: for how many tokens it is faster (tiles.py).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.experts.streamed import activated
from models.kernels.experts.tiles import largest_power
from models.kernels.matmul.four_bits import EXPERT_COLUMNS, constants_of, four_bit_sums, memory_of
from parallel.layers.weight import Weight

_ROWS = 16  # of weights in a tile
_TILE = {"BLOCK_K": EXPERT_COLUMNS, "PARTS": 4, "STAGES": 3}


@triton.jit
def _sums(
    x_row,  # pointer
    weight_ptr, scales_ptr, zeros_ptr, factors_ptr,
    rows,  # [ROWS] of the matrices of all experts
    K: tl.constexpr, SCALE_COLUMNS: tl.constexpr, CODES: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr,
    LIFT: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[ROWS], of one token, the first of a tensor core's eight."""
    steps: tl.constexpr = (K + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K)
    tokens = tl.arange(0, 8)
    sums = four_bit_sums(
        x_row + tokens * 0, tokens == 0, weight_ptr, scales_ptr, zeros_ptr, factors_ptr, rows, 0, K, steps,
        steps * PARTS * BLOCK_K == K, SCALE_COLUMNS, CODES, ZEROS, FACTORS, LIFT, BLOCK_K, PARTS, STAGES,
    )  # fmt: skip
    return tl.sum(sums, 1)


@triton.jit
def _four_bit_gate_up_kernel(
    x_ptr,
    weight_ptr,  # int16 [G, I or 2 * I with GATED, K / 4]
    scales_ptr, zeros_ptr, factors_ptr,
    bias_ptr,  # [G, rows of the weight], with BIAS
    limit,  # with CLAMPED
    chosen_ptr,
    hidden_ptr,  # [T * C, I]
    inner,  # I
    K: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,  # weight rows; half as many columns come out with GATED
    SCALE_COLUMNS: tl.constexpr, CODES: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr, LIFT: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr,
    GELU: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    matrices: tl.constexpr = 2 if GATED else 1
    width: tl.constexpr = BLOCK // matrices
    pair = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(chosen_ptr + pair)
    if expert >= 0:
        tile = tl.arange(0, BLOCK)  # rows 2j and 2j+1 are gate row j and up row j
        rows = tl.program_id(0) * width + tile // matrices + tile % matrices * inner
        rows = expert.to(tl.int64) * matrices * inner + rows
        sums = _sums(
            x_ptr + (pair // CHOICES).to(tl.int64) * K, weight_ptr, scales_ptr, zeros_ptr, factors_ptr, rows, K,
            SCALE_COLUMNS, CODES, ZEROS, FACTORS, LIFT, BLOCK_K, PARTS, STAGES,
        )  # fmt: skip
        if BIAS:
            sums += tl.load(bias_ptr + rows).to(tl.float32)
        if GATED:
            gate, up = tl.split(tl.reshape(sums, (width, 2)))
            result = activated(gate, up, limit, GATED, CLAMPED, GELU)
        else:
            result = activated(sums, sums, limit, GATED, CLAMPED, GELU)
        outs = tl.program_id(0) * width + tl.arange(0, width)
        tl.store(hidden_ptr + pair.to(tl.int64) * inner + outs, result.to(hidden_ptr.dtype.element_ty))


@triton.jit
def _four_bit_down_kernel(
    hidden_ptr,  # [T * C, K]
    weight_ptr,  # int16 [G, N, K / 4]
    scales_ptr, zeros_ptr, factors_ptr, bias_ptr,
    share_ptr,  # [T, C]
    chosen_ptr, out_ptr, N, K: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    CODES: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr, LIFT: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.range(CHOICES, num_stages=1):
        pair = token * CHOICES + choice
        expert = tl.load(chosen_ptr + pair)
        if expert >= 0:
            rows = expert.to(tl.int64) * N + outs
            sums = _sums(
                hidden_ptr + pair.to(tl.int64) * K, weight_ptr, scales_ptr, zeros_ptr, factors_ptr, rows, K,
                SCALE_COLUMNS, CODES, ZEROS, FACTORS, LIFT, BLOCK_K, PARTS, STAGES,
            )  # fmt: skip
            if BIAS:
                sums += tl.load(bias_ptr + rows).to(tl.float32)
            total += sums * tl.load(share_ptr + pair)
    tl.store(out_ptr + token.to(tl.int64) * N + outs, total.to(out_ptr.dtype.element_ty))


def expert_mlp(
    x_TN: Tensor, gate_up: Weight, down: Weight, weights_TC: Tensor, local_TC: Tensor, pdl: bool, *,
    limit: float | None = None,
) -> Tensor:  # fmt: skip
    """See the contract (models/ops). Both matrices are of four bits."""
    hidden, inner = down.outputs, down.inner
    tokens, choices = local_TC.shape
    if tokens == 0:
        return torch.empty_like(x_TN)
    gated = gate_up.outputs > inner
    hidden_PI = x_TN.new_empty(tokens * choices, inner)
    block = min(_ROWS, largest_power(gate_up.outputs))
    _four_bit_gate_up_kernel[(gate_up.outputs // block, tokens * choices)](
        x_TN, *memory_of(gate_up), local_TC if gate_up.bias is None else gate_up.bias, limit or 0.0, local_TC,
        hidden_PI, inner, K=hidden, CHOICES=choices, BLOCK=block, **constants_of(gate_up, x_TN.dtype), **_TILE,
        GATED=gated, CLAMPED=limit is not None, GELU=gate_up.gelu, BIAS=gate_up.bias is not None, PDL=pdl,
        num_warps=_TILE["PARTS"], launch_pdl=pdl,
    )  # fmt: skip
    out_TN = torch.empty_like(x_TN)
    block = min(_ROWS, largest_power(hidden))
    _four_bit_down_kernel[(hidden // block, tokens)](
        hidden_PI, *memory_of(down), local_TC if down.bias is None else down.bias, weights_TC, local_TC, out_TN, hidden,
        K=inner, CHOICES=choices, BLOCK=block, **constants_of(down, x_TN.dtype), **_TILE, BIAS=down.bias is not None,
        PDL=pdl, num_warps=_TILE["PARTS"], launch_pdl=pdl,
    )  # fmt: skip
    return out_TN
