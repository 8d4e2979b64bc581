"""All-reduce of small messages in one kernel, through memory that every GPU of a node maps; NCCL for the rest.

Knows: torch's symmetric memory, the size from which NCCL is the faster one, and how ranks agree that it works.
Does not know: what is summed, or how the kernel's programs find each other (one_shot_triton.py). Needs: all ranks of
the group on one node, each with a GPU of its own that reaches the others' memory.

NVLink multicast is not used, and must stay off (TORCH_SYMM_MEM_DISABLE_MULTICAST=1, NCCL_NVLS_ENABLE=0, which the
launcher sets): a process that fails while using it can leave the GPUs of a shared host unusable for others.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import GroupCollectives, Unsummed
from parallel.places import Places, memory_bytes

log = logging.getLogger(__name__)

# Each rank writes its part size - 1 times, NCCL's ring about twice: the more ranks, the earlier NCCL wins. On two H200s
# NCCL never does up to 4 MiB (docs/measurements-gpu.md, "Sums between GPUs"), on four between 1 and 2 MiB ("Four
# GPUs"). The limits of other sizes are older than the kernel and not measured.
_LIMIT_BYTES = {2: 4 << 20, 3: 2 << 20, 4: 1 << 20, 5: 1 << 20, 6: 768 << 10, 7: 768 << 10, 8: 512 << 10}
_DTYPES = (torch.bfloat16, torch.float32)  # those it was tried with
_ALIGNMENT = 16  # bytes; of address and row, for the widest loads and stores
ROWS = 512
ROW_BYTES = 16 << 10


class SymmetricCollectives(GroupCollectives):
    """GroupCollectives whose all-reduces of at most 512 rows of 16 KiB, and ``limit_bytes`` in all, take one kernel.

    Made by every rank of ``group`` together (a rendezvous). Raises RuntimeError where symmetric memory does not work,
    ImportError without Triton.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, limit_bytes: int | None = None) -> None:
        super().__init__(group)
        from torch.distributed import _symmetric_memory as symmetric_memory

        from parallel.one_shot_triton import one_shot

        self._limit = _LIMIT_BYTES.get(self.size, 0) if limit_bytes is None else limit_bytes
        size = memory_bytes(self.size, ROWS, ROW_BYTES)
        self._memory: Tensor = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        self._memory.zero_()
        handle = symmetric_memory.rendezvous(self._memory, group)
        mapped = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(self.size)]
        self._places = Places(
            memory=tuple(memory.data_ptr() for memory in mapped),
            exchanges=torch.zeros(ROWS, dtype=torch.int32, device=device),
            rank=self.rank,
            rows=ROWS,
            row_bytes=ROW_BYTES,
        )
        self._one_shot = partial(one_shot, places=self._places, pdl=torch.cuda.get_device_capability(device)[0] >= 9)
        torch.cuda.synchronize(device)
        dist.barrier(group)  # nobody's zeros come after somebody's first part

    def all_reduce(self, x: Tensor) -> Tensor:
        if not self.takes(x):
            return super().all_reduce(x)
        with self.calls.call("all_reduce", x):
            return self._one_shot(x.view(-1, x.shape[-1]))[0].view(x.shape)

    def places_for(self, tokens: int, width: int, dtype: torch.dtype) -> Places | None:
        return self._places if self._takes_shape(tokens, width, dtype) else None

    def sum_before_norm(self, x_TN: Tensor, *, pushed: bool = False) -> Tensor | Unsummed:
        return Unsummed(x_TN, self, pushed) if self.takes(x_TN) else self.all_reduce(x_TN)

    def all_reduce_norm(
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, *, pushed: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See NormedSum."""
        with self.calls.call("all_reduce", x_TN):
            return self._one_shot(x_TN, residual_TN=residual_TN, norm_N=norm_N, eps=eps, pushed=pushed)

    def takes(self, x: Tensor) -> bool:
        """Whether the kernel serves ``x``; depends on shape, dtype and alignment only, as on every rank."""
        width = x.shape[-1] if x.dim() else 0
        return (
            width > 0
            and self._takes_shape(x.numel() // width, width, x.dtype)
            and x.is_contiguous()
            and x.storage_offset() * x.element_size() % _ALIGNMENT == 0
        )

    def _takes_shape(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        row_bytes = width * dtype.itemsize
        return (
            dtype in _DTYPES
            and 0 < rows * row_bytes <= self._limit
            and row_bytes <= ROW_BYTES
            and row_bytes % _ALIGNMENT == 0
            and rows <= ROWS
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
        log.warning("all-reduces go through NCCL or gloo, slower by 4 to 17 us each on NVLink: %s", reason)
