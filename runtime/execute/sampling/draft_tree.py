"""Draft trees: who is whose ancestor, and which path through a tree the target's draws take.

Knows: trees of at most MOST_TREE_TOKENS nodes a row, given by parents that come before their children.
Does not know: who proposed one (runtime/speculate), slots, caches, the model.

Everything is graph-safe. On CUDA each function is one Triton launch (draft_tree_triton.py); the torch code is its
reference and runs elsewhere.
Shape letters: B rows, N nodes, the root is node 0; W = depth + 1, most tokens that a row may gain.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

NO_GUESS = -1  # no draw is this token


class DraftTree(NamedTuple):
    """parents_BN int64: the root's is itself, 0. depth_BN int64: 0 for the root. seen_BN int32: bit n - 1 of a node's
    number is set where node n is its ancestor or itself (DecodeAttention.tree_BQ)."""

    parents_BN: Tensor
    depth_BN: Tensor
    seen_BN: Tensor


class Way(NamedTuple):
    """What draws make of a tree. nodes_BW int64: the root, then the node at each depth that was drawn before it; the
    last one again after the end. guesses_BQ int64: tokens of nodes_BW[:, 1:], NO_GUESS after the end."""

    nodes_BW: Tensor
    guesses_BQ: Tensor


class TreeKernels(NamedTuple):
    """Entry points of draft_tree_triton.py."""

    lay_out: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
    walk: Callable[..., tuple[Tensor, Tensor]]


def lay_out(parents_BQ: Tensor, depth: int) -> DraftTree:
    """Of the parents (int64) of nodes 1 to Q = N - 1, none deeper than ``depth``."""
    if (kernels := _kernels_for(parents_BQ)) is not None:
        return DraftTree(*kernels.lay_out(parents_BQ, depth))
    return lay_out_in_torch(parents_BQ, depth)


def lay_out_in_torch(parents_BQ: Tensor, depth: int) -> DraftTree:
    """The reference of ``lay_out``."""
    parents_BN = torch.nn.functional.pad(parents_BQ, (1, 0))
    depth_BN, seen_BN = torch.zeros_like(parents_BN), torch.zeros_like(parents_BN)
    for node_BN in generations(parents_BN, depth):
        depth_BN += node_BN > 0
        seen_BN |= torch.where(node_BN > 0, 1 << (node_BN - 1).clamp(min=0), 0)
    return DraftTree(parents_BN, depth_BN, seen_BN.to(torch.int32))  # bit 31 becomes the sign


def generations(parents_BN: Tensor, count: int) -> list[Tensor]:
    """``count`` tensors [B, N] int64: each node itself, its parent, its parent's parent, ...; the root stays."""
    node_BN = torch.arange(parents_BN.shape[1], device=parents_BN.device).expand_as(parents_BN)
    found = []
    for _ in range(count):
        found.append(node_BN)
        node_BN = parents_BN.gather(1, node_BN)
    return found


def walk(tokens_BN: Tensor, tree: DraftTree, drawn_BN: Tensor, depth: int, *, scripted: bool = False) -> Way:
    """From the root to the child that was drawn, and on, for ``depth`` steps at most. ``drawn_BN`` int64: the target's
    sample after each node. ``scripted``: to the first child whatever was drawn."""
    if (kernels := _kernels_for(tokens_BN)) is not None:
        return Way(*kernels.walk(tokens_BN, tree.parents_BN, drawn_BN, depth, scripted))
    return walk_in_torch(tokens_BN, tree, drawn_BN, depth, scripted=scripted)


def walk_in_torch(tokens_BN: Tensor, tree: DraftTree, drawn_BN: Tensor, depth: int, *, scripted: bool = False) -> Way:
    """The reference of ``walk``."""
    rows, nodes = tokens_BN.shape
    number_N = torch.arange(nodes, device=tokens_BN.device)
    node_B1 = torch.zeros(rows, 1, dtype=torch.int64, device=tokens_BN.device)
    way, guesses = [node_B1], []
    for _ in range(depth):
        fits_BN = (tree.parents_BN == node_B1) & (number_N > 0)
        if not scripted:
            fits_BN = fits_BN & (tokens_BN == drawn_BN.gather(1, node_B1))
        child_B1 = torch.where(fits_BN, number_N, nodes).amin(1, keepdim=True)
        found_B1 = child_B1 < nodes
        node_B1 = torch.where(found_B1, child_B1, node_B1)
        way.append(node_B1)
        guesses.append(torch.where(found_B1, tokens_BN.gather(1, node_B1), NO_GUESS))
    return Way(torch.cat(way, 1), torch.cat(guesses, 1))


def _kernels_for(tensor: Tensor) -> TreeKernels | None:
    return _triton_kernels() if tensor.is_cuda else None


@cache
def _triton_kernels() -> TreeKernels | None:
    try:
        from runtime.execute.sampling import draft_tree_triton
    except ImportError:
        return None
    return TreeKernels(draft_tree_triton.lay_out, draft_tree_triton.walk)
