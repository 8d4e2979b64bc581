"""Codes in separate launches: activations quantised where no other kernel does it, weights of 8 and 4 bits decoded.

Knows: these launches. Does not know: the arithmetic of quantising (parallel/comm/quantise_triton.py), products, or
which inputs are quantised.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.traits import FLOAT8_CAPABILITY
from parallel.comm.quantise_triton import store_codes
from parallel.comm.quantised import SEPARATE, Quantised
from parallel.layers.weight import Weight


@triton.jit
def _quantise_kernel(
    x_ptr, codes_ptr, scale_ptr, pitch, N,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=0.0)
    if CAP > 0:  # NaN stays NaN
        x = tl.where(x > CAP, CAP, tl.where(x < -CAP, -CAP, x))
    store_codes(x, row, first, codes_ptr, scale_ptr, pitch, N, GROUP)


@triton.jit
def as_float(numbers):
    """Weights or scales in float32. uint8: codes of float8_e4m3fn but NaN (``readable``), whose exponent and fraction
    are those of a float16 256 times as small, its subnormal numbers included."""
    if numbers.dtype == tl.uint8:
        code = numbers.to(tl.int32)
        half = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.uint16)
        numbers = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return numbers.to(tl.float32)


def readable(data: Tensor) -> Tensor:
    """As kernels take weights or scales: codes of float8_e4m3fn as bytes where a GPU converts none (before sm_89)."""
    if data.dtype != torch.float8_e4m3fn or data.device.type == "cpu":
        return data
    return data if torch.cuda.get_device_capability(data.device) >= FLOAT8_CAPABILITY else data.view(torch.uint8)


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
            x_MK, *made.memory, inner,
            GROUP=group, BLOCK=block, CAP=cap or 0.0, PDL=pdl, num_warps=max(4, min(16, block // 512)), launch_pdl=pdl,
        )  # fmt: skip
    return made


@triton.jit
def _decode_kernel(
    codes_ptr, scale_ptr, out_ptr, size, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    codes = tl.load(codes_ptr + at, mask=mask, other=0.0)
    scale = tl.load(scale_ptr + at // K // ROWS * tl.cdiv(K, COLUMNS) + at % K // COLUMNS, mask=mask, other=0.0)
    tl.store(out_ptr + at, (as_float(codes) * scale).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _decode_four_bits_kernel(
    codes_ptr,  # uint8 [O, K / 2]
    scale_ptr,  # [O, groups]
    zero_ptr, factor_ptr, out_ptr,
    size,  # of codes_ptr
    K, GROUP, INT4: tl.constexpr,
    POWERS: tl.constexpr,  # scales are exponents
    ZEROS: tl.constexpr, FACTORS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    byte = tl.load(codes_ptr + at, mask=mask, other=0).to(tl.int32)
    code = tl.join(byte & 15, byte >> 4)
    row, column = at * 2 // K, at * 2 % K
    group = row * tl.cdiv(K, GROUP) + column // GROUP
    scale = tl.load(scale_ptr + group, mask=mask, other=0.0)
    if POWERS:
        bits = tl.where(scale == 0, 1 << 22, scale.to(tl.int32) << 23)  # 2^-127 has no exponent of its own
        scale = bits.to(tl.float32, bitcast=True)
    if INT4:
        zero = tl.full((BLOCK,), 8, tl.int32)
        if ZEROS:
            zero = tl.load(zero_ptr + group, mask=mask, other=0).to(tl.int32)
        number = (code - zero[:, None]).to(tl.float32)
    else:  # sign, exponent, fraction
        exponent, fraction = (code >> 1) & 3, code & 1
        twice = tl.where(exponent > 0, (2 + fraction) << tl.maximum(exponent - 1, 0), fraction)
        number = tl.where(code > 7, -twice, twice).to(tl.float32) * 0.5
    number *= as_float(scale)[:, None]
    if FACTORS:
        number *= tl.load(factor_ptr + row, mask=mask, other=0.0)[:, None]
    where = 2 * at[:, None] + tl.arange(0, 2)[None, :]
    tl.store(out_ptr + where, number.to(out_ptr.dtype.element_ty), mask=mask[:, None])


def _decoded_four_bits(weight: Weight, out_OK: Tensor, pdl: bool) -> Tensor:
    block, size, form = 2048, weight.data.numel(), weight.format
    assert form.block is not None
    assert weight.scale is not None
    _decode_four_bits_kernel[(triton.cdiv(size, block),)](
        weight.data, readable(weight.scale),
        *(weight.data if one is None else one for one in (weight.zero, weight.factor)),
        out_OK, size, weight.inner, form.block[1] or weight.inner, INT4=form.code == "int4",
        POWERS=form.scale_dtype == torch.uint8, ZEROS=weight.zero is not None, FACTORS=weight.factor is not None,
        BLOCK=block, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return out_OK


def decoded(weight: Weight, dtype: torch.dtype, pdl: bool) -> Tensor:
    """The numbers [O, K] that a matrix of codes means, in ``dtype``; the columns are those of the codes."""
    if weight.scale is None or weight.format.block is None:
        return weight.data
    rows, columns = weight.format.block
    out_OK = torch.empty(weight.cells.shape, dtype=dtype, device=weight.data.device)
    if weight.format.code is not None:
        return _decoded_four_bits(weight, out_OK, pdl)
    block = 4096
    _decode_kernel[(triton.cdiv(out_OK.numel(), block),)](
        readable(weight.data), weight.scale, out_OK, out_OK.numel(), weight.inner,
        ROWS=rows, COLUMNS=columns or weight.inner, BLOCK=block, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return out_OK
