"""`sweep plan`: the points of a grid as a table, with the GPUs each needs and the time it may take.

Knows: how a plan is shown. Does not know: how points are made (grid.py) or times estimated (estimate.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from launch.sweep.estimate import estimate_seconds
from launch.sweep.grid import Grid
from launch.sweep.ledger import Ledger
from launch.sweep.point import RANKS, Point, shown_setting
from launch.sweep.render import shape_of
from launch.sweep.status import shown_seconds
from launch.sweep.submit import measured_points


def plan_text(grid: Grid, ledger: Ledger) -> str:
    """For people. Raises SweepError where a point does not fit nodes."""
    measured = measured_points(ledger)
    done, failed = ledger.done(), ledger.failed()
    names = grid.varied or ("model",)
    rows = [["key", *names, "nodes", "GPUs", "about", "state"]]
    gpu_seconds = seconds_left = 0.0
    for point in grid.points:
        shape, seconds = shape_of(point, grid.cluster), estimate_seconds(point, measured)
        state = "done" if point.key in done else "failed" if point.key in failed else ""
        if state != "done":
            seconds_left += seconds or 0.0
            gpu_seconds += (seconds or 0.0) * (point.ranks if shape.gpus else 0)
        gpus = str(point.ranks) if shape.gpus else f"0 ({point.ranks} CPU rank{'s' * (point.ranks > 1)})"
        rows.append(
            [point.key, *(_shown(point, name) for name in names), str(shape.nodes), gpus, shown_seconds(seconds), state]
        )
    first = grid.points[0].settings
    fixed = {name: value for name, value in first.items() if name not in names and (name not in RANKS or value != 1)}
    count = f"{len(grid.points)} points" + (f" ({grid.excluded} excluded)" if grid.excluded else "")
    basis = f"{len(measured)} finished points" if measured else "bytes and FLOPs, so roughly"
    return "\n".join(
        [
            f"{grid.name}: {count} of launch bench {grid.points[0].bench}; ledger {ledger.out}",
            "every point: " + (" ".join(shown_setting(name, value) for name, value in fixed.items()) or "defaults"),
            *columns(rows),
            f"left: about {shown_seconds(seconds_left)} one after the other, {gpu_seconds / 3600:.2f} GPU hours "
            f"(estimated from {basis})",
        ]
    )


def plan_json(grid: Grid, ledger: Ledger) -> str:
    """The same as one JSON object; ``seconds`` is null where nothing can be estimated."""
    measured, done = measured_points(ledger), ledger.done()
    points = [
        {
            "key": point.key,
            "bench": point.bench,
            "settings": dict(point.settings),
            "nodes": shape_of(point, grid.cluster).nodes,
            "ranks": point.ranks,
            "seconds": estimate_seconds(point, measured),
            "done": point.key in done,
        }
        for point in grid.points
    ]
    return msgspec.json.encode({"name": grid.name, "excluded": grid.excluded, "points": points}).decode()


def _shown(point: Point, name: str) -> str:
    value = point.settings.get(name)
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the cells of each column below each other."""
    widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
