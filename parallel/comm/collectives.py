"""The collectives a forward pass uses, behind one seam. NCCL on GPUs, gloo on CPUs; they carry activations and logits.

Knows: how a sum and a concatenation over the tensor-parallel group are done, and which were called (call_log.py).
Does not know: control metadata, which never travels here (parallel/control), or why a call failed (the watchdog does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.call_log import CallLog
from parallel.comm.peer_buffers import PeerBuffers

# torch 2.13 renamed all_gather_into_tensor and warns about the old name, which is the only one in 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NormedSum(Protocol):
    """Collectives whose kernel for small sums also does what follows them in a decoder."""

    def all_reduce_norm(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, *, pushed: bool = False
    ) -> tuple[Tensor, Tensor]:
        """residual' = all_reduce(x) (+ residual); returns (rms_norm(residual') * norm, residual'), fresh tensors.

        ``pushed``: x lies in the other ranks' places already.
        """
        ...


@dataclass(frozen=True, slots=True)
class PendingAllReduce:
    """This rank's part [T, N] of a sum over the group, which whoever norms it takes in the same kernel. Used once, and
    on every rank alike, before any other call of the group. ``pushed``: the others have the part already."""

    part_TN: Tensor
    _by: NormedSum
    pushed: bool = False

    def normed(self, residual_TN: Tensor | None, norm_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See NormedSum.all_reduce_norm."""
        return self._by.all_reduce_norm(self.part_TN, residual_TN, norm_N, eps, pushed=self.pushed)


class Collectives(Protocol):
    """A tensor-parallel group of ``size`` ranks; every rank makes the same calls in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the group; may reuse ``x``'s memory. Bitwise the same on every rank."""
        ...

    def places_for(self, tokens: int, width: int, dtype: torch.dtype) -> PeerBuffers | None:
        """Where the product that makes a part [tokens, width] of a sum may put it on the other ranks; None: nowhere.

        A part that was put there goes to ``sum_before_norm`` next, before any other call.
        """
        return None

    def sum_before_norm(self, x_TN: Tensor, *, pushed: bool = False) -> Tensor | PendingAllReduce:
        """``all_reduce`` of what a norm follows; not yet done where sum and norm are one kernel. It may reuse ``x``.

        ``pushed``: x lies in ``places_for`` it already.
        """
        return self.all_reduce(x_TN)

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate along the last dim in rank order: [..., n] -> [..., n * size]."""
        ...


class SingleRank(Collectives):
    """A world of one: every collective is the identity."""

    rank = 0
    size = 1

    def least(self, number: int) -> int:
        return number

    def share(self, make: Callable[[], str]) -> str:
        return make()

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


class GroupCollectives(Collectives):
    """Collectives over a torch.distributed process group (NCCL or gloo). Raises CollectiveError where one fails.

    ``calls`` tells what was called, so that a rank which called something else can be found.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.calls = CallLog(dist.get_process_group_ranks(group)[0])

    def all_reduce(self, x: Tensor) -> Tensor:
        with self.calls.call("all_reduce", x):
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = torch.empty(self.size * x.shape[0], *x.shape[1:], dtype=x.dtype, device=x.device)
        with self.calls.call("all_gather", x):
            _all_gather(parts, x.contiguous(), group=self.group)
        parts = parts.view(self.size, *x.shape)  # gloo, unlike NCCL, takes the concatenation only, not the stack
        return parts.movedim(0, -2).reshape(*x.shape[:-1], self.size * x.shape[-1])

    def least(self, number: int) -> int:
        """The least of the ranks' numbers; over gloo, at the start only."""
        least = torch.tensor([number])
        with self.calls.call("least", least):
            dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)

    def share(self, make: Callable[[], str]) -> str:
        """What ``make`` returned on the group's first rank, where alone it is called; over gloo, at the start only."""
        first = dist.get_global_rank(self.group, 0)
        raw = torch.tensor([*make().encode()] if self.rank == 0 else [], dtype=torch.uint8)
        size = torch.tensor([raw.numel()])
        with self.calls.call("share", size):
            dist.broadcast(size, first, group=self.group)
            raw = raw if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(raw, first, group=self.group)
        return raw.numpy().tobytes().decode()
