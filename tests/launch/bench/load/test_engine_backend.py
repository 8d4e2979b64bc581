"""Loads through a real engine over a tiny model: what is recorded of each request, and an engine that idles between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from launch.bench.load.datasets import prefix_requests, random_requests
from launch.bench.load.engine_backend import EngineBackend
from launch.bench.load.figures import engine_figures
from launch.bench.load.generator import generate_load
from launch.bench.load.journal import Journal
from launch.bench.load.steady import steps_of
from launch.bench.workload import id_range
from runtime.engine import Engine
from runtime.frontend.client import PromptRequest
from tests.runtime.engine.rig import VOCABULARY, rig

IDS = id_range(VOCABULARY)


def run(
    engine: Engine, requests: list[PromptRequest], offsets: list[float] | None = None, concurrency: int | None = None
) -> Journal:
    lengths = [len(one.prompt) for one in requests]
    return generate_load(EngineBackend(engine, requests), lengths, offsets or [0.0] * len(requests), concurrency)


@pytest.mark.parametrize("depth", [0, 2])
def test_every_token_has_its_moment(depth: int) -> None:
    requests = random_requests(9, 1, IDS, 20, 8, 0.5)
    with rig(depth=depth, rows=4) as engine:
        journal = run(engine, requests, concurrency=3)
        assert not engine.has_work, "ghosts of the last requests have landed"
    assert [one.tokens for one in journal.requests] == [one.sampling.max_tokens for one in requests]
    assert [one.prompt_tokens for one in journal.requests] == [len(one.prompt) for one in requests]
    for one in journal.requests:
        assert (one.failed, one.reason, one.error) == (False, "length", "")
        assert journal.started <= one.due <= one.began <= one.sent < one.moments[0]
        assert one.moments == sorted(one.moments)
        assert one.ended == one.moments[-1] <= journal.ended
    running = [(one.sent, 1) for one in journal.requests] + [(one.ended, -1) for one in journal.requests]
    alive = peak = 0
    for _, change in sorted(running):
        alive += change
        peak = max(peak, alive)
    assert peak == 3
    figures = engine_figures(journal)
    kinds = sum(figures[f"{kind}_steps"] for kind in ("prefill", "decode", "mixed"))
    assert figures["steps"] == kinds > 0
    assert figures["steps"] <= len(steps_of(journal)), "void steps have numbers, too"
    assert (figures["chained"] > 0) == (depth > 0)
    assert sum(figures["chain_breaks"].values()) == round(figures["steps"] * (1 - figures["chained"]))


def test_an_engine_without_work_sleeps_until_the_next_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = random_requests(3, 1, IDS, 5, 3, 0.0)
    waits: list[float] = []
    with rig(rows=4) as engine:
        wait = engine.wait

        def watched(ready: Callable[[float], bool], timeout: float) -> None:
            waits.append(timeout)
            assert not engine.has_work
            wait(ready, timeout)

        monkeypatch.setattr(engine, "wait", watched)
        turns = engine.scheduler.step
        journal = run(engine, requests, [0.0, 0.4, 0.8])
        turns = engine.scheduler.step - turns
    first, second, third = journal.requests
    if second.due > first.ended:  # unless the machine was too busy for a handful of tiny steps in 0.4 s
        assert waits
        assert waits[0] <= 0.4
        assert second.began == second.due <= second.sent
    assert third.due - first.due == pytest.approx(0.8)
    assert turns < 60, "it took no turns while there was nothing to do"


def test_a_shared_beginning_is_found_and_counted() -> None:
    requests = prefix_requests(6, 1, IDS, prefix_len=32, suffix_len=4, output_len=3, prefixes=1)
    with rig(rows=2) as engine:
        journal = run(engine, requests, concurrency=1)
    figures = engine_figures(journal)
    assert figures["prefix_hit_tokens"] == 5 * 32
    assert "fenced_blocks" not in figures, "it falls as it grows"


def test_a_request_that_ends_otherwise_has_failed() -> None:
    requests = random_requests(3, 1, IDS, 10, 5, 0.0)
    requests[1] = replace(requests[1], sampling=replace(requests[1].sampling, max_tokens=120))
    with rig(rows=2, max_model_len=64) as engine:
        journal = run(engine, requests)
    assert [one.failed for one in journal.requests] == [False, True, False]
    assert journal.requests[1].error.startswith("ended by length after ")
    assert journal.requests[1].error.endswith(" of 120 tokens")
