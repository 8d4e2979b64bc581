"""Tokens of several groups brought together for their experts, and the sums brought back. Fixed shapes, graph-safe.

Knows: gather and scatter-sum of rows between ranks that have the same place in their groups, and what travels with a
row. Does not know: which experts a rank holds, routing, how groups agree on the number of rows
(runtime/groups/step_sync.py), exchanges that take one launch (symmetric_exchange.py).
Shape letters: X rows that each group brings, R groups, Y = R * X, T rows that this group has, N hidden size, C choices
of experts, E experts.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel.comm.call_log import CallLog

# torch 2.13 renamed both and warns about the old names, which are the only ones in 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TokenExchange(Protocol):
    """Between ``groups`` groups, of which this is number ``index``. All make the same calls with the same shapes."""

    index: int
    groups: int

    def gather(self, x_XN: Tensor) -> Tensor:
        """Every group's rows, group 0 first: [X, N] -> [R * X, N], any dtype."""
        ...

    def scatter_sum(self, x_YN: Tensor) -> Tensor:
        """This group's rows of the sum over groups: [R * X, N] -> [X, N]."""
        ...

    def gather_choices(
        self, hidden_TN: Tensor, weights_TC: Tensor, ids_TC: Tensor, rows: int, numbers_E: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``gather`` of tokens with the weights, float32, and the ids, int32, of their choices: [Y, N], [Y, C], [Y, C].

        A group's T tokens are filled up to ``rows`` (X) with tokens of no choice, which is an id of -1. Other ids come
        as ``numbers_E[id]``, int32. A minus zero of ``hidden`` may come as zero.
        """
        missing = (0, 0, 0, rows - hidden_TN.shape[0])
        parts = (F.pad(hidden_TN, missing), F.pad(weights_TC, missing), F.pad(ids_TC, missing, value=-1))
        hidden_YN, weights_YC, ids_YC = gather_together(parts, self)
        return hidden_YN, weights_YC, torch.where(ids_YC >= 0, numbers_E[ids_YC.clamp(min=0)], -1)


class GroupExchange(TokenExchange):
    """Over a torch.distributed process group that has one rank of each group, in order (Sharing.data_group).

    ``calls``: where its calls are logged; by default in a log of its own.
    """

    def __init__(self, group: dist.ProcessGroup, calls: CallLog | None = None) -> None:
        self.group = group
        self.index = dist.get_rank(group)
        self.groups = dist.get_world_size(group)
        self.calls = calls or CallLog(dist.get_process_group_ranks(group)[0])

    def gather(self, x_XN: Tensor) -> Tensor:
        out_YN = torch.empty(self.groups * x_XN.shape[0], *x_XN.shape[1:], dtype=x_XN.dtype, device=x_XN.device)
        with self.calls.call("gather", x_XN):
            _all_gather(out_YN, x_XN.contiguous(), group=self.group)
        return out_YN

    def scatter_sum(self, x_YN: Tensor) -> Tensor:
        rows = x_YN.shape[0] // self.groups
        out_XN = torch.empty(rows, *x_YN.shape[1:], dtype=x_YN.dtype, device=x_YN.device)
        with self.calls.call("scatter_sum", x_YN):
            _reduce_scatter(out_XN, x_YN.contiguous(), group=self.group)
        return out_XN


def gather_together(parts: tuple[Tensor, ...], exchange: TokenExchange) -> list[Tensor]:
    """``gather`` of several [X, ...] tensors of any dtypes with one call, their bytes side by side."""
    raw = [part.contiguous().flatten(1).view(torch.uint8) for part in parts]
    everyone = exchange.gather(torch.cat(raw, dim=1))
    widths = [part.shape[1] for part in raw]
    return [
        piece.contiguous().view(part.dtype).view(-1, *part.shape[1:])
        for piece, part in zip(torch.split(everyone, widths, dim=1), parts, strict=True)
    ]
