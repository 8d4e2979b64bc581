"""Kills what a sweep runs under Slurm, with SIGKILL at random moments, submits it again, and compares.

Knows: the batch scripts that `sweep submit` hands in, run as Slurm would run them, with points that are no engines.
Does not know: a real Slurm (tests/slurm has one), how much of it is killed (kill_sweep.py).

A kill takes `sweep submit`, or a task: its batch script and all that it started, as when a node is lost. Slurm then has
the task as failed with its node, or starts it again, or has forgotten its whole array.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from launch.sweep.ledger import Ledger
from tests.launch.sweep.fake_slurm import FakeSlurm
from tests.launch.sweep.fake_sweep import journal_of, write_grid
from tests.launch.sweep.kill_sweep import POINT_SECONDS, Tally, Watch, unkilled

ROOT = Path(__file__).resolve().parents[3]
AT_ONCE = 2
TASK_SECONDS = 6.0  # times as long as a sweep takes that has nothing to do; a task takes about half of it
SUBMIT_SECONDS = 3.0

_PYTHON = """#!/bin/bash
case " $* " in *" launch bench "*) shift 2; exec {python} -SE {fake} "$@" ;; esac
exec {python} "$@"
"""
_SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do
  [[ $1 != --output=* ]] || output=${1#*=}
  shift
done
exec "$@" >>"${output//%t/0}" 2>&1
"""


@dataclass
class _Running:
    """A process, when it is to be killed (by time.monotonic), and the task that it is; None is `sweep submit`."""

    process: subprocess.Popen[bytes]
    end: float
    task: tuple[str, int] | None


class Cluster:
    """A Slurm that runs what `sweep submit` hands in: as many tasks at once as it is told to, one after the other."""

    def __init__(self, folder: Path, grid: Path, draw: random.Random, start_seconds: float) -> None:
        self.out, self._grid, self._draw, self._start_seconds = folder / "out", grid, draw, start_seconds
        self._slurm = FakeSlurm(folder)
        self._log = folder / "log"
        self._starts: dict[tuple[str, int], int] = {}
        fake = ROOT / "tests" / "slurm" / "fake_bench.py"
        self._slurm.add_program("lockstride-python", _PYTHON.format(python=sys.executable, fake=fake))
        self._slurm.add_program("srun", _SRUN)
        fake_point = {"FAKE_JOURNAL": str(journal_of(self.out)), "FAKE_POINT_SECONDS": str(POINT_SECONDS)}
        own = {"PYTHONPATH": str(ROOT), "LOCKSTRIDE_LOGS": str(folder / "slurm-logs")}
        self._environment = {**os.environ, **self._slurm.environ, **fake_point, **own}

    def pending(self) -> list[tuple[str, int]]:
        """Array and number of each task that has not been started, or is to start again."""
        jobs = self._slurm.jobs.items()
        return [(job, int(task)) for job, has in jobs for task, now in has["tasks"].items() if now == "PENDING"]

    def turn(self, tasks: int, deadly: float) -> int:
        """`sweep submit` where nothing is pending, else some tasks, until all of them have ended.

        Each is killed with the probability ``deadly``, should it live so long. Returns how many were.
        """
        pending = self.pending()
        chosen = self._draw.sample(pending, min(tasks, len(pending)))
        running = [self._start_task(task, deadly) for task in chosen] or [self._start_submit(deadly)]
        killed = 0
        while running:
            time.sleep(0.002)
            for each in running:
                if time.monotonic() >= each.end:
                    each.end = float("inf")
                    self._kill(each)
            ended = [each for each in running if each.process.poll() is not None]
            killed += sum(self._note(each) for each in ended)
            running = [each for each in running if each not in ended]
        return killed

    def _start_submit(self, deadly: float) -> _Running:
        words = ["-m", "launch", "sweep", "submit", str(self._grid), "--out", str(self.out), "--resume"]
        return _Running(self._spawn([sys.executable, *words]), self._moment(deadly, SUBMIT_SECONDS), None)

    def _start_task(self, task: tuple[str, int], deadly: float) -> _Running:
        job, number = task
        self._slurm.move(job, number, "RUNNING")
        start = self._starts.get(task, 0)
        self._starts[task] = start + 1
        variables = {
            "SLURM_JOB_ID": f"{job}0{number}",
            "SLURM_ARRAY_JOB_ID": job,
            "SLURM_ARRAY_TASK_ID": str(number),
            "SLURM_RESTART_COUNT": str(start),
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "localhost",
            "LOCKSTRIDE_PYTHON": str(self._slurm.bin / "lockstride-python"),
            "LOCKSTRIDE_LAUNCHER": "srun",
        }
        script = self.out / "slurm" / self._slurm.jobs[job]["name"] / "job.sbatch"
        return _Running(self._spawn(["bash", str(script)], **variables), self._moment(deadly, TASK_SECONDS), task)

    def _spawn(self, command: list[str], **variables: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env={**self._environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _moment(self, deadly: float, starts: float) -> float:
        kill = self._draw.random() < deadly
        return time.monotonic() + self._draw.uniform(0.0, starts * self._start_seconds) if kill else float("inf")

    def _kill(self, each: _Running) -> None:
        if each.process.poll() is None:
            if each.task is None:
                each.process.kill()  # what it asked of Slurm goes on
            else:
                os.killpg(each.process.pid, signal.SIGKILL)

    def _note(self, each: _Running) -> bool:
        """Slurm's view of how it ended; whether it was killed."""
        code = each.process.returncode
        if each.task is None:
            assert code in (0, -signal.SIGKILL), self._log.read_text()
        elif code == -signal.SIGKILL:
            job, number = each.task
            fate = self._draw.choice(["NODE_FAIL", "PENDING", "PENDING", "forgotten"])
            if fate == "forgotten" and self._nothing_else_runs(job, number):
                self._slurm.forget(job)
            else:
                self._slurm.move(job, number, "NODE_FAIL" if fate == "forgotten" else fate)
        else:
            self._slurm.move(*each.task, "FAILED" if code else "COMPLETED")
        return code == -signal.SIGKILL

    def _nothing_else_runs(self, job: str, number: int) -> bool:
        return all(now != "RUNNING" or int(task) == number for task, now in self._slurm.jobs[job]["tasks"].items())


def kill_anywhere(folder: Path, kills: int, seed: int, points: int = 20) -> Tally:
    """``kills`` kills over as many ledgers of ``points`` points as that takes, each submitted again to its end."""
    draw, tally = random.Random(seed), Tally()
    grid = write_grid(folder, [*range(101, 101 + points), 13], minutes=5)
    wanted, start = unkilled(folder, grid)
    while tally.kills < kills:
        tally.lives += 1
        (folder / f"cluster{tally.lives}").mkdir()
        _one_ledger(Cluster(folder / f"cluster{tally.lives}", grid, draw, start), wanted, kills, tally)
    return tally


def _one_ledger(cluster: Cluster, wanted: dict[str, str], kills: int, tally: Tally) -> None:
    ledger, watch = Ledger(cluster.out), Watch(cluster.out)
    while tally.kills < kills and len(ledger.done()) + len(ledger.failed()) <= len(wanted):
        tally.kills += cluster.turn(min(AT_ONCE, kills - tally.kills), 0.7)
        watch.look(tally)
    submitted = False
    while cluster.pending() or not submitted:  # in peace: what is pending, then what `sweep submit` finds left
        submitted = submitted or not cluster.pending()
        cluster.turn(AT_ONCE, 0.0)
    watch.end(tally, wanted)
