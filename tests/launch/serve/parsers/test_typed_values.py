"""Values that are written as text become JSON by the tool's schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launch.serve.parsers.deltas import Message, merged
from launch.serve.parsers.typed_values import TypedArguments, types_of, written

NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
ROOT = {"$defs": {"Place": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}}}


@pytest.mark.parametrize(
    ("text", "schema", "right"),
    [
        ("123", {"type": "string"}, "123"),
        ("true", {"type": "string"}, "true"),
        ('"quoted"', {"type": "string"}, '"quoted"'),
        ("123", {"type": "integer"}, 123),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),  # what it is not stays text
        ("5", {"type": "number"}, 5),
        ("1e3", {"type": "number"}, 1000.0),
        ("five", {"type": "integer"}, "five"),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("null", NULLABLE, None),  # and no object: vllm#40861
        ("a", NULLABLE, "a"),
        ("12", NULLABLE, "12"),
        ('{"a": 1}', {"anyOf": [{"type": "object"}, {"type": "null"}]}, {"a": 1}),
        ('{"a": 1}', {"$ref": "#/$defs/Place"}, {"a": 1}),
        ('{"a": 1}', {"$ref": "#/$defs/Loop"}, {"a": 1}),
        ("[1, 2]", {"type": ["array", "null"]}, [1, 2]),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("x", {"const": "x"}, "x"),
        ("7", {"allOf": [{"type": ["integer", "string"]}, {"type": "string"}]}, "7"),
        ("7", None, 7),  # no schema: JSON where it parses
        ("so", None, "so"),
        ('"so"', None, "so"),
        ("{'a': 1}", {"type": "object"}, "{'a': 1}"),
        ("5", {"type": 5}, 5),  # a schema that is none says nothing
    ],
)
def test_types_come_from_the_schema(text: str, schema: Any, right: Any) -> None:
    found = json.loads(written(text, types_of(schema, ROOT)))
    assert (found, type(found)) == (right, type(right))


@pytest.mark.parametrize("step", [1, 3, 100])
def test_one_object_of_all(step: int) -> None:
    """A newline on each side is the format's where it says so; more of them are the value's."""
    out = Message()
    out.begin("f")
    arguments = TypedArguments(out, {"properties": {"text": {"type": "string"}, "number": {"type": "integer"}}})
    for name, text in (("text", "\n\na\n\n"), ("number", "\n5\n"), ('o"ther', "\nx\n")):
        arguments.begin(name, trims=True)
        for at in range(0, len(text), step):
            arguments.more(text[at : at + step])
        arguments.end()
    arguments.finish()
    (call,) = merged(out.take())["tool_calls"]
    assert call["function"]["arguments"] == '{"text": "\\na\\n", "number": 5, "o\\"ther": "x"}'
