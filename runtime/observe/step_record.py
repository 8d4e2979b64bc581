"""What is known of one step, and a bounded store of many of them.

Knows: the fields of a record, their units, how to keep 200,000 of them without work for the garbage collector.
Does not know: who measures (the engine, observer.py), or what is drawn from it (timeline.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan, nan
from operator import attrgetter
from typing import Any

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
_LAYOUT = struct.Struct("<8i10q2d")  # two words, counts, times, the device's; StepRecord's fields are in this order
_counts = attrgetter("bucket", "rows", "ghosts", "exchange_rows", "width", "gained")
_times = attrgetter(
    *("step", "began_at_ns", "agree_ns", "plan_ns", "launch_ns", "land_at_ns", "wait_ns", "land_ns"),
    *("seen_at_ns", "read_at_ns"),
)


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
        counts = (_NONE if count is None else count for count in _counts(record))
        device = (nan if ms is None else ms for ms in (record.device_started_ms, record.device_ended_ms))
        words, at = map(self._number, (record.role, record.break_reason)), self.added % self.capacity * _LAYOUT.size
        _LAYOUT.pack_into(self._packed, at, *words, *counts, *_times(record), *device)
        self.added += 1

    def records(self) -> Iterator[StepRecord]:
        """Copies, oldest first."""
        words = list(self._words)
        for i in range(self.dropped, self.added):
            role, why, *found, started, ended = _LAYOUT.unpack_from(self._packed, i % self.capacity * _LAYOUT.size)
            (step, began, *times), device = found[6:], [None if isnan(ms) else ms for ms in (started, ended)]
            counts = (None if count == _NONE else count for count in found[:6])
            values: list[Any] = [step, began, words[role] or VOID, *counts, words[why], *times, *device]
            yield StepRecord(*values)

    def _number(self, word: str | None) -> int:
        return self._words.setdefault(word, len(self._words))
