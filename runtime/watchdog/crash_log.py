"""Stacks of a process whose interpreter can no longer write them: a file that C code writes to.

Knows: faulthandler's timer, its handlers of fatal signals and of the one by which others ask. Needs no interpreter lock
once it is armed. Does not know: who asks, or what else is written (crash_report.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import TextIO

ASK = signal.SIGUSR2
_WRITING_SECONDS = 0.2
_TRIES = 20
_LONGEST = 1e6  # seconds; what the timer takes


class CrashLog:
    """``crash.txt`` in ``folder``, removed again by ``close`` when there was nothing to say.

    ``whole_process``: fatal signals and ASK are written here too; one log a process may have them. Raises OSError.
    """

    def __init__(self, folder: Path, whole_process: bool) -> None:
        self.path = folder / "crash.txt"
        self._file: TextIO = _opened(self.path)
        self._whole_process = whole_process
        if whole_process:
            faulthandler.enable(self._file)
            faulthandler.register(ASK, self._file)

    def end_process_in(self, seconds: float) -> None:
        """Unless this is called again before, the process writes its stacks and exits with code 1 after ``seconds``."""
        faulthandler.dump_traceback_later(min(seconds, _LONGEST), exit=True, file=self._file)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._whole_process:
            faulthandler.unregister(ASK)
            faulthandler.disable()
        self._file.close()
        with contextlib.suppress(OSError):
            if self.path.stat().st_size == 0:
                self.path.unlink()


def _opened(path: Path) -> TextIO:
    """A job that ends now may remove the folder that both share, between its making and the opening of the file."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("w")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w")


def kill(process: int) -> None:
    """Ends a process of this node that cannot be talked to any more; its stacks are asked for first, stopped or not."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, ASK)
        os.kill(process, signal.SIGCONT)
        time.sleep(_WRITING_SECONDS)
        os.kill(process, signal.SIGKILL)
