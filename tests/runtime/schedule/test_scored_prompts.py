"""Prompt tokens whose log-probabilities were asked for: each is planned once, whatever happens to its request."""

from __future__ import annotations

import pytest

from runtime.schedule import reservation
from runtime.schedule.plan import Admit, Chunk
from runtime.schedule.request import Request, SamplingParams
from runtime.schedule.states import State
from tests.runtime.schedule.driver import Driver, prompt_of


def admit(engine: Driver, request_id: int, prompt: int, *, top: int | None = 3, priority: int = 0) -> None:
    sampling = SamplingParams(max_tokens=8, prompt_logprobs=top)
    request = Request(request_id, prompt_of(prompt), sampling, priority=priority)
    engine._requests[request_id] = request
    assert engine.scheduler.submit(Admit(request)) == ()


def chunks(engine: Driver) -> list[Chunk]:
    return [chunk for plan in engine.plans if plan is not None for chunk in plan.chunks]


def check_scored(engine: Driver, prompt: int) -> None:
    """Every token but the first, in order, each behind a token of the chunk that scores it."""
    tokens, expected = prompt_of(prompt), 1
    for chunk in chunks(engine):
        if chunk.scored is None:
            continue
        scored = chunk.scored
        end = scored.start + len(scored.token_ids)
        assert (scored.start, scored.top) == (expected, 3)
        assert chunk.start < scored.start
        assert end <= chunk.start + len(chunk.token_ids) + 1
        assert scored.token_ids == tokens[scored.start : end]
        expected = end
    assert expected == prompt


@pytest.mark.parametrize("prompt", [2, 7, 8, 9, 30])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_prompt_in_chunks_is_scored_once(prompt: int, depth: int) -> None:
    engine = Driver(depth=depth, max_prefill_tokens=8)
    admit(engine, 0, prompt)
    engine.finish()
    check_scored(engine, prompt)


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    engine = Driver()
    admit(engine, 0, 1)
    engine.finish()
    assert [chunk.scored for chunk in chunks(engine)] == [None]


def test_whoever_does_not_ask_is_not_scored() -> None:
    engine = Driver(max_prefill_tokens=8)
    admit(engine, 0, 30, top=None)
    engine.finish()
    assert all(chunk.scored is None for chunk in chunks(engine))


def test_cached_blocks_are_recomputed_for_whoever_asks() -> None:
    engine = Driver()
    admit(engine, 0, 30, top=None)
    engine.finish()
    admit(engine, 1, 30)
    engine.finish()
    assert engine.scheduler.counters.prefix_hit_tokens == 0
    check_scored(engine, 30)


@pytest.mark.parametrize("evicted_in", [State.PREFILL, State.DECODE])
def test_an_eviction_scores_nothing_twice_and_forgets_nothing(evicted_in: State) -> None:
    engine = Driver(depth=2, blocks=16, max_prefill_tokens=8, prefill_burst=1)
    admit(engine, 0, 30, top=None)
    engine.turns_until(State.DECODE, 0)
    admit(engine, 1, 26)
    engine.turns_until(State.PREFILL, 1)
    engine.turns_until(evicted_in, 1)
    planned = len([chunk for chunk in chunks(engine) if chunk.scored is not None])
    reservation.evict(engine.scheduler.ledger, engine.sequence(1))
    engine.finish()
    assert engine.scheduler.counters.evictions == 1
    assert planned >= 1
    check_scored(engine, 26)
    recomputed = [chunk for chunk in chunks(engine) if chunk.start == 0]
    assert len(recomputed) == 2 + (evicted_in is State.PREFILL), "what was scored already is found again"
