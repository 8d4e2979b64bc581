"""What a kernel may do while its predecessor still runs (programmatic dependent launch, sm_90 and later).

Knows: the rules that the Triton kernels of this package keep. Does not know: any kernel.

A launch with ``launch_pdl`` starts once every program of the launch before it has called ``gdc_launch_dependents`` or
ended. The rules that keep this safe:

1. Every kernel calls ``gdc_wait`` before it reads what the launch before it wrote, and before its first write: the wait
   returns when that launch has ended, and its writes can be seen.
2. Every kernel calls ``gdc_launch_dependents`` after its own ``gdc_wait``. So when a kernel starts, every launch but
   the one before it has ended: what those wrote may be read at once.
3. Before the wait a kernel reads weights, and per-step metadata (lengths, pages, positions) whose writer is never the
   launch before it.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch_to_l2(pointers):
    """Ask for the cache lines of ``pointers`` without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
