"""Grammars of arguments as Gemma 4 writes them: bare keys in alphabetical order, texts between two marks, no blanks.

Knows: which schemas have such a grammar, and its rules. Does not know: calls (call_grammar.py), how one is read
(gemma4.py). The order is that of the model's own chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from launch.serve.parsers.typed_values import referenced, types_of
from runtime.frontend.structured import json_rule, upto, written

_MOST_ITEMS: Final = 64  # of an array with a bound: each is written into the rule
_MOST_NESTED: Final = 16
_INTEGER: Final = "-?(0|[1-9][0-9]{0,19})"
_SCALARS: Final = {
    "integer": f"/{_INTEGER}/",
    "number": rf"/{_INTEGER}(\.[0-9]{{1,20}})?([eE][+-]?[0-9]{{1,2}})?/",
    "boolean": '"true" | "false"',
    "null": '"null"',
}
_BOUNDS: Final = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_COMBINED: Final = {"$ref", "anyOf", "oneOf", "allOf", "enum", "const"}
_REFUSED: Final[Mapping[str, set[str]]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"prefixItems"},
    "object": {"patternProperties", "minProperties", "maxProperties"},
}
_OF_VALUES: Final = (
    _COMBINED
    | _BOUNDS
    | {"type", "items", "properties", "required", "additionalProperties"}.union(
        {"minItems", "maxItems"}, *_REFUSED.values()
    )
)
_BARE: Final = "[A-Za-z0-9_.$-]{1,64}"
_ANY_KEY: Final = f'/{_BARE}/ ":" '


class NotBare(ValueError):
    """A schema that this form has no grammar for; there is one of its JSON."""


class BareValues:
    """Adds rules to ``rules``, for schemas that structured.json_rule takes. ``quote``: the mark around a text;
    ``added``: ids of the tokenizer's added tokens."""

    def __init__(self, rules: list[str], quote: str, added: Mapping[str, int]) -> None:
        self._rules, self._quote, self._added = rules, quote, added
        self._root: Any = None
        self._depth = 0
        self._named: dict[str, str] = {}  # rules by $ref; of any value, of what follows a text's first mark

    def arguments(self, schema: Any) -> str:
        """The name of the rule for objects that ``schema`` allows. Raises NotBare."""
        self._root, self._depth, rules = schema, 0, len(self._rules)
        self._named = {name: rule for name, rule in self._named.items() if name in ("any", "text")}
        try:
            if types_of(schema, schema) != {"object"}:
                raise NotBare
            return self._value(schema)
        except (AttributeError, LookupError, TypeError, ValueError) as error:  # a keyword's value has another type
            del self._rules[rules:]
            self._named = {}
            raise NotBare from error

    def _rule(self, said: str) -> str:
        name = f"bare_{len(self._rules)}"
        self._rules.append(f"{name}: {said}")
        return name

    def _once(self, name: str, said: Callable[[], str]) -> str:
        """The rule that is known by ``name``, to itself, too."""
        if name not in self._named:
            at = len(self._rules)
            self._named[name] = f"bare_{at}"
            self._rules.append("")
            self._rules[at] = f"bare_{at}: {said()}"
        return self._named[name]

    def _value(self, schema: Any) -> str:
        return self._once("any", self._any) if _says_nothing(schema) else self._rule(self._said(schema))

    def _said(self, schema: Any) -> str:
        """What the rule of a value says."""
        self._depth += 1
        if self._depth > _MOST_NESTED or schema is False:
            raise NotBare
        said = self._any() if _says_nothing(schema) else self._of_kind(schema)
        self._depth -= 1
        return said

    def _of_kind(self, schema: Mapping[str, Any]) -> str:
        said = schema.keys() & _OF_VALUES
        if said == {"$ref"}:
            return self._once(schema["$ref"], lambda: self._said(referenced(schema["$ref"], self._root)))
        if said == {"anyOf"}:
            return " | ".join(map(self._value, schema["anyOf"]))
        if said in ({"enum"}, {"enum", "type"}, {"const"}, {"const", "type"}):
            allowed = types_of({"type": schema.get("type")}, {})
            values = [schema["const"]] if "const" in schema else schema["enum"]
            texts = [self._literal(one) for one in values if types_of({"const": one}, {}) & allowed]
            return " | ".join(written(one, self._added) for one in texts) or self._refuse()
        kind: Any = schema.get("type")
        if isinstance(kind, list) and kind:
            return " | ".join(self._value({**schema, "type": one}) for one in kind)
        if said & (_COMBINED | _REFUSED.get(kind, set())):
            raise NotBare
        if kind == "string":
            return self._text()
        if kind in _SCALARS:
            bounds = {name: schema[name] for name in said & _BOUNDS}
            return json_rule({"type": kind, **bounds}, "") if bounds else _SCALARS[kind]
        if kind == "array":
            return self._array(schema)
        return self._object(schema) if kind == "object" else self._refuse()

    def _refuse(self) -> str:
        raise NotBare

    def _any(self) -> str:
        value = self._once("any", self._any)
        scalars = (_SCALARS[kind] for kind in ("number", "boolean", "null"))
        lists = (f'"[" {_listed(value)}? "]"', f'"{{" {_listed(_ANY_KEY + value)}? "}}"')
        return " | ".join([self._text(), *scalars, *lists])

    def _text(self) -> str:
        if "text" not in self._named:
            self._named["text"] = name = f"bare_{len(self._rules)}"
            self._rules.append(upto(name, self._quote, self._added))
        return f"{written(self._quote, self._added)} {self._named['text']}"

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"' if least == 0 else self._refuse()
        item = self._value(schema.get("items", True))
        if max(least, most or 0) > _MOST_ITEMS or least > (most or least):
            raise NotBare
        more = f'("," {item})*' if most is None else ""
        for at in range(max(least, most or 0), 1, -1):  # nested: (x)?(x)? has two ways on, and cuts values short
            more = f'("," {item} {more}){"" if at <= least else "?"}'
        return f'"[" ({item} {more}){"" if least else "?"} "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Properties that are named, or any names where none is."""
        properties, required = schema.get("properties") or {}, {*schema.get("required", ())}
        other = schema.get("additionalProperties", True)
        if required - properties.keys():
            raise NotBare
        if not properties and other is not False:
            return f'"{{" {_listed(_ANY_KEY + self._value(other))}? "}}"'
        names = sorted(
            (name for name in properties if properties[name] is not False or name in required), key=str.lower
        )
        pairs = [self._pair(name, properties[name]) for name in names]
        first = next((at for at, name in enumerate(names) if name in required), None)
        if first is None:
            return f'"{{" ({_some(pairs)})? "}}"' if pairs else '"{" "}"'
        before = [f'({rule} ",")?' for rule in pairs[:first]]
        after = [
            f'("," {rule}){"" if name in required else "?"}'
            for name, rule in zip(names[first + 1 :], pairs[first + 1 :], strict=True)
        ]
        return f'"{{" {" ".join([*before, pairs[first], *after])} "}}"'

    def _pair(self, name: str, schema: Any) -> str:
        return self._rule(f"{written(self._key(name) + ':', self._added)} {self._value(schema)}")

    def _key(self, name: str) -> str:
        return name if re.fullmatch(_BARE, name) else self._literal(name)

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            if self._quote in value:
                raise NotBare
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, list):
            return f"[{','.join(map(self._literal, value))}]"
        if isinstance(value, dict):
            names = sorted(value, key=str.lower)
            return "{" + ",".join(f"{self._key(name)}:{self._literal(value[name])}" for name in names) + "}"
        return json.dumps(value)


def _says_nothing(schema: Any) -> bool:
    return schema is True or (isinstance(schema, Mapping) and not schema.keys() & _OF_VALUES)


def _listed(value: str) -> str:
    return f'({value} ("," {value})*)'


def _some(rules: Sequence[str]) -> str:
    """One of ``rules`` or more, in their order, with commas between."""
    if len(rules) == 1:
        return rules[0]
    half = len(rules) // 2
    more = " ".join(f'("," {rule})?' for rule in rules[half:])
    return f"({_some(rules[:half])} {more} | {_some(rules[half:])})"
