"""What a report is made of: one row a measured batch, the points that failed, and what all of it was measured on.

Knows: the files that points leave in a ledger, and report.json. Does not know: plots or HTML.

Every figure is a median over the runs of its point. ``tok_s_per_gpu`` divides by ranks, ``tok_s_per_user`` by the
batch.

Against an earlier report: spread is the range over the runs of each point. Two ranges that overlap are called the same;
with a handful of runs that is a modest claim, and ranges apart are no proof of a cause. One run has no range: its
change is shown, not judged.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from launch.bench.point import Measured, ServePoint
from launch.sweep.ledger import Ledger
from launch.sweep.outcome import point_rows
from launch.sweep.point import Point, Setting, SweepError, model_names, models_of, shown_setting

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


PERCENTILES = (50, 90, 99)
_UNREADABLE = "its point.json or outcome.json cannot be read: remove the folder to measure the point again"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Measured):
    """One batch of one point, as launch/bench/point.py measures it.

    ``key``: of the point. ``settings``: those of the point that are no separate field. ``tpot_percentiles``: over
    requests, in milliseconds, by percent; medians over runs. ``serve``: all of it, of a point of `bench serve`.
    """

    key: str
    tpot_percentiles: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)
    serve: ServePoint | None = None

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def identity(self) -> tuple[Setting | None, ...]:
        """What makes two rows of different reports the same measurement, hardware aside."""
        others = ";".join(f"{name}={value}" for name, value in sorted(self.settings.items()))
        lengths = (self.input_len, self.output_len)
        degrees = (self.tp, self.ep, self.dp)
        point = () if self.serve is None else (self.serve.label,)
        return (self.kind, self.model, self.precision, *degrees, self.batch, *lengths, self.chain_depth, others, *point)


class Failure(msgspec.Struct, frozen=True):
    """A point without a result. ``label``: its settings for people."""

    key: str
    label: str
    reason: str
    folder: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. ``environments``: fact -> value -> keys of the points it was so for. ``created``: seconds since 1970.
    ``points_asked``: of the plan. ``points_earlier``: with rows, but of a grid before."""

    format: int = FORMAT
    name: str
    created: float
    rows: list[Row]
    failures: list[Failure] = []
    environments: dict[str, dict[str, list[str]]] = {}
    points_asked: int = 0
    points_earlier: int = 0

    @property
    def points_done(self) -> str:
        """``3 of 4 points done``."""
        done = len({row.key for row in self.rows}) - self.points_earlier
        earlier = f" and {self.points_earlier} of earlier grids" if self.points_earlier else ""
        return f"{done} of {self.points_asked} points done{earlier}"


def read_report(path: Path) -> Report:
    """From a ledger, a report.json, or a folder that has one. Raises SweepError."""
    if (path / "plan.json").is_file():
        return report_of(Ledger(path))
    for file in (path, path / "report.json", path / "report" / "report.json"):
        if file.is_file():
            try:
                return msgspec.json.decode(file.read_bytes(), type=Report)
            except msgspec.DecodeError as error:
                raise SweepError(f"{file} is no report.json: {error}") from None
    raise SweepError(f"{path} is neither a ledger nor a report.json, nor a folder that has one")


def report_of(ledger: Ledger) -> Report:
    """From the finished and failed points of a ledger. Raises SweepError where it has neither, or damaged results."""
    plan = ledger.plan()
    rows: list[tuple[Point, Row]] = []
    environments: dict[str, dict[str, list[str]]] = {}
    unreadable = ledger.done()
    for point, folder, _ in ledger.finished_points():
        unreadable.discard(folder.name)
        rows += [(point, row) for row in _rows_of(point, folder)]
        for fact, value in _facts(folder):
            environments.setdefault(fact, {}).setdefault(value, []).append(point.key)
    planned = {entry.key: entry.point for entry in plan.points}
    ended = [
        (key, folders[-1], outcome.reason if (outcome := ledger.outcome(folders[-1])) else "no outcome was written")
        for key, folders in ledger.failed().items()
    ]
    ended += [(key, ledger.folder(key), _UNREADABLE) for key in sorted(unreadable)]
    failures, models = [], models_of(planned.values())
    for key, folder, reason in ended:
        label = planned[key].label(tuple(plan.varied), models) if key in planned else key
        failures.append(Failure(key, label or key, reason, str(folder)))
    if not rows and not failures:
        raise SweepError(f"{ledger.out} has no finished point yet: there is nothing to report")
    return Report(
        name=plan.name,
        created=time.time(),
        rows=_with_models_apart(rows),
        failures=failures,
        environments=environments,
        points_asked=len(plan.points),
        points_earlier=len({point.key for point, _ in rows} - planned.keys()),
    )


def _with_models_apart(rows: Sequence[tuple[Point, Row]]) -> list[Row]:
    """Rows call a model by its last folder; where two share that, each gets as many before it as distinguish them."""
    found: dict[str, set[str]] = {}
    for point, row in rows:
        found.setdefault(row.model, set()).add(str(point.settings.get("model", row.model)))
    shared = {name: model_names(models) for name, models in found.items() if len(models) > 1}
    return [
        replace(row, model=shared[row.model][str(point.settings["model"])]) if row.model in shared else row
        for point, row in rows
    ]


_OWN_FIELDS = {"model", "tp", "ep", "dp", "batch", "concurrency", "depth", "dtype"}
_LENGTHS = {"input-len", "output-len"}  # own fields too, where all requests have the same
_HOW_OFTEN = {"num-iters", "num-warmups", "num-prompts"}  # a measurement is the same with more runs


def _rows_of(point: Point, folder: Path) -> list[Row]:
    rows = []
    for flat in point_rows(folder):
        known = _OWN_FIELDS | _HOW_OFTEN | (set() if flat.get("input_len") is None else _LENGTHS)
        settings = {name: value for name, value in point.settings.items() if name not in known}
        own = {"key": point.key, "ep": point.ep, "dp": point.settings["dp"], "settings": settings}
        percentiles = _percentiles(folder / "results", flat)
        serve = flat if flat.get("kind") == "serve" else None
        try:
            rows.append(msgspec.convert({**flat, **own, "tpot_percentiles": percentiles, "serve": serve}, type=Row))
        except msgspec.ValidationError as error:
            raise SweepError(f"{folder}/results holds a row that is no bench result: {error}") from None
    return rows


def _percentiles(results: Path, flat: Mapping[str, Any]) -> dict[str, float]:
    """Of TPOT over requests, from the runs of one batch."""
    pattern = {"latency": f"*.b{flat.get('batch')}-run*.json", "serve": f"*.{flat.get('label')}-run*.json"}.get(
        str(flat.get("kind")), "*.run*.json"
    )
    runs = [_object(path) for path in results.glob(pattern)]
    found = {}
    for percent in PERCENTILES:
        values = [value for run in runs if (value := run.get(f"p{percent}_tpot_ms")) is not None]
        if values:
            found[str(percent)] = statistics.median(values)
    return found


def _object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds. Raises SweepError, which names the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise SweepError(
            f"{path} cannot be read: {error}; remove it, or its point's folder to measure it again"
        ) from None


# ---- what it was measured on ----

_PLAIN_FACTS = ("commit", "code_digest", "device", "cpu", "launcher", "nodes")
_HOW_STARTED = ("LOCKSTRIDE_", "TORCHELASTIC_")  # job scripts set them; they say nothing of what was measured
_GPU_FACTS = ("driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit")


def _facts(folder: Path) -> Iterable[tuple[str, str]]:
    """(fact, value) of everything that two measurements should have in common."""
    for path in sorted((folder / "results").glob("*.environment.json"))[:1]:
        record = _object(path)
        for fact in _PLAIN_FACTS:
            if record.get(fact) is not None:
                yield fact, str(record[fact])
        for name, version in (record.get("versions") or {}).items():
            if version is not None:
                yield f"version of {name}", str(version)
        for name, value in (record.get("variables") or {}).items():
            if value and not name.startswith(_HOW_STARTED):
                yield f"${name}", str(value)
        for fact in _GPU_FACTS:
            values = {gpu.get(fact) for gpu in record.get("gpus") or ()}
            if values:
                yield f"GPU {fact}", ", ".join(sorted(str(value) for value in values))


def differences_within(report: Report) -> list[tuple[str, list[str]]]:
    """Facts that were not the same for all points: name, and each value with its number of points."""
    measured = {row.key for row in report.rows}
    found = []
    for fact, values in sorted(report.environments.items()):
        missing = len(measured - {key for keys in values.values() for key in keys})
        shown = [f"{value} ({_points(len(keys))})" for value, keys in values.items()]
        if missing:
            shown.append(f"unset ({_points(missing)})")
        if len(shown) > 1 and not _follows_ranks(report, fact, values):
            found.append((fact, shown))
    return found


def _follows_ranks(report: Report, fact: str, values: Mapping[str, Sequence[str]]) -> bool:
    """Whether the fact only says if a point has one rank or several: the launcher, and variables set for several."""
    if fact != "launcher" and not fact.startswith("$"):
        return False
    several = {row.key for row in report.rows if row.ranks > 1}
    one = {row.key for row in report.rows} - several
    return all(set(keys) in (several, one) for keys in values.values())


def differences_between(report: Report, earlier: Report) -> list[tuple[str, str, str]]:
    """Facts whose values are others than in an earlier report: name, then, now."""
    found = []
    for fact in sorted(report.environments.keys() | earlier.environments.keys()):
        now, then = (sorted(each.environments.get(fact, {})) for each in (report, earlier))
        if now != then:
            found.append((fact, " | ".join(then) or "unset", " | ".join(now) or "unset"))
    return found


def _points(count: int) -> str:
    return f"{count} point{'s' * (count != 1)}"


# ---- series: rows that differ in their batch alone ----


def varying_names(rows: Sequence[Row]) -> list[str]:
    """The names, of those that a series' label may have, under which the rows differ."""
    names = ["hw", "precision", "tp", "ep", "dp", "lengths", "depth"]
    names += sorted({name for row in rows for name in row.settings})
    return [name for name in names if len({_named(row, name) for row in rows}) > 1]


def series_label(row: Row, names: Sequence[str]) -> str:
    """``tp2 depth2``."""
    shown = [text for name in names if (text := _named(row, name))]
    return " ".join(shown) or f"tp{row.tp}"


def series(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[Row]]:
    """Label -> rows by ascending batch; of a batch measured more than once, the last. ``names``: see varying_names."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        found.setdefault(series_label(row, names), {})[row.batch] = row
    return {label: [by_batch[batch] for batch in sorted(by_batch)] for label, by_batch in found.items()}


def _named(row: Row, name: str) -> str:
    if name == "lengths":
        return "" if row.input_len is None else f"{row.input_len}/{row.output_len}"
    if name == "depth":
        return f"depth{row.chain_depth}"
    if name in ("tp", "ep", "dp"):
        return f"{name}{getattr(row, name)}"
    if name in ("hw", "precision"):
        return str(getattr(row, name))
    value = row.settings.get(name)
    return "" if value is None else shown_setting(name, value)


def panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Title -> rows of one model and one kind of measurement."""
    kinds = {row.kind for row in rows}
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.model if len(kinds) == 1 else f"{row.model}, {row.kind}", []).append(row)
    return found
