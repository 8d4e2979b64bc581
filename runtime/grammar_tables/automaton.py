"""Regular grammars as deterministic automata over bytes.

Knows: which grammars are one regular expression, a choice or a JSON schema, limits by count. Does not know: tokens
(token_table.py). What is not known here has no automaton: a matcher serves it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.grammar_tables.expression import (
    LAST,
    Chars,
    Either,
    Every,
    Expression,
    Times,
    Tree,
    Unsupported,
    text,
)
from runtime.grammar_tables.json_text import JsonText

MOST_NODES: Final = 1 << 17  # of the automaton that is made deterministic
MOST_STATES: Final = 1 << 13
MOST_WORK: Final = 1 << 22  # edges that are followed


class Automaton(NamedTuple):
    """Deterministic. ``next_SC`` int32: the state after a byte of class c; state 0 is the sink, 1 the start, and every
    other one may come to a text's end. ``class_of_256`` uint8. ``accepting_S`` bool."""

    next_SC: npt.NDArray[np.int32]
    class_of_256: npt.NDArray[np.uint8]
    accepting_S: npt.NDArray[np.bool_]


def automaton_of(grammar: str) -> Automaton | None:
    """Of a grammar in llguidance's notation; None if it is none of those that are known, or too large."""
    try:
        return _automaton(_tree(grammar))
    except (Unsupported, RecursionError):
        return None


def known(grammar: str) -> bool:
    """Whether it is one of those, of any size."""
    try:
        _tree(grammar)
    except (Unsupported, RecursionError):
        return False
    return True


def _tree(grammar: str) -> Tree:
    found = re.fullmatch(r"start: (.*)\n", grammar, re.DOTALL)
    said = found[1] if found else ""
    if said.startswith("%json {"):
        try:
            schema = json.loads(said.removeprefix("%json "))
        except ValueError:
            raise Unsupported from None
        return JsonText(schema).tree
    if len(said) > 1 and said.startswith("/") and said.endswith("/"):
        return Expression(said[1:-1]).tree
    if re.fullmatch(r'"([^"\\]|\\.)*"( \| "([^"\\]|\\.)*")*', said):
        return Either(tuple(text(json.loads(one)) for one in re.findall(r'"(?:[^"\\]|\\.)*"', said)))
    raise Unsupported


class _Nodes:
    """An automaton with empty edges, made of a tree."""

    def __init__(self) -> None:
        self.edges: list[list[tuple[int, int, int]]] = []  # of each node: lowest byte, highest, node
        self.empty: list[list[int]] = []
        self._reached: dict[int, tuple[int, ...]] = {}

    def node(self) -> int:
        if len(self.edges) >= MOST_NODES:
            raise Unsupported
        self.edges.append([])
        self.empty.append([])
        return len(self.edges) - 1

    def add(self, tree: Tree, start: int) -> int:
        """Returns the node that texts of ``tree`` lead to from ``start``."""
        match tree:
            case Chars(ranges):
                end = self.node()
                for sequence in (one for low, high in ranges for one in _in_bytes(low, high)):
                    at = start
                    for low, high in sequence[:-1]:
                        at, before = self.node(), at
                        self.edges[before].append((low, high, at))
                    self.edges[at].append((*sequence[-1], end))
                return end
            case Every(parts):
                for part in parts:
                    start = self.add(part, start)
                return start
            case Either(parts):
                ends = [self.add(part, self._after(start)) for part in parts]
                end = self.node()
                for one in ends:
                    self.empty[one].append(end)
                return end
            case Times(part, least, most):
                for _ in range(least):
                    start = self.add(part, start)
                if most is None:
                    again = self._after(start)
                    self.empty[self.add(part, again)].append(again)
                    return self._after(again)
                end = self.node()
                self.empty[start].append(end)
                for _ in range(most - least):
                    start = self.add(part, start)
                    self.empty[start].append(end)
                return end

    def _after(self, node: int) -> int:
        after = self.node()
        self.empty[node].append(after)
        return after

    def reached(self, node: int) -> tuple[int, ...]:
        """Nodes with edges, or without any, that empty edges lead to."""
        if (found := self._reached.get(node)) is None:
            seen, to_see = {node}, [node]
            while to_see:
                new = [after for after in self.empty[to_see.pop()] if after not in seen]
                seen.update(new)
                to_see += new
            found = self._reached[node] = tuple(one for one in seen if self.edges[one] or not self.empty[one])
        return found


def _in_bytes(low: int, high: int) -> Iterator[list[tuple[int, int]]]:
    """Of a range of code points: sequences of byte ranges, in UTF-8."""
    for first, last in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, LAST)):
        if low <= last and high >= first:
            yield from _of_one_length(max(low, first), min(high, last))


def _of_one_length(low: int, high: int) -> Iterator[list[tuple[int, int]]]:
    for mask in (0x3F, 0xFFF, 0x3FFFF)[: len(chr(low).encode()) - 1]:
        if low & ~mask != high & ~mask:
            if low & mask:
                yield from _of_one_length(low, low | mask)
                yield from _of_one_length((low | mask) + 1, high)
                return
            if high & mask != mask:
                yield from _of_one_length(low, (high & ~mask) - 1)
                yield from _of_one_length(high & ~mask, high)
                return
    yield list(zip(chr(low).encode(), chr(high).encode(), strict=True))


def _automaton(tree: Tree) -> Automaton:
    nodes = _Nodes()
    start = nodes.node()
    last = nodes.add(tree, start)
    cuts = sorted({0, 256, *(cut for edges in nodes.edges for low, high, _ in edges for cut in (low, high + 1))})
    class_of_256 = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts)).astype(np.uint8)
    class_of = class_of_256.tolist()
    states: dict[frozenset[int], int] = {frozenset(): 0, frozenset(nodes.reached(start)): 1}
    table, work = [[0] * (len(cuts) - 1)], 0
    for state in (queue := list(states)[1:]):
        targets: dict[int, set[int]] = {}
        for node in state:
            for low, high, after in nodes.edges[node]:
                into = nodes.reached(after)
                for byte_class in range(class_of[low], class_of[high] + 1):
                    targets.setdefault(byte_class, set()).update(into)
                    work += len(into)
        row = [0] * (len(cuts) - 1)
        for byte_class, into_set in targets.items():
            key = frozenset(into_set)
            if (found := states.get(key)) is None:
                found = states[key] = len(states)
                queue.append(key)
            row[byte_class] = found
        table.append(row)
        if len(states) > MOST_STATES or work > MOST_WORK:
            raise Unsupported
    return Automaton(np.array(table, np.int32), class_of_256, np.array([last in state for state in states]))
