"""FP8 codes in separate launches: activations quantised where no other kernel does it, weights decoded.

Knows: both launches. Does not know: the arithmetic of quantising (parallel/comm/quantise_triton.py), products, or which
inputs are quantised.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parallel.comm.quantise_triton import store_codes
from parallel.comm.quantised import SEPARATE, Quantised
from parallel.layers.weight import Weight


@triton.jit
def _quantise_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    pitch,
    M,
    N,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    CAP: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) + tl.arange(0, 1)
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * N + columns[None, :], mask=(columns < N)[None, :], other=0.0)
    if CAP > 0:  # NaN stays NaN
        x = tl.where(x > CAP, CAP, tl.where(x < -CAP, -CAP, x))
    store_codes(x, row, first, codes_ptr, scale_ptr, pitch, M, N, GROUP)


def group_of(weight: Weight) -> int:
    """Columns of activations that share a scale, where they are quantised for ``weight``."""
    assert weight.format.block is not None
    return weight.format.block[1] or weight.inner


def quantised_by(weight: Weight, x_MK: Tensor, pdl: bool) -> Quantised:
    """A contiguous x, for products with ``weight``."""
    return quantise(x_MK, group_of(weight), pdl, cap=weight.format.activation_cap)


def quantise(x_MK: Tensor, group: int, pdl: bool, into: Quantised | None = None, cap: float | None = None) -> Quantised:
    """A contiguous x, cut to +-``cap``, one scale for each row and ``group`` of columns, which divides K."""
    tokens, inner = x_MK.shape
    made = Quantised.empty(tokens, inner, group, x_MK.dtype, x_MK.device) if into is None else into
    block = max(triton.next_power_of_2(group), min(2048, triton.next_power_of_2(inner)))
    if tokens:
        SEPARATE.count += 1
        _quantise_kernel[tokens, triton.cdiv(inner, block)](
            x_MK,
            *made.memory,
            tokens,
            inner,
            GROUP=group,
            BLOCK=block,
            CAP=cap or 0.0,
            PDL=pdl,
            num_warps=max(4, min(16, block // 512)),
            launch_pdl=pdl,
        )
    return made


@triton.jit
def _decode_kernel(
    codes_ptr,
    scale_ptr,
    out_ptr,
    size,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    codes = tl.load(codes_ptr + at, mask=mask, other=0.0)
    scale = tl.load(scale_ptr + at // K // ROWS * tl.cdiv(K, COLUMNS) + at % K // COLUMNS, mask=mask, other=0.0)
    tl.store(out_ptr + at, (codes.to(tl.float32) * scale).to(out_ptr.dtype.element_ty), mask=mask)


def decoded(weight: Weight, dtype: torch.dtype, pdl: bool) -> Tensor:
    """The numbers [O, K] that a matrix of codes means, in ``dtype``."""
    if weight.scale is None or weight.format.block is None:
        return weight.data
    if weight.format.code is not None:
        return weight.plain(dtype)
    rows, columns = weight.format.block
    out_OK = torch.empty(weight.data.shape, dtype=dtype, device=weight.data.device)
    block = 4096
    _decode_kernel[(triton.cdiv(out_OK.numel(), block),)](
        weight.data,
        weight.scale,
        out_OK,
        out_OK.numel(),
        weight.inner,
        ROWS=rows,
        COLUMNS=columns or weight.inner,
        BLOCK=block,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )
    return out_OK
