"""Snapshots: copies of recurrent state at the end of published blocks, so that a prefix can be continued.

Knows: which rows of the snapshot bank hold the state after which block, which are about to be read, and which is
evicted first. Does not know: when a snapshot is taken (sharing.py), tensors, requests.

    free --take()--> taken --keep(block)--> kept: found by its block --drop(block), or the oldest where one is needed--+
      ^                |                      | pin(block): a sequence will start from it                              |
      +--give_back()---+                      +--unpin(row)                                                            |
      +------------------------------- no reader is left --------------------------------------------------------------+

The device reads and writes rows in the order of steps: in each step restores come first and saves come last. So a row
may be taken again in the plan that has its last restore, and one that is taken is found from the next plan on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from runtime.schedule.slots import AccountingError

NO_SNAPSHOT = 0


class SnapshotPool:
    """Rows 1..count. A kept one belongs to a findable block, and goes when that is forgotten."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.evictions = 0  # snapshots replaced by others although their blocks are findable
        self._free = list(range(count, 0, -1))
        self._row_of: OrderedDict[int, int] = OrderedDict()  # block -> row, the least recently used first
        self._kept = bytearray(count + 1)
        self._pins = [0] * (count + 1)
        self._taken: set[int] = set()

    def find(self, block: int) -> int:
        """The row of the state after ``block``, or NO_SNAPSHOT."""
        return self._row_of.get(block, NO_SNAPSHOT)

    def take(self) -> int:
        """A row to write into: a free one, else that of the least recently used snapshot without readers.

        NO_SNAPSHOT if there is neither. Must be kept or given back before the next plan.
        """
        if not self._free:
            oldest = next((block for block, row in self._row_of.items() if not self._pins[row]), None)
            if oldest is None:
                return NO_SNAPSHOT
            self.evictions += 1
            self._lose(oldest)
        row = self._free.pop()
        self._taken.add(row)
        return row

    def give_back(self, row: int) -> None:
        """Return a taken row; what is written into it is not used."""
        self._taken.remove(row)
        self._free.append(row)

    def keep(self, row: int, block: int) -> None:
        """A taken row gets the state after ``block``, which is findable and has no snapshot yet."""
        self._taken.remove(row)
        self._row_of[block] = row
        self._kept[row] = True

    def pin(self, block: int) -> int:
        """The row of ``block``, which has one: not written or reassigned before it is unpinned."""
        row = self._row_of[block]
        self._row_of.move_to_end(block)
        self._pins[row] += 1
        return row

    def unpin(self, row: int) -> None:
        """The plan being made reads it, or its reader has left."""
        self._pins[row] -= 1
        self._free_if_idle(row)

    def drop(self, block: int) -> None:
        """``block`` left the prefix index; drop its snapshot, if any."""
        if block in self._row_of:
            self._lose(block)

    def _lose(self, block: int) -> None:
        row = self._row_of.pop(block)
        self._kept[row] = False
        self._free_if_idle(row)

    def _free_if_idle(self, row: int) -> None:
        if not self._kept[row] and not self._pins[row]:
            self._free.append(row)

    def check(self, pinned: Sequence[int], findable: Sequence[int]) -> None:
        """Raise AccountingError unless each row is one of free, kept and pinned, and kept ones have findable blocks."""
        for row in range(1, self.count + 1):
            if self._pins[row] != pinned.count(row):
                raise AccountingError(f"snapshot {row} is pinned {self._pins[row]} times, read by {pinned.count(row)}")
        kept = list(self._row_of.values())
        dropped = [row for row in set(pinned) if row not in kept]
        if sorted(self._free + kept + dropped + list(self._taken)) != list(range(1, self.count + 1)):
            raise AccountingError(f"snapshots 1..{self.count}: free {self._free}, kept {kept}, dropped {dropped}")
        if self._taken:
            raise AccountingError(f"snapshots {self._taken} were taken, and neither kept nor given back")
        if lost := [block for block in self._row_of if block not in findable]:
            raise AccountingError(f"snapshots of blocks {lost}, which cannot be found")
