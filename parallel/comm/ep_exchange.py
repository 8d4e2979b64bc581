"""Expert-parallel exchange between DP groups: dispatch (all-gather of tokens) and combine (reduce-scatter of sums).

Knows: all-gather and reduce-scatter of rows between the ranks that have the same position in their groups, and what a
dispatched row holds. All shapes are fixed, so both can be captured. Does not know: which experts a rank holds, routing,
how groups agree on the number of rows (runtime/groups/step_sync.py), the single-kernel versions
(symmetric_exchange.py).
Shape letters: R groups, X rows of each group after padding, Y = R * X, T rows of this group, N hidden size, C experts
chosen by a token, E experts.
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
    """An exchange between ``groups`` groups; this is group ``index``. All make the same calls with the same shapes."""

    index: int
    groups: int
    slower: str | None = None  # why exchanges are slower than the usual ones; None where they are not

    def all_gather(self, x_XN: Tensor) -> Tensor:
        """Concatenates every group's rows, group 0 first: [X, N] -> [R * X, N], any dtype."""
        ...

    def reduce_scatter(self, x_YN: Tensor) -> Tensor:
        """Sums over groups and keeps this group's rows: [R * X, N] -> [X, N]."""
        ...

    def dispatch(
        self, hidden_TN: Tensor, weights_TC: Tensor, ids_TC: Tensor, rows: int, local_E: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All-gathers tokens with their routing weights (float32) and expert ids (int32): [Y, N], [Y, C], [Y, C].

        The T tokens of a group are padded to ``rows`` (X) with tokens that chose no expert: their ids are -1. Every
        other id becomes ``local_E[id]`` (int32), this rank's own number for the expert, or -1 for an expert of another
        rank. A minus zero in ``hidden`` may arrive as plus zero.
        """
        missing = (0, 0, 0, rows - hidden_TN.shape[0])
        parts = (F.pad(hidden_TN, missing), F.pad(weights_TC, missing), F.pad(ids_TC, missing, value=-1))
        hidden_YN, weights_YC, ids_YC = all_gather_packed(parts, self)
        return hidden_YN, weights_YC, torch.where(ids_YC >= 0, local_E[ids_YC.clamp(min=0)], -1)


class GroupExchange(TokenExchange):
    """A TokenExchange over a torch.distributed process group of one rank of each group, in group order
    (ParallelDegrees.data_group). Raises CollectiveError where a call fails.

    ``calls``: the log of its calls; by default a new one. ``slower``: why there is no faster one, where one was wanted.
    """

    def __init__(self, group: dist.ProcessGroup, calls: CallLog | None = None, slower: str | None = None) -> None:
        self.group = group
        self.slower = slower
        self.index = dist.get_rank(group)
        self.groups = dist.get_world_size(group)
        self.calls = calls or CallLog(dist.get_process_group_ranks(group)[0])

    def all_gather(self, x_XN: Tensor) -> Tensor:
        out_YN = torch.empty(self.groups * x_XN.shape[0], *x_XN.shape[1:], dtype=x_XN.dtype, device=x_XN.device)
        with self.calls.call("all_gather", x_XN):
            _all_gather(out_YN, x_XN.contiguous(), group=self.group)
        return out_YN

    def reduce_scatter(self, x_YN: Tensor) -> Tensor:
        rows = x_YN.shape[0] // self.groups
        out_XN = torch.empty(rows, *x_YN.shape[1:], dtype=x_YN.dtype, device=x_YN.device)
        with self.calls.call("reduce_scatter", x_YN):
            _reduce_scatter(out_XN, x_YN.contiguous(), group=self.group)
        return out_XN


def all_gather_packed(parts: tuple[Tensor, ...], exchange: TokenExchange) -> list[Tensor]:
    """All-gathers several [X, ...] tensors of any dtypes in one call, as bytes side by side."""
    raw = [part.contiguous().flatten(1).view(torch.uint8) for part in parts]
    gathered = exchange.all_gather(torch.cat(raw, dim=1))
    widths = [part.shape[1] for part in raw]
    return [
        piece.contiguous().view(part.dtype).view(-1, *part.shape[1:])
        for piece, part in zip(torch.split(gathered, widths, dim=1), parts, strict=True)
    ]
