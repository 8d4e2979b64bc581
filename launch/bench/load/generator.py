"""The load generator: requests go to a backend when they are due, and not before there is a place for them.

Knows: schedules, closed loops, from when a request's latency counts; rates and concurrencies of a `bench serve`, and
what one run may leave in a prefix cache for the next. Does not know: what a backend is: an engine of
this process (engine_backend.py), or a server (openai_backend.py).

    open loop      each request is sent when it is due, whatever became of the others
    closed loop    all are due at once, at most ``concurrency`` are unanswered: an end lets the next one in
    both           a request waits until it is due, then for a place

One thread does everything. It never polls: while requests run it is inside the backend, which returns after a step; in
between it sends what is due, in portions, so that no step waits for a burst of arrivals.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from launch.bench.load.datasets import LoadSet, arrival_offsets, load_set, stretched
from launch.bench.load.journal import Journal, Served
from launch.bench.serve_options import ServeOptions
from launch.bench.session import Session
from launch.errors import UsageError
from runtime.frontend.client import PromptRequest


@dataclass(frozen=True, slots=True)
class Load:
    """One point: what is sent, and when. ``first_turn``: how many runs came before its first one."""

    label: str
    rate: float
    concurrency: int | None
    dataset: LoadSet
    offsets: Sequence[float]
    first_turn: int

    @property
    def count(self) -> int:
        return len(self.offsets)

    def run(self, number: int) -> Sequence[PromptRequest]:
        """The requests of a run. Where they are drawn, those of every run have other token ids, so that none is
        in a prefix cache because of an earlier run; the first run of all has the dataset's."""
        return self.dataset.with_other_ids(self.first_turn + number) if self.dataset.drawn else self.dataset.requests

    def warm_up(self, count: int) -> Sequence[PromptRequest]:
        """The lengths of the first ``count``, and token ids that no run has."""
        return self.dataset.with_other_ids(-1 - self.first_turn)[:count]


def loads_of(session: Session, options: ServeOptions, *, cached: bool) -> list[Load]:
    """Every point that the command line asks for. ``cached``: prompts of a run stay in a prefix cache that the next one
    finds. Raises UsageError, also for points that cannot be measured one after the other, TokenizerError, BenchError.
    """
    model = session.served_model
    seed, found, sets = session.config.seed, list[Load](), dict[tuple[int, float], LoadSet]()
    for number, (rate, concurrency) in enumerate(options.points):
        count = options.requests_of(concurrency)
        key = (count, rate if options.dataset_name == "burst" else 0.0)
        if key not in sets:
            sets[key] = load_set(options, count, model, session.folder, seed, rate)
        requests = sets[key]
        offsets = requests.offsets
        count = len(requests.requests)
        if offsets is None:
            offsets = arrival_offsets(count, rate, options.burstiness, seed)
        elif options.dataset_name == "trace" and math.isfinite(rate):
            if count > 1 and not offsets[-1] > 0:
                raise UsageError(
                    f"{options.dataset_path}: all requests arrive at one moment, which --request-rate {rate:g} cannot "
                    "stretch: leave it out, or take the times out of the file"
                )
            offsets = stretched(offsets, count / rate)
        found.append(Load(_label(rate, concurrency), rate, concurrency, requests, offsets, number * options.num_iters))
    runs = len(found) * options.num_iters
    if cached:
        refuse_cached(options.dataset_name, found[0].dataset, runs, "measure one point a command")
    return found


def refuse_cached(name: str, dataset: LoadSet, runs: int, otherwise: str) -> None:
    """Raises UsageError where a run would find the prompts of an earlier one in the prefix cache."""
    if runs > 1 and not dataset.drawn:
        raise UsageError(
            f"--dataset-name {name} has prompts of its own, so the prefix cache would have those of the {runs} runs "
            f"from the second on: type --no-prefix-caching, or {otherwise}"
        )


def _label(rate: float, concurrency: int | None) -> str:
    words = [] if concurrency is None else [f"c{concurrency}"]
    if math.isfinite(rate):
        short = f"{rate:g}"
        words.append(f"r{short if float(short) == rate else rate}")  # names files, so no two rates have one
    return "".join(words) or "all"


SEND_SECONDS = 1e-3  # of sending, before the backend gets a turn


class Backend(Protocol):
    """Where requests go. Numbered as they were given to it, before the clock started."""

    def send(self, number: int) -> None:
        """Hand a request over. Takes microseconds."""
        ...

    def advance(self, until: float) -> Sequence[tuple[float, int]]:
        """Let requests advance, and return those that ended meanwhile: (when, number).

        Returns after a step of the engine, or when something ended; while nothing is unanswered at ``until``, which is
        then finite.
        """
        ...

    def begin(self) -> None:
        """The clock starts after this."""
        ...

    def journal(self, started: float, ended: float, requests: Sequence[Served]) -> Journal:
        """Everything that is known of the run. ``requests`` lack what became of them. Called once, at the end."""
        ...


def generate_load(
    backend: Backend,
    prompt_tokens: Sequence[int],
    offsets: Sequence[float],
    concurrency: int | None = None,
    on_end: Callable[[int], None] = lambda ended: None,
    clock: Callable[[], float] = time.perf_counter,
    *,
    ahead: bool = False,
) -> Journal:
    """Run a load to its end. Request i has ``prompt_tokens[i]`` tokens and is due ``offsets[i]`` seconds after the
    start; offsets ascend. ``concurrency``: most requests unanswered at a time. ``on_end`` is called with how many have
    ended each time that some have. ``ahead``: those that may run at once are sent before the clock starts, so that the
    first step has as many of them as it can. Raises what the backend raises."""
    count, most = len(offsets), concurrency or len(offsets)
    first = min(count, most) if ahead else 0
    for number in range(first):
        backend.send(number)
    backend.begin()
    started = free_since = latest = clock()
    requests = [Served(tokens, started, started, started) for tokens in prompt_tokens[:first]]
    ended = 0
    while ended < count:
        now = clock()
        pause = now + SEND_SECONDS
        while len(requests) < count and len(requests) - ended < most and now <= pause:
            due = started + offsets[len(requests)]
            if due > now:
                break
            requests.append(Served(prompt_tokens[len(requests)], due, max(due, free_since), now))
            backend.send(len(requests) - 1)
            now = clock()
        was_full = len(requests) - ended == most  # then an end is waited for: what is due has no place
        until = started + offsets[len(requests)] if len(requests) < count and not was_full else float("inf")
        fresh = backend.advance(until)
        if fresh:
            latest = max(latest, *(when for when, _ in fresh))  # several client processes report in any order
            free_since = latest if was_full else free_since
            ended += len(fresh)
            on_end(ended)
    return backend.journal(started, latest, requests)
