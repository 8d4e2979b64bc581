"""Tool calls in a text that comes in pieces of any size."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.serve.parsers.answer_parser import AnswerParser
from launch.serve.parsers.deltas import Delta, first_calls, joined, merged

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"</x>", "b": [1, {"c": 2}]}}\n</tool_call>'
ARGUMENTS = {"a": '}"</x>', "b": [1, {"c": 2}]}


def hermes() -> AnswerParser:
    return AnswerParser("hermes", None)


def message_of(deltas: list[Delta]) -> tuple[str | None, list[Delta]]:
    message = merged(deltas)
    return message["content"], message.get("tool_calls", [])


def parsed(text: str, seed: int) -> tuple[str | None, list[tuple[str, str]]]:
    """In random pieces; content and (name, arguments) of each call."""
    rng, stream, deltas, at = random.Random(seed), hermes(), list[Delta](), 0
    while at < len(text):
        size = rng.randint(1, 1 + seed % 9)
        deltas += stream.push(text[at : at + size])
        at += size
    deltas += stream.finish()
    content, calls = message_of(deltas)
    assert len(calls) == stream.calls
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["type"] == "function" for call in calls)
    return content, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("seed", range(12))
def test_a_call_is_found_whatever_the_pieces(seed: int) -> None:
    content, calls = parsed(CALL, seed)
    assert content is None
    ((name, arguments),) = calls
    assert (name, json.loads(arguments)) == ("f", ARGUMENTS)
    content, calls = parsed(f"Let me see.{CALL}\n{CALL}", seed)
    assert content == "Let me see."
    assert [json.loads(arguments) for _, arguments in calls] == [ARGUMENTS, ARGUMENTS]


def test_text_behind_a_call_keeps_its_blanks() -> None:
    stream, deltas = hermes(), list[Delta]()
    for piece in (CALL, "\n", "Done", ".", "\n\n", "The", " ", "rest", "\n", CALL):
        deltas += stream.push(piece)
    assert message_of(deltas + stream.finish())[0] == "Done.\n\nThe rest\n"


@pytest.mark.parametrize("seed", range(6))
def test_what_is_no_call_stays_text(seed: int) -> None:
    for text in ("a < b <tool", "<tool_call>nothing</tool_call>", '<tool_call>{"name": 5}</tool_call>', "", "plain"):
        assert parsed(text, seed) == (text, [])


def test_arguments_before_the_name_are_told_whole() -> None:
    assert parsed('<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>', 3) == (None, [("g", '{"x": 1}')])


def test_a_call_that_is_cut_off_ends_where_it_is() -> None:
    _, calls = parsed('<tool_call>{"name": "f", "arguments": {"a": "lo', 2)
    assert calls == [("f", '{"a": "lo')]


def test_arguments_are_told_as_they_are_written() -> None:
    stream = hermes()
    first = stream.push('<tool_call>{"name": "f", "arguments": {"a": ')
    assert first[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": ""}
    assert first[1] == {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}

    def pushed(text: str) -> str:
        return "".join(delta["tool_calls"][0]["function"]["arguments"] for delta in stream.push(text))

    assert pushed("5") == "", "a number may go on"
    assert pushed('1, "b": "x') == '"a": 51, "b": "x'
    assert pushed("y") == "y"


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_one_call_at_most(step: int) -> None:
    """Of two the first is told, whole, in whatever pieces they come; content stays."""
    calls = [f'<tool_call>{{"name": "f", "arguments": {{"x": {number}}}}}</tool_call>' for number in (1, 2)]
    text, stream = f"so {calls[0]} and {calls[1]}", hermes()
    deltas = [delta for at in range(0, len(text), step) for delta in stream.push(text[at : at + step])]
    content, found = message_of(first_calls([*deltas, *stream.finish()], 1))
    assert content is not None
    assert content.split() == ["so", "and"]
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in found] == [("f", '{"x": 1}')]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "inside",
    [
        r'{"name": "C:\q", "arguments": {}}',
        r'{"name": "\ud83d", "arguments": {}}',
        r'{"arguments": {}, "name": "\ud83d"}',
        r'{"arguments": "\ud83d", "name": "f"}',
    ],
)
def test_what_can_be_no_json_text_is_no_call(inside: str, seed: int) -> None:
    text = f"<tool_call>\n{inside}\n</tool_call>"
    assert parsed(text, seed) == (text, [])


def test_arguments_keep_half_of_a_pair_as_an_escape() -> None:
    content, ((name, arguments),) = parsed(r'<tool_call>{"arguments": {"x": "\ud83d"}, "name": "f"}</tool_call>', 0)
    assert (content, name, arguments.encode()) == (None, "f", rb'{"x": "\ud83d"}')


def call(arguments: str, name: str = "f") -> str:
    return '<tool_call>\n{"name": "' + name + '", "arguments": ' + arguments + "}\n</tool_call>"


@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": "the </tool_call> mark"}',
        '{"a": "</tool_call></tool_call>", "b": "<tool_call>{"}',
        r'{"a": "\"</tool_call>\"", "b": "\\"}',
        '{"</tool_call>": [{"b": "}]</tool_call>"}]}',
        '{"a": "</tool_cal", "b": "<"}',
    ],
)
def test_a_mark_inside_an_argument_is_text(arguments: str, seed: int) -> None:
    assert parsed(call(arguments), seed) == (None, [("f", arguments)])
    other_order = '<tool_call>{"arguments": ' + arguments + ', "name": "g"}</tool_call>'
    content, calls = parsed(f"{call(arguments)}{other_order} so", seed)
    assert (content, [(name, json.loads(found)) for name, found in calls]) == (
        "so", [("f", json.loads(arguments)), ("g", json.loads(arguments))])  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_a_quote_that_is_never_closed_hides_no_later_call_of_what_is_none(seed: int) -> None:
    for broken in ('<tool_call>say "hi</tool_call>', '<tool_call>{"nam: 5}</tool_call>'):
        content, calls = parsed(f"{broken}{call('{}', 'g')}", seed)
        assert (content, calls) == (broken, [("g", "{}")])


def test_a_brace_that_is_missing_ends_the_call_at_its_mark() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> done'
    assert parsed(text, 2) == ("done", [("f", '{"a": 1}')])


PARTS = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": ',
    '{"a": "',
    '"}',
    "}",
    "\\",
    '"',
    "<",
    " ",
    "\n",
    "so",
]


@given(data=st.data())
@settings(derandomize=True, max_examples=25, deadline=None, database=None)
def test_a_message_does_not_depend_on_how_its_text_is_cut(data: st.DataObject) -> None:
    """Calls, things like calls, halves of marks, blanks and quotes in any order."""
    text = "".join(data.draw(st.lists(st.sampled_from([*PARTS, call('{"b": "</tool_call>"}')]), max_size=14)))
    whole, pieces = hermes(), hermes()
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8))), len(text)]
    found = [delta for begin, end in pairwise(cuts) for delta in pieces.push(text[begin:end])]
    content, calls = message_of(whole.push(text) + whole.finish())
    again, calls_again = message_of(found + pieces.finish())
    assert (again, pieces.calls) == (content, whole.calls)
    assert [one["function"] for one in calls_again] == [one["function"] for one in calls]
    assert calls or (content or "") == text


def test_a_chunk_has_one_piece_of_a_call() -> None:
    """openai 2.54.0 takes each entry of a stream's first chunk for a call."""
    deltas: list[Delta] = [
        {"content": "a"},
        {"content": "b"},
        {"tool_calls": [{"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        {"tool_calls": [{"index": 1, "id": "y", "type": "function", "function": {"name": "g", "arguments": ""}}]},
    ]
    found = joined(deltas)
    assert found["content"] == "ab"
    assert [(call["index"], call["function"]["arguments"]) for call in found["tool_calls"]] == [(0, "{}"), (1, "")]
    assert joined(deltas[3:]) == {
        "tool_calls": [{"index": 0, "function": {"arguments": "{}"}}, deltas[5]["tool_calls"][0]]
    }
    assert merged([found]) == merged(deltas)
    assert joined([]) == {"content": ""}
