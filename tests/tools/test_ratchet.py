"""The ratchet (measure.py) on a small tree: what it counts, and that it bites."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import measure

SOURCE = '''"""A docstring of the module."""

import models.two


def doubled(x: int) -> int:
    """Two
    lines."""
    # a comment
    return 2 * x
'''


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One file of code in models and one beside it, a README of three words, a page of the lab and one for readers."""
    for folder in (*measure.PACKAGES, "docs/lab", "tests/tools", "tests/models"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "models/one.py").write_text(SOURCE)
    (tmp_path / "models/two.py").write_text("TWO = 2\n")
    (tmp_path / "lockstride.py").write_text("")
    (tmp_path / "README.md").write_text("nobody reads this")
    (tmp_path / "CHANGELOG.md").write_text("- one\n- two\n")
    (tmp_path / "docs" / "page.md").write_text("four words of prose")
    (tmp_path / "docs" / "lab" / "page.md").write_text("nobody counts these words")
    (tmp_path / "tests/tools/tool.py").write_text("A = 1\n")
    (tmp_path / "tests/models/test_one.py").write_text("A = 1\nB = 2\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, measure.__file__, *arguments], capture_output=True, text=True)


def test_lines_words_and_circles_are_counted(tree: Path) -> None:
    found = measure.measure()
    assert (found["source files"], found["source lines"], found["code lines"]) == (3, 11, 4)
    assert (found["instruments, lines"], found["test lines"]) == (1, 2)
    assert (found["README words"], found["documents' words"], found["lab's words"]) == (3, 4, 4)
    assert (found["dialect words"], found["files in import circles"]) == (1, 0)
    (tree / "models/two.py").write_text("import models.one\n")
    assert measure.measure()["files in import circles"] == 2


def test_long_functions_of_the_host_are_told_from_those_of_kernels(tree: Path) -> None:
    text = "def long() -> None:\n" + "    pass\n" * 60
    (tree / "models/three.py").write_text(text)
    (tree / "models/kernels").mkdir()
    (tree / "models/kernels/four.py").write_text(text)
    found = measure.measure()
    assert (found["functions > 60 lines"], found["host functions > 60 lines"]) == (2, 1)


@pytest.mark.parametrize(
    ("change", "worse"),
    [
        ({}, ""),
        ({"source lines": 10}, "source lines: 10 allowed by the baseline, 11 now"),
        ({"dialect words": 0}, "dialect words: 0 allowed by the baseline, 1 now"),
        ({"test lines": 1}, ""),  # reported only
    ],
)
def test_a_frozen_value_that_is_worse_fails(tree: Path, change: dict[str, int], worse: str) -> None:
    path = tree / "baseline.json"
    path.write_text(json.dumps({"values": measure.measure() | change}))
    done = run("--check", str(path))
    assert (done.returncode, done.stderr.strip()) == (int(bool(worse)), worse)


@pytest.mark.parametrize("kind", ["features", "loans"])
def test_booked_features_and_loans_are_allowed(tree: Path, kind: str) -> None:
    path = tree / "baseline.json"
    entries = {"features": [{"name": "f", "lines": 1, "commit": "0"}]}
    entries["loans"] = [{"step": "3", "measure": "source lines", "amount": 1, "repaid by": "3b"}]
    values = measure.measure() | {"source lines": 10}
    path.write_text(json.dumps({"values": values, kind: entries[kind]}))
    assert run("--check", str(path)).returncode == 0


def test_values_are_written_back_without_lines_of_features_and_not_beyond_their_aims(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, features = tree / "baseline.json", [{"name": "f", "lines": 2, "commit": "0"}]
    values = {"source lines": 70_000, "stays of a turn, one rank": 100, "dialect words": 900}
    path.write_text(json.dumps({"values": values, "features": features}))
    monkeypatch.setattr(measure, "AIMS", {"dialect words": 5})
    monkeypatch.setattr(sys, "argv", ["measure.py", "--write", str(path)])
    assert measure.main() == 0
    kept = json.loads(path.read_text())
    assert kept["features"] == features
    assert [kept["values"][name] for name in values] == [9, 100, 5]
