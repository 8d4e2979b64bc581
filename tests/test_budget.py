"""The budget of tests (budget.py) on files of its own, with CPU seconds that the tests write down themselves."""

from __future__ import annotations

import os

import pytest

from tests import budget

pytest_plugins = ("pytester",)

TAKES = """
import os
import pytest

def take(seconds):
    os.environ["TAKEN"] = str(float(os.environ["TAKEN"]) + seconds)

def test_the_first_one():
    take(9.0)

def test_cheap():
    take(0.9)

def test_dear():
    take(8.1)

def test_dear_while_a_cache_was_cold():
    take(8.1 if "WARM" not in os.environ else 0.9)
    os.environ["WARM"] = "1"

def test_not_dear_enough_to_be_sure():
    take(7.9)

@pytest.mark.slow
def test_slow():
    take(8.1)
"""


@pytest.fixture
def files(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("TAKEN", "0")
    monkeypatch.delenv("WARM", raising=False)
    monkeypatch.delenv(budget.TIMES_FILE, raising=False)
    pytester.makeini("[pytest]\nmarkers =\n  slow:\n  quick:\n")
    pytester.makepyfile(test_it=TAKES)
    return pytester


def run(files: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    plugin = budget.Budget(lambda: float(os.environ["TAKEN"]))
    return files.runpytest_inprocess("-p", "no:xdist", "-p", "no:cacheprovider", *arguments, plugins=[plugin])


def test_a_test_over_the_limit_twice_fails_unless_it_is_marked(files: pytest.Pytester) -> None:
    done = run(files)
    done.assert_outcomes(passed=5, failed=1)
    done.stdout.fnmatch_lines(["*test_dear took 8.10 CPU seconds when it ran again, 8 times the limit of 1 s. *"])


def test_a_quick_room_has_a_tenth_and_alone_is_collected(
    files: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "ROOT", files.path)
    monkeypatch.setattr(budget, "QUICK", ("test_it.py",))
    files.makepyfile(test_broken="raise RuntimeError('collected')")
    done = run(files, "-m", "quick")
    done.assert_outcomes(passed=1, failed=4, deselected=1)
    done.stdout.fnmatch_lines(["*test_cheap took 0.90 CPU seconds when it ran again, 8 times the limit of 0.1 s. *"])


def test_a_failure_is_reported_as_it_is(files: pytest.Pytester) -> None:
    files.makepyfile(test_it=TAKES.replace("take(8.1)", "take(8.1); assert 0, 'a fault'"))
    done = run(files, "-k", "test_dear or first")
    done.stdout.fnmatch_lines(["*AssertionError: a fault*"])
    assert "CPU seconds" not in done.stdout.str()


def test_times_are_kept_where_a_file_is_named(files: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files.path / "times.jsonl"
    monkeypatch.setenv(budget.TIMES_FILE, str(path))
    run(files, "-k", "cheap or first")
    assert [line.split(", ")[:2] for line in path.read_text().splitlines()] == [
        ['["test_it.py::test_the_first_one"', "9.0"],
        ['["test_it.py::test_cheap"', "0.9"],
    ]


def test_quick_rooms_exist() -> None:
    assert [room for room in (*budget.QUICK, *budget.SLOWER) if not (budget.ROOT / room).exists()] == []
