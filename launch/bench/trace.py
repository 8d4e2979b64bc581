"""One run of requests through an engine, and what its landed steps say about them afterwards.

Knows: what is measured of a client's turns: when each step landed, which steps decoded and how full they were.
Does not know: where requests come from (workload.py), what is measured with a run (latency.py and others).

The client is one without texts, so while requests run a landed step costs one clock reading, one append and what an end
costs; everything else is worked out afterwards.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from runtime.frontend.client import EngineClient, EngineIdle, PromptRequest
from runtime.schedule.plan import Finished, StepOutput
from runtime.schedule.request import FinishReason


class BenchError(RuntimeError):
    """A run did not do what was to be measured; the text says what happened instead."""


@dataclass(slots=True)
class RequestTimes:
    """Seconds on time.perf_counter's clock. ``landings``: (when, tokens) of each step that brought tokens."""

    request: PromptRequest
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
    """A decode step that landed: its number, when, how many requests gained a token in it, and how many tokens."""

    step: int
    at: float
    rows: int
    tokens: int = 0


@dataclass(slots=True)
class RunTrace:
    """A run. ``seconds`` is from before the first request was handed over until the last one's end had landed."""

    started: float
    ended: float
    landed: list[tuple[float, StepOutput]]
    requests: dict[int, RequestTimes]
    finished: dict[int, Finished] = field(default_factory=dict)
    decode_steps: list[DecodeStep] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)  # when each request ended, in that order

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    def evaluate(self) -> None:
        """Work out each request's times, and which steps decoded."""
        for at, output in self.landed:
            self.ends += [at] * len(output.finished)
            self.finished |= {ended.request_id: ended for ended in output.finished}
            gained = decoded = tokens = 0
            for request_id, count in zip(output.request_ids, output.counts, strict=True):
                if request_id < 0 or not count:
                    continue
                landings = self.requests[request_id].landings
                decoded += bool(landings)
                gained += 1
                tokens += count
                landings.append((at, count))
            if decoded:
                self.decode_steps.append(DecodeStep(output.step, at, gained, tokens))
        self.landed = []


def run_requests(
    client: EngineClient,
    requests: Sequence[PromptRequest],
    *,
    max_tokens: int | None = None,
) -> RunTrace:
    """Run ``requests``, of one answer each, to their ends (leader), over a client without texts.

    ``max_tokens``: of every answer, instead of the requests' own. Where the client has no ``concurrency`` of its own, a
    request is submitted when the run starts, else when the engine gets it.
    """
    if max_tokens is not None:
        requests = [replace(one, sampling=replace(one.sampling, max_tokens=max_tokens)) for one in requests]
    times: dict[int, RequestTimes] = {}
    for request in requests:  # what can be done before the clock starts is
        key = client.submit(client.prepare(replace(request, key=None, arrived_at=0.0)))
        times[_number(key)] = RequestTimes(request, 0.0)
    landed: list[tuple[float, StepOutput]] = []
    gc.collect()
    started = time.perf_counter()
    try:
        for turn in client.run():
            if turn.step.request_ids or turn.finished:
                landed.append((turn.at, turn.step))
            for output in turn.finished:
                times[_number(output.key)].submitted = output.timing.queued  # since 0.0, so it is the moment itself
    except EngineIdle as error:
        raise BenchError(str(error)) from error
    if client.concurrency is None:
        for one in times.values():
            one.submitted = started
    trace = RunTrace(started, landed[-1][0], landed, times)
    client.drain()  # ghosts of the last requests: not part of the run
    trace.evaluate()
    return trace


def _number(key: Hashable) -> int:
    """The client's own keys are numbers: the engine's request ids."""
    if not isinstance(key, int):
        raise BenchError(f"a request has the key {key!r} instead of a number")
    return key


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
