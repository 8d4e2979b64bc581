"""`bench serve`: latency and throughput under real load, of an engine of this process or of a server.

Knows: the order of work, what is kept of a point of rate and concurrency, what is printed.
Does not know: how load is made (load/generator.py), what a figure means (load/figures.py), how a picture is drawn.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from launch.bench.environment import device_name, engine_facts, environment
from launch.bench.load.client_process import ClientProcesses, ServerAddress
from launch.bench.load.engine_backend import EngineBackend
from launch.bench.load.figures import (
    METRICS,
    detail_lists,
    engine_figures,
    lateness,
    load_figures,
    peaks,
    request_rows,
    run_header,
    timeline,
)
from launch.bench.load.generator import Backend, Load, generate_load, loads_of
from launch.bench.load.journal import Journal
from launch.bench.load.openai_backend import Clients, OpenAIBackend, OpenAIServer
from launch.bench.load.report import Progress, report, shown_seconds, summary
from launch.bench.load.steady import Window, steady_window, steps_of
from launch.bench.point import ServePoint
from launch.bench.serve_options import ServeOptions
from launch.bench.session import DeviceWindow, Session, StepTimings, startup_seconds
from launch.bench.speculation import Rounds, rounds_between
from launch.errors import UsageError
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.frontend.client import PromptRequest

SOME_FAILED = 1  # exit code: a request failed

log = logging.getLogger("lockstride")


class DrawLoad(Protocol):
    """Draws results of runs; launch/sweep/report/load_plot.py does. Raises nothing: points to come are worth more."""

    def timeline(
        self, rows: Sequence[Mapping[str, Any]], title: str, steady: tuple[float, float] | None, out: Path
    ) -> None: ...

    def curve(self, points: Sequence[ServePoint], title: str, out: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Target:
    """What is measured: ``backend`` makes the client side of one run, ``idle`` the device's share of idle time over
    steps. ``rows``: requests that it runs at once; None if unknown."""

    name: str
    hw: str
    rows: int | None
    backend: Callable[[Sequence[PromptRequest]], Backend]
    device: Callable[[range], DeviceWindow | None] = lambda steps: None
    forget: Callable[[], None] = lambda: None


def serve(session: Session, options: ServeOptions, draw: DrawLoad | None = None) -> int:
    """The subcommand, on every rank. Raises UsageError or BenchError."""
    if options.base_url is not None:
        return _serve_url(session, options, options.base_url, draw)
    loads = loads_of(session, options, cached=session.config.prefix_caching) if session.is_leader else []

    def measure(engine: Engine, timings: StepTimings) -> int:
        target = Target(
            "lockstride",
            device_name(session.config.device),
            engine.config.running_seqs,
            lambda requests: EngineBackend(engine, requests),
            timings.between,
            timings.clear,
        )
        return ServeBench(session, options, target, draw, engine).run(loads)

    return session.lead(measure)


def _serve_url(session: Session, options: ServeOptions, url: str, draw: DrawLoad | None) -> int:
    if session.ranks > 1:
        raise UsageError(f"--base-url is measured by one process, but {session.ranks} were started: leave out torchrun")
    if flag := _of_an_engine(session.config):
        raise UsageError(
            f"{flag} is of an engine, but --base-url measures a server's: leave it out, or start the server with it"
        )
    loads = loads_of(session, options, cached=False)
    with closing(_clients(options, url)) as clients:
        target = Target(options.label or "openai", url, None, lambda requests: OpenAIBackend(clients, requests))
        return ServeBench(session, options, target, draw).run(loads)


def _of_an_engine(config: EngineConfig) -> str | None:
    """A given option that has no effect on a server, although it asks for a file or a figure."""
    asked = {
        "--speculative-config": config.speculation is not None,
        "--timeline": config.timeline is not None,
        "--expert-load": config.expert_load is not None,
    }
    return next((flag for flag, given in asked.items() if given), None)


def _clients(options: ServeOptions, url: str) -> Clients:
    server = OpenAIServer(url, options.endpoint, options.served_model_name, options.ready_check_timeout_sec)
    if options.client_processes == 0:
        return server
    server.close()
    return ClientProcesses(options.client_processes, ServerAddress(url, options.endpoint, server.model))


class ServeBench:
    """The leader's side. ``run`` once. ``engine``: the one that is measured; None of a server."""

    def __init__(
        self,
        session: Session,
        options: ServeOptions,
        target: Target,
        draw: DrawLoad | None,
        engine: Engine | None = None,
    ) -> None:
        self._session = session
        self._options = options
        self._target = target
        self._draw = draw
        self._engine = engine
        self._slos = options.goals
        self._files = session.files("serve")
        self._startup_s: float | None = None
        self._failed = 0
        self._has_environment = False

    def run(self, loads: Sequence[Load]) -> int:
        """Every point; returns the exit code. What ends it early leaves the points before."""
        points: list[ServePoint] = []
        try:
            for load in loads:
                points.append(self._point(load))
        finally:
            self._compare(points)
        return SOME_FAILED if self._failed else 0

    def _compare(self, points: Sequence[ServePoint]) -> None:
        if len(points) < 2:
            return
        print(summary(points), flush=True)
        curve = self._files.path("curve.png")
        if self._draw is not None and curve is not None:
            self._draw.curve(points, self._title(), curve)

    def _title(self) -> str:
        return f"{self._session.model}, {self._options.dataset_name} load, {self._session.ranks} x {self._target.hw}"

    def _rows(self, load: Load) -> int:
        """Requests that run at once."""
        count = load.count
        return min(load.concurrency or count, self._target.rows or count)

    def _point(self, load: Load) -> ServePoint:
        rate = self._warm_up(load)
        runs = [self._run(load, number, rate) for number in range(self._options.num_iters)]
        point = self._row(load, runs)
        self._files.point(point)
        return point

    # ---- runs ----

    def _warm_up(self, load: Load) -> float | None:
        """Requests that are not measured, as many at a time as later; returns their output tokens a second."""
        count = min(self._options.warmups_of(self._rows(load)), load.count)
        if not count:
            return None
        requests = load.warm_up(count)
        journal = self._generate(requests, [0.0] * count, load.concurrency)
        if self._startup_s is None and journal.good:
            self._startup_s = startup_seconds(min(one.moments[0] for one in journal.good))
        return sum(one.tokens for one in journal.good) / journal.seconds if journal.good else None

    def _run(self, load: Load, number: int, rate: float | None) -> dict[str, Any]:
        requests = load.run(number)
        label = f"{load.label}-run{number}"
        log.info("%s: %s", label, self._announcement(load, requests, rate))
        self._target.forget()
        with Progress(label, len(requests), self._session.is_leader) as progress:
            journal = self._generate(requests, load.offsets, load.concurrency, progress)
        if self._startup_s is None and journal.good:
            self._startup_s = startup_seconds(min(one.moments[0] for one in journal.good))
        figures = self._figures(load, journal)
        self._failed += figures["failed"]
        print(report(label, figures, journal), flush=True)  # first: a file may find the disk full
        if (rounds := self._rounds(journal)) is not None:
            print(f"speculation: {rounds.text()}", flush=True)
        if not self._has_environment:
            facts = {} if self._engine is None else engine_facts(self._engine)
            self._files.environment(environment(self._session.config, self._session.rendezvous, facts))  # a second
            self._has_environment = True
        self._keep(label, journal, figures)
        return figures

    def _generate(
        self,
        requests: Sequence[PromptRequest],
        offsets: Sequence[float],
        concurrency: int | None,
        on_end: Callable[[int], None] = lambda ended: None,
    ) -> Journal:
        lengths = [len(one.prompt) for one in requests]
        return generate_load(self._target.backend(requests), lengths, offsets, concurrency, on_end)

    def _announcement(self, load: Load, requests: Sequence[PromptRequest], rate: float | None) -> str:
        prompts = sum(len(one.prompt) for one in requests)
        answers = sum(one.sampling.max_tokens for one in requests)
        seconds = load.offsets[-1]
        if rate is not None:
            seconds = max(seconds, answers / rate)
        about = f", about {shown_seconds(seconds)}" if seconds > 0 else ""
        return f"{len(requests):,} requests, {prompts:,} prompt and {answers:,} output tokens{about}"

    # ---- what a run leaves ----

    def _figures(self, load: Load, journal: Journal) -> dict[str, Any]:
        options, device = self._options, self._target.device
        header = run_header(self._session.model, len(journal.requests), load.rate, options.burstiness, load.concurrency)
        whole = device(steps_of(journal))
        figures = {
            **header,
            "label": self._target.name,
            "dataset_name": options.dataset_name,
            "seed": self._session.config.seed,
            **load_figures(journal, self._slos),
            **peaks(journal),
            "goodput": self._slos or None,
            "late_ms": lateness(journal.requests),
            "engine": engine_figures(journal, None if whole is None else whole.idle_fraction),
        }
        if (rounds := self._rounds(journal)) is not None:
            figures |= rounds.figures()
        rate = len(load.offsets) / load.offsets[-1] if load.offsets[-1] > 0 else math.inf
        window = steady_window(journal, self._rows(load), rate, options.ramp_requests, options.drain_requests)
        return {**figures, "steady": self._steady(journal, window)}

    def _rounds(self, journal: Journal) -> Rounds | None:
        """What speculation gained in our engine; other servers do not report it."""
        return rounds_between(self._session.config, journal.before, journal.after) if journal.after else None

    def _steady(self, journal: Journal, window: Window | str) -> dict[str, Any]:
        if isinstance(window, str):
            return {"refused": window}
        inside = self._target.device(steps_of(journal, window))
        return {
            "refused": None,
            "begin_s": window.begin - journal.started,
            "end_s": window.end - journal.started,
            **load_figures(journal, self._slos, window),
            "engine": engine_figures(journal, None if inside is None else inside.idle_fraction, window),
        }

    def _keep(self, label: str, journal: Journal, figures: dict[str, Any]) -> None:
        detailed = self._options.save_detailed
        self._files.record(label, {**figures, **detail_lists(journal)} if detailed else figures)
        if detailed:
            self._files.rows(f"{label}.requests", request_rows(journal))
        rows, out = timeline(journal), self._files.path(f"{label}.timeline.png")
        self._files.rows(f"{label}.timeline", rows)
        if self._draw is not None and out is not None:
            steady = figures["steady"]
            span = None if steady["refused"] else (steady["begin_s"], steady["end_s"])
            self._draw.timeline(rows, f"{self._title()}, {label}", span, out)

    def _row(self, load: Load, runs: Sequence[dict[str, Any]]) -> ServePoint:
        session = self._session

        def median(name: str, part: str = "") -> Any:
            values = [value for run in runs if (value := (run[part] if part else run).get(name)) is not None]
            return statistics.median(values) if values else None

        tpots = [run["median_tpot_ms"] for run in runs if run["median_tpot_ms"] is not None]
        tpot, rate, ttft = median("median_tpot_ms"), median("output_throughput"), median("median_ttft_ms")
        failed = sum(run["failed"] for run in runs)
        percentiles = {
            f"{word}_{name}_ms": median(f"{word}_{name}_ms") for name in METRICS for word in ("median", "p90", "p99")
        }
        return ServePoint(
            hw=self._target.hw,
            framework=self._target.name,
            kind="serve",
            **session.described,
            batch=self._rows(load),
            input_len=None,
            output_len=None,
            chain_depth=session.config.chain_depth or 0
            if self._engine is None
            else self._engine.scheduler.config.limits.depth,
            runs=len(runs),
            refused=f"{failed} requests failed" if failed else None,
            tpot_ms=tpot,
            tpot_ms_min=min(tpots, default=None),
            tpot_ms_max=max(tpots, default=None),
            ttft_s=None if ttft is None else ttft / 1e3,
            tok_s=rate,
            tok_s_per_gpu=None if rate is None else rate / session.ranks,
            tok_s_per_user=1e3 / tpot if tpot else None,
            chained_ratio=median("chained", "engine"),
            device_idle=median("device_idle", "engine"),
            startup_s=self._startup_s,
            label=load.label,
            dataset=self._options.dataset_name,
            seed=session.config.seed,
            num_prompts=load.count,
            request_rate=load.rate if math.isfinite(load.rate) else None,
            burstiness=self._options.burstiness if math.isfinite(self._options.burstiness) else None,
            max_concurrency=load.concurrency,
            duration_s=median("duration"),
            request_throughput=median("request_throughput"),
            request_goodput=median("request_goodput"),
            total_token_throughput=median("total_token_throughput"),
            steady_tok_s=median("output_throughput", "steady"),
            speculation=runs[0].get("speculation"),
            num_speculative_tokens=runs[0].get("num_speculative_tokens"),
            accepted_length=median("spec_decode_acceptance_length"),
            **percentiles,
        )
