"""Draft trees for the operations over slot state, and what each node of them must give: its ancestors' chain, alone.

Knows: shapes of trees, and how a chain is cut out of one. Does not know: who computes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from models.inputs import StateRows, StateTree

Run = Callable[[Tensor, StateRows, Tensor], Tensor]  # of projections [T, ...], rows and positions [T]; may write state

CHAIN = [0, 0, 1, 2, 3, 4, 5]
STAR = [0, 0, 0, 0, 0, 0, 0]
FORKED = [0, 0, 1, 2, 1, 0, 5]  # two branches from the root, one of which forks again


def grown(nodes: int, seed: int) -> list[int]:
    """Parents of a random tree, deep on the whole: most nodes follow one of the last few."""
    draw = random.Random(seed)
    return [0, *(draw.randint(max(0, node - 4), node - 1) for node in range(1, nodes))]


def state_tree(parents: Sequence[Sequence[int]], device: str = "cpu") -> StateTree:
    seen = [[sum(1 << (n - 1) for n in path(of_row, node) if n) for node in range(len(of_row))] for of_row in parents]
    seen_BN = torch.tensor(seen, dtype=torch.int64).to(torch.int32)  # bit 31 becomes the sign
    return StateTree(torch.tensor(parents, device=device), seen_BN.to(device))


def path(parents: Sequence[int], node: int) -> list[int]:
    """From the root to ``node``."""
    found = [node]
    while node:
        node = parents[node]
        found.append(node)
    return found[::-1]


def positions(parents: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
    """[T]: a root's is its row's start, and every node's one more than its parent's."""
    return torch.tensor([s + len(path(p, n)) - 1 for p, s in zip(parents, starts, strict=True) for n in range(len(p))])


def padded(paths: Sequence[Sequence[int]], width: int, device: str = "cpu") -> Tensor:
    """StateRows.path_BW: behind a path's end its last node again."""
    return torch.tensor([[*p, *[p[-1]] * (width - len(p))] for p in paths], device=device)


def along_ancestors(run: Run, tokens_TX: Tensor, slots: Sequence[int], parents: Sequence[Sequence[int]]) -> Run:
    """The serial oracle: each node's result is the last one of the chain of its ancestors, with state left alone."""

    def oracle(_: Tensor, rows: StateRows, positions_T: Tensor) -> Tensor:
        found, first = [], 0
        for slot, of_row in zip(slots, parents, strict=True):
            for node in range(len(of_row)):
                chain = torch.tensor([first + n for n in path(of_row, node)])
                alone = StateRows(rows.slots_B.new_tensor([slot]), frozen=True)
                found.append(run(tokens_TX[chain.to(tokens_TX.device)], alone, positions_T[chain])[-1])
            first += len(of_row)
        return torch.stack(found)

    return oracle
