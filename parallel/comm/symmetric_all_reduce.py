"""Collectives whose small all-reduces and gathers of keys run in one kernel over symmetric memory; NCCL does the rest.

Knows: how the collectives of a group are built on symmetric memory, up to which size each algorithm is the fastest.
Does not know: where that works (symmetric_memory.py), the kernels (all_reduce_triton.py, key_gather_triton.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.collectives import GroupCollectives, PendingAllReduce
from parallel.comm.peer_buffers import PeerBuffers, peer_buffer_bytes
from parallel.comm.quantised import Quantised
from parallel.comm.symmetric_memory import SentinelMemory, build_on_every_rank, has_dependent_launches


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """Bytes of the largest message for each algorithm; NCCL takes larger ones."""

    one_shot: int
    two_shot: int


# Where one algorithm passes the next on H200s, rows of 8 KiB (docs/lab/measurements/all-reduce.md); between 8
# ranks by the kernels before this one (docs/decisions/0012). Groups of 3 and of 5 to 7 have what the next larger has.
# Between two and between four, 64 MiB are the largest that was measured: three quarters of NCCL's time and 0.93 of it.
# Between four, 256 KiB take as long in one shot as in two, but to a one-shot sum a matmul may push.
SIZE_LIMITS = {
    2: SizeLimits(128 << 20, 0),
    **dict.fromkeys((3, 4), SizeLimits(256 << 10, 128 << 20)),
    **dict.fromkeys((5, 6, 7, 8), SizeLimits(128 << 10, 2 << 20)),
}
DTYPES = (torch.bfloat16, torch.float32)  # dtypes the kernel was tested with
_ALIGNMENT = 16  # bytes; of address and row, for the widest loads and stores
ROWS = 512  # of a launch with a program a row: of matmuls that push, and gathers of keys
ROW_BYTES = 16 << 10
_ROWS_OF_FEW_RANKS = 2048  # with fewer, launches of a long prompt would be shorter than their latency is worth


def buffer_rows(world: int) -> int:
    """Rows of a rank's peer buffers. Between up to four ranks even the sums of long prompts go through them."""
    return _ROWS_OF_FEW_RANKS if world <= 4 else ROWS


class AllReduceKernel(Protocol):
    """``all_reduce_rows`` of parallel/comm/all_reduce_triton.py with its algorithm and buffers bound."""

    def __call__(
        self, x_TN: Tensor, *, residual_TN: Tensor | None = None, norm_N: Tensor | None = None, eps: float = 0.0,
        into: Quantised | None = None,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip


class KeyGather(Protocol):
    """``gather_keys`` of parallel/comm/key_gather_triton.py with its buffers bound."""

    def __call__(self, keys_RX: Tensor, *, largest: bool) -> Tensor: ...


class AllReduceDispatch:
    """The kernels of one rank over its peer buffers, and the choice among them by size. Raises ImportError without
    Triton.

    ``memory``: the addresses of every rank's peer buffers (``all_reduce_buffer_bytes`` each), as this rank's GPU maps
    them; they must stay mapped as long as kernels run. ``use_counts`` int32 [buffer_rows(ranks)]: see PeerBuffers.
    """

    def __init__(
        self, memory: Sequence[int], use_counts: Tensor, rank: int, *, pdl: bool, limits: SizeLimits | None = None
    ) -> None:
        from parallel.comm.all_reduce_triton import all_reduce_rows
        from parallel.comm.key_gather_triton import gather_keys

        self._buffers = PeerBuffers(tuple(memory), use_counts, rank, buffer_rows(len(memory)), ROW_BYTES)
        self._limits = SIZE_LIMITS[len(memory)] if limits is None else limits
        self.one_shot: AllReduceKernel = partial(all_reduce_rows, buffers=self._buffers, pdl=pdl)
        self.pushed: AllReduceKernel = partial(all_reduce_rows, buffers=self._buffers, pushed=True, pdl=pdl)
        self.two_shot: AllReduceKernel = partial(all_reduce_rows, buffers=self._buffers, two_shot=True, pdl=pdl)
        self._gather_keys: KeyGather = partial(gather_keys, buffers=self._buffers, pdl=pdl)

    def gather_keys_for(self, keys_RX: Tensor, largest: bool) -> KeyGather | None:
        """What gathers these keys; None: NCCL does. ``largest``: of each row one key. Depends only on the shape.

        A row's keys go to every peer, as in a one-shot all-reduce, and are worth it up to the same size.
        """
        rows, width = keys_RX.shape
        row_bytes = (1 if largest else width) * keys_RX.element_size()
        fits = 0 < rows <= ROWS and 0 < row_bytes <= ROW_BYTES and rows * row_bytes <= self._limits.one_shot
        return self._gather_keys if fits else None

    def kernel_for(self, x: Tensor) -> AllReduceKernel | None:
        """The kernel that reduces ``x``; None: NCCL does. Depends only on shape, dtype and alignment, equal on all
        ranks.
        """
        width = x.shape[-1] if x.dim() else 0
        if width == 0 or not x.is_contiguous() or x.storage_offset() * x.element_size() % _ALIGNMENT:
            return None
        match shots_for(self._limits, x.numel() // width, width, x.dtype):
            case 1:
                return self.one_shot
            case 2:
                return self.two_shot
        return None

    def push_buffers(self, tokens: int, width: int, dtype: torch.dtype) -> PeerBuffers | None:
        """See Collectives."""
        return self._buffers if tokens <= ROWS and shots_for(self._limits, tokens, width, dtype) == 1 else None


def shots_for(limits: SizeLimits, rows: int, width: int, dtype: torch.dtype) -> Literal[1, 2] | None:
    """1 for a one-shot all-reduce of [rows, width], 2 for a two-shot one; None: NCCL."""
    row_bytes = width * dtype.itemsize
    if dtype not in DTYPES or row_bytes > ROW_BYTES or row_bytes % _ALIGNMENT or rows == 0:
        return None
    if rows * row_bytes <= limits.one_shot:
        return 1
    return 2 if rows * row_bytes <= limits.two_shot else None


def all_reduce_buffer_bytes(world: int) -> int:
    """Bytes of peer buffers that each rank needs for all of these all-reduces."""
    return peer_buffer_bytes(world, buffer_rows(world), ROW_BYTES)


_LOST = "all-reduces go through NCCL or gloo, slower by 5 to 20 us each on NVLink"


class SymmetricCollectives(GroupCollectives):
    """GroupCollectives whose all-reduces and gathers of keys run in our own kernels where that is faster
    (AllReduceDispatch).

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
        self, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, *, pushed: bool = False,
        into: Quantised | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
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
