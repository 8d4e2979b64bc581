"""sbatch, scontrol and squeue as small programs over one JSON file, for tests of what `sweep` asks of Slurm.

It runs nothing: tests move jobs from state to state, or run their scripts (kill_sweep_jobs.py).
tests/slurm has the real one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.sweep.slurm import Slurm

_PROGRAM = """#!{python} -SE
import fcntl, json, os, re, sys
from pathlib import Path
file = Path({file!r})
lock = open(f"{{file}}.lock", "a")
fcntl.flock(lock, fcntl.LOCK_EX)
state = json.loads(file.read_text())
what, arguments = Path(sys.argv[0]).name, sys.argv[1:]
if state["down"]:
    sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
if what == "sbatch":
    script = Path(arguments[-1]).read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.M))
    low, high = re.match(r"(\\d+)-(\\d+)", options["array"]).groups()
    state["last"] += 1
    tasks = {{str(task): "PENDING" for task in range(int(low), int(high) + 1)}}
    job = {{"name": options["job-name"], "tasks": tasks, "options": options, "script": script}}
    job["environment"] = sorted(key for key in os.environ if key.startswith("SBATCH_"))
    state["jobs"][str(state["last"])] = job
    file.write_text(json.dumps(state))
    if state["lose_answer"]:
        os.kill(os.getppid(), 9)
    print(f"{{state['last']}};cluster" if state["federated"] else state["last"])
elif what == "scontrol" and arguments == ["show", "config"]:
    print("MaxArraySize            = %d" % state["max_array"])
elif what == "scontrol":
    job = state["jobs"].get(arguments[-1])
    if job is None:
        sys.exit("slurm_load_jobs error: Invalid job id specified")
    for task, now in job["tasks"].items():
        ids = f"JobId=9{{task}} ArrayJobId={{arguments[-1]}} ArrayTaskId={{task}}"
        print(f"{{ids}} JobName={{job['name']}} JobState={{now}} Comment=")
elif what == "squeue":
    for number, job in state["jobs"].items():
        if any(now in ("PENDING", "RUNNING") for now in job["tasks"].values()):
            print(f"{{number}} {{job['name']}}")
"""


class FakeSlurm:
    """A cluster in ``folder``; ``slurm`` speaks to it."""

    def __init__(self, folder: Path, **sbatch_environment: str) -> None:
        self._file = folder / "state.json"
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        for name in ("sbatch", "scontrol", "squeue"):
            self.add_program(name, _PROGRAM.format(python=sys.executable, file=str(self._file)))
        self._write(
            {"last": 100, "jobs": {}, "max_array": 1001, "down": False, "lose_answer": False, "federated": False}
        )
        self.environ = {"PATH": f"{self.bin}:/usr/bin:/bin", **sbatch_environment}
        self.slurm = Slurm(self.environ)

    def add_program(self, name: str, text: str) -> None:
        program = self.bin / name
        program.write_text(text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    @property
    def jobs(self) -> dict[str, Any]:
        with self._changing() as content:
            return dict(content["jobs"])

    def set(self, **facts: Any) -> None:
        with self._changing() as content:
            content.update(facts)

    def move(self, job: str, task: int, state: str) -> None:
        """A task enters a state of Slurm's."""
        with self._changing() as content:
            content["jobs"][job]["tasks"][str(task)] = state

    def forget(self, job: str) -> None:
        with self._changing() as content:
            del content["jobs"][job]

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """What the programs read, written back at the end; they wait meanwhile."""
        with Path(f"{self._file}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content: dict[str, Any] = json.loads(self._file.read_text())
            yield content
            self._write(content)

    def _write(self, content: dict[str, Any]) -> None:
        self._file.write_text(json.dumps(content))
