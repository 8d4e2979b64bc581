"""A process of its own that runs ninja for FlashInfer, and ends with the one that started it (flashinfer_build.py).

    python flashinfer_build_process.py PARENT LOCK FOLDER WANTED NINJA_FILE

Knows: how to stay out of the way (niceness, an own session) and how to end ninja so that nothing half done stays.
Does not know: what is built. Standard library only, imports nothing of ours: it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_NICENESS = 19


def main(parent: int, lock: Path, folder: Path, wanted: Path, ninja_file: Path) -> int:
    """Build ``ninja_file`` as ``wanted`` has it, in ``folder``, while holding FlashInfer's ``lock``; 0 if nobody has to
    do it any more, or somebody else does."""
    signal.signal(signal.SIGTERM, _end_all)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    try:
        if os.getppid() != parent:  # it ended before it could be asked to say so
            return 0
        os.nice(_NICENESS)
        with lock.open("a") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return 0
            content = wanted.read_text()
            if not ninja_file.exists() or ninja_file.read_text() != content:  # as FlashInfer: its time is left alone
                ninja_file.write_text(content)
            command = ["ninja", "-v", "-C", str(folder), "-f", str(ninja_file)]
            return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    finally:
        wanted.unlink(missing_ok=True)


def _end_all(number: int, frame: FrameType | None) -> None:
    """Ninja, told to end, ends its compilers and removes their unfinished files. Whoever it is wrapped in ends, too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *map(Path, sys.argv[2:])))
