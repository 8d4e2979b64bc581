"""Candidates compiled beforehand, by several processes: one alone would compile for longer than all is measured.

Knows: how the work is shared out, and that none of it is needed: what is not compiled in time is compiled when it is
timed. Does not know: candidates (gpu_runner.py), or how one is compiled (compile_worker.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launch.tune.journal import as_json
from models.kernels.matmul.choice_table import Choice, LinearShape

WORKER = (sys.executable, "-m", "launch.tune.compile_worker")
MOST_WORKERS = 14  # each holds half a GiB of device memory
_LOOK_SECONDS = 0.05
_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Compiled:
    """``ran``: candidates that run; ``refused``: (key, choice, reason) of those that do not. ``left``: not tried."""

    ran: int
    refused: list[tuple[str, Choice, str]]
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
    """Every candidate of ``work`` by one of ``workers`` processes, for at most ``seconds``; ``show`` hears how many are
    done. A process that dies leaves the rest of its share.
    """
    distinct = list(dict.fromkeys(work))
    shares = [distinct[index::workers] for index in range(min(workers, len(distinct)))]
    running = [_Worker(worker, share) for share in shares]
    ends = time.monotonic() + seconds
    try:
        while any(one.alive for one in running) and time.monotonic() < ends and not stop():
            time.sleep(_LOOK_SECONDS)
            show(sum(len(one.told) for one in running))
    finally:
        for one in running:
            one.end()
    told = [(shape, choice, why) for one in running for (shape, choice), why in zip(one.share, one.told, strict=False)]
    refused = [(shape.key, choice, why) for shape, choice, why in told if why is not None]
    return Compiled(len(told) - len(refused), refused, len(distinct) - len(told))


class _Worker:
    """One process, its share, and what it told of it so far, in the order of the share."""

    def __init__(self, command: Sequence[str], share: Sequence[tuple[LinearShape, Choice]]) -> None:
        self.share = share
        self.told: list[str | None] = []
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._feed, self._read)]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Also while something that it told is not read yet."""
        return self._threads[1].is_alive()

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(_END_SECONDS)

    def _feed(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            with stdin:
                for shape, choice in self.share:
                    stdin.write(json.dumps([shape.key, as_json(choice)]) + "\n")
        except OSError:
            return  # it died: what it has not told is left

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                try:
                    why = json.loads(line)
                except ValueError:
                    continue  # a library that prints
                if why is None or isinstance(why, str):
                    self.told.append(why)
