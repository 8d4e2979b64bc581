"""Sweeps killed at each change of their ledger, here and under Slurm, and resumed: none of their points is lost,
changed or repeated.

Processes are played in this one (kill_at.py): points, Slurm and its batch script, too. Real ones, killed at any time:
kill_sweep.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import pytest

from launch.sweep.ledger import Attempt, Ledger
from launch.sweep.options import SweepOptions
from launch.sweep.slurm import Slurm
from launch.sweep.submit import Jobs, submit
from launch.sweep.task import SOME_FAILED, task
from tests.launch.kill_at import kill_at, kill_everywhere
from tests.launch.sweep.fake_point import measure
from tests.launch.sweep.fake_sweep import as_text, grid_with, journal_of, results_of, run_fake
from tests.launch.sweep.kill_sweep import Tally, Watch

GRID = grid_with([1, 13], minutes=1)  # 13 fails
WANTED = {point.key for point in GRID.points if point.settings["batch"] != 13}


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where there is such a file system: a disk takes much longer for thousands of small files."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


class PlayedPoint:
    """A point's process, which has ended when it is there."""

    pid = 1 << 30  # none: signals find no process

    def __init__(self, command: list[str], *, stdout: BinaryIO, stderr: BinaryIO, **rest: object) -> None:
        folder, key, batch, journal, seconds = command[-5:]
        with io.TextIOWrapper(stdout) as out, io.TextIOWrapper(stderr) as errors:
            self.returncode = measure(folder, key, batch, journal, seconds, out=out, errors=errors)

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode


def sweep(out: Path) -> None:
    with mock.patch("launch.sweep.run.subprocess.Popen", PlayedPoint):
        assert run_fake(GRID, out, resume=True)[0] == 1, "one point fails"


Life = Callable[[Path, int | None, Callable[[], object]], str]


def killed_everywhere(folder: Path, life: Life) -> int:
    """Kill ``life`` at each of its places, with a ledger each time; returns how many there are.

    ``life`` resumes what was killed, after a call of its last argument, and returns where the kill came.
    """
    life(folder / "calm", None, lambda: None)
    wanted = {key: as_text(rows) for key, rows in results_of(folder / "calm").items()}
    assert wanted.keys() == WANTED

    def killed(place: int) -> str:
        out = folder / str(place)
        watch, tally = Watch(out), Tally()
        where = life(out, place, lambda: watch.look(tally))
        watch.end(tally, wanted)
        assert tally.clean, tally
        return where

    return kill_everywhere(killed)


# ---- here ----


def here(out: Path, place: int | None, between: Callable[[], object]) -> str:
    with kill_at(place, out) as disk:
        sweep(out)
    if disk.killed:
        between()
        with kill_at(None, out):
            sweep(out)
    assert not Ledger(out).working(), "attempts are left over"
    return disk.killed


def test_a_sweep_that_is_killed_at_any_change_loses_and_repeats_nothing(folder: Path) -> None:
    assert killed_everywhere(folder, here) > 20 * len(GRID.points)


# ---- under Slurm ----


class PlayedSlurm(Slurm):
    """A cluster in memory. ``tasks``: the state of each task of each array, by job and number."""

    def __init__(self) -> None:
        super().__init__({})
        self.scripts: dict[str, Path] = {}
        self.tasks: dict[str, dict[int, str]] = {}

    def points(self, job: str) -> list[str]:
        """The key of each task's point."""
        return self.scripts[job].with_name("points").read_text().splitlines()

    def max_array(self) -> int:
        return 1001

    def submit(self, script: Path) -> str:
        job = str(100 + len(self.scripts))
        live = {self.points(other)[number] for other in self.tasks for number in self.live_tasks(other, "")}
        self.scripts[job] = script
        assert not live & set(self.points(job)), "a point is handed in twice"
        self.tasks[job] = dict.fromkeys(range(len(self.points(job))), "PENDING")
        return job

    def live_tasks(self, job: str, name: str) -> dict[int, str]:
        return {number: state for number, state in self.tasks.get(job, {}).items() if state in ("PENDING", "RUNNING")}

    def queued(self) -> dict[str, str]:
        return {job: self.scripts[job].parent.name for job in self.tasks if self.live_tasks(job, "")}

    def pending(self) -> list[tuple[str, int]]:
        return [(job, number) for job, tasks in self.tasks.items() for number, now in tasks.items() if now == "PENDING"]


def play_task(ledger: Ledger, points: Path, job: str, number: int, start: int) -> str:
    """As slurm/sweep.sbatch; returns the task's state afterwards. The time limit ends the first start of task 0."""
    environ = {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": str(number), "SLURM_RESTART_COUNT": str(start)}
    begin = SweepOptions(out=ledger.out, points=points, index=number)
    while True:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = task(begin, environ)
        if code:
            return "FAILED" if code == SOME_FAILED else "COMPLETED"
        end = SweepOptions(out=ledger.out, action="end", attempt=(folder := Path(printed.getvalue().strip())))
        if (number, start) == (0, 0):
            task(replace(end, exit_code=143, asked="USR1"), environ)
            return "PENDING"
        planned = ledger.reopen(folder).point
        with (folder / "stdout.log").open("a") as out, (folder / "stderr.log").open("a") as errors:
            batch, journal = str(planned.settings["batch"]), str(journal_of(ledger.out))
            code = measure(str(folder), planned.key, batch, journal, "0", out=out, errors=errors)
        task(replace(end, exit_code=code, asked="none"), environ)


def under_slurm(fate: str, out: Path, place: int | None, between: Callable[[], object]) -> str:
    """Submit, run the tasks, submit again, until nothing is left. ``fate``: state of a killed task, or "forgotten"."""
    slurm, ledger, starts, where = PlayedSlurm(), Ledger(out), Counter[tuple[str, int]](), ""
    submits = True
    while True:
        arrays = len(slurm.scripts)
        with kill_at(place, out) as disk:
            if submits:
                submit(GRID, ledger, slurm, resume=True, **HOW)
            else:
                job, number = slurm.pending()[0]
                starts[job, number] += 1
                points = slurm.scripts[job].with_name("points")
                slurm.tasks[job][number] = play_task(ledger, points, job, number, starts[job, number] - 1)
        if disk.killed:
            between()
            where, place = disk.killed, None
            if not submits and fate == "forgotten":
                del slurm.tasks[job]
            elif not submits:
                slurm.tasks[job][number] = fate
        elif place is not None:
            place -= disk.places
        if submits and not disk.killed and len(slurm.scripts) == arrays and not slurm.pending():
            return where
        submits = (submits and bool(disk.killed)) or not slurm.pending()  # again, if it was killed


HOW: dict[str, Any] = {"retry_failed": False, "max_array": None, "throttle": None, "show": False, "say": lambda _: None}


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["PENDING", "forgotten"])
def test_what_is_killed_at_any_change_under_slurm_loses_and_repeats_nothing(fate: str, folder: Path) -> None:
    assert killed_everywhere(folder, partial(under_slurm, fate)) > 40 * len(GRID.points)


# ---- planted faults ----


def file_before_its_outcome(
    ledger: Ledger, attempt: Attempt, reason: str, code: int | None, given_up: bool = False
) -> Path:
    folder = (ledger.out / "failed" / attempt.folder.name) if reason else ledger.folder(attempt.point.key)
    attempt.folder.rename(folder)
    written = {"state": "failed" if reason else "done", "began": 0, "seconds": 0, "host": "", "reason": reason}
    (folder / "outcome.json").write_text(json.dumps(written))
    return folder


def keep_left_overs(ledger: Ledger, key: str, job: str | None) -> None:
    pass


def adopt_none(jobs: Jobs, slurm: Slurm) -> list[str]:
    return []


def record_after_a_torn_line(jobs: Jobs, job: str, chunk: str) -> None:
    with (jobs.folder / "jobs.jsonl").open("a") as stream:
        stream.write(json.dumps({"job": job, "chunk": chunk, "at": 0}) + "\n")


@pytest.mark.parametrize(
    ("owner", "name", "fault", "life", "said"),
    [
        (Ledger, "file", file_before_its_outcome, here, "lost=\\['"),
        (Ledger, "clear_work", keep_left_overs, here, "left over"),
        (Jobs, "adopt", adopt_none, partial(under_slurm, "PENDING"), "handed in twice"),
        (Jobs, "record", record_after_a_torn_line, partial(under_slurm, "PENDING"), "handed in twice"),
    ],
)
def test_a_planted_fault_is_found(owner: type, name: str, fault: object, life: Life, said: str, folder: Path) -> None:
    with mock.patch.object(owner, name, fault), pytest.raises(AssertionError, match=said):
        killed_everywhere(folder, life)
