"""JSON Schema by keyword, and the other kinds of constraint: what is a text of each and what is not, token by token.

Of every keyword of JSON Schema 2020-12 there are valid and invalid documents, or it is refused by path and name. What
is accepted is valid (jsonschema says so, too); what is valid and not accepted is listed in ``NEVER_WRITTEN``.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from runtime.frontend.structured import (
    FORMATS,
    MOST_DEPTH,
    MOST_OPTIONAL,
    MOST_PROPERTIES,
    MOST_TEXT,
    REFUSED_KEYWORDS,
    after_reasoning,
    of_response_format,
    of_structured_outputs,
    structured,
)
from runtime.frontend.tokenizer import Tokenizer, added_tokens
from runtime.frontend.validation import RequestError
from runtime.grammar import GrammarError, Grammars
from runtime.schedule.request import SamplingParams
from tests.runtime.engine.table_rigs import hold
from tests.runtime.frontend import small_tokenizers

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

pytestmark = pytest.mark.slow
TOKENIZER = small_tokenizers.byte_level()
EOS, VOCABULARY = 0, 360
MARKS = "<think>", "</think>"
MANY: dict[str, Any] = {f"p{i}": {} for i in range(MOST_OPTIONAL + 1)}
GRAMMARS = Grammars(TOKENIZER.to_json, VOCABULARY, (EOS,))
NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/n"}}, "required": ["v"]}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}

# name: schema, valid documents, invalid ones
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "true": (True, [1, "a", None, {"a": [1, {}]}], []),
    "type": ({"type": "integer"}, [0, -7, 12345], ["1", 1.5, None, [1]]),
    "type list": ({"type": ["string", "null"]}, ["a", None], [1, {}]),
    "boolean": ({"type": "boolean"}, [True, False], [0, "true", None]),
    "number": ({"type": "number"}, [0, -1.5, 1e30, 2.5e-7], ["1", None]),
    "enum": ({"enum": [1, "a", None, {"x": [1]}]}, [1, "a", None, {"x": [1]}], [2, "b", {"x": [2]}, False]),
    "const": ({"const": {"é": [True]}}, [{"é": [True]}], [{"é": [False]}, {}, "é"]),
    "minimum": ({"type": "integer", "minimum": -3}, [-3, 0, 99], [-4, -30]),
    "maximum": ({"type": "number", "maximum": 2.5}, [2.5, -9, 2.49], [2.51, 3, 25]),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 0}, [0.5, 1, 0.01], [0, -1]),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 10}, [9, -4], [10, 11]),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, [0, 3, -9, 300], [1, 4, 301]),
    "minLength": ({"type": "string", "minLength": 2}, ["ab", "éé", "👋🌍", "a\nb"], ["", "a", "👋", "\n"]),
    "maxLength": ({"type": "string", "maxLength": 2}, ["", "ab", "👋🌍", '"\\'], ["abc", "👋🌍a"]),
    "pattern": ({"type": "string", "pattern": "b+c"}, ["abc", "bbcd"], ["ac", ""]),
    "pattern anchored": ({"type": "string", "pattern": "^[a-z]{2,3}$"}, ["ab", "abc"], ["a", "abcd", "aB"]),
    "items": ({"type": "array", "items": {"type": "integer"}}, [[], [1], [1, 2, 3]], [["a"], [1, None], {}]),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        [[], [1], [1, "a"]],
        [["a"], [1, 2], [1, "a", 3]],
    ),
    "minItems": ({"type": "array", "minItems": 2}, [[1, 2], [1, "a", None]], [[], [1]]),
    "maxItems": ({"type": "array", "maxItems": 1}, [[], [1]], [[1, 2]]),
    "properties": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        [{}, {"a": 1}, {"b": "x"}, {"a": 1, "b": "x", "c": None}],
        [{"a": "x"}, {"b": 1}, {"c": 1, "a": "x"}],
    ),
    "required": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b", "c"]},
        [{"b": 1, "c": 2}, {"a": 1, "b": 2, "c": 3}],
        [{}, {"a": 1}, {"b": 1}],
    ),
    "additionalProperties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        [{"a": "x", "b": 1}, {"c": 1, "d": 2}],
        [{"b": "x"}],
    ),
    "additionalProperties false": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        [{}, {"a": 1}],
        [{"b": 1}, {"a": 1, "b": 1}],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
        [{}, {"n_a": 1}],
        [{"n_a": "x"}, {"m": 1}],
    ),
    "minProperties": ({"type": "object", "minProperties": 1}, [{"a": 1}, {"a": 1, "b": 2}], [{}]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]}, [1, "ab"], ["abc", None]),
    "oneOf": (
        {"oneOf": [{"type": "integer"}, {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]}]},
        [3, {"k": "b"}],
        [{"k": "a"}, "x"],
    ),
    "allOf": (
        {"allOf": [POINT, {"properties": {"y": {"type": "string"}}}]},
        [{"x": 1}, {"x": 1, "y": "a"}],
        [{"y": "a"}, {"x": 1, "y": 2}],
    ),
    "$ref, $defs": (
        {"$defs": {"n": NODE}, "$ref": "#/$defs/n"},
        [{"v": 1}, {"v": 1, "next": {"v": 2, "next": {"v": 3}}}],
        [{"next": {"v": 1}}, {"v": 1, "next": {"next": {}}}],
    ),
    "$ref #": (
        {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False},
        [{}, {"child": {}}, {"child": {"child": {}}}],
        [{"child": 1}, {"child": {"a": 1}}],
    ),
    "definitions": ({"definitions": {"p": POINT}, "items": {"$ref": "#/definitions/p"}}, [[{"x": 1}]], [[{"x": "a"}]]),
    "uniqueItems false": ({"type": "array", "uniqueItems": False}, [[1, 1]], [1]),
    "annotations": (
        {"title": "t", "description": "d", "default": 1, "examples": [1], "deprecated": False, "readOnly": True,
         "writeOnly": False, "$comment": "c", "contentEncoding": "base64", "contentMediaType": "text/plain",
         "contentSchema": {}, "$id": "https://a.example/s", "$vocabulary": {},
         "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "string"},
        ["a"],
        [1],
    ),
    "unknown keywords": ({"x-order": 1, "nullable": True, "type": "integer"}, [1], ["a", None]),
    "no type": ({"maxLength": 1, "minimum": 5, "required": ["a"]}, ["a", 6, {"a": 1}, None], ["ab", 4, {"b": 1}]),
    "date": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "24-1-1"]),
    "time": ({"type": "string", "format": "time"}, ["12:34:56Z"], ["25:00:00Z", "noon"]),
    "date-time": ({"type": "string", "format": "date-time"}, ["2024-02-29T12:00:00Z"], ["2024-02-29"]),
    "duration": ({"type": "string", "format": "duration"}, ["P1DT2H"], ["1 day"]),
    "email": ({"type": "string", "format": "email"}, ["a@b.org"], ["a"]),
    "hostname": ({"type": "string", "format": "hostname"}, ["a.example"], ["-a-"]),
    "ipv4": ({"type": "string", "format": "ipv4"}, ["10.0.0.255"], ["256.1.1.1"]),
    "ipv6": ({"type": "string", "format": "ipv6"}, ["::1", "fe80::1"], ["1.2.3.4.5"]),
    "uuid": ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    "uri": ({"type": "string", "format": "uri"}, ["https://a.example/b?c"], ["not a uri"]),
}  # fmt: skip
# Valid documents, as text, that are never written.
NEVER_WRITTEN = [
    ({"type": "object", "properties": {"a": {}, "b": {}}}, '{"b": 1, "a": 1}'),  # properties in another order
    ({"type": "integer"}, "1.0"),  # whole numbers with a fraction or an exponent
    ({"type": "number", "minimum": 0}, "1e3"),  # bounded numbers with an exponent
    ({"type": "string"}, r'"\u00e9"'),  # escapes of code points
    ({"type": "object"}, '{"a"\n\n: 1}'),  # more white space than a blank, or a line break and its indentation
    (True, " 1"),  # white space before and after the document
]


def is_text(grammar: str, text: str | list[int], grammars: Grammars = GRAMMARS) -> bool:
    """Whether every token of ``text`` is allowed, and then its end."""
    hold(grammars, grammar)
    matcher = grammars.matcher(SamplingParams(grammar=grammar), (EOS,), ())
    allowed_W = np.zeros(-(-grammars.vocab_size // 32), np.int32)
    for token in (*(TOKENIZER.encode(text) if isinstance(text, str) else text), EOS):
        matcher.allow(allowed_W)
        if not allowed_W[token // 32] >> token % 32 & 1:
            return False
        matcher.accept((token,))
    return True


@pytest.mark.parametrize("name", CASES)
def test_of_each_keyword_valid_documents_are_texts_and_others_are_not(name: str) -> None:
    schema, valid, invalid = CASES[name]
    grammar = structured(json=schema)
    checker = jsonschema.Draft202012Validator(schema)
    for document in valid:
        assert checker.is_valid(document)
        assert is_text(grammar, json.dumps(document, ensure_ascii=False)), document
        assert is_text(grammar, json.dumps(document, ensure_ascii=False, indent=2)), document
    for document in invalid:
        assert name in FORMATS or not checker.is_valid(document)
        assert not is_text(grammar, json.dumps(document, ensure_ascii=False)), document


def test_every_keyword_is_enforced_or_refused_by_path_and_name() -> None:
    for keyword in sorted(REFUSED_KEYWORDS):
        schema = {"type": "object", "properties": {"a": {keyword: {}}}}
        with pytest.raises(
            RequestError, match=re.escape(f"properties.a: keyword {keyword!r} is not supported")
        ) as found:
            of_response_format({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
        assert found.value.field == "response_format"
    for document, text in NEVER_WRITTEN:
        assert not is_text(structured(json=document), text), text


def used_in(schema: Any) -> set[str]:
    """Every name in it, of keywords and of others."""
    below = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    return set(schema if isinstance(schema, dict) else ()).union(*map(used_in, below))


def test_no_keyword_of_the_draft_is_forgotten() -> None:
    """Those of the meta-schema's vocabularies have a case, or are refused."""
    resources = pytest.importorskip("jsonschema_specifications").REGISTRY
    draft = "https://json-schema.org/draft/2020-12/"
    vocabularies = [one["$ref"] for one in resources.contents(f"{draft}schema")["allOf"]]
    keywords = set().union(*(resources.contents(draft + one)["properties"] for one in vocabularies))
    assert len(keywords) > 50
    assert keywords - used_in([schema for schema, *_ in CASES.values()]) <= set(REFUSED_KEYWORDS)


@pytest.mark.parametrize("name", CASES)
def test_what_chance_writes_is_valid(name: str) -> None:
    """Any allowed token is as likely as any other, but an end is taken where there is one, mostly."""
    schema, draw, ended = CASES[name][0], random.Random(name), 0
    hold(GRAMMARS, grammar := structured(json=schema))
    for _ in range(6):
        matcher = GRAMMARS.matcher(SamplingParams(grammar=grammar), (EOS,), ())
        allowed_W, answer = np.zeros(-(-VOCABULARY // 32), np.int32), list[int]()
        while len(answer) < 150 and EOS not in answer:
            matcher.allow(allowed_W)
            ids = np.flatnonzero(np.unpackbits(allowed_W.view(np.uint8), bitorder="little")).tolist()
            assert ids, "a text that has begun can be ended"
            closing = [i for i in ids if TOKENIZER.decode([i]) in ('"', "}", "]") or i == EOS]
            answer.append(draw.choice(closing if closing and draw.random() < 0.6 else ids))
            matcher.accept(answer[-1:])
        if EOS in answer:
            ended += 1
            jsonschema.validate(json.loads(TOKENIZER.decode(answer)), schema)
    assert ended or name in ("true", "minLength", "no type", "minItems", "pattern", *FORMATS)


REFUSED: list[tuple[Any, str]] = [
    (
        {"json": {"minProperties": 2}},
        "json.minProperties is 2, which needs more than one property that is not required",
    ),
    ({"json": {"format": "idn-email"}}, "json.format is 'idn-email', but of formats there are"),
    ({"json": {"items": {"$id": "https://a.example/b"}}}, "json.items: keyword '$id' is not supported"),
    ({"json": {"items": {"$ref": "https://a.example/b"}}}, "json.items.$ref is 'https://a.example/b', but must be"),
    ({"json": {"properties": {"a": {"maxLength": 1 << 20}}}}, "properties.a.maxLength is 1048576, but must be 0 to"),
    ({"json": {"items": [{}]}}, "json.items is a list: send prefixItems"),
    ({"json": False}, "json is false: no document is allowed"),
    ({"json": "{"}, "json is no JSON"),
    ({"json": 5}, "json is 5, but must be a schema"),
    ({"json": {"enum": ["x" * MOST_TEXT]}}, "characters, but may have"),
    ({"json": {"properties": {str(i): {} for i in range(MOST_PROPERTIES + 1)}}}, "one property more than"),
    ({"json": {"properties": MANY}}, "json.properties has more than 400 properties that are not required"),
    ({"json": {"properties": MANY, "required": 5}}, "json.properties has more than 400 properties that are not"),
    ({"json": {"anyOf": []}}, "json.anyOf is of type list, but must be a list of schemas"),
    ({"regex": 5}, "regex is 5, but must be a text"),
    ({"choice": "ab"}, "choice is 'ab', but must be a list of texts"),
    ({"choice": []}, "choice is of type list"),
    ({"grammar": "root ::= ("}, "grammar is neither Lark nor EBNF"),
    ({"json": {}, "regex": "a"}, "has json, regex, but must have one constraint"),
    ({"whitespace_pattern": "a"}, "whitespace_pattern is not supported; there are json, regex"),
    ({"structural_tag": {"structures": []}}, "structural_tag must be"),
    ({"structural_tag": {"structures": [{"begin": "<a", "end": ""}], "triggers": ["b"]}}, "begins with none of"),
    (5, "structured_outputs is 5, but must be an object"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused_says_where_and_why(given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as found:
        of_structured_outputs(given)
    assert found.value.field == "structured_outputs"


def test_a_schema_that_is_nested_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MOST_DEPTH):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested deeper than"):
        structured(json=schema)


HOSTILE = [
    structured(json={"type": "string", "pattern": "^(a?){2000}a{2000}$"}),
    structured(regex="(a|b)*a(a|b){400}(c|d){4000}"),
    structured(json={"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    structured(json={"anyOf": [{"type": "string", "pattern": f"^.*{i}.*a{{500}}$"} for i in range(200)]}),
    structured(grammar='start: start start | "a"'),
    structured(regex="a\x00b"),
    'start: "a" nowhere',
]


@pytest.mark.parametrize("grammar", HOSTILE, ids=range(len(HOSTILE)))
def test_the_work_of_a_hostile_grammar_is_bounded(grammar: str) -> None:
    """It is refused, or its tokens run out of fuel, which ends its request; the same every time."""

    def outcome() -> list[bytes | str]:
        grammars, found = Grammars(TOKENIZER.to_json, VOCABULARY, (EOS,)), list[bytes | str]()
        try:
            hold(grammars, grammar)
        except GrammarError as error:
            return [str(error)]
        finally:
            grammars.close()
        matcher = grammars.matcher(SamplingParams(grammar=grammar), (EOS,), ())
        allowed_W = np.zeros(-(-VOCABULARY // 32), np.int32)
        for token in TOKENIZER.encode('"aaabababab'):
            matcher.allow(allowed_W)
            found.append(allowed_W.tobytes())
            matcher.accept((token,))
        grammars.close()
        return found

    assert outcome() == outcome()


def test_other_kinds() -> None:
    assert is_text(structured(regex=r"\d{3}/[a-z]+"), "123/abc")
    assert not is_text(structured(regex=r"\d{3}/[a-z]+"), "12/abc")
    assert is_text(structured(choice=["yes", "no", "é\n"]), "é\n")
    assert not is_text(structured(choice=["yes", "no"]), "nope")
    for grammar in ('root ::= "a" [0-9]+', 'start: "a" /[0-9]+/'):
        assert is_text(structured(grammar=grammar), "a12")
    assert is_text(of_response_format({"type": "json_object"}), '{"a": [1]}')
    assert not is_text(of_response_format({"type": "json_object"}), "[1]")
    assert of_response_format({"type": "text"}) == of_structured_outputs({}) == of_structured_outputs(None) == ""
    tags = {"structures": [{"begin": "<f=x>", "schema": POINT, "end": "</f>"}], "triggers": ["<f="]}
    grammar = of_structured_outputs({"structural_tag": {"type": "structural_tag", **tags}})
    assert is_text(grammar, 'so <f=x>{"x": 1}</f> and <f=x>{"x": 2}</f> then')
    assert is_text(grammar, "nothing")
    assert not is_text(grammar, 'so <f=y>{"x": 1}</f>')
    assert not is_text(grammar, 'so <f=x>{"x": "a"}</f>')


def test_an_object_with_as_many_properties_as_may_be() -> None:
    """Any of them may come first, and the work for it stays within its limits."""
    few = {name: MANY[name] for name in [*MANY][1:]}
    grammar = structured(json={"type": "object", "properties": few})
    assert is_text(grammar, '{"p1": 1, "p5": [2], "p400": "a"}')
    structured(json={"type": "object", "properties": MANY, "required": ["p3", {}]})


def test_reasoning_comes_before_the_text() -> None:
    answer = structured(json_object=True)
    begun = after_reasoning(answer, MARKS, "<think>\n", {})
    maybe = after_reasoning(answer, MARKS, "", {})
    assert is_text(begun, 'so {"</thin" it is</think>\n\n{"a": 1}')
    assert not is_text(begun, '{"a": 1}')
    assert is_text(maybe, '<think>\nhm</think>{"a": 1}')
    assert is_text(maybe, '{"a": 1}')
    assert not is_text(maybe, '<think>{"a": 1}')


def test_marks_that_are_added_tokens_are_those_tokens() -> None:
    """Special or not: letters that spell one are text."""
    backend = small_tokenizers.byte_level_backend().__class__.from_str(TOKENIZER.to_json())
    backend.add_tokens([AddedToken("</think>", special=False), AddedToken("<f=", special=False)])
    backend.add_special_tokens([AddedToken("<think>", special=True)])
    tokenizer = Tokenizer(backend)
    grammars, added = Grammars(tokenizer.to_json, 368, (EOS,)), added_tokens(tokenizer)
    letters = [token for letter in "</think>" for token in tokenizer.encode(letter)]
    begun = after_reasoning(structured(json_object=True), MARKS, "<think>", added)
    assert is_text(begun, [*tokenizer.encode("so"), *letters, *tokenizer.encode('</think>{"a": 1}')], grammars)
    assert not is_text(begun, [*tokenizer.encode("so"), *letters, *tokenizer.encode('{"a": 1}')], grammars)
    maybe = after_reasoning(structured(json_object=True), MARKS, "", added)
    assert is_text(maybe, tokenizer.encode('<think>so</think>\n{"a": 1}'), grammars)
    tags = {"structures": [{"begin": "<f=x>", "schema": POINT, "end": "</f>"}], "triggers": ["<f="]}
    grammar = of_structured_outputs({"structural_tag": tags}, added=added)
    assert is_text(grammar, tokenizer.encode('so <f=x>{"x": 1}</f> then'), grammars)
    assert not is_text(grammar, tokenizer.encode("so <f=y>"), grammars)
    grammars.close()
