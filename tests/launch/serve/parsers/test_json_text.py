"""JSON that models write: what was passed on is the beginning of a valid document at any time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.serve.parsers.json_text import JsonText

VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=4), parts, max_size=3),
    max_leaves=8,
)


@given(value=st.dictionaries(st.text(max_size=4), VALUES, max_size=4), indent=st.sampled_from([None, 1]))
@settings(derandomize=True, max_examples=10, deadline=None, database=None)
def test_a_valid_document_goes_out_as_it_is_and_can_be_closed_anywhere(value: Any, indent: int | None) -> None:
    for ascii_only in (True, False):
        text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
        document, sent = JsonText(), ""
        for character in text:
            found, _ = document.feed(character)
            sent += found
            if sent:
                json.loads(sent + document.closing())
        assert (sent, document.done, document.broken) == (text, True, False)
        assert JsonText().feed(text + " more") == (text, len(text))


@given(text=st.text(st.sampled_from('{}[],:"\\ \n0-1.etrufalsn/'), max_size=24))
@settings(derandomize=True, max_examples=60, deadline=None, database=None)
def test_of_any_text_what_is_sent_becomes_a_document(text: str) -> None:
    document, pieces, sent = JsonText(), JsonText(), ""
    whole, end = document.feed("{" + text)
    for at, character in enumerate("{" + text):
        found, used = pieces.feed(character)
        sent += found
        json.loads(sent + pieces.closing())
        if not used:
            assert (pieces.done, pieces.broken) == (document.done, document.broken)
            assert at == end or document.broken
            break
    assert sent == whole


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ('{"a": "line\nline\t"}', {"a": "line\nline\t"}),  # a character that JSON has as an escape only
        (r'{"a": "C:\q \d+ \'"}', {"a": r"C:\q \d+ \'"}),  # an escape that JSON has not
        (r'{"a": "\u12"}', {"a": r"\u12"}),
        ('{"a": [1, 2,], "b": 3,}', {"a": [1, 2], "b": 3}),
    ],
)
def test_slips_that_have_one_meaning(written: str, right: Any) -> None:
    assert json.loads(JsonText().feed(written)[0]) == right


@pytest.mark.parametrize(
    "written", ["{'a'", '{"a" 1', '{"a": True', '{"a": 01,', '{"a": NaN,', '{"a": 1 2', "{]", '{"a":}', "{,"]
)
def test_what_is_no_json_is_closed_before_it(written: str) -> None:
    document = JsonText()
    sent, _ = document.feed(written + " ")
    assert document.broken
    assert isinstance(json.loads(sent + document.closing()), dict)
