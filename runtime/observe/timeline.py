"""The timeline of a run: what every rank keeps of its steps, and how the ranks make one file of it.

Knows: files, who writes which and when. Does not know: what a trace looks like (trace.py), or what is measured.

    each rank, at its end     FILE.rank00003.part    its records, in one piece
    rank 0, after that        FILE                   all parts on one clock; the parts are removed
"""

from __future__ import annotations

import gzip
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

import msgspec

from runtime.config import ConfigError
from runtime.observe.step_record import StepLog, StepRecord
from runtime.observe.trace import Part, write_trace

log = logging.getLogger(__name__)

TRACE_STEPS = 200_000  # of all ranks together: a trace of more than some hundred MB opens nowhere
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Timeline:
    """One a rank. Keeps the latest records, at most ``capacity``; ``close`` writes them.

    ``path`` is the same on all ranks, in a folder they share; a name that ends in .gz is compressed.
    ``clock_offset_ns``: rank 0's wall clock minus this rank's; used for ranks on other nodes only.

    Raises ConfigError when nothing can be written there.
    """

    def __init__(self, path: Path, rank: int, world: int, *, clock_offset_ns: int = 0, capacity: int | None = None):
        self.path = path
        self.rank = rank
        self.world = world
        self._clock_offset_ns = clock_offset_ns
        self._log = StepLog(capacity or max(TRACE_STEPS // world, 1000))
        self._closed = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError("it is a folder")
            _write(part_path(path, rank), lambda file: None)
            part_path(path, rank).unlink()  # it was there to see that it can be; nor may an older one be taken for ours
        except OSError as error:
            raise ConfigError(
                f"timeline {path} cannot be written by rank {rank} ({error}): type --timeline with a file in a folder "
                "that all ranks may write to"
            ) from error

    def add(self, record: StepRecord) -> None:
        """Copies a landed step's record."""
        self._log.add(record)

    def close(self, wait_s: float) -> None:
        """Write this rank's part; on rank 0 wait for the others' and merge what is there. Idempotent.

        A failure is logged, not raised: the run's answers are worth more than its timeline.
        """
        if self._closed:
            return
        self._closed = True
        try:
            part = msgspec.json.encode(self._part())
            _write(part_path(self.path, self.rank), lambda file: file.write(part))
            if self.rank == 0:
                self._merge(wait_s)
        except OSError as error:
            log.error("timeline %s: rank %d could not write: %s", self.path, self.rank, error)

    def _part(self) -> Part:
        return Part(
            rank=self.rank,
            host=socket.gethostname(),
            clock=_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname(),
            wall_ns=time.time_ns() - time.perf_counter_ns(),
            offset_ns=self._clock_offset_ns,
            dropped=self._log.dropped,
            steps=list(self._log.records()),
        )

    def _merge(self, wait_s: float) -> None:
        paths = [part_path(self.path, rank) for rank in range(self.world)]
        until = time.monotonic() + wait_s
        while not all(path.exists() for path in paths) and time.monotonic() < until:
            time.sleep(0.02)
        there = [path for path in paths if path.exists()]
        parts = [msgspec.json.decode(path.read_bytes(), type=Part) for path in there]
        _write(self.path, lambda file: write_trace(file, parts), compressed=self.path.suffix == ".gz")
        for path in there:
            path.unlink()
        missing = sorted(set(range(self.world)) - {part.rank for part in parts})
        if missing:
            log.warning("timeline %s: no part came from ranks %s within %g s", self.path, missing, wait_s)
        dropped = max(part.dropped for part in parts)
        log.info(
            "timeline: the last %d steps of %d ranks%s are in %s; open it at https://ui.perfetto.dev",
            max(len(part.steps) for part in parts),
            len(parts),
            f" ({dropped} before them were dropped)" if dropped else "",
            self.path,
        )


def part_path(path: Path, rank: int) -> Path:
    """Where a rank leaves its part."""
    return path.with_name(f"{path.name}.rank{rank:05d}.part")


def _write(path: Path, write: Callable[[IO[bytes]], object], compressed: bool = False) -> None:
    """All of it or nothing: what is visible is complete."""
    new = path.with_name(path.name + ".new")
    with gzip.open(new, "wb", compresslevel=4) if compressed else new.open("wb") as file:
        write(cast(IO[bytes], file))
    os.replace(new, path)
