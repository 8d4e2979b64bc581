"""The steady part of a run: when it begins, when it ends, and what is known of it.

Knows: ramp and drain, full batches. Does not know: which figures are made of it (figures.py).

    closed loop, all at once    from when as many requests as run at once have ended, until no more than those are left
    a rate                      from when a tenth of the requests has ended, until the last one begins

--ramp-requests and --drain-requests replace either end. In between, a request that ends has another one in its place,
begun at another time, so that prompts and answers of all ages run together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.bench.load.journal import DecodeStep, Journal, Sample


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds on time.perf_counter's clock: ``begin`` is outside, ``end`` inside."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def holds(self, moment: float) -> bool:
        return self.begin < moment <= self.end


def steady_window(
    journal: Journal, rows: int, rate: float, ramp: int | None = None, drain: int | None = None
) -> Window | str:
    """The window, or why there is none. ``rows``: requests that run at once. ``rate``: of arrivals, inf where all are
    due at once. ``ramp``, ``drain``: requests that have ended before it, and that have not when it ends."""
    ends = sorted(one.ended for one in journal.requests)
    count, paced = len(ends), math.isfinite(rate)
    if ramp is None:
        ramp = max(1, count // 10) if paced else rows
    if drain is None and not paced:
        drain = rows
    if ramp + (drain or 0) >= count:
        advice = f"type --num-prompts {8 * rows}" if not paced else "type more --num-prompts"
        return f"{ramp} requests of ramp and {drain or 0} of drain leave none of {count}: {advice}"
    begin = journal.started if ramp == 0 else ends[ramp - 1]
    end = max(one.began for one in journal.requests) if drain is None else ends[count - drain - 1]
    if end <= begin:
        return f"the last request began before {ramp} had ended: type more --num-prompts, or less --ramp-requests"
    return Window(begin, end)


def counted(journal: Journal, window: Window | None = None) -> Mapping[str, int]:
    """What the scheduler counted in a run, or in ``window``, to about 0.1 s; empty where nothing was counted."""
    samples = journal.samples
    if len(samples) < 2:
        return {}
    first, last = samples[0], samples[-1]
    if window is not None:
        first, last = _at(journal, window.begin), _at(journal, window.end)
    return {name: last.counts[name] - first.counts[name] for name in last.counts}


def steps_of(journal: Journal, window: Window | None = None) -> range:
    """Numbers of the steps that were planned in a run, or in ``window``."""
    samples = journal.samples
    if len(samples) < 2:
        return range(0)
    if window is None:
        return range(samples[0].step, samples[-1].step)
    return range(_at(journal, window.begin).step, _at(journal, window.end).step)


def _at(journal: Journal, moment: float) -> Sample:
    """The first sample from ``moment`` on, or the last one there is."""
    return next((sample for sample in journal.samples if sample.at >= moment), journal.samples[-1])


def why_not_full(steps: Sequence[DecodeStep], rows: int, count: int) -> str | None:
    """Why ``steps`` are no window of ``count`` decode steps in which all ``rows`` requests took part; None if so."""
    short = [decode for decode in steps if decode.rows != rows]
    if short:
        return (
            f"the batch was not full: {len(short)} of {len(steps)} decode steps ran other than {rows} "
            f"rows, step {short[0].step} for one ran {short[0].rows}"
        )
    return None if len(steps) == count else f"the batch took {len(steps)} decode steps, not {count}"
