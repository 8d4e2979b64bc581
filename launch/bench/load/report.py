"""What `bench serve` says while it runs and afterwards.

Knows: figures by name, what a person wants to see of them. Does not know: how they came about.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from tqdm import tqdm

from launch.bench.load.figures import METRICS
from launch.bench.load.journal import Journal, Served
from launch.bench.point import ServePoint

_LINES_A_RUN = 10  # of progress, where there is no terminal for a bar

log = logging.getLogger("lockstride")


class Progress:
    """A bar of requests on a terminal, with the time that is left; else a line in the log now and then."""

    def __init__(self, label: str, total: int, shown: bool) -> None:
        self._label, self._total = label, total
        self._bar = tqdm(total=total, unit="req", desc=label, disable=None if shown else True, leave=False)
        self._next = self._total / _LINES_A_RUN
        self._began = time.perf_counter()

    def __call__(self, ended: int) -> None:
        if not self._bar.disable:
            self._bar.update(ended - self._bar.n)
        elif ended >= self._next and ended < self._total:
            spent = time.perf_counter() - self._began
            left = spent / ended * (self._total - ended)
            log.info("%s: %d of %d requests, about %s left", self._label, ended, self._total, shown_seconds(left))
            self._next += self._total / _LINES_A_RUN

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def shown_seconds(seconds: float) -> str:
    """``41 s``, ``12 min``."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


# ---- for people ----

_HEAD = ("completed", "failed", "total_input_tokens", "total_output_tokens")
_RATES = ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput")


def report(label: str, figures: Mapping[str, Any], journal: Journal) -> str:
    """One run: each figure of the whole run and of its steady window."""
    steady, engine = figures["steady"], figures["engine"]
    window = "" if steady["refused"] else f"steady: {steady['begin_s']:.1f} to {steady['end_s']:.1f} s"
    lines = [f"{label:<28}{'whole run':>14}  {window or 'no steady window: ' + steady['refused']}"]
    lines += [f"{'duration [s]':<28}{figures['duration']:>14.2f}"]
    lines += [f"{name:<28}{figures[name]:>14,}" for name in _HEAD]
    names = [*_RATES, *(f"{word}_{name}_ms" for name in METRICS for word in ("mean", "median", "p90", "p99"))]
    for name in names:
        values = [figures[name], steady.get(name)]
        if any(value is not None for value in values):
            lines.append(f"{name:<28}" + "  ".join(f"{value:>14,.2f}" for value in values if value is not None))
    for name in ("chained", "device_idle", "prefix_hit_share"):
        values = [engine.get(name), steady.get("engine", {}).get(name)]
        if any(value is not None for value in values):
            lines.append(f"{name:<28}" + "  ".join(f"{value:>14.2%}" for value in values if value is not None))
    counts = ("steps", "prefill_steps", "decode_steps", "mixed_steps", "ghost_rows", "evictions", "stalls")
    if engine:
        lines.append("engine: " + ", ".join(f"{name} {engine[name]:,}" for name in counts if name in engine))
        breaks = ", ".join(f"{reason} {count}" for reason, count in engine["chain_breaks"].items())
        lines.append(f"chain breaks: {breaks or 'none'}")
    late = figures["late_ms"]
    lines.append(f"handed over late: median {late['median']:.2f}, p99 {late['p99']:.2f}, max {late['max']:.2f} ms")
    lines += [f"request {number}: {one.error}" for number, one in _first_failures(journal)]
    return "\n".join(lines)


def _first_failures(journal: Journal, most: int = 5) -> list[tuple[int, Served]]:
    return [(number, one) for number, one in enumerate(journal.requests) if one.error][:most]


def summary(points: Sequence[ServePoint]) -> str:
    """A line a point: the curve as numbers."""
    head = ("point", "req/s", "tok/s", "steady", "TTFT p50", "p99", "ITL p50", "p99 ms", "chained")
    lines = ["".join(f"{word:>11}" for word in head)]
    for point in points:
        values = (
            f"{point.request_throughput:.2f}",
            _whole(point.tok_s),
            _whole(point.steady_tok_s),
            *(_two(value) for value in (point.median_ttft_ms, point.p99_ttft_ms)),
            *(_two(value) for value in (point.median_itl_ms, point.p99_itl_ms)),
            "-" if point.chained_ratio is None else f"{point.chained_ratio:.1%}",
        )
        lines.append(f"{point.label:>11}" + "".join(f"{value:>11}" for value in values))
    return "\n".join(lines)


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
