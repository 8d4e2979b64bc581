"""Requests dealt out to groups that share experts: every answer is that of one engine alone, at any depth.

Each group is an engine in a thread (group_rigs.py); rank 0's is driven as any front end would.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from runtime.engine import Engine
from runtime.frontend.validation import CheckedRequest
from runtime.schedule.plan import Finished, StepOutput
from runtime.schedule.request import FinishReason
from tests.runtime.engine import lives, rig
from tests.runtime.engine.conftest import long
from tests.runtime.engine.group_rigs import dealt_rig
from tests.runtime.engine.lives import Life, live, oracle, people, prompt, same
from tests.runtime.engine.random_lives import random_life
from tests.runtime.engine.rig import TINY, request, run
from tests.runtime.engine.test_experts import EXPERTS

CANCELLED = FinishReason.CANCELLED


@pytest.fixture(autouse=True, scope="module")
def tiny_models_have_experts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig, "TINY", TINY | EXPERTS)
        lives._alone.cache_clear()
        yield
    lives._alone.cache_clear()


@pytest.fixture(params=[2, *(pytest.param(depth, marks=pytest.mark.long) for depth in (0, 1, 4))])
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def counted(life: Life, name: str, groups: int = 2) -> list[int | float]:
    return [life.counters[f"group_{name}{{{group}}}"] for group in range(groups)]


# ---- who works when ----


@pytest.mark.parametrize("groups", [long(2), 4])
def test_requests_are_spread_evenly_and_answered_as_by_one_engine(depth: int, groups: int) -> None:
    requests = people(8, logprobs=2)
    life = live(requests, depth=depth, over=dealt_rig, groups=groups)
    same(life, oracle(requests))
    assert counted(life, "requests", groups) == [8 // groups] * groups
    assert counted(life, "idle_steps", groups) == [0] * groups, "all had rows in every step"


def test_answers_to_one_prompt_fork_in_one_group(depth: int) -> None:
    requests = [request(10 * i, prompt(19 + i, i), n=4, temperature=1.0, max_tokens=8, stops=()) for i in range(2)]
    life = live(requests, depth=depth, over=dealt_rig)
    same(life, oracle([answer for one in requests for answer in one.answers()]))
    assert counted(life, "requests") == [4, 4]
    assert (life.counters["forks"], life.counters["prefill_tokens"]) == (3, 19), "of the first group"


def test_fewer_requests_than_groups(depth: int) -> None:
    requests = [request(0, prompt(12), max_tokens=16, stops=())]
    life = live(requests, depth=depth, over=dealt_rig, groups=4, buckets=(1, 2, 4, 8))
    same(life, oracle(requests))
    assert counted(life, "requests", 4) == [1, 0, 0, 0]
    assert counted(life, "idle_steps", 4) == [0, *[life.counters["steps"]] * 3]
    assert life.counters["graph_captures_after_warmup"] == 0


def test_groups_join_and_drain_at_different_times(depth: int) -> None:
    """The first has a long request, the second short ones now and then; each begins in the other's graphs."""
    long = request(0, prompt(20), max_tokens=40, stops=())
    short = [request(i, prompt(4 * i, i), max_tokens=3, stops=()) for i in range(1, 5)]
    later = {10 * i: [one] for i, one in enumerate(short, 1)}
    life = live([long], depth=depth, later=later, over=dealt_rig, buckets=(1, 2, 4, 8))
    same(life, oracle([long, *short]))
    assert counted(life, "requests") == [1, 4]
    idle = counted(life, "idle_steps")
    assert idle[0] <= 3, "steps of the last short one"
    assert idle[1] >= 40 - 4 * 4
    assert life.counters["graph_captures_after_warmup"] == 0


def test_nobody_launches_while_nobody_has_work(depth: int) -> None:
    """The job comes to rest between batches, and what was put out is all there by then."""
    requests = people(6)
    whole = oracle(requests)
    found: dict[int, Finished] = {}
    with dealt_rig(depth=depth, horizon=2) as engine:
        for pair in (requests[:1], requests[1:3], requests[3:]):
            found |= run(engine, pair)
            assert not engine.has_work
            at_rest = len(engine.executor.results._in_flight), engine.counters["steps"]
            for _ in range(5):
                output = engine.step()
                assert not output.request_ids
                assert not output.finished
            assert (len(engine.executor.results._in_flight), engine.counters["steps"]) == at_rest
    assert {i: (e.token_ids, e.reason) for i, e in found.items()} == whole.answers


# ---- what may happen to a request, wherever it runs ----


def test_every_way_to_end(depth: int) -> None:
    """By length, by the context, by a stop id, by one that does not count yet, refused."""
    alone = oracle(people(6, max_tokens=20))
    requests = people(6, max_tokens=20)
    requests[1] = replace(requests[1], stop_token_ids=(alone.answers[1][0][4],))
    requests[2] = replace(requests[2], stop_token_ids=(alone.answers[2][0][0],))
    requests[3] = replace(
        requests[3],
        stop_token_ids=(alone.answers[3][0][2],),
        sampling=replace(requests[3].sampling, min_tokens=9),
    )
    requests[4] = request(4, prompt(40, 4), max_tokens=90, stops=(), logprobs=1)

    def slips_through(engine: Engine, turn: int) -> None:
        """Longer than schedulers take; Engine.add would refuse it, were it not marked as checked."""
        if turn == 0:
            late = request(6, prompt(60, 6), max_tokens=8, stops=())
            engine.add(CheckedRequest(6, late.prompt_token_ids, late.sampling, model=engine.model_config))

    life = live(requests, slips_through, depth=depth, over=dealt_rig, max_model_len=50)
    refused = life.finished.pop(6)
    assert (refused.reason, refused.token_ids) == (FinishReason.REJECTED, ()), "by whichever group has it"
    same(life, oracle(requests, max_model_len=50))
    assert {reason for _, reason in life.answers.values()} >= {FinishReason.STOP, FinishReason.LENGTH}
    assert len(life.finished[4].token_ids) == 10


def test_cancel_pause_and_resume_reach_the_group_that_has_the_request(depth: int) -> None:
    requests = people(6, max_tokens=30)
    stood: dict[int, set[int]] = {2: set(), 3: set()}
    life = Life()

    def act(engine: Engine, turn: int) -> None:
        for i in stood:
            if turn == 6:
                engine.pause(i)
            if turn == 30:
                engine.resume(i)
        for i in (0, 1):
            if turn == 10:
                engine.cancel(i)
                engine.cancel(i)
        if turn == 12:
            engine.cancel(4, FinishReason.STOP)  # as for a stop string
            engine.cancel(5, FinishReason.STOP)
            engine.cancel(4711)

    life = live(requests, act, depth=depth, over=dealt_rig)
    assert counted(life, "requests") == [3, 3]
    same(life, oracle(requests), but=[0, 1, 4, 5])
    assert [life.answers[i][1] for i in (0, 1, 4, 5)] == [CANCELLED, CANCELLED, FinishReason.STOP, FinishReason.STOP]
    for i in stood:
        still = {life.gained[turn].get(i, 0) for turn in range(8 + depth, 29)}
        assert len(still) == 1, "what was in flight has come, and nothing more"


def test_log_probabilities_and_scored_prompts_of_any_group(depth: int) -> None:
    """Some ask for more likely tokens than others, some for none; prompts are scored in pieces."""
    asked = [None, 0, 1, 5, None, 3]
    requests = [
        request(i, prompt(20 + i, i), max_tokens=6, stops=(), logprobs=top, prompt_logprobs=(None, 2, 0)[i % 3])
        for i, top in enumerate(asked)
    ]
    life = live(requests, depth=depth, over=dealt_rig, max_prefill_tokens=16)
    same(life, oracle(requests))
    assert life.scores.by_request.keys() == {1, 2, 4, 5}


def test_eviction_in_every_group(depth: int) -> None:
    requests = people(8, length=20, max_tokens=40)
    life = live(requests, depth=depth, over=dealt_rig, blocks=14, max_model_len=64)
    same(life, oracle(requests))
    assert life.counters["evictions"] > 0


@pytest.mark.parametrize("seed", [*(pytest.param(seed, marks=pytest.mark.long) for seed in range(3)), 3])
def test_random_lives(seed: int) -> None:
    drawn = random_life(2000 + seed)
    depth, groups = (0, 1, 2, 4)[seed % 4], random.Random(seed).choice((2, 2, 4))
    life = live(drawn.first, drawn.act, depth=depth, later=drawn.later, over=dealt_rig, groups=groups, **drawn.limits)
    same(life, oracle(drawn.requests), but=[i for i in drawn.cut if life.answers[i][1] is CANCELLED])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4, 400))
def test_many_random_lives(seed: int) -> None:
    test_random_lives(seed)


def test_requests_that_have_not_ended_are_dropped_at_the_end(depth: int) -> None:
    with dealt_rig(depth=depth, all_back=False) as engine:
        for one in people(4, max_tokens=50):
            engine.add(one)
        for _ in range(12):
            engine.step()
        engine.stop()


def outputs(**limits: Any) -> list[StepOutput]:
    found: list[StepOutput] = []
    with dealt_rig(depth=2, **limits) as engine:
        run(engine, people(5), watch=found.append)
    return found


def test_outputs_do_not_depend_on_who_was_quick() -> None:
    first, second = outputs(), outputs()
    assert [(one.step, list(one.request_ids), list(one.tokens)) for one in first] == [
        (one.step, list(one.request_ids), list(one.tokens)) for one in second
    ]
    assert sorted(i for i in first[8].request_ids if i >= 0) == [0, 1, 2, 3, 4], "a step's rows come together"
