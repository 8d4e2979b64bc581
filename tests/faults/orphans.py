"""What becomes of ranks whose launcher is killed without a warning: torchrun's agent, or the daemon behind srun.

Knows: how both start ranks, and how to wait for the ranks' end. Does not know: faults in ranks (cases.py).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from tests.faults.cases import WORLD
from tests.faults.job import Launched, free_port, job
from tests.faults.rank import PASS_BY
from tests.faults.zygote import Zygote

_DAEMON = """
import os, subprocess, sys
def rank(n):
    place = {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}
    return subprocess.Popen([sys.executable, "-m", "tests.faults.rank", *sys.argv[2:]], env=os.environ | place)
for process in [rank(n) for n in range(int(sys.argv[1]))]:
    process.wait()
"""


def seconds_to_end(
    folder: Path, launcher: str, phase: str, patience: float, zygote: Zygote | None = None
) -> float | None:
    """From SIGKILL of ``launcher`` ("torchrun", forked from ``zygote`` where given, or "daemon") in ``phase`` to the
    end of all ranks.

    None when some live on after ``patience`` seconds.
    """
    with job(folder, f"{PASS_BY}:{phase}:1") as made:
        started: Launched
        if launcher == "torchrun":
            started = made.torchrun(zygote)
        else:  # children with Slurm's variables, and nothing else between them and the daemon
            step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(WORLD), "SLURM_NODEID": "0"}
            step |= {"SLURM_STEP_NUM_NODES": "1", "MASTER_PORT": str(free_port())}
            started = made.start([sys.executable, "-c", _DAEMON, str(WORLD), *made.program()], **step)
        made.wait_for_fault(started)
        if len(made.processes()) != 1 + WORLD:
            raise AssertionError(f"{made.processes()} are not a launcher and {WORLD} ranks:\n{made.said[-3000:]}")
        os.kill(started.pid, signal.SIGKILL)
        killed = time.monotonic()
        while made.processes():
            if time.monotonic() > killed + patience:
                return None
            time.sleep(0.05)
        return time.monotonic() - killed
