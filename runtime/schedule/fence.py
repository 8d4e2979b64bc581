"""A fence: things that return to a pool only when the last step that could touch them has landed (law 5).

Knows: step numbers. Does not know: what it holds back, or why.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Fence(Generic[T]):
    """Holds items by the step after whose landing they are free. Released in the order they were held.

    ``closed``: every step that a fence holds something for; fences that open together share it.
    """

    def __init__(self, closed: set[int] | None = None) -> None:
        self._by_step: dict[int, list[T]] = {}
        self._closed = set() if closed is None else closed

    def hold(self, step: int, item: T) -> None:
        """Keep ``item`` until ``step`` has landed."""
        self._closed.add(step)
        self._by_step.setdefault(step, []).append(item)

    def landed(self, step: int) -> list[T]:
        """The items that were waiting for exactly this step (steps land in order, one by one)."""
        return self._by_step.pop(step, [])

    def held(self) -> list[T]:
        """Everything still held, for accounting."""
        return [item for items in self._by_step.values() for item in items]
