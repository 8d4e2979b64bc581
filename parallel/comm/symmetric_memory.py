"""Symmetric memory for sentinel-filled peer buffers, and the agreement of all ranks whether kernels on it work.

Knows: torch's symmetric memory, and what rules it out. Does not know: which collectives use it
(symmetric_all_reduce.py, symmetric_exchange.py). Needs: all ranks of the group on one node, one GPU each
that can access its peers' memory.

NVLink multicast is not used, and must stay off (TORCH_SYMM_MEM_DISABLE_MULTICAST=1, NCCL_NVLS_ENABLE=0, which the
launcher sets): a process that fails while using it can leave the GPUs of a shared host unusable for others.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.peer_buffers import SENTINEL

log = logging.getLogger(__name__)

MAX_RANKS = 8  # the kernels on this memory are compiled and tested for no more
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Made = TypeVar("Made")


class SentinelMemory:
    """``size_bytes`` on every rank of ``group``, filled with SENTINEL and mapped by all of them while this object
    lives.

    A collective call: it returns on no rank before the memory of all is filled. Raises RuntimeError where symmetric
    memory does not work.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        size = size_bytes // 2
        self._own: Tensor = symmetric_memory.empty(size, dtype=torch.int16, device=device)
        self._own.fill_(SENTINEL)
        handle = symmetric_memory.rendezvous(self._own, group)
        self._mapped = [handle.get_buffer(rank, (size,), torch.int16) for rank in range(dist.get_world_size(group))]
        torch.cuda.synchronize(device)
        dist.barrier(group)  # no rank may fill its memory after a peer's first write

    @property
    def addresses(self) -> tuple[int, ...]:
        """The address of every rank's memory, as this rank's GPU maps it."""
        return tuple(memory.data_ptr() for memory in self._mapped)


def has_dependent_launches(device: torch.device) -> bool:
    """Whether the GPU has programmatic dependent launch (PDL): a kernel may start while its predecessor runs."""
    return torch.cuda.get_device_capability(device)[0] >= 9


def build_on_every_rank(
    group: dist.ProcessGroup, device: torch.device, make: Callable[[], Made], works: Callable[[Made], bool], lost: str
) -> Made | None:
    """``make()`` where it succeeds and ``works`` on every rank of ``group``; None on all of them otherwise.

    A collective call, before any graph is captured. ``lost`` says what falls back to NCCL or gloo: rank 0 logs it once,
    with the reason.
    """
    reason = _why_not(group, device)
    if not _all_agree(reason is None, group, device):
        _log_fallback(group, lost, reason or "another rank cannot use symmetric memory")
        return None
    made: Made | None = None
    try:
        made = make()
        reason = None if works(made) else "the first ones came out wrong"
    except (RuntimeError, AttributeError, ImportError) as error:
        reason = f"{type(error).__name__}: {error}"
    if _all_agree(reason is None, group, device):
        return made
    _log_fallback(group, lost, reason or "it failed on another rank")
    return None


def _why_not(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why symmetric memory cannot work on this rank; None where it can. A collective call of ``group``."""
    size, one_node = dist.get_world_size(group), _on_one_node(group, device)
    if device.type != "cuda":
        return f"the ranks compute on {device.type}"
    if not 2 <= size <= MAX_RANKS:
        return f"a group has {size} ranks, where 2 to {MAX_RANKS} can share memory"
    if not one_node:
        return "the ranks are on several nodes"
    if size > torch.cuda.device_count():
        return f"{size} ranks on a node that shows {torch.cuda.device_count()} GPUs: they hide their GPUs"
    if find_spec("triton") is None:
        return "Triton is not installed"
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    if not all(torch.cuda.can_device_access_peer(device.index or 0, index) for index in others):
        return "a GPU cannot reach another one's memory"
    return None


def _on_one_node(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks run on one machine: same host name and same boot."""
    started = _BOOT.read_text() if _BOOT.is_file() else ""
    node = int.from_bytes(blake2b(f"{socket.gethostname()} {started}".encode(), digest_size=7).digest(), "little")
    least, most = _minimum(torch.tensor([node, -node], device=device), group)
    return least == -most


def _all_agree(yes: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    return bool(_minimum(torch.tensor([int(yes)], device=device), group)[0])


def _minimum(numbers: Tensor, group: dist.ProcessGroup) -> list[int]:
    dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=group)
    minimum: list[int] = numbers.tolist()
    return minimum


def _log_fallback(group: dist.ProcessGroup, lost: str, reason: str) -> None:
    if dist.get_rank(group) == 0 and dist.get_world_size(group) > 1:
        log.warning("%s: %s", lost, reason)
