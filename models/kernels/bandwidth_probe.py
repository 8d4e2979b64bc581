"""A kernel that reads memory and does almost nothing else: it measures a GPU's bandwidth.

Knows: how to keep enough loads in flight. Does not know: what is timed (launch/doctor/ceilings.py).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# 32 KiB a program, eight loads of 16 bytes a thread. Compiled for Hopper it has 31 registers, so eight programs share a
# multiprocessor, and it issues six loads before it needs the first: 192 KiB in flight. One block a program and no loop,
# so that the last wave is a small part of all programs.
BLOCK = 8192
_WARPS = 8


@triton.jit
def _read_kernel(values_ptr, out_ptr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    values = tl.load(values_ptr + program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + program, tl.max(values, 0))


def block_maxima(values_N: Tensor, out_P: Tensor | None = None) -> Tensor:
    """The maximum of every BLOCK consecutive values: [N] int32, contiguous -> [N / BLOCK] int32.

    Reads everything once and writes one value in BLOCK. Raises ValueError where N is not a multiple of BLOCK or the
    dtype is not int32: a mask or a narrower type would distort the measurement.
    """
    if values_N.dtype != torch.int32 or not values_N.is_contiguous() or values_N.numel() % BLOCK:
        raise ValueError(
            f"{values_N.numel()} values of {values_N.dtype} cannot be read in blocks: give contiguous torch.int32, a "
            f"multiple of {BLOCK} of them"
        )
    programs = values_N.numel() // BLOCK
    if out_P is None:
        out_P = torch.empty(programs, dtype=torch.int32, device=values_N.device)
    if programs:
        _read_kernel[(programs,)](values_N, out_P, BLOCK=BLOCK, num_warps=_WARPS)
    return out_P
