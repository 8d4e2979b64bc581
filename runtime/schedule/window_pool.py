"""The block pool of layers that attend to a sliding window, and what a request holds of it.

Knows: which pages a query reads, how many blocks requests are promised, which pages a prefix hit needs.
Does not know: when a window moves on or a chunk is cut (windows.py), requests, tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.schedule.blocks import BlockPool
from runtime.schedule.config import StepLimits
from runtime.schedule.slots import AccountingError


@dataclass(slots=True)
class WindowPages:
    """Pages [first, end) of a request, in ``blocks``; those before ``first`` were given back, or never computed.

    ``promised``: blocks that it can always take, the held ones included; ``charged``: blocks counted against the pool.
    ``given_up``: as in SequenceState.
    """

    promised: int
    first: int = 0
    blocks: list[int] = field(default_factory=list)
    charged: int = 0
    given_up: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)

    def within(self, first: int, end: int) -> list[int]:
        """The blocks held of pages [first, end)."""
        return self.blocks[max(0, first - self.first) : max(0, end - self.first)]


class WindowPool(BlockPool):
    """Blocks 1..count of layers whose queries see the last ``window`` keys, their own included.

    Its prefix index finds a page by its prefix id, which the pool of all tokens gives to the same page. Blocks are
    promised: those that requests are charged for, and those that wait for a fence, are never more than ``count``. So a
    request that holds less than its promise finds a block free, however pages are shared.
    """

    def __init__(self, window: int, count: int, limits: StepLimits, fenced: set[int] | None = None) -> None:
        super().__init__(count, limits.block_size, fenced=fenced)
        self.window = window
        self.tail = -(-(window - 1) // self.block_size)  # full pages that the first token after a hit sees
        self.quota = limits.window_blocks(window)
        self._charged = self._waiting = 0
        self._hit = bytearray(count + 1)

    @property
    def room(self) -> int:
        """Blocks that can be promised now."""
        return self.count - self._charged - self._waiting

    @property
    def room_soon(self) -> int:
        """The same once all fences have opened."""
        return self.count - self._charged

    def first_page(self, position: int) -> int:
        """The first page that a query at ``position`` sees."""
        return max(0, position - self.window + 1) // self.block_size

    def charge(self, pages: WindowPages) -> None:
        """``pages`` changed: count what it holds, or its promise where that is more."""
        charged = max(pages.promised, len(pages.blocks))
        self._charged += charged - pages.charged
        pages.charged = charged

    # ---- prefix hits ----

    def enter(self, block: int, prefix_id: int) -> None:
        """Make ``block`` findable as the page ``prefix_id``, unless another one is."""
        if (prefix_id, b"") not in self._index:
            self._enter(block, (prefix_id, b""), prefix_id)

    def find(self, prefix_id: int) -> int | None:
        """The block of the page ``prefix_id``, if it is still there."""
        return self._index.get((prefix_id, b""))

    def granted(self, prefix_ids: Sequence[int], *, trusted: bool = False) -> int:
        """How many of these consecutive pages can be a hit: the last ``tail`` of them are there (and ``trusted``)."""
        granted, index = len(prefix_ids), len(prefix_ids) - 1
        while index >= max(0, granted - self.tail):
            block = self.find(prefix_ids[index])
            if block is None or (trusted and not self._trusted[block]):
                granted = index
            index -= 1
        return granted

    # ---- taking and giving back ----

    def take(self, wanted: int) -> list[int]:
        taken = super().take(wanted)
        for block in taken:
            self._hit[block] = False
        return taken

    def share(self, blocks: Sequence[int]) -> int:
        for block in blocks:
            self._hit[block] = True
        return super().share(blocks)

    def pass_by(self, blocks: Sequence[int]) -> None:
        """Give back pages that a window has passed. They are reused before those that requests held at their end, where
        conversations continue, and those that a hit needed once: else one long prompt would evict all of them.
        """
        self.give_back(blocks)
        for block in reversed(blocks):
            if block in self._cached and not self._hit[block]:
                self._cached.move_to_end(block, last=False)

    def retire_after(self, step: int, blocks: Sequence[int]) -> None:
        super().retire_after(step, blocks)
        self._waiting += len(blocks)

    def landed(self, step: int) -> None:
        before = self.drops
        super().landed(step)
        self._waiting -= self.drops - before

    def check_charges(self, held: Sequence[WindowPages]) -> None:
        """Raise AccountingError unless the charges of all requests add up, and leave room for every promise."""
        charges = [pages.charged for pages in held]
        if charges != [max(pages.promised, len(pages.blocks)) for pages in held] or sum(charges) != self._charged:
            raise AccountingError(f"window {self.window}: {self._charged} blocks are charged, requests hold {held}")
        if self._waiting != len(self._fence.held()) or self.room < 0:
            raise AccountingError(
                f"window {self.window}: {self._charged} blocks are charged and {self._waiting} wait for a fence, the "
                f"pool has {self.count}"
            )
