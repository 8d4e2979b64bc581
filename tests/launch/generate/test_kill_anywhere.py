"""A kill of `generate`, of a real process at any time; each change: test_kill_at.py; hundreds: `make test-all`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.long
@pytest.mark.multiprocess
def test_whenever_it_is_killed_it_ends_as_if_it_had_not_been() -> None:
    """A program of its own, because runs are forked and pytest's process has threads."""
    options = ["--engine", "real", "--kills", "1", "--lines", "4", "--fresh-every", "0"]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.launch.generate.kill_anywhere", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stderr
    assert "real engine: 1 kills" in ended.stdout
    assert "0 rows lost, 0 doubled, 0 torn" in ended.stdout
