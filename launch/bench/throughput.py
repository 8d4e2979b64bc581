"""`bench throughput`: a dataset through the engine as fast as it goes.

Knows: which part of a run is saturated, and how runs become a point.
Does not know: what a dataset looks like (workload.py), how requests are driven (bench/trace.py).

The figures under vLLM's names are over a whole run, its ramp and its tail included. The point's rate is that of the
saturated part: from when as many requests as there are rows have a token, until fewer than that are left. No run finds
the prompts of an earlier one in the prefix cache: each has other token ids.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launch.bench.environment import device_name, engine_facts, environment
from launch.bench.latency import NO_RATE
from launch.bench.load.datasets import LoadSet, id_range
from launch.bench.point import Point
from launch.bench.results import vllm_figures
from launch.bench.roofline import Shape
from launch.bench.session import Session, StepTimings, startup_seconds
from launch.bench.speculation import Rounds, rounds_between
from launch.bench.trace import RunTrace, check_complete, run_requests
from launch.bench.workload import dataset
from launch.errors import UsageError
from launch.generate.summary import groups_text
from models.config import ModelConfig
from runtime.engine import Engine
from runtime.frontend.client import EngineClient

NEARLY_FULL = 0.9  # of the rows, in the median decode step: ends and admissions always leave a few empty


def throughput(session: Session) -> int:
    """The subcommand, on every rank."""
    prompts = _prompts(session) if session.is_leader else LoadSet((), range(0))
    with session.together():
        return _measure(session, prompts)  # a call, so that nothing holds the engine when the ranks part


def _prompts(session: Session) -> LoadSet:
    """Raises UsageError, TokenizerError or BenchError."""
    prompts, name, runs = dataset(session), session.options.dataset_name, session.options.num_iters
    drawn = name == "random"
    if runs > 1 and not drawn and session.config.prefix_caching:
        raise UsageError(
            f"--dataset-name {name} has prompts of its own, so the prefix cache would have those of the {runs} runs "
            "from the second on: type --no-prefix-caching, or --num-iters 1"
        )
    return LoadSet(prompts, id_range(ModelConfig.from_folder(session.folder).vocab_size), drawn=drawn)


def _measure(session: Session, prompts: LoadSet) -> int:
    timings = StepTimings()
    with session.open(timings) as engine:
        if not engine.is_leader:
            engine.follow()
            return 0
        point = ThroughputBench(session, engine, timings, prompts).run()
        engine.stop()
    return NO_RATE if point.refused else 0


@dataclass(frozen=True, slots=True)
class Saturation:
    """The saturated part of a run: generated tokens a second in it, or why there is none."""

    tok_s: float = 0.0
    refused: str | None = None


def saturation(trace: RunTrace, rows: int) -> Saturation:
    """``rows``: requests that can run at once."""
    count = len(trace.requests)
    if count <= rows:
        return Saturation(refused=f"{count} requests never wait for one of {rows} rows: type --num-prompts {4 * rows}")
    begin = sorted(times.landings[0][0] for times in trace.requests.values())[rows - 1]
    end = trace.ends[count - rows]
    if end <= begin:
        return Saturation(refused=f"requests ended before {rows} of them ran together: ask for longer answers")
    full = [decode.rows for decode in trace.decode_steps if begin < decode.at <= end]
    if not full or statistics.median(full) < NEARLY_FULL * rows:
        found = statistics.median(full) if full else 0
        return Saturation(refused=f"the batch was not full: {found:g} of {rows} rows in the median decode step")
    landings = (landing for times in trace.requests.values() for landing in times.landings)
    tokens = sum(count for at, count in landings if begin < at <= end)
    return Saturation(tokens / (end - begin))


class ThroughputBench:
    """The leader's side. ``run`` once."""

    def __init__(self, session: Session, engine: Engine, timings: StepTimings, prompts: LoadSet) -> None:
        self._session = session
        self._engine = engine
        self._timings = timings
        self._prompts = prompts
        self._client = EngineClient(engine, text=False, concurrency=session.options.max_concurrency)
        self._rows = min(engine.config.running_seqs, session.options.max_concurrency or engine.config.running_seqs)
        self._startup_s: float | None = None

    def run(self) -> Point:
        session, options = self._session, self._session.options
        files = session.files("throughput")
        traces: list[RunTrace] = []
        figures: list[dict[str, Any]] = []
        idle: list[float] = []
        with session.progress(options.num_warmups + options.num_iters) as bar:
            for index in range(options.num_warmups):
                self._run(-1 - index)
                bar.update()
            before = self._engine.counters
            for index in range(options.num_iters):
                traces.append(self._run(index))
                figures.append(vllm_figures(traces[-1], session.model, options.max_concurrency))
                files.run(f"run{index}", figures[-1], traces[-1])
                whole = self._timings.whole
                idle += [] if whole is None else [whole.idle_fraction]
                bar.update()
            after = self._engine.counters
        files.environment(environment(session.config, session.rendezvous, engine_facts(self._engine)))
        chained = (after["chained_steps"] - before["chained_steps"]) / (after["steps"] - before["steps"])
        rounds = rounds_between(session.config, before, after)
        point = self._point(traces, figures, chained, statistics.median(idle) if idle else None, rounds)
        files.point(point)
        print(report(figures, point), flush=True)
        if rounds is not None:
            print(f"{'speculation':<24}{rounds.text()}", flush=True)
        if groups := groups_text(after):
            print(f"{'groups, with warm-up':<24}{groups}", flush=True)
        return point

    def _run(self, turn: int) -> RunTrace:
        """``turn``: 0 has the dataset's own ids, every other one ids of its own where they are drawn."""
        prompts = self._prompts
        requests = prompts.with_other_ids(turn) if prompts.drawn or turn < 0 else prompts.requests
        self._timings.clear()
        trace = run_requests(self._client, requests)
        check_complete(trace)
        if self._startup_s is None:
            self._startup_s = startup_seconds(min(times.landings[0][0] for times in trace.requests.values()))
        return trace

    def _point(
        self,
        traces: Sequence[RunTrace],
        figures: Sequence[dict[str, Any]],
        chained: float,
        idle: float | None,
        rounds: Rounds | None,
    ) -> Point:
        session, rows = self._session, self._rows
        parts = [saturation(trace, rows) for trace in traces]
        refused = next((part.refused for part in parts if part.refused), None)
        rate = None if refused else statistics.median(part.tok_s for part in parts)
        tpots = [run["median_tpot_ms"] for run in figures if run["median_tpot_ms"] is not None and not refused]
        lengths = None if session.options.dataset_name != "random" else session.lengths
        floor = None
        if lengths is not None:
            floor = session.floor(Shape.from_folder(session.folder, session.kv_dtype), rows, lengths.average)
        step_s = None if rate is None else rows / rate  # of a full batch, the prefill of its successors included
        return Point(
            hw=device_name(session.config.device),
            kind="throughput",
            model=session.model,
            precision=session.precision,
            tp=session.config.tensor_parallel,
            ep=session.expert_parallel,
            dp=session.config.data_parallel,
            batch=rows,
            input_len=None if lengths is None else lengths.prompt,
            output_len=None if lengths is None else lengths.output,
            chain_depth=self._engine.scheduler.config.limits.depth,
            runs=len(traces),
            refused=refused,
            tpot_ms=statistics.median(tpots) if tpots else None,
            tpot_ms_min=min(tpots) if tpots else None,
            tpot_ms_max=max(tpots) if tpots else None,
            ttft_s=statistics.median(run["median_ttft_ms"] for run in figures) / 1e3,
            tok_s=rate,
            tok_s_per_gpu=None if rate is None else rate / session.ranks,
            tok_s_per_user=None if rate is None else rate / rows,
            roofline_floor_ms=None if floor is None else floor.seconds * 1e3,
            roofline_fraction=None if floor is None or step_s is None or rounds else floor.seconds / step_s,
            bandwidth_fraction=None
            if floor is None or step_s is None or rounds
            else floor.bytes / step_s / session.options.bytes_per_s,
            chained_ratio=chained,
            device_idle=idle,
            startup_s=self._startup_s,
            speculation=None if rounds is None else rounds.label,
            num_speculative_tokens=None if rounds is None else rounds.num_speculative_tokens,
            accepted_length=None if rounds is None else rounds.accepted_length,
        )


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
