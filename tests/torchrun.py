"""``torchrun --nproc-per-node N -m MODULE`` and ``python -m MODULE`` for tests, forked from a process that has torch.

Knows: that a torchrun and its ranks import torch once each, two seconds of a core every time, which is most of what a
small job costs. One zygote a pytest process serves all of them, one after the other. Does not know: what a module does.
tests/launch/generate/test_data_parallel.py::test_two_groups_of_one_rank starts a torchrun of its own, as a user does.
"""

from __future__ import annotations

import atexit
import os
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.faults.zygote import TORCHRUN, Zygote

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 900.0  # a hang ends there; four ranks on two busy cores have taken more than four minutes


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
    made = Zygote({**os.environ, "OMP_NUM_THREADS": "1"})
    atexit.register(made.close)
    return made


def torchrun(ranks: int, module: str, *arguments: str, **environ: str | None) -> Ran:
    """Waits for its end. Raises TimeoutError, after a SIGKILL to the launcher's session, when it does not come.

    ``module``: or, where it ends in ``.py``, the path of a script. ``environ``: changes to this process's environment;
    None removes a variable.
    """
    words = ["--standalone", "--nproc-per-node", str(ranks), "--run-path", "--start-method", "fork"]
    return _run(TORCHRUN, *words, str(ROOT / "tests" / "zygote_rank.py"), module, *arguments, **environ)


def python(module: str, *arguments: str, **environ: str | None) -> Ran:
    """The same of one process that no launcher started."""
    return _run(module, *arguments, **environ)


def _run(module: str, *arguments: str, **changes: str | None) -> Ran:
    mine = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": str(ROOT), **changes}
    environ = {name: value for name, value in mine.items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("output", "errors")]
        for stream in streams:
            os.mkfifo(stream)
        launcher = zygote().start(arguments, environ, streams[0], module=module, errors=streams[1])
        said: dict[Path, bytes] = {}
        readers = [_Reader(stream, said) for stream in streams]
        code = launcher.wait(PATIENCE_S)
        if code is None:
            os.killpg(launcher.pid, 9)
            raise TimeoutError(f"{module} {' '.join(arguments)} did not end within {PATIENCE_S:g} s")
        for reader in readers:
            reader.join(PATIENCE_S)
    output, errors = (said[stream].decode(errors="replace") for stream in streams)
    return Ran(code, output, errors)


class _Reader(threading.Thread):
    """Puts into ``said`` all that comes through ``stream``."""

    def __init__(self, stream: Path, said: dict[Path, bytes]) -> None:
        super().__init__(daemon=True)
        self._stream, self._said = stream, said
        self.start()

    def run(self) -> None:
        self._said[self._stream] = self._stream.read_bytes()
