"""Candidates compiled beforehand, by several processes: one alone would compile for longer than all is measured.

Knows: how the work is shared out, and that none of it is needed: what is not compiled in time is compiled when it is
timed. Does not know: candidates (gpu_runner.py), or how one is compiled (compile_worker.py).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from launch.tune.journal import as_json
from models.kernels.matmul.choice_table import Choice, LinearShape

WORKER = (sys.executable, "-m", "launch.tune.compile_worker")
MOST_WORKERS = 14  # each holds half a GiB of device memory
READY = "ready\n"  # a worker's first line
_LOOK_SECONDS = 0.05
_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Compiled:
    """``ran``: candidates that run. ``refused``: those that do not, and why. ``left``: not tried, for want of time."""

    ran: int
    refused: list[tuple[LinearShape, Choice, str]]
    left: int


def default_workers(cores: int) -> int:
    return max(0, min(MOST_WORKERS, cores - 1))


def compile_all(
    work: Sequence[tuple[LinearShape, Choice]],
    workers: int,
    *,
    seconds: float = float("inf"),
    stop: Callable[[], bool] = lambda: False,
    show: Callable[[int], None] = lambda done: None,
    worker: Sequence[str] = WORKER,
) -> Compiled:
    """Every candidate of ``work`` by one of ``workers`` processes, for at most ``seconds``; ``show`` gets how many are
    done. A candidate at which its process dies is refused, and another process takes the rest of the share.
    """
    distinct = list(dict.fromkeys(work))
    count = min(workers, len(distinct))
    shares = [_Share(worker, distinct[index::count]) for index in range(count)]
    ends = time.monotonic() + seconds
    for share in shares:
        share.start()
    try:
        while any(share.is_alive() for share in shares) and time.monotonic() < ends and not stop():
            time.sleep(_LOOK_SECONDS)
            show(sum(len(share.told) for share in shares))
    finally:
        for share in shares:
            share.end()
    told = [(*one, why) for share in shares for one, why in zip(share.work, share.told, strict=False)]
    refused = [(shape, choice, why) for shape, choice, why in told if why is not None]
    return Compiled(len(told) - len(refused), refused, len(distinct) - len(told))


class _Share(threading.Thread):
    """The candidates of one process after the other; ``told``: None or a reason for each that is done, in order."""

    def __init__(self, command: Sequence[str], work: Sequence[tuple[LinearShape, Choice]]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.told: list[str | None] = []
        self._command = list(command)
        self._process: subprocess.Popen[str] | None = None
        self._ending = False
        self._starting = threading.Lock()

    def run(self) -> None:
        while len(self.told) < len(self.work) and self._go_on():
            pass

    def _go_on(self) -> bool:
        """One process, to the end of the work or to its own; False where another one would do no better."""
        with self._starting:
            if self._ending:
                return False
            process = self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        assert process.stdin is not None
        assert process.stdout is not None
        ready = process.stdout.readline() == READY
        for shape, choice in self.work[len(self.told) :] if ready else ():
            answer = _answer(process.stdin, process.stdout, json.dumps([shape.key, as_json(choice)]))
            if answer == "":
                break
            self.told.append(json.loads(answer))
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        code = process.wait()
        if ready and not self._ending and len(self.told) < len(self.work):
            self.told.append(f"the process that compiled it ended with exit code {code}")
        return ready

    def end(self) -> None:
        """Returns when its process is gone."""
        with self._starting:
            self._ending = True
            process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        if self.is_alive():
            self.join()


def _answer(stdin: IO[str], stdout: IO[str], question: str) -> str:
    """Empty where the other side is gone."""
    try:
        stdin.write(question + "\n")
        stdin.flush()
        return stdout.readline()
    except OSError:
        return ""
