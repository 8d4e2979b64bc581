"""`sweep submit` and `slurm/sweep.sbatch` on a real Slurm: arrays that fail in part, are cancelled, requeued."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.sweep.command import run as run_sweep
from launch.sweep.ledger import Ledger
from launch.sweep.options import SweepCommand
from launch.sweep.slurm import Slurm
from launch.sweep.status import NOT_ALL, SweepStatus, status_of
from launch.sweep.submit import Jobs
from tests.launch.api.parsed import parsed
from tests.launch.sweep.fake_sweep import journal_lines, journal_of, results_of, write_grid
from tests.slurm.cluster import Cluster, wait_until
from tests.slurm.jobs import ROOT, environment

pytestmark = pytest.mark.slurm

_PYTHON = """#!/bin/bash
case " $* " in *" launch bench "*) shift 2; exec {python} -SE {fake} "$@" ;; esac
exec {python} "$@"
"""


class SweepJobs:
    """A sweep of fake points, each of which takes ``seconds``."""

    def __init__(self, cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.out = folder / "out"
        self.ledger = Ledger(self.out)
        self.cluster = cluster
        python = folder / "python"
        python.write_text(_PYTHON.format(python=sys.executable, fake=ROOT / "tests" / "slurm" / "fake_bench.py"))
        python.chmod(0o755)
        journal = {"FAKE_JOURNAL": str(journal_of(self.out)), "FAKE_POINT_SECONDS": str(seconds)}
        places = {"LOCKSTRIDE_PYTHON": str(python), "LOCKSTRIDE_LAUNCHER": "srun"}
        self.environment = {**cluster.environment, **environment(), **journal, **places}
        monkeypatch.chdir(folder)

    def submit(self, grid: Path, *more: str) -> None:
        command = parsed(SweepCommand, ["sweep", "submit", str(grid), "--out", str(self.out), *more])
        assert run_sweep(command, self.environment) == 0, self.said

    def status(self) -> SweepStatus:
        return status_of(self.ledger, Slurm(self.environment))

    def wait(self, what: str, condition: Callable[[SweepStatus], bool]) -> SweepStatus:
        try:
            wait_until(lambda: condition(self.status()), what, 300, every=0.2)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said}") from None
        return self.status()

    def starts(self) -> int:
        """Of points, so far."""
        return sum(line.startswith("start") for line in journal_lines(self.out))

    @property
    def jobs(self) -> list[str]:
        return [job.job for job in Jobs(self.ledger).recorded()]

    @property
    def said(self) -> str:
        logs = sorted(path for pattern in ("slurm/*/*.log", "*/*/stderr.log") for path in self.out.glob(pattern))
        return "\n".join(f"==> {path} <==\n{path.read_text()}" for path in logs)


@pytest.mark.long
def test_an_array_of_twelve_points_of_which_two_fail(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.wait_until_idle()
    sweep = SweepJobs(cluster, tmp_path, monkeypatch, seconds=0.0)
    grid = write_grid(tmp_path, range(3, 15), minutes=2)
    sweep.submit(grid, "--throttle", "6")
    found = sweep.wait("the end of all points", lambda status: status.exit_code != NOT_ALL)
    assert (found.count("done"), found.count("failed"), found.exit_code) == (10, 2, 1), sweep.said
    reasons = {point.label: point.detail for point in found.points if point.state == "failed"}
    assert reasons == {
        "batch13": "thirteen is too many (exit code 2)",
        "batch14": "no rate: the batch was not full",
    }
    assert [rows[0]["batch"] for rows in results_of(sweep.out).values()] == list(range(3, 13))
    assert max(Counter(journal_lines(sweep.out)).values()) == 1, "no point began or ended twice"
    (job,) = sweep.jobs
    wait_until(lambda: all(cluster.job(f"{job}_{task}").ended for task in range(12)), "the end of all tasks", 120)
    codes = [cluster.job(f"{job}_{task}").exit_code for task in range(12)]
    assert codes == ["0:0"] * 10 + ["1:0"] * 2
    sweep.submit(grid, "--resume")
    assert len(sweep.jobs) == 1, "nothing is left to hand in"


def test_resume_after_scancel_and_requeue_after_usr1(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One task is cancelled, one is told that its time is nearly over, one is left in peace.

    The one that is told has the array's own number as SLURM_JOB_ID: what it asks of Slurm must not reach the others.
    """
    cluster.wait_until_idle()
    sweep = SweepJobs(cluster, tmp_path, monkeypatch, seconds=5.0)
    grid = write_grid(tmp_path, [1, 2, 3], minutes=2)
    sweep.submit(grid)
    (job,) = sweep.jobs
    wait_until(lambda: sweep.starts() == 3, "the start of all points", 120)
    (told,) = [task for task in range(3) if cluster.job(f"{job}_{task}").number == job]
    cancelled, in_peace = [task for task in range(3) if task != told]
    cluster.run("scancel", "--batch", "--signal=USR1", f"{job}_{told}")
    cluster.run("scancel", f"{job}_{cancelled}")
    found = sweep.wait(
        "two points that are done", lambda status: status.count("done") == 2 and status.count("to come") == 1
    )
    assert [point.state for point in found.points].index("to come") == cancelled, sweep.said
    assert [cluster.job(f"{job}_{task}").restarts for task in (told, in_peace)] == [1, 0], sweep.said
    assert not sweep.ledger.failed()
    assert not sweep.ledger.working()
    sweep.submit(grid, "--resume")
    assert len(sweep.jobs) == 2
    found = sweep.wait("the last point", lambda status: status.exit_code != NOT_ALL)
    assert found.exit_code == 0, sweep.said
    ends = Counter(line for line in journal_lines(sweep.out) if line.startswith("end"))
    assert sorted(ends.values()) == [1, 1, 1], "nothing was measured to its end twice"
    assert sweep.starts() == 5, "nothing was begun again but what was told to end and what was cancelled"
    assert "double" not in " ".join(journal_lines(sweep.out))


@pytest.mark.long
def test_a_job_that_slurm_forgot_is_handed_in_again(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.wait_until_idle()
    sweep = SweepJobs(cluster, tmp_path, monkeypatch, seconds=0.0)
    grid = write_grid(tmp_path, [1, 2], minutes=2, cluster={"sbatch": ["--hold"]})
    sweep.submit(grid)
    (job,) = sweep.jobs
    assert sweep.status().count("queued") == 2
    record = Jobs(sweep.ledger)
    chunk = record.recorded()[0].chunk
    (sweep.out / "slurm" / "jobs.jsonl").write_text("")
    record.record("999999", chunk)  # an id that no controller knows
    cluster.run("scancel", job)
    wait_until(lambda: not cluster.run("squeue", "--noheader").strip(), "an empty queue", 120)
    free = write_grid(tmp_path, [1, 2], minutes=2)
    sweep.submit(free, "--resume")
    found = sweep.wait("the end", lambda status: status.exit_code != NOT_ALL)
    assert found.exit_code == 0, sweep.said


@pytest.mark.long
def test_sweep_sbatch_by_hand(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its own head says: no `sweep submit`, a point a task."""
    cluster.wait_until_idle()
    sweep = SweepJobs(cluster, tmp_path, monkeypatch, seconds=0.0)
    grid = write_grid(tmp_path, [1, 2, 13], minutes=2)
    command = ["sbatch", "--parsable", "--array=0-2%2", str(ROOT / "slurm/sweep.sbatch"), "--grid", str(grid)]
    command += ["--out", str(sweep.out)]
    job = cluster.run(*command, environment=sweep.environment, cwd=tmp_path).strip()
    ends = [cluster.wait_for_job(f"{job}_{task}") for task in range(3)]
    assert [end.exit_code for end in ends] == ["0:0", "0:0", "1:0"], sweep.said
    found = sweep.status()
    assert [point.state for point in found.points] == ["done", "done", "failed"], sweep.said
