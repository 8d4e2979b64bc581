"""The loop of `bench latency` and `bench throughput`: warm-up runs, measured runs, and what they come to as a point.

Knows: what both keep of a run, the row of a point. Does not know: what a run is and when it has a rate (latency.py,
throughput.py), how requests are driven (load/engine_backend.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from launch.bench.environment import device_name, engine_facts, environment
from launch.bench.load.engine_backend import run_batch
from launch.bench.load.journal import Journal
from launch.bench.options import Lengths, RunOptions
from launch.bench.point import Point
from launch.bench.roofline import Floor, Shape, drafter_shape, round_floor, target_floor
from launch.bench.session import DeviceWindow, Session, StepTimings, startup_seconds
from launch.bench.speculation import Rounds
from models.registry import config_from_folder
from runtime.engine import Engine
from runtime.frontend.client import PromptRequest

NO_RATE = 1  # exit code: at least one point was refused


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One run; times in seconds. ``refused``: why it gives no rate. ``device``: of its steps. ``rounds``: what
    speculation gained; ``round_s``: of a decode step of the full batch then."""

    journal: Journal
    ttft: float
    tpot: float | None
    refused: str | None
    device: DeviceWindow | None
    rounds: Rounds | None = None
    round_s: float | None = None


class BatchBench:
    """The leader's side: an engine, and the files and points that its runs leave."""

    def __init__(
        self, session: Session, options: RunOptions, kind: str, engine: Engine, timings: StepTimings, runs: int = 1
    ) -> None:
        self.session, self.engine, self.timings = session, engine, timings
        self.files = session.files(kind)
        self.bar: tqdm[Any] = session.progress(runs * (options.num_warmups + options.num_iters))
        self._options, self._kind = options, kind
        self._shape = Shape.from_folder(session.folder, session.kv_dtype, session.config.quantization)
        self._startup_s: float | None = None

    def journal(
        self, requests: Sequence[PromptRequest], *, most: int | None = None, max_tokens: int | None = None
    ) -> Journal:
        """One run, as run_batch has it."""
        self.timings.clear()
        journal = run_batch(self.engine, requests, most=most, max_tokens=max_tokens)
        if self._startup_s is None:
            self._startup_s = startup_seconds(min(one.moments[0] for one in journal.requests))
            facts = engine_facts(self.engine)
            self.files.environment(environment(self.session.config, self.session.rendezvous, facts))  # a second
        return journal

    def runs(
        self, label: str, run: Callable[[int], BatchRun], figures: Callable[[BatchRun], dict[str, Any]]
    ) -> list[BatchRun]:
        """The measured runs of a point, numbered from 0, after those that warm up, from -1 down."""
        for number in range(self._options.num_warmups):
            run(-1 - number)
            self.bar.update()
        found = []
        for number in range(self._options.num_iters):
            found.append(run(number))
            self.files.run(f"{label}run{number}", figures(found[-1]), found[-1].journal)
            self.bar.update()
        return found

    def point(
        self,
        runs: Sequence[BatchRun],
        batch: int,
        lengths: Lengths | None,
        *,
        tok_s: float | None,
        refused: str | None,
        chained: float,
        accepted_length: float | None,
    ) -> Point:
        """The row of ``runs``; the file has it, too. ``lengths``: of each request, None where they differ."""
        session, options = self.session, self._options
        tpots = [] if refused else [run.tpot for run in runs if run.tpot is not None]
        idle = [run.device.idle_fraction for run in runs if run.device is not None]
        rounds = [run.round_s for run in runs if run.round_s is not None]
        speculation = session.config.speculation
        floor, of_round = (None, None) if lengths is None else self._floors(batch, lengths.average)
        step_s = None if tok_s is None else batch / tok_s  # of one token a row
        compared = None if step_s is None or speculation is not None else floor
        point = Point(
            hw=device_name(session.config.device),
            kind=self._kind,
            **session.described,
            batch=batch,
            input_len=None if lengths is None else lengths.prompt,
            output_len=None if lengths is None else lengths.output,
            chain_depth=self.engine.scheduler.config.limits.depth,
            runs=len(runs),
            refused=refused,
            tpot_ms=statistics.median(tpots) * 1e3 if tpots else None,
            tpot_ms_min=min(tpots) * 1e3 if tpots else None,
            tpot_ms_max=max(tpots) * 1e3 if tpots else None,
            ttft_s=statistics.median(run.ttft for run in runs),
            tok_s=tok_s,
            tok_s_per_gpu=None if tok_s is None else tok_s / session.ranks,
            tok_s_per_user=None if tok_s is None else tok_s / batch,
            roofline_floor_ms=None if floor is None else floor.seconds * 1e3,
            roofline_fraction=compared.seconds / step_s if compared and step_s else None,
            bandwidth_fraction=compared.bytes / step_s / options.bytes_per_s if compared and step_s else None,
            chained_ratio=chained,
            device_idle=statistics.median(idle) if idle else None,
            startup_s=self._startup_s,
            speculation=None if speculation is None else speculation.label,
            num_speculative_tokens=None if speculation is None else speculation.num_speculative_tokens,
            accepted_length=accepted_length,
            round_ms=statistics.median(rounds) * 1e3 if rounds and not refused else None,
            round_floor_ms=None if of_round is None else of_round.seconds * 1e3,
        )
        self.files.point(point)
        return point

    def _floors(self, batch: int, length: int) -> tuple[Floor, Floor | None]:
        """Of a step of one token a row and, in `bench latency` with speculation, of a round; ``length``: a row's KV."""
        session, speculation = self.session, self.session.config.speculation
        ceilings = session.ceilings(self._options)
        floor = target_floor(self._shape, ceilings, batch=batch, length=length)
        if speculation is None or self._kind != "latency":
            return floor, None
        of_round = round_floor(
            self._shape,
            drafter_shape(speculation, config_from_folder(session.folder), session.kv_dtype),
            ceilings,
            batch=batch,
            length=length,
            guesses=speculation.num_speculative_tokens,
            tree=speculation.tree_size,
        )
        return floor, of_round
