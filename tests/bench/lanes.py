"""Jobs side by side on the GPUs of one host, each on GPUs of its own.

Knows: which GPUs are free, when a job may begin, what its limit is, how it is ended. Does not know: what a job does, or
what becomes of its log (measure.py).

Jobs begin in the order given: one begins when enough GPUs are free and every earlier one has begun or been given up.
One thread begins them, watches them and tells of them, so what is done between two jobs needs no lock.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

_WORTH_A_TRY = 0.5  # of a job's limit: with less time left it is not begun
_LOOK_S = 0.05
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Job:
    """``seconds``: its limit. Its output, errors included, goes to the file ``log``."""

    name: str
    gpus: int
    seconds: float
    argv: Sequence[str]
    log: Path


@dataclass(frozen=True, slots=True)
class Ran:
    """Exit ``code`` 124: its time was up. ``beside``: the jobs that ran at some time while it did, as they began."""

    name: str
    code: int
    seconds: float
    beside: tuple[str, ...]


@dataclass(slots=True)
class Outcome:
    """``late``: not begun because they might have ended too late. ``too_large``: they need more GPUs than there are."""

    ran: list[Ran] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    too_large: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Running:
    job: Job
    gpus: Sequence[str]
    process: subprocess.Popen[bytes]
    began: float
    until: float
    beside: list[str]


def run_jobs(
    jobs: Sequence[Job],
    gpus: Sequence[str],
    seconds: float,
    folder: Path,
    environ: Mapping[str, str],
    began: Callable[[Job, Sequence[str]], None],
    ended: Callable[[Job, Ran], None],
) -> Outcome:
    """Run ``jobs`` on ``gpus`` (named as CUDA_VISIBLE_DEVICES names them) within ``seconds``, begun jobs included.

    Each has ``folder`` as its working folder and ``environ`` with CUDA_VISIBLE_DEVICES as its environment.
    ``began`` is told a job's GPUs, ``ended`` what came of it. While ``ended`` works no job begins, and the end of one
    is noticed when it returns. Call this in the main thread: SIGINT, SIGTERM and SIGHUP kill what runs, as does an
    exception of ``began`` or ``ended``; after a signal it raises SystemExit(128 + its number).
    """
    until, outcome, free, running = time.monotonic() + seconds, Outcome(), list(gpus), list[_Running]()
    outcome.too_large = [job.name for job in jobs if job.gpus > len(gpus)]
    waiting = [job for job in jobs if job.gpus <= len(gpus)]
    with _stop_signals() as caught:
        try:
            while (waiting or running) and not caught:
                over = [(one, _end(one)) for one in running if _is_over(one)]
                for one, ran in over:
                    running.remove(one)
                    outcome.ran.append(ran)
                    free = [name for name in gpus if name in free or name in one.gpus]
                    ended(one.job, ran)
                while waiting and not caught:
                    left, job = until - time.monotonic(), waiting[0]
                    if left < job.seconds * _WORTH_A_TRY:
                        outcome.late.append(job.name)
                    elif job.gpus <= len(free):
                        its, free = free[: job.gpus], free[job.gpus :]
                        began(job, its)
                        running.append(_begin(job, its, min(left, job.seconds), folder, environ, running))
                    else:
                        break
                    del waiting[0]
                if running:
                    time.sleep(_LOOK_S)
        finally:
            for one in running:
                _kill(one)
            for one in running:
                one.process.wait()
        if caught:
            names = ", ".join(one.job.name for one in running) or "none"
            print(f"{signal.Signals(caught[0]).name}: killed what ran: {names}", file=sys.stderr, flush=True)
            raise SystemExit(128 + caught[0])
    return outcome


def _begin(
    job: Job,
    gpus: Sequence[str],
    seconds: float,
    folder: Path,
    environ: Mapping[str, str],
    running: Sequence[_Running],
) -> _Running:
    with job.log.open("wb") as log:
        process = subprocess.Popen(
            job.argv,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)},
        )
    now = time.monotonic()
    for other in running:
        other.beside.append(job.name)
    return _Running(job, gpus, process, now, now + seconds, [other.job.name for other in running])


def _is_over(one: _Running) -> bool:
    return one.process.poll() is not None or time.monotonic() >= one.until


def _end(one: _Running) -> Ran:
    code = one.process.poll()
    _kill(one)
    one.process.wait()
    return Ran(one.job.name, 124 if code is None else code, time.monotonic() - one.began, tuple(one.beside))


def _kill(one: _Running) -> None:
    with suppress(ProcessLookupError):  # whoever is left of its session would use the next job's GPUs
        os.killpg(one.process.pid, signal.SIGKILL)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """The signals that came. They are noted, not raised: between a process' start and its entry in the list of those
    that run, an exception would leave it behind. Those that are ignored stay so (nohup)."""
    caught: list[int] = []
    before = {number: signal.getsignal(number) for number in _STOPPING}
    noted = [number for number in _STOPPING if before[number] != signal.SIG_IGN]
    for number in noted:
        signal.signal(number, lambda received, _: caught.append(received))
    try:
        yield caught
    finally:
        for number in noted:
            signal.signal(number, before[number])
