"""Freezes long-lived objects out of Python's garbage collection while an engine is open.

Knows: how many engines of this process are open. Does not know: what an engine is made of.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

_holders: set[object] = set()
_lock = threading.RLock()  # a finalizer that Python runs in here may close an engine


def freeze_heap() -> Callable[[], None]:
    """Hide everything alive from the garbage collector; returns what ends that, to be called when the engine closes.

    A full collection looks at every object of torch and all other packages: 10 to 100 ms in which this process does
    nothing else, in the middle of some step, and the other ranks wait for it. When an engine is ready for its first
    request, what is alive stays alive, so looking at it again finds nothing. Later objects are collected as usual.

    What is hidden and becomes garbage is freed only if nothing in a reference cycle holds it. So what was returned
    puts everything back into sight once no engine of the process is open (also what others gave to gc.freeze: Python
    does not distinguish them). It may be called more than once, and from any thread. As slow as a full collection.
    """
    holder = object()
    gc.collect()  # garbage would be kept, too
    with _lock:
        _holders.add(holder)
        gc.freeze()

    def thaw() -> None:
        with _lock:
            if holder not in _holders:
                return
            _holders.remove(holder)
            if not _holders:
                gc.unfreeze()

    return thaw
