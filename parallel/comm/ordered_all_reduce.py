"""Collectives whose sums are taken in rank order, for messages of any size: those of the deterministic mode.

Knows: that every sum is the float32 sum of all ranks' parts, rank 0's first, rounded once, and who takes it: our kernel
where its buffers hold a row (all_reduce_triton.py), an all-gather and torch elsewhere. Does not know: the fastest sum
of a size (symmetric_all_reduce.py).

NCCL and gloo take another order for another size, or another place in a message. Gathering moves bits and adds nothing.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.collectives import GroupCollectives
from parallel.comm.symmetric_all_reduce import (
    DTYPES,
    ROW_BYTES,
    ROWS,
    AllReduceDispatch,
    SizeLimits,
    all_reduce_buffer_bytes,
    buffer_rows,
)
from parallel.comm.symmetric_memory import SentinelMemory, build_on_every_rank, has_dependent_launches

# torch 2.13 renamed all_gather_into_tensor and warns about the old name, which is the only one in 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_MOST_BY_KERNEL = 4 << 20  # bytes; larger sums are bound by the links, however they are taken
_LOST = "ordered sums go through an all-gather, slower by 10 to 30 us each on NVLink"


class OrderedCollectives(GroupCollectives):
    """GroupCollectives whose sums are those of ``rank_ordered_sum``: an all-gather, then a sum of our own."""

    batch_invariant = True

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = torch.empty(self.size * x.numel(), dtype=x.dtype, device=x.device)
        with self.calls.call("all_reduce", x):
            _all_gather(parts, x.contiguous().view(-1), group=self.group)
        return rank_ordered_sum(parts.view(self.size, *x.shape))


class OrderedSymmetricCollectives(OrderedCollectives):
    """OrderedCollectives whose smaller sums run in one kernel over symmetric memory; the same bits.

    The constructor is a collective call of ``group``. Raises RuntimeError where symmetric memory does not work,
    ImportError without Triton.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._memory = SentinelMemory(group, device, all_reduce_buffer_bytes(self.size))
        use_counts = torch.zeros(buffer_rows(self.size), dtype=torch.int32, device=device)
        self.dispatch = AllReduceDispatch(
            self._memory.addresses,
            use_counts,
            self.rank,
            pdl=has_dependent_launches(device),
            limits=SizeLimits(
                ROWS * ROW_BYTES, 0
            ),  # one way for every size: the kernel's ways differ in signs of zeros
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.numel() * x.element_size() > _MOST_BY_KERNEL or (kernel := self.dispatch.kernel_for(x)) is None:
            return super().all_reduce(x)
        with self.calls.call("all_reduce", x):
            return kernel(x.view(-1, x.shape[-1]))[0].view(x.shape)


def rank_ordered_sum(parts: Tensor) -> Tensor:
    """The sum over the first dim in float32 (float64 of such), in its order, rounded once; never minus zero."""
    total = torch.zeros(parts.shape[1:], dtype=torch.promote_types(parts.dtype, torch.float32), device=parts.device)
    for part in parts:
        total += part
    return total.to(parts.dtype) + 0.0


def ordered_collectives(group: dist.ProcessGroup, device: torch.device, *, symmetric: bool) -> GroupCollectives:
    """OrderedSymmetricCollectives where every rank can have them and they are wanted, OrderedCollectives otherwise.

    A collective call of ``group``, before any graph is captured. A fallback is logged once, with its reason.
    """
    if not symmetric:
        return OrderedCollectives(group)
    make = partial(OrderedSymmetricCollectives, group, device)
    made: OrderedSymmetricCollectives | None = build_on_every_rank(
        group, device, make, partial(_self_test, device=device), _LOST
    )
    if made is not None:
        return made
    found = OrderedCollectives(group)
    found.slower = _LOST
    return found


def _self_test(made: OrderedSymmetricCollectives, device: torch.device) -> bool:
    probes = [torch.ones(8, dtype=dtype, device=device) for dtype in DTYPES]
    return all(bool((made.all_reduce(probe) == made.size).all()) for probe in probes)
