"""Pictures of `bench serve`: a run over time, and latency against throughput.

Knows: rows of a timeline, points of rate or concurrency, what is drawn over what. Does not know: how they were
measured, where pictures of whole reports go (plots.py).
Needs matplotlib (the extra ``plot``), imported only when something is drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.bench.point import ServePoint
from launch.sweep.report.axes import STYLE, figure_of_panels, legend_beside, look_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STEPS = ("prefill_steps", "mixed_steps", "decode_steps")
_MOST_STEPS = 400  # intervals that a timeline shows; more are joined

log = logging.getLogger("lockstride")


class LoadPictures:
    """What `bench serve` draws with. Without matplotlib it says so once and draws nothing. A picture that fails is a
    warning: it costs nothing that was measured."""

    def __init__(self) -> None:
        self._missing = False

    def timeline(
        self, rows: Sequence[Mapping[str, Any]], title: str, steady: tuple[float, float] | None, out: Path
    ) -> None:
        self._draw(lambda: timeline_figure(rows, title, steady), out)

    def curve(self, points: Sequence[ServePoint], title: str, out: Path) -> None:
        self._draw(lambda: curve_figure({"": points}, title), out)

    def _draw(self, make: Callable[[], Figure], out: Path) -> None:
        if not self._can_draw():
            return
        try:
            _save(make(), out)
        except Exception as error:
            log.warning("%s is not drawn: %s", out, error)
            with suppress(OSError):
                out.unlink()  # of a full disk half of it is left

    def _can_draw(self) -> bool:
        if self._missing:
            return False
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            self._missing = True
            log.warning("pictures are not drawn: they need matplotlib (pip install 'lockstride[plot]')")
        return not self._missing


def _save(figure: Figure, out: Path) -> None:
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure.savefig(out, dpi=130)


def timeline_figure(rows: Sequence[Mapping[str, Any]], title: str, steady: tuple[float, float] | None = None) -> Figure:
    """Tokens a second, requests, and steps where they are known, one panel below the other.

    ``rows``: of launch/bench/load/figures.py. ``steady``: seconds, shaded.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        kinds = [kind for kind in _STEPS if any(row.get(kind) for row in rows)]
        panels = 3 if kinds else 2
        figure = Figure(figsize=(11.0, 2.4 * panels), layout="constrained")
        figure.suptitle(title)
        tokens, requests, *steps = figure.subplots(panels, 1, sharex=True)
        every = max(1, -(-len(rows) // _MOST_STEPS))
        groups = [rows[first : first + every] for first in range(0, len(rows), every)]
        times = [group[0]["t_s"] for group in groups]
        width = rows[1]["t_s"] * every if len(rows) > 1 else 0.1
        rate = [sum(row["output_throughput"] for row in group) / len(group) for group in groups]
        colour = look_of(0)["color"]
        tokens.step(times, rate, where="post", color=colour, linewidth=0.8, alpha=0.4, label=f"each {width:g} s")
        tokens.step(times, _smooth(rate, round(1.0 / width)), where="post", color=colour, label="mean of 1 s around")
        tokens.set_ylabel("output tokens/s")
        legend_beside(tokens)
        for number, name in enumerate(("running", "waiting")):
            values = [group[-1][name] for group in groups]
            requests.step(times, values, where="post", label=name, color=look_of(number)["color"], linewidth=1.2)
        requests.set_ylabel("requests")
        legend_beside(requests)
        if kinds:
            per_second = [[sum(row[kind] for row in group) / width for group in groups] for kind in kinds]
            colours = [look_of(number)["color"] for number in range(len(kinds))]
            names = [kind.replace("_", " ") for kind in kinds]
            steps[0].stackplot(times, per_second, labels=names, colors=colours, step="post", linewidth=0)
            steps[0].set_ylabel("steps/s")
            legend_beside(steps[0])
        for axes in figure.axes:
            axes.set_ylim(bottom=0)
            if steady is not None:
                axes.axvspan(*steady, color="#000000", alpha=0.05, linewidth=0, zorder=0)
        figure.axes[-1].set_xlabel("seconds")
        return figure


def _smooth(values: Sequence[float], width: int) -> list[float]:
    """The mean of ``width`` values around each."""
    half = max(0, width // 2)
    near = [values[max(0, place - half) : place + half + 1] for place in range(len(values))]
    return [sum(part) / len(part) for part in near]


def curve_figure(series: Mapping[str, Sequence[ServePoint]], title: str) -> Figure:
    """TTFT, ITL and E2EL against output tokens/s, side by side."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = figure_of_panels(3, 1)
        figure.suptitle(title)
        for axes, metric in zip(figure.subplots(1, 3), ("ttft", "itl", "e2el"), strict=True):
            draw_curve(axes, series, metric, legend=metric == "e2el")
        return figure


def draw_curve(axes: Axes, series: Mapping[str, Sequence[ServePoint]], metric: str, legend: bool = True) -> None:
    """One metric against output tokens/s: p50 as a line, p99 dashed, a point a rate or concurrency.

    ``series``: label -> points; ``metric``: ttft, tpot, itl or e2el. ``legend``: next to the panel.
    """
    for number, (label, points) in enumerate(series.items()):
        look = look_of(number)
        for word, shown in (("median", "p50"), ("p99", "p99")):
            name = f"{word}_{metric}_ms"
            known = [point for point in points if getattr(point, name) is not None and point.tok_s is not None]
            known.sort(key=lambda point: point.tok_s or 0.0)
            style = {**look, "linestyle": "-" if word == "median" else "--"}
            named = f"{label} {shown}".strip()
            axes.plot([p.tok_s or 0.0 for p in known], [getattr(p, name) for p in known], label=named, **style)
            if word == "p99":
                for point in known:
                    at = (point.tok_s or 0.0, getattr(point, name))
                    axes.annotate(point_name(point), at, (4, 4), textcoords="offset points", fontsize=7)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("output tokens/s")
    axes.set_ylabel(f"{metric.upper()} [ms]")
    if legend:
        legend_beside(axes)


def point_name(point: ServePoint) -> str:
    """``64``, ``4/s``: what was set to get this point."""
    words = [] if point.max_concurrency is None else [str(point.max_concurrency)]
    words += [] if point.request_rate is None else [f"{point.request_rate:g}/s"]
    return " at ".join(words) or "all"
