"""The ledger: renames, locks, and a random life of it against a model that keeps everything in dicts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

import launch.sweep.ledger as ledger_module
from launch.sweep.grid import grid_of
from launch.sweep.ledger import Attempt, Ledger
from launch.sweep.point import Point, SweepError
from tests.launch.sweep.fake_sweep import grid_with

ROOT = Path(__file__).resolve().parents[3]
POINTS = [Point("latency", {"model": "m", "batch": batch}) for batch in range(1, 5)]


def test_a_folder_that_cannot_be_a_ledger_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    grid = grid_of({"options": {"model": "m"}}, "g")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SweepError, match=f"{out} cannot hold a sweep: "):
            Ledger(out).begin_sweep(grid, resume=False)


def test_an_attempt_becomes_a_point_that_is_done(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    attempt = ledger.begin(POINTS[0])
    (attempt.folder / "results" / "x").write_text("7")
    assert ledger.working() == {POINTS[0].key: attempt.folder}
    assert ledger.done() == set()
    folder = ledger.file(attempt, "", 0)
    assert folder == tmp_path / "points" / POINTS[0].key == ledger.folder(POINTS[0].key)
    assert (folder / "results" / "x").read_text() == "7"
    assert ledger.done() == {POINTS[0].key}
    assert ledger.working() == {}
    outcome = ledger.outcome(folder)
    assert outcome is not None
    assert (outcome.state, outcome.reason, outcome.exit_code) == ("done", "", 0)


@pytest.mark.parametrize("reason", ["", "it broke"])
def test_a_disk_that_is_full_when_a_point_ends_does_not_lose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    ledger = Ledger(tmp_path)
    attempt = ledger.begin(POINTS[0])
    room = (attempt.folder / "outcome.json").stat()

    def full(path: Path, *given: object, **more: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "mkdir", full)
    monkeypatch.setattr(ledger_module, "write_file", full)
    folder = ledger.file(attempt, reason, 0)
    outcome, written = ledger.outcome(folder), (folder / "outcome.json").stat()
    assert outcome is not None
    assert outcome.reason == reason
    assert (written.st_ino, room.st_size) == (room.st_ino, 4096), "in blocks that it had before"
    assert written.st_size < room.st_size


def test_a_disk_that_is_full_before_a_point_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path)

    def full(descriptor: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/plan.json'"):
        ledger.begin_sweep(grid_with([1]), resume=False)
    with pytest.raises(OSError, match="No space left on device"):
        ledger.begin(POINTS[0])
    assert [path for path in tmp_path.glob("**/*") if path.is_file()] == []


def test_the_first_to_be_done_counts(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    first, second = ledger.begin(POINTS[0]), ledger.begin(POINTS[0])
    for attempt, text in ((first, "first"), (second, "second")):
        (attempt.folder / "results" / "x").write_text(text)
        ledger.file(attempt, "", 0)
    assert (ledger.folder(POINTS[0].key) / "results" / "x").read_text() == "first"
    assert ledger.working() == {}


def test_failures_are_kept_until_the_point_is_done(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for reason in ("no memory", "no luck"):
        attempt = ledger.begin(POINTS[0])
        (attempt.folder / "stderr.log").write_text(reason)
        ledger.file(attempt, reason, 1)
    outcomes = [ledger.outcome(folder) for folder in ledger.failed()[POINTS[0].key]]
    assert [outcome.reason for outcome in outcomes if outcome] == ["no memory", "no luck"]
    ledger.file(ledger.begin(POINTS[0]), "", 0)
    assert ledger.failed() == {}
    assert sorted(path.read_text() for path in tmp_path.glob("failed/*/stderr.log")) == ["no luck", "no memory"]


def test_interrupted_attempts_are_counted_until_the_point_is_finished(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert [ledger.interrupt(ledger.begin(POINTS[0], "7_1", start)) for start in range(2)] == [1, 2]
    ledger.file(ledger.begin(POINTS[0], "7_1", 2), "too slow", 143)
    assert ledger.interrupted(POINTS[0].key) == []


def test_only_our_own_left_overs_are_cleared(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ours, theirs = ledger.begin(POINTS[0]), ledger.begin(POINTS[0], "7_1")
    other = ledger.begin(POINTS[1])
    ledger.clear_work(POINTS[0].key, None)
    assert [attempt.folder.exists() for attempt in (ours, theirs, other)] == [False, True, True]
    ledger.clear_work(POINTS[0].key, "7_1")
    assert not theirs.folder.exists()


def test_what_was_half_thrown_away_when_a_kill_came_is_cleared(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    half = ledger.begin(POINTS[0])
    (half.folder / "began.json").unlink()
    ledger.clear_work(POINTS[0].key, "12_3")
    assert not ledger.working()


def test_a_sweep_does_not_begin_twice_by_accident(tmp_path: Path) -> None:
    ledger, grid = Ledger(tmp_path / "out"), grid_with([1, 2])
    with pytest.raises(SweepError, match="holds no sweep"):
        ledger.plan()
    ledger.begin_sweep(grid, resume=False)
    ledger.begin_sweep(grid, resume=False)  # nothing was run yet
    ledger.file(ledger.begin(grid.points[0]), "", 0)
    with pytest.raises(SweepError, match=r"holds 1 finished and 0 failed points already: type --resume"):
        ledger.begin_sweep(grid, resume=False)
    ledger.begin_sweep(grid_with([1, 2, 3]), resume=True)
    assert [planned.settings["batch"] for planned in ledger.plan().points] == [1, 2, 3]


def test_a_claim_is_held_by_one_process_and_by_what_it_started(tmp_path: Path) -> None:
    ledger, key = Ledger(tmp_path), POINTS[0].key
    with ledger.claim(key) as lock:
        assert lock is not None
        assert ledger.is_claimed(key)
        with ledger.claim(key) as second:
            assert second is None
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    assert ledger.is_claimed(key), "the child goes on"
    child.communicate(b"\n", timeout=300)
    assert not ledger.is_claimed(key)
    assert not ledger.is_claimed(POINTS[1].key)


def test_a_claim_of_another_process_is_seen(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from launch.sweep.ledger import Ledger\n"
        "with Ledger(Path(sys.argv[1])).claim(sys.argv[2]): print('held', flush=True); input()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), POINTS[0].key]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert Ledger(tmp_path).is_claimed(POINTS[0].key)
        holder.kill()
        holder.wait()
    assert not Ledger(tmp_path).is_claimed(POINTS[0].key)


class LedgerLife(RuleBasedStateMachine):
    """Attempts begin, end, are interrupted, are lost with their sweep, in any order and at the same time."""

    attempts = Bundle("attempts")

    def __init__(self) -> None:
        super().__init__()
        self._folder = TemporaryDirectory()
        self.ledger = Ledger(Path(self._folder.name))
        self.done: dict[str, str] = {}  # key -> content of its result
        self.failed: dict[str, int] = {}
        self.working: dict[Path, str] = {}
        self.number = 0

    def teardown(self) -> None:
        self._folder.cleanup()

    @rule(target=attempts, point=st.sampled_from(POINTS), job=st.sampled_from([None, "1_0", "2_0"]))
    def begin(self, point: Point, job: str | None) -> Attempt:
        attempt = self.ledger.begin(point, job)
        self.number += 1
        (attempt.folder / "results" / "x").write_text(str(self.number))
        self.working[attempt.folder] = str(self.number)
        return attempt

    @rule(attempt=consumes(attempts), reason=st.sampled_from(["", "", "broken"]))
    def end(self, attempt: Attempt, reason: str) -> None:
        if attempt.folder not in self.working:
            with pytest.raises(SweepError, match="no attempt under way"):
                self.ledger.reopen(attempt.folder)
            return
        content, key = self.working.pop(attempt.folder), attempt.point.key
        self.ledger.file(self.ledger.reopen(attempt.folder), reason, 0)
        if reason:
            self.failed[key] = self.failed.get(key, 0) + 1
        else:
            self.done.setdefault(key, content)

    @rule(attempt=consumes(attempts))
    def abandon(self, attempt: Attempt) -> None:
        self.ledger.abandon(attempt)
        self.working.pop(attempt.folder, None)

    @rule(attempt=consumes(attempts))
    def interrupt(self, attempt: Attempt) -> None:
        if self.working.pop(attempt.folder, None) is not None:
            self.ledger.interrupt(attempt)

    @rule(target=attempts, attempt=consumes(attempts))
    def kill(self, attempt: Attempt) -> object:
        """Whoever ran it is gone; the next sweep clears it away, here or under the same job."""
        key, job = attempt.point.key, attempt.began.job
        self.ledger.clear_work(key, job)
        for folder in [f for f in self.working if f.name.startswith(key)]:
            if not folder.exists():
                del self.working[folder]
        assert attempt.folder not in self.working
        return multiple()

    @invariant()
    def the_disk_agrees(self) -> None:
        assert self.ledger.done() == self.done.keys()
        for key, content in self.done.items():
            assert (self.ledger.folder(key) / "results" / "x").read_text() == content
        failed = {key: len(folders) for key, folders in self.ledger.failed().items()}
        assert failed == {key: count for key, count in self.failed.items() if key not in self.done}
        assert set(self.ledger.working().values()) <= self.working.keys()
        assert {folder.name.partition("-")[0] for folder in self.working} == self.ledger.working().keys()


TestLedgerLife = LedgerLife.TestCase
TestLedgerLife.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
