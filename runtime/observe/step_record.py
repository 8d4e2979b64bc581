"""What is known of one step, and a bounded store of many of them.

Knows: the fields of a record, their units, how to keep 200,000 of them without work for the garbage collector.
Does not know: who measures (the engine, observer.py), or what is drawn from it (timeline.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan, nan

# Upper bounds, in seconds, of the buckets that agreements are counted in; one more is beyond them.
AGREEMENT_BOUNDS = (
    *(5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
VOID = "void"


@dataclass(slots=True)
class StepRecord:
    """One step, filled from the beginning of its turn to the end of its landing.

    ``role`` is prefill, decode, mixed (both) or void (a turn in which nothing could run). ``bucket`` rows were
    launched, ``rows`` of them real, of which ``ghosts`` turned out to belong to ended requests. ``exchange_rows``:
    where several groups share experts, the rows that each of them brought to every exchange of the step, as agreed;
    None where there is one group, and where no group launched anything. ``width``: tokens that a row could gain;
    ``gained``: what all of them gained, by the device's count; None if not measured. ``break_reason`` is None when
    the step was chained, else one of ScheduleCounters' reasons.

    ``*_at_ns`` are times of time.perf_counter_ns. Its turn: agree, plan, launch follow each other from ``began_at_ns``
    on; its landing, D turns later: wait (for the device) and land (bookkeeping) from ``land_at_ns`` on; durations in
    ns. ``device_*_ms`` are by the device's own clock and None if not measured; ``seen_at_ns`` is when the landing
    worker saw the results on the host, ``read_at_ns`` when it had read them.
    """

    step: int
    began_at_ns: int
    role: str = VOID
    bucket: int = 0
    rows: int = 0
    ghosts: int = 0
    exchange_rows: int | None = None
    width: int = 1
    gained: int | None = None
    break_reason: str | None = None
    agree_ns: int = 0
    plan_ns: int = 0
    launch_ns: int = 0
    land_at_ns: int = 0
    wait_ns: int = 0
    land_ns: int = 0
    seen_at_ns: int = 0
    read_at_ns: int = 0
    device_started_ms: float | None = None
    device_ended_ms: float | None = None

    @property
    def chained(self) -> bool:
        """Whether the step was launched while another was in flight."""
        return self.break_reason is None and self.role != VOID

    @property
    def launched_at_ns(self) -> int:
        """When its turn had launched it."""
        return self.began_at_ns + self.agree_ns + self.plan_ns + self.launch_ns

    @property
    def launched(self) -> bool:
        """Whether there was a step; a void one that other groups needed is one, too."""
        return self.role != VOID or self.exchange_rows is not None


_NONE = -1  # of a count that was not taken
_LAYOUT = struct.Struct("<8i10q2d")


class StepLog:
    """The latest ``capacity`` records, packed into one buffer: as objects, each full garbage collection would visit
    them all, in the middle of a step that is being measured.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.added = 0
        self._packed = bytearray(capacity * _LAYOUT.size)
        self._words: dict[str | None, int] = {}

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    @property
    def dropped(self) -> int:
        return self.added - len(self)

    def add(self, record: StepRecord) -> None:
        """Copies ``record``; the oldest is dropped when there is no room."""
        _LAYOUT.pack_into(
            self._packed,
            self.added % self.capacity * _LAYOUT.size,
            self._number(record.role),
            self._number(record.break_reason),
            record.bucket,
            record.rows,
            record.ghosts,
            _NONE if record.exchange_rows is None else record.exchange_rows,
            record.width,
            _NONE if record.gained is None else record.gained,
            record.step,
            record.began_at_ns,
            record.agree_ns,
            record.plan_ns,
            record.launch_ns,
            record.land_at_ns,
            record.wait_ns,
            record.land_ns,
            record.seen_at_ns,
            record.read_at_ns,
            nan if record.device_started_ms is None else record.device_started_ms,
            nan if record.device_ended_ms is None else record.device_ended_ms,
        )
        self.added += 1

    def records(self) -> Iterator[StepRecord]:
        """Copies, oldest first."""
        words = list(self._words)
        for i in range(self.dropped, self.added):
            role, why, bucket, rows, ghosts, exchanged, width, gained, step, *times, started, ended = (
                _LAYOUT.unpack_from(self._packed, i % self.capacity * _LAYOUT.size)
            )
            began, agree, plan, launch, land_at, wait, land, seen, read = times
            yield StepRecord(
                step=step,
                began_at_ns=began,
                role=words[role] or VOID,
                bucket=bucket,
                rows=rows,
                ghosts=ghosts,
                exchange_rows=None if exchanged == _NONE else exchanged,
                width=width,
                gained=None if gained == _NONE else gained,
                break_reason=words[why],
                agree_ns=agree,
                plan_ns=plan,
                launch_ns=launch,
                land_at_ns=land_at,
                wait_ns=wait,
                land_ns=land,
                seen_at_ns=seen,
                read_at_ns=read,
                device_started_ms=None if isnan(started) else started,
                device_ended_ms=None if isnan(ended) else ended,
            )

    def _number(self, word: str | None) -> int:
        return self._words.setdefault(word, len(self._words))
