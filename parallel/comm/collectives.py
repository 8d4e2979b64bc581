"""The collectives of a forward pass: NCCL on GPUs, gloo on CPUs. They carry activations and logits.

Knows: all-reduce and all-gather over the tensor-parallel group, and the log of calls (call_log.py).
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
from parallel.comm.quantised import Quantised

# torch 2.13 renamed all_gather_into_tensor and warns about the old name, which is the only one in 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class AllReduceNorm(Protocol):
    """An all-reduce fused with the residual add and RMSNorm that follow it in a decoder layer."""

    def all_reduce_norm(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, *, pushed: bool = False,
        into: Quantised | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """residual' = all_reduce(x) (+ residual); returns (rms_norm(residual') * norm, residual'), fresh tensors.

        ``pushed``: the kernel that made x has pushed it into the peer buffers. ``into``: gets the first as codes, too.
        """
        ...


@dataclass(frozen=True, slots=True)
class PendingAllReduce:
    """This rank's partial sum [T, N], not reduced yet: the RMSNorm that follows reduces it in the same kernel.

    Every rank uses it exactly once, before any other collective of the group. ``pushed``: the peers have it already.
    """

    part_TN: Tensor
    _by: AllReduceNorm
    pushed: bool = False

    def normed(
        self, residual_TN: Tensor | None, norm_N: Tensor, eps: float, into: Quantised | None = None
    ) -> tuple[Tensor, Tensor]:
        """See AllReduceNorm.all_reduce_norm."""
        return self._by.all_reduce_norm(self.part_TN, residual_TN, norm_N, eps, pushed=self.pushed, into=into)


class Collectives(Protocol):
    """A tensor-parallel group of ``size`` ranks; every rank makes the same calls in the same order."""

    rank: int
    size: int
    slower: str | None = None  # why the group's collectives are slower than the usual ones; None where they are not
    batch_invariant: bool = False  # whether a row's sum has the same bits whatever rows are summed with it

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the group; may reuse ``x``'s memory. Bitwise the same on every rank."""
        ...

    def push_buffers(self, tokens: int, width: int, dtype: torch.dtype) -> PeerBuffers | None:
        """Peer buffers into which a matmul may push its partial sum [tokens, width]; None: it must not push.

        A partial sum that was pushed must go to ``all_reduce_before_norm`` next, before any other call.
        """
        return None

    def all_reduce_before_norm(self, x_TN: Tensor, *, pushed: bool = False) -> Tensor | PendingAllReduce:
        """``all_reduce`` of a tensor that an RMSNorm follows; may reuse ``x``.

        Where one kernel does both, nothing is reduced yet: the result is a PendingAllReduce. ``pushed``: the kernel
        that made x has pushed it into ``push_buffers``.
        """
        return self.all_reduce(x_TN)

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenates along the last dim in rank order: [..., n] -> [..., n * size]."""
        ...

    def all_gather_keys(self, keys_RX: Tensor, *, largest: bool = False) -> Tensor:
        """``all_gather`` of int64 keys [R, X] no half of which is 0x80008000; ``largest``: of each row's largest key
        alone, [R, size].
        """
        return self.all_gather(keys_RX.amax(1, keepdim=True) if largest and keys_RX.shape[1] > 1 else keys_RX)


class SingleRank(Collectives):
    """A world of one: every collective is the identity."""

    rank = 0
    size = 1
    batch_invariant = True

    def all_reduce_min(self, number: int) -> int:
        return number

    def broadcast_text(self, make: Callable[[], str]) -> str:
        return make()

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


class GroupCollectives(Collectives):
    """Collectives over a torch.distributed process group (NCCL or gloo). Raises CollectiveError where one fails.

    ``calls`` logs every call, so that the watchdog can name a rank which called another collective. ``slower``: why
    these take the place of faster ones.
    """

    def __init__(self, group: dist.ProcessGroup, slower: str | None = None) -> None:
        self.group = group
        self.slower = slower
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

    def all_reduce_min(self, number: int) -> int:
        """The minimum of the ranks' numbers. Gloo groups only, at start-up only."""
        minimum = torch.tensor([number])
        with self.calls.call("all_reduce_min", minimum):
            dist.all_reduce(minimum, dist.ReduceOp.MIN, group=self.group)
        return int(minimum)

    def broadcast_text(self, make: Callable[[], str]) -> str:
        """Calls ``make`` on the group's first rank only; every rank returns its result. Gloo, at start-up only."""
        first = dist.get_global_rank(self.group, 0)
        raw = torch.tensor([*make().encode()] if self.rank == 0 else [], dtype=torch.uint8)
        size = torch.tensor([raw.numel()])
        with self.calls.call("broadcast_text", size):
            dist.broadcast(size, first, group=self.group)
            raw = raw if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(raw, first, group=self.group)
        return raw.numpy().tobytes().decode()
