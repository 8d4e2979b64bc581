"""A thread that prepares the next requests while the engine works, a bounded number ahead.

Knows: order, the bound, and how a failure of the source reaches the reader. Does not know: what the items are.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class ReadAhead(Generic[_Item]):
    """At most ``ahead`` items of ``source`` wait to be taken; the source runs on this object's own thread."""

    def __init__(self, source: Iterable[_Item], ahead: int) -> None:
        self._queue: queue.Queue[tuple[_Item] | BaseException | None] = queue.Queue(ahead)
        self._closing = False
        self.exhausted = False
        self._thread = threading.Thread(target=self._run, args=(source,), name="read-ahead", daemon=True)
        self._thread.start()

    def take(self, timeout: float = 0.0) -> _Item | None:
        """The next item, or None when none is ready within ``timeout`` seconds or ``exhausted`` is now true.

        Raises what the source raised, once all items before it were taken.
        """
        if self.exhausted:
            return None
        try:
            entry = self._queue.get(timeout=timeout) if timeout else self._queue.get_nowait()
        except queue.Empty:
            return None
        if isinstance(entry, tuple):
            return entry[0]
        self.exhausted = True
        if entry is not None:
            raise entry
        return None

    def close(self) -> None:
        """End the thread; items that were not taken are dropped. A source that hangs (a terminal) is abandoned."""
        self._closing = True
        self.exhausted = True
        patience = time.monotonic() + 1.0
        while self._thread.is_alive() and time.monotonic() < patience:
            try:
                self._queue.get(timeout=0.01)
            except queue.Empty:
                self._thread.join(0.01)

    def _run(self, source: Iterable[_Item]) -> None:
        try:
            for item in source:
                self._queue.put((item,))
                if self._closing:
                    return
            self._queue.put(None)
        except BaseException as error:  # carried to the reader
            self._queue.put(error)
