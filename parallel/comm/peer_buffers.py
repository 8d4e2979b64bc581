"""Where ranks put their parts of a sum, or rows for each other, in each other's memory.

Knows: the layout of that memory, and what it holds where nothing is. Does not know: how it came to be mapped
(symmetric_memory.py), who writes parts and when (all_reduce_triton.py says why that is safe).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

EMPTY = -(1 << 15)  # int16: minus zero of a 16-bit type; nobody sends it, nor two of it as one float32


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """Memory of all ranks of a group, as this rank's GPU maps it, and this rank's count of exchanges.

    ``memory``: an address for each rank, a multiple of 16, of parts [2, ranks, rows, row_bytes], all of it EMPTY at
    first, again and again. ``exchanges`` int32 [rows], zeros at first, counts the exchanges of each row on this rank.
    A part has at most ``rows`` rows of ``row_bytes``, a multiple of 16.
    """

    memory: tuple[int, ...]
    exchanges: Tensor
    rank: int
    rows: int
    row_bytes: int

    def arguments(self) -> dict[str, Any]:
        """What kernels take them as, by name."""
        return {
            "memory": self.memory,
            "exchanges_ptr": self.exchanges,
            "RANK": self.rank,
            "WORLD": len(self.memory),
            "ROWS": self.rows,
            "ROW_BYTES": self.row_bytes,
        }


def push_arguments(places: PeerBuffers | None) -> dict[str, Any]:
    """Arguments of a kernel that puts its result into other ranks' places, or keeps it where there are None."""
    if places is None:
        nothing = {"memory": None, "exchanges_ptr": None, "RANK": 0, "WORLD": 1, "ROWS": 0, "ROW_BYTES": 0}
        return {**nothing, "PUSH": False}
    return {**places.arguments(), "PUSH": True}


def memory_bytes(world: int, rows: int, row_bytes: int) -> int:
    """What each rank needs for exchanges of at most so many rows: two places for every rank's part."""
    return 2 * world * rows * row_bytes
