"""`sweep run`: what is run, what is not run again, how points fail, and kills at any moment."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import NoReturn, TextIO

import pytest

from launch.sweep.command import run as run_sweep
from launch.sweep.ledger import Ledger
from launch.sweep.options import SweepCommand
from launch.sweep.outcome import shown_exit, why_failed
from launch.sweep.point import Point, SweepError, local_command
from launch.sweep.run import run_here
from tests.launch.api.parsed import parsed
from tests.launch.sweep import kill_sweep, kill_sweep_jobs
from tests.launch.sweep.fake_sweep import command_for, grid_with, journal_lines, results_of, run_fake, write_grid

ROOT = Path(__file__).resolve().parents[3]


def starts(out: Path) -> list[str]:
    return [line for line in journal_lines(out) if line.startswith("start ")]


def test_every_point_is_run_once_and_kept(tmp_path: Path) -> None:
    out, grid = tmp_path / "out", grid_with([1, 2, 3])
    code, said = run_fake(grid, out)
    assert code == 0
    assert [rows[0]["batch"] for rows in results_of(out).values()] == [1, 2, 3]
    assert starts(out) == [f"start {point.key}" for point in grid.points]
    assert said[1].startswith("[1/3] batch1: done in ")
    assert said[1].endswith("; batch 1 10.0 tok/s, TPOT 100.000 ms")
    folder = Ledger(out).folder(grid.points[0].key)
    assert (folder / "stdout.log").read_text() == "a line on stdout\n"


def test_resume_runs_no_finished_point_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_fake(grid_with([1, 2]), out)[0] == 0
    before = {path: path.stat().st_mtime_ns for path in out.glob("points/**/*")}
    with pytest.raises(SweepError, match="type --resume"):
        run_fake(grid_with([1, 2, 3]), out)
    assert run_fake(grid_with([1, 2, 3]), out, resume=True)[0] == 0
    assert len(starts(out)) == 3
    assert {path: path.stat().st_mtime_ns for path in before} == before
    code, said = run_fake(grid_with([1, 2, 3]), out, resume=True)
    assert (code, said) == (0, ["3 of 3 points are done or have failed already"])


def test_points_that_fail_keep_logs_and_reason_and_do_not_end_the_sweep(tmp_path: Path) -> None:
    out, grid = tmp_path / "out", grid_with([13, 1, 14, 2])
    code, said = run_fake(grid, out)
    assert code == 1
    assert [rows[0]["batch"] for rows in results_of(out).values()] == [1, 2]
    ledger = Ledger(out)
    reasons = {}
    for point in (grid.points[0], grid.points[2]):
        (folder,) = ledger.failed()[point.key]
        outcome = ledger.outcome(folder)
        assert outcome is not None
        reasons[point.settings["batch"]] = outcome.reason
        assert any(str(folder) in line and outcome.reason in line for line in said)
    assert reasons == {13: "thirteen is too many (exit code 2)", 14: "no rate: the batch was not full"}
    (folder,) = ledger.failed()[grid.points[0].key]
    assert "thirteen is too many" in (folder / "stderr.log").read_text()


def test_failed_points_are_tried_again_only_when_asked(tmp_path: Path) -> None:
    out, grid = tmp_path / "out", grid_with([13, 1])
    run_fake(grid, out)
    assert run_fake(grid, out, resume=True)[0] == 1
    assert len(starts(out)) == 2
    assert run_fake(grid, out, resume=True, retry_failed=True)[0] == 1
    assert len(starts(out)) == 3
    assert len(Ledger(out).failed()[grid.points[0].key]) == 2


def test_a_failed_point_of_another_grid_does_not_count(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_fake(grid_with([13]), out)[0] == 1
    assert run_fake(grid_with([1]), out, resume=True)[0] == 0


def test_a_point_that_takes_too_long_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, grid = tmp_path / "out", grid_with([15, 1], minutes=1)
    clock, began = time.monotonic, time.monotonic()
    latest = began

    def fast() -> float:
        """Until the first point has failed; then it stands still, for the other one has all the time it needs."""
        nonlocal latest
        if not Ledger(out).failed():
            latest = began + 300 * (clock() - began)
        return latest

    monkeypatch.setattr("launch.sweep.run.time.monotonic", fast)
    assert run_fake(grid, out)[0] == 1
    (folder,) = Ledger(out).failed()[grid.points[0].key]
    outcome = Ledger(out).outcome(folder)
    assert outcome is not None
    assert outcome.reason == "it took longer than minutes: 1"
    assert results_of(out).keys() == {grid.points[1].key}


def test_a_ledger_that_cannot_be_written_ends_the_command_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    grid, out = write_grid(tmp_path, [1]), tmp_path / "out"
    assert run_sweep(parsed(SweepCommand, ["sweep", "run", str(grid), "--out", str(out)]), {}) == 2
    assert capsys.readouterr().err == f"lockstride sweep run: error: {out}/plan.json: No space left on device\n"


def run_command(grid: Path, out: Path, monkeypatch: pytest.MonkeyPatch, stdout: TextIO, looked: list[int]) -> int:
    """The command line with fake points, and ``stdout``; appends how large that was before each point."""
    quick = command_for(out, 0.0)

    def command_of(point: Point, folder: Path) -> list[str]:
        looked.append(os.fstat(stdout.fileno()).st_size)
        return list(quick(point, folder))

    monkeypatch.setattr("launch.sweep.command.run_here", partial(run_here, command_of=command_of))
    monkeypatch.setattr(sys, "stdout", stdout)
    return run_sweep(parsed(SweepCommand, ["sweep", "run", str(grid), "--out", str(out)]), {})


def test_a_sweep_goes_on_when_the_reader_of_its_progress_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        assert run_command(write_grid(tmp_path, [1, 13, 2]), tmp_path / "out", monkeypatch, stdout, []) == 1
    assert [rows[0]["batch"] for rows in results_of(tmp_path / "out").values()] == [1, 2]


def test_progress_reaches_a_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    with (tmp_path / "log").open("w") as stdout:
        assert run_command(write_grid(tmp_path, [1, 2]), tmp_path / "out", monkeypatch, stdout, looked) == 0
    first, second = looked
    assert first == len("[1/2] batch1 ...\n")
    assert second > first + len("[1/2] batch1: done in ")


def test_it_is_not_started_by_torchrun(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="start it without torchrun"):
        run_here(grid_with([1]), Ledger(tmp_path), {"WORLD_SIZE": "2"}, resume=False, retry_failed=False)


def test_several_ranks_start_under_torchrun(tmp_path: Path) -> None:
    alone = local_command(Point("latency", {"model": "m"}), tmp_path)
    assert alone[:4] == [sys.executable, "-m", "launch", "bench"]
    two = local_command(Point("latency", {"model": "m", "tp": 2}), tmp_path)
    assert two[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert two[two.index("launch") :][:5] == ["launch", "bench", "latency", "--tensor-parallel-size", "2"]
    assert two[-2:] == ["--result-dir", str(tmp_path / "results")]


# ---- why a point failed ----


@pytest.mark.parametrize(
    ("log", "code", "reason"),
    [
        ("x\nlockstride bench: error: no such model\n", 2, "no such model (exit code 2)"),
        ("lockstride: 2026-01-01T00:00:00 error: no address\n", 2, "no address (exit code 2)"),
        (
            "Traceback (most recent call last):\n  File x\nruntime.execute.cache.sizing.CacheMemoryError: too small\n",
            1,
            "runtime.execute.cache.sizing.CacheMemoryError: too small (exit code 1)",
        ),
        (
            "[rank0]:ValueError: broken\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n",
            1,
            "ValueError: broken (exit code 1)",
        ),
        ("Killed\n", -9, "Killed (SIGKILL)"),
        ("", 137, "it said nothing (SIGKILL)"),
        ("", 0, "it ended well, but left no result"),
    ],
)
def test_the_most_telling_line_is_the_reason(tmp_path: Path, log: str, code: int, reason: str) -> None:
    (tmp_path / "stderr.log").write_text(log)
    assert why_failed(tmp_path, code) == reason


def test_what_a_rank_said_is_found(tmp_path: Path) -> None:
    (tmp_path / "stderr.log").write_text("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n")
    folder = tmp_path / "ranks" / "run" / "attempt_0" / "1"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text("lockstride bench: error: rank 1 has no GPU\n")
    assert why_failed(tmp_path, 1) == "rank 1 has no GPU (exit code 1)"


@pytest.mark.parametrize(
    ("code", "shown"),
    [(2, "exit code 2"), (-15, "SIGTERM"), (143, "SIGTERM"), (250, "exit code 250"), (128, "exit code 128")],
)
def test_exit_codes_are_shown_as_signals_where_they_are(code: int, shown: str) -> None:
    assert shown_exit(code) == shown


# ---- as a process of its own ----


def start(grid: Path, out: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.launch.sweep.fake_sweep", str(grid), "--out", str(out), "--resume"],
        cwd=ROOT,
        env={**os.environ, "FAKE_POINT_SECONDS": str(seconds)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_starts(out: Path, count: int, process: subprocess.Popen[str]) -> None:
    while len(starts(out)) < count:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_sweep_gives_its_point_back(tmp_path: Path, number: signal.Signals) -> None:
    grid, out = write_grid(tmp_path, [1, 15, 2]), tmp_path / "out"
    process = start(grid, out, 0.0)
    wait_for_starts(out, 2, process)
    process.send_signal(number)
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 128 + number
    assert "interrupted: type the same with --resume to go on" in said
    ledger = Ledger(out)
    assert len(ledger.done()) == 1
    assert ledger.failed() == {}
    assert ledger.working() == {}, "as if it had not begun"


@pytest.mark.multiprocess
def test_what_a_killed_sweep_was_running_ends_with_it(tmp_path: Path) -> None:
    grid, out = write_grid(tmp_path, [15]), tmp_path / "out"
    process = start(grid, out, 0.0)
    wait_for_starts(out, 1, process)
    (key,) = (planned.key for planned in Ledger(out).plan().points)
    process.kill()
    process.communicate(timeout=300)
    until = time.monotonic() + 300
    while Ledger(out).is_claimed(key):  # the point itself would take a minute
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not any(line.startswith("end") for line in journal_lines(out))


@pytest.mark.multiprocess
def test_two_sweeps_over_one_ledger_share_the_points(tmp_path: Path) -> None:
    grid, out = write_grid(tmp_path, range(1, 13)), tmp_path / "out"
    both = [start(grid, out, 0.05) for _ in range(2)]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert len(results_of(out)) == 12
    assert len(starts(out)) == 12, "no point was run twice"
    assert not any(line.startswith("double") for line in journal_lines(out))


# ---- kills of real processes, at any time; each change: test_kill_at.py; hundreds: `make test-all PART=kills` ----


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_kill_at_any_moment_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    tally = kill_sweep.kill_anywhere(tmp_path, kills=1, seed=20261120, points=4)
    assert tally.kills == 1
    assert tally.clean, tally


@pytest.mark.long  # at each change, within a process: test_kill_at.py
@pytest.mark.multiprocess
def test_a_kill_of_a_submission_or_a_task_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    tally = kill_sweep_jobs.kill_anywhere(tmp_path, kills=1, seed=20261121, points=2)
    assert tally.kills == 1
    assert tally.clean, tally
    assert list(tmp_path.glob("cluster*/slurm-logs/*")), "and not where the test was called"
