"""Peer buffers: memory into which every rank of a group writes partial sums, or rows, for the other ranks.

Knows: the layout of the buffers, the sentinel that marks an unwritten element, and the names under which
kernels take them. Does not know: how the memory came to be mapped (symmetric_memory.py), who writes and reads it when
(all_reduce_triton.py, which also says why two buffers are enough).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

# As int16: minus zero of a 16-bit float. No kernel sends it, nor the float32 that two of them side by side make.
SENTINEL = -(1 << 15)


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """The buffers of all ranks of a group, as this rank's GPU maps them.

    ``memory``: the address of each rank's buffers, a multiple of 16. Each holds [2, ranks, rows, row_bytes], all of it
    SENTINEL at first and again after every read. ``use_counts`` int32 [rows], zeros at first, counts on this rank how
    often each row was used; its lowest bit says which of the two buffers comes next. A contribution has at most
    ``rows`` rows of at most ``row_bytes`` bytes, a multiple of 16.
    """

    memory: tuple[int, ...]
    use_counts: Tensor
    rank: int
    rows: int
    row_bytes: int

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments by which kernels take them."""
        return {
            "memory": self.memory,
            "use_counts_ptr": self.use_counts,
            "RANK": self.rank,
            "WORLD": len(self.memory),
            "ROWS": self.rows,
            "ROW_BYTES": self.row_bytes,
        }


def push_arguments(buffers: PeerBuffers | None) -> dict[str, Any]:
    """Arguments of a matmul kernel that also pushes its result into the peers' buffers; None: it does not push."""
    if buffers is None:
        nothing = {"memory": None, "use_counts_ptr": None, "RANK": 0, "WORLD": 1, "ROWS": 0, "ROW_BYTES": 0}
        return {**nothing, "PUSH": False}
    return {**buffers.arguments(), "PUSH": True}


def peer_buffer_bytes(world: int, rows: int, row_bytes: int) -> int:
    """Bytes that each rank needs: two buffers with a contribution of every rank."""
    return 2 * world * rows * row_bytes
