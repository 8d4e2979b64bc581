"""What objects of JSON cost is told from its bytes."""

from __future__ import annotations

import json

import pytest

from launch.api import json_weight
from launch.api.json_weight import MOST, too_heavy

MIB = 1 << 20


@pytest.mark.parametrize("unit", [b"1,", b"[],", b"{},", b'"",', b'{"a":1},', b"[[", b'"a":', b'["\\\\","\\""],'])
def test_objects_are_counted_before_they_are_made(unit: bytes) -> None:
    assert too_heavy(unit * (4 * MIB // len(unit))) is not None


def test_a_text_is_one_value_whatever_stands_in_it() -> None:
    for text in ("a, [b]: {c} " * 400_000, '\\",[' * 400_000, "\\" * 1_000_001 + ",", "1,2;3\n" * 1_100_000):
        assert json.loads(data := json.dumps({"prompt": [text, "b"]}).encode())
        assert json_weight._weight(data) > MOST or "," not in text[:-1]
        assert too_heavy(data) is None, text[:10]
        assert too_heavy(data[:-2] + b",1" * MOST + b"]}") is not None


def test_names_and_containers_weigh_more_than_values() -> None:
    assert too_heavy(b"[" + b"1," * (MOST - 20)) is None
    assert too_heavy(b"{" + b'"abcdefgh":1,' * (MOST // 5 - 20)) is None
    assert too_heavy(b"{" + b'"abcdefgh":1,' * (MOST // 5 + 1)) is not None
    assert too_heavy(b"[" + b"[]," * (MOST // 17 - 20)) is None
    assert too_heavy(b"[" + b"[]," * (MOST // 17 + 1)) is not None
    assert too_heavy(b"[" * 60_000) is None, "short of 64 KiB nothing is looked at"


def test_texts_of_one_request_are_counted_together_and_each_alone() -> None:
    """A quote in one of them does not hide what stands in the next."""
    part = b"[" + b"[]," * (MOST // 17 // 3)
    assert too_heavy(part, part, b"[1]") is None
    assert too_heavy(part, part, part, part) is not None
    assert too_heavy(b'"', b"[]," * MIB) is not None
    assert too_heavy(*[b"[]," * 10_000] * 10) is not None
