"""A run that leaves something behind fails, and says what; what others have meanwhile is not looked at."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import leftovers
from tests.leftovers import RUN, SHARED, Leftovers

ROOT = Path(__file__).resolve().parents[1]
LEAVING = """
import os, subprocess, tempfile

def test_that_leaves_a_process():
    subprocess.Popen(["sleep", "600"])

def test_that_leaves_a_folder():
    tempfile.mkdtemp(prefix="forgotten-")

def test_that_leaves_nothing(tmp_path):
    subprocess.run(["true"])
    tempfile.TemporaryDirectory().cleanup()
    (tmp_path / "kept").touch()
"""


def run_of(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_leaving.py").write_text(LEAVING)
    (folder / "conftest.py").write_text(
        "from tests import leftovers\nfrom tests.leftovers import pytest_configure\nleftovers.PATIENCE_S = 0.2\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.long), "2"])
def test_a_run_that_leaves_something_behind_fails_and_says_what(workers: str, tmp_path: Path) -> None:
    ran = run_of(tmp_path, "-n", workers)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "3 passed" in ran.stdout
    left = [line for line in ran.stdout.splitlines() if "LEFT BEHIND" in line]
    assert len(left) == 2, left
    assert "sleep 600" in left[0]
    assert "forgotten-" in left[1]
    assert not Path(left[1].partition(": ")[2]).exists(), "it is cleared away all the same"
    assert run_of(tmp_path, "-n", "0", "-k", "nothing").returncode == 0


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Leftovers]:
    """Another one than that of this test."""
    monkeypatch.setattr(leftovers, "PATIENCE_S", 0.0)
    made = Leftovers()
    yield made
    made.pytest_unconfigure()


def test_a_process_of_another_run_is_not_looked_at(run: Leftovers) -> None:
    theirs = {**os.environ, RUN: f"{os.environ[RUN]}0"}
    with subprocess.Popen(["sleep", "600"], env=theirs) as other, subprocess.Popen(["sleep", "600"]) as mine:
        found = run.processes()
        within = {**os.environ, RUN: f"{os.environ[RUN]}/7-abc"}
        with subprocess.Popen(["sleep", "600"], env=within) as nested:
            assert nested.pid in run.processes(), "a test's own run of tests"
            nested.kill()
        other.kill()
        mine.kill()
    assert set(found) == {mine.pid}
    assert run.found() == []


def test_a_folder_is_found_and_one_elsewhere_is_not(run: Leftovers, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir=tmp_path):
        assert run.found() == [name]
    (sockets := run.folder / f"lockstride-{os.geteuid()}").mkdir()
    assert run.found() == []
    (sockets / "control").touch()
    assert run.found() == [str(sockets)]


@pytest.mark.skipif(not os.access(SHARED, os.W_OK), reason="no shared memory here")
def test_shared_memory_that_nobody_uses_is_found(run: Leftovers) -> None:
    named = SHARED / f"lockstride-test-{os.getpid()}"
    try:
        with named.open("w"):
            assert str(named) not in run.found(), "somebody has it open"
        assert str(named) in run.found()
    finally:
        named.unlink()
    assert str(named) not in run.found()
