"""`bench throughput`: a dataset through the engine as fast as it goes.

Knows: which part of a run is saturated, and its report.
Does not know: what a dataset looks like (load/datasets.py), the loop and the row of a point (batches.py).

The figures under vLLM's names are over a whole run, its ramp and its tail included. The point's rate is that of the
saturated part: from when as many requests as there are rows have a token, until fewer than that are left. No run finds
the prompts of an earlier one in the prefix cache: each has other token ids.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launch.bench.batches import NO_RATE, BatchBench, BatchRun
from launch.bench.load.datasets import LoadSet, batch_set
from launch.bench.load.figures import batch_figures, portions
from launch.bench.load.generator import refuse_cached
from launch.bench.load.journal import Journal
from launch.bench.load.steady import Window
from launch.bench.options import ThroughputOptions
from launch.bench.point import Point
from launch.bench.session import Session, StepTimings
from launch.bench.speculation import rounds_between
from launch.generate.summary import groups_text
from runtime.engine import Engine

NEARLY_FULL = 0.9  # of the rows, in the median decode step: ends and admissions always leave a few empty


def throughput(session: Session, options: ThroughputOptions) -> int:
    """The subcommand, on every rank. Raises UsageError, TokenizerError or BenchError."""
    prompts = LoadSet((), range(0))
    if session.is_leader:
        prompts = batch_set(options, session.served_model, session.folder, session.config.seed)
        if session.config.prefix_caching:
            refuse_cached(options.dataset_name, prompts, options.num_iters, "--num-iters 1")

    def measure(engine: Engine, timings: StepTimings) -> int:
        bench = BatchBench(session, options, "throughput", engine, timings)
        with bench.bar:
            point = _measured(bench, options, prompts)
        return NO_RATE if point.refused else 0

    return session.lead(measure)


@dataclass(frozen=True, slots=True)
class Saturation:
    """The saturated part of a run: generated tokens a second in it, or why there is none."""

    tok_s: float = 0.0
    refused: str | None = None


def saturation(journal: Journal, rows: int) -> Saturation:
    """``rows``: requests that can run at once."""
    count, ends = len(journal.requests), sorted(one.ended for one in journal.requests)
    if count <= rows:
        return Saturation(refused=f"{count} requests never wait for one of {rows} rows: type --num-prompts {4 * rows}")
    begin = sorted(one.moments[0] for one in journal.requests)[rows - 1]
    end = ends[count - rows]
    if end <= begin:
        return Saturation(refused=f"requests ended before {rows} of them ran together: ask for longer answers")
    full = [decode.rows for decode in journal.decode_steps if begin < decode.at <= end]
    if not full or statistics.median(full) < NEARLY_FULL * rows:
        found = statistics.median(full) if full else 0
        return Saturation(refused=f"the batch was not full: {found:g} of {rows} rows in the median decode step")
    window = Window(begin, end)
    return Saturation(sum(count for _, count in portions(journal.requests, window)) / window.seconds)


def _measured(bench: BatchBench, options: ThroughputOptions, prompts: LoadSet) -> Point:
    session, rows = bench.session, bench.engine.config.running_seqs
    rows = min(rows, options.max_concurrency or rows)
    parts: list[Saturation] = []

    def run(turn: int) -> BatchRun:
        """``turn``: 0 has the dataset's own ids, every other one other ids where they are drawn."""
        requests = prompts.with_other_ids(turn) if prompts.drawn or turn < 0 else prompts.requests
        journal = bench.journal(requests, most=options.max_concurrency)
        if turn >= 0:
            parts.append(saturation(journal, rows))
        ttft = statistics.median(one.ttft for one in journal.requests)
        tpots = [one.tpot for one in journal.requests if one.tpot is not None]
        tpot = statistics.median(tpots) if tpots else None
        return BatchRun(journal, ttft, tpot, None, bench.timings.whole)

    def figures(run: BatchRun) -> dict[str, Any]:
        return batch_figures(run.journal, session.model, options.max_concurrency)

    runs = bench.runs("", run, figures)
    refused = next((part.refused for part in parts if part.refused), None)
    whole = Journal(0.0, 0.0, (), before=runs[0].journal.before, after=runs[-1].journal.after)
    rounds = rounds_between(session.config, whole.before, whole.after)
    point = bench.point(
        runs,
        rows,
        options.lengths,
        tok_s=None if refused else statistics.median(part.tok_s for part in parts),
        refused=refused,
        chained=whole.chained,
        accepted_length=None if rounds is None else rounds.accepted_length,
    )
    print(report([figures(run) for run in runs], point), flush=True)
    if rounds is not None:
        print(f"{'speculation':<24}{rounds.text()}", flush=True)
    if groups := groups_text(whole.after):
        print(f"{'groups, with warm-up':<24}{groups}", flush=True)
    return point


def report(figures: Sequence[dict[str, Any]], point: Point) -> str:
    """For a person to read: each figure's median over the runs, and its spread."""
    lines = [f"{'runs':<24}{len(figures)}"]
    for name in ("completed", "failed", "total_input", "total_output"):
        lines.append(f"{name:<24}{figures[0][name]}")
    for name in ("request_throughput", "output_throughput", "total_token_throughput", *_TIMES):
        values = [run[name] for run in figures if run[name] is not None]
        if values:
            spread = f"{min(values):.2f} .. {max(values):.2f}"
            lines.append(f"{name:<24}{statistics.median(values):.2f}  ({spread})")
    if point.tok_s is None:
        lines.append(f"{'saturated tok/s':<24}no rate: {point.refused}")
    else:
        per = f"{point.tok_s_per_gpu:.1f} a GPU, {point.tok_s_per_user:.2f} a user of {point.batch}"
        lines.append(f"{'saturated tok/s':<24}{point.tok_s:.1f}  ({per})")
        if point.roofline_fraction is not None:
            lines.append(f"{'share of the floor':<24}{point.roofline_fraction:.1%}")
    return "\n".join(lines)


_TIMES = tuple(f"{word}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for word in ("mean", "median", "p99"))
