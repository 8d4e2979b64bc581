"""All-reduce of small messages in one kernel, through memory that every GPU of a node maps; NCCL for the rest.

Knows: how a group's collectives are made over such memory. Does not know: where that works (symmetric_memory.py), which
sums go through it (all_reduce_dispatch.py).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.all_reduce_dispatch import DTYPES, ROWS, Sums, memory_bytes
from parallel.comm.collectives import GroupCollectives, PendingAllReduce
from parallel.comm.peer_buffers import PeerBuffers
from parallel.comm.symmetric_memory import SentinelMemory, has_dependent_launches, made_where_all_can

_LOST = "all-reduces go through NCCL or gloo, slower by 5 to 20 us each on NVLink"


class SymmetricCollectives(GroupCollectives):
    """GroupCollectives whose all-reduces take one kernel where that is faster (all_reduce_dispatch.py).

    Made by every rank of ``group`` together (a rendezvous). Raises RuntimeError where symmetric memory does not work,
    ImportError without Triton.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._memory = SentinelMemory(group, device, memory_bytes(self.size))
        exchanges = torch.zeros(ROWS, dtype=torch.int32, device=device)
        self.sums = Sums(self._memory.addresses, exchanges, self.rank, pdl=has_dependent_launches(device))

    def all_reduce(self, x: Tensor) -> Tensor:
        if (summed := self.sums.of(x)) is None:
            return super().all_reduce(x)
        with self.calls.call("all_reduce", x):
            return summed(x.view(-1, x.shape[-1]))[0].view(x.shape)

    def places_for(self, tokens: int, width: int, dtype: torch.dtype) -> PeerBuffers | None:
        return self.sums.places_for(tokens, width, dtype)

    def sum_before_norm(self, x_TN: Tensor, *, pushed: bool = False) -> Tensor | PendingAllReduce:
        return self.all_reduce(x_TN) if self.sums.of(x_TN) is None else PendingAllReduce(x_TN, self, pushed)

    def all_reduce_norm(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, *, pushed: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See NormedSum."""
        summed = self.sums.pushed if pushed else self.sums.of(x_TN)
        assert summed is not None, "asked only for what sum_before_norm has left to it"
        with self.calls.call("all_reduce", x_TN):
            return summed(x_TN, residual_TN=residual_TN, norm_N=norm_N, eps=eps)


def fastest_collectives(group: dist.ProcessGroup, device: torch.device) -> GroupCollectives:
    """SymmetricCollectives where every rank can have them, GroupCollectives otherwise, the same on all ranks.

    Called by every rank of ``group`` together, before any graph is captured. The fallback is logged once, with why.
    """
    make = partial(SymmetricCollectives, group, device)
    made = made_where_all_can(group, device, make, partial(_sums_right, device=device), _LOST)
    return GroupCollectives(group) if made is None else made


def _sums_right(made: SymmetricCollectives, device: torch.device) -> bool:
    probes = [torch.ones(8, dtype=dtype, device=device) for dtype in DTYPES]
    return all(bool((made.all_reduce(probe) == made.size).all()) for probe in probes)
