"""Arguments that a model writes as text, one by one, to one JSON object, by the tool's schema.

Knows: which types a JSON schema allows a value. Does not know: how a format separates arguments.

A value that can only be a text is passed on as it grows; others once they are complete. What the schema does not name
is JSON where it parses, else a text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from launch.serve.parsers.deltas import Message
from launch.serve.parsers.reader import named

Schema = Mapping[str, Any]
_ALL: Final = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_DEEPEST: Final = 8  # references and unions within each other
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}  # as Python writes them
_TYPE_OF: Final[Mapping[type, str]] = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
}  # fmt: skip


class TypedArguments:
    """The arguments of a call that has just begun in ``out``; ``schema`` is that of all of them."""

    def __init__(self, out: Message, schema: Schema) -> None:
        self._out = out
        self._root = schema
        found = schema.get("properties")
        self._schemas: Schema = found if isinstance(found, Mapping) else {}
        self._before = "{"  # what stands before the next name
        self._types: frozenset[str] = _ALL
        self._parts: list[str] = []  # of a value that is not passed on yet
        self._held = ""  # a newline at the end, which may be the format's
        self._begun = False
        self._trims = False

    def begin(self, name: str, *, text: bool | None = None, trims: bool = False) -> None:
        """``text``: the model said whether it is a text. ``trims``: a newline before and after it is the format's."""
        self._types = types_of(self._schemas.get(named(name)), self._root)
        if text is not None:
            self._types = frozenset(("string",)) if text else _ALL - {"string"}
        self._out.arguments(f"{self._before}{json.dumps(named(name), ensure_ascii=False)}: ")
        self._before = ", "
        self._parts, self._held, self._begun, self._trims = [], "", False, trims
        if self._types == {"string"}:
            self._out.arguments('"')

    def more(self, text: str) -> None:
        """Of the value."""
        if not text:
            return
        if self._trims:
            text = text.removeprefix("\n") if not self._begun else text
            text, self._held = self._held + text, ""
            if text.endswith("\n"):
                text, self._held = text[:-1], "\n"
        self._begun = True
        if self._types == {"string"}:
            self._out.arguments(json.dumps(named(text), ensure_ascii=False)[1:-1])
        else:
            self._parts.append(text)

    def end(self) -> None:
        """The value is complete."""
        if self._types == {"string"}:
            self._out.arguments('"')
        else:
            self._out.arguments(written(named("".join(self._parts)), self._types))

    def finish(self) -> None:
        """There are no more arguments."""
        self._out.arguments("{}" if self._before == "{" else "}")


def types_of(schema: object, root: Schema, depth: int = 0) -> frozenset[str]:
    """Types that ``schema`` allows; all where it says nothing. ``root``: the schema in which its references lead."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return _ALL
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(referenced(reference, root), root, depth + 1)
    found = _ALL
    named_types = schema.get("type")
    if isinstance(named_types, str):
        named_types = [named_types]
    if isinstance(named_types, list) and named_types:
        found &= frozenset(kind for kind in named_types if isinstance(kind, str))
    elif isinstance(values := schema.get("enum"), list) and values:
        found &= frozenset(_TYPE_OF.get(type(value), "object") for value in values)
    elif "const" in schema:
        found &= {_TYPE_OF.get(type(schema["const"]), "object")}
    for union in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(union), list) and parts:
            found &= frozenset[str]().union(*(types_of(part, root, depth + 1) for part in parts))
    for part in schema.get("allOf") or () if isinstance(schema.get("allOf"), list) else ():
        found &= types_of(part, root, depth + 1)
    return (found | {"integer"} if "number" in found else found) or _ALL


def referenced(reference: str, root: Schema) -> object:
    """What a reference such as #/$defs/Place leads to."""
    at: object = root
    for step in reference.removeprefix("#").split("/")[1:]:
        at = at.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(at, Mapping) else None
    return at


def written(text: str, types: frozenset[str]) -> str:
    """``text`` as JSON of one of ``types``: as it stands where it is, else as a text."""
    stripped = text.strip()
    stripped = _WORDS.get(stripped, stripped)
    try:
        value = json.loads(stripped, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _TYPE_OF[type(value)]
    if isinstance(value, float) and "number" not in types and value.is_integer() and abs(value) < 1 << 53:
        kind, stripped = "integer", str(int(value))
    if kind not in types or (kind == "string" and types != _ALL):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False) if isinstance(value, float) and math.isinf(value) else stripped


def _no_json(word: str) -> None:
    raise ValueError(word)
