"""Slots: the rows of the device tables. A request holds one for its life; slot 0 is padding.

Knows: which slots are free, their epochs, and which wait for a fence.
Does not know: requests or batch rows.
"""

from __future__ import annotations

from runtime.schedule.fence import Fence


class SlotPool:
    """Slots 1..count. Ending a slot bumps its epoch at once; the slot itself is reused only past its fence.

    ``version`` changes with every epoch, so that "did any row become a ghost?" is one comparison. ``fenced``: the steps
    after which slots return, shared with other fences.
    """

    def __init__(self, count: int, fenced: set[int] | None = None) -> None:
        self.count = count
        self.epochs = [0] * (count + 1)
        self.version = 0
        self._free = list(range(count, 0, -1))
        self._fence: Fence[int] = Fence(fenced)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def fenced_count(self) -> int:
        return len(self._fence.held())

    def take(self) -> int:
        """A free slot. The caller has checked ``free_count``."""
        return self._free.pop()

    def end(self, slot: int) -> None:
        """From now on, results that were planned for this slot are stale."""
        self.epochs[slot] += 1
        self.version += 1

    def retire_after(self, step: int, slot: int) -> None:
        """Return the slot to the pool when ``step`` lands."""
        self._fence.hold(step, slot)

    def give_back(self, slot: int) -> None:
        """Return a slot that no step in flight can touch."""
        self._free.append(slot)

    def landed(self, step: int) -> None:
        self._free.extend(self._fence.landed(step))

    def check(self, live: list[int]) -> None:
        """Raise unless every slot is exactly one of free, fenced or in ``live``."""
        seen = sorted(self._free + self._fence.held() + live)
        if seen != list(range(1, self.count + 1)):
            raise AccountingError(f"slots 1..{self.count} are not each accounted for once: {seen}")


class AccountingError(RuntimeError):
    """Blocks, slots or references do not add up: a bug in the scheduler, never a user's mistake."""
