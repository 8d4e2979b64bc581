"""What Slurm knows of a sweep's arrays, through its client commands.

Knows: sbatch, scontrol, squeue, what they print, and how an unknown job sounds. Does not know: points or ledgers.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.sweep.point import SweepError

_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
# What sbatch takes from the environment rather than from a script, though the script says it.
_SET_BY_SCRIPT = (
    "ARRAY_INX",
    "CPUS_PER_TASK",
    "EXCLUSIVE",
    "GPUS",
    "GPUS_PER_NODE",
    "JOB_NAME",
    "NODES",
    "NO_REQUEUE",
    "OPEN_MODE",
    "OUTPUT",
    "REQUEUE",
    "SIGNAL",
    "TIMELIMIT",
)
_SECONDS = 60.0  # for a busy controller to answer
_FIELD = re.compile(r"(\w+)=(\S*)")


class Slurm:
    """The cluster that this machine's client commands speak to."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        hidden = {f"SBATCH_{name}" for name in _SET_BY_SCRIPT}
        self._environ = {key: value for key, value in environ.items() if key not in hidden}
        self._environ["SLURM_BITSTR_LEN"] = "0"  # task lists in full

    def max_array(self) -> int:
        """Tasks that one array may have. Raises SweepError where Slurm does not answer."""
        found = re.search(r"^MaxArraySize\s*=\s*(\d+)", self._run("scontrol", "show", "config"), re.MULTILINE)
        if found is None:
            raise SweepError("scontrol show config does not say MaxArraySize: type --max-array N")
        return max(1, int(found[1]))

    def submit(self, script: Path) -> str:
        """Hand in a script from the current folder; returns the job's id. Raises SweepError."""
        return self._run("sbatch", "--parsable", str(script)).strip().partition(";")[0]

    def live_tasks(self, job: str, name: str) -> dict[int, str]:
        """Task number -> state, of the array's tasks that have not ended. Empty too for a job that Slurm has forgotten,
        or whose id it gave to a job of another name. Raises SweepError where Slurm does not answer."""
        try:
            printed = self._run("scontrol", "-o", "show", "job", job)
        except SweepError as error:
            if "Invalid job id" in str(error):
                return {}
            raise
        tasks: dict[int, str] = {}
        for line in printed.splitlines():
            fields = dict(_FIELD.findall(line))
            state = fields.get("JobState", "")
            if fields.get("JobName") == name and state not in _ENDED:
                for number in numbers_in(fields.get("ArrayTaskId", "0")):
                    tasks[number] = state
        return tasks

    def queued(self) -> dict[str, str]:
        """Array id -> job name, of everything this user has in the queue. Raises SweepError."""
        lines = self._run("squeue", "--me", "--noheader", "--format=%F %j").splitlines()
        return {job: name for job, _, name in (line.strip().partition(" ") for line in lines) if job}

    def _run(self, *command: str) -> str:
        try:
            ended = subprocess.run(command, env=self._environ, capture_output=True, text=True, timeout=_SECONDS)
        except FileNotFoundError:
            raise SweepError(f"there is no {command[0]} here: type this on a machine that submits to Slurm") from None
        except subprocess.TimeoutExpired:
            raise SweepError(f"{command[0]} did not answer within {_SECONDS:g} s: is slurmctld up?") from None
        if ended.returncode:
            raise SweepError(f"{' '.join(command[:2])} failed: {' '.join(ended.stderr.split()) or ended.returncode}")
        return ended.stdout


def numbers_in(expression: str) -> Sequence[int]:
    """``0,3-5%2`` to 0, 3, 4, 5; ``0-6:2`` to 0, 2, 4, 6: the task numbers of an array's expression."""
    found: list[int] = []
    for part in expression.partition("%")[0].split(","):
        span, _, step = part.partition(":")
        low, _, high = span.partition("-")
        found += range(int(low), int(high or low) + 1, int(step or 1))
    return found
