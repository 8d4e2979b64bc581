"""The documented launches of a round are today's. In a process of its own, which plays a GPU for good."""

from __future__ import annotations

import subprocess
import sys

from tests.bench.round_launches import ROOT, ROUNDS

# Every kind of round; scripts and steps that draw differ from these by a launch or none, and drawn guesses of DFlash go
# through the code of MTP's.
CHECKED = ("plain", *ROUNDS, "mtp, drawn", "own mtp, 27B")


def test_the_documented_launches_are_those_of_today() -> None:
    command = [sys.executable, "-m", "tests.bench.round_launches", "--only", *CHECKED]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, cwd=ROOT).stdout
    documented = (ROOT / "docs/lab/measurements/speculation.md").read_text().splitlines()
    found = printed.splitlines()
    assert len(found) > 2 + len(CHECKED), "a title, and a line or two of each"
    missing = [line for line in found if line not in documented]
    assert not missing, "python -m tests.bench.round_launches"
