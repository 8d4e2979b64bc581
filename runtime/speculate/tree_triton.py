"""Draft trees grown in Triton: one launch, a program a row, a lane a node.

Knows: the arithmetic of tree.py, which holds the torch reference. Does not know: proposers, who verifies a tree.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _weight(logprob):
    """tree.FLOOR in place of what is not finite, as torch's nan_to_num and clamp; +inf becomes the largest float."""
    finite = tl.where(logprob == logprob, tl.minimum(logprob, 3.4028234663852886e38), -1e30)
    return tl.maximum(finite, -1e30)


@triton.jit
def _grow_kernel(
    ids_ptr, logprobs_ptr, tokens_ptr, parents_ptr,
    COUNT: tl.constexpr, PLACES: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ids, logprobs = ids_ptr + row * PLACES * RANKS, logprobs_ptr + row * PLACES * RANKS
    lane = tl.arange(0, LANES)
    weight = tl.zeros((LANES,), tl.float32)
    depth = tl.zeros((LANES,), tl.int32)
    rank = tl.zeros((LANES,), tl.int32)
    child = tl.where(lane == 0, _weight(tl.load(logprobs)), -float("inf"))  # what a node's next child would weigh
    for node in tl.range(1, COUNT + 1):
        best = tl.max(child, 0)
        heaviest = tl.min(tl.where(child == best, lane, COUNT), 0)
        parent = tl.where(node <= PLACES, node - 1, heaviest)
        mine = lane == parent
        its_depth = tl.sum(tl.where(mine, depth, 0), 0)
        its_rank = tl.sum(tl.where(mine, rank, 0), 0)
        its_weight = tl.sum(tl.where(mine, weight, 0.0), 0)
        own = tl.sum(tl.where(mine, child, 0.0), 0)
        place = its_depth * RANKS + its_rank
        tl.store(tokens_ptr + row * COUNT + node - 1, tl.load(ids + place))
        tl.store(parents_ptr + row * COUNT + node - 1, parent.to(tl.int64))
        deeper = its_depth + 1 < PLACES
        first = _weight(tl.load(logprobs + (its_depth + 1) * RANKS, mask=deeper, other=0.0))
        further = its_rank + 1 < RANKS
        following = _weight(tl.load(logprobs + place + 1, mask=further, other=0.0))
        new = lane == node
        depth = tl.where(new, its_depth + 1, depth)
        weight = tl.where(new, own, weight)
        rank = tl.where(mine, its_rank + 1, rank)
        child = tl.where(mine, tl.where(further, its_weight + following, -float("inf")), child)
        child = tl.where(new, tl.where(deeper, own + first, -float("inf")), child)


def grow_trees(ids_BQC: Tensor, logprobs_BQC: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """tree.grow_in_torch."""
    rows, places, ranks = ids_BQC.shape
    tokens_BQ, parents_BQ = (torch.empty(rows, count, dtype=torch.int64, device=ids_BQC.device) for _ in range(2))
    _grow_kernel[(rows,)](
        ids_BQC.contiguous(), logprobs_BQC.contiguous(), tokens_BQ, parents_BQ,
        COUNT=count, PLACES=places, RANKS=ranks, LANES=triton.next_power_of_2(count + 1), num_warps=1,
    )  # fmt: skip
    return tokens_BQ, parents_BQ
