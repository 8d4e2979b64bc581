"""Regular grammars as deterministic automata over bytes.

Knows: limits by count. Does not know: notations (lark.py), tokens (token_table.py) but special ones, which are like a
byte more. What has no automaton is served by a matcher.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.grammar_tables.expression import (
    LAST,
    Chars,
    Either,
    Every,
    Ranges,
    SpecialToken,
    Times,
    Tree,
    Unsupported,
    Upto,
    without,
)
from runtime.grammar_tables.lark import tree_of

MOST_NODES: Final = 1 << 17  # of the automaton that is made deterministic
MOST_STATES: Final = 1 << 14
MOST_WORK: Final = 1 << 22  # edges that are followed


class Automaton(NamedTuple):
    """Deterministic. ``next_SC`` int32: the state after a byte of class c; state 0 is the sink, 1 the start, and every
    other one may come to a text's end. ``class_of_256`` uint8. ``accepting_S`` bool. ``special``: special tokens, each
    one of the last classes."""

    next_SC: npt.NDArray[np.int32]
    class_of_256: npt.NDArray[np.uint8]
    accepting_S: npt.NDArray[np.bool_]
    special: tuple[int, ...] = ()


def automaton_of(grammar: str) -> Automaton | None:
    """Of a grammar in llguidance's notation; None if it is none of those that are known, or too large."""
    try:
        return _automaton(tree_of(grammar))
    except (Unsupported, RecursionError):
        return None


def known(grammar: str) -> bool:
    """Whether it is one of those, of any size."""
    try:
        tree_of(grammar)
    except (Unsupported, RecursionError):
        return False
    return True


class _Nodes:
    """An automaton with empty edges, made of a tree."""

    def __init__(self) -> None:
        self.edges: list[list[tuple[int, int, int]]] = []  # of each node: lowest byte, highest, node
        self.special: dict[int, int] = {}  # by id: beyond the bytes
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
                self._read(ranges, start, end := self.node())
                return end
            case SpecialToken(token_id):
                symbol = self.special.setdefault(token_id, 256 + len(self.special))
                self.edges[start].append((symbol, symbol, end := self.node()))
                return end
            case Upto(mark):
                return self._upto(mark, start)
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

    def _read(self, ranges: Ranges, start: int, end: int) -> None:
        for sequence in (one for low, high in ranges for one in _in_bytes(low, high)):
            at = start
            for low, high in sequence[:-1]:
                at, before = self.node(), at
                self.edges[before].append((low, high, at))
            self.edges[at].append((*sequence[-1], end))

    def _upto(self, mark: str, start: int) -> int:
        """A node for each beginning of ``mark`` that a text may end with (Knuth, Morris and Pratt 1977)."""
        read = [self._after(start), *(self.node() for _ in mark)]
        letters = sorted(set(mark))
        others = without(tuple((ord(one), ord(one)) for one in letters))
        for count, node in enumerate(read[:-1]):
            for letter in letters:
                said = mark[:count] + letter
                longest = next(size for size in range(count + 1, -1, -1) if said.endswith(mark[:size]))
                self._read(((ord(letter), ord(letter)),), node, read[longest])
            self._read(others, node, read[0])
        return read[-1]

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
    class_of = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts)).tolist()
    class_of_256 = np.array(class_of[:256], np.uint8)
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
    accepting_S = np.array([last in state for state in states])
    return Automaton(np.array(table, np.int32), class_of_256, accepting_S, tuple(nodes.special))
