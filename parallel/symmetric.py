"""All-reduce of small messages in one kernel, through memory that every GPU of a node maps; NCCL for the rest.

Knows: torch's symmetric memory, the size from which NCCL is the faster one, and how ranks agree that it works.
Does not know: what is summed. Needs: all ranks of the group on one node, each with a GPU of its own that reaches the
others' memory.

One-shot: each rank copies its part into its symmetric buffer, waits for the others, and adds all parts in rank order,
so the result is bitwise the same everywhere. The kernel waits again before it ends: a rank never overwrites a part that
another one still reads, in a captured graph or outside.

NVLink multicast is not used, and must stay off (TORCH_SYMM_MEM_DISABLE_MULTICAST=1, NCCL_NVLS_ENABLE=0, which the
launcher sets): a process that fails while using it can leave the GPUs of a shared host unusable for others.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import GroupCollectives

log = logging.getLogger(__name__)

# One-shot reads size - 1 parts over NVLink, NCCL's ring about two: the more ranks, the earlier NCCL wins. Measured on
# two H200s: 6.2 us against 19.2 at 8 KiB, 18.4 against 42.0 at 2 MiB. Other sizes are scaled from that, not measured.
_LIMIT_BYTES = {2: 4 << 20, 3: 2 << 20, 4: 1 << 20, 5: 1 << 20, 6: 768 << 10, 7: 768 << 10, 8: 512 << 10}
_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 16  # bytes; what the kernel's widest loads want of address and length


class SymmetricCollectives(GroupCollectives):
    """GroupCollectives whose all-reduces up to ``limit_bytes`` take the one-shot kernel, in the dtypes that it knows.

    Made by every rank of ``group`` together (a rendezvous). Raises RuntimeError where symmetric memory does not work.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, limit_bytes: int | None = None) -> None:
        super().__init__(group)
        from torch.distributed import _symmetric_memory as symmetric_memory

        limit = _LIMIT_BYTES.get(self.size, 0) if limit_bytes is None else limit_bytes
        self._bytes: Tensor = symmetric_memory.empty(limit, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self._bytes, group)
        self._group_name = group.group_name

    def all_reduce(self, x: Tensor) -> Tensor:
        if not self.takes(x):
            return super().all_reduce(x)
        part = self._bytes[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        with self.calls.call("all_reduce", x):
            reduced: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(part, x, "sum", self._group_name)
        return reduced

    def takes(self, x: Tensor) -> bool:
        """Whether the one-shot kernel serves ``x``; depends on shape, dtype and alignment only, as on every rank."""
        size = x.numel() * x.element_size()
        return (
            x.dtype in _DTYPES
            and 0 < size <= self._bytes.numel()
            and size % _ALIGNMENT == 0
            and x.is_contiguous()
            and x.storage_offset() * x.element_size() % _ALIGNMENT == 0
        )


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
        probe = torch.ones(_ALIGNMENT, dtype=torch.bfloat16, device=device)
        works = bool((made.all_reduce(probe) == made.size).all())
        reason = None if works else "a first sum came out wrong"
    except (RuntimeError, AttributeError) as error:
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
    if size not in _LIMIT_BYTES:
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
        log.warning("all-reduces go through NCCL or gloo, about 12 us slower each on NVLink: %s", reason)
