"""An element of the KV cache in Triton: how keys and values become what the cache holds.

Knows: dtypes of a cache, saturation of float8_e4m3fn. Does not know: where an element lies, rotation, attention.

Loads of single elements need no function: every code of float8_e4m3fn is exact in the 16-bit dtypes of queries. With
such a cache they are multiplied in float16, which one instruction makes of two codes; bfloat16 takes five, two of them
slow.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

# Of a register, two pairs of codes: the first of each, and the second of each. By casts Triton takes six instructions
# where prmt is one.
_NUMBERS_OF_PAIRS = tl.constexpr("""{
    .reg .b32 codes;
    .reg .b16 first, second;
    prmt.b32 codes, $2, 0, 0x3120;
    mov.b32 {first, second}, codes;
    cvt.rn.f16x2.e4m3x2 $0, first;
    cvt.rn.f16x2.e4m3x2 $1, second;
}""")


@triton.jit
def as_element(x, factor, compute: tl.constexpr, held: tl.constexpr, SCALED: tl.constexpr):
    """``x`` as a cache of dtype ``held`` keeps it: rounded to ``compute``, the dtype of queries, before anything else,
    as where the cache is of that dtype. ``factor``: of values with scales, when SCALED. NaN stays NaN.
    """
    x = x.to(compute)
    if held == tl.float8e4nv:
        x = x.to(tl.float32)
        if SCALED:
            x = x * factor
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    return x.to(held)


@triton.jit
def as_query(q, held: tl.constexpr):
    """Queries ``q`` in the dtype of products with keys of dtype ``held``; cut to what it has. NaN stays NaN."""
    if held == tl.float8e4nv and q.dtype == tl.bfloat16:
        q = q.to(tl.float32)
        q = tl.where(q > 65504.0, 65504.0, tl.where(q < -65504.0, -65504.0, q)).to(tl.float16)
    return q


@triton.jit
def numbers_of_pairs(pairs):
    """Float16 (of even places, of odd places) of int16 ``pairs`` of float8_e4m3fn codes. Tiles of pairs are turned for
    the tensor cores by an instruction (ldmatrix), those of single bytes are read byte by byte."""
    return tl.inline_asm_elementwise(_NUMBERS_OF_PAIRS, "=r,=r,r", [pairs], (tl.float16, tl.float16), True, 2)
