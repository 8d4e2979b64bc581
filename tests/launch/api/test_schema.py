"""The written structures of bodies and of the wire, field by field against SamplingParams."""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

import pytest

from launch.api.schema import ChatFields, CompletionFields, SimpleLine
from runtime.replicate import event_codec
from runtime.schedule.request import NUMBERS, SamplingParams


@pytest.mark.parametrize("body", [SimpleLine, CompletionFields, ChatFields])
def test_bodies_have_every_number(body: type) -> None:
    hints = get_type_hints(body)
    for field in NUMBERS:
        of_a_chat = body is ChatFields and field.name == "logprobs"  # a switch there: top_logprobs is the number
        assert hints[field.name] == (bool if of_a_chat else field.type) | None


def test_the_wire_has_every_field_with_its_type() -> None:
    hints = get_type_hints(event_codec._Sampling)
    assert tuple(hints) == tuple(field.name for field in fields(SamplingParams))
    for field in NUMBERS:
        assert hints[field.name] == (field.type if field.default is not None else field.type | None)


def test_numbers_are_those_of_the_dataclass() -> None:
    plain = [name for name, hint in get_type_hints(SamplingParams).items() if hint in (int, float, int | None)]
    assert [field.name for field in NUMBERS] == plain
    for field in NUMBERS:
        default = getattr(SamplingParams(), field.name)
        assert field.default is default
        assert default is None or (type(default) is field.type and field.lowest <= default <= field.highest)
