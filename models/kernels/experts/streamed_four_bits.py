"""The experts of a sparse layer for very few tokens, with four-bit weights: as streamed.py, on tensor cores.

Knows: both launches, whose programs sum a tile in warps that share K, and of the second the choices of a token, too
(matmul/fragments.py). Does not know: for how many tokens it is faster (tiles.py).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.experts.streamed import activated
from models.kernels.matmul.four_bits import constants_of, memory_of
from models.kernels.matmul.fragments import STEP, fragment_sums, tile_of
from models.row_buckets import power_of_two_from
from parallel.layers.weight import Weight

_WARPS, _MOST_WARPS = 4, 8
_STEPS = 6  # of a warp: more warps share K where it would take more


@triton.jit
def _four_bit_gate_up_kernel(
    x_ptr,
    weight_ptr,  # uint8 [G, I or 2 * I with GATED, K / 2]
    scales_ptr, zeros_ptr, factors_ptr,
    bias_ptr,  # [G, rows of the weight], with BIAS
    limit,  # with CLAMPED
    chosen_ptr,
    hidden_ptr,  # [T * C, I]
    inner,  # I
    K: tl.constexpr, CHOICES: tl.constexpr, SCALE_COLUMNS: tl.constexpr, CODES: tl.constexpr, ZEROS: tl.constexpr,
    FACTORS: tl.constexpr, LIFT: tl.constexpr, WARPS: tl.constexpr,  # share K
    STEPS: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    matrices: tl.constexpr = 2 if GATED else 1
    width: tl.constexpr = 16 // matrices
    pair = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(chosen_ptr + pair).to(tl.int64)
    if expert >= 0:
        # Rows 2j and 2j + 1 of a tile are gate row j and up row j.
        first = expert * matrices * inner + tl.program_id(0) * width
        thread = tl.arange(0, 32 * WARPS)
        g = thread % 32 // 4
        low = first + g // matrices + g % matrices * inner
        token = (pair // CHOICES).to(tl.int64) * K
        sums = fragment_sums(
            x_ptr + token + g * 0, g == 0, weight_ptr, scales_ptr, zeros_ptr, factors_ptr,
            (low, low + 8 // matrices), thread // 32 * 128 + thread % 4 * 32, WARPS * 128, STEPS, STEPS,
            STEPS * WARPS * 128 == K, K, SCALE_COLUMNS, CODES, ZEROS, FACTORS, LIFT, False,
        )  # fmt: skip
        sums = tl.sum(tile_of(sums, WARPS), 0)  # of one token and seven zeros
        if BIAS:
            tile = tl.arange(0, 16)
            sums += tl.load(bias_ptr + first + tile // matrices + tile % matrices * inner).to(tl.float32)
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
    weight_ptr,  # uint8 [G, N, K / 2]
    scale_ptr, zero_ptr, factor_ptr, bias_ptr,
    routed_share_ptr,  # [T, C], written before the launch right before: shares and chosen experts
    routed_ptr, out_ptr, N, K: tl.constexpr, CHOICES: tl.constexpr, SCALE_COLUMNS: tl.constexpr, CODES: tl.constexpr,
    ZEROS: tl.constexpr, FACTORS: tl.constexpr, LIFT: tl.constexpr, WARPS: tl.constexpr,
    PARTS: tl.constexpr,  # warps that share K of a choice
    STEPS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    AHEAD: tl.constexpr = 2 if ZEROS and STEPS > 2 else STEPS  # zeros take registers, too
    thread = tl.arange(0, 32 * WARPS)
    g, part, choice = thread % 32 // 4, thread // 32 % PARTS, thread // 32 // PARTS
    pair = token * CHOICES + choice
    expert = tl.load(routed_ptr + pair, mask=choice < CHOICES, other=-1).to(tl.int64)
    here = expert >= 0
    share = tl.load(routed_share_ptr + pair, mask=here, other=0.0)
    low = tl.where(here, expert * N + tl.program_id(0) * 16 + g, 0)
    high = tl.where(here, low + 8, 0)
    sums = fragment_sums(
        hidden_ptr + pair.to(tl.int64) * K, here & (g == 0), weight_ptr, scale_ptr, zero_ptr, factor_ptr,
        (low, high), part * 128 + thread % 4 * 32, PARTS * 128, STEPS, AHEAD, STEPS * PARTS * 128 == K, K,
        SCALE_COLUMNS, CODES, ZEROS, FACTORS, LIFT, PDL,
    )  # fmt: skip
    a, b, c, d = sums
    if BIAS:  # once a choice, to the first token's sums
        adds = here & (part == 0) & (thread % 4 == 0)
        a += tl.load(bias_ptr + low, mask=adds, other=0.0).to(tl.float32)
        c += tl.load(bias_ptr + high, mask=adds, other=0.0).to(tl.float32)
    total = tl.sum(tile_of((a * share, b * share, c * share, d * share), WARPS), 0)
    outs = tl.program_id(0) * 16 + tl.arange(0, 16)
    tl.store(out_ptr + token.to(tl.int64) * N + outs, total.to(out_ptr.dtype.element_ty))


def expert_mlp(
    x_TN: Tensor, gate_up: Weight, down: Weight, weights_TC: Tensor, local_TC: Tensor, pdl: bool, *,
    limit: float | None = None,
) -> Tensor:  # fmt: skip
    """See the contract (models/ops). Both matrices are of four bits, and ``fits`` (fragments.py)."""
    hidden, inner = down.outputs, down.inner
    tokens, choices = local_TC.shape
    if tokens == 0:
        return torch.empty_like(x_TN)
    gated = gate_up.outputs > inner
    hidden_PI = x_TN.new_empty(tokens * choices, inner)
    _four_bit_gate_up_kernel[(gate_up.outputs // 16, tokens * choices)](
        x_TN, *memory_of(gate_up), local_TC if gate_up.bias is None else gate_up.bias, limit or 0.0, local_TC,
        hidden_PI, inner, K=hidden, CHOICES=choices, **constants_of(gate_up, x_TN.dtype), WARPS=_WARPS,
        STEPS=triton.cdiv(hidden, _WARPS * STEP), GATED=gated, CLAMPED=limit is not None, GELU=gate_up.gelu,
        BIAS=gate_up.bias is not None, PDL=pdl, num_warps=_WARPS, launch_pdl=pdl,
    )  # fmt: skip
    out_TN = torch.empty_like(x_TN)
    parts, held = 1, power_of_two_from(choices)
    while triton.cdiv(inner, parts * STEP) > _STEPS and parts * held < _MOST_WARPS:
        parts *= 2
    _four_bit_down_kernel[(hidden // 16, tokens)](
        hidden_PI, *memory_of(down), local_TC if down.bias is None else down.bias, weights_TC, local_TC, out_TN, hidden,
        K=inner, CHOICES=choices, **constants_of(down, x_TN.dtype), WARPS=parts * held, PARTS=parts,
        STEPS=triton.cdiv(inner, parts * STEP), BIAS=down.bias is not None, PDL=pdl, num_warps=parts * held,
        launch_pdl=pdl,
    )  # fmt: skip
    return out_TN
