"""logit_bias, allowed_token_ids and bad words in a whole engine: what comes out, the same at any depth and width."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from runtime.engine import Engine
from runtime.schedule.request import FinishReason, Request
from tests.runtime.engine.rig import VOCABULARY, request, rig, run
from tests.runtime.execute.sampling.sampling_fields import SamplingFields

Tokens = dict[int, tuple[int, ...]]


def mixture(seed: int, count: int = 12) -> list[Request]:
    """Some name tokens, some do not; few are allowed, so that bad words are met again and again."""
    draw = random.Random(seed)
    requests = []
    for request_id in range(count):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 40))]
        sampling: SamplingFields = {"max_tokens": draw.randrange(8, 30), "temperature": draw.choice((0.0, 1.0, 2.0))}
        kind = request_id % 4
        if kind in (0, 3):
            few = tuple(sorted(draw.sample(range(VOCABULARY), 3)))
            sampling["allowed_token_ids"] = few
            sampling["bad_words_token_ids"] = tuple((draw.choice(few), draw.choice(few)) for _ in range(3))
        if kind in (1, 3):
            ids = draw.sample(range(VOCABULARY), draw.choice((2, 150)))
            sampling["logit_bias"] = tuple((token, draw.choice((-100.0, 2.5, 40.0))) for token in sorted(ids))
        if draw.random() < 0.4:
            sampling |= {"repetition_penalty": 1.3, "presence_penalty": 0.2}
        requests.append(request(request_id, prompt, stops=(), **sampling))
    return requests


def tokens(engine: Engine, requests: list[Request]) -> Tokens:
    return {request_id: tuple(ended.token_ids) for request_id, ended in run(engine, requests).items()}


def check(requests: list[Request], found: Tokens) -> None:
    """What was asked for is what came out."""
    for one in requests:
        answer, sampling = found[one.request_id], one.sampling
        if sampling.allowed_token_ids:
            assert set(answer) <= set(sampling.allowed_token_ids)
        pairs = set(pairwise(answer))
        assert not pairs & set(sampling.bad_words_token_ids)
        banned = {token for token, bias in sampling.logit_bias if bias == -100.0}
        assert sampling.allowed_token_ids or not set(answer) & banned


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.long), 1])
def test_every_depth_draws_what_the_serial_engine_does(seed: int) -> None:
    requests = mixture(seed)
    with rig(depth=0) as engine:
        serial = tokens(engine, requests)
    check(requests, serial)
    for depth in (1, 3):
        with rig(depth=depth) as engine:
            assert tokens(engine, requests) == serial


def test_whoever_is_evicted_comes_back_with_what_it_generated() -> None:
    requests = mixture(5)
    with rig(depth=0, blocks=200) as engine:
        roomy = tokens(engine, requests)
    with rig(depth=2, blocks=18) as engine:
        tight = tokens(engine, requests)
        assert engine.counters["evictions"] > 0
    assert tight == roomy


def test_a_running_request_that_names_tokens_stages_no_more_than_another() -> None:
    """Bytes that a whole run stages differ by what the one request names, however many steps it takes."""

    def staged(most: int, sampling: SamplingFields) -> int:
        with rig(depth=2) as engine:
            run(engine, [request(1, [3, 4, 5], stops=(), **(sampling | {"max_tokens": most}))])
            return int(engine.counters["host_to_device_bytes"])

    plain: SamplingFields = {"temperature": 0.0}
    named: SamplingFields = {**plain, "logit_bias": ((5, 2.0), (9, -3.0)), "allowed_token_ids": tuple(range(99))}
    named["bad_words_token_ids"] = ((7, 8),)
    assert staged(60, named) - staged(60, plain) == staged(12, named) - staged(12, plain) > 0


def test_one_that_may_draw_nothing_ends_alone() -> None:
    nothing = request(1, [5, 6], stops=(), max_tokens=5, allowed_token_ids=(4,), bad_words_token_ids=((4,),))
    beside = request(2, [5, 6], stops=(), max_tokens=5, temperature=0.0)
    with rig(depth=2) as engine:
        ended = run(engine, [nothing, beside])
    assert (ended[1].reason, ended[2].reason) == (FinishReason.ERROR, FinishReason.LENGTH)
