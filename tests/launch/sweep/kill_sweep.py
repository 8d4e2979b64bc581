"""Kills sweeps with SIGKILL at random moments, resumes them, and compares with a sweep that was left in peace.

python -m tests.launch.sweep.kill_sweep --kills 75                  `sweep run`
python -m tests.launch.sweep.kill_sweep --kills 75 --under slurm    `sweep submit`, and the tasks of arrays
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from launch.sweep.ledger import Ledger
from tests.launch.sweep.fake_sweep import as_text, journal_lines, results_of, write_grid

ROOT = Path(__file__).resolve().parents[3]
POINT_SECONDS = 0.02
LONGEST_LIFE = 3.0  # times as long as a sweep takes that has nothing to do: most kills come after the start


@dataclass
class Tally:
    """What the kills came to. ``doubles``: points that ran twice at once, or again after they were done."""

    kills: int = 0
    lives: int = 0
    lost: list[str] = field(default_factory=list)
    doubles: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    caught_working: int = 0  # attempts that kills left behind

    @property
    def clean(self) -> bool:
        return not (self.lost or self.doubles or self.changed or self.differing)

    def __str__(self) -> str:
        return (
            f"{self.kills} kills over {self.lives} ledgers, {self.caught_working} in the middle of a point: "
            f"{len(self.lost)} points lost, {len(self.doubles)} double, {len(self.changed)} changed when done, "
            f"{len(self.differing)} other than unkilled"
        )


def sweep(grid: Path, out: Path, *, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.launch.sweep.fake_sweep", str(grid), "--out", str(out), "--resume"]
    environment = {**os.environ, "FAKE_POINT_SECONDS": str(POINT_SECONDS)}
    with log.open("ab") as stream:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=stream)


def unkilled(folder: Path, grid: Path) -> tuple[dict[str, str], float]:
    """The results of a sweep that was left in peace, by key; and the seconds that one takes that finds all done."""
    calm = folder / "calm"
    assert sweep(grid, calm, log=folder / "calm.log").wait(600) == 1, "one point fails, as it should"
    begin = time.perf_counter()
    assert sweep(grid, calm, log=folder / "calm.log").wait(600) == 1
    start = time.perf_counter() - begin
    return {key: as_text(rows) for key, rows in results_of(calm).items()}, start


class Watch:
    """What happens to one ledger between two looks, each at a moment when nothing runs."""

    def __init__(self, out: Path) -> None:
        self._out, self._ledger = out, Ledger(out)
        self._begun = 0  # lines of the journal at the last look
        self._left: set[Path] = set()  # attempts that kills had left behind then
        self.known: dict[str, tuple[int, bytes]] = {}  # points that were done then

    def look(self, tally: Tally) -> None:
        """Points that were done are as they were, and were not begun again."""
        for key, mark in self.known.items():
            if self._mark(key) != mark:
                tally.changed.append(key)
        lines = journal_lines(self._out)
        tally.doubles += [line for line in lines[self._begun :] if line.partition(" ")[2] in self.known]
        tally.doubles += [line for line in lines[self._begun :] if line.startswith("double")]
        left = set(self._ledger.working().values())
        tally.caught_working += len(left - self._left)
        self.known = {key: self._mark(key) for key in self._ledger.done()}
        self._begun, self._left = len(lines), left

    def end(self, tally: Tally, wanted: dict[str, str]) -> None:
        """All points are there, as they would be unkilled."""
        self.look(tally)
        found = {key: as_text(rows) for key, rows in results_of(self._out).items()}
        tally.lost += sorted(wanted.keys() - found.keys())
        tally.differing += [key for key in wanted.keys() & found.keys() if wanted[key] != found[key]]
        tally.differing += sorted(found.keys() - wanted.keys())
        if (failed := len(self._ledger.failed())) != 1:
            tally.lost.append(f"{failed} points failed, where 1 does unkilled")

    def _mark(self, key: str) -> tuple[int, bytes]:
        """What changes when a point is written again."""
        folder = self._ledger.folder(key)
        return folder.stat().st_ino, (folder / "outcome.json").read_bytes()


def kill_anywhere(folder: Path, kills: int, seed: int, points: int = 40) -> Tally:
    """``kills`` kills over as many ledgers of ``points`` points as that takes, each resumed to its end."""
    draw, tally = random.Random(seed), Tally()
    grid = write_grid(folder, [*range(101, 101 + points), 13])
    wanted, start = unkilled(folder, grid)
    while tally.kills < kills:
        tally.lives += 1
        out, log = folder / f"killed{tally.lives}", folder / f"killed{tally.lives}.log"
        watch = Watch(out)
        while tally.kills < kills and len(watch.known) < len(wanted):
            process = sweep(grid, out, log=log)
            time.sleep(draw.uniform(0.0, LONGEST_LIFE * start))
            process.kill()
            if process.wait(600) in (0, 1):
                break
            tally.kills += 1
            watch.look(tally)
        assert sweep(grid, out, log=log).wait(600) == 1, log.read_text()
        watch.end(tally, wanted)
        if left := Ledger(out).working():
            tally.lost.append(f"{len(left)} attempts left over")
    return tally


def main() -> int:
    from tests.launch.sweep import kill_sweep_jobs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=75)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--under", choices=("here", "slurm"), default="here", help="slurm: submit, and arrays' tasks")
    options = parser.parse_args()
    kill = kill_anywhere if options.under == "here" else kill_sweep_jobs.kill_anywhere
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tally = kill(Path(folder), options.kills, options.seed)
    print(f"{options.under}: {tally} ({time.perf_counter() - begin:.0f} s)")
    return 0 if tally.clean else 1


if __name__ == "__main__":
    sys.exit(main())
