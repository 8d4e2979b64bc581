"""Events as bytes: every field comes back, and what does not fit exactly is refused with the field's name."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.replicate import event_codec
from runtime.replicate.event_codec import EventsRefused, decode_events, encode_events, most_bytes
from runtime.schedule.plan import (
    Admit,
    Branch,
    Cancel,
    Compile,
    Continue,
    Event,
    Extend,
    Pause,
    ResetPrefixCache,
    Resume,
    Tabled,
)
from runtime.schedule.request import NUMBERS, Field, FinishReason, Request, SamplingParams, packed

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple)
COUNTS = st.integers(0, 2**31 - 1)


def legal(field: Field) -> st.SearchStrategy[Any]:
    most = 2**31 - 1 if field.name in ("max_tokens", "min_tokens") else field.highest  # cut before they are sent
    if field.type is float:
        return st.floats(field.lowest, most)
    return (
        st.integers(int(field.lowest), int(most))
        if field.default is not None
        else st.none() | st.integers(int(field.lowest), int(most))
    )


SAMPLING = st.builds(
    SamplingParams,
    **{field.name: legal(field) for field in NUMBERS},
    stop=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    stop_token_ids=TOKENS,
    ignore_eos=st.booleans(),
    cache_salt=st.text(max_size=5),
)
IDS = st.integers(0, 2**62 - 1)
REQUESTS = st.builds(Request, IDS, TOKENS.map(packed), SAMPLING, TOKENS, st.integers(-(2**63), 2**63 - 1))
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Admit, REQUESTS),
    st.builds(Admit, REQUESTS, COUNTS, st.booleans()),
    st.builds(Cancel, IDS, st.sampled_from(FinishReason)),
    st.builds(Pause, IDS),
    st.just(ResetPrefixCache()),
    st.builds(Resume, IDS),
    st.builds(Continue, IDS, COUNTS, COUNTS),
    st.builds(Extend, IDS, COUNTS, TOKENS.map(packed), COUNTS, COUNTS),
    st.builds(Branch, IDS, IDS, st.booleans()),
    st.builds(Tabled, st.binary(max_size=16), st.binary(max_size=99)),
    st.builds(Compile, IDS, st.text(max_size=99), st.booleans(), st.lists(IDS, max_size=3).map(tuple)),
)
PLAIN = Request(3, (1, 2, 3), SamplingParams(seed=5), (0,))


@pytest.mark.slow
@given(st.lists(EVENTS, max_size=6))
def test_events_come_back_as_they_went(events: list[Event]) -> None:
    back = decode_events(encode_events(events))
    assert back == tuple(events)
    assert [type(event) for event in back] == [type(event) for event in events]


def test_who_made_the_record_keeps_its_own_packed_prompts_and_takes_all_else_from_it() -> None:
    mine = replace(PLAIN, prompt_token_ids=packed(PLAIN.prompt_token_ids), request_id=4)
    own: list[Event] = [Admit(PLAIN), Cancel(9), Admit(mine)]
    back = decode_events(encode_events(own), own)
    assert back == decode_events(encode_events(own))
    ours, theirs = back[2], back[0]
    assert isinstance(ours, Admit)
    assert isinstance(theirs, Admit)
    assert ours.request.prompt_token_ids is mine.prompt_token_ids
    assert ours.request.sampling is not mine.sampling
    assert theirs.request.prompt_token_ids == packed(PLAIN.prompt_token_ids), "one that was not packed is unpacked"


def test_a_prompt_with_many_answers_travels_once() -> None:
    asked = replace(PLAIN, prompt_token_ids=packed(range(1000)))
    alone, eight = (
        encode_events([Admit(replace(asked, sampling=replace(asked.sampling, n=answers)))]) for answers in (1, 8)
    )
    assert len(alone) > 4000
    assert len(eight) <= len(alone) + 8


def test_no_events_are_no_bytes() -> None:
    assert encode_events([]) == b""
    assert decode_events(b"") == ()


def test_most_bytes_is_a_bound_that_is_not_far_off() -> None:
    most = 2**31 - 1
    ids = (most,) * 1000
    numbers: dict[str, Any] = {field.name: field.type(min(most, field.highest)) for field in NUMBERS}
    plain = Request(2**62 - 1, ids, SamplingParams(**numbers), (), 2**63 - 1)
    lists: list[dict[str, Any]] = [
        {"stop_token_ids": ids},
        {"allowed_token_ids": ids},
        {"logit_bias": ((most, -99.9),) * 1000},
        {"bad_words_token_ids": ((most,) * 16,) * 256},
        {"stop": ("\U0001f600" * 1024,) * 16},
        {"cache_salt": "\U0001f600" * 1024},
    ]
    events: list[Event] = [
        Admit(plain),
        Admit(replace(plain, stop_token_ids=ids)),
        Extend(2**62 - 1, most, ids, most, most),
    ]
    events += [Admit(replace(plain, sampling=replace(plain.sampling, **fields)), most, True) for fields in lists]
    for event in [*events, Branch(2**62 - 1, 2**62 - 1, True), Continue(2**62 - 1, most, most)]:
        size = len(encode_events([event]))
        assert size <= most_bytes(event) <= 1.1 * size + 512


def test_every_field_of_the_dataclasses_travels() -> None:
    """A field added to a request and forgotten here would silently differ between leader and followers."""
    for dataclass, struct in ((SamplingParams, event_codec._Sampling), (Request, event_codec._Request)):
        assert tuple(field.name for field in fields(dataclass)) == struct.__struct_fields__


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": -0.1}, "request 3: temperature is -0.1, not 0 to 1000"),
        ({"temperature": float("inf")}, "temperature is inf, not 0 to 1000"),
        ({"temperature": float("nan")}, "temperature is nan, not 0 to 1000"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan, not -2 to 2"),
        ({"top_p": 1.5}, "top_p is 1.5, not"),
        ({"max_tokens": 0}, "max_tokens is 0, not 1 to"),
        ({"max_tokens": 2**31}, "<= 2147483647"),
        ({"max_tokens": 1.5}, "Expected `int`"),
        ({"max_tokens": True}, "Expected `int`"),
        ({"seed": 2**63}, ""),
        ({"n": 0}, "n is 0, not 1 to 128"),
        ({"stop": "word"}, "Expected `array`"),
        ({"stop_token_ids": (-1,)}, ">= 0"),
        ({"ignore_eos": 1}, "Expected `bool`"),
    ],
)
def test_a_field_out_of_its_range_is_refused(change: dict[str, Any], said: str) -> None:
    request = replace(PLAIN, sampling=replace(PLAIN.sampling, **change))
    with pytest.raises(EventsRefused) as caught:
        encode_events([Admit(request)])
    assert said in str(caught.value)


@pytest.mark.parametrize("token", [-1, 2**31, 2**70, 1.5, "1", None])
def test_a_prompt_of_other_than_tokens_is_refused(token: Any) -> None:
    with pytest.raises(EventsRefused, match="request 3"):
        encode_events([Admit(replace(PLAIN, prompt_token_ids=(1, token, 3)))])


@pytest.mark.parametrize("prompt", [b"123", b"\0\0\0\0\0", b"\1\0\0\0\1\0\0\x80", b"\xff" * 8])
def test_bytes_that_are_no_tokens_are_refused(prompt: bytes) -> None:
    admit = event_codec._to_wire(Admit(PLAIN))
    assert isinstance(admit, event_codec._Admit)
    bad = msgspec.structs.replace(admit, request=msgspec.structs.replace(admit.request, prompt_token_ids=prompt))
    with pytest.raises(EventsRefused, match=f"request 3: prompt_token_ids are {len(prompt)} bytes"):
        decode_events(msgspec.msgpack.encode([bad]))


@pytest.mark.parametrize("said", [(1, -1), (2**31,), (1.5,)])
def test_a_turn_of_other_than_tokens_is_refused(said: Any) -> None:
    with pytest.raises(EventsRefused, match=r"token_ids of request 3|request 3: token_ids"):
        encode_events([Extend(3, 1, said, 4, 4)])


def test_what_is_no_event_cannot_be_sent() -> None:
    no_event: Any = "admit"
    no_number: Any = object()
    with pytest.raises(EventsRefused, match="str is no event"):
        encode_events([no_event])
    with pytest.raises(EventsRefused, match="events cannot be sent"):
        encode_events([Pause(2**70)])
    with pytest.raises(EventsRefused, match="events cannot be sent"):
        encode_events([Pause(no_number)])


@pytest.mark.parametrize(
    "wire",
    [
        {},
        [[]],
        [[4, 1]],
        [[2]],
        [[2, 1, 1]],
        [[2, -1]],
        [[2, "1"]],
        [[1, 1, 9]],
        [[0, [1]]],
        [{"type": 2, "request_id": 1}],
        7,
    ],
)
def test_msgpack_that_is_no_list_of_events_is_refused(wire: object) -> None:
    with pytest.raises(EventsRefused, match="bytes are no events: "):
        decode_events(msgspec.msgpack.encode(wire))


def test_10000_mangled_payloads_are_refused_or_are_legal_events() -> None:
    rng = random.Random(4)
    good = encode_events([Admit(PLAIN), Cancel(3), Pause(3), Resume(3)])
    refused = 0
    for _ in range(10_000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            del data[rng.randrange(1, len(data)) :]
        try:
            events = decode_events(bytes(data))
        except EventsRefused:
            refused += 1
        else:
            assert decode_events(encode_events(events)) == events
    assert refused > 5_000
