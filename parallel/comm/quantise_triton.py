"""Activations quantised to FP8 in the kernel that makes them: float8_e4m3fn codes, a float32 scale for each row and
group of columns.

Knows: the arithmetic and where both are stored (parallel/comm/quantised.py). Does not know: which kernels do it.

A group's scale is its largest magnitude / 448, so that no code saturates; a group of zeros has a scale, too.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantised(x):
    """(codes, scales) of x [..., columns], one group a row."""
    most = tl.maximum(tl.max(tl.abs(x), -1).to(tl.float32), 1e-10)
    codes = (x.to(tl.float32) * tl.expand_dims(448.0 / most, -1)).to(tl.float8e4nv)
    return codes, most * (1.0 / 448.0)


@triton.jit
def store_codes(x, row, first, codes_ptr, scale_ptr, pitch, K, GROUP: tl.constexpr):
    """Quantises x [columns], in the dtype of activations: columns from ``first`` on of ``row`` of [M, K].

    There are a multiple of GROUP columns, a power of two, or GROUP, padded with zeros to a power of two. Not [1,
    columns]: with such an axis Triton 3.6 takes 93 shuffles for 4,096 columns instead of 16.
    """
    width: tl.constexpr = GROUP if x.shape[0] >= 2 * GROUP else x.shape[0]
    groups: tl.constexpr = x.shape[0] // width
    codes, scales = quantised(tl.reshape(x, (groups, width)))
    group = tl.arange(0, groups)
    columns = first + group[:, None] * width + tl.arange(0, width)[None, :]
    tl.store(codes_ptr + row.to(tl.int64) * K + columns, codes, mask=columns < K)
    number = first // GROUP + group
    tl.store(scale_ptr + number.to(tl.int64) * pitch + row, scales, mask=number * GROUP < K)
