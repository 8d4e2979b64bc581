"""Programmatic dependent launch (PDL, sm_90 and later): what a kernel may do while its predecessor still runs.

Knows: the rules that the Triton kernels of this package keep. Does not know: any kernel.

A launch with ``launch_pdl`` starts once every program of the launch before it has called ``gdc_launch_dependents`` or
ended. These rules keep that safe:

1. Every kernel calls ``gdc_wait`` before it reads what its predecessor wrote, and before its first write. The wait
   returns when the predecessor has ended and its writes are visible.
2. Every kernel calls ``gdc_launch_dependents`` after its own ``gdc_wait``. So when a kernel starts, every launch but
   its predecessor has ended, and what those wrote may be read at once. Most kernels call it right after the wait. A
   ``late`` product (skinny.py, wide.py) calls it after its last weights, so that its successor prefetches while it
   ends; attention over a float8 cache, for products of codes (decode_list.py), after its last keys.
   A program with nothing to do may leave without waiting, as long as another one of its launch waits.
3. Before the wait a kernel reads only weights, and per-step metadata (lengths, pages, positions) that its predecessor
   never writes.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl


def dependent_launches(device: torch.device) -> bool:
    """Whether launches on ``device`` may use PDL: sm_90 and later, and not Triton's interpreter."""
    return device.type != "cpu" and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def prefetch_to_l2(pointers):
    """Prefetches the cache lines of ``pointers`` to L2 without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
