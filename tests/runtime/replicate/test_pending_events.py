"""What is announced in which turn: portions of arrivals, in order; nobody's cancel waits behind strangers."""

from __future__ import annotations

from array import array

import pytest

from parallel.control.wire.frames import MAX_PAYLOAD
from runtime.config import EngineConfig
from runtime.execute.launch_spec import LaunchSpec
from runtime.replicate import pending_events
from runtime.replicate.event_codec import encode_events
from runtime.replicate.pending_events import LEAST_PROMPT_TOKENS, LEAST_REQUESTS, PendingEvents, open_pending_events
from runtime.schedule.plan import Admit, Branch, Cancel, Continue, Event, Extend, Pause, Resume
from tests.runtime.engine.rig import request, rig


def arrival(request_id: int, length: int = 4) -> Admit:
    return Admit(request(request_id, range(length)))


def drained(outbox: PendingEvents) -> list[list[Event]]:
    portions = []
    while outbox.count:
        portions.append(outbox.portion())
    return portions


def test_a_portion_ends_with_the_arrival_that_reaches_its_prompt_tokens() -> None:
    outbox = PendingEvents(prompt_tokens=10, requests=100)
    arrivals = [arrival(i, length) for i, length in enumerate((4, 5, 6, 10, 30, 1))]
    for one in arrivals:
        outbox.put(one)
    assert drained(outbox) == [arrivals[:3], arrivals[3:4], arrivals[4:5], arrivals[5:]]
    assert outbox.count == 0
    assert outbox.portion() == []


def test_a_portion_ends_with_the_arrival_that_reaches_its_requests() -> None:
    outbox = PendingEvents(prompt_tokens=100, requests=2)
    arrivals = [arrival(i) for i in range(5)]
    for one in arrivals:
        outbox.put(one)
    assert drained(outbox) == [arrivals[:2], arrivals[2:4], arrivals[4:]]


def test_what_is_about_an_arrival_stays_behind_it_and_all_else_goes_first() -> None:
    outbox = PendingEvents(prompt_tokens=100, requests=1)
    events: list[Event] = [arrival(0), arrival(1), Pause(1), Cancel(7), Resume(1), Cancel(1), Pause(0)]
    for one in events:
        outbox.put(one)
    first, second, pause, cancel, resume, end, late = events
    assert drained(outbox) == [[cancel, first], [second], [pause, resume, end, late]]
    outbox.put(Cancel(1))
    assert outbox.portion() == [Cancel(1)], "announced before: nobody is ahead of it"


def test_a_fork_follows_its_parent_and_what_is_about_it_follows_the_fork() -> None:
    outbox = PendingEvents(prompt_tokens=4, requests=10)
    events: list[Event] = [arrival(0), arrival(1), Branch(2, 1), Continue(2, 1, 3), Branch(5, 9), Continue(5, 1, 1)]
    for event in events:
        outbox.put(event)
    assert drained(outbox) == [
        [Branch(5, 9), Continue(5, 1, 1), arrival(0)],
        [arrival(1)],
        [Branch(2, 1), Continue(2, 1, 3)],
    ]


def test_a_request_for_several_answers_is_told_once_and_counts_as_many() -> None:
    outbox = PendingEvents(prompt_tokens=100, requests=3)
    several = Admit(request(0, range(4), n=3))
    for one in (several, arrival(3), Cancel(2), Cancel(9)):
        outbox.put(one)
    assert drained(outbox) == [[Cancel(9), several], [arrival(3), Cancel(2)]], "an answer's end follows its arrival"


def test_a_portion_has_no_more_bytes_than_a_control_record_may_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pending_events.MOST_BYTES < MAX_PAYLOAD
    most = 1 << 16
    monkeypatch.setattr(pending_events, "MOST_BYTES", most)
    allowed = tuple(range(1 << 16, (1 << 16) + 3000))
    arrivals: list[Event] = [Admit(request(i, [1], allowed_token_ids=allowed)) for i in range(20)]
    said: list[Event] = [Extend(100 + i, 1, array("i", [7] * 5000), 1, 1) for i in range(10)]
    large = Extend(200, 1, array("i", [7] * (most // 4)), 1, 1)
    outbox = PendingEvents(prompt_tokens=8192, requests=256)
    for event in [*arrivals, *said, large, Cancel(200)]:
        outbox.put(event)
    portions = drained(outbox)
    assert [event for portion in portions for event in portion] == [*said, large, Cancel(200), *arrivals]
    assert [large] in portions, "alone"
    assert all(len(encode_events(portion)) <= most for portion in portions if portion != [large])
    assert len(portions) <= 4 + 1 + 6, "each of the others is about as full as it may be"


def test_a_portion_fills_the_next_prefill_step_of_every_group() -> None:
    config = EngineConfig(model="m", device="cuda", max_num_seqs=512, max_prefill_tokens=20_000)
    groups = EngineConfig(
        model="m", device="cuda", max_num_seqs=512, max_prefill_tokens=20_000, data_parallel=4, tensor_parallel=1
    )
    small = EngineConfig(model="m", device="cpu", max_num_seqs=2, max_prefill_tokens=64)
    for engine, tokens, requests in (
        (config, 20_000, 512),
        (groups, 4 * 2 * 20_000, 4 * 2 * 512),
        (small, LEAST_PROMPT_TOKENS, LEAST_REQUESTS),
    ):
        outbox = open_pending_events(engine)
        for i in range(3):
            outbox.put(arrival(i, tokens // 2))
        assert len(outbox.portion()) == 2
        outbox = open_pending_events(engine)
        for i in range(requests + 1):
            outbox.put(arrival(i, 1))
        assert len(outbox.portion()) == requests


def test_prefill_steps_are_as_full_as_if_all_had_been_announced_at_once() -> None:
    """512 prompts of 32 tokens through steps of 2,048: a portion is 256 of them, four steps."""
    budget, length, prompts = 2048, 32, 2 * LEAST_REQUESTS
    prefilled = []
    with rig(
        rows=prompts,
        blocks=prompts * 3,
        block_size=16,
        max_prefill_tokens=budget,
        prefill_burst=1 << 20,
        horizon=2,
        prefix_caching=False,
    ) as engine:
        for i in range(prompts):
            engine.add(request(i, [i % 200] * length, max_tokens=1))
        launch = engine.executor.launch

        def watched(spec: LaunchSpec) -> None:
            prefilled.append(spec.plan.prefill_tokens)
            launch(spec)

        engine.executor.launch = watched  # type: ignore[method-assign]
        ended = 0
        while engine.has_work:
            ended += len(engine.step().finished)
    assert ended == prompts
    assert prefilled == [budget] * (prompts * length // budget)
