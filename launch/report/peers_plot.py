"""`bench plot`: TPOT against batch, from result files: Lockstride, other engines, and the floor.

Knows: the flat rows of results.py, the format of a file of peers' figures. Does not know: how they were measured.
Needs matplotlib (the extra ``plot``), imported only here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from launch.bench.options import BenchOptions
from launch.errors import UsageError
from launch.report.axes import grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, _FLOOR, PEERS = "#0b6e4f", "#888888", ("#c8553d", "#4c5fd7", "#b08900", "#7b3f99")
_COLUMNS = 3  # panels beside each other: more cannot be read where a page shows the picture


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What a plot needs of a flat row."""

    hw: str
    kind: str
    model: str
    tp: int
    dp: int = 1
    batch: int
    tpot_ms: float | None
    tpot_ms_min: float | None = None
    tpot_ms_max: float | None = None
    roofline_floor_ms: float | None = None
    precision: str = ""
    input_len: int | None = None
    output_len: int | None = None
    speculation: str | None = None
    num_speculative_tokens: int | None = None

    @property
    def setup(self) -> tuple[str, ...]:
        """What points of one line have in common beside model and ranks, in words. Their chain depth may differ: an
        engine chooses it where nobody does."""
        lengths = "" if self.input_len is None else f"{self.input_len}/{self.output_len} tokens"
        guesses = (
            "no speculation" if self.speculation is None else f"{self.speculation}, k = {self.num_speculative_tokens}"
        )
        return (self.precision, lengths, guesses)


class PeerResult(msgspec.Struct, frozen=True):
    """One engine's figures for one model: milliseconds by batch."""

    engine: str
    model: str
    tp: int
    tpot_ms: dict[int, float]
    roofline_floor_ms: dict[int, float] = {}


class Peers(msgspec.Struct, frozen=True):
    """A file of peers' figures."""

    results: list[PeerResult]


@dataclass(slots=True)
class Panel:
    """One model on one number of ranks, in ``dp`` groups of ``tp``; points by batch. ``note``: the words of its points'
    setup that tell it from other panels of these."""

    model: str
    tp: int
    dp: int = 1
    note: str = ""
    ours: dict[int, Row] = field(default_factory=dict)
    peers: list[PeerResult] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def floor_ms(self) -> dict[int, float]:
        """By batch, ascending: as our results say, and as the peers' file does where we have none."""
        floor = {batch: value for peer in self.peers for batch, value in peer.roofline_floor_ms.items()}
        floor |= {batch: row.roofline_floor_ms for batch, row in self.ours.items() if row.roofline_floor_ms is not None}
        return dict(sorted(floor.items()))


def plot(options: BenchOptions) -> int:
    """The subcommand. Raises UsageError when a file is missing or is not what it should be."""
    peers = [] if options.peers is None else _decoded(options.peers, Peers).results
    drawn = panels(read_rows(options.results), peers)
    if not drawn:
        raise UsageError(f"no latency point with a rate in {', '.join(map(str, options.results))}")
    _draw(drawn, options.out)
    print(options.out)
    return 0


def read_rows(results: Sequence[Path]) -> list[Row]:
    """The latency points that have a rate, oldest file first. Raises UsageError."""
    rows: list[Row] = []
    for path in result_files(results):
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                rows.append(msgspec.json.decode(line, type=Row))
            except msgspec.DecodeError as error:
                raise UsageError(f"{path}, line {number} is no flat row of bench: {error}") from None
    return [row for row in rows if row.kind == "latency" and row.tpot_ms is not None]


def panels(rows: Iterable[Row], peers: Sequence[PeerResult]) -> list[Panel]:
    """One for each model, way to share it, hardware and setup that was measured; of points measured again the latest
    counts.

    Those that peers have figures for come first, then fewer ranks, then the smaller floor.
    """
    found: dict[tuple[str, int, int, str], dict[tuple[str, ...], Panel]] = {}
    for row in rows:
        alike = found.setdefault((row.model, row.tp, row.dp, row.hw), {})
        alike.setdefault(row.setup, Panel(row.model, row.tp, row.dp)).ours[row.batch] = row
    for alike in found.values():
        for setup, panel in alike.items():
            panel.note = ", ".join(
                word for word, *others in zip(setup, *alike, strict=True) if len({*others}) > 1 and word
            )
    drawn = [panel for alike in found.values() for panel in alike.values()]
    for panel in drawn:
        panel.peers = [peer for peer in peers if peer.tp == panel.ranks and is_model(panel.model, peer.model)]
    return sorted(drawn, key=lambda p: (not p.peers, p.ranks, min(p.floor_ms.values(), default=0.0)))


def is_model(folder: str, size: str) -> bool:
    """Whether a model folder's name, such as ``qwen3-8b``, is of the size that peers call ``8B``."""
    return folder.lower() == size.lower() or folder.lower().endswith(f"-{size.lower()}")


def result_files(results: Sequence[Path]) -> list[Path]:
    """Files as given, folders as the files of points in them, by the time in their names."""
    files: list[Path] = []
    for path in results:
        if path.is_dir():
            files += sorted(path.glob("*.points.jsonl"), key=lambda file: file.name.rpartition("-")[2])
        elif path.is_file():
            files.append(path)
        else:
            raise UsageError(f"{path}: there is no such result file or folder")
    return files


def _decoded(path: Path, kind: type[Peers]) -> Peers:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind, strict=False)  # batches are keys, so texts
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"--peers {path} cannot be read: {error}") from None


def figure_for(out: Path, columns: int, lines: int) -> Figure:
    """Empty, for so many panels. Raises UsageError without matplotlib, or where ``out`` ends as no picture does."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("plots need matplotlib: pip install 'lockstride[plot]'") from None
    figure = Figure(figsize=(5.2 * columns, 4.2 * lines), layout="constrained")
    if out.suffix.removeprefix(".") not in figure.canvas.get_supported_filetypes():
        raise UsageError(f"--out {out}: pictures end in .png, .svg or .pdf")
    return figure


def _draw(drawn: Sequence[Panel], out: Path) -> None:
    columns = min(len(drawn), _COLUMNS)
    figure = figure_for(out, columns, -(-len(drawn) // columns))
    for axes, panel in zip(grid(figure, len(drawn), columns), drawn, strict=True):
        _draw_panel(axes, panel)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for colour, peer in zip(PEERS, panel.peers, strict=False):
        _line(axes, dict(sorted(peer.tpot_ms.items())), label=peer.engine.partition("(")[0].strip(), color=colour)
    ours = {batch: row.tpot_ms for batch, row in sorted(panel.ours.items()) if row.tpot_ms is not None}
    _line(axes, ours, label="Lockstride", color=OURS, linewidth=2.2)
    for batch, row in panel.ours.items():
        if row.tpot_ms_min is not None and row.tpot_ms_max is not None:
            axes.vlines(batch, row.tpot_ms_min, row.tpot_ms_max, color=OURS)
    if panel.floor_ms:
        axes.plot(*zip(*panel.floor_ms.items(), strict=True), "--", label="roofline floor", color=_FLOOR)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(panel.ours), [str(batch) for batch in sorted(panel.ours)])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    hardware = next(iter(panel.ours.values())).hw
    groups = f", {panel.dp} groups" if panel.dp > 1 else ""
    note = f"\n{panel.note}" if panel.note else ""
    axes.set_title(f"{panel.model}, {panel.ranks} x {hardware}{groups}{note}", parse_math=False)
    axes.set_xlabel("batch")
    axes.set_ylabel("time per output token [ms]")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _line(axes: Axes, points: Mapping[int, float], *, label: str, color: str, linewidth: float = 1.5) -> None:
    axes.plot(list(points), list(points.values()), "o-", label=label, color=color, linewidth=linewidth, markersize=4)
