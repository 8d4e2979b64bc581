"""Which kernel sums a message of all ranks of a node, and the memory through which it does.

Knows: up to which size each way is the fastest, how much memory they take. Does not know: how ranks came to map each
other's memory (symmetric.py), how the kernels sum (marked_sum_triton.py, one_shot_triton.py, two_steps_triton.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from parallel.places import Places, marked_bytes, part_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of the largest message that goes each way: the first way whose limit is not passed, NCCL after the last."""

    marked: int
    one_shot: int
    two_steps: int


# Where one way passes the next on H200s, rows of 8 KiB (docs/measurements-gpu.md, "Sums between GPUs"). Groups of 3 and
# of 5 to 7 were not measured: they are given what the next larger one has.
LIMITS = {
    2: Limits(256 << 10, 4 << 20, 0),
    **dict.fromkeys((3, 4), Limits(256 << 10, 0, 4 << 20)),
    **dict.fromkeys((5, 6, 7, 8), Limits(128 << 10, 0, 2 << 20)),
}
DTYPES = (torch.bfloat16, torch.float32)  # those it was tried with
_ALIGNMENT = 16  # bytes; of address and row, for the widest loads and stores
ROWS = 512
MARKED_ROWS = 64
ROW_BYTES = 16 << 10


class Sum(Protocol):
    """See parallel/one_shot_triton.py ``one_shot``."""

    def __call__(
        self, x_TN: Tensor, *, residual_TN: Tensor | None = None, norm_N: Tensor | None = None, eps: float = 0.0
    ) -> tuple[Tensor, Tensor]: ...


class Sums:
    """The ways of one rank. Needs Triton.

    ``memory``: the addresses of every rank's ``memory_bytes``, as this rank's GPU maps them, for as long as somebody
    sums; ``exchanges`` int32 [ROWS]. All of it zeros at first.
    """

    def __init__(
        self, memory: Sequence[int], exchanges: Tensor, rank: int, *, pdl: bool, limits: Limits | None = None
    ) -> None:
        from parallel.marked_sum_triton import marked_sum
        from parallel.one_shot_triton import one_shot
        from parallel.two_steps_triton import two_steps

        behind = part_bytes(len(memory), ROWS, ROW_BYTES)
        parts = Places(tuple(memory), exchanges, rank, ROWS, ROW_BYTES)
        self._marked = Places(tuple(one + behind for one in memory), exchanges, rank, MARKED_ROWS, ROW_BYTES)
        self._limits = LIMITS[len(memory)] if limits is None else limits
        self.marked: Sum = partial(marked_sum, places=self._marked, pdl=pdl)
        self.pushed: Sum = partial(marked_sum, places=self._marked, pushed=True, pdl=pdl)
        self.one_shot: Sum = partial(one_shot, places=parts, pdl=pdl)
        self.two_steps: Sum = partial(two_steps, places=parts, pdl=pdl)

    def of(self, x: Tensor) -> Sum | None:
        """What sums ``x``, None: NCCL. Depends on shape, dtype and alignment only, as on every rank."""
        width = x.shape[-1] if x.dim() else 0
        if width == 0 or not x.is_contiguous() or x.storage_offset() * x.element_size() % _ALIGNMENT:
            return None
        match way_of(self._limits, x.numel() // width, width, x.dtype):
            case "marked":
                return self.marked
            case "one shot":
                return self.one_shot
            case "two steps":
                return self.two_steps
        return None

    def places_for(self, tokens: int, width: int, dtype: torch.dtype) -> Places | None:
        """See Collectives."""
        return self._marked if way_of(self._limits, tokens, width, dtype) == "marked" else None


def way_of(
    limits: Limits, rows: int, width: int, dtype: torch.dtype
) -> Literal["marked", "one shot", "two steps"] | None:
    """How a message [rows, width] is summed; None: by NCCL."""
    row_bytes = width * dtype.itemsize
    if dtype not in DTYPES or row_bytes > ROW_BYTES or row_bytes % _ALIGNMENT or not 0 < rows <= ROWS:
        return None
    size = rows * row_bytes
    if size <= limits.marked and rows <= MARKED_ROWS and dtype == torch.bfloat16:
        return "marked"
    if size <= limits.one_shot:
        return "one shot"
    return "two steps" if size <= limits.two_steps else None


def memory_bytes(world: int) -> int:
    """What each rank needs for its part in all of this."""
    return part_bytes(world, ROWS, ROW_BYTES) + marked_bytes(world, MARKED_ROWS, ROW_BYTES)
