"""Rows that really run, before the engine's first step, for what is timed at start-up.

Knows: how requests of a separate scheduler are served serially until every row has decoded a few times, and that
nothing of them stays. Does not know: what is timed (chain_depth.py, window_costs.py).

A graph replayed over padding is no measure of a step with experts: they compute nothing for padding and for rows that
have ended, and the same few for rows that are alike. So each request has a prompt unlike those of other
data-parallel groups, too, and all of them run on until the times are taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

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
