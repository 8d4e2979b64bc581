"""Where ranks put their parts of a sum in each other's memory.

Knows: the layout of that memory, which every kernel that writes or reads it shares. Does not know: how it came to be
mapped (symmetric.py), who writes parts and when (parts_triton.py and marked_sum_triton.py say why that is safe).

There are two kinds of places. Those of parts hold what a rank sends as it is, and flags beside it that say for which
exchange it is there. Those of marked words hold four bytes of a part in eight, the upper four being the number of the
exchange: whoever reads a word sees by itself whether it has come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

WORD_BYTES = 4  # of a part in one marked word


@dataclass(frozen=True, slots=True)
class Places:
    """Memory of all ranks of a group, as this rank's GPU maps it, and this rank's count of exchanges.

    ``memory``: an address for each rank, a multiple of 16. Of ``part_bytes``: parts [2, ranks, rows, row_bytes], then
    flags int32 [rows, ranks]. Of ``marked_bytes``: int64 [2, ranks, rows, row_bytes / 4]. ``exchanges`` int32, at least
    [rows], counts what this rank has summed of each row, through places of either kind. All of it begins with zeros.
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


def push_arguments(places: Places | None) -> dict[str, Any]:
    """Arguments of a kernel that puts its result into other ranks' marked words, or keeps it where there are None."""
    if places is None:
        nothing = {"memory": None, "exchanges_ptr": None, "RANK": 0, "WORLD": 1, "ROWS": 0, "ROW_BYTES": 0}
        return {**nothing, "PUSH": False}
    return {**places.arguments(), "PUSH": True}


def part_bytes(world: int, rows: int, row_bytes: int) -> int:
    """What each rank needs for exchanges of at most so many rows as parts: two places for every rank's, and flags."""
    return 2 * world * rows * row_bytes + 4 * rows * world


def marked_bytes(world: int, rows: int, row_bytes: int) -> int:
    """What each rank needs for exchanges of at most so many rows as marked words."""
    return 2 * world * rows * row_bytes // WORD_BYTES * 8
