"""RMSNorm with an optional residual add, two norms side by side, and SiLU-mul or GELU-mul, one Triton launch each.

Knows: row kernels over contiguous [T, N] activations, whose results may be quantised in the same launch. Does not know:
models, or which norms are fused elsewhere.

``pdl``: see models/kernels/dependent_launch.py.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.matmul.epilogue import gated_mul
from models.row_buckets import LARGE_STEP
from parallel.comm.quantise_triton import store_codes
from parallel.comm.quantised import Quantised, memory_of

# Batch-invariant: a row by itself, by code that depends on its width only


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, codes_ptr, scale_ptr, pitch, eps, N,
    BLOCK: tl.constexpr, ADD: tl.constexpr,
    NUMBERS: tl.constexpr,  # stores the result
    GROUP: tl.constexpr,  # stores it as codes, a scale for each GROUP of columns; 0: does not
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * N
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row + cols, mask=mask, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(residual_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row + cols, x, mask=mask)
    x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    out = (x * inverse * weight).to(x_ptr.dtype.element_ty)
    if NUMBERS:
        tl.store(out_ptr + row + cols, out, mask=mask)
    if GROUP > 0:
        store_codes(out, tl.program_id(0), 0, codes_ptr, scale_ptr, pitch, N, GROUP)


@triton.jit
def _joined_norms_kernel(x_ptr, x_norm_ptr, y_ptr, y_norm_ptr, out_ptr, eps, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A program a row and half of the result, each as _rms_norm_kernel does it."""
    row, second = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if second == 0:
        x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(x_norm_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    else:
        x = tl.load(y_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(y_norm_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    at = (2 * row + second) * N + cols
    tl.store(out_ptr + at, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    scale_ptr,  # where out is codes
    pitch,
    width,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale; 0: out is no codes
    FORM: tl.constexpr,  # see gated_mul
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    cols = first + tl.arange(0, BLOCK)
    mask = cols < width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(gate_up_ptr + row * 2 * width + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + cols, mask=mask, other=0.0).to(tl.float32)
    out = gated_mul(gate, up, FORM).to(gate_up_ptr.dtype.element_ty)
    if GROUP == 0:
        tl.store(out_ptr + row * width + cols, out, mask=mask)
    else:
        store_codes(out, row, first, out_ptr, scale_ptr, pitch, width, GROUP)


@triton.jit
def _relu2_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.maximum(tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32), 0.0)
    tl.store(out_ptr + at, (x * x).to(out_ptr.dtype.element_ty), mask=at < size)


def rms_norm(
    x_TN: Tensor, residual_TN: Tensor | None, weight_N: Tensor, eps: float, pdl: bool, into: Quantised | None = None
) -> Tensor:
    """rms_norm(x + residual) * weight, [T, N]; the sum, rounded to x's dtype, replaces ``residual_TN`` in place.

    With a residual and more than LARGE_STEP rows, the result replaces ``x_TN``, too. ``into``: gets it as codes; what
    is returned are its numbers, or x where it keeps none.
    """
    rows, width = x_TN.shape
    out_TN = x_TN
    if into is not None:
        out_TN = x_TN if into.numbers is None else into.numbers
    elif residual_TN is None or rows <= LARGE_STEP:
        out_TN = torch.empty_like(x_TN)
    if rows > 0:
        block = triton.next_power_of_2(width)
        _rms_norm_kernel[(rows,)](
            x_TN, x_TN if residual_TN is None else residual_TN, weight_N, out_TN,
            *((x_TN, x_TN, 0) if into is None else into.memory), eps, width,
            BLOCK=block, ADD=residual_TN is not None, NUMBERS=into is None or into.numbers is not None,
            GROUP=0 if into is None else into.group, PDL=pdl, num_warps=max(1, min(16, block // 512)), launch_pdl=pdl,
        )  # fmt: skip
    return out_TN


def joined_norms(x_TN: Tensor, x_norm_N: Tensor, y_TN: Tensor, y_norm_N: Tensor, eps: float, pdl: bool) -> Tensor:
    """rms_norm of two contiguous tensors of one dtype side by side, [T, 2N]."""
    rows, width = x_TN.shape
    out_TX = torch.empty(rows, 2 * width, dtype=x_TN.dtype, device=x_TN.device)
    if rows == 0:
        return out_TX
    block = triton.next_power_of_2(width)
    _joined_norms_kernel[(rows, 2)](
        x_TN, x_norm_N, y_TN, y_norm_N, out_TX, eps, width,
        BLOCK=block, PDL=pdl, num_warps=max(1, min(16, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return out_TX


def silu_mul(gate_up_T2I: Tensor, pdl: bool, into: Quantised | None = None, *, gelu: bool = False) -> Tensor:
    """silu(first half) * second half, [T, I], or gelu; with ``into`` its codes."""
    rows, width = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    group = 0 if into is None else into.group
    memory = memory_of(into or torch.empty(rows, width, dtype=gate_up_T2I.dtype, device=gate_up_T2I.device))
    if rows > 0:
        block = max(min(1024, triton.next_power_of_2(width)), triton.next_power_of_2(group))
        _silu_mul_kernel[(rows, triton.cdiv(width, block))](
            gate_up_T2I, *memory, width,
            BLOCK=block, GROUP=group, FORM=1 + gelu, PDL=pdl, num_warps=max(1, min(16, block // 256)), launch_pdl=pdl,
        )  # fmt: skip
    return memory[0]


def relu2(x_TI: Tensor, pdl: bool) -> Tensor:
    """max(x, 0)^2, [T, I]; x is contiguous."""
    out_TI = torch.empty_like(x_TI)
    if x_TI.numel() == 0:
        return out_TI
    block = 1024
    _relu2_kernel[(triton.cdiv(x_TI.numel(), block),)](
        x_TI, out_TI, x_TI.numel(), BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return out_TI
