"""`bench anatomy`: what a decode step is made of, on the host and on the device.

Knows: how the engine's phases are timed from outside, and how runs become a table.
Does not know: how phases work, how a graph is replayed bare (replay.py).
Nothing here is part of an engine: without this file no clock is read in a turn.

For each batch, at --chain-depth and at depth 0:
    step      from one landing to the next, by the host's clock; and from end to end, by the device's
    replay    the same graph over the same lengths, launched in a bare loop, on every rank at once
    idle      from the end of a step on the device to the start of the next
    host      exchange, plan, launch, land: the median of each over the steady turns; wait is not work
    copies    host-to-device bytes and copies a steady step
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from launch.bench.environment import engine_facts, environment
from launch.bench.replay import replay_ms, warm_up_steps
from launch.bench.session import DeviceWindow, Session, StepTimings, forget_engines
from launch.bench.trace import BenchError, DecodeStep, check_complete, run_requests, why_not_full
from launch.bench.workload import random_prompts
from runtime.engine import Engine
from runtime.frontend.client import EngineClient, PromptRequest
from runtime.schedule.plan import StepOutput

WORK = ("exchange", "plan", "launch", "land")


@dataclass(frozen=True, slots=True)
class HostWindow:
    """Median microseconds a turn. ``wait``: for the device; ``other``: the rest of the turn; ``busy``: all but wait."""

    exchange: float
    plan: float
    launch: float
    land: float
    wait: float
    other: float
    busy: float


@dataclass(frozen=True, slots=True)
class StepAnatomy:
    """One run's steady decode steps. ``step_ms`` by the host's clock."""

    step_ms: float
    device: DeviceWindow
    host_us: HostWindow
    copied_bytes: float
    copies: float
    untouched: float  # share of steps for which nothing was copied


def anatomy(session: Session) -> int:
    """The subcommand, on every rank."""
    depths = (0,) if session.config.serial else (session.config.chain_depth, 0)
    runs: dict[tuple[int, int], list[StepAnatomy]] = {}
    replays: dict[int, float] = {}
    facts: dict[str, Any] = {}
    with session.together():
        for wanted in depths:
            runs |= _measure(session, wanted, replays, facts)
            _forget_engine(session.ranks)
    if session.is_leader:
        rows = [_row(batch, depth, found, replays[batch]) for (batch, depth), found in sorted(runs.items())]
        files = session.files("anatomy")
        files.environment(environment(session.config, session.rendezvous, facts))
        files.table("anatomy", rows)
        print(table(rows), flush=True)
    return 0


def _measure(
    session: Session, wanted: int | None, replays: dict[int, float], facts: dict[str, Any]
) -> dict[tuple[int, int], list[StepAnatomy]]:
    """One engine's life, at the depth ``wanted``, or the one it chooses; fills ``replays`` once, in milliseconds by
    batch, and ``facts``, the engine's."""
    timings, runs = StepTimings(), {}
    with session.open(timings, replace(session.config, chain_depth=wanted)) as engine:
        depth = engine.scheduler.config.limits.depth
        if engine.is_leader:
            bench = AnatomyBench(session, engine, timings)
            runs = {(batch, depth): found for batch, found in bench.run().items()}
            engine.stop()
        else:
            engine.follow()
        facts |= engine_facts(engine)
        if not replays:  # every rank is past its last turn and none plans any more
            for batch in session.options.batch_size:
                replays[batch] = replay_ms(engine, session.lengths, batch, session.options.num_iters)
    return runs


def _forget_engine(ranks: int) -> None:
    """Return the memory of the engine before, on every rank, before the next one is sized."""
    forget_engines()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if ranks > 1:
        dist.all_reduce(torch.zeros(1))


class AnatomyBench:
    """The leader's side over one engine. ``run`` once."""

    def __init__(self, session: Session, engine: Engine, timings: StepTimings) -> None:
        self._session = session
        self._engine = engine
        self._timings = timings
        self._client = EngineClient(engine, text=False)
        self._clock = TurnClock(engine)

    def run(self) -> dict[int, list[StepAnatomy]]:
        options = self._session.options
        found: dict[int, list[StepAnatomy]] = {}
        with self._session.progress(len(options.batch_size) * (options.num_warmups + options.num_iters)) as bar:
            for batch in options.batch_size:
                prompts = random_prompts(
                    batch,
                    self._session.lengths.prompt,
                    self._session.lengths.output,
                    self._engine.model_config.vocab_size,
                    self._engine.config.seed,
                )
                found[batch] = []
                for index in range(options.num_warmups + options.num_iters):
                    one = self._run(prompts)
                    if index >= options.num_warmups:
                        found[batch].append(one)
                    bar.update()
        return found

    def _run(self, prompts: Sequence[PromptRequest]) -> StepAnatomy:
        self._timings.clear()
        self._clock.turns.clear()
        trace = run_requests(self._client, prompts, after_turn=self._clock.end_turn)
        check_complete(trace)
        if refused := why_not_full(trace, len(prompts), self._session.lengths.output - 1):
            raise BenchError(f"batch {len(prompts)}: {refused}")
        steady = _steady(trace.decode_steps)
        device = self._timings.of(steady)
        if device is None:
            raise BenchError(f"--output-len {self._session.lengths.output} leaves no steady step: type 4 or more")
        turns = self._clock.of(steady)
        return StepAnatomy(
            step_ms=(steady[-1].at - steady[0].at) / (len(steady) - 1) * 1e3,
            device=device,
            host_us=_host_window(turns),
            copied_bytes=sum(turn.copied_bytes for turn in turns) / len(turns),
            copies=sum(turn.copies for turn in turns) / len(turns),
            untouched=sum(not turn.copies for turn in turns) / len(turns),
        )


def _steady(steps: Sequence[DecodeStep]) -> Sequence[DecodeStep]:
    return steps[warm_up_steps(len(steps)) :]


# ---- the host's side ----


@dataclass(slots=True)
class Turn:
    """One turn of the engine: nanoseconds by phase, what it copied, and the step that landed in it."""

    landed: int
    spent: dict[str, int]
    copied_bytes: int
    copies: int


class TurnClock:
    """Times the phases of an engine's turns from outside, by wrapping the methods that the loop calls."""

    def __init__(self, engine: Engine) -> None:
        self.turns: list[Turn] = []
        self._staging = engine.executor.staging.counters
        self._copied = (self._staging.host_to_device_bytes, self._staging.copies)
        self._spent: dict[str, int] = {}
        for owner, method, phase in (
            (engine, "step", "turn"),
            (engine.control, "exchange", "exchange"),
            (engine.control, "agree_max", "exchange"),  # with other groups
            (engine.scheduler, "plan", "plan"),
            (engine.executor, "launch", "launch"),
            (engine.executor, "take", "wait"),
            (engine.scheduler, "land", "land"),
        ):
            setattr(owner, method, self._timed(phase, getattr(owner, method)))

    def _timed(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter_ns

        def timed(*arguments: Any) -> Any:
            began = clock()
            result = method(*arguments)
            self._spent[phase] = self._spent.get(phase, 0) + clock() - began
            return result

        return timed

    def end_turn(self, output: StepOutput) -> None:
        """To be called after each turn."""
        copied_bytes, copies = self._staging.host_to_device_bytes, self._staging.copies
        self.turns.append(Turn(output.step, self._spent, copied_bytes - self._copied[0], copies - self._copied[1]))
        self._spent = {}
        self._copied = (copied_bytes, copies)

    def of(self, steps: Sequence[DecodeStep]) -> list[Turn]:
        """The turns in which these steps landed and another was launched: those of a chain that goes on."""
        wanted = {decode.step for decode in steps}
        return [
            turn for turn in self.turns if turn.landed in wanted and "launch" in turn.spent and "land" in turn.spent
        ]


def _host_window(turns: Sequence[Turn]) -> HostWindow:
    def median_us(value: Callable[[dict[str, int]], int]) -> float:
        return statistics.median(value(turn.spent) for turn in turns) / 1e3

    phases = {phase: median_us(lambda spent, phase=phase: spent[phase]) for phase in (*WORK, "wait")}  # type: ignore[misc]
    return HostWindow(
        **phases,
        other=median_us(lambda spent: spent["turn"] - sum(spent[phase] for phase in (*WORK, "wait"))),
        busy=median_us(lambda spent: spent["turn"] - spent["wait"]),
    )


# ---- results ----


def _row(batch: int, depth: int, runs: Sequence[StepAnatomy], replay: float) -> dict[str, Any]:
    """Medians over runs, by the names that the table and the file have."""
    step = statistics.median(run.step_ms for run in runs)

    def median(value: Callable[[StepAnatomy], float]) -> float:
        return statistics.median(value(run) for run in runs)

    return {
        "batch": batch,
        "chain_depth": depth,
        "runs": len(runs),
        "step_ms": step,
        "step_ms_min": min(run.step_ms for run in runs),
        "step_ms_max": max(run.step_ms for run in runs),
        "device_step_ms": median(lambda run: run.device.step_ms),
        "device_busy_ms": median(lambda run: run.device.busy_ms),
        "replay_ms": replay,
        "step_over_replay": step / replay,
        "idle_us": median(lambda run: run.device.idle_ms) * 1e3,
        "device_idle": median(lambda run: run.device.idle_fraction),
        "host_us": {
            phase: median(lambda run, phase=phase: asdict(run.host_us)[phase])  # type: ignore[misc]
            for phase in HostWindow.__dataclass_fields__
        },
        "host_to_device_bytes": median(lambda run: run.copied_bytes),
        "host_to_device_copies": median(lambda run: run.copies),
        "steps_without_copy": median(lambda run: run.untouched),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for a person to read."""
    head = ["batch", "D", "step ms", "device ms", "replay ms", "ratio", "idle us", "idle"]
    head += ["host us", *WORK, "other", "wait", "H2D B", "copies", "no copy"]
    widths = (5, 2, 8, 9, 9, 6, 7, 6, 7, 8, 6, 6, 6, 6, 8, 8, 6, 7)
    lines = ["  ".join(name.rjust(width) for name, width in zip(head, widths, strict=True))]
    for row in rows:
        host = row["host_us"]
        cells = (
            f"{row['batch']}",
            f"{row['chain_depth']}",
            f"{row['step_ms']:.4f}",
            f"{row['device_step_ms']:.4f}",
            f"{row['replay_ms']:.4f}",
            f"{row['step_over_replay']:.3f}",
            f"{row['idle_us']:.1f}",
            f"{row['device_idle']:.1%}",
            f"{host['busy']:.0f}",
            *(f"{host[phase]:.0f}" for phase in (*WORK, "other", "wait")),
            f"{row['host_to_device_bytes']:.0f}",
            f"{row['host_to_device_copies']:.3f}",
            f"{row['steps_without_copy']:.1%}",
        )
        lines.append("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
    return "\n".join(lines)
