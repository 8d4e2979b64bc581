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
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.faults.zygote import Zygote

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


def torchrun(ranks: int, module: str, *arguments: str) -> Ran:
    """Waits for its end. Raises TimeoutError, after a SIGKILL to the launcher's session, when it does not come."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "said")
        os.mkfifo(output)
        words = ["--standalone", "--nproc-per-node", str(ranks), "--run-path", "--start-method", "fork"]
        words += [str(ROOT / "tests" / "zygote_rank.py"), module, *arguments]
        launcher = _zygote().start(words, environ, output)
        said: list[bytes] = []
        reader = threading.Thread(target=lambda: said.append(output.read_bytes()), daemon=True)
        reader.start()
        code = launcher.wait(PATIENCE_S)
        if code is None:
            os.killpg(launcher.pid, 9)
            raise TimeoutError(f"{module} on {ranks} ranks did not end within {PATIENCE_S:g} s")
        reader.join(PATIENCE_S)
    return Ran(code, b"".join(said).decode(errors="replace"))
