"""The background build of FlashInfer's module: runs ninja in a process that ends with its parent.

    python flashinfer_build_process.py PARENT LOCK FOLDER WANTED NINJA_FILE

Knows: how to yield the CPU (niceness, an own session) and how to stop ninja so that nothing half done stays.
Does not know: what is built (flashinfer_build.py). Standard library only, and nothing of ours: it starts in
milliseconds.
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
    """Builds ``ninja_file`` with the text of ``wanted``, in ``folder``, while holding FlashInfer's ``lock``.

    Returns ninja's exit code; 0 where the parent is gone or another process builds.
    """
    signal.signal(signal.SIGTERM, _end_all)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    try:
        if os.getppid() != parent:  # the parent ended before prctl took effect
            return 0
        os.nice(_NICENESS)
        with lock.open("a") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return 0
            content = wanted.read_text()
            if (
                not ninja_file.exists() or ninja_file.read_text() != content
            ):  # as FlashInfer does, to keep its modification time
                ninja_file.write_text(content)
            command = ["ninja", "-v", "-C", str(folder), "-f", str(ninja_file)]
            return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    finally:
        wanted.unlink(missing_ok=True)


def _end_all(number: int, frame: FrameType | None) -> None:
    """SIGTERM to the whole session: ninja stops its compilers and removes their unfinished files."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *map(Path, sys.argv[2:])))
