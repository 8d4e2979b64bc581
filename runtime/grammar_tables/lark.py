"""Grammars in Lark as trees: those that frontend/structured.py and the grammars of tool calls are written in.

Knows: rules that refer to others, one text or token after the other, alternatives, counts, lazy rules, JSON schemas,
one grammar in another. Does not know: recursion, free text beside lazy rules; what it does not know is Unsupported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from runtime.grammar_tables.expression import (
    ANY_TEXT,
    Either,
    Every,
    Expression,
    SpecialToken,
    Times,
    Tree,
    Unsupported,
    Upto,
    text,
)
from runtime.grammar_tables.json_text import JsonText

_UNFORCED: Final = '%llguidance {"no_forcing": true}\n'
_MOST_PARTS: Final = 1 << 14
_COUNTS: Final[Mapping[str, tuple[int, int | None]]] = {"?": (0, 1), "*": (0, None), "+": (1, None)}
_RULE: Final = re.compile(r"(\w+)(\[lazy\])?: ")
_PART: Final = re.compile(
    r' *(?:(?P<text>"(?:[^"\\\n]|\\.)*")(?!\w)|(?P<regex>/(?:[^/\\]|\\.)+/)(?!\w)|(?P<json>%json )|<\[(?P<token>\d+)\]>'
    r"|@(?P<other>\w+)|(?P<rule>[A-Za-z_]\w*)|(?P<sign>[()|?*+\n])) *",
    re.DOTALL,
)


def tree_of(grammar: str) -> Tree:
    """Of a grammar in llguidance's notation. Raises Unsupported."""
    try:
        first, *others = _parts(grammar)
        return _Rules(first[1], {name: _Rules(one, {}).tree for name, one in others}).tree
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise Unsupported from None  # such as a schema whose keywords have values of other types


def unforced(grammar: str) -> str:
    """The same language; where a text is forced, any tokens that spell it are allowed."""
    if not grammar.startswith("{"):
        return grammar + _UNFORCED
    named = json.loads(grammar)
    return json.dumps(
        {"grammars": [one | {"lark_grammar": unforced(one["lark_grammar"])} for one in named["grammars"]]}
    )


def _parts(grammar: str) -> list[tuple[str, str]]:
    """Name and rules of each grammar."""
    if not grammar.startswith("{"):
        return [("", grammar)]
    return [(one.get("name", ""), one["lark_grammar"]) for one in json.loads(grammar)["grammars"]]


def _begins_lazily(tree: Tree) -> bool:
    match tree:
        case Every(parts):
            return bool(parts) and _begins_lazily(parts[0])
        case Either(parts):
            return any(map(_begins_lazily, parts))
        case Times(part):
            return _begins_lazily(part)
    return isinstance(tree, Upto)


class _Rules:
    def __init__(self, grammar: str, others: Mapping[str, Tree]) -> None:
        self._others = others
        self._rules: dict[str, tuple[bool, list[tuple[str, Any]]]] = {}
        self._trees: dict[str, Tree | None] = {}  # None while it is being made
        at = 0
        while at < len(grammar):
            if (head := _RULE.match(grammar, at)) is None or head[1] in self._rules:
                raise Unsupported
            parts, at = self._read(grammar, head.end())
            self._rules[head[1]] = head[2] is not None, parts
        self.tree = self._rule("start")
        if isinstance(self.tree, Every) and self.tree.parts[-1:] == (ANY_TEXT,) and _begins_lazily(self.tree):
            raise Unsupported  # the mark ends what is lazy, so it is not in the free text

    def _read(self, grammar: str, at: int) -> tuple[list[tuple[str, Any]], int]:
        """The parts of one rule, and where the next begins."""
        parts: list[tuple[str, Any]] = []
        while (found := _PART.match(grammar, at)) is not None and len(parts) < _MOST_PARTS:
            kind, at = found.lastgroup or "", found.end()
            said: Any = found[kind]
            if (kind, said) == ("sign", "\n"):
                return parts, at
            if kind == "json":
                said, at = json.JSONDecoder().raw_decode(grammar, at)
            elif kind == "text":
                said = json.loads(said)
            parts.append((kind, said))
        raise Unsupported

    def _rule(self, name: str) -> Tree:
        if name not in self._trees:
            if name not in self._rules:
                raise Unsupported
            self._trees[name] = None
            lazy, parts = self._rules[name]
            self._trees[name] = self._lazy(parts) if lazy else self._alternatives(parts := parts[::-1])
            if parts and not lazy:
                raise Unsupported
        if (tree := self._trees[name]) is None:
            raise Unsupported  # recursion
        return tree

    def _lazy(self, parts: list[tuple[str, Any]]) -> Tree:
        """Any text up to a mark."""
        if [kind for kind, _ in parts] != ["rule", "text"] or self._rule(parts[0][1]) != ANY_TEXT or not parts[1][1]:
            raise Unsupported
        return Upto(parts[1][1])

    # ---- ``left``: parts of a rule, the next one last ----

    def _alternatives(self, left: list[tuple[str, Any]]) -> Tree:
        found = [self._sequence(left)]
        while left and left[-1] == ("sign", "|"):
            left.pop()
            found.append(self._sequence(left))
        return found[0] if len(found) == 1 else Either(tuple(found))

    def _sequence(self, left: list[tuple[str, Any]]) -> Tree:
        found: list[Tree] = []
        while left and left[-1] not in (("sign", "|"), ("sign", ")")):
            one = self._one(*left.pop(), left)
            while left and left[-1][0] == "sign" and left[-1][1] in _COUNTS:
                one = Times(one, *_COUNTS[left.pop()[1]])
            found.append(one)
        return found[0] if len(found) == 1 else Every(tuple(found))

    def _one(self, kind: str, said: Any, left: list[tuple[str, Any]]) -> Tree:
        match kind:
            case "text":
                return text(said)
            case "regex":
                return Expression(said[1:-1]).tree
            case "json" if isinstance(said, Mapping):
                return JsonText(said).tree
            case "token":
                return SpecialToken(int(said))
            case "rule":
                return self._rule(said)
            case "other" if said in self._others:
                return self._others[said]
            case "sign" if said == "(":
                inner = self._alternatives(left)
                if left and left.pop() == ("sign", ")"):
                    return inner
        raise Unsupported
