"""The grid file: YAML in, points out.

Knows: what a grid file may say, Cartesian products, linked variables, exclusions. Does not know: what a point is run
with, or whether it was run already.

    bench: latency                     # or throughput, or serve
    options: {input-len: 512}          # the same in every point
    grid:                              # every combination, the last one fastest
      model: [qwen3-0.6b, qwen3-8b]
      tp: [1, 2]
      batch: [1, 8, 32]
    link: [[model, tp]]                # read side by side instead of combined
    exclude: [{tp: 2, batch: [1, 8]}]  # points that match all of an entry
    minutes: 30                        # a point that takes longer has failed
    cluster: {gpus-per-node: 8}        # what Slurm is asked for

The file is read with the safe loader: it makes plain values and nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import yaml

from launch.sweep.point import RANKS, Measurement, Point, Setting, SweepError, short_name

MOST_POINTS = 100_000
MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What each Slurm task asks for. ``sbatch``: further options of sbatch, one text each. ``cpus_per_rank`` of None
    leaves CPUs to the cluster's defaults."""

    gpus_per_node: int = 8
    throttle: int | None = None
    points_per_task: int = 1
    cpus_per_rank: int | None = None
    sbatch: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """``varied``: the settings that differ between points, in the file's order. ``excluded``: points left out.
    ``minutes``: after which a point is given up; None is no limit here, and an estimate under Slurm."""

    name: str
    points: tuple[Point, ...]
    varied: tuple[str, ...]
    excluded: int
    minutes: int | None
    cluster: Cluster

    def by_key(self) -> dict[str, Point]:
        return {point.key: point for point in self.points}


def read_grid(path: Path) -> Grid:
    """Raises SweepError, naming the place, for a file that is not a grid or has a point that cannot be."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise SweepError(f"{path} has {path.stat().st_size} bytes, a grid file may have {MOST_BYTES}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SweepError(f"{path} cannot be read: {error}") from None
    try:
        _refuse_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader), set())
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SweepError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except SweepError as error:
        raise SweepError(f"{path}: {error}") from None
    except ValueError as error:  # a date that there is not, a number of thousands of digits
        raise SweepError(f"{path} has a value that YAML cannot read: {error}") from None
    except RecursionError:
        raise SweepError(f"{path} is nested too deeply") from None
    try:
        return grid_of(content, path.stem)
    except SweepError as error:
        raise SweepError(f"{path}: {error}") from None


def grid_of(content: object, name: str) -> Grid:
    """From the parsed content of a file. Raises SweepError."""
    top = _mapping(content, "the file")
    _refuse_unknown(top, ("name", "bench", "options", "grid", "link", "exclude", "minutes", "cluster"), "the file")
    bench = top.get("bench", "latency")
    if bench not in get_args(Measurement):
        raise SweepError(f"bench is {bench!r}, but must be one of {', '.join(get_args(Measurement))}")
    options = {key: _setting(key, value) for key, value in _by_short_name(top.get("options"), "options").items()}
    axes = {key: _values(key, value) for key, value in _by_short_name(top.get("grid"), "grid").items()}
    if both := options.keys() & axes.keys():
        raise SweepError(f"{sorted(both)[0]} stands under options and under grid: take one of them out")
    dimensions = _dimensions(axes, top.get("link"))
    size = math.prod(len(rows) for _, rows in dimensions)
    if size > MOST_POINTS:
        raise SweepError(f"the grid has {size:,} combinations, but a sweep may have {MOST_POINTS:,}: split it")
    exclusions = [_exclusion(entry, axes.keys() | options.keys()) for entry in _list(top.get("exclude"), "exclude")]
    points: list[Point] = []
    excluded, checked = 0, set[tuple[str, str]]()
    for combination in _combinations(dimensions):
        settings = {key: value for key, value in {**options, **combination}.items() if value is not None}
        point = Point(bench, settings)
        if any(_matches(point, exclusion) for exclusion in exclusions):
            excluded += 1
            continue
        pairs = {(key, repr(value)) for key, value in settings.items()}
        pairs.add(("speculation", repr([(key, settings[key]) for key in sorted(settings) if "spec" in key])))
        # Options are read one by one, but for those of speculation: no other combination of good ones is bad.
        if not points or not pairs <= checked:
            point.check()
            checked |= pairs
        points.append(point)
    if not points:
        raise SweepError(f"no point is left: all {excluded} are excluded")
    varied = tuple(key for key, values in axes.items() if len(values) > 1)
    minutes = top.get("minutes")
    if minutes is not None and (type(minutes) is not int or minutes < 1):
        raise SweepError(f"minutes is {minutes!r}, but must be a whole number from 1")
    return Grid(str(top.get("name", name)), tuple(points), varied, excluded, minutes, _cluster(top.get("cluster")))


def _dimensions(
    axes: Mapping[str, Sequence[Setting | None]], link: object
) -> list[tuple[tuple[str, ...], list[tuple[Setting | None, ...]]]]:
    """Each variable alone, or several that are linked: names, and the rows of values they take together."""
    groups: dict[str, tuple[str, ...]] = {}
    for entry in _list(link, "link"):
        names = tuple(short_name(str(name)) for name in _list(entry, "an entry of link"))
        for name in names:
            if name not in axes:
                raise SweepError(
                    f"link names {name}, which is not under grid (there are {', '.join(axes) or 'none'}): "
                    "put it there, or remove it from link"
                )
            if name in groups or names.count(name) > 1:
                raise SweepError(f"link names {name} twice")
            groups[name] = names
        if len({len(axes[name]) for name in names}) > 1:
            lengths = ", ".join(f"{name} {len(axes[name])}" for name in names)
            raise SweepError(f"linked variables need lists of one length, but have {lengths}")
    found: list[tuple[tuple[str, ...], list[tuple[Setting | None, ...]]]] = []
    for name in axes:
        names = groups.get(name, (name,))
        if names[0] != name and any(names == known for known, _ in found):
            continue
        if not any(names == known for known, _ in found):
            found.append((names, list(zip(*(axes[each] for each in names), strict=True))))
    for names, rows in found:
        if len(set(map(repr, rows))) < len(rows):
            raise SweepError(f"{' and '.join(names)}: the list has a value twice, which would be the same point twice")
    return found


def _combinations(
    dimensions: Sequence[tuple[tuple[str, ...], Sequence[tuple[Setting | None, ...]]]],
) -> Iterator[dict[str, Setting | None]]:
    for rows in itertools.product(*(rows for _, rows in dimensions)):
        yield {
            name: value
            for (names, _), row in zip(dimensions, rows, strict=True)
            for name, value in zip(names, row, strict=True)
        }


def _exclusion(entry: object, known: set[str]) -> dict[str, list[Setting | None]]:
    named = _by_short_name(entry, "an entry of exclude")
    for name in named:
        if name not in (*known, *RANKS):
            raise SweepError(f"exclude names {name}, which no point has")
    if not named:
        raise SweepError("an entry of exclude is empty, which would leave out every point")
    return {name: _values(name, value if isinstance(value, list) else [value]) for name, value in named.items()}


def _matches(point: Point, exclusion: Mapping[str, Sequence[Setting | None]]) -> bool:
    return all(point.settings.get(name) in values for name, values in exclusion.items())


def _cluster(value: object) -> Cluster:
    given = {str(key).replace("-", "_"): entry for key, entry in _mapping(value, "cluster").items()}
    _refuse_unknown(given, tuple(field.name for field in fields(Cluster)), "cluster")
    for key, entry in given.items():
        if key == "sbatch":
            if not isinstance(entry, list) or not all(isinstance(text, str) and text[:1] == "-" for text in entry):
                raise SweepError("cluster: sbatch must be a list of sbatch options such as ['--mem=64G']")
            if any("\n" in text for text in entry):
                raise SweepError("cluster: an sbatch option has a line break in it")
        elif type(entry) is not int or entry < 1:
            raise SweepError(f"cluster: {key.replace('_', '-')} is {entry!r}, but must be a whole number from 1")
    return Cluster(**{**given, "sbatch": tuple(given.get("sbatch", ()))})


# ---- plain values ----


def _mapping(value: object, where: str) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise SweepError(f"{where} must be 'name: value' lines, not {_kind(value)}")
    return value


def _list(value: object, where: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise SweepError(f"{where} must be a list, not {_kind(value)}")
    return value


def _by_short_name(value: object, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, entry in _mapping(value, where).items():
        short = short_name(str(name))
        if short in found:
            raise SweepError(f"{where} sets {short} twice, as {name!r} too")
        found[short] = entry
    return found


def _values(name: str, value: object) -> list[Setting | None]:
    if not isinstance(value, list) or not value:
        raise SweepError(f"grid: {name} must be a list of values, not {_kind(value)}; a single one goes under options")
    return [_setting(name, entry) for entry in value]


def _setting(name: str, value: object) -> Setting | None:
    """None leaves the option out."""
    if value is None or isinstance(value, (str, int, float)):  # bool is an int
        return value
    raise SweepError(f"{name} is {_kind(value)}, but must be a number, a text or a switch; lists of numbers are texts")


def _refuse_unknown(found: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
    for key in found:
        if key not in known:
            raise SweepError(f"{where} has {key!r}, which means nothing here: known are {', '.join(known)}")


def _refuse_repeated_keys(node: yaml.Node | None, seen: set[int]) -> None:
    """YAML's safe loader would take the last of two equal keys without a word."""
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):  # the loader refuses any other key
                if key.value in keys:
                    raise SweepError(f"line {key.start_mark.line + 1} sets {key.value!r} a second time")
                keys.add(key.value)
            _refuse_repeated_keys(value, seen)
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _refuse_repeated_keys(child, seen)


def _kind(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"[:80]
