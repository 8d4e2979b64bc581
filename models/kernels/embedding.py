"""Rows of a vocabulary-parallel embedding in one Triton launch.

Knows: that a rank holds a range of ids, and has zeros for all others. Does not know: the sum over ranks that follows.
``pdl``: see models/kernels/dependent_launch.py.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Batch-invariant: copies

_BLOCK = 2048


@triton.jit
def _vocab_rows_kernel(
    weight_ptr,  # [.., width]
    ids_ptr,  # int64 [T]
    out_ptr,  # [T, width]
    width, first, held,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(ids_ptr + token) - first
    own = (row >= 0) & (row < held)
    x = tl.load(weight_ptr + row * width + cols, mask=mask & own, other=0.0)
    tl.store(out_ptr + token.to(tl.int64) * width + cols, x, mask=mask)


def vocab_rows(weight_VN: Tensor, ids_T: Tensor, first: int, held: int, pdl: bool) -> Tensor:
    """See Ops.vocab_rows. Contiguous ``weight_VN`` and ``ids_T``."""
    tokens, width = len(ids_T), weight_VN.shape[1]
    out_TN = weight_VN.new_empty(tokens, width)
    if tokens:
        block = min(_BLOCK, triton.next_power_of_2(width))
        _vocab_rows_kernel[(tokens, triton.cdiv(width, block))](
            weight_VN, ids_T, out_TN, width, first, held,
            BLOCK=block, PDL=pdl, num_warps=max(1, block // 512), launch_pdl=pdl,
        )  # fmt: skip
    return out_TN
