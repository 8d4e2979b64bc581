"""The load generator: requests go to a backend when they are due, and not before there is a place for them.

Knows: schedules, closed loops, from when a request's latency counts. Does not know: what a backend is: an engine of
this process (engine_backend.py), or a server (openai_backend.py).

    open loop      each request is sent when it is due, whatever became of the others
    closed loop    all are due at once, at most ``concurrency`` are unanswered: an end lets the next one in
    both           a request waits until it is due, then for a place

One thread does everything. It never polls: while requests run it is inside the backend, which returns after a step; in
between it sends what is due, in portions, so that no step waits for a burst of arrivals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from launch.bench.load.journal import Journal, Served

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
