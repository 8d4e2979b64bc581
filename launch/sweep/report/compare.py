"""A report against an earlier one: the same measurements side by side, and whether they differ beyond their spread.

Knows: which rows are the same measurement. Does not know: HTML; what made a difference (rows.py has the facts).

Spread is the range over the runs of each point. Two ranges that overlap are called the same; with a handful of runs
that is a modest claim, and ranges apart are no proof of a cause. One run has no range: its change is shown, not judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from launch.sweep.report.rows import Report, Row

Verdict = Literal["faster", "slower", "same", "one run", "no rate"]


@dataclass(frozen=True, slots=True)
class Change:
    """One measurement, then and now. ``change``: of TPOT, as a share of the earlier; negative is faster."""

    then: Row
    now: Row
    change: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """``only_now``, ``only_then``: rows that the other report does not have."""

    earlier: Report
    changes: list[Change]
    only_now: list[Row]
    only_then: list[Row]

    def count(self, verdict: Verdict) -> int:
        return sum(change.verdict == verdict for change in self.changes)


def compare(report: Report, earlier: Report) -> Comparison:
    """Changes beyond the spread first, the largest of them first."""
    before = {row.identity: row for row in earlier.rows}
    after = {row.identity: row for row in report.rows}
    changes = [_change(before[identity], row) for identity, row in after.items() if identity in before]
    changes.sort(key=lambda change: (change.verdict not in ("faster", "slower"), -abs(change.change or 0.0)))
    return Comparison(
        earlier,
        changes,
        [row for identity, row in after.items() if identity not in before],
        [row for identity, row in before.items() if identity not in after],
    )


def _change(then: Row, now: Row) -> Change:
    if not then.tpot_ms or not now.tpot_ms:
        return Change(then, now, None, "no rate")
    change = now.tpot_ms / then.tpot_ms - 1
    if min(then.runs, now.runs) < 2:
        return Change(then, now, change, "one run")
    (low_then, high_then), (low_now, high_now) = _range(then), _range(now)
    if low_now > high_then:
        return Change(then, now, change, "slower")
    if high_now < low_then:
        return Change(then, now, change, "faster")
    return Change(then, now, change, "same")


def _range(row: Row) -> tuple[float, float]:
    values: Sequence[float] = [value for value in (row.tpot_ms_min, row.tpot_ms, row.tpot_ms_max) if value is not None]
    return min(values), max(values)
