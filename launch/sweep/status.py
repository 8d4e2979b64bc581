"""`sweep status`: how far each point of a ledger is, once or again and again.

Knows: the ledger, what Slurm says of its arrays, how far a running point's results are. Changes nothing.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import msgspec

from launch.sweep.estimate import estimate_seconds, runs_of
from launch.sweep.ledger import Began, Ledger, Plan
from launch.sweep.point import Point, SweepError, models_of
from launch.sweep.slurm import Slurm
from launch.sweep.submit import InHand, Jobs, measured_points

SOME_FAILED = 1
NOT_ALL = 3
STATES = ("done", "failed", "running", "queued", "left over", "to come")
_BAR = 40
_CLEAR = "\x1b[H\x1b[J"  # cursor home, erase below


@dataclass(frozen=True, slots=True)
class PointStatus:
    """``state`` is one of STATES: ``left over`` is an attempt whose sweep was killed. ``seconds``: taken, or so far."""

    key: str
    label: str
    state: str
    seconds: float | None = None
    where: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SweepStatus:
    """``seconds_left``: estimated, if the points to come run one after the other; None if unknown."""

    name: str
    points: list[PointStatus]
    seconds_left: float | None
    note: str = ""

    def count(self, state: str) -> int:
        return sum(point.state == state for point in self.points)

    @property
    def exit_code(self) -> int:
        if self.count("done") + self.count("failed") < len(self.points):
            return NOT_ALL
        return SOME_FAILED if self.count("failed") else 0


def status(
    out: Path,
    slurm: Slurm,
    *,
    watch: float | None,
    as_json: bool,
    stream: TextIO | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """The subcommand. ``watch``: seconds between looks, until all is finished. Raises SweepError."""
    stream = stream or sys.stdout
    ledger = Ledger(out)
    while True:
        found = status_of(ledger, slurm)
        if as_json:
            stream.write(msgspec.json.encode(asdict(found)).decode() + "\n")
        else:
            stream.write((_CLEAR if watch and stream.isatty() else "") + table(found) + "\n")
        stream.flush()
        if watch is None or found.exit_code != NOT_ALL:
            return found.exit_code
        sleep(watch)


def status_of(ledger: Ledger, slurm: Slurm) -> SweepStatus:
    """Raises SweepError where there is no ledger."""
    plan = ledger.plan()
    in_hand, note = _in_hand(ledger, slurm)
    look = _Look(ledger, plan, in_hand)
    points = [look.at(planned.point) for planned in plan.points]
    return SweepStatus(plan.name, points, look.seconds_left(points), note)


def _in_hand(ledger: Ledger, slurm: Slurm) -> tuple[dict[str, InHand], str]:
    jobs = Jobs(ledger)
    if not jobs.recorded():
        return {}, ""
    try:
        return jobs.in_hand(slurm), ""
    except SweepError as error:
        return {}, f"Slurm cannot be asked: {error}"


class _Look:
    """One look at the ledger."""

    def __init__(self, ledger: Ledger, plan: Plan, in_hand: Mapping[str, InHand]) -> None:
        self._ledger = ledger
        self._varied = tuple(plan.varied)
        self._in_hand = in_hand
        self._done, self._failed, self._working = ledger.done(), ledger.failed(), ledger.working()
        self._points = {planned.key: planned.point for planned in plan.points}
        self._models = models_of(self._points.values())

    def at(self, point: Point) -> PointStatus:
        key, label = point.key, point.label(self._varied, self._models) or point.key
        if key in self._done:
            outcome = self._ledger.outcome(self._ledger.folder(key))
            if outcome is None:
                return PointStatus(key, label, "done", detail="its outcome.json cannot be read")
            return PointStatus(key, label, "done", outcome.seconds, outcome.host)
        folder, task = self._working.get(key), self._in_hand.get(key)
        began = None if folder is None else self._ledger.began(folder)
        where = "" if task is None else f"job {task.job}_{task.task}"
        if folder is not None and began is not None:
            ours = began.job is not None and task is not None and began.job == f"{task.job}_{task.task}"
            if ours or (began.job is None and self._ledger.is_claimed(key)):
                return self._running(point, label, folder, began)
        if task is not None and task.state == "RUNNING":  # between points, or just before the first
            return PointStatus(key, label, "running", where=where, detail="not begun")
        if task is not None:
            return PointStatus(key, label, "queued", where=where, detail=task.state.lower())
        if key in self._failed:
            outcome = self._ledger.outcome(self._failed[key][-1])
            if outcome is None:
                return PointStatus(key, label, "failed", detail="no outcome was written")
            return PointStatus(key, label, "failed", outcome.seconds, outcome.host, outcome.reason)
        if began is not None:
            return PointStatus(key, label, "left over", where=began.host, detail="its sweep was killed: type --resume")
        return PointStatus(key, label, "to come")

    def _running(self, point: Point, label: str, folder: Path, began: Began) -> PointStatus:
        measured, _ = runs_of(point)
        runs = sum(1 for _ in (folder / "results").glob("*run*.json"))
        where = f"{began.host}{f', job {began.job}' if began.job else ''}"
        detail = f"{min(runs, measured)}/{measured} runs"
        return PointStatus(point.key, label, "running", time.time() - began.began, where, detail)

    def seconds_left(self, points: list[PointStatus]) -> float | None:
        measured, total = measured_points(self._ledger), 0.0
        for status in points:
            if status.state in ("done", "failed"):
                continue
            seconds = estimate_seconds(self._points[status.key], measured)
            if seconds is None:
                return None
            total += max(0.0, seconds - (status.seconds or 0.0)) if status.state == "running" else seconds
        return total


def table(found: SweepStatus) -> str:
    """For people: a bar, the counts, a line a point."""
    total, counts = len(found.points), Counter(point.state for point in found.points)
    finished = counts["done"] + counts["failed"]
    filled = _BAR * finished // max(1, total)
    lines = [
        f"{found.name}  [{'#' * filled}{'.' * (_BAR - filled)}] {finished}/{total}",
        ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
        + (f"; about {shown_seconds(found.seconds_left)} of work left" if found.seconds_left else ""),
    ]
    if found.note:
        lines.append(found.note)
    width = max(len(point.label) for point in found.points)
    room = max(20, shutil.get_terminal_size((120, 40)).columns - width - 36)
    for point in found.points:
        took = "" if point.seconds is None else shown_seconds(point.seconds)
        rest = "  ".join(text for text in (point.where, point.detail) if text)
        rest = rest if len(rest) <= room else rest[: room - 3] + "..."
        lines.append(f"{point.key}  {point.label:<{width}}  {point.state:<9}  {took:>8}  {rest}".rstrip())
    return "\n".join(lines)


def shown_seconds(seconds: float | None) -> str:
    """``41 s``, ``12 min``, ``3.4 h``; ``?`` of None."""
    if seconds is None:
        return "?"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
