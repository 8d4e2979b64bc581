"""The pictures of a report: each a function from rows to a figure, or to nothing where the rows do not carry it.

Knows: quantities, and what is drawn over what. Does not know: how all pictures look (axes.py), where rows come
from, or where pictures go.
Needs matplotlib (the extra ``plot``), imported only when something is drawn.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launch.bench.point import ServePoint
from launch.sweep.point import SweepError
from launch.sweep.report.axes import (
    STYLE,
    Lines,
    batch_axis,
    by_panel,
    figure_of_panels,
    legend_beside,
    logarithmic,
    look_of,
)
from launch.sweep.report.load_plot import draw_curve
from launch.sweep.report.rows import PERCENTILES, Row, panels, series_label, varying_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_LABELS = 24  # in one Pareto panel

log = logging.getLogger("lockstride")


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn figure. ``alt``: what it shows, for those who cannot see it."""

    name: str
    title: str
    caption: str
    alt: str
    svg: bytes
    png: bytes


@dataclass(frozen=True, slots=True)
class Missing:
    """A picture that the rows do not carry or that cannot be drawn, and why."""

    title: str
    why: str


def draw_all(rows: Sequence[Row]) -> list[Picture | Missing]:
    """Every picture, in the report's order; those of `bench serve` and the others where there are such points.

    Raises SweepError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise SweepError("a report needs matplotlib: pip install 'lockstride[plot]'") from None
    drawn: list[Picture | Missing] = []
    of_load = [row for row in rows if row.serve is not None]
    of_batches = [row for row in rows if row.serve is None]
    wanted = [(picture, of_load) for picture in _OF_LOAD if of_load]
    wanted += [(picture, of_batches) for picture in _PICTURES if of_batches or not of_load]
    with matplotlib.rc_context(STYLE):
        for (name, title, caption, why, draw), those in wanted:
            try:
                figure = draw([row for row in those if row.tok_s is not None])
                if figure is None:
                    drawn.append(Missing(title, why))
                    continue
                alt = f"{title}: {', '.join(panels(rows))}"
                figure.draw_without_rendering()
                figure.set_layout_engine("none")  # once is enough, and it is what takes the time
                drawn.append(Picture(name, title, caption, alt, _saved(figure, "svg"), _saved(figure, "png")))
            except Exception as error:  # the tables are worth a report without it
                log.warning("%s: not drawn: %s", title, error)
                drawn.append(Missing(title, f"{type(error).__name__}: {error}"))
    return drawn


def _saved(figure: Figure, form: str) -> bytes:
    out = io.BytesIO()
    metadata = {"Date": None} if form == "svg" else {}
    figure.savefig(out, format=form, dpi=150, metadata=metadata)
    return out.getvalue()


def throughput(rows: Sequence[Row]) -> Figure | None:
    lines = Lines(rows)

    def draw(axes: Axes, panel: list[Row]) -> None:
        for label, line, look in lines.of(panel):
            axes.plot([r.batch for r in line], [r.tok_s or 0.0 for r in line], label=label, **look)
        batch_axis(axes, panel)
        logarithmic(axes, "y")
        axes.set_ylabel("tokens/s")

    return by_panel(rows, draw)


def tpot(rows: Sequence[Row]) -> Figure | None:
    rows = [row for row in rows if row.tpot_ms is not None]
    lines = Lines(rows)

    def draw(axes: Axes, panel: list[Row]) -> None:
        for label, line, look in lines.of(panel):
            batches = [r.batch for r in line]
            low, middle, high = ([_percentile(r, percent) for r in line] for percent in PERCENTILES)
            axes.plot(batches, low, label=label, **look)
            axes.plot(batches, middle, linewidth=0.8, linestyle=":", color=look["color"])
            axes.fill_between(batches, low, high, color=look["color"], alpha=0.15, linewidth=0)
        batch_axis(axes, panel)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("time per output token [ms]")

    return by_panel(rows, draw)


def pareto(rows: Sequence[Row]) -> Figure | None:
    lines = Lines(rows)

    def draw(axes: Axes, panel: list[Row]) -> None:
        best = frontier(panel)
        axes.plot(*_speeds(best), color="#bbbbbb", linewidth=5, zorder=1, label="Pareto frontier")
        for row in best[:_MOST_LABELS]:
            point = (row.tok_s_per_user or 0.0, row.tok_s_per_gpu or 0.0)
            axes.annotate(str(row.batch), point, (4, 3), textcoords="offset points", fontsize=7)
        for label, line, look in lines.of(panel):
            axes.plot(*_speeds(line), label=label, **look)
        logarithmic(axes, "x", "y")
        axes.set_xlabel("tokens/s/user")
        axes.set_ylabel("tokens/s/GPU")

    return by_panel(rows, draw)


def _speeds(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row.tok_s_per_user or 0.0 for row in rows], [row.tok_s_per_gpu or 0.0 for row in rows]


def scaling(rows: Sequence[Row]) -> Figure | None:
    """Two panels a model: throughput over tp with the ideal, and efficiency."""
    found = {title: lines for title, panel in panels(rows).items() if (lines := scaling_lines(panel))}
    if not found:
        return None
    labels = list(dict.fromkeys(label for lines in found.values() for label in lines))
    figure = figure_of_panels(2, len(found))
    grid = figure.subplots(len(found), 2, squeeze=False)
    for (title, lines), (speed, share) in zip(found.items(), grid, strict=True):
        for label, line in lines.items():
            degrees, first, look = [r.tp for r in line], line[0], look_of(labels.index(label))
            speed.plot(degrees, [r.tok_s or 0.0 for r in line], **look)
            ideal = [(first.tok_s or 0.0) * degree / first.tp for degree in degrees]
            speed.plot(degrees, ideal, color=look["color"], linewidth=0.8, linestyle=":")
            share.plot(degrees, [100 * value for value in efficiency(line)], label=label, **look)
        for axes in (speed, share):
            every = sorted({r.tp for line in lines.values() for r in line})
            axes.set_xscale("log", base=2)
            axes.set_xticks(every, [str(degree) for degree in every])
            axes.minorticks_off()
            axes.set_xlabel("tensor-parallel ranks")
        logarithmic(speed, "y")
        speed.set_title(title)
        speed.set_ylabel("tokens/s (dotted: ideal)")
        share.set_ylim(0, max(105.0, share.get_ylim()[1]))
        share.set_ylabel("efficiency [%]")
        legend_beside(share)
    return figure


def scaling_lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Label -> rows that differ in tp alone, ascending, at least two."""
    found: dict[tuple[object, ...], dict[int, Row]] = {}
    for row in rows:
        rest = (row.batch, row.dp, row.ep > 1, row.hw, row.precision, row.input_len, row.output_len, row.chain_depth)
        found.setdefault((*rest, *sorted(row.settings.items())), {})[row.tp] = row
    lines = [[by_tp[tp] for tp in sorted(by_tp)] for by_tp in found.values() if len(by_tp) > 1]
    names = [name for name in varying_names([line[0] for line in lines]) if name not in ("tp", "ep")]
    lines.sort(key=lambda line: line[0].batch)
    return {f"batch {line[0].batch} {series_label(line[0], names) if names else ''}".strip(): line for line in lines}


def efficiency(line: Sequence[Row]) -> list[float]:
    """Of rows with ascending tp: throughput a rank over that of the first."""
    base = (line[0].tok_s or 0.0) / line[0].tp
    return [(row.tok_s or 0.0) / row.tp / base if base else 0.0 for row in line]


def chain(rows: Sequence[Row]) -> Figure | None:
    """Device idle and chained ratio over the batch."""
    rows = [row for row in rows if row.device_idle is not None or row.chained_ratio is not None]
    found, lines = panels(rows), Lines(rows)
    if not found:
        return None
    figure = figure_of_panels(2, len(found))
    grid = figure.subplots(len(found), 2, squeeze=False)
    for (title, panel), (idle, chained) in zip(found.items(), grid, strict=True):
        for label, line, look in lines.of(panel):
            batches = [r.batch for r in line]
            idle.plot(batches, [_percent(r.device_idle) for r in line], **look)
            chained.plot(batches, [_percent(r.chained_ratio) for r in line], label=label, **look)
        for axes in (idle, chained):
            batch_axis(axes, panel)
        idle.set_ylim(bottom=0)
        idle.set_title(title)
        idle.set_ylabel("device idle [%]")
        chained.set_ylim(0, 105)
        chained.set_ylabel("steps launched in a chain [%]")
        legend_beside(chained)
    return figure


def _percent(share: float | None) -> float:
    return float("nan") if share is None else 100 * share


def frontier(rows: Sequence[Row]) -> list[Row]:
    """The rows that no other beats in both tokens/s/user and tokens/s/GPU, by ascending tokens/s/user."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda r: (-(r.tok_s_per_user or 0.0), -(r.tok_s_per_gpu or 0.0))):
        if not best or (row.tok_s_per_gpu or 0.0) > (best[-1].tok_s_per_gpu or 0.0):
            best.append(row)
    return best[::-1]


def _percentile(row: Row, percent: int) -> float:
    """Over requests; where all requests of a batch end together they are nearly equal."""
    return row.tpot_percentiles.get(str(percent), row.tpot_ms or 0.0)


def load(rows: Sequence[Row]) -> Figure | None:
    """TTFT, ITL and E2EL against output tokens/s, a line of three panels a model."""
    found = panels(rows)
    if not found:
        return None
    names = [name for name in varying_names(rows) if name not in _ALONG_THE_CURVE]
    figure = figure_of_panels(3, len(found))
    grid = figure.subplots(len(found), 3, squeeze=False)
    for (title, panel), beside in zip(found.items(), grid, strict=True):
        curves: dict[str, list[ServePoint]] = {}
        for row in panel:
            if row.serve is not None:
                curves.setdefault(series_label(row, names) if names else "", []).append(row.serve)
        for axes, metric in zip(beside, ("ttft", "itl", "e2el"), strict=True):
            draw_curve(axes, curves, metric, legend=metric == "e2el")
        beside[0].set_title(title)
    return figure


_ALONG_THE_CURVE = ("request-rate",)
_Drawn = tuple[str, str, str, str, Callable[[Sequence[Row]], "Figure | None"]]
_OF_LOAD: tuple[_Drawn, ...] = (
    (
        "load",
        "Latency against throughput under load",
        "Over the requests of a run, those of ITL over all gaps between tokens: p50 as a line, p99 dashed. Numbers are "
        "concurrent requests, or requests a second.",
        "no point has a rate",
        load,
    ),
)
_PICTURES: tuple[_Drawn, ...] = (
    (
        "throughput",
        "Throughput against batch",
        "Generated tokens a second. Both axes are logarithmic: a straight line up is a batch that costs nothing.",
        "no point has a rate",
        throughput,
    ),
    (
        "tpot",
        "Time per output token",
        "Over the requests of a run, medians over runs: p50 as a line, p90 dotted, the band reaches from p50 to p99.",
        "no point has a rate",
        tpot,
    ),
    (
        "pareto",
        "Throughput a GPU against speed a user sees",
        "Up and to the right is better. Numbers are batches on the frontier: no other point beats them in both.",
        "no point has a rate",
        pareto,
    ),
    (
        "scaling",
        "Scaling over tensor-parallel ranks",
        "Points that differ in tp alone. Efficiency is throughput a rank over that of the fewest ranks measured.",
        "it needs points that differ in tp alone",
        scaling,
    ),
    (
        "chain",
        "Device idle, and steps in a chain",
        "Idle: share of the decode window in which the device ran no step. Chained: steps launched while another was "
        "in flight.",
        "no point has device times",
        chain,
    ),
)
