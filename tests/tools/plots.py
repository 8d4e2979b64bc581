"""Redraws the two pictures of docs/measurements.md from recorded figures.

    python -m tests.tools.plots [--out docs]

    tpot.png         TPOT against batch: docs/results/qwen3-[0-9]*.points.jsonl, vLLM, the roofline floor
    mixed-load.png   docs/results/mixed-load.figures.jsonl beside vLLM and SGLang: output tokens/s with all requests at
                     once; in a closed loop, inter-token latency and time to first token against output tokens/s

Knows: flat rows of `bench latency` and `bench serve` (launch/bench/point.py), the form of docs/peers.json. Does not
know: how they were measured. Peers are drawn with rows of the same model, GPUs and requests only, and not at all if
they are marked ``not_the_same_work``. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.sweep.report.axes import grid, logarithmic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[2] / "docs"
LOCKSTRIDE = "Lockstride"
OURS, FLOOR, PEERS = "#0b6e4f", "#888888", ("#c8553d", "#4c5fd7", "#b08900", "#7b3f99")
COLUMNS = 3  # panels in a row: more cannot be read at the width of a page
SETUP = ("precision", "input_len", "output_len", "speculation", "num_speculative_tokens")
ITL, TTFT = ("itl_p50_ms", "itl_p99_ms"), ("ttft_p50_ms", "ttft_p99_ms")
_RATE = "_out_tok_s"

Row = Mapping[str, Any]


@dataclass(slots=True)
class Panel:
    """One model on ``ranks`` GPUs. ``peers``: of docs/peers.json; ``ours``: rows by batch."""

    title: str
    ranks: int
    peers: list[Row]
    ours: dict[int, Row] = field(default_factory=dict)

    @property
    def floor_ms(self) -> list[float]:
        """By batch, ascending."""
        return [self.ours[batch]["roofline_floor_ms"] for batch in sorted(self.ours)]


@dataclass(slots=True)
class AtOnce:
    """Output tokens/s by engine, ours first, with all requests at once."""

    model: str
    ranks: int
    tok_s: dict[str, float]


@dataclass(slots=True)
class ClosedLoop:
    """By engine, ours first: ``out_tok_s``, ITL and TTFT by concurrency."""

    model: str
    ranks: int
    engines: dict[str, dict[int, dict[str, float]]]


def read_rows(files: Iterable[Path]) -> list[Row]:
    """Rows that have a rate, in the order of the files and their lines."""
    rows: list[Row] = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [row for row in rows if row.get("refused") is None and (row["tpot_ms"] or row.get("tok_s"))]


def is_model(folder: str, size: str) -> bool:
    """Whether a model folder such as ``qwen3-8b`` is of the size that peers call ``8B``."""
    return folder.lower() == size.lower() or folder.lower().endswith(f"-{size.lower()}")


def panels(rows: Iterable[Row], peers: Sequence[Row]) -> list[Panel]:
    """One for each model, way to shard it and hardware; the last row of a batch counts. Those with peers come first,
    then fewer ranks, then the smaller floor. ValueError for rows of one panel that were not measured alike."""
    found: dict[str, Panel] = {}
    for row in rows:
        if row["kind"] != "latency":
            continue
        groups = row.get("dp", 1)
        ranks = row["tp"] * groups
        title = f"{row['model']}, {ranks} x {row['hw']}" + (f", {groups} groups" if groups > 1 else "")
        alike = [peer for peer in _fair(peers) if peer["tp"] == ranks and is_model(row["model"], peer["model"])]
        found.setdefault(title, Panel(title, ranks, alike)).ours[row["batch"]] = row
    for panel in found.values():
        for name in SETUP:
            if len(values := {row.get(name) for row in panel.ours.values()}) > 1:
                raise ValueError(f"{panel.title}: one line of {name} {' and '.join(map(str, values))}")
    return sorted(found.values(), key=lambda panel: (not panel.peers, panel.ranks, panel.floor_ms[0]))


def at_once(rows: Sequence[Row], mixed: Mapping[str, Any]) -> list[AtOnce]:
    """In the peers' order; only models of which there is a row of ours. The last one counts."""
    found = []
    for key, peers in mixed.items():
        if match := re.fullmatch(r"all_at_once_(\d+)_seed(\d+)", key):
            for peer in _fair(peers):
                ours = _same_requests(rows, peer["model"], peer["tp"], *match.groups(), closed=False)
                if ours:
                    others = {_engine(name): peer[name] for name in peer if name.endswith(_RATE) and not _is_old(name)}
                    found.append(AtOnce(ours[-1]["model"], peer["tp"], {LOCKSTRIDE: ours[-1]["tok_s"], **others}))
    return found


def closed_loops(rows: Sequence[Row], mixed: Mapping[str, Any]) -> list[ClosedLoop]:
    """As ``at_once``."""
    found = []
    for key, peers in mixed.items():
        if match := re.fullmatch(r"closed_loop_(\d+)_seed(\d+)_(.+)_tp(\d+)", key):
            ours = _same_requests(rows, match[3], int(match[4]), match[1], match[2], closed=True)
            if ours:
                engines = {LOCKSTRIDE: {row["max_concurrency"]: _figures(row) for row in ours}}
                for peer in peers:
                    for name, figures in peer.items():
                        if isinstance(figures, dict) and not _is_old(name):
                            engines.setdefault(_engine(name), {})[peer["concurrency"]] = figures
                found.append(ClosedLoop(ours[-1]["model"], int(match[4]), engines))
    return found


def _fair(peers: Iterable[Row]) -> list[Row]:
    """Dummy weights of a sparse model send most tokens to a few experts in vLLM, and spread them here."""
    return [peer for peer in peers if not peer.get("not_the_same_work")]


def _same_requests(rows: Sequence[Row], model: str, ranks: int, count: str, seed: str, *, closed: bool) -> list[Row]:
    return [
        row
        for row in rows
        if (row["kind"], row.get("dataset"), row.get("request_rate")) == ("serve", "mixed", None)
        and (row["num_prompts"], row["seed"]) == (int(count), int(seed))
        and (row["tp"] * row.get("dp", 1), row["max_concurrency"] is not None) == (ranks, closed)
        and is_model(row["model"], model)
    ]


def _figures(row: Row) -> dict[str, float]:
    values = (row[f"{word}_{name}_ms"] for name in ("itl", "ttft") for word in ("median", "p99"))
    times = {name: value for name, value in zip((*ITL, *TTFT), values, strict=True) if value is not None}
    return {"out_tok_s": row["tok_s"], **times}


def _engine(name: str) -> str:
    """``vllm 0.25.1`` of ``vllm_0.25.1_out_tok_s``."""
    return name.removesuffix(_RATE).replace("_", " ", 1)


def _is_old(name: str) -> bool:
    """Whether it is a figure of Lockstride in the peers' file: ours come from docs/results."""
    return name.startswith("lockstride")


# ---- pictures ----


def tpot_picture(drawn: Sequence[Panel]) -> Figure:
    columns = min(len(drawn), COLUMNS)
    figure = _figure(columns, -(-len(drawn) // columns))
    for axes, panel in zip(grid(figure, len(drawn), columns), drawn, strict=True):
        _draw_panel(axes, panel)
    return figure


def mixed_picture(bars: Sequence[AtOnce], loops: Sequence[ClosedLoop]) -> Figure:
    count = 1 + 2 * len(loops)
    figure = _figure(count, 1)
    panels = iter(grid(figure, count, count))
    engines = dict.fromkeys(name for group in bars for name in group.tok_s)
    engines |= dict.fromkeys(name for loop in loops for name in loop.engines)
    colours = dict(zip(engines, (OURS, *PEERS * len(engines)), strict=False))
    _draw_bars(next(panels), bars, colours)
    for loop in loops:
        _draw_loop(next(panels), loop, colours, "inter-token latency", ITL)
        _draw_loop(next(panels), loop, colours, "time to first token", TTFT)
    return figure


def _figure(columns: int, lines: int) -> Figure:
    from matplotlib.figure import Figure  # here: a machine that only collects tests may lack it

    return Figure(figsize=(5.2 * columns, 4.2 * lines), layout="constrained")


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for colour, peer in zip(PEERS, panel.peers, strict=False):
        points = sorted((int(batch), ms) for batch, ms in peer["tpot_ms"].items())
        label = peer["engine"].partition("(")[0].strip()
        axes.plot(*zip(*points, strict=True), "o-", label=label, color=colour, linewidth=1.5, markersize=4)
    batches = sorted(panel.ours)
    ours = [panel.ours[batch]["tpot_ms"] for batch in batches]
    axes.plot(batches, ours, "o-", label=LOCKSTRIDE, color=OURS, linewidth=2.2, markersize=4)
    for batch, row in panel.ours.items():
        axes.vlines(batch, row["tpot_ms_min"], row["tpot_ms_max"], color=OURS)
    axes.plot(batches, panel.floor_ms, "--", label="roofline floor", color=FLOOR)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_title(panel.title, parse_math=False)
    axes.set_xlabel("batch")
    axes.set_ylabel("time per output token [ms]")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_bars(axes: Axes, bars: Sequence[AtOnce], colours: Mapping[str, str]) -> None:
    shown: set[str] = set()
    for place, group in enumerate(bars):
        width = 0.8 / len(group.tok_s)
        for number, (engine, rate) in enumerate(group.tok_s.items()):
            at = place + (number - (len(group.tok_s) - 1) / 2) * width
            label = None if engine in shown else engine
            bar = axes.bar(at, rate, 0.92 * width, color=colours[engine], label=label)
            axes.bar_label(bar, [f"{rate:,.0f}"], fontsize=8, rotation=90, padding=3)
            shown.add(engine)
    axes.set_xticks(range(len(bars)), [f"{group.model}\n{_gpus(group.ranks)}" for group in bars])
    axes.set_ylim(0, 1.3 * max(rate for group in bars for rate in group.tok_s.values()))
    axes.set_title("mixed load, all at once")
    axes.set_ylabel("output tokens/s")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)


def _draw_loop(
    axes: Axes, loop: ClosedLoop, colours: Mapping[str, str], words: str, percentiles: tuple[str, str]
) -> None:
    for engine, by_concurrency in loop.engines.items():
        for name, style, shown in zip(percentiles, ("o-", "o--"), ("p50", "p99"), strict=True):
            known = {most: row for most, row in sorted(by_concurrency.items()) if name in row}
            rates, times = [row["out_tok_s"] for row in known.values()], [row[name] for row in known.values()]
            axes.plot(rates, times, style, color=colours[engine], markersize=4, label=f"{engine} {shown}")
            if shown == "p99":
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the pictures [docs]")
    out = parser.parse_args().out
    peers = json.loads((DOCS / "peers.json").read_text())
    latency = read_rows(sorted((DOCS / "results").glob("qwen3-[0-9]*.points.jsonl")))
    load = read_rows([DOCS / "results" / "mixed-load.figures.jsonl"])
    out.mkdir(parents=True, exist_ok=True)
    tpot_picture(panels(latency, peers["results"])).savefig(out / "tpot.png", dpi=150)
    mixed = peers["mixed_load"]
    mixed_picture(at_once(load, mixed), closed_loops(load, mixed)).savefig(out / "mixed-load.png", dpi=150)
    print(out / "tpot.png", out / "mixed-load.png", sep="\n")


if __name__ == "__main__":
    main()
