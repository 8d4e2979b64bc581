"""``torchrun --nproc-per-node N -m MODULE`` and ``python -m MODULE`` for tests, forked from a process that has torch.

Knows: that a torchrun and its ranks import torch once each, two seconds of a core every time, which is most of what a
small job costs. One zygote a pytest process serves all of them, one after the other. Does not know: what a module does.
tests/launch/generate/test_data_parallel.py::test_two_groups_of_one_rank starts a torchrun of its own, as a user does.
"""

from __future__ import annotations

import atexit
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.faults.zygote import TORCHRUN, Launcher, Zygote

ROOT = Path(__file__).resolve().parents[1]
STACKS = 20_000  # characters of a hanging job's output that its error repeats
PATIENCE_S = 300.0  # a job that does next to nothing for so long hangs, however busy the machine is
BUSY = 0.01  # of a core: more than watchdogs use, less than a job gets beside a hundred others
_TIMES = 12  # an hour: a job that is busy for so long does not end by itself


@dataclass(frozen=True, slots=True)
class Ran:
    """``output``: stdout, ``errors``: stderr; of a launcher, its ranks' as well."""

    returncode: int
    output: str
    errors: str

    @property
    def said(self) -> str:
        return self.output + self.errors


@cache
def zygote() -> Zygote:
    """This process's own."""
    return Zygote({**os.environ, "OMP_NUM_THREADS": "1"})


def close() -> None:
    """End this process's zygote, if it has one."""
    if zygote.cache_info().currsize:
        zygote().close()
        zygote.cache_clear()


atexit.register(close)


class Running:
    """A job that was started. ``pid``: the launcher's, which leads a session of its own."""

    def __init__(self, launcher: Launcher, streams: list[Path], what: str) -> None:
        self.pid = launcher.pid
        self._launcher = launcher
        self._what = what
        self._said: dict[Path, bytes] = {}
        self._readers = [_Reader(stream, self._said) for stream in streams]
        self._streams = streams

    @property
    def ended(self) -> bool:
        return self._launcher.poll() is not None

    def wait(self, patience_s: float = PATIENCE_S) -> Ran:
        """For its end. Raises TimeoutError, with all threads' stacks, and kills the session, when the job has not been
        busy for ``patience_s``."""
        for _ in range(_TIMES):
            before = cpu_s(self.pid)
            code = self._launcher.wait(patience_s)
            if code is not None or cpu_s(self.pid) - before <= BUSY * patience_s:
                break
        if code is None:
            os.killpg(self.pid, signal.SIGABRT)  # each process tells where its threads stand, and ends
            for reader in self._readers:
                reader.join(10)  # until nobody writes any more: the launcher may end before its ranks have told
            self._launcher.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            said = self._ran(-signal.SIGABRT).said[-STACKS:]
            raise TimeoutError(f"{self._what} hangs; what it said last:\n{said}")
        return self._ran(code)

    def _ran(self, code: int) -> Ran:
        for reader in self._readers:
            reader.join(PATIENCE_S)
        output, errors = (self._said[stream].decode(errors="replace") for stream in self._streams)
        return Ran(code, output, errors)


@contextmanager
def started(ranks: int, module: str, *arguments: str, **environ: str | None) -> Iterator[Running]:
    """A torchrun for the time of a block, which need not wait for its end. One at a time.

    ``module``: or, where it ends in ``.py``, the path of a script. ``environ``: changes to this process's environment;
    None removes a variable.
    """
    words = ["--standalone", "--nproc-per-node", str(ranks), "--run-path", "--start-method", "fork"]
    with _started(TORCHRUN, *words, str(ROOT / "tests" / "zygote_rank.py"), module, *arguments, **environ) as running:
        yield running


def torchrun(ranks: int, module: str, *arguments: str, **environ: str | None) -> Ran:
    """``started``, to its end. Raises TimeoutError, after a SIGKILL to its session, when that does not come."""
    with started(ranks, module, *arguments, **environ) as running:
        return running.wait()


@contextmanager
def started_alone(module: str, *arguments: str, **environ: str | None) -> Iterator[Running]:
    """``started`` of one process that no launcher started."""
    with _started(module, *arguments, **environ) as running:
        yield running


def python(module: str, *arguments: str, **environ: str | None) -> Ran:
    """``started_alone``, to its end."""
    with started_alone(module, *arguments, **environ) as running:
        return running.wait()


@contextmanager
def _started(module: str, *arguments: str, **changes: str | None) -> Iterator[Running]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # this tree first
    mine = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": path, **changes}
    environ = {name: value for name, value in mine.items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("output", "errors")]
        for stream in streams:
            os.mkfifo(stream)
        launcher = zygote().start(arguments, environ, streams[0], module=module, errors=streams[1])
        running = Running(launcher, streams, f"{module} {' '.join(arguments)}")
        try:
            yield running
        finally:
            if not running.ended:
                os.killpg(running.pid, 9)
                running.wait()


def cpu_s(session: int) -> float:
    """CPU seconds of the processes of a session, with those that they have waited for."""
    used = 0
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):  # it has ended
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                used += sum(map(int, fields[11:15])) if int(fields[3]) == session else 0
    return used / os.sysconf("SC_CLK_TCK")


class _Reader(threading.Thread):
    """Puts into ``said`` all that comes through ``stream``."""

    def __init__(self, stream: Path, said: dict[Path, bytes]) -> None:
        super().__init__(daemon=True)
        self._stream, self._said = stream, said
        self.start()

    def run(self) -> None:
        self._said[self._stream] = self._stream.read_bytes()
