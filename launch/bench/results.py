"""What a measurement leaves: figures with vLLM's names, one flat row a point, and the files that hold them.

Knows: names, units and file layout. Does not know: how a figure was measured.

    DIR/<kind>-<model>-tp<n>-<time>.environment.json    what it was measured on; tp<n>dp<r> with r groups
    DIR/<...>.b<batch>-run<i>.json                      one a run, keys as vLLM's benchmarks write them
    DIR/<...>.requests.jsonl                            one row a request of every run
    DIR/<...>.b<batch>.profile.json                     one a batch with --profile: kernels of its steps
    DIR/<...>.b<batch>.stages.json, .rounds.trace.json  and of rounds of speculation: their stages, for ui.perfetto.dev
    DIR/<...>.points.jsonl                              one flat row a point: what reports and tables read

`bench serve` names its points c<concurrency>, r<rate>, c<concurrency>r<rate> or all:

    DIR/<...>.c64-run0.json                             vLLM's keys, what the engine counted, the steady window
    DIR/<...>.c64-run0.timeline.jsonl                   a row for each 100 ms; .timeline.png shows it
    DIR/<...>.c64-run0.requests.jsonl                   with --save-detailed: a row a request
    DIR/<...>.curve.png                                 latency against throughput, of more than one point
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import msgspec

from launch.bench.load.figures import request_rows
from launch.bench.load.journal import Journal
from launch.bench.point import Point, ServePoint
from launch.errors import BenchError, UsageError


class ResultFiles:
    """The files of one measurement, whose names begin with ``name``; without a folder nothing is written."""

    def __init__(self, folder: Path | None, name: str) -> None:
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        self._stem: Path | None = None
        if folder is not None:
            make_folder(folder)
            self._stem = folder / f"{name}-{moment}"

    def environment(self, record: dict[str, Any]) -> None:
        self._write("environment.json", record)

    def run(self, label: str, figures: dict[str, Any], journal: Journal) -> None:
        """One run's figures, and a row for each of its requests."""
        self._write(f"{label}.json", figures)
        self._append("requests.jsonl", [{"run": label, **row} for row in request_rows(journal)])

    def path(self, ending: str) -> Path | None:
        """Where a file with that ending belongs; None without a folder."""
        return None if self._stem is None else _beside(self._stem, ending)

    def point(self, point: Point | ServePoint) -> None:
        self._append("points.jsonl", [asdict(point)])

    def profile(self, batch: int, record: dict[str, Any]) -> None:
        """The kernels of one batch's steps."""
        self._write(f"b{batch}.profile.json", record)

    def record(self, label: str, figures: dict[str, Any]) -> None:
        """One plain object under its name."""
        self._write(f"{label}.json", figures)

    def rows(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        """Plain objects under its name, one a line."""
        self._append(f"{name}.jsonl", rows)

    def _write(self, ending: str, content: object) -> None:
        if self._stem is not None:
            text = msgspec.json.format(msgspec.json.encode(content), indent=2)
            path = _beside(self._stem, ending)
            with _written(path):
                path.write_bytes(text + b"\n")

    def _append(self, ending: str, rows: Sequence[dict[str, Any]]) -> None:
        if self._stem is not None:
            path = _beside(self._stem, ending)
            with _written(path), path.open("ab") as stream:
                stream.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def make_folder(folder: Path) -> None:
    """The folder of --result-dir. Raises UsageError where it cannot be, or takes no files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--result-dir {folder} cannot be written to: {error.strerror}") from error


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Raises BenchError where the file cannot be."""
    try:
        yield
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}") from error


def _beside(stem: Path, ending: str) -> Path:
    return stem.with_name(f"{stem.name}.{ending}")
