"""A rank does not outlive the process that started it (the launcher's agent), however that one dies.

Knows: Linux' parent-death signal, and the gap in it. Does not know: what else ends a rank (watchdog.py).
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


class OrphanedError(RuntimeError):
    """The parent was gone before its death could be watched for."""


def die_with_parent(parent: int | None = None, with_signal: int = signal.SIGKILL) -> int:
    """Asks the kernel to signal this process when the thread that started it ends. Returns the parent's process id.

    ``parent`` is who should be the parent, where the caller knows it. The kernel does not signal for a parent that died
    before this call: the process has another parent then, which is checked. Raises OrphanedError when that happened,
    OSError where the kernel has no such signal.
    """
    expected = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(with_signal), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    now = os.getppid()
    if now != expected:
        raise OrphanedError(f"process {os.getpid()} was started by {expected}, whose death left it to {now}")
    return expected
