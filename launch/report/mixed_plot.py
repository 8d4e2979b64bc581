"""`bench plot --kind serve`: mixed load beside other engines, from result files of `bench serve`.

Knows: points of rate or concurrency, the mixed_load part of a file of peers' figures. Does not know: how they were
measured. Needs matplotlib (the extra ``plot``), imported only when something is drawn.

Left: output tokens/s with all requests at once, a group of bars a model. Right: a closed loop, inter-token latency and
time to first token against output tokens/s, a point a concurrency. Only points of the same requests are drawn beside
each other: dataset mixed, with the peers' number of requests and seed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from launch.bench.options import BenchOptions
from launch.errors import UsageError
from launch.report.axes import logarithmic
from launch.report.peers_plot import OURS, PEERS, figure_for, is_model, result_files

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_AT_ONCE = re.compile(r"all_at_once_(\d+)_seed(\d+)")
_CLOSED = re.compile(r"closed_loop_(\d+)_seed(\d+)_(.+)_tp(\d+)")
_RATE = "_out_tok_s"
_LOCKSTRIDE = "Lockstride"
TIMES = ("itl_p50_ms", "itl_p99_ms", "ttft_p50_ms", "ttft_p99_ms")


@dataclass(slots=True)
class AtOnce:
    """One model with all requests at once: output tokens a second by engine, ours first."""

    model: str
    ranks: int
    tok_s: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class ClosedLoop:
    """One model in a closed loop: by engine, ours first, a dict of ``out_tok_s`` and TIMES for each concurrency."""

    model: str
    ranks: int
    requests: int
    engines: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)


class LoadRow(msgspec.Struct, frozen=True, kw_only=True):
    """What this plot needs of a flat row (bench/point.py's ServePoint has all of it, as measurements that were written
    down by hand may have)."""

    kind: str
    model: str
    tp: int
    dp: int = 1
    dataset: str
    seed: int
    num_prompts: int
    request_rate: float | None
    max_concurrency: int | None
    refused: str | None = None
    tok_s: float | None
    median_itl_ms: float | None
    p99_itl_ms: float | None
    median_ttft_ms: float | None
    p99_ttft_ms: float | None


class _Peers(msgspec.Struct, frozen=True):
    mixed_load: dict[str, Any] = {}


def plot_mixed(options: BenchOptions) -> int:
    """The subcommand. Raises UsageError when a file is missing or is not what it should be."""
    if options.peers is None:
        raise UsageError("--kind serve is drawn beside other engines: type --peers docs/peers.json")
    points = read_points(options.results)
    try:
        mixed = msgspec.json.decode(options.peers.read_bytes(), type=_Peers).mixed_load
        bars, loops = at_once(points, mixed), closed_loops(points, mixed)
    except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--peers {options.peers} cannot be read: {type(error).__name__} {error}") from None
    if not bars and not loops:
        raise UsageError(
            f"no point of bench serve --dataset-name mixed in {', '.join(map(str, options.results))} has the requests "
            f"of --peers {options.peers}: type --num-prompts and --seed as its mixed_load has them"
        )
    _draw(bars, loops, options.out)
    print(options.out)
    return 0


def read_points(results: Sequence[Path]) -> list[LoadRow]:
    """The points of `bench serve` that count, oldest file first. Raises UsageError."""
    points: list[LoadRow] = []
    for path in result_files(results):
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                row = msgspec.json.decode(line, type=dict[str, Any])
                if row.get("kind") == "serve":
                    points.append(msgspec.convert(row, type=LoadRow))
            except msgspec.ValidationError as error:
                raise UsageError(f"{path}, line {number} is no flat row of bench serve: {error}") from None
            except msgspec.DecodeError as error:
                raise UsageError(f"{path}, line {number} is no flat row of bench: {error}") from None
    return [point for point in points if point.refused is None and point.tok_s is not None]


def at_once(points: Iterable[LoadRow], mixed: Mapping[str, Any]) -> list[AtOnce]:
    """In the peers' order; only models of which there is a point of ours. Of a point measured again the latest counts.

    Raises KeyError or TypeError where ``mixed`` is not what it should be.
    """
    found: list[AtOnce] = []
    points = [point for point in points if point.max_concurrency is None and point.request_rate is None]
    for key, rows in mixed.items():
        if (match := _AT_ONCE.fullmatch(key)) is None:
            continue
        count, seed = map(int, match.groups())
        for row in rows:
            ours = _latest(points, row["model"], row["tp"], count, seed)
            if ours:
                group = AtOnce(ours[-1].model, row["tp"], {_LOCKSTRIDE: ours[-1].tok_s or 0.0})
                group.tok_s |= {_engine(name): row[name] for name in row if name.endswith(_RATE) and not _is_old(name)}
                found.append(group)
    return found


def closed_loops(points: Iterable[LoadRow], mixed: Mapping[str, Any]) -> list[ClosedLoop]:
    """As ``at_once``."""
    found: list[ClosedLoop] = []
    points = [point for point in points if point.max_concurrency is not None and point.request_rate is None]
    for key, rows in mixed.items():
        if (match := _CLOSED.fullmatch(key)) is None:
            continue
        count, seed, model, tp = int(match[1]), int(match[2]), match[3], int(match[4])
        ours = _latest(points, model, tp, count, seed)
        if not ours:
            continue
        loop = ClosedLoop(ours[-1].model, tp, count, {_LOCKSTRIDE: {}})
        for point in ours:
            loop.engines[_LOCKSTRIDE][point.max_concurrency or 0] = _figures(point)
        for row in rows:
            for name, figures in row.items():
                if isinstance(figures, dict) and not _is_old(name):
                    loop.engines.setdefault(_engine(name), {})[row["concurrency"]] = figures
        found.append(loop)
    return found


def _latest(points: Iterable[LoadRow], model: str, ranks: int, count: int, seed: int) -> list[LoadRow]:
    """Of the same requests, oldest first."""
    return [
        point
        for point in points
        if point.dataset == "mixed"
        and (point.num_prompts, point.seed, point.tp * point.dp) == (count, seed, ranks)
        and is_model(point.model, model)
    ]


def _figures(point: LoadRow) -> dict[str, float]:
    values = (point.median_itl_ms, point.p99_itl_ms, point.median_ttft_ms, point.p99_ttft_ms)
    times = {name: value for name, value in zip(TIMES, values, strict=True) if value is not None}
    return {"out_tok_s": point.tok_s or 0.0, **times}


def _engine(name: str) -> str:
    """``vllm 0.25.1`` of ``vllm_0.25.1_out_tok_s``."""
    return name.removesuffix(_RATE).replace("_", " ", 1)


def _is_old(name: str) -> bool:
    """Whether it is a figure of Lockstride's own: those are drawn from result files."""
    return name.startswith("lockstride")


def _draw(bars: Sequence[AtOnce], loops: Sequence[ClosedLoop], out: Path) -> None:
    figure = figure_for(out, (bool(bars) + 2 * len(loops)), 1)
    panels = iter(figure.subplots(1, bool(bars) + 2 * len(loops), squeeze=False).flatten())
    engines = dict.fromkeys(engine for group in bars for engine in group.tok_s)
    engines |= dict.fromkeys(engine for loop in loops for engine in loop.engines)
    colours = dict(zip(engines, (OURS, *PEERS * len(engines)), strict=False))
    if bars:
        _draw_bars(next(panels), bars, colours)
    for loop in loops:
        for words, low, high in (("inter-token latency", *TIMES[:2]), ("time to first token", *TIMES[2:])):
            _draw_loop(next(panels), loop, colours, words, low, high)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


def _draw_bars(axes: Axes, bars: Sequence[AtOnce], colours: Mapping[str, str]) -> None:
    shown: set[str] = set()
    for place, group in enumerate(bars):
        width = 0.8 / len(group.tok_s)
        for number, (engine, rate) in enumerate(group.tok_s.items()):
            at = place + (number - (len(group.tok_s) - 1) / 2) * width
            label = None if engine in shown else engine
            drawn = axes.bar(at, rate, 0.92 * width, color=colours[engine], label=label)
            axes.bar_label(drawn, [f"{rate:,.0f}"], fontsize=8, rotation=90, padding=3)
            shown.add(engine)
    axes.set_xticks(range(len(bars)), [f"{group.model}\n{_gpus(group.ranks)}" for group in bars])
    axes.set_ylim(0, 1.3 * max(rate for group in bars for rate in group.tok_s.values()))
    axes.set_title("mixed load, all at once")
    axes.set_ylabel("output tokens/s")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)


def _draw_loop(axes: Axes, loop: ClosedLoop, colours: Mapping[str, str], words: str, low: str, high: str) -> None:
    for engine, by_concurrency in loop.engines.items():
        for name, style, shown in ((low, "o-", "p50"), (high, "o--", "p99")):
            known = {most: row for most, row in sorted(by_concurrency.items()) if name in row}
            rates, times = [row["out_tok_s"] for row in known.values()], [row[name] for row in known.values()]
            axes.plot(rates, times, style, color=colours[engine], markersize=4, label=f"{engine} {shown}")
            if name == high:
                for most, rate, time in zip(known, rates, times, strict=True):
                    axes.annotate(str(most), (rate, time), (4, 4), textcoords="offset points", fontsize=8)
    logarithmic(axes, "y")
    axes.set_xlim(left=0)
    axes.set_title(f"{loop.model}, {_gpus(loop.ranks)}, closed loop: {words}", parse_math=False)
    axes.set_xlabel("output tokens/s; numbers are requests at a time")
    axes.set_ylabel(f"{words} [ms]")
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False, fontsize=8)


def _gpus(ranks: int) -> str:
    return "1 GPU" if ranks == 1 else f"{ranks} GPUs"
