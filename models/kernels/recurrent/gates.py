"""Element-wise ends of recurrent and gated layers in Triton: gated norms of heads, output gates, shared experts.

Knows: one token and head, or one token, a program. Does not know: what is gated.
``pdl``: see models/kernels/dependent_launch.py.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.recurrent.conv import silu
from parallel.comm.quantise_triton import store_codes
from parallel.comm.quantised import Quantised, memory_of

# Batch-invariant: a token by itself


@triton.jit
def _gated_norm_kernel(
    x_ptr, z_ptr, norm_ptr, z_stride, eps,
    HEADS: tl.constexpr, V: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads, vs = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
    at, mask = heads[:, None] * V + vs[None, :], (heads < HEADS)[:, None] & (vs < V)[None, :]
    norm = tl.load(norm_ptr + vs, mask=vs < V, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + token * (HEADS * V) + at, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + token * z_stride + at, mask=mask, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None]
    out = normed.to(x_ptr.dtype.element_ty).to(tl.float32) * norm[None, :] * silu(z)
    tl.store(x_ptr + token * (HEADS * V) + at, out.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sigmoid_mul_kernel(
    x_ptr, gate_ptr, out_ptr, scale_ptr, pitch, width, gate_stride,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GROUP: as in matmul/norm.py's SiLU-mul."""
    row = tl.program_id(0).to(tl.int64) * width
    first = tl.program_id(1) * BLOCK
    cols = first + tl.arange(0, BLOCK)
    mask = cols < width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
    gate_row = tl.program_id(0).to(tl.int64) * gate_stride
    gate = tl.load(gate_ptr + gate_row + cols, mask=mask, other=0.0).to(tl.float32)
    out = (x * tl.sigmoid(gate)).to(x_ptr.dtype.element_ty)
    if GROUP == 0:
        tl.store(out_ptr + row + cols, out, mask=mask)
    else:
        store_codes(out, tl.program_id(0), first, out_ptr, scale_ptr, pitch, width, GROUP)


@triton.jit
def _gated_add_kernel(
    x_ptr, y_ptr, hidden_ptr, gate_ptr, out_ptr, width, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * width
    whole = tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + whole, mask=whole < width, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    hidden = tl.load(hidden_ptr + row + whole, mask=whole < width, other=0.0).to(tl.float32)
    scale = tl.sigmoid(tl.sum(hidden * gate, 0))
    cols = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = cols < width
    x = tl.load(x_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + cols, (x + scale * y).to(out_ptr.dtype.element_ty), mask=mask)


def gated_norm_(x_TX: Tensor, z_TX: Tensor, norm_V: Tensor, eps: float, pdl: bool) -> Tensor:
    """rms_norm(x) norm silu(z) of each head of V columns, in place of x [T, heads * V]; z may be of a wider tensor."""
    tokens, width = x_TX.shape
    dim = len(norm_V)
    heads, block_v = width // dim, triton.next_power_of_2(dim)
    block_h = max(1, min(triton.next_power_of_2(heads), 2048 // block_v))
    if tokens:
        _gated_norm_kernel[(tokens, triton.cdiv(heads, block_h))](
            x_TX, z_TX, norm_V, z_TX.stride(0), eps,
            HEADS=heads, V=dim, BLOCK_H=block_h, BLOCK_V=block_v, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return x_TX


def sigmoid_mul(x_TX: Tensor, gate_TX: Tensor, pdl: bool, into: Quantised | None = None) -> Tensor:
    """x * sigmoid(gate), [T, X]; with ``into`` its codes. ``gate`` may be columns of a wider tensor."""
    x_TX = x_TX.contiguous()
    tokens, width = x_TX.shape
    group = 0 if into is None else into.group
    memory = memory_of(into or torch.empty_like(x_TX))
    if tokens:
        block = max(min(1024, triton.next_power_of_2(width)), triton.next_power_of_2(group))
        _sigmoid_mul_kernel[(tokens, triton.cdiv(width, block))](
            x_TX, gate_TX, *memory, width, gate_TX.stride(0),
            BLOCK=block, GROUP=group, PDL=pdl, num_warps=max(1, min(16, block // 256)), launch_pdl=pdl,
        )  # fmt: skip
    return memory[0]


def gated_add(x_TN: Tensor, y_TN: Tensor, hidden_TN: Tensor, gate_N: Tensor, pdl: bool) -> Tensor:
    """x + sigmoid(hidden . gate) y, [T, N]. Each program of a token sums the product anew: it is short."""
    tokens, width = x_TN.shape
    out_TN = torch.empty(tokens, width, dtype=x_TN.dtype, device=x_TN.device)
    if tokens:
        block = triton.next_power_of_2(width)
        _gated_add_kernel[(tokens, triton.cdiv(block, 1024))](
            x_TN.contiguous(), y_TN.contiguous(), hidden_TN.contiguous(), gate_N, out_TN, width,
            BLOCK=block, CHUNK=min(1024, block), PDL=pdl, num_warps=max(1, min(8, block // 512)), launch_pdl=pdl,
        )  # fmt: skip
    return out_TN
