"""`bench latency`: the time of a token at fixed batch sizes.

Knows: the fixed-batch protocol, what makes a run of it valid, and how runs become a point.
Does not know: how requests are driven (bench/trace.py), what a floor is made of (roofline.py).

fixed-batch: a batch of random prompts is admitted at once, twice: for one token and for n. Then
    TTFT = t(1),  TPOT = (t(n) - t(1)) / (n - 1),  median over runs.
    With speculation rows gain different numbers of tokens, so they end apart: TPOT is the time of a decode step while
    all rows ran, over the tokens that a row gained in one.
generation: whole answers only; TTFT and TPOT are medians over requests, TPOT = (last - first token) / (n - 1).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launch.bench.environment import device_name, engine_facts, environment
from launch.bench.point import Point
from launch.bench.profile import profiles
from launch.bench.results import vllm_figures
from launch.bench.roofline import Shape
from launch.bench.session import DeviceWindow, Session, StepTimings, startup_seconds
from launch.bench.speculation import Rounds, full_steps, rounds_between
from launch.bench.trace import RunTrace, check_complete, run_requests, why_not_full
from launch.bench.workload import random_prompts
from launch.generate.summary import groups_text
from runtime.engine import Engine
from runtime.frontend.client import EngineClient, PromptRequest

NO_RATE = 1  # exit code: at least one point was refused


@dataclass(frozen=True, slots=True)
class FixedBatchRun:
    """One run; times in seconds. ``refused``: why it gives no rate. ``device``: of the decode steps. ``rounds``: what
    speculation gained; ``round_s``: of a decode step of the full batch then."""

    ttft: float
    tpot: float
    refused: str | None
    chained_ratio: float
    device: DeviceWindow | None
    trace: RunTrace
    rounds: Rounds | None = None
    round_s: float | None = None


def latency(session: Session) -> int:
    """The subcommand, on every rank."""
    with session.together():
        return _measure(session)  # a call, so that nothing holds the engine when the ranks part


def _measure(session: Session) -> int:
    timings = StepTimings()
    with session.open(timings) as engine:
        if not engine.is_leader:
            engine.follow()
            return 0
        points = LatencyBench(session, engine, timings).run()
        engine.stop()
    return NO_RATE if any(point.refused for point in points) else 0


class LatencyBench:
    """The leader's side. ``run`` once."""

    def __init__(self, session: Session, engine: Engine, timings: StepTimings) -> None:
        self._session = session
        self._engine = engine
        self._timings = timings
        self._client = EngineClient(engine, text=False)
        self._startup_s: float | None = None
        self._files = session.files("latency")
        self._shape = Shape.from_folder(session.folder, session.kv_dtype)

    def run(self) -> list[Point]:
        session, options = self._session, self._session.options
        points = []
        with session.progress(len(options.batch_size) * (options.num_warmups + options.num_iters)) as bar:
            bar.write(heading(options.roofline))
            for batch in options.batch_size:
                prompts = self._prompts(batch)
                for _ in range(options.num_warmups):
                    self._run(prompts)
                    bar.update()
                runs = []
                for index in range(options.num_iters):
                    runs.append(self._run(prompts))
                    figures = vllm_figures(runs[-1].trace, session.model, batch)
                    self._files.run(f"b{batch}-run{index}", figures | run_figures(runs[-1]), runs[-1].trace)
                    bar.update()
                points.append(self._point(batch, runs))
                self._files.point(points[-1])
                bar.write(table_row(points[-1], options.roofline))
                if runs[-1].rounds is not None:
                    bar.write(round_text(points[-1], runs[-1].rounds, options.roofline))
            speculates = session.config.speculation is not None
            bar.write(SPECULATION_LEGEND if speculates else LEGENDS[options.protocol])
            if groups := groups_text(self._engine.counters):
                bar.write(f"groups, warm-up included: {groups}")
            if options.profile:  # last: what is timed after a profiler has run may be slower
                for tables in profiles(self._engine, self._client, points, self._prompts, self._files):
                    bar.write(tables)
        return points

    def _prompts(self, batch: int) -> list[PromptRequest]:
        lengths, engine = self._session.lengths, self._engine
        return random_prompts(batch, lengths.prompt, lengths.output, engine.model_config.vocab_size, engine.config.seed)

    def _run(self, prompts: Sequence[PromptRequest]) -> FixedBatchRun:
        ttft = None
        if self._session.options.protocol == "fixed-batch":
            ttft = self._traced(prompts, max_tokens=1).seconds
        self._timings.clear()
        before = self._engine.counters
        trace = self._traced(prompts)
        after = self._engine.counters
        steps = self._session.lengths.output - 1
        rounds = rounds_between(self._session.config, before, after)
        if rounds is not None:
            return self._speculated(rounds, ttft, trace, before, after, len(prompts))
        whole = statistics.median(times.ttft for times in trace.requests.values())
        tpot = _token_time(trace) if ttft is None else (trace.seconds - ttft) / max(1, steps)
        return FixedBatchRun(
            ttft=whole if ttft is None else ttft,
            tpot=tpot,
            refused=why_not_full(trace, len(prompts), steps) or _why_noise(tpot, ttft or 0.0, trace.seconds, steps),
            chained_ratio=(after["chained_steps"] - before["chained_steps"]) / (after["steps"] - before["steps"]),
            device=self._timings.of(trace.decode_steps),
            trace=trace,
        )

    def _speculated(
        self,
        rounds: Rounds,
        ttft: float | None,
        trace: RunTrace,
        before: Mapping[str, int | float],
        after: Mapping[str, int | float],
        rows: int,
    ) -> FixedBatchRun:
        """Rows gain different numbers of tokens, so they end apart: what counts is the time while all of them ran."""
        full = full_steps(trace.decode_steps, rows)
        whole = statistics.median(times.ttft for times in trace.requests.values())
        return FixedBatchRun(
            ttft=whole if ttft is None else ttft,
            tpot=0.0 if full.refused else full.step_s / full.tokens,
            refused=full.refused,
            chained_ratio=(after["chained_steps"] - before["chained_steps"]) / (after["steps"] - before["steps"]),
            device=self._timings.of(trace.decode_steps),
            trace=trace,
            rounds=rounds,
            round_s=None if full.refused else full.step_s,
        )

    def _traced(self, requests: Sequence[PromptRequest], max_tokens: int | None = None) -> RunTrace:
        trace = run_requests(self._client, requests, max_tokens=max_tokens)
        check_complete(trace)
        if self._startup_s is None:
            self._startup_s = startup_seconds(min(times.landings[0][0] for times in trace.requests.values()))
            facts = engine_facts(self._engine)
            self._files.environment(environment(self._session.config, self._session.rendezvous, facts))  # a second
        return trace

    def _point(self, batch: int, runs: Sequence[FixedBatchRun]) -> Point:
        session = self._session
        refused = next((run.refused for run in runs if run.refused), None)
        tpots = [] if refused else [run.tpot for run in runs]
        tpot = statistics.median(tpots) if tpots else None
        idle = [run.device.idle_fraction for run in runs if run.device is not None]
        floor = session.floor(self._shape, batch, session.lengths.average)
        of_round = session.round_floor(self._shape, batch, session.lengths.average)
        speculation = session.config.speculation
        lengths = [run.rounds.accepted_length for run in runs if run.rounds is not None and run.rounds.rounds]
        rounds = [run.round_s for run in runs if run.round_s is not None]
        return Point(
            hw=device_name(session.config.device),
            kind="latency",
            model=session.model,
            precision=session.precision,
            tp=session.config.tensor_parallel,
            ep=session.expert_parallel,
            dp=session.config.data_parallel,
            batch=batch,
            input_len=session.lengths.prompt,
            output_len=session.lengths.output,
            chain_depth=self._engine.scheduler.config.limits.depth,
            runs=len(runs),
            refused=refused,
            tpot_ms=None if tpot is None else tpot * 1e3,
            tpot_ms_min=min(tpots) * 1e3 if tpots else None,
            tpot_ms_max=max(tpots) * 1e3 if tpots else None,
            ttft_s=statistics.median(run.ttft for run in runs),
            tok_s=None if tpot is None else batch / tpot,
            tok_s_per_gpu=None if tpot is None else batch / tpot / session.ranks,
            tok_s_per_user=None if tpot is None else 1 / tpot,
            roofline_floor_ms=floor.seconds * 1e3,
            roofline_fraction=None if tpot is None or speculation else floor.seconds / tpot,  # of one token a step
            bandwidth_fraction=None
            if tpot is None or speculation
            else floor.bytes / tpot / session.options.bytes_per_s,
            chained_ratio=statistics.median(run.chained_ratio for run in runs),
            device_idle=statistics.median(idle) if idle else None,
            startup_s=self._startup_s,
            speculation=None if speculation is None else speculation.label,
            num_speculative_tokens=None if speculation is None else speculation.num_speculative_tokens,
            accepted_length=statistics.median(length for length in lengths if length) if lengths else None,
            round_ms=statistics.median(rounds) * 1e3 if rounds and not refused else None,
            round_floor_ms=None if of_round is None else of_round.seconds * 1e3,
        )


def run_figures(run: FixedBatchRun) -> dict[str, Any]:
    """What the protocol adds to a run's figures under vLLM's names."""
    return {
        "protocol_ttft_s": run.ttft,
        "protocol_tpot_ms": None if run.refused else run.tpot * 1e3,
        "refused": run.refused,
        "chained_ratio": run.chained_ratio,
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


def _token_time(trace: RunTrace) -> float:
    tpots = [times.tpot for times in trace.requests.values() if times.tpot is not None]
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
