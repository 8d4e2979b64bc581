"""`generate` killed at each change of its output file, and run again: every row is there once, as if never killed."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from launch.generate.command import run
from launch.generate.input_file import FinishedRows
from launch.generate.options import Command
from launch.generate.output_file import ResultsFile, ResultsFileError
from tests.launch.api import bad_lines
from tests.launch.api.parsed import parsed
from tests.launch.generate.batches import answers_of, good_lines, model_folder, write_input
from tests.launch.generate.fake_engine import FakeEngine
from tests.launch.kill_at import kill_at, kill_everywhere

GOOD, BAD = 6, 2


class Batch:
    """A batch and the answers of a run in peace. ``before``: what of its rows is there when the killed run starts."""

    def __init__(self, folder: Path, before: Callable[[list[bytes]], bytes | None], *options: str) -> None:
        self.folder, self.options = folder, options
        bad = [line for line in bad_lines.generated(20) if len(line) < 200]
        lines = [*good_lines(GOOD), *bad[:BAD]]
        random.Random(0).shuffle(lines)
        self.output = folder / "out.jsonl"
        arguments = ["generate", "--model", str(model_folder(folder)), "--input", str(write_input(folder, lines))]
        arguments += ["--output", str(self.output), "--device", "cpu"]
        self._plain, self._killed = (parsed(Command, [*arguments, *more]) for more in ((), options))
        self.run(self._plain)
        self.expected = answers_of(self.output)
        assert len(self.expected) == GOOD + BAD
        self.before = before(self.output.read_bytes().splitlines(keepends=True))

    def run(self, command: Command) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            code = run(command, {}, lambda config, _: FakeEngine(config))
        assert code == 1, "there are bad lines"

    def killed(self, place: int) -> str:
        """Kill, resume and check; returns where the kill came."""
        self.output.unlink(missing_ok=True)
        if self.before is not None:
            self.output.write_bytes(self.before)
        with kill_at(place, self.folder) as disk:
            self.run(self._killed)
        self.check_between()
        self.run(self._plain)
        assert answers_of(self.output) == self.expected  # which finds two rows of one request, too
        return disk.killed

    def check_between(self) -> None:
        """Whole rows of before are there still, but for errors that are made again."""
        left = self.output.read_bytes() if self.output.exists() else b""
        for row in (self.before or b"").splitlines(keepends=True):
            if row.endswith(b"\n") and not ("--retry-errors" in self.options and b'"error":{' in row):
                assert row in left, "a row is lost"


def nothing(rows: list[bytes]) -> None:
    """The first run."""


def half_and_torn(rows: list[bytes]) -> bytes:
    return b"".join(rows[: len(rows) // 2]) + rows[-1][:40]


def everything(rows: list[bytes]) -> bytes:
    return b"".join(rows)


@pytest.mark.slow
def test_killed_at_any_change_of_a_new_file_nothing_is_lost(tmp_path: Path) -> None:
    assert kill_everywhere(Batch(tmp_path, nothing).killed) == 1 + 2 * (GOOD + BAD)


def test_killed_at_any_change_of_a_torn_file_nothing_is_lost(tmp_path: Path) -> None:
    assert kill_everywhere(Batch(tmp_path, half_and_torn).killed) == 1 + 2 * (GOOD + BAD) // 2


def test_killed_at_any_change_while_errors_are_made_again_nothing_is_lost(tmp_path: Path) -> None:
    assert kill_everywhere(Batch(tmp_path, everything, "--retry-errors").killed) == 4 + 2 * BAD


# ---- planted faults ----


def keep_torn(results: ResultsFile, size: int) -> int:
    return size


def forget(results: ResultsFile, end: int) -> FinishedRows:
    return FinishedRows()


def drop_errors_in_place(results: ResultsFile) -> None:
    rows = results.path.read_bytes().splitlines(keepends=True)
    results.path.write_bytes(b"".join(row for row in rows if b'"error":{' not in row))


@pytest.mark.parametrize(
    ("name", "fault", "before", "options"),
    [
        ("_end_of_last_row", keep_torn, nothing, ()),
        ("_scan", forget, nothing, ()),
        ("_drop_errors", drop_errors_in_place, everything, ("--retry-errors",)),
    ],
)
def test_a_planted_fault_is_found(
    name: str, fault: object, before: Callable[..., Any], options: tuple[str, ...], tmp_path: Path
) -> None:
    batch = Batch(tmp_path, before, *options)
    with mock.patch.object(ResultsFile, name, fault), pytest.raises((AssertionError, ResultsFileError)):
        kill_everywhere(batch.killed)
