"""`sweep report`: a ledger's finished points as one HTML file, its pictures as PNG files, and report.json.

Knows: the order of work and the names of files. Does not know: what stands in them.

    OUT/report/report.html     self-contained: pictures inside
    OUT/report/<name>.png      each picture
    OUT/report/report.json     the rows, to compare a later report with (--against)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from launch.sweep.ledger import Ledger, write_file
from launch.sweep.point import SweepError
from launch.sweep.report.html import html
from launch.sweep.report.plots import Missing, draw_all
from launch.sweep.report.rows import Report, compare, differences_within, read_report, report_of


def write_report(
    out: Path, *, against: Path | None = None, target: Path | None = None, say: Callable[[str], None] = print
) -> int:
    """The subcommand. Raises SweepError without anything to report or to compare with, or a place for the report."""
    earlier = None if against is None else read_report(against)  # before it may be overwritten
    report = report_of(Ledger(out))
    target = target or out / "report" / "report.html"
    _make_room(target)
    pictures = draw_all(report.rows)
    for picture in pictures:
        if not isinstance(picture, Missing):
            write_file(target.parent / f"{picture.name}.png", picture.png)
    comparison = None if earlier is None else compare(report, earlier)
    write_file(target, html(report, pictures, comparison, str(against or "")).encode())
    write_file(target.parent / "report.json", msgspec.json.format(msgspec.json.encode(report), indent=1))
    say(_summary(report))
    if comparison is not None:
        say(
            f"against {against}: {comparison.count('faster')} faster, {comparison.count('slower')} slower, "
            f"{comparison.count('same')} within their spread, {comparison.count('one run')} not judged (one run)"
        )
    say(str(target))
    return 0


def _make_room(target: Path) -> None:
    """The folder of ``target``; SweepError where none can be, or where ``target`` is one."""
    if target.is_dir():
        raise SweepError(f"--html {target} is a folder: name a file, such as {target / 'report.html'}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SweepError(f"--html {target}: no folder {target.parent} can be made: {error.strerror}") from error


def _summary(report: Report) -> str:
    failed = f", {len(report.failures)} failed" if report.failures else ""
    differing = differences_within(report)
    unlike = f"; not measured alike: {', '.join(fact for fact, _ in differing)}" if differing else ""
    return f"{report.points_done}{failed}{unlike}"
