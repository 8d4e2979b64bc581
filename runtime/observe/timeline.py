"""The timeline of a run: what every rank keeps of its steps, and how the ranks make one file of it.

Knows: files, who writes which and when; the trace event format of Chrome and Perfetto (JSON objects: complete events
``X``, metadata ``M``, microseconds), and how three kinds of clock become one. Does not know: what is measured.

    each rank, at its end     FILE.rank00003.part    its records, in one piece
    rank 0, after that        FILE                   all parts on one clock; the parts are removed

Ranks of one node share CLOCK_MONOTONIC, which is what time.perf_counter_ns reads. A rank of another node is moved by
the difference of both wall clocks, corrected by what the control plane's handshake measured. A device's clock has no
common zero with its host's, and drifts by some microseconds a second: it is read off the landings. No step is seen
before it ended, so the quickest landing in a while shows how the two clocks stand to each other, late by the time that
an event takes to wake a thread.
"""

from __future__ import annotations

import gzip
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import numpy as np

from runtime.config import ConfigError
from runtime.observe.step_record import StepLog, StepRecord

HOST_THREAD = 1
DEVICE_THREAD = 2
LANDING_THREAD = 3
_WINDOW_MS = 2000.0  # long enough for a quick landing, short enough for the drift


class Part(msgspec.Struct):
    """One rank's share. Ranks of equal ``clock`` read the same clock. ``wall_ns``: the host's wall clock minus its
    perf_counter_ns; ``offset_ns``: rank 0's wall clock minus this one. ``dropped`` steps came before ``steps``.
    """

    rank: int
    host: str
    clock: str
    wall_ns: int
    offset_ns: int
    dropped: int
    steps: list[StepRecord]


def write_trace(file: IO[bytes], parts: Sequence[Part]) -> None:
    """The whole trace as one JSON object; ``parts`` by rank, the first is the one whose clock is kept."""
    shifts = [_shift_ns(part, parts[0]) for part in parts]
    origin_ns = min(
        (part.steps[0].began_at_ns + shift for part, shift in zip(parts, shifts, strict=True) if part.steps), default=0
    )
    encoder = msgspec.json.Encoder()
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    separator = b""
    for part, shift in zip(parts, shifts, strict=True):
        for event in _events(part, shift - origin_ns):
            file.write(separator + encoder.encode(event))
            separator = b",\n"
    other = {"origin_ns": origin_ns, "dropped_steps_by_rank": {str(part.rank): part.dropped for part in parts}}
    file.write(b'\n],"otherData":' + encoder.encode(other) + b"}\n")


def device_times_ns(steps: Sequence[StepRecord]) -> list[tuple[int, int]]:
    """(start, end) on the host's clock of steps that all have device times, in order.

    None ends after it was seen, and none begins before the one before it ended.
    """
    if not steps:
        return []
    started_ms = np.array([step.device_started_ms for step in steps], dtype=np.float64)
    ended_ms = np.array([step.device_ended_ms for step in steps], dtype=np.float64)
    zero_ns = steps[0].seen_at_ns  # differences from here are exact in float64
    behind_ns = np.array([step.seen_at_ns - zero_ns for step in steps]) - ended_ms * 1e6
    windows = np.flatnonzero(np.diff((ended_ms - ended_ms[0]) // _WINDOW_MS)) + 1
    quickest = [part[np.argmin(behind_ns[part])] for part in np.split(np.arange(len(steps)), windows)]
    offset_ns = np.minimum(behind_ns, np.interp(ended_ms, ended_ms[quickest], behind_ns[quickest]))
    ends = (ended_ms * 1e6 + offset_ns).astype(np.int64) + zero_ns
    starts = (started_ms * 1e6 + offset_ns).astype(np.int64) + zero_ns
    starts[1:] = np.maximum(starts[1:], ends[:-1])
    return list(zip(starts.tolist(), np.maximum(starts, ends).tolist(), strict=True))


def _shift_ns(part: Part, kept: Part) -> int:
    """What brings a time of this part onto the clock of ``kept``."""
    return 0 if part.clock == kept.clock else part.wall_ns + part.offset_ns - kept.wall_ns


def _events(part: Part, shift_ns: int) -> Iterator[dict[str, Any]]:
    yield from _names(part)
    for step in part.steps:
        described = _described(step)
        launch_at = step.launched_at_ns - step.launch_ns
        phases = [("agree", step.began_at_ns, step.agree_ns), ("plan", step.began_at_ns + step.agree_ns, step.plan_ns)]
        if step.launched:
            phases += [("launch", launch_at, step.launch_ns), ("wait", step.land_at_ns, step.wait_ns)]
        phases.append(("land", step.land_at_ns + step.wait_ns, step.land_ns))
        for name, at_ns, duration_ns in phases:
            yield _slice(part.rank, HOST_THREAD, name, at_ns + shift_ns, duration_ns, described)
    timed = [step for step in part.steps if step.device_ended_ms is not None]
    for step, (started_ns, ended_ns) in zip(timed, device_times_ns(timed), strict=True):
        name = f"{step.role} {step.bucket}"
        gain = {"width": step.width, "gained": step.gained}
        yield _slice(
            part.rank, DEVICE_THREAD, name, started_ns + shift_ns, ended_ns - started_ns, _described(step) | gain
        )
    free_ns = 0
    for step in timed:  # the worker takes up a step when it is launched and the one before it is read
        taken_up_ns, seen_ns = min(max(step.launched_at_ns, free_ns), step.seen_at_ns), step.seen_at_ns
        free_ns, number = step.read_at_ns, {"step": step.step}  # the device's slice has the rest
        yield _slice(part.rank, LANDING_THREAD, "wait", taken_up_ns + shift_ns, seen_ns - taken_up_ns, number)
        name = f"results of {step.role}"  # as NVTX calls both together
        yield _slice(part.rank, LANDING_THREAD, name, seen_ns + shift_ns, free_ns - seen_ns, number)


def _names(part: Part) -> Iterator[dict[str, Any]]:
    """Metadata: what Perfetto calls processes and threads, and in which order it shows them."""
    pid = part.rank
    yield _metadata(pid, 0, "process_name", {"name": f"rank {pid} on {part.host}"})
    yield _metadata(pid, 0, "process_sort_index", {"sort_index": pid})
    for thread, name in ((HOST_THREAD, "host"), (DEVICE_THREAD, "device"), (LANDING_THREAD, "landing")):
        yield _metadata(pid, thread, "thread_name", {"name": name})
        yield _metadata(pid, thread, "thread_sort_index", {"sort_index": thread})


def _metadata(pid: int, tid: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def _slice(pid: int, tid: int, name: str, at_ns: int, duration_ns: int, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "ts": at_ns / 1e3,
        "dur": max(duration_ns, 0) / 1e3,
        "args": args,
    }


def _described(step: StepRecord) -> dict[str, Any]:
    exchange = {} if step.exchange_rows is None else {"exchange_rows": step.exchange_rows}
    return {
        "step": step.step,
        "role": step.role,
        "bucket": step.bucket,
        "rows": step.rows,
        "ghosts": step.ghosts,
        **exchange,
        "chained": step.chained,
        "break": step.break_reason,
    }


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
