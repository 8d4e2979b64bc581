"""Every format of answers: one message however its text is cut, marks that are tokens and marks that are spelled."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.serve.parsers.answer_parser import AnswerParser
from launch.serve.parsers.deltas import Delta, merged
from launch.serve.parsers.reader import named
from launch.serve.parsers.table import CALLS, REASONING
from tests.launch.serve.parsers.samples import ARGUMENTS, JSON, SAMPLES, SCHEMAS, Sample

Token = tuple[str, bool]  # its text, and whether it is a mark


def parser_of(sample: Sample, tokens: Iterable[str] = ()) -> AnswerParser:
    return AnswerParser(sample.calls, sample.reasoning, SCHEMAS, frozenset(tokens), begun=sample.begun)


def read(parser: AnswerParser, tokens: Iterable[Token]) -> list[Delta]:
    """In steps of one token."""
    deltas, at = list[Delta](), 0
    for text, is_mark in tokens:
        deltas += parser.push(text, (at, at + len(text)) if is_mark else None)
        at += len(text)
    return deltas + parser.finish()


def pieces(text: str, cuts: Iterable[int]) -> list[Token]:
    return [(text[begin:end], False) for begin, end in pairwise([0, *sorted(cuts), len(text)])]


def tokenised(text: str, marks: Iterable[str]) -> Iterator[Token]:
    """Marks whole, other text in pieces of three characters."""
    names, at, plain = sorted(marks, key=len, reverse=True), 0, ""
    while at <= len(text):
        found = next((name for name in names if text.startswith(name, at)), "")
        if found or at == len(text):
            yield from pieces(plain, range(3, len(plain), 3))
            plain = ""
        if found:
            yield found, True
        plain += text[at : at + 1] if not found else ""
        at += len(found) or 1


def without_ids(deltas: list[Delta]) -> Delta:
    message = merged(deltas)
    for call in message.get("tool_calls", ()):
        assert call["type"] == "function"
        del call["id"]
    return message


def found_in(message: Delta) -> list[tuple[str, Any]]:
    calls = message.get("tool_calls", ())
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def check(sample: Sample, deltas: list[Delta]) -> None:
    message = merged(deltas)
    assert (message["content"], message.get("reasoning")) == (sample.content, sample.thought)
    assert found_in(message) == sample.found


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 11, 10_000])
def test_a_sample_of_each_family(name: str, size: int) -> None:
    sample = SAMPLES[name]
    check(sample, read(parser_of(sample), pieces(sample.text, range(size, len(sample.text), size))))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_whose_marks_are_tokens(name: str) -> None:
    """One a step, and several a step: what a drafter guessed comes at once."""
    sample = SAMPLES[name]
    marks = parser_of(sample).marks
    tokens = list(tokenised(sample.text, marks))
    assert "".join(text for text, _ in tokens) == sample.text
    check(sample, read(parser_of(sample, marks), tokens))
    parser, deltas, at = parser_of(sample, marks), list[Delta](), 0
    for text, is_mark in tokens:  # all places are known before the text is shown, as behind a stop string
        deltas += parser.push("", (at, at + len(text)) if is_mark else None)
        at += len(text)
    check(sample, deltas + parser.push(sample.text) + parser.finish())


@pytest.mark.parametrize("name", [name for name, sample in SAMPLES.items() if sample.calls != "llama3_json"])
def test_text_that_only_spells_marks_is_content(name: str) -> None:
    """Where the tokenizer has tokens for them. Llama's calls need no mark."""
    sample = SAMPLES[name]
    parser = AnswerParser(sample.calls, sample.reasoning, SCHEMAS, parser_of(sample).marks)
    message = merged(read(parser, pieces(sample.text, range(3, len(sample.text), 3))))
    assert message == {"content": sample.text}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_prefix_of_a_mark_is_held_back(name: str) -> None:
    """Whatever was sent is sent for good: after each character, no delta holds the beginning of a mark."""
    sample = SAMPLES[name]
    parser, sent = parser_of(sample), ""
    for character in sample.text:
        for delta in parser.push(character):
            sent += delta.get("content", "") + delta.get("reasoning", "")
        assert not any(sent.endswith(mark[:size]) for mark in parser.marks for size in range(2, len(mark)))


@pytest.mark.parametrize("name", SAMPLES)
def test_the_form_of_deltas(name: str) -> None:
    """The first of a call has index, id, type, name and no arguments; later ones index and arguments only. At any time
    arguments are the beginning of one document."""
    sample, seen = SAMPLES[name], dict[int, str]()
    deltas = read(parser_of(sample), pieces(sample.text, range(4, len(sample.text), 4)))
    for delta in deltas:
        assert len(delta) == 1
        for call in delta.get("tool_calls", ()):
            index = call["index"]
            if index not in seen:
                assert index == len(seen)
                assert call.keys() == {"index", "id", "type", "function"}
                assert (call["type"], call["function"]["arguments"]) == ("function", "")
                seen[index] = ""
            else:
                assert call.keys() == {"index", "function"}
                assert call["function"].keys() == {"arguments"}
                seen[index] += call["function"]["arguments"]
    assert [json.loads(arguments) for arguments in seen.values()] == [arguments for _, arguments in sample.found]


@pytest.mark.parametrize("name", SAMPLES)
def test_texts_are_sent_as_they_grow(name: str) -> None:
    """Of a long argument most is sent before it ends."""
    sample = SAMPLES[name]
    long = "x" * 400
    at = sample.text.find("Bern")
    if at < 0:
        return
    parser = parser_of(sample)
    deltas = [delta for character in sample.text[:at] + long for delta in parser.push(character)]
    calls = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(calls).count("x") >= 390


@pytest.mark.parametrize("name", SAMPLES)
@given(data=st.data())
@settings(derandomize=True, max_examples=12, deadline=None, database=None)
def test_a_message_does_not_depend_on_how_its_text_is_cut(name: str, data: st.DataObject) -> None:
    """Parts of samples in any order: calls, things like calls, halves of marks, blanks and quotes."""
    sample = SAMPLES[name]
    marks = parser_of(sample).marks
    halves = (mark[: len(mark) // 2] for mark in marks)
    words = ("weather", "name", '{"name": "now", "arguments": ', JSON, sample.text)
    parts = [*marks, *halves, *' \n"\\{}>:,', *words]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=9))
    tokens = marks if data.draw(st.booleans()) else ()
    if tokens:
        whole = list(tokenised(text, marks))
        parser, deltas, at = parser_of(sample, tokens), list[Delta](), 0
        for t, is_mark in whole:
            for character in (t,) if is_mark else t:
                deltas += parser.push(character, (at, at + len(t)) if is_mark else None)
                at += len(character)
        message = without_ids(deltas + parser.finish())
        assert without_ids(read(parser_of(sample, tokens), whole)) == message
    else:
        message = without_ids(read(parser_of(sample), pieces(text, ())))
        assert without_ids(read(parser_of(sample), pieces(text, cuts))) == message
        assert without_ids(read(parser_of(sample), pieces(text, range(len(text))))) == message
    for call in message.get("tool_calls", ()):
        assert call["function"]["name"] in SCHEMAS


@pytest.mark.parametrize("name", [name for name, sample in SAMPLES.items() if sample.found and "kept" not in name])
def test_a_tool_that_is_not_there_is_content(name: str) -> None:
    sample = SAMPLES[name]
    parser = AnswerParser(sample.calls, sample.reasoning, {"other": {}}, begun=sample.begun)
    message = merged(read(parser, pieces(sample.text, range(7, len(sample.text), 7))))
    assert "tool_calls" not in message
    assert "Bern" in message["content"]


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("seed", range(3))
def test_an_answer_may_end_anywhere(name: str, seed: int) -> None:
    """As max_tokens cuts it: nothing fails, and arguments are the beginning of the right ones."""
    sample, rng = SAMPLES[name], random.Random(seed)
    whole = merged(read(parser_of(sample), [(sample.text, False)]))
    for _ in range(12):
        text = sample.text[: rng.randrange(len(sample.text))]
        message = merged(read(parser_of(sample), pieces(text, range(5, len(text), 5))))
        for call, right in zip(message.get("tool_calls", ()), whole.get("tool_calls", ()), strict=False):
            assert right["function"]["arguments"].startswith(call["function"]["arguments"])


def test_a_value_whose_own_mark_is_missing_ends_with_the_call_wherever_it_is_cut() -> None:
    """What comes next decides, and is not there yet when the call's mark has been read."""
    function = "<function=weather>\n<parameter=city>\nBern\n</function>\n</tool_call>"
    text = f"<tool_call>\n{function}\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    for size in (1, 2, 5, len(text)):
        message = merged(read(AnswerParser("qwen3_coder", None, SCHEMAS), pieces(text, range(size, len(text), size))))
        assert found_in(message) == [("weather", {"city": "Bern"}), ("now", {})]
        assert message["content"] is None


@pytest.mark.parametrize("end", ["}", "};", '};{"name": "now", "parameters": {}} so', '};x"<'])
def test_a_brace_that_is_missing_is_the_same_wherever_the_text_is_cut(end: str) -> None:
    text = '{"name": "weather", "parameters": {"city": "Bern"};{"name": "now", "parameters": {}' + end
    whole = without_ids(read(parser_of(SAMPLES["llama-3"]), [(text, False)]))
    assert found_in(whole)[:2] == [("weather", {"city": "Bern"}), ("now", {})]
    for size in range(1, len(text)):
        assert without_ids(read(parser_of(SAMPLES["llama-3"]), pieces(text, range(size, len(text), size)))) == whole


@pytest.mark.parametrize("name", CALLS)
def test_things_like_calls_take_no_time_that_grows_with_their_square(name: str) -> None:
    """Of 4,000 openings that never become calls, later ones are content."""
    kind = CALLS[name]
    text = "".join(named(character) + '{"' for character in kind.starts or kind.marks) * 4000
    parser = AnswerParser(name, None, SCHEMAS)
    message = merged(read(parser, [(text, False)]))
    assert not parser.calls
    assert len(message["content"] or "") > 1000


def test_every_format_has_a_sample() -> None:
    assert {CALLS[sample.calls] for sample in SAMPLES.values() if sample.calls} == set(CALLS.values())


def test_no_mark_is_a_part_of_another() -> None:
    """Of formats that are read together: else it would depend on a cut which one is found."""
    for reasoning in REASONING:
        for calls in CALLS:
            marks = set(AnswerParser(calls, reasoning).marks)
            assert not any(one != other and one in other for one in marks for other in marks)


def test_ids() -> None:
    def ids(name: str) -> list[str]:
        sample = SAMPLES[name]
        return [call["id"] for call in merged(read(parser_of(sample), [(sample.text, False)]))["tool_calls"]]

    assert ids("kimi-k2") == ["functions.weather:0", "functions.now:1"]
    assert all(len(one) == 9 and one.isalnum() for one in ids("mistral since version 11"))
    assert all(one.startswith("call_") for one in ids("qwen3"))
    assert len(set(ids("qwen3"))) == 2
    given = merged(read(AnswerParser("mistral", None), [("[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}", False)]))
    assert given["tool_calls"][0]["id"] == "abc123def"
    assert ARGUMENTS["city"] == json.loads(JSON)["city"]
