"""All-reduce of small messages in one kernel, through memory that every GPU of a node maps; NCCL for the rest.

Knows: torch's symmetric memory, and how ranks agree that it works. Does not know: which sums go through it (sums.py).
Needs: all ranks of the group on one node, each with a GPU of its own that reaches the others' memory.

NVLink multicast is not used, and must stay off (TORCH_SYMM_MEM_DISABLE_MULTICAST=1, NCCL_NVLS_ENABLE=0, which the
launcher sets): a process that fails while using it can leave the GPUs of a shared host unusable for others.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import GroupCollectives, Unsummed
from parallel.places import EMPTY, Places
from parallel.sums import DTYPES, LIMITS, ROWS, Sums, memory_bytes

log = logging.getLogger(__name__)


class SymmetricCollectives(GroupCollectives):
    """GroupCollectives whose all-reduces take one kernel where that is faster (sums.py).

    Made by every rank of ``group`` together (a rendezvous). Raises RuntimeError where symmetric memory does not work,
    ImportError without Triton.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        from torch.distributed import _symmetric_memory as symmetric_memory

        size = memory_bytes(self.size) // 2
        self._memory: Tensor = symmetric_memory.empty(size, dtype=torch.int16, device=device)
        self._memory.fill_(EMPTY)
        handle = symmetric_memory.rendezvous(self._memory, group)
        self._mapped = [handle.get_buffer(rank, (size,), torch.int16) for rank in range(self.size)]
        self.sums = Sums(
            [memory.data_ptr() for memory in self._mapped],
            torch.zeros(ROWS, dtype=torch.int32, device=device),
            self.rank,
            pdl=torch.cuda.get_device_capability(device)[0] >= 9,
        )
        torch.cuda.synchronize(device)
        dist.barrier(group)  # nobody's memory is emptied after somebody's first part

    def all_reduce(self, x: Tensor) -> Tensor:
        if (summed := self.sums.of(x)) is None:
            return super().all_reduce(x)
        with self.calls.call("all_reduce", x):
            return summed(x.view(-1, x.shape[-1]))[0].view(x.shape)

    def places_for(self, tokens: int, width: int, dtype: torch.dtype) -> Places | None:
        return self.sums.places_for(tokens, width, dtype)

    def sum_before_norm(self, x_TN: Tensor, *, pushed: bool = False) -> Tensor | Unsummed:
        return self.all_reduce(x_TN) if self.sums.of(x_TN) is None else Unsummed(x_TN, self, pushed)

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
    reason = _why_not(group, device)
    if not _all_agree(reason is None, group, device):
        _log_fallback(group, reason or "another rank cannot use symmetric memory")
        return GroupCollectives(group)
    made: SymmetricCollectives | None = None
    try:
        made = SymmetricCollectives(group, device)
        probes = [torch.ones(8, dtype=dtype, device=device) for dtype in DTYPES]
        works = all(bool((made.all_reduce(probe) == made.size).all()) for probe in probes)
        reason = None if works else "a first sum came out wrong"
    except (RuntimeError, AttributeError, ImportError) as error:
        works, reason = False, f"{type(error).__name__}: {error}"
    if _all_agree(works, group, device) and made is not None:
        return made
    _log_fallback(group, reason or "it failed on another rank")
    return GroupCollectives(group)


def _why_not(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """What rules symmetric memory out on this rank, None if nothing does."""
    size = dist.get_world_size(group)
    if device.type != "cuda":
        return f"the ranks compute on {device.type}"
    if size not in LIMITS:
        return f"a group of {size} ranks has no measured crossover"
    if size > torch.cuda.device_count():
        return f"{size} ranks on a node that shows {torch.cuda.device_count()} GPUs: they span nodes or hide their GPUs"
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    if not all(torch.cuda.can_device_access_peer(device.index or 0, index) for index in others):
        return "a GPU cannot reach another one's memory"
    return None


def _all_agree(yes: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    verdict = torch.tensor([int(yes)], dtype=torch.int32, device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=group)
    return bool(verdict.item())


def _log_fallback(group: dist.ProcessGroup, reason: str) -> None:
    if dist.get_rank(group) == 0 and dist.get_world_size(group) > 1:
        log.warning("all-reduces go through NCCL or gloo, slower by 5 to 20 us each on NVLink: %s", reason)
