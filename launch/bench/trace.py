"""One run of requests through an engine, and what its landed steps say about them afterwards.

Knows: how requests are handed over, when each step landed, which steps decoded and how full they were.
Does not know: where requests come from (workload.py), what is measured with a run (latency.py and others).

While requests run, a landed step costs one clock reading and one append; everything else is worked out at the end.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from runtime.engine import Engine
from runtime.schedule.plan import Finished, StepOutput
from runtime.schedule.request import FinishReason, Request


class BenchError(RuntimeError):
    """A run did not do what was to be measured; the text says what happened instead."""


@dataclass(slots=True)
class RequestTimes:
    """Seconds on time.perf_counter's clock. ``landings``: (when, tokens) of each step that brought tokens."""

    request: Request
    submitted: float
    landings: list[tuple[float, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.landings)

    @property
    def ttft(self) -> float:
        return self.landings[0][0] - self.submitted

    @property
    def e2e(self) -> float:
        return self.landings[-1][0] - self.submitted

    @property
    def tpot(self) -> float | None:
        """(last token - first token) / (tokens - 1); None with a single token."""
        return None if self.tokens < 2 else (self.landings[-1][0] - self.landings[0][0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between one landing and the next."""
        moments = [moment for moment, _ in self.landings]
        return [after - before for before, after in pairwise(moments)]


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A decode step that landed: its number, when, and how many requests gained a token in it."""

    step: int
    at: float
    rows: int


@dataclass(slots=True)
class RunTrace:
    """A run. ``seconds`` is from before the first request was handed over until the last one's end had landed."""

    started: float
    ended: float
    landed: list[tuple[float, StepOutput]]
    requests: dict[int, RequestTimes]
    finished: dict[int, Finished]
    decode_steps: list[DecodeStep] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)  # when each request ended, in that order

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    def settle(self) -> None:
        """Work out each request's times, and which steps decoded."""
        for at, output in self.landed:
            self.ends += [at] * len(output.finished)
            gained = decoded = 0
            for request_id, count in zip(output.request_ids, output.counts, strict=True):
                if request_id < 0 or not count:
                    continue
                landings = self.requests[request_id].landings
                decoded += bool(landings)
                gained += 1
                landings.append((at, count))
            if decoded:
                self.decode_steps.append(DecodeStep(output.step, at, gained))
        self.landed = []


def run_requests(
    engine: Engine,
    requests: Sequence[Request],
    *,
    max_concurrency: int | None = None,
    after_turn: Callable[[StepOutput], None] | None = None,
) -> RunTrace:
    """Run ``requests`` to their ends (leader). Without ``max_concurrency`` all of them are handed over before the first
    turn. ``after_turn`` is called after each turn of the engine."""
    gc.collect()
    clock = time.perf_counter
    waiting = deque(requests)
    times: dict[int, RequestTimes] = {}
    landed: list[tuple[float, StepOutput]] = []
    finished: dict[int, Finished] = {}
    started = clock()
    while waiting or len(finished) < len(times):
        while waiting:
            if max_concurrency is not None and len(times) - len(finished) >= max_concurrency:
                break
            request = waiting.popleft()
            times[request.request_id] = RequestTimes(request, started if max_concurrency is None else clock())
            engine.add(request)
        if not engine.has_work:
            raise BenchError(f"the engine is idle, but {len(times) - len(finished)} requests have not ended")
        output = engine.step()
        if output.request_ids or output.finished:
            landed.append((clock(), output))
            for ended in output.finished:
                finished[ended.request_id] = ended
        if after_turn is not None:
            after_turn(output)
    trace = RunTrace(started, landed[-1][0], landed, times, finished)
    while engine.has_work:  # ghosts of the last requests: not part of the run
        engine.step()
    trace.settle()
    return trace


def check_complete(trace: RunTrace) -> None:
    """Raises BenchError unless every request ended by itself; with eos ignored, at its full length."""
    for request_id, ended in trace.finished.items():
        wanted = trace.requests[request_id].request.sampling
        fine = ended.reason is FinishReason.LENGTH or (ended.reason is FinishReason.STOP and not wanted.ignore_eos)
        if not fine or (wanted.ignore_eos and len(ended.token_ids) != wanted.max_tokens):
            raise BenchError(
                f"request {request_id} ended by {ended.reason.label} after {len(ended.token_ids)} of "
                f"{wanted.max_tokens} tokens{': ' if ended.detail else ''}{ended.detail}"
            )


def why_not_full(trace: RunTrace, rows: int, steps: int) -> str | None:
    """Why the decode steps are no window of ``steps`` steps in which all ``rows`` requests took part; None if so."""
    short = [decode for decode in trace.decode_steps if decode.rows != rows]
    if short:
        return (
            f"the batch was not full: {len(short)} of {len(trace.decode_steps)} decode steps ran other than {rows} "
            f"rows, step {short[0].step} for one ran {short[0].rows}"
        )
    if len(trace.decode_steps) != steps:
        return f"the batch took {len(trace.decode_steps)} decode steps, not {steps}"
    return None
