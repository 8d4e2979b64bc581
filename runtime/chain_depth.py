"""Chooses chain depth D and horizon L (how far ahead events are announced) from times measured at start-up.

Knows: the two rules, the serial turns that are timed for them at start-up, how a separate scheduler serves requests for
that until every row has decoded a few times, and that all ranks use rank 0's numbers.
Does not know: how a turn is planned or launched (runtime/schedule, runtime/execute), how a record travels
(parallel/control).

Every step in flight is a step that a new request waits for before it runs, and every turn of the horizon is one that
it waits for before it is planned. So both are as small as the device's time allows:

* D: while D steps are queued, the host has D steps' time for what it does between two launches. The smallest D for
  which that is ``MARGIN`` times what it was measured to need.
* L: a rank launches late by the time that a record takes to it, unless the record came L turns early. The smallest L
  for which the device still has work then.

Both are fixed before the first step. The times they come from are data, shared by rank 0; no clock enters a plan.

A graph replayed over padding is no measure of a step with experts: they compute nothing for padding and for rows that
have ended, and the same few for rows that are alike. So each request has a prompt unlike those of other data-parallel
groups, too, and all of them run on until the times are taken.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from runtime.config import EngineConfig
from runtime.execute.executor import Executor
from runtime.execute.launch_spec import LaunchSpec
from runtime.schedule.config import SchedulerConfig
from runtime.schedule.plan import Admit, Cancel, StepKind
from runtime.schedule.request import Request, SamplingParams
from runtime.schedule.scheduler import Scheduler

_SAMPLING = {  # in which a kind of ``--warm`` finds its graphs
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(),
    "filtered": SamplingParams(top_p=0.9),
    "penalised": SamplingParams(top_p=0.9, presence_penalty=0.1),
    "constrained": SamplingParams(top_p=0.9),
}


@dataclass(slots=True)
class RunningRows:
    """``latest``: the last decode step of all rows; None where answers ended too early. ``turns``: milliseconds of the
    host's serial turns, the device's part included."""

    latest: LaunchSpec | None = None
    turns: list[float] = field(default_factory=list)


def sampling_of(config: EngineConfig, tokens: int) -> SamplingParams:
    """Of requests that gain ``tokens`` through graphs that were warmed up."""
    kind = config.warm[0] if config.warm else "greedy"
    return replace(_SAMPLING[kind], max_tokens=tokens, ignore_eos=True, seed=0)


def rows_that_fit(schedule: SchedulerConfig, tokens: int) -> int:
    """Of requests of one prompt token that gain ``tokens`` each, how many can run at once; 0 where none can."""
    limits = schedule.limits
    if tokens + 1 > limits.max_model_len:
        return 0
    return min(limits.rows, limits.max_prefill_tokens, schedule.blocks // -(-(tokens + 1) // limits.block_size))


@contextmanager
def running_rows(
    executor: Executor, schedule: SchedulerConfig, sampling: SamplingParams, rows: int, turns: int, *, grouped: bool
) -> Iterator[RunningRows]:
    """``rows`` requests that have decoded together ``turns`` times, and still run while the context is open.

    ``sampling``: its max_tokens is more than they gain, replays included. ``grouped``: there are several data-parallel
    groups; then all of them call this alike. Inside ``Executor.rehearsing``.
    """
    limits = replace(schedule.limits, depth=0)
    scheduler = Scheduler(replace(schedule, limits=limits, prefix_caching=False, mixed=None, speculation=None))
    for request_id in range(rows):
        prompt = ((executor.group * rows + request_id) % executor.vocab_size,)
        scheduler.submit(Admit(Request(request_id, prompt, sampling, ())))
    found = RunningRows()
    while len(found.turns) < turns and scheduler.unfinished:
        began = time.perf_counter()
        plan = scheduler.plan()
        if plan is None:
            break
        spec = executor.resolve(plan, executor.needs(plan) if grouped else None)
        executor.launch(spec)
        scheduler.land(plan.step, executor.take(spec))
        if plan.kind is StepKind.DECODE and len(plan.slots) == rows:
            found.latest = spec
            found.turns.append((time.perf_counter() - began) * 1e3)
    if len(found.turns) < turns:
        found.latest = None
    yield found
    for request_id in range(rows):
        scheduler.submit(Cancel(request_id))


log = logging.getLogger(__name__)

MARGIN = 3.0  # for what no start-up measures: the front end's share of a turn, garbage collection, a busy machine
DEEPEST = 4  # that a measurement chooses; ``--chain-depth`` goes further
RECORD_MARGIN = 2.0  # a record may take so many times as long as measured

_FIRST = 4  # turns that are not timed
_TURNS = 16  # timed, of each number of rows
_REPLAYS = 8


class TurnTimes(NamedTuple):
    """Of steps of ``rows`` decode rows: what the host does in a turn, waits excluded, and what the device does."""

    rows: int
    host_ms: float
    step_ms: float


# ---- the rules ----


def smallest_depth(times: Sequence[TurnTimes]) -> int:
    """The least D from 1 on with which the device has work for ``MARGIN`` times as long as the host needs."""
    return min(max(math.ceil(MARGIN * each.host_ms / each.step_ms) for each in times), DEEPEST) or 1


def smallest_horizon(times: Sequence[TurnTimes], depth: int, hop_ms: float) -> int:
    """The least L with which a record that takes ``hop_ms`` does not keep the device waiting."""
    late_ms = RECORD_MARGIN * hop_ms
    if depth == 0:
        return 1  # nothing is queued: a record of this turn would be waited for in every step
    return max(max(0, math.ceil((late_ms + each.host_ms) / each.step_ms) - depth) for each in times)


# ---- what is fixed at start-up ----


def agree_depth_and_horizon(
    config: EngineConfig,
    executor: Executor,
    schedule: SchedulerConfig,
    agree_horizon: Callable[[Callable[[float], int]], int],
    share: Callable[[Callable[[], str]], str] | None,
) -> tuple[int, int]:
    """D and L, the same on every rank. A collective call where there are several.

    ``schedule``: the limits of the engine to be, for the serial turns that are timed. ``agree_horizon``: the control
    plane's. ``share(make)`` returns on every rank what ``make()`` returned on rank 0.
    """
    chosen = config.chain_depth is None
    times: list[TurnTimes] = []
    if config.device == "cuda" and (chosen or (config.horizon is None and config.ranks > 1 and not config.serial)):
        times = _shared(turn_times(config, executor, schedule), share)
    depth = config.chain_depth
    if depth is None:
        depth = smallest_depth(times) if times else 2
    log.info("chain depth: %s", _why_depth(depth, times if chosen else None))
    horizon = config.horizon
    if horizon is None:
        hops: list[float] = []

        def choose(hop_s: float) -> int:
            hops.append(hop_s * 1e3)
            if times or depth == 0:
                return smallest_horizon(times, depth, hops[0])
            return 0  # on a CPU a step takes longer than any record

        horizon = agree_horizon(choose)
        if hops:
            log.info("horizon: %s", _why_horizon(horizon, hops[0]))
    return depth, horizon


def _shared(times: list[TurnTimes], share: Callable[[Callable[[], str]], str] | None) -> list[TurnTimes]:
    told = json.dumps(times) if share is None else share(lambda: json.dumps(times))
    return [TurnTimes(int(rows), float(host_ms), float(step_ms)) for rows, host_ms, step_ms in json.loads(told)]


def _why_depth(depth: int, times: Sequence[TurnTimes] | None) -> str:
    if times is None:
        return f"{depth}, as asked for (--chain-depth)" if depth else "0, the serial engine (--chain-depth)"
    if not times:
        return f"{depth}, where no step is timed (--chain-depth)"
    told = ", ".join(f"{each.host_ms:.2f} of {each.step_ms:.2f} ms for {each.rows} rows" for each in times)
    enough = "is the least that gives" if smallest_depth(times) < DEEPEST else "is the most a measurement chooses for"
    return f"{depth} {enough} the host {MARGIN:g} times what it needs of a step: {told} (--chain-depth)"


def _why_horizon(horizon: int, hop_ms: float) -> str:
    if horizon == 0:
        return f"0, so a request is planned in the turn that announces it: a record takes {hop_ms:.3f} ms (--horizon)"
    return f"{horizon} turns, since a record takes {hop_ms:.3f} ms to the slowest rank (--horizon)"


# ---- measured ----


def turn_times(config: EngineConfig, executor: Executor, schedule: SchedulerConfig) -> list[TurnTimes]:
    """Times of 1 row and of as many as fit: serial turns of rows that really run, less the device's part of them.

    Nothing of it stays: the requests end, and counters begin again. With several ranks all of them call it together.
    """
    tokens = _FIRST + _TURNS + _REPLAYS + 2
    most = rows_that_fit(schedule, tokens)
    if most < 1:
        return []
    sampling, grouped = sampling_of(config, tokens), config.data_parallel > 1
    found = []
    with executor.rehearsing():
        for rows in sorted({1, most}):
            with running_rows(executor, schedule, sampling, rows, _FIRST + _TURNS, grouped=grouped) as running:
                if running.latest is not None:
                    step_ms = executor.replay_ms(running.latest, _REPLAYS)
                    turn_ms = statistics.median(running.turns[-_TURNS:])
                    found.append(TurnTimes(rows, max(turn_ms - step_ms, 0.0), step_ms))
    return found
