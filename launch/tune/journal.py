"""What was measured so far, on disk: one line a task, so that an interruption at any moment loses one task at most.

Knows: the file, its lock, when its lines mean nothing any more, and the table of old and new choices that is shown.
Does not know: how anything is measured, or the table that
start-ups read (models/kernels/matmul/choice_table.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from launch.errors import UsageError
from models.kernels.attention.decode_variant import DecodeVariant
from models.kernels.matmul.choice_table import Blas, Choice, CublasLt, choice_as_json, choice_from_json

HEADER = ("shape", "before", "after", "us before", "us after", "gain")


def shown(choice: AnyChoice) -> str:
    """A choice in a few characters: its kind, and its block sizes in the order of its fields."""
    match choice:
        case None:
            return "built-in rule"
        case Blas():
            return "cuBLAS"
        case CublasLt():
            return f"cuBLASLt {blake2b(choice.algorithm.encode(), digest_size=3).hexdigest()}"
        case DecodeVariant():
            return f"{'TMA' if choice.tma else 'splits'} {choice.block_n},{choice.stages},{choice.warps}"
    values = [str(int(value)) for value in dataclasses.asdict(choice).values()]
    return f"{type(choice).__name__} {','.join(values)}"


def row_of(measured: Measured) -> tuple[str, ...]:
    before = measured.us_before
    gain = "" if before is None else f"{100 * (1 - measured.us_after / before):.1f}%"
    return (
        measured.key,
        shown(measured.before),
        shown(measured.after) if measured.changed else "the same",
        "does not run" if before is None else f"{before:.2f}",
        f"{measured.us_after:.2f}",
        gain,
    )


def table(found: Sequence[Measured]) -> str:
    """Markdown, also legible as it is: columns are as wide as their widest cell."""
    rows = [HEADER, *map(row_of, found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)


def summary(found: Sequence[Measured], failed: int) -> str:
    """One line: how many, how many changed, and what that gains where each stands for one launch."""
    changed = [one for one in found if one.changed]
    before = sum(one.us_before for one in changed if one.us_before is not None)
    after = sum(one.us_after for one in changed if one.us_before is not None)
    gain = f", {100 * (1 - after / before):.1f}% less time in these" if before else ""
    left_out = f"; {failed} candidates did not run, the journal says why" if failed else ""
    return f"{len(found)} measured, {len(changed)} with another choice{gain}{left_out}"


FORMAT = 1
AnyChoice = Choice | DecodeVariant | None  # None: what the engine takes without a table


class TuneWriteError(UsageError):
    """What was measured could not be written: the disk, not the command line, is in the way."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds of a candidate: ``us`` for milliseconds, ``lasting_us`` at the power that lasts, None for those that
    were too slow to be timed again. Of one decoder layer, or of the product alone.
    """

    choice: AnyChoice
    us: float
    lasting_us: float | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A candidate that did not run, and why."""

    choice: AnyChoice
    reason: str


@dataclass(frozen=True, slots=True)
class Measured:
    """One task's outcome. ``before``: what an engine would have run. ``us_before`` is None where that does not run.
    ``timed``: best first. ``seconds``: that it took.
    """

    key: str
    rows: int
    before: AnyChoice
    after: AnyChoice
    us_before: float | None
    us_after: float
    timed: tuple[Timed, ...] = ()
    failed: tuple[Failed, ...] = ()
    seconds: float = 0.0

    @property
    def changed(self) -> bool:
        return self.before != self.after


class Journal:
    """The journal in ``path``, of measurements under ``identity``; lines of another one are put aside.

    ``done``: what was measured, by task. ``avoided``: by task, candidates that are not to be tried, and why.
    Raises UsageError where the file cannot be written, or another process is writing it, TuneWriteError later.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.path = path
        self.put_aside: Path | None = None
        self.done: dict[str, Measured] = {}
        self.avoided: dict[str, dict[AnyChoice, str]] = {}
        wanted = {"format": FORMAT, **identity}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._claim()
            kept = self._read(wanted) if not fresh else []
            self._file = path.open("w" if not kept else "a", encoding="utf-8")
            if not kept:
                self._write(wanted)
        except OSError as error:
            raise UsageError(
                f"{path.parent} cannot be written ({error.strerror or error}): name another folder with --out, and "
                "start engines with --kernel-cache on it"
            ) from error

    def _claim(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise UsageError(
                f"another launch tune is writing {self.path}: wait for it, or name another folder with --out"
            ) from error
        except OSError:
            return  # a file system without locks

    def _read(self, wanted: Mapping[str, Any]) -> list[str]:
        """The lines that count. A torn last one is cut off; a file of another identity is renamed."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        try:
            same = bool(whole) and json.loads(whole[0]) == json.loads(json.dumps(wanted))
            for line in whole[1:] if same else ():
                self._take(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            same = False
        if not same:
            self.done, self.avoided = {}, {}
            self.put_aside = self.path.with_suffix(".old.jsonl")
            self.path.replace(self.put_aside)
            return []
        if len(whole) < len(lines):
            os.truncate(self.path, sum(len(line.encode()) for line in whole))
        return whole

    def _take(self, held: dict[str, Any]) -> None:
        if "avoid" in held:
            self.avoided.setdefault(held["avoid"], {})[from_json(held["choice"])] = held["reason"]
        else:
            measured = _measured(held)
            self.done[measured.key] = measured

    def add(self, measured: Measured) -> None:
        """On disk when this returns. Raises UsageError where the disk fails."""
        self.done[measured.key] = measured
        self._append(_as_json(measured))

    def avoid(self, key: str, choice: AnyChoice, reason: str) -> None:
        """A candidate that is not to be tried for the task again: it did not run, or ended a process."""
        if choice not in self.avoided.setdefault(key, {}):
            self.avoided[key][choice] = reason
            self._append({"avoid": key, "choice": as_json(choice), "reason": reason})

    def _append(self, line: Mapping[str, Any]) -> None:
        try:
            self._write(line)
        except OSError as error:
            raise TuneWriteError(f"{self.path} cannot be written any more ({error.strerror or error})") from error

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a line that did not fit, which ``_append`` has reported
            self._file.close()
        os.close(self._lock)


@contextlib.contextmanager
def opened(path: Path, identity: Mapping[str, Any], *, fresh: bool = False) -> Iterator[Journal]:
    """A Journal until the end of the block."""
    journal = Journal(path, identity, fresh=fresh)
    try:
        yield journal
    finally:
        journal.close()


def _as_json(measured: Measured) -> dict[str, Any]:
    return {
        "key": measured.key,
        "rows": measured.rows,
        "before": as_json(measured.before),
        "after": as_json(measured.after),
        "us_before": measured.us_before,
        "us_after": measured.us_after,
        "timed": [[as_json(one.choice), one.us, one.lasting_us] for one in measured.timed],
        "failed": [[as_json(one.choice), one.reason] for one in measured.failed],
        "seconds": round(measured.seconds, 3),
    }


def _measured(held: dict[str, Any]) -> Measured:
    return Measured(
        held["key"],
        held["rows"],
        from_json(held["before"]),
        from_json(held["after"]),
        held["us_before"],
        held["us_after"],
        tuple(Timed(from_json(choice), us, lasting) for choice, us, lasting in held["timed"]),
        tuple(Failed(from_json(choice), reason) for choice, reason in held["failed"]),
        held["seconds"],
    )


def as_json(choice: AnyChoice) -> list[Any] | None:
    if choice is None:
        return None
    return ["attention", dataclasses.asdict(choice)] if isinstance(choice, DecodeVariant) else choice_as_json(choice)


def from_json(entry: list[Any] | None) -> AnyChoice:
    if entry is None:
        return None
    return DecodeVariant(**entry[1]) if entry[0] == "attention" else choice_from_json(entry)
