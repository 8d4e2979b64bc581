"""Draft trees in Triton: a program a row, which keeps the whole tree in registers.

Knows: the arithmetic of draft_tree.py, which holds the torch reference. Does not know: who proposed a tree.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _lay_out_kernel(
    parents_ptr, all_parents_ptr, depth_ptr, seen_ptr, NODES: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    there = lane < NODES
    others = (lane > 0) & there
    parent = tl.load(parents_ptr + row * (NODES - 1) + lane - 1, mask=others, other=0)
    node = tl.where(there, lane, 0).to(tl.int64)
    depth = tl.zeros((LANES,), tl.int64)
    seen = tl.zeros((LANES,), tl.int32)
    for _ in tl.range(0, DEPTH):
        depth += (node > 0).to(tl.int64)
        bit = tl.full((LANES,), 1, tl.int32) << tl.maximum(node - 1, 0).to(tl.int32)
        seen = seen | tl.where(node > 0, bit, 0)
        # The parents of nodes 1 to N - 1 are in memory; the root's is itself.
        node = tl.load(parents_ptr + row * (NODES - 1) + node - 1, mask=there & (node > 0), other=0)
    tl.store(all_parents_ptr + row * NODES + lane, parent, mask=there)
    tl.store(depth_ptr + row * NODES + lane, depth, mask=there)
    tl.store(seen_ptr + row * NODES + lane, seen, mask=there)


@triton.jit
def _walk_kernel(
    tokens_ptr, parents_ptr, drawn_ptr, way_ptr, guesses_ptr,
    NODES: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, SCRIPTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    there = lane < NODES
    tokens = tl.load(tokens_ptr + row * NODES + lane, mask=there, other=0)
    parents = tl.load(parents_ptr + row * NODES + lane, mask=there & (lane > 0), other=-1)
    node = (row * 0).to(tl.int32)
    tl.store(way_ptr + row * (DEPTH + 1), 0)
    for step in tl.range(0, DEPTH):
        fits = parents == node
        if not SCRIPTED:
            fits = fits & (tokens == tl.load(drawn_ptr + row * NODES + node))
        child = tl.min(tl.where(fits, lane, NODES), 0)
        found = child < NODES
        node = tl.where(found, child, node)
        guess = tl.load(tokens_ptr + row * NODES + node)
        tl.store(way_ptr + row * (DEPTH + 1) + step + 1, node.to(tl.int64))
        tl.store(guesses_ptr + row * DEPTH + step, tl.where(found, guess, -1))


def lay_out(parents_BQ: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """draft_tree.lay_out_in_torch of contiguous parents: parents, depths and seen nodes."""
    rows, nodes, device = len(parents_BQ), parents_BQ.shape[1] + 1, parents_BQ.device
    parents_BN, depth_BN = (torch.empty(rows, nodes, dtype=torch.int64, device=device) for _ in range(2))
    seen_BN = torch.empty(rows, nodes, dtype=torch.int32, device=device)
    _lay_out_kernel[(rows,)](
        parents_BQ.contiguous(), parents_BN, depth_BN, seen_BN,
        NODES=nodes, LANES=triton.next_power_of_2(nodes), DEPTH=depth, num_warps=1,
    )  # fmt: skip
    return parents_BN, depth_BN, seen_BN


def walk(tokens_BN: Tensor, parents_BN: Tensor, drawn_BN: Tensor, depth: int, scripted: bool) -> tuple[Tensor, Tensor]:
    """draft_tree.walk_in_torch."""
    rows, nodes = tokens_BN.shape
    nodes_BW = torch.empty(rows, depth + 1, dtype=torch.int64, device=tokens_BN.device)
    guesses_BQ = torch.empty(rows, depth, dtype=torch.int64, device=tokens_BN.device)
    _walk_kernel[(rows,)](
        tokens_BN.contiguous(), parents_BN.contiguous(), drawn_BN.contiguous(), nodes_BW, guesses_BQ,
        NODES=nodes, LANES=triton.next_power_of_2(nodes), DEPTH=depth, SCRIPTED=scripted, num_warps=1,
    )  # fmt: skip
    return nodes_BW, guesses_BQ
