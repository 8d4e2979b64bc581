"""Draft trees (DDTree; arXiv 2604.12989): of a drafter's best tokens at each place, the most probable paths.

Knows: how a tree grows, best node first, around the drafter's chain. Does not know: any drafter, how a tree is
verified (runtime/execute/step/row_step.py), what is kept of it.

A path takes one candidate a place, and weighs the sum of their log-probabilities, as if places were independent of each
other. The first nodes are the most probable path whole: a tree never holds less than a
chain of the same depth. Each of the others is the heaviest path that is not in the tree yet, of those that begin with a
node of it. A node's children are other tokens, so at most one of them is drawn.
On CUDA one Triton program a row grows its tree; the torch code is its reference and runs elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from runtime.execute.proposer import BranchingProposer, Candidates, MakeProposer, Observed, Proposed, ProposerParts
from runtime.execute.slot_state import SlotColumns
from runtime.speculate.guesses import Drafter

FLOOR = -1e30  # in place of log-probabilities that are not finite: finite, and so are sums of 32 of them

_Grow = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


class TreeProposer:
    """``proposer``'s candidates, ``top_k`` a place, as trees of ``parts.limits.tree`` tokens and of depth W - 1."""

    def __init__(self, parts: ProposerParts, proposer: BranchingProposer, top_k: int) -> None:
        self._proposer, self._top_k, self._depth = proposer, top_k, parts.limits.width - 1
        self.name, self.layers, self.reads_hidden = proposer.name, proposer.layers, proposer.reads_hidden

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        return self._grown(self._proposer.candidates, rows_B, columns, count)

    def allowed(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        """By the states along the most probable path: other nodes that may not follow are nodes in vain."""
        proposer = self._proposer
        find = proposer.allowed_candidates if isinstance(proposer, Drafter) else proposer.candidates
        return self._grown(find, rows_B, columns, count)

    def _grown(self, find: Callable[..., Candidates], rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        tokens_BQ, parents_BQ = grow(find(rows_B, columns, self._depth, self._top_k), count)
        return Proposed(tokens_BQ, parents_BQ=parents_BQ)

    def observe(self, observed: Observed) -> None:
        self._proposer.observe(observed)


def branching(make: Callable[[ProposerParts], BranchingProposer], top_k: int) -> MakeProposer:
    """What ``make`` makes, as trees."""
    return lambda parts: TreeProposer(parts, make(parts), top_k)


def grow(candidates: Candidates, count: int) -> tuple[Tensor, Tensor]:
    """Tokens and parents (int64 [B, count] each) of nodes 1 to ``count``; at least one a place of the candidates, at
    most as many as there are paths."""
    kernel: _Grow = (_triton_kernel() if candidates.ids_BQC.is_cuda else None) or grow_in_torch
    return kernel(*candidates, count)


def grow_in_torch(ids_BQC: Tensor, logprobs_BQC: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The reference of ``grow``: every node has the rank of its next child, and what that child would weigh."""
    logprobs_BQC = logprobs_BQC.nan_to_num(nan=FLOOR).clamp(min=FLOOR)
    (rows, places, ranks), device = ids_BQC.shape, ids_BQC.device
    number_N = torch.arange(count + 1, device=device)
    weight_BN = torch.zeros(rows, count + 1, device=device)
    depth_BN, rank_BN = (torch.zeros(rows, count + 1, dtype=torch.int64, device=device) for _ in range(2))
    child_BN = torch.full((rows, count + 1), float("-inf"), device=device)  # what a node's next child would weigh
    child_BN[:, 0] = logprobs_BQC[:, 0, 0]
    flat_BX, ids_BX = logprobs_BQC.flatten(1), ids_BQC.flatten(1)
    tokens, parents = [], []
    for node in range(1, count + 1):
        if node <= places:
            parent_B1 = torch.full((rows, 1), node - 1, device=device)
        else:
            best_BN = child_BN == child_BN.amax(1, keepdim=True)
            parent_B1 = torch.where(best_BN, number_N, count).amin(1, keepdim=True)
        depth_B1, rank_B1 = depth_BN.gather(1, parent_B1), rank_BN.gather(1, parent_B1)
        weight_B1, own_B1 = weight_BN.gather(1, parent_B1), child_BN.gather(1, parent_B1)
        tokens.append(ids_BX.gather(1, depth_B1 * ranks + rank_B1))
        parents.append(parent_B1)
        depth_BN[:, node : node + 1], weight_BN[:, node : node + 1] = depth_B1 + 1, own_B1
        first_B1 = flat_BX.gather(1, ((depth_B1 + 1) * ranks).clamp(max=places * ranks - 1))
        child_BN[:, node : node + 1] = torch.where(depth_B1 + 1 < places, own_B1 + first_B1, float("-inf"))
        next_B1 = flat_BX.gather(1, (depth_B1 * ranks + rank_B1 + 1).clamp(max=places * ranks - 1))
        child_BN.scatter_(1, parent_B1, torch.where(rank_B1 + 1 < ranks, weight_B1 + next_B1, float("-inf")))
        rank_BN.scatter_(1, parent_B1, rank_B1 + 1)
    return torch.cat(tokens, 1), torch.cat(parents, 1)


@cache
def _triton_kernel() -> _Grow | None:
    try:
        from runtime.speculate.tree_triton import grow_trees
    except ImportError:
        return None
    return grow_trees
