"""The events of a control record as bytes: msgpack, typed, strict. What does not fit exactly is refused.

Knows: the events of runtime/schedule/plan.py and every legal range of their fields.
Does not know: steps, records, sockets (parallel/control) or what a scheduler does with an event.

Each event is a msgpack array that begins with its tag; fields stand in the order of the dataclass they mirror, so that
nothing is optional and nothing can be added. No events are no bytes. The token ids of a prompt are one string of
little-endian int32, and stay packed: read one by one as msgpack's own integers, they would take longer than everything
else that the host does before a prefill, and ten times the memory while they wait. A request for n answers is one
event.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated

import msgspec
from msgspec import Meta

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
from runtime.schedule.request import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_CHARACTERS,
    MAX_LOGIT_BIAS,
    MAX_SALT_CHARACTERS,
    NUMBERS,
    FinishReason,
    Request,
    SamplingParams,
    packed,
)


class EventsRefused(ValueError):
    """Bytes that are no events, or events that cannot be sent; the text says which field and why."""


_Id = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
_BadWord = Annotated[tuple[_Token, ...], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]
_Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Sampling(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """SamplingParams; ranges of its numbers are those of NUMBERS."""

    max_tokens: _Count  # cut to what fits before it is sent
    min_tokens: _Count
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    n: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[_Token, ...]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    logit_bias: Annotated[tuple[tuple[_Token, float], ...], Meta(max_length=MAX_LOGIT_BIAS)]
    allowed_token_ids: tuple[_Token, ...]
    bad_words_token_ids: Annotated[tuple[_BadWord, ...], Meta(max_length=MAX_BAD_WORDS)]
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARACTERS)]
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARACTERS)]


class _Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    request_id: _Id
    prompt_token_ids: bytes
    sampling: _Sampling
    stop_token_ids: tuple[_Token, ...]
    priority: _Int64


class _Admit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0):
    request: _Request
    quantum: _Count
    keep: bool


class _Cancel(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    request_id: _Id
    reason: FinishReason


class _Pause(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    request_id: _Id


class _Resume(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    request_id: _Id


class _Continue(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    request_id: _Id
    epoch: _Count
    tokens: _Count


class _Extend(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    request_id: _Id
    epoch: _Count
    token_ids: bytes
    max_tokens: _Count
    tokens: _Count


class _Branch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    request_id: _Id
    parent: _Id
    scored: bool


class _ResetPrefixCache(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=7):
    pass


class _Tabled(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=8):
    key: bytes
    table: bytes


class _Compile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=9):
    number: _Id
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARACTERS)]
    regular: bool
    dropped: tuple[_Id, ...]


# Events whose fields travel as they are.
_MIRRORS: dict[type[Event], type[_Wire]] = {
    Cancel: _Cancel,
    Pause: _Pause,
    Resume: _Resume,
    Continue: _Continue,
    Branch: _Branch,
    ResetPrefixCache: _ResetPrefixCache,
    Tabled: _Tabled,
    Compile: _Compile,
}
_MIRRORED = {wire: event for event, wire in _MIRRORS.items()}
_Wire = _Admit | _Cancel | _Pause | _Resume | _Continue | _Extend | _Branch | _ResetPrefixCache | _Tabled | _Compile

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[_Wire])
_sampling_fields = attrgetter(*_Sampling.__struct_fields__)
_TOKEN_BYTES = 4
_ID_BYTES = 5  # of msgpack's whole numbers below 1 << 32, and of a list's beginning
_BIAS_BYTES = 1 + _ID_BYTES + 9  # a pair of an id and a float
_BARE_BYTES = 512  # an event without its lists: some 25 numbers of at most nine bytes
_numbers_of = attrgetter(*(field.name for field in NUMBERS))


def encode_events(events: Sequence[Event]) -> bytes:
    """The bytes of ``events`` in order; empty for none. Raises EventsRefused for what no rank could decode again.

    So a request that slipped through all earlier checks is refused here, on the leader, and never ends the others.
    """
    if not events:
        return b""
    try:
        payload = _ENCODER.encode([_to_wire(event) for event in events])
    except (TypeError, OverflowError, msgspec.MsgspecError) as error:
        raise EventsRefused(f"events cannot be sent: {error}") from error
    _decode(payload)
    return payload


def most_bytes(event: Event) -> int:
    """An upper bound of the bytes that ``event`` takes in ``encode_events``, from the lengths of its lists."""
    if isinstance(event, Tabled):
        return _BARE_BYTES + len(event.table)
    if isinstance(event, Compile):
        return _BARE_BYTES + 4 * len(event.grammar)
    if isinstance(event, Extend):
        return _BARE_BYTES + _TOKEN_BYTES * len(event.token_ids)
    if not isinstance(event, Admit):
        return _BARE_BYTES
    request, sampling = event.request, event.request.sampling
    ids = len(sampling.allowed_token_ids) + len(sampling.stop_token_ids) + len(request.stop_token_ids)
    return (
        _BARE_BYTES
        + _TOKEN_BYTES * len(request.prompt_token_ids)
        + _ID_BYTES * (ids + sum(1 + len(word) for word in sampling.bad_words_token_ids))
        + _BIAS_BYTES * len(sampling.logit_bias)
        + sum(5 + 4 * len(text) for text in (*sampling.stop, sampling.cache_salt, sampling.grammar))
    )


def decode_events(payload: bytes, own: Sequence[Event] | None = None) -> tuple[Event, ...]:
    """The events in ``payload``, in order. Raises EventsRefused for bytes that are anything else.

    ``own``: the events that ``payload`` was made from, on the rank that made it. Prompts that are packed there are
    taken over, so that the rank whose callers hold them until the answer is there does not hold each a second time.
    """
    if not payload:
        return ()
    wire = _decode(payload)
    if own is None:
        return tuple(_from_wire(event) for event in wire)
    return tuple(_from_wire(event, _prompt_of(mine)) for event, mine in zip(wire, own, strict=True))


def _prompt_of(event: Event) -> array[int] | None:
    """Of an arrival, where it is packed already."""
    prompt = event.request.prompt_token_ids if isinstance(event, Admit) else None
    return prompt if isinstance(prompt, array) and prompt.typecode == "i" else None


def _decode(payload: bytes) -> list[_Wire]:
    """What ``payload`` holds, every field of it in its range."""
    try:
        wire = _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EventsRefused(f"{len(payload)} bytes are no events: {error}") from error
    for event in wire:
        if isinstance(event, _Admit):
            _check_request(event.request)
        elif isinstance(event, _Extend):
            _check_tokens(event.request_id, "token_ids", event.token_ids)
    return wire


def _check_request(request: _Request) -> None:
    """What the types above cannot say."""
    sampling = request.sampling
    _check_tokens(request.request_id, "prompt_token_ids", request.prompt_token_ids)
    for field, value in zip(NUMBERS, _numbers_of(sampling), strict=True):
        if value is not None and not field.lowest <= value <= field.highest:
            legal = f"{field.lowest:g} to {field.highest:g}"
            raise EventsRefused(f"request {request.request_id}: {field.name} is {value}, not {legal}")
    for token, bias in sampling.logit_bias:
        if not math.isfinite(bias):
            raise EventsRefused(f"request {request.request_id}: logit_bias of token {token} is {bias}, not finite")


def _check_tokens(request_id: int, name: str, packed_ids: bytes) -> None:
    if len(packed_ids) % _TOKEN_BYTES or not packed_ids[_TOKEN_BYTES - 1 :: _TOKEN_BYTES].isascii():  # no sign bit
        raise EventsRefused(f"request {request_id}: {name} are {len(packed_ids)} bytes, not int32 numbers >= 0")


def _to_wire(event: Event) -> _Wire:
    if isinstance(event, Admit):
        request, sampling = event.request, event.request.sampling
        mirrored = _Sampling(*_sampling_fields(sampling))
        prompt = _pack_tokens(request.request_id, "prompt_token_ids", request.prompt_token_ids)
        wire = _Request(request.request_id, prompt, mirrored, request.stop_token_ids, request.priority)
        return _Admit(wire, event.quantum, event.keep)
    if isinstance(event, Extend):
        said = _pack_tokens(event.request_id, "token_ids", event.token_ids)
        return _Extend(event.request_id, event.epoch, said, event.max_tokens, event.tokens)
    mirror = _MIRRORS.get(type(event))
    if mirror is not None:
        return mirror(*(getattr(event, name) for name in mirror.__struct_fields__))
    raise EventsRefused(f"{type(event).__name__} is no event that can be sent")


def _pack_tokens(request_id: int, name: str, token_ids: Sequence[int]) -> bytes:
    try:
        return _little_endian(packed(token_ids)).tobytes()
    except (TypeError, OverflowError) as error:
        raise EventsRefused(f"events cannot be sent: {name} of request {request_id}: {error}") from error


def _unpack_tokens(packed_ids: bytes) -> array[int]:
    token_ids = array("i")
    token_ids.frombytes(packed_ids)
    return _little_endian(token_ids)


def _little_endian(numbers: array[int]) -> array[int]:
    """``numbers`` in the other byte order, where the machine's own is not the wire's."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers


def _from_wire(event: _Wire, own_prompt: array[int] | None = None) -> Event:
    if isinstance(event, _Admit):
        request = event.request
        prompt = _unpack_tokens(request.prompt_token_ids) if own_prompt is None else own_prompt
        sampling = SamplingParams(*_sampling_fields(request.sampling))
        arrived = Request(request.request_id, prompt, sampling, request.stop_token_ids, request.priority)
        return Admit(arrived, event.quantum, event.keep)
    if isinstance(event, _Extend):
        said = _unpack_tokens(event.token_ids)
        return Extend(event.request_id, event.epoch, said, event.max_tokens, event.tokens)
    return _MIRRORED[type(event)](*(getattr(event, name) for name in event.__struct_fields__))
