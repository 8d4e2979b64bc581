"""How every picture of a report looks: colours, panels, legends, axes.

Knows: matplotlib, and that rows come in series and panels. Does not know: what a picture shows (plots.py).
Needs matplotlib (the extra ``plot``), imported only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from launch.sweep.report.rows import Row, panels, series, varying_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind people distinguish, without their yellow.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d")
_LINES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D")
STYLE: Any = {  # of matplotlib's own kind of key, which cannot be named without importing it
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "text.parse_math": False,  # a model's folder may have a $ in its name
    "svg.hashsalt": "lockstride",  # the same picture has the same bytes
}
_PANEL = (5.2, 3.6)  # inches


class Lines:
    """The series of a whole report, each with one look in all of its panels."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._names = varying_names(rows)
        self._numbers = {label: number for number, label in enumerate(series(rows, self._names))}

    def of(self, panel: Sequence[Row]) -> list[tuple[str, list[Row], dict[str, Any]]]:
        """Label, rows by batch, and look of each series of a panel."""
        found = series(panel, self._names)
        return [(label, found[label], look_of(number)) for label, number in self._numbers.items() if label in found]


def by_panel(rows: Sequence[Row], draw: Callable[[Axes, list[Row]], None]) -> Figure | None:
    """One panel a model, in rows of two."""
    found = panels(rows)
    if not found:
        return None
    columns = min(2, len(found))
    lines = -(-len(found) // columns)
    figure = figure_of_panels(columns, lines)
    for axes, (title, panel) in zip(grid(figure, len(found), columns), found.items(), strict=True):
        draw(axes, panel)
        axes.set_title(title)
    shown = {label: handle for axes in figure.axes for handle, label in zip(*_legend_of(axes), strict=True)}
    figure.legend(list(shown.values()), list(shown), loc="outside right center")  # right of all panels, hiding no line
    return figure


def grid(figure: Figure, count: int, columns: int) -> list[Axes]:
    """``count`` panels, ``columns`` side by side; the last line may be shorter."""
    every = list(figure.subplots(-(-count // columns), columns, squeeze=False).flatten())
    for axes in every[count:]:
        axes.remove()
    return every[:count]


def _legend_of(axes: Axes) -> tuple[list[Any], list[Any]]:
    """Handles and labels."""
    handles, labels = axes.get_legend_handles_labels()
    return list(handles), list(labels)


def figure_of_panels(columns: int, lines: int) -> Figure:
    """Empty, as large as ``columns`` panels side by side and ``lines`` below each other take; at least two wide."""
    from matplotlib.figure import Figure

    return Figure(figsize=(_PANEL[0] * max(2, columns), _PANEL[1] * lines), layout="constrained")


def legend_beside(axes: Axes) -> None:
    """To the right of the panel, where it hides no line."""
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def look_of(number: int) -> dict[str, Any]:
    """What Axes.plot is given for the series with this number."""
    round_ = number // len(_COLOURS)
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _LINES[round_ % len(_LINES)],
        "marker": _MARKERS[round_ % len(_MARKERS)],
        "markersize": 4,
        "linewidth": 1.6,
    }


def logarithmic(axes: Axes, *which: str) -> None:
    """Plain numbers at 1, 2, 5, 10, ..., and at whatever a short axis needs beyond them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis, set_scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        if axis.axis_name not in which:
            continue
        set_scale("log")
        low, high = axis.get_view_interval()
        subs = (1.0, 2.0, 5.0) if high > 5 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_formatter(NullFormatter())


def batch_axis(axes: Axes, rows: Sequence[Row]) -> None:
    """The horizontal axis: the batches of ``rows``, by powers of two."""
    batches = sorted({row.batch for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_xlabel("requests at once" if rows and rows[0].kind == "throughput" else "batch")
