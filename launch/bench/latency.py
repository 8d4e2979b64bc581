"""`bench latency`: the time of a token at fixed batch sizes.

Knows: the fixed-batch protocol, what makes a run of it valid, and its table.
Does not know: the loop and the row of a point (batches.py), what a floor is made of (roofline.py).

fixed-batch: a batch of random prompts is admitted at once, twice: for one token and for n. Then
    TTFT = t(1),  TPOT = (t(n) - t(1)) / (n - 1),  median over runs.
    With speculation rows gain different numbers of tokens, so they end apart: TPOT is the time of a decode step while
    all rows ran, over the tokens that a row gained in one.
generation: whole answers only; TTFT and TPOT are medians over requests, TPOT = (last - first token) / (n - 1).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from launch.bench.batches import NO_RATE, BatchBench, BatchRun
from launch.bench.load.figures import batch_figures
from launch.bench.load.journal import Journal
from launch.bench.load.steady import why_not_full
from launch.bench.options import LatencyOptions
from launch.bench.point import Point
from launch.bench.profile import profiles
from launch.bench.session import Session, StepTimings
from launch.bench.speculation import Rounds, full_steps, rounds_between
from launch.bench.workload import random_prompts
from launch.generate.summary import groups_text
from runtime.engine import Engine


def latency(session: Session, options: LatencyOptions) -> int:
    """The subcommand, on every rank."""

    def measure(engine: Engine, timings: StepTimings) -> int:
        bench = BatchBench(session, options, "latency", engine, timings, len(options.batch_size))
        with bench.bar:
            points = _measured(bench, options)
        return NO_RATE if any(point.refused for point in points) else 0

    return session.lead(measure)


def _measured(bench: BatchBench, options: LatencyOptions) -> list[Point]:
    write, points = bench.bar.write, list[Point]()
    write(heading(options.roofline))
    for batch in options.batch_size:
        one = _FixedBatch(bench, options, batch)
        runs = bench.runs(f"b{batch}-", one.run, one.figures)
        points.append(one.point(runs))
        write(table_row(points[-1], options.roofline))
        if runs[-1].rounds is not None:
            write(round_text(points[-1], runs[-1].rounds, options.roofline))
    speculates = bench.session.config.speculation is not None
    write(SPECULATION_LEGEND if speculates else LEGENDS[options.protocol])
    if groups := groups_text(bench.engine.counters):
        write(f"groups, warm-up included: {groups}")
    if options.profile:  # last: what is timed after a profiler has run may be slower
        batches = [(point, _FixedBatch(bench, options, point.batch).prompts) for point in points]
        for tables in profiles(bench.engine, batches, bench.files):
            write(tables)
    return points


class _FixedBatch:
    """One batch size: its prompts, its runs and their point."""

    def __init__(self, bench: BatchBench, options: LatencyOptions, batch: int) -> None:
        self._bench, self._options, self._batch = bench, options, batch
        lengths, vocab_size = options.lengths, bench.engine.model_config.vocab_size
        self.prompts = random_prompts(batch, lengths.prompt, lengths.output, vocab_size, bench.engine.config.seed)

    def run(self, _: int) -> BatchRun:
        bench, rows, ttft = self._bench, self._batch, None
        if self._options.protocol == "fixed-batch":
            ttft = bench.journal(self.prompts, max_tokens=1).seconds
        journal = bench.journal(self.prompts)
        device = bench.timings.of(journal.decode_steps)
        shown = statistics.median(one.ttft for one in journal.requests) if ttft is None else ttft
        rounds = rounds_between(bench.session.config, journal.before, journal.after)
        if rounds is not None:
            full = full_steps(journal.decode_steps, rows)
            tpot, round_s = (None, None) if full.refused else (full.step_s / full.tokens, full.step_s)
            return BatchRun(journal, shown, tpot, full.refused, device, rounds, round_s)
        steps = self._options.output_len - 1
        tpot = _token_time(journal) if ttft is None else (journal.seconds - ttft) / max(1, steps)
        refused = why_not_full(journal.decode_steps, rows, steps)
        return BatchRun(journal, shown, tpot, refused or _why_noise(tpot, ttft or 0.0, journal.seconds, steps), device)

    def figures(self, run: BatchRun) -> dict[str, Any]:
        return batch_figures(run.journal, self._bench.session.model, self._batch) | run_figures(run)

    def point(self, runs: Sequence[BatchRun]) -> Point:
        refused = next((run.refused for run in runs if run.refused), None)
        lengths = [run.rounds.accepted_length for run in runs if run.rounds is not None and run.rounds.rounds]
        return self._bench.point(
            runs,
            self._batch,
            self._options.lengths,
            tok_s=None if refused else self._batch / statistics.median(run.tpot for run in runs if run.tpot),
            refused=refused,
            chained=statistics.median(run.journal.chained for run in runs),
            accepted_length=statistics.median(length for length in lengths if length) if lengths else None,
        )


def run_figures(run: BatchRun) -> dict[str, Any]:
    """What the protocol adds to a run's figures under vLLM's names."""
    return {
        "protocol_ttft_s": run.ttft,
        "protocol_tpot_ms": None if run.refused else _ms(run.tpot),
        "refused": run.refused,
        "chained_ratio": run.journal.chained,
        "device": None if run.device is None else asdict(run.device),
    } | ({} if run.rounds is None else run.rounds.figures() | {"round_ms": _ms(run.round_s)})


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _shown(milliseconds: float | None) -> str:
    return "n/a" if milliseconds is None else f"{milliseconds:.4f}"


def _why_noise(tpot: float, short_s: float, long_s: float, steps: int) -> str | None:
    """Why the difference of two runs says nothing: the longer answer did not take longer."""
    if tpot > 0 or steps == 0:
        return None
    return f"one token took {short_s:.4f} s and {steps + 1} took {long_s:.4f} s: something else kept the machine busy"


def _token_time(journal: Journal) -> float:
    tpots = [one.tpot for one in journal.requests if one.tpot is not None]
    return statistics.median(tpots) if tpots else 0.0


_COLUMNS = (
    ("batch", 5),
    ("TPOT ms", 9),
    ("min .. max", 19),
    ("TTFT s", 8),
    ("tok/s", 9),
    ("tok/s/GPU", 9),
    ("tok/s/user", 10),
    ("chained", 7),
    ("idle", 6),
    ("startup s", 9),
)
LEGENDS = {
    "fixed-batch": "TTFT = t(1), TPOT = (t(n) - t(1)) / (n - 1), t(n): until all have n tokens; medians over runs",
    "generation": "TTFT, and TPOT = (last token - first token) / (n - 1), are medians over requests, then over runs",
}
SPECULATION_LEGEND = (
    "TTFT = t(1); TPOT = round / tokens a row gained in one, over the decode steps of the full batch; medians over runs"
)
_FLOOR_COLUMNS = (("floor ms", 9), ("of floor", 8), ("of bytes/s", 10))


def heading(roofline: bool) -> str:
    """The head of the table."""
    return "  ".join(name.rjust(width) for name, width in _columns(roofline))


def table_row(point: Point, roofline: bool) -> str:
    """One point as a row of the table; a refused one says why instead."""
    if point.refused or point.tpot_ms is None:
        return f"{point.batch:5}  no rate: {point.refused}"
    cells = [
        f"{point.batch}",
        f"{point.tpot_ms:.4f}",
        f"{point.tpot_ms_min:.4f} .. {point.tpot_ms_max:.4f}",
        f"{point.ttft_s:.4f}",
        f"{point.tok_s:.1f}",
        f"{point.tok_s_per_gpu:.1f}",
        f"{point.tok_s_per_user:.2f}",
        _percent(point.chained_ratio),
        _percent(point.device_idle),
        f"{point.startup_s:.1f}",
    ]
    if roofline:
        cells.append(f"{point.roofline_floor_ms:.4f}")
        cells += [_percent(point.roofline_fraction), _percent(point.bandwidth_fraction)]
    columns = _columns(roofline)
    return "  ".join(cell.rjust(width) for cell, (_, width) in zip(cells, columns, strict=True))


def round_text(point: Point, rounds: Rounds, roofline: bool) -> str:
    """What a round took and gained; with ``roofline`` its floor, and the share of it where all steps were rounds."""
    words = f"       round {_shown(point.round_ms)} ms"
    if roofline and point.round_floor_ms is not None and point.roofline_floor_ms:
        words += f", floor {point.round_floor_ms:.4f} ms"
        if point.round_ms is not None and rounds.rounds and not rounds.off:
            words += f" ({point.round_floor_ms / point.round_ms:.1%} of it reached)"
        words += f", {point.round_floor_ms / point.roofline_floor_ms:.2f} floors of a plain step"
    return f"{words}; {rounds.text()}"


def _columns(roofline: bool) -> tuple[tuple[str, int], ...]:
    return (*_COLUMNS, *_FLOOR_COLUMNS) if roofline else _COLUMNS


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}"
