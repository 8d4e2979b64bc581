"""``torchrun --nproc-per-node N -m MODULE`` for tests, forked from a process that has imported everything.

Knows: that a torchrun and its ranks import torch once each, two seconds of a core every time, which is most of what a
small job costs. One zygote a pytest process serves all of them, one after the other. Does not know: what ranks do.
tests/launch/generate/test_data_parallel.py::test_two_groups_of_one_rank starts a torchrun of its own, as a user does.
"""

from __future__ import annotations

import atexit
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.faults.zygote import Launcher, Zygote

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 900.0  # a hang ends there; four ranks on two busy cores have taken more than four minutes


@dataclass(frozen=True, slots=True)
class Ran:
    """``said``: stdout and stderr of the launcher and its ranks."""

    returncode: int
    said: str


@cache
def _zygote() -> Zygote:
    made = Zygote({**os.environ, "OMP_NUM_THREADS": "1"})
    atexit.register(made.close)
    return made


class Running:
    """A job that was started. ``pid``: the launcher's, which leads a session of its own."""

    def __init__(self, launcher: Launcher, output: Path, what: str) -> None:
        self.pid = launcher.pid
        self._launcher = launcher
        self._what = what
        self._said: list[bytes] = []
        self._reader = threading.Thread(target=lambda: self._said.append(output.read_bytes()), daemon=True)
        self._reader.start()

    @property
    def ended(self) -> bool:
        return self._launcher.poll() is not None

    def wait(self, patience_s: float = PATIENCE_S) -> Ran:
        """For its end. Raises TimeoutError, after a SIGKILL to the launcher's session, when it does not come."""
        code = self._launcher.wait(patience_s)
        if code is None:
            os.killpg(self.pid, 9)
            raise TimeoutError(f"{self._what} did not end within {patience_s:g} s")
        self._reader.join(PATIENCE_S)
        return Ran(code, b"".join(self._said).decode(errors="replace"))


@contextmanager
def started(ranks: int, module: str, *arguments: str) -> Iterator[Running]:
    """A job for the time of a block, which need not wait for its end. One at a time."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": _path()}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "said")
        os.mkfifo(output)
        words = ["--standalone", "--nproc-per-node", str(ranks), "--run-path", "--start-method", "fork"]
        words += [str(ROOT / "tests" / "zygote_rank.py"), module, *arguments]
        running = Running(_zygote().start(words, environ, output), output, f"{module} on {ranks} ranks")
        try:
            yield running
        finally:
            if not running.ended:
                os.killpg(running.pid, 9)
                running.wait()


def torchrun(ranks: int, module: str, *arguments: str) -> Ran:
    """Waits for its end. Raises TimeoutError, after a SIGKILL to the launcher's session, when it does not come."""
    with started(ranks, module, *arguments) as running:
        return running.wait()


def _path() -> str:
    """This tree before whatever else the tests were given."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
