"""An engine of this process under load, through an EngineClient without texts.

Knows: what a turn costs here and what is kept of it. Does not know: schedules (generator.py), what is reported.

While requests run, a turn costs one append, what an end costs, and now and then a look at the scheduler's counters;
everything else is worked out after the run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import fields, replace

from launch.bench.load.generator import generate_load
from launch.bench.load.journal import Counts, DecodeStep, Journal, Sample, Served
from launch.errors import BenchError
from runtime.engine import Engine
from runtime.frontend.client import EngineClient, PromptRequest
from runtime.frontend.outputs import RequestOutput
from runtime.schedule.counters import ScheduleCounters
from runtime.schedule.plan import StepOutput

SAMPLE_SECONDS = 0.1
_NOW = ("fenced_blocks",)  # of a moment: a difference of two says nothing
_SUMS = tuple(field.name for field in fields(ScheduleCounters) if field.type == "int" and field.name not in _NOW)


class EngineBackend:
    """One run. ``requests`` have one answer each, and keys of this class's choice."""

    def __init__(self, engine: Engine, requests: Sequence[PromptRequest]) -> None:
        self._engine = engine
        self._client = EngineClient(engine, text=False)
        self._prepared = [self._client.prepare(replace(one, key=None)) for one in requests]
        self._wanted = [one.sampling.max_tokens if one.sampling.ignore_eos else None for one in requests]
        self._numbers: dict[int, int] = {}  # by request id
        self._landed: list[tuple[float, StepOutput]] = []
        self._outputs: list[tuple[float, RequestOutput]] = []
        self._samples: list[Sample] = []
        self._next_sample = 0.0
        self._before: Counts = {}

    def begin(self) -> None:
        self._before = dict(self._engine.counters)
        gc.collect()
        self._sample(time.perf_counter())

    def send(self, number: int) -> None:
        key = self._client.submit(self._prepared[number])
        assert isinstance(key, int)  # the client's own keys are request ids
        self._numbers[key] = number

    def advance(self, until: float) -> Sequence[tuple[float, int]]:
        client = self._client
        if not client.live:
            client.drain()  # what is still in flight is ghosts
            left = until - time.perf_counter()
            if left > 0:
                client.wait(lambda seconds: _waited(seconds, until), left)
            return ()
        turn = client.turn()
        at, step = turn.at, turn.step
        if step.request_ids:
            self._landed.append((at, step))
        if at >= self._next_sample:
            self._sample(at)
        if not turn.finished:
            if not (client.waiting or self._engine.has_work):
                raise BenchError(f"the engine is idle, but {client.live} requests have not ended")
            return ()
        self._outputs += [(at, output) for output in turn.finished]
        return [(at, self._number(output)) for output in turn.finished]

    def _number(self, output: RequestOutput) -> int:
        assert isinstance(output.key, int)
        return self._numbers[output.key]

    def _sample(self, at: float) -> None:
        scheduler = self._engine.scheduler
        counters = scheduler.counters
        self._samples.append(Sample(at, scheduler.step, {name: getattr(counters, name) for name in _SUMS}))
        self._next_sample = at + SAMPLE_SECONDS

    def journal(self, started: float, ended: float, requests: Sequence[Served]) -> Journal:
        self._sample(ended)
        self._client.drain()  # ghosts of the last requests: no part of the run
        numbers, decode_steps = self._numbers, list[DecodeStep]()
        for at, step in self._landed:
            rows = [
                (requests[numbers[i]], n) for i, n in zip(step.request_ids, step.counts, strict=True) if i >= 0 and n
            ]
            if any(one.moments for one, _ in rows):
                decode_steps.append(DecodeStep(step.step, at, len(rows), sum(count for _, count in rows)))
            for one, count in rows:
                one.moments.append(at)
                one.counts.append(count)
        self._landed = []
        for at, output in self._outputs:
            number, (completion,) = self._number(output), output.completions
            one = requests[number]
            one.ended, one.reason = at, completion.finish_reason.label
            wanted, found = self._wanted[number], len(completion.token_ids)
            if output.failed is not None or (wanted is not None and found != wanted):
                of = "" if wanted is None else f" of {wanted}"
                detail = f": {completion.detail}" if completion.detail else ""
                one.error = f"ended by {one.reason} after {found}{of} tokens{detail}"
        after = dict(self._engine.counters)
        return Journal(started, ended, requests, self._samples, self._before, after, decode_steps)


def run_batch(
    engine: Engine, requests: Sequence[PromptRequest], *, most: int | None = None, max_tokens: int | None = None
) -> Journal:
    """``requests``, of one answer each, all due at once, to their ends (leader). ``most``: unanswered at a time.
    ``max_tokens``: of every answer, instead of the requests' own. Raises BenchError unless every request ends by
    itself."""
    if max_tokens is not None:
        requests = [replace(one, sampling=replace(one.sampling, max_tokens=max_tokens)) for one in requests]
    lengths = [len(one.prompt) for one in requests]
    backend = EngineBackend(engine, requests)
    journal = generate_load(backend, lengths, [0.0] * len(requests), most, ahead=True)
    journal.require_complete()
    return journal


def _waited(seconds: float, until: float) -> bool:
    """Sleep that long, but not beyond ``until``; whether that has come."""
    left = until - time.perf_counter()
    if left > 0:
        time.sleep(min(seconds, left))
    return time.perf_counter() >= until
