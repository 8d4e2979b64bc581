"""Activations as FP8 codes: float8_e4m3fn, a float32 scale for each row and group of columns.

Knows: how a group is quantised, and how weights are decoded. Does not know: products, or which inputs are quantised.

A group's scale is its largest magnitude / 448, so that no code saturates; a group of zeros has a scale, too.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parallel.layers.weight import Weight


@triton.jit
def quantised(x):
    """(codes, scales [rows]) of x [rows, columns], one group a row."""
    most = tl.maximum(tl.max(tl.abs(x.to(tl.float32)), 1), 1e-10)
    codes = (x.to(tl.float32) * (448.0 / most)[:, None]).to(tl.float8e4nv)
    return codes, most * (1.0 / 448.0)


@triton.jit
def _quantise_kernel(
    x_ptr, codes_ptr, scale_ptr, M, N, GROUP: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = tl.arange(0, BLOCK)
    at = row.to(tl.int64) * N + groups[:, None] * GROUP + columns[None, :]
    mask = (groups < N // GROUP)[:, None] & (columns < GROUP)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    codes, scales = quantised(tl.load(x_ptr + at, mask=mask, other=0.0))
    tl.store(codes_ptr + at, codes, mask=mask)
    tl.store(scale_ptr + groups * M + row, scales, mask=groups < N // GROUP)


def quantise(x_MK: Tensor, group: int, pdl: bool, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """(codes [rows, K] float8_e4m3fn, scales float32 [K / group, rows]) of a contiguous x; ``group`` divides K.

    ``rows``: at least M, the default; the others are not written.
    """
    tokens, inner = x_MK.shape
    rows = tokens if rows is None else rows
    codes_MK = torch.empty(rows, inner, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales_GM = torch.empty(inner // group, rows, dtype=torch.float32, device=x_MK.device)
    block = triton.next_power_of_2(group)
    groups = max(1, min(triton.next_power_of_2(inner // group), 2048 // block))
    if tokens:
        _quantise_kernel[tokens, triton.cdiv(inner // group, groups)](
            x_MK,
            codes_MK,
            scales_GM,
            rows,
            inner,
            GROUP=group,
            BLOCK=block,
            GROUPS=groups,
            PDL=pdl,
            num_warps=max(4, min(16, block // 512)),
            launch_pdl=pdl,
        )
    return codes_MK, scales_GM


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
