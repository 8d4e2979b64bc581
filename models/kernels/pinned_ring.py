"""A ring of things that queued work still reads: one is handed out again once the device has passed its last reader.

Knows: how many there must be so that the host never waits in a running chain. Does not know: what they hold.

FlashInfer's prefill plans are made on the host and copied to the device by work that is queued after every step in
flight. So the host may fill a buffer again only after that copy. With D steps in flight besides the one that lands,
step N is planned when step N - 1 - D has landed: D + 1 buffers are enough for a host that never waits, and one more for
a launch that lands late. A fixed number would quietly cut a deeper chain down to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

_Held = TypeVar("_Held")


def ring_places(depth: int) -> int:
    """Places of a ring whose user has ``depth`` steps in flight besides the one that lands next."""
    return depth + 2


class PinnedRing(Generic[_Held]):
    """``take`` the next one, queue the work that reads it, then ``queued``: in turn, on the thread that launches.

    ``event`` makes what is recorded after that work (torch.cuda.Event); None on a CPU, where work is not queued.
    """

    def __init__(self, held: Sequence[_Held], event: Callable[[], Any] | None) -> None:
        self._held = tuple(held)
        self._events = None if event is None else [event() for _ in held]
        self._next = 0

    def __len__(self) -> int:
        return len(self._held)

    def take(self) -> _Held:
        """The next one; waits where the work that read it last is not over."""
        if self._events is not None:
            self._events[self._next].synchronize()
        return self._held[self._next]

    def queued(self) -> None:
        """Everything that reads what ``take`` returned is queued on the current stream."""
        if self._events is not None:
            self._events[self._next].record()
        self._next = (self._next + 1) % len(self._held)


def event_of(device: torch.device) -> Callable[[], Any] | None:
    """What a ring of ``device`` records."""
    event: Any = torch.cuda.Event  # untyped in some versions of torch
    return event if device.type == "cuda" else None
