"""Requests: what one for several answers stands for, and how little the prompts of those that wait take."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Callable

import pytest

from runtime.replicate.event_codec import decode_events, encode_events
from runtime.schedule.plan import Admit, Cancel
from runtime.schedule.request import FinishReason, Request, SamplingParams, packed
from runtime.schedule.scheduler import Scheduler
from tests.runtime.schedule.configs import config_with
from tests.runtime.schedule.driver import Driver, prompt_of

ROOM = config_with(blocks=4096, block_size=64, max_model_len=16384, max_prefill_tokens=8192)


def test_a_request_for_several_answers_is_as_many_requests_over_one_prompt() -> None:
    sampling = SamplingParams(n=3, seed=2**63 - 2, prompt_logprobs=4, max_tokens=7)
    whole = Request(10, packed((1, 2, 3)), sampling, (5,), priority=2)
    each = whole.answers()
    assert [one.request_id for one in each] == list(whole.answer_ids) == [10, 11, 12]
    assert [one.sampling.seed for one in each] == [2**63 - 2, 2**63 - 1, -(2**63)], "of 64 bits"
    assert [one.sampling.prompt_logprobs for one in each] == [4, None, None], "a prompt is scored once"
    assert {(one.sampling.n, one.sampling.max_tokens, one.stop_token_ids, one.priority) for one in each} == {
        (1, 7, (5,), 2)
    }
    assert all(one.prompt_token_ids is whole.prompt_token_ids for one in each)
    alone = Request(10, (1, 2), SamplingParams())
    assert alone.answers() == (alone,)


def test_packed_ids_are_packed_once() -> None:
    ids = packed((1, 70_000))
    assert (ids, ids.itemsize) == (array("i", (1, 70_000)), 4)
    assert packed(ids) is ids


def test_every_answer_runs_and_each_can_be_ended_alone() -> None:
    engine = Driver()
    request = Request(5, prompt_of(6), SamplingParams(max_tokens=5, n=3))
    engine._requests |= {one.request_id: one for one in request.answers()}
    assert engine.scheduler.submit(Admit(request)) == ()
    assert engine.scheduler.unfinished == 3
    engine.turns(2)
    engine.cancel(6)
    engine.finish()
    assert [engine.reason(answer) for answer in (5, 6, 7)] == [
        FinishReason.LENGTH,
        FinishReason.CANCELLED,
        FinishReason.LENGTH,
    ]


@pytest.mark.parametrize("taken", [4, 6])
def test_a_refusal_is_told_for_every_answer(taken: int) -> None:
    """Another request has one of its ids; or its prompt is too long."""
    engine = Driver()
    engine.admit(taken)
    ended = engine.scheduler.submit(Admit(Request(4, prompt_of(3 if taken == 6 else 64), SamplingParams(n=3))))
    assert [(end.request_id, end.reason) for end in ended] == [(i, FinishReason.REJECTED) for i in (4, 5, 6)]
    engine.finish()
    assert engine.scheduler.counters.finished["rejected"] == 3


# ---- memory ----


def taken_by(make: Callable[[], object]) -> int:
    """Bytes that are held when it is made."""
    tracemalloc.start()
    try:
        kept = make()
        held, _ = tracemalloc.get_traced_memory()
        del kept
        return held
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("n", [1, 4])
def test_a_prompt_that_waits_takes_five_bytes_a_token_at_most(n: int) -> None:
    """On every rank, decoded from a control record; once for all answers of a request."""
    length, requests = 8000, 40
    payload = encode_events(
        [
            Admit(Request(n * i, packed(range(i, i + length)), SamplingParams(seed=0, n=n, max_tokens=9)))
            for i in range(requests)
        ]
    )
    assert len(payload) < requests * (4 * length + 200), "and is sent once"

    def waiting() -> Scheduler:
        scheduler = Scheduler(ROOM)
        for event in decode_events(payload):
            assert scheduler.submit(event) == ()
        return scheduler

    assert taken_by(waiting) - taken_by(lambda: Scheduler(ROOM)) < 5 * length * requests


def test_a_prompt_s_memory_is_its_own_once_it_runs() -> None:
    """Tokens are appended to what it generates, not to the request that others may share."""
    engine = Driver()
    prompt = packed(prompt_of(6))
    request = Request(0, prompt, SamplingParams(max_tokens=5, n=2))
    engine._requests |= {one.request_id: one for one in request.answers()}
    engine.scheduler.submit(Admit(request))
    engine.finish()
    assert tuple(prompt) == prompt_of(6)
    engine.scheduler.submit(Cancel(0))
