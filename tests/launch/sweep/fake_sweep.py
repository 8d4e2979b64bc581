"""`sweep run` with points that are no engines, as functions, and as a program of its own to be signalled and killed.

FAKE_POINT_SECONDS says how long a point takes; the journal lies beside the ledger.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from launch.sweep.grid import Grid, grid_of, read_grid
from launch.sweep.ledger import Ledger
from launch.sweep.options import SweepCommand
from launch.sweep.outcome import point_rows
from launch.sweep.point import Point
from launch.sweep.run import run_here
from tests.launch.api.parsed import parsed

POINT = Path(__file__).with_name("fake_point.py")


def grid_with(batches: Sequence[int], **more: Any) -> Grid:
    return grid_of(content_with(batches, **more), "fake")


def content_with(batches: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"options": {"model": "m", "device": "cpu"}, "grid": {"batch": list(batches)}, **more}


def write_grid(folder: Path, batches: Sequence[int], **more: Any) -> Path:
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump(content_with(batches, **more)))
    return path


def journal_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.journal")


def journal_lines(out: Path) -> list[str]:
    path = journal_of(out)
    return path.read_text().splitlines() if path.exists() else []


def command_for(out: Path, seconds: float) -> Any:
    def command_of(point: Point, folder: Path) -> list[str]:
        arguments = [str(folder), point.key, str(point.settings["batch"]), str(journal_of(out)), str(seconds)]
        return [sys.executable, "-S", "-E", str(POINT), *arguments]

    return command_of


def run_fake(
    grid: Grid,
    out: Path,
    *,
    resume: bool = False,
    retry_failed: bool = False,
    seconds: float = 0.0,
    environ: Mapping[str, str] | None = None,
) -> tuple[int, list[str]]:
    """The exit code, and what was said."""
    said: list[str] = []
    code = run_here(
        grid,
        Ledger(out),
        environ or {},
        resume=resume,
        retry_failed=retry_failed,
        command_of=command_for(out, seconds),
        say=said.append,
    )
    return code, said


def results_of(out: Path) -> dict[str, Any]:
    """Key -> rows of each point that is done."""
    return {point.key: point_rows(folder) for point, folder, _ in Ledger(out).finished_points()}


def main() -> int:
    command = parsed(SweepCommand, ["sweep", "run", *sys.argv[1:]])
    options = command.options
    assert options.grid is not None
    assert options.out is not None
    seconds = float(os.environ.get("FAKE_POINT_SECONDS", "0"))
    return run_here(
        read_grid(options.grid),
        Ledger(options.out),
        os.environ,
        resume=options.resume,
        retry_failed=options.retry_failed,
        command_of=command_for(options.out, seconds),
    )


def as_text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


if __name__ == "__main__":
    sys.exit(main())
