"""JSON that a schema allows, as a tree.

Knows: how llguidance writes JSON: order of properties, blanks between tokens, escapes, whole numbers between bounds.
Does not know: recursion, keywords that are rare; what it does not know is Unsupported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from runtime.grammar_tables.expression import (
    LAST,
    Chars,
    Either,
    Every,
    Expression,
    Times,
    Tree,
    Unsupported,
    every,
    optional,
    text,
    without,
)

_CODES: Final = {"n": 10, "r": 13, "b": 8, "t": 9, "f": 12, "\\": 92, '"': 34}
_NEVER_PLAIN: Final = ((0, 0x1F), (34, 34), (92, 92), (127, 127))
_NUMBER: Final = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_ANNOTATIONS: Final = {
    "title", "description", "default", "examples", "$schema", "$defs", "definitions", "$id", "$comment",
}  # fmt: skip
_OF_KIND: Final[Mapping[str, set[str]]] = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": set(),
    "boolean": set(),
    "null": set(),
}
_MOST_NESTED: Final = 16
_MOST_VALUES: Final = 4096  # with those that a $ref stands for


def _quoted(tree: Tree) -> Tree:
    """What stands between quotes for a text of ``tree``."""
    match tree:
        case Chars(ranges):
            plain = without(_NEVER_PLAIN, ranges)
            coded = [letter for letter, code in _CODES.items() if any(low <= code <= high for low, high in ranges)]
            if not (plain or coded):
                raise Unsupported
            return Either((*([Chars(plain)] if plain else ()), *(text("\\" + letter) for letter in coded)))
        case Every(parts):
            return Every(tuple(map(_quoted, parts)))
        case Either(parts):
            return Either(tuple(map(_quoted, parts)))
        case Times(part, least, most):
            return Times(_quoted(part), least, most)
    raise Unsupported


def _string(letters: Tree) -> Tree:
    return every(text('"'), _quoted(letters), text('"'))


class JsonText:
    """Of a schema that has passed frontend/structured.py, with its x-guidance."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._values = 0
        options = dict(schema.get("x-guidance", {}))
        self._blank = optional(Expression(options.pop("whitespace_pattern", "")).tree)
        if options != {"json_allowed_escapes": 'nrbtf\\"'}:
            raise Unsupported
        self._defined = {
            f"#/{where}/{name}": one
            for where in ("$defs", "definitions")
            for name, one in schema.get(where, {}).items()
        }
        self.tree = self._value({name: one for name, one in schema.items() if name != "x-guidance"}, 0)

    def _value(self, schema: Any, depth: int) -> Tree:
        self._values += 1
        if not isinstance(schema, Mapping) or depth > _MOST_NESTED or self._values > _MOST_VALUES:
            raise Unsupported
        said = {name: one for name, one in schema.items() if name not in _ANNOTATIONS}
        if "$ref" in said:
            if len(said) > 1 or said["$ref"] not in self._defined:
                raise Unsupported
            return self._value(self._defined[said["$ref"]], depth + 1)
        if "const" in said or "enum" in said:
            if len(said) > 1 + ("type" in said):
                raise Unsupported
            return Either(tuple(self._constant(one, said.get("type")) for one in said.get("enum", [said.get("const")])))
        if "anyOf" in said:
            if len(said) > 1:
                raise Unsupported
            return Either(tuple(self._value(one, depth + 1) for one in said["anyOf"]))
        kinds = said.pop("type", None)
        if not isinstance(kinds, str | list):
            raise Unsupported
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not kinds or said.keys() - set().union(*(_OF_KIND.get(kind, set()) for kind in kinds)):
            raise Unsupported
        return Either(tuple(self._of_kind(kind, said, depth) for kind in kinds))

    def _constant(self, value: Any, kind: Any) -> Tree:
        names = {str: "string", bool: "boolean", int: "integer", type(None): "null"}
        if type(value) not in names or (kind is not None and kind != names[type(value)]):
            raise Unsupported
        return _string(text(value)) if isinstance(value, str) else text(json.dumps(value))

    def _of_kind(self, kind: str, said: Mapping[str, Any], depth: int) -> Tree:
        match kind:
            case "null":
                return text("null")
            case "boolean":
                return Either((text("true"), text("false")))
            case "number":
                return Expression(_NUMBER).tree
            case "integer":
                return _integers(said)
            case "string":
                return _string(self._letters(said))
            case "array":
                return self._array(said, depth)
            case "object":
                return self._object(said, depth)
        raise Unsupported

    def _letters(self, said: Mapping[str, Any]) -> Tree:
        if (pattern := said.get("pattern")) is None:
            return Times(Chars(((0, LAST),)), said.get("minLength", 0), said.get("maxLength"))
        if len(said.keys() & {"pattern", "minLength", "maxLength"}) > 1 or "\\" in pattern[-2:-1]:
            raise Unsupported
        if not (pattern.startswith("^") and pattern.endswith("$")):
            raise Unsupported
        return Expression(f"({pattern[1:-1]})", digits=True).tree

    def _array(self, said: Mapping[str, Any], depth: int) -> Tree:
        least, most = said.get("minItems", 0), said.get("maxItems")
        if most == 0:
            return every(text("["), self._blank, text("]"))
        item = self._value(said.get("items"), depth + 1)
        more = every(self._blank, text(","), self._blank, item)
        inner = every(self._blank, item, Times(more, max(least - 1, 0), None if most is None else most - 1))
        return every(text("["), inner if least else optional(inner), self._blank, text("]"))

    def _object(self, said: Mapping[str, Any], depth: int) -> Tree:
        properties, required = said.get("properties", {}), said.get("required", [])
        if said.get("additionalProperties") is not False or set(required) - properties.keys():
            raise Unsupported
        after: Tree = Every(())  # of the properties that are left: where one was written before them
        alone: Tree = Every(())  # and where none was
        for name, schema in reversed(properties.items()):
            name_of = text(json.dumps(name, ensure_ascii=False))
            item = every(name_of, self._blank, text(":"), self._blank, self._value(schema, depth + 1))
            more, begun = every(self._blank, text(","), self._blank, item), every(self._blank, item, after)
            if name in required:
                alone, after = begun, every(more, after)
            else:
                alone, after = Either((begun, alone)), every(optional(more), after)
        return every(text("{"), alone, self._blank, text("}"))


def _integers(said: Mapping[str, Any]) -> Tree:
    lows = [said[name] + step for name, step in (("minimum", 0), ("exclusiveMinimum", 1)) if name in said]
    highs = [said[name] + step for name, step in (("maximum", 0), ("exclusiveMaximum", -1)) if name in said]
    if any(type(end) is not int or abs(end) > 1 << 53 for end in lows + highs):
        raise Unsupported
    low, high = max(lows, default=None), min(highs, default=None)
    if low is None and high is None:
        return Expression("-?(0|[1-9][0-9]*)").tree
    if low is not None and high is not None and low > high:
        raise Unsupported
    parts = []
    if low is None or low < 0:  # minus zero only between two bounds
        nearest = int(low is None or high is None) if high is None or high >= 0 else -high
        parts.append(every(text("-"), _decimals(nearest, None if low is None else -low)))
    if high is None or high >= 0:
        parts.append(_decimals(max(low or 0, 0), high))
    return Either(tuple(parts))


def _decimals(low: int, high: int | None) -> Tree:
    """The numbers from ``low`` >= 0 to ``high``, without leading zeros."""
    digits, parts = len(str(low)), []
    if high is None:
        parts.append(Expression(f"[1-9][0-9]{{{digits},}}").tree)
        high = 10**digits - 1
    for count in range(digits, len(str(high)) + 1):
        first, last = max(low, 10 ** (count - 1) if count > 1 else 0), min(high, 10**count - 1)
        parts.append(_same_length(str(first), str(last)))
    return Either(tuple(parts))


def _same_length(low: str, high: str) -> Tree:
    if not low:
        return Every(())
    digit = Chars(((48, 57),))
    if set(low) == {"0"} and set(high) == {"9"}:
        return Times(digit, len(low), len(low))
    if low[0] == high[0]:
        return every(text(low[0]), _same_length(low[1:], high[1:]))
    rest = len(low) - 1
    parts = [
        every(text(low[0]), _same_length(low[1:], "9" * rest)),
        every(text(high[0]), _same_length("0" * rest, high[1:])),
    ]
    if ord(low[0]) + 1 < ord(high[0]):
        parts.append(every(Chars(((ord(low[0]) + 1, ord(high[0]) - 1),)), Times(digit, rest, rest)))
    return Either(tuple(parts))
