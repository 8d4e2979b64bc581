"""Ancestors of draft-tree nodes in Triton, and tile sizes of the kernels that verify trees over recurrent state.

Knows: masks of ancestors, sums along paths, sizes of tiles. Does not know: a recurrence (delta_tree.py,
mamba2_tree.py).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def seen_nodes(seen_ptr, row, NODES: tl.constexpr, BLOCK: tl.constexpr):
    """bool [BLOCK, BLOCK]: whether the second is the first one's ancestor or itself; none after the last node."""
    node = tl.arange(0, BLOCK)
    inside = node < NODES
    seen = tl.load(seen_ptr + row.to(tl.int64) * NODES + node, mask=inside, other=0)
    bits = (seen[:, None] >> tl.minimum(tl.maximum(node - 1, 0), 31)[None, :]) & 1
    return ((node == 0)[None, :] | (bits == 1)) & inside[:, None] & inside[None, :]


@triton.jit
def along_paths(sees, x):
    """Of each node, the sum of ``x`` [BLOCK] over its ancestors and itself."""
    return tl.sum(tl.where(sees, x[None, :], 0.0), 1)


def tree_tiles(nodes: int, size: int, activations: torch.dtype) -> tuple[int, int, str, int]:
    """Nodes of a program, a power of two that matrix products take; how many of the ``size`` numbers of a key, or of a
    channel's state, it reads at once (with all, registers spill); precision of products with float32 state; warps.

    TF32 keeps three bits more than bfloat16, in which the result is stored.
    """
    full, block = activations == torch.float32, max(16, int(triton.next_power_of_2(nodes)))
    piece = min(16 if full else 32, max(16, int(triton.next_power_of_2(size))))
    return block, piece, "tf32x3" if full else "tf32", 4 if block <= 32 else 8
