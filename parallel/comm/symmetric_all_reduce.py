"""Collectives whose small all-reduces and gathers of keys run in one kernel over symmetric memory; NCCL does the rest.

Knows: how the collectives of a group are built on symmetric memory. Does not know: where that works
(symmetric_memory.py), which calls use it (all_reduce_dispatch.py).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.all_reduce_dispatch import (
    DTYPES,
    AllReduceDispatch,
    SizeLimits,
    all_reduce_buffer_bytes,
    buffer_rows,
)
from parallel.comm.collectives import GroupCollectives, PendingAllReduce
from parallel.comm.peer_buffers import PeerBuffers
from parallel.comm.quantised import Quantised
from parallel.comm.symmetric_memory import SentinelMemory, build_on_every_rank, has_dependent_launches

_LOST = "all-reduces go through NCCL or gloo, slower by 5 to 20 us each on NVLink"


class SymmetricCollectives(GroupCollectives):
    """GroupCollectives whose all-reduces and gathers of keys run in our own kernels where that is faster
    (all_reduce_dispatch.py).

    ``limits``: up to which sizes that is, the same on every rank; None takes those of H200s. The constructor is a
    collective call of ``group``. Raises RuntimeError where symmetric memory does not work, ImportError without Triton.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, limits: SizeLimits | None = None) -> None:
        super().__init__(group)
        self._memory = SentinelMemory(group, device, all_reduce_buffer_bytes(self.size))
        use_counts = torch.zeros(buffer_rows(self.size), dtype=torch.int32, device=device)
        self.dispatch = AllReduceDispatch(
            self._memory.addresses, use_counts, self.rank, pdl=has_dependent_launches(device), limits=limits
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        if (kernel := self.dispatch.kernel_for(x)) is None:
            return super().all_reduce(x)
        with self.calls.call("all_reduce", x):
            return kernel(x.view(-1, x.shape[-1]))[0].view(x.shape)

    def all_gather_keys(self, keys_RX: Tensor, *, largest: bool = False) -> Tensor:
        if (gather := self.dispatch.gather_keys_for(keys_RX, largest)) is None:
            return super().all_gather_keys(keys_RX, largest=largest)
        with self.calls.call("all_gather", keys_RX):
            return gather(keys_RX.contiguous(), largest=largest)

    def push_buffers(self, tokens: int, width: int, dtype: torch.dtype) -> PeerBuffers | None:
        return self.dispatch.push_buffers(tokens, width, dtype)

    def all_reduce_before_norm(self, x_TN: Tensor, *, pushed: bool = False) -> Tensor | PendingAllReduce:
        return self.all_reduce(x_TN) if self.dispatch.kernel_for(x_TN) is None else PendingAllReduce(x_TN, self, pushed)

    def all_reduce_norm(
        self,
        x_TN: Tensor,
        residual_TN: Tensor | None,
        norm_N: Tensor,
        eps: float,
        *,
        pushed: bool = False,
        into: Quantised | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See AllReduceNorm."""
        kernel = self.dispatch.pushed if pushed else self.dispatch.kernel_for(x_TN)
        assert kernel is not None, "called only for what all_reduce_before_norm left pending"
        with self.calls.call("all_reduce", x_TN):
            return kernel(x_TN, residual_TN=residual_TN, norm_N=norm_N, eps=eps, into=into)


def fastest_collectives(
    group: dist.ProcessGroup, device: torch.device, limits: SizeLimits | None = None
) -> GroupCollectives:
    """SymmetricCollectives where every rank can have them, GroupCollectives otherwise, the same on all ranks.

    ``limits`` as there. A collective call of ``group``, before any graph is captured. A fallback is logged once, with
    its reason.
    """
    make = partial(SymmetricCollectives, group, device, limits)
    made = build_on_every_rank(group, device, make, partial(_self_test, device=device), _LOST)
    return GroupCollectives(group, slower=_LOST) if made is None else made


def _self_test(made: SymmetricCollectives, device: torch.device) -> bool:
    probes = [torch.ones(8, dtype=dtype, device=device) for dtype in DTYPES]
    keys_RX = torch.tensor([[made.rank, -1]], device=device)
    gathered = [made.all_gather_keys(keys_RX, largest=largest).tolist() for largest in (False, True)]
    ranks = range(made.size)
    found = gathered == [[[key for rank in ranks for key in (rank, -1)]], [[*ranks]]]
    return found and all(bool((made.all_reduce(probe) == made.size).all()) for probe in probes)
