"""The output file: append-only lines that survive a kill, and what is already in them when a run starts again.

Knows: locking, repairing, appending, syncing. Does not know: what a row says, but for whose it is (response.py).

Promises. Rows are only appended. After a kill at any moment the file holds whole rows and perhaps a part of a last one,
which the next run cuts off and makes again. One run writes to a file at a time.
Rows are synced to disk together, at most ``sync_seconds`` late, by a thread of the file's own: the engine's loop
never waits for a disk.

Error rows are results: a run that starts again does not make them again, because a bad line stays bad. With
``retry_errors`` they are taken out first (into a new file that then takes the old one's place) and made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import threading
import time
from pathlib import Path
from types import TracebackType

import msgspec

from launch.api.parser import LineId
from launch.api.response import read_back
from launch.generate.input_file import FinishedRows

_SHOWN = 20  # ids of missing rows
_TAIL = 256  # bytes at the end of what was written, which the file must still have
_WAITING_ROWS = 65_536  # more than this waiting for the disk, and write() blocks

_BEGINNING = b'{"id":'
_ANOTHER = "Name another --output, or pass --overwrite to replace the file"


class ResultsFileError(RuntimeError):
    """The output file cannot be used as asked; the text names it, the cause and what to do."""


class ResultsWriteError(ResultsFileError):
    """A row could not be written: the disk, not the command line, is in the way."""


class ResultsFile:
    """Open for appending from construction to ``close``. ``finished`` is what earlier runs have written.

    ``overwrite`` empties the file at once, not when the engine runs: a job that is requeued while it loads does not
    overwrite again (slurm/generate.sbatch), and would go on with the rows of an earlier one.
    """

    def __init__(
        self, path: Path, *, overwrite: bool = False, retry_errors: bool = False, sync_seconds: float = 1.0
    ) -> None:
        self.path = path
        self.repaired_bytes = 0
        self.finished = FinishedRows()
        self._fd = _open_locked(path)
        try:
            if overwrite:
                os.ftruncate(self._fd, 0)
            else:
                self._take_up(retry_errors)
            self._size = os.fstat(self._fd).st_size
            self._tail = os.pread(self._fd, _TAIL, max(0, self._size - _TAIL))
        except BaseException:
            os.close(self._fd)
            raise
        self._sync_seconds = sync_seconds
        self._rows: queue.Queue[bytes | None] = queue.Queue(_WAITING_ROWS)
        self._written: list[LineId] = []  # the ids of rows, in their order
        self._failure: ResultsWriteError | None = None
        self._thread = threading.Thread(target=self._write_rows, name="results-file", daemon=True)
        self._thread.start()

    def write(self, row: bytes, line_id: LineId) -> None:
        """Queue one row, newline included, of the line that ``line_id`` names. Raises ResultsWriteError when an earlier
        one could not be written."""
        self.check()
        self._written.append(line_id)
        self._rows.put(row)

    def check(self) -> None:
        """Raises ResultsWriteError when a row could not be written, or the file was taken away or cut short: more work
        would be lost. Costs nothing."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Every queued row is on disk, in the file of this name, or ResultsWriteError."""
        if self._fd < 0:
            return
        self._rows.put(None)
        self._thread.join()
        if self._failure is None:
            self._failure = self._lost()
        os.close(self._fd)
        self._fd = -1
        self.check()

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lost(self) -> ResultsWriteError | None:
        """What happened to the rows where the file of this name is no longer the one that they were written to."""
        mine = os.fstat(self._fd)
        try:
            found = self.path.stat()
        except OSError as error:
            what = f"is gone ({error.strerror})"
        else:
            if (found.st_dev, found.st_ino) != (mine.st_dev, mine.st_ino):
                what = "is another file now"
            elif found.st_size < self._size:
                what = f"was cut short, to {found.st_size} of {self._size} bytes"
            elif os.pread(self._fd, len(self._tail), self._size - len(self._tail)) != self._tail:
                what = "was overwritten"
            else:
                return None
        kept = _names_in(self.path)
        earlier = self.finished
        ours = (*earlier.ids, *(name_of(one, line) for line, one in earlier.errors.items()), *self._written)
        missing = [one for one in dict.fromkeys(ours) if one not in kept]
        shown = ", ".join(map(str, missing[:_SHOWN])) + (" ..." if len(missing) > _SHOWN else "")
        return ResultsWriteError(
            f"{self.path} {what}, while this run wrote it. {len(missing)} rows are missing: {shown}. Run the same "
            "command again: it makes what is not in the file"
        )

    # ---- starting again ----

    def _take_up(self, retry_errors: bool) -> None:
        """Read what is there, and only when all of it is ours cut off a last line that a kill left unfinished."""
        size = os.fstat(self._fd).st_size
        end = self._end_of_last_row(size)
        if not _may_be_torn(os.pread(self._fd, size - end, end)):
            raise ResultsFileError(f"{self.path} is not an output of generate: {_ANOTHER}")
        self.finished = self._scan(end)
        self.repaired_bytes = size - end
        if self.repaired_bytes:
            os.ftruncate(self._fd, end)
        if retry_errors and self.finished.errors:
            self._drop_errors()
            self.finished = FinishedRows(self.finished.ids)

    def _end_of_last_row(self, size: int) -> int:
        """Bytes up to and with the last newline."""
        end = size
        while end > 0:
            start = max(0, end - 65_536)
            newline = os.pread(self._fd, end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0

    def _scan(self, end: int) -> FinishedRows:
        ids: set[LineId] = set()
        errors: dict[int, LineId | None] = {}
        position = 0
        with self.path.open("rb") as stream:
            for number, data in enumerate(stream, 1):
                position += len(data)
                if position > end:
                    break
                try:
                    row = read_back(data)
                except (ValueError, RecursionError) as error:
                    raise ResultsFileError(f"line {number} of {self.path} is no result: {error}. {_ANOTHER}") from error
                if row.error is not None:
                    errors[row.error.line] = row.line_id
                elif row.line_id is not None:
                    ids.add(row.line_id)
        return FinishedRows(ids, errors)

    def _drop_errors(self) -> None:
        """Replace the file by one without its error rows; a kill leaves either the one or the other."""
        path = Path(os.path.realpath(self.path))  # not a link to it, on whose side there may be less room
        fresh = path.with_name(path.name + ".retry.tmp")
        try:
            with path.open("rb") as old, fresh.open("wb") as new:
                for data in old:
                    if read_back(data).error is None:
                        new.write(data)
                new.flush()
                os.fsync(new.fileno())
            os.replace(fresh, path)
            _sync_folder(path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise ResultsWriteError(
                f"{path} cannot be written without its error rows: {error.strerror}. It is as it was: make room and "
                "run the same command again"
            ) from error
        os.close(self._fd)
        self._fd = _open_locked(self.path)

    # ---- the thread ----

    def _write_rows(self) -> None:
        dirty, synced_at, more = False, time.monotonic(), True
        while more:
            rows, more = self._next_rows(self._sync_seconds if dirty else None)
            try:
                if rows and self._failure is None:
                    self._append(b"".join(rows))
                    dirty = True
                    self._failure = self._lost()
                if dirty and (not more or not rows or time.monotonic() - synced_at >= self._sync_seconds):
                    os.fdatasync(self._fd)
                    dirty, synced_at = False, time.monotonic()
            except OSError as error:
                dirty = False
                self._failure = ResultsWriteError(
                    f"{self.path} cannot be written: {error.strerror}. The rows before are safe: make room and run the "
                    "same command again to go on"
                )

    def _next_rows(self, timeout: float | None) -> tuple[list[bytes], bool]:
        """All rows that wait, after waiting for the first; False when the file is to be closed."""
        rows: list[bytes] = []
        try:
            row = self._rows.get(timeout=timeout)
            while row is not None:
                rows.append(row)
                row = self._rows.get_nowait()
        except queue.Empty:
            return rows, True
        return rows, False

    def _append(self, data: bytes) -> None:
        """All of ``data`` or, on an error such as a full disk, none of its unfinished last part."""
        rest = memoryview(data)
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, rest[written:])
        except OSError:
            whole = data.rfind(b"\n", 0, written) + 1
            os.ftruncate(self._fd, self._size + whole)
            raise
        self._size += len(data)
        self._tail = (self._tail + data)[-_TAIL:]


def name_of(line_id: LineId | None, line: int) -> LineId:
    """Of the row of a line, which may have no id that can be read."""
    return f"line {line}" if line_id is None else line_id


def _names_in(path: Path) -> set[LineId]:
    """Of the whole rows of a file, if it is one, whatever else it holds."""
    found: set[LineId] = set()
    if not path.is_file():
        return found
    with path.open("rb") as stream:
        for data in stream:
            with contextlib.suppress(ValueError, RecursionError):
                row = read_back(data)
                found.add(name_of(row.line_id, 0 if row.error is None else row.error.line))
    return found


def _may_be_torn(tail: bytes) -> bool:
    """Whether what follows the last newline may be the beginning of a row. All rows begin alike, and none is
    JSON before its end."""
    begun = tail[:64].replace(b" ", b"")[: len(_BEGINNING)]
    if begun != _BEGINNING[: len(begun)]:
        return False
    try:
        msgspec.json.decode(tail)
    except (ValueError, RecursionError):
        return True
    try:
        read_back(tail)
    except (ValueError, RecursionError):
        return False
    return True


def _open_locked(path: Path) -> int:
    """A descriptor for appending, with the lock that keeps a second run out."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ResultsFileError(f"{path} cannot be opened for writing: {error}. Name another --output") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ResultsFileError(f"another run is writing {path}: wait for it, or name another --output") from None
    except OSError:
        pass  # a file system without locks, as some network mounts are: go on without
    if new:
        _sync_folder(path)
    return fd


def _sync_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
