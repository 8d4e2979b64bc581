"""The ledger: which points of a sweep are done, which failed and why, on disk and safe against a kill at any moment.

Knows: folders, renames, locks. Does not know: what runs a point, or what its results mean.

    OUT/plan.json               the points asked for, as of the last start
    OUT/points/<key>/           a point that is done: point.json, outcome.json, logs, results/
    OUT/failed/<key>-<token>/   an attempt that failed, the same files; outcome.json says why
    OUT/work/<key>-<token>/     an attempt under way, or one whose sweep was killed
    OUT/interrupted/<key>-<token>/   an attempt that a time limit ended
    OUT/locks/<key>             held by the process that runs the point here, and by the process it started
    OUT/locks/submit            held by `sweep submit`, or by every `sweep run`
    OUT/slurm/                  scripts, logs and job ids (submit.py)

A folder appears under points/ or failed/ by one rename, when everything in it is on disk. A rename onto a point that is
done fails, so that of two attempts one counts. Nothing under points/ is ever written to.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from launch.sweep.grid import Grid
from launch.sweep.point import Measurement, Point, Setting, SweepError

SUBMIT = "submit"  # the lock of who decides where points run: `sweep submit` alone, or all `sweep run` together
_T = TypeVar("_T")

_OUTCOME_BYTES = 4096  # on disk before a point runs: a disk that it fills must not cost its measurement
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # what file systems without locks say


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended. ``seconds``: from start to end. ``reason`` is empty when the point is done. ``job`` and
    ``start`` as in Began. ``given_up``: later starts of ``job`` do not try the point again."""

    state: Literal["done", "failed"]
    reason: str = ""
    exit_code: int | None = None
    began: float
    seconds: float
    host: str
    job: str | None = None
    start: int = 0
    given_up: bool = False


class Began(msgspec.Struct, frozen=True, kw_only=True):
    """Who began an attempt, and when (seconds since 1970). ``job``: the Slurm task, and ``start`` how often that was
    started before."""

    began: float
    host: str
    process: int
    job: str | None = None
    start: int = 0


class PlannedPoint(msgspec.Struct, frozen=True):
    """A point as plan.json and point.json have it."""

    key: str
    bench: Measurement
    settings: dict[str, Setting]

    @classmethod
    def of(cls, point: Point) -> PlannedPoint:
        return cls(point.key, point.bench, dict(point.settings))

    @property
    def point(self) -> Point:
        return Point(self.bench, self.settings)


class Plan(msgspec.Struct, frozen=True):
    """What a later command needs of the grid. ``varied``: the settings in which the points differ, in order."""

    name: str
    varied: list[str]
    points: list[PlannedPoint]
    gpus_per_node: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """A folder in which a point is being run."""

    folder: Path
    point: Point
    began: Began


class Ledger:
    """The ledger in ``out``. Several processes, on several machines, may use one at a time."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._points, self._failed = out / "points", out / "failed"
        self._work, self._interrupted = out / "work", out / "interrupted"

    # ---- what is there ----

    def done(self) -> set[str]:
        """Keys of the points that are done."""
        return {path.name for path in _folders(self._points)}

    def failed(self) -> dict[str, list[Path]]:
        """Key -> folders of its failed attempts, oldest first, of points that are not done."""
        found: dict[str, list[Path]] = {}
        done = self.done()
        for path in sorted(_folders(self._failed), key=_modified):
            if (key := _key(path)) not in done:
                found.setdefault(key, []).append(path)
        return found

    def working(self) -> dict[str, Path]:
        """Key -> folder of its latest attempt that was not filed, running or not."""
        return {_key(path): path for path in sorted(_folders(self._work), key=_modified)}

    def folder(self, key: str) -> Path:
        """Of a point that is done."""
        return self._points / key

    def outcome(self, folder: Path) -> Outcome | None:
        """Of a filed attempt; None where the file is missing or no outcome."""
        return _read(folder / "outcome.json", Outcome)

    def began(self, folder: Path) -> Began | None:
        """Of an attempt; None where it was cleared away meanwhile."""
        return _read(folder / "began.json", Began)

    def plan(self) -> Plan:
        """Raises SweepError where there is no ledger."""
        found = _read(self.out / "plan.json", Plan)
        if found is None:
            raise SweepError(f"{self.out} holds no sweep: name the --out of `sweep run` or `sweep submit`")
        return found

    def finished_points(self) -> list[tuple[Point, Path, Outcome]]:
        """Every point that is done, with its folder; those of the plan first and in its order."""
        order = {planned.key: number for number, planned in enumerate(self.plan().points)}
        found = []
        for key in sorted(self.done(), key=lambda key: (order.get(key, len(order)), key)):
            folder = self.folder(key)
            planned, outcome = _read(folder / "point.json", PlannedPoint), self.outcome(folder)
            if planned is not None and outcome is not None:
                found.append((planned.point, folder, outcome))
        return found

    # ---- what changes it ----

    def begin_sweep(self, grid: Grid, *, resume: bool) -> None:
        """Write the plan. Raises SweepError when there is a ledger already and ``resume`` does not say so, and where
        there cannot be one."""
        self._make(self.out)
        started = self.done() | self.failed().keys() | self.working().keys()
        if started and not resume:
            raise SweepError(
                f"{self.out} holds {len(self.done())} finished and {len(self.failed())} failed points already: type "
                "--resume to go on with it, or another --out"
            )
        points = [PlannedPoint.of(point) for point in grid.points]
        plan = Plan(grid.name, list(grid.varied), points, grid.cluster.gpus_per_node)
        write_file(self.out / "plan.json", msgspec.json.format(msgspec.json.encode(plan), indent=1))

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SweepError(f"{self.out} cannot hold a sweep: {error.strerror}") from error

    def begin(self, point: Point, job: str | None = None, start: int = 0) -> Attempt:
        """A new folder to run ``point`` in. ``job`` and ``start`` as in Began."""
        folder = self._work / f"{point.key}-{secrets.token_hex(4)}"
        new = folder.with_name(f".{folder.name}")  # not visible until it says who began it
        began = Began(began=time.time(), host=socket.gethostname(), process=os.getpid(), job=job, start=start)
        try:
            (new / "results").mkdir(parents=True)
            for parent in (self._points, self._failed):
                parent.mkdir(exist_ok=True)
            write_file(new / "point.json", msgspec.json.encode(PlannedPoint.of(point)))
            write_file(new / "outcome.json", b" " * _OUTCOME_BYTES)
            write_file(new / "began.json", msgspec.json.encode(began))
            new.rename(folder)
        except OSError:
            shutil.rmtree(new, ignore_errors=True)
            raise
        return Attempt(folder, point, began)

    def reopen(self, folder: Path) -> Attempt:
        """An attempt that another process began. Raises SweepError where ``folder`` is none."""
        planned, began = _read(folder / "point.json", PlannedPoint), self.began(folder)
        if planned is None or began is None:
            raise SweepError(f"--attempt {folder} is no attempt under way: it was filed or cleared away")
        return Attempt(folder, planned.point, began)

    def file(self, attempt: Attempt, reason: str, exit_code: int | None, *, given_up: bool = False) -> Path:
        """End an attempt: done when ``reason`` is empty, else failed. Returns where it is now. ``given_up`` as in
        Outcome.

        If another process was done with the point first, theirs stays and this one is thrown away.
        """
        outcome = Outcome(
            state="failed" if reason else "done",
            reason=reason,
            exit_code=exit_code,
            began=attempt.began.began,
            seconds=time.time() - attempt.began.began,
            host=attempt.began.host,
            job=attempt.began.job,
            start=attempt.began.start,
            given_up=given_up,
        )
        _overwrite(attempt.folder / "outcome.json", msgspec.json.encode(outcome))
        _sync_tree(attempt.folder)
        target = self._failed / attempt.folder.name if reason else self._points / attempt.point.key
        try:
            attempt.folder.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(attempt.folder, ignore_errors=True)
        else:
            _sync(target.parent)
        for folder in self.interrupted(attempt.point.key):
            shutil.rmtree(folder, ignore_errors=True)
        return target

    def interrupt(self, attempt: Attempt) -> int:
        """Put an attempt aside that a time limit ended. Returns how many there are of its point now."""
        self._interrupted.mkdir(exist_ok=True)
        attempt.folder.rename(self._interrupted / attempt.folder.name)
        return len(self.interrupted(attempt.point.key))

    def interrupted(self, key: str) -> list[Path]:
        """Attempts at a point that a time limit ended."""
        return [path for path in _folders(self._interrupted) if _key(path) == key]

    def abandon(self, attempt: Attempt) -> None:
        """Throw an attempt away: the point is as if it had not been begun."""
        shutil.rmtree(attempt.folder, ignore_errors=True)

    def clear_work(self, key: str, job: str | None) -> None:
        """Throw away what killed attempts at a point left, of earlier starts of ``job``, or of those without a job.

        For the holder of the point's lock, or that job. A folder that does not say who began it was being thrown
        away when another process was killed.
        """
        for folder in _folders(self._work):
            if _key(folder) == key and ((began := self.began(folder)) is None or began.job == job):
                shutil.rmtree(folder, ignore_errors=True)

    # ---- who runs a point ----

    @contextlib.contextmanager
    def claim(self, key: str, *, shared: bool = False) -> Iterator[int | None]:
        """The point's lock as a file descriptor, or None while another one holds it; others may, too, if all of them
        hold it ``shared``. Raises SweepError where there cannot be a ledger.

        A process that inherits the descriptor holds the lock too, until it ends: so a point stays claimed while any
        process of it lives. On file systems without locks the claim is always given.
        """
        folder = self.out / "locks"
        self._make(folder)
        descriptor = os.open(folder / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            held = _lock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            yield descriptor if held else None
        finally:
            os.close(descriptor)

    def is_claimed(self, key: str) -> bool:
        """Whether a process that can be seen from here holds the point's lock."""
        if not (self.out / "locks" / key).exists():
            return False
        with self.claim(key) as lock:
            return lock is None


def write_file(path: Path, content: bytes) -> None:
    """Whole or not at all, and on disk when this returns. Raises OSError, with ``path`` as its file."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with new.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def _overwrite(path: Path, content: bytes) -> None:
    """In the blocks that the file has, for a folder that is not visible yet."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as stream:
        stream.write(content)
        stream.truncate()


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return True
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _folders(parent: Path) -> list[Path]:
    """Those in ``parent`` that are not hidden; none where there is no ``parent``."""
    with contextlib.suppress(FileNotFoundError):
        return [path for path in parent.iterdir() if path.name[0] != "." and path.is_dir()]
    return []


def _key(folder: Path) -> str:
    return folder.name.partition("-")[0]


def _modified(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):  # another process may just have moved it
        return path.stat().st_mtime
    return 0.0


def _read(path: Path, kind: type[_T]) -> _T | None:
    """None where the file is missing, torn or of another kind."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def _sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                _sync(path)
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
