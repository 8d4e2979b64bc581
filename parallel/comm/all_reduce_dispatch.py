"""Which sums over the ranks of a node take a launch of our own, in how many steps, and the memory for them.

Knows: up to which size each way is the fastest. Does not know: how ranks came to map each other's memory
(symmetric_memory.py), how the kernel sums (all_reduce_triton.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from parallel.comm import peer_buffers as places
from parallel.comm.peer_buffers import PeerBuffers


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of the largest message that goes each way; NCCL takes larger ones."""

    one_step: int
    two_steps: int


# Where one way passes the next on H200s, rows of 8 KiB (docs/measurements/all-reduce.md); between 8 ranks
# by the kernels before this one (docs/decisions/0012). Groups of 3 and of 5 to 7 have what the next larger one has.
LIMITS = {
    2: Limits(4 << 20, 0),
    **dict.fromkeys((3, 4), Limits(128 << 10, 4 << 20)),
    **dict.fromkeys((5, 6, 7, 8), Limits(128 << 10, 2 << 20)),
}
DTYPES = (torch.bfloat16, torch.float32)  # those it was tried with
_ALIGNMENT = 16  # bytes; of address and row, for the widest loads and stores
ROWS = 512
ROW_BYTES = 16 << 10


class Sum(Protocol):
    """See parallel/comm/all_reduce_triton.py ``summed``."""

    def __call__(
        self, x_TN: Tensor, *, residual_TN: Tensor | None = None, norm_N: Tensor | None = None, eps: float = 0.0
    ) -> tuple[Tensor, Tensor]: ...


class Sums:
    """The ways of one rank. Needs Triton.

    ``memory``: the addresses of every rank's ``memory_bytes``, as this rank's GPU maps them, for as long as somebody
    sums; ``exchanges`` int32 [ROWS]. See Places.
    """

    def __init__(
        self, memory: Sequence[int], exchanges: Tensor, rank: int, *, pdl: bool, limits: Limits | None = None
    ) -> None:
        from parallel.comm.all_reduce_triton import summed

        self._places = PeerBuffers(tuple(memory), exchanges, rank, ROWS, ROW_BYTES)
        self._limits = LIMITS[len(memory)] if limits is None else limits
        self.one_step: Sum = partial(summed, places=self._places, pdl=pdl)
        self.pushed: Sum = partial(summed, places=self._places, pushed=True, pdl=pdl)
        self.two_steps: Sum = partial(summed, places=self._places, two_steps=True, pdl=pdl)

    def of(self, x: Tensor) -> Sum | None:
        """What sums ``x``, None: NCCL. Depends on shape, dtype and alignment only, as on every rank."""
        width = x.shape[-1] if x.dim() else 0
        if width == 0 or not x.is_contiguous() or x.storage_offset() * x.element_size() % _ALIGNMENT:
            return None
        match steps_of(self._limits, x.numel() // width, width, x.dtype):
            case 1:
                return self.one_step
            case 2:
                return self.two_steps
        return None

    def places_for(self, tokens: int, width: int, dtype: torch.dtype) -> PeerBuffers | None:
        """See Collectives."""
        return self._places if steps_of(self._limits, tokens, width, dtype) == 1 else None


def steps_of(limits: Limits, rows: int, width: int, dtype: torch.dtype) -> Literal[1, 2] | None:
    """In how many steps a message [rows, width] is summed; None: by NCCL."""
    row_bytes = width * dtype.itemsize
    if dtype not in DTYPES or row_bytes > ROW_BYTES or row_bytes % _ALIGNMENT or not 0 < rows <= ROWS:
        return None
    if rows * row_bytes <= limits.one_step:
        return 1
    return 2 if rows * row_bytes <= limits.two_steps else None


def memory_bytes(world: int) -> int:
    """What each rank needs for its part in all of this."""
    return places.memory_bytes(world, ROWS, ROW_BYTES)
