"""Grammars of tool calls against the parsers: what a grammar allows is read as calls that the tools' schemas allow."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from launch.api.schema import Function, Tool
from launch.serve.parsers.answer_parser import AnswerParser
from launch.serve.parsers.call_grammar import _FORMS, grammar_of_calls
from launch.serve.parsers.deltas import merged
from launch.serve.parsers.reasoning_grammar import with_reasoning
from launch.serve.parsers.table import CALLS, HARMONY
from runtime.frontend.structured import structured
from runtime.frontend.tokenizer import Tokenizer, added_tokens
from runtime.frontend.validation import RequestError
from runtime.grammar import Grammars
from runtime.grammar_tables.automaton import automaton_of, known
from runtime.grammar_tables.maker import agrees
from runtime.schedule.request import SamplingParams
from tests.runtime.engine.table_rigs import hold
from tests.runtime.frontend import small_tokenizers

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

pytestmark = pytest.mark.slow
EOS, VOCABULARY = 0, 400
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "where": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 3},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "integer"}},
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS: dict[str, Any] = {"weather": WEATHER, "now": NOTHING}
TOOLS = [Tool("function", Function(name, parameters=schema, strict=True)) for name, schema in SCHEMAS.items()]


def with_tokens(*names: str) -> Tokenizer:
    """The byte-level tokenizer, and these tokens, of which letters never spell one."""
    backend = small_tokenizers.byte_level_backend().__class__.from_str(small_tokenizers.byte_level().to_json())
    backend.add_tokens(list(names))
    return Tokenizer(backend)


BYTES = small_tokenizers.byte_level()
GRAMMARS = Grammars(BYTES.to_json, VOCABULARY, (EOS,))


def walks(grammar: str, seed: str, count: int, end: str = "", most: int = 400) -> list[str]:
    """Texts that chance writes, which ends texts and values where it can, mostly; free ones with ``end``."""
    draw, found = random.Random(seed), list[str]()
    hold(GRAMMARS, grammar)
    for _ in range(count):
        matcher, answer = GRAMMARS.matcher(SamplingParams(grammar=grammar), (EOS,), ()), list[int]()
        allowed_W = np.zeros(-(-VOCABULARY // 32), np.int32)
        while len(answer) < most and EOS not in answer:
            matcher.allow(allowed_W)
            ids = np.flatnonzero(np.unpackbits(allowed_W.view(np.uint8), bitorder="little")).tolist()
            assert ids, BYTES.decode(answer)
            if end and len(ids) > 150 and draw.random() < 0.3 and BYTES.encode(end)[0] in ids:
                answer += BYTES.encode(end)
                matcher.accept(BYTES.encode(end))
                continue
            closing = [i for i in ids if i == EOS or BYTES.decode([i]) in ('"', "}", "]", "<", "</", "\n")]
            answer.append(draw.choice(closing if closing and draw.random() < 0.7 else ids))
            matcher.accept(answer[-1:])
        if EOS in answer:
            found.append(BYTES.decode(answer))
    return found


def is_text(grammar: str, text: str, tokenizer: Tokenizer = BYTES, grammars: Grammars = GRAMMARS) -> bool:
    hold(grammars, grammar)
    matcher = grammars.matcher(SamplingParams(grammar=grammar), (), ())
    allowed_W = np.zeros(-(-grammars.vocab_size // 32), np.int32)
    for token in (*tokenizer.encode(text), *grammars.eos_token_ids):
        matcher.allow(allowed_W)
        if not allowed_W[token // 32] >> token % 32 & 1:
            return False
        matcher.accept((token,))
    return True


def calls_in(parser: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Content, and calls."""
    read = AnswerParser(parser, None, SCHEMAS)
    message = merged([*read.push(text), *read.finish()])
    calls = [
        (one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message.get("tool_calls", [])
    ]
    return message.get("content") or "", calls


@pytest.mark.parametrize("parser", [name for name in _FORMS if name != "qwen3_xml"])
def test_a_required_call_is_read_as_one_that_the_schema_allows(parser: str) -> None:
    for choice in ("", "weather"):
        grammar = grammar_of_calls(parser, TOOLS, {}, choice=choice, one=False)
        texts = walks(grammar, parser, 6, _FORMS[parser].value_end or _FORMS[parser].quote)
        assert texts
        for text in texts:
            content, calls = calls_in(parser, text)
            assert not content.strip(), text
            assert calls, text
            for name, arguments in calls:
                assert name == choice or not choice
                jsonschema.validate(arguments, SCHEMAS[name])


def test_one_call_where_one_is_wanted() -> None:
    for parser in ("hermes", "qwen3_coder", "minimax_m2"):
        grammar = grammar_of_calls(parser, TOOLS, {}, choice="", one=True)
        assert {len(calls_in(parser, text)[1]) for text in walks(grammar, "one", 6, _FORMS[parser].value_end)} == {1}


def test_every_format_has_a_grammar() -> None:
    assert _FORMS.keys() == CALLS.keys()


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "B", "unit": "C"}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nB\n</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>\n"
    "</tool_call>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">B</parameter>\n'
    '<parameter name="unit">C</parameter>\n</invoke>\n</minimax:tool_call>'
)


DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">B'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="unit" string="true">C</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>"
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:12<|tool_call_argument_begin|>"
    '{"city": "B", "unit": "C"}<|tool_call_end|><|tool_calls_section_end|>'
)
GEMMA = '<|tool_call>call:weather{city:<|"|>B<|"|>,unit:<|"|>C<|"|>}<tool_call|>'
TOKENS = (
    *("<tool_call>", "</tool_call>", "<minimax:tool_call>", "</minimax:tool_call>", "｜DSML｜"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|tool_call>", '<|"|>', "<tool_call|>"),
)


@pytest.mark.parametrize(
    ("parser", "call"),
    [
        ("hermes", HERMES), ("qwen3_coder", CODER), ("minimax_m2", MINIMAX), ("deepseek_v32", DSML), ("kimi_k2", KIMI),
        ("gemma4", GEMMA),
    ],
)  # fmt: skip
@pytest.mark.parametrize("marks", [(), TOKENS])
def test_a_strict_tool_is_free_to_be_called(parser: str, call: str, marks: tuple[str, ...]) -> None:
    """From the mark on a call must follow; whether marks are tokens or not."""
    tokenizer = with_tokens(*marks)
    grammars = Grammars(tokenizer.to_json, VOCABULARY, (EOS,))
    grammar = grammar_of_calls(parser, TOOLS, added_tokens(tokenizer), choice=None, one=False)
    for text in ("no call, but < and <tool", f"so:\n{call}", f"{call}\n{call} done"):
        assert is_text(grammar, text, tokenizer, grammars), text
    for text in (call.replace("weather", "rain"), call.replace("C", "K"), f"so {call[:40]}"):
        assert not is_text(grammar, text, tokenizer, grammars), text
    assert calls_in(parser, f"so {call}") == ("so ", [("weather", {"city": "B", "unit": "C"})])
    grammars.close()


@pytest.mark.parametrize("parser", [name for name in _FORMS if name != "qwen3_xml"])
def test_calls_of_strict_tools_have_tables(parser: str) -> None:
    """Also behind reasoning; of tools that need not be called, where the mark is a token."""
    added = added_tokens(with_tokens(*TOKENS, "<think>", "</think>"))
    required = grammar_of_calls(parser, TOOLS, {}, choice="", one=False)
    named = grammar_of_calls(parser, TOOLS, added, choice="weather", one=False)
    thought = with_reasoning(named, "qwen3", "<think>", added)
    assert thought != named
    grammars = [required, named, thought]
    if parser in ("hermes", "qwen3_coder", "glm45", "minimax_m2", "kimi_k2", "deepseek_v32", "gemma4"):
        grammars.append(grammar_of_calls(parser, TOOLS, added, choice=None, one=False))
        assert not known(grammar_of_calls(parser, TOOLS, {}, choice=None, one=False))
    for grammar in grammars:
        automaton = automaton_of(grammar)
        assert automaton is not None
        assert agrees(automaton, grammar)


CHANNELS = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|return|>"
THOUGHT = "<|channel|>analysis<|message|>hm <|end|><|start|>assistant"
CALLED = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "B", "unit": "C"}'
SAID = "<|channel|>final<|message|>"


def test_harmony_thinks_first_and_then_calls_or_answers() -> None:
    tokenizer = with_tokens(*CHANNELS)  # the tokenizer has <|end|>, which ends no answer here
    added = added_tokens(tokenizer)
    grammars = Grammars(tokenizer.to_json, VOCABULARY, (added["<|return|>"],))

    def allows(grammar: str, text: str, *, calls: bool = True) -> bool:
        return is_text(with_reasoning(grammar, HARMONY, "", added, calls=calls), text, tokenizer, grammars)

    called = grammar_of_calls("openai", TOOLS, added, choice="weather", one=False)
    free = grammar_of_calls("openai", TOOLS, added, choice=None, one=False)
    for one in (called, free):
        grammar = with_reasoning(one, HARMONY, "", added, calls=True)
        assert (automaton := automaton_of(grammar)) is not None
        assert agrees(automaton, grammar)
    preamble = THOUGHT.replace("analysis", "commentary")
    for text in (CALLED, THOUGHT + CALLED, THOUGHT + preamble + CALLED):
        assert allows(called, text)
        assert allows(free, text)
        assert not allows(called, text.replace("weather", "now"))
        assert not allows(called, text.replace('"C"', '"K"'))
    assert calls_in("openai", THOUGHT + CALLED) == ("", [("weather", {"city": "B", "unit": "C"})])
    assert allows(free, THOUGHT + SAID + "no call")
    assert not allows(called, THOUGHT + SAID + "no call")
    form = structured(json_object=True)
    assert allows(form, THOUGHT + SAID + '{"a": 1}', calls=False)
    assert not allows(form, THOUGHT + SAID + "so", calls=False)
    assert not allows(form, THOUGHT + '{"a": 1}', calls=False)
    grammars.close()


def test_what_cannot_be_enforced_is_refused_where_a_tool_is_strict() -> None:
    schema: Any = {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}}
    strict, other = (Tool("function", Function("f", parameters=schema, strict=value)) for value in (True, False))
    assert grammar_of_calls("hermes", [strict], {}, choice="", one=False)
    with pytest.raises(
        RequestError, match=r"tools\[0\].function.parameters.properties.a: 'pattern' of a text"
    ) as found:
        grammar_of_calls("qwen3_coder", [strict], {}, choice="", one=False)
    assert found.value.field == "tools"
    assert grammar_of_calls("qwen3_coder", [other], {}, choice="", one=False)
    for schema in ({"anyOf": [WEATHER, NOTHING]}, {"type": "object", "required": ["a"]}):
        one = Tool("function", Function("f", parameters=schema, strict=True))
        assert grammar_of_calls("hermes", [one], {}, choice="", one=False)
        with pytest.raises(RequestError, match="writes properties one by one"):
            grammar_of_calls("glm45", [one], {}, choice="", one=False)
    with pytest.raises(RequestError, match="have no mark"):
        grammar_of_calls("llama3_json", TOOLS, {}, choice=None, one=False)


BARE: dict[str, Any] = {
    "nothing": NOTHING,
    "weather": WEATHER,
    "no type": {"type": "object", "properties": {"b": {"type": "integer"}, "A": {}}, "required": ["b"]},
    "all optional": {"type": "object", "properties": {name: {"type": "boolean"} for name in "fbcade"}},
    "odd keys": {
        "type": "object",
        "properties": {"a: b": {"type": "null"}, "\N{MULTIPLICATION SIGN}": {"type": "integer"}},
        "required": ["a: b", "\N{MULTIPLICATION SIGN}"],
    },
    "nested": {
        "type": "object",
        "properties": {
            "many": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}},
            "few": {"type": "array", "items": {"type": ["string", "null"]}, "minItems": 2, "maxItems": 3},
            "three": {"type": "array", "items": {"type": "boolean"}, "minItems": 3},
            "none": {"type": "array", "maxItems": 0},
            "counts": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
            "empty": {"type": "object", "additionalProperties": False},
            "of": {"enum": ["a b", 1, 2.5, None, True, ["c"], {"k": "v"}]},
            "fixed": {"const": "C"},
            "one": {"anyOf": [{"type": "integer"}, {"type": "string"}, {"$ref": "#/$defs/pair"}]},
        },
        "required": ["few", "many", "none", "empty", "of", "one"],
        "$defs": {"pair": {"type": "object", "properties": {"y": {"const": 1}, "z": {"type": "string"}}}},
    },
    "recursive": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "below": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
        "required": ["name"],
    },
}


def _as_gemma(value: Any) -> str:
    """As the template of tests/launch/serve/parsers/templates.py does, at any depth."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_as_gemma(value[key])}" for key in sorted(value, key=str.lower)) + "}"
    return f"[{','.join(map(_as_gemma, value))}]" if isinstance(value, list) else json.dumps(value)


@pytest.mark.parametrize("name", BARE)
def test_gemma_writes_calls_in_its_own_form(name: str) -> None:
    schema = BARE[name]
    tools = [Tool("function", Function("now", parameters=schema, strict=True))]
    grammar = grammar_of_calls("gemma4", tools, {}, choice="now", one=False)
    assert "bare_0" in grammar
    for text in walks(grammar, name, 8, '<|"|>', 800):
        content, ((_, arguments),) = calls_in("gemma4", text)
        assert not content
        jsonschema.validate(arguments, schema)
        if name != "odd keys":
            assert is_text(grammar, f"<|tool_call>call:now{_as_gemma(arguments)}<tool_call|>"), text


def test_gemma_writes_json_where_a_schema_asks_more() -> None:
    for kept in ({"pattern": "a+"}, {"minLength": 1, "description": "-"}, {"format": "date"}):
        schema: Any = {"type": "object", "properties": {"a": {"type": "string", **kept}, "b": {"type": "string"}}}
        tools = [Tool("function", Function("now", parameters=one, strict=True)) for one in (schema, NOTHING)]
        grammar = grammar_of_calls("gemma4", tools, {}, choice="", one=True)
        (text,) = walks(grammar, "json", 1)
        jsonschema.validate(calls_in("gemma4", text)[1][0][1], schema)
        for text, allowed in (('{"b": "x"}', True), ('{"a": ""}', False), ('{b:<|"|>x<|"|>}', False), ("{}", True)):
            assert is_text(grammar, f"<|tool_call>call:now{text}<tool_call|>") is allowed
