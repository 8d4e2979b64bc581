"""Regular expressions as trees, from which an automaton is made.

Knows: literals, classes, groups, alternatives and counts, as llguidance reads them. Does not know: bytes, tokens. What
it does not know is Unsupported, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

LAST: Final = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]  # of code points, ends included, ascending


class Unsupported(Exception):
    """Not a language that has a table, or too large a one."""


class Chars(NamedTuple):
    ranges: Ranges


class SpecialToken(NamedTuple):
    """That one, which no text spells."""

    token_id: int


class Upto(NamedTuple):
    """Any text that ends with ``mark``, which stands nowhere before."""

    mark: str


class Every(NamedTuple):
    """One after the other."""

    parts: tuple[Tree, ...]


class Either(NamedTuple):
    parts: tuple[Tree, ...]


class Times(NamedTuple):
    part: Tree
    least: int
    most: int | None  # None: any number


Tree = Chars | SpecialToken | Upto | Every | Either | Times


def text(said: str) -> Tree:
    return Every(tuple(Chars(((ord(c), ord(c)),)) for c in said))


def every(*parts: Tree) -> Tree:
    return Every(parts)


def optional(part: Tree) -> Tree:
    return Times(part, 0, 1)


class Expression:
    """Of one regular expression: literals, classes, groups, alternatives, counts."""

    _ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}

    def __init__(self, said: str, digits: bool = False) -> None:
        self._said, self._at, self._digits = said, 0, digits
        self.tree = self._alternatives()
        if self._at != len(said):
            raise Unsupported

    def _peek(self) -> str:
        return self._said[self._at : self._at + 1]

    def _take(self, wanted: str = "") -> str:
        taken = self._peek()
        if not taken or (wanted and taken != wanted):
            raise Unsupported
        self._at += 1
        return taken

    def _alternatives(self) -> Tree:
        parts = [self._sequence()]
        while self._peek() == "|":
            self._take()
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _sequence(self) -> Tree:
        parts: list[Tree] = []
        while self._peek() not in ("", "|", ")"):
            part = self._atom()
            while self._peek() in ("*", "+", "?", "{") and self._peek():
                part = Times(part, *self._count())
                if self._peek() in ("?", "+"):
                    raise Unsupported
            parts.append(part)
        return Every(tuple(parts))

    def _count(self) -> tuple[int, int | None]:
        match self._take():
            case "*":
                return 0, None
            case "+":
                return 1, None
            case "?":
                return 0, 1
        found = re.compile(r"(\d{1,6})(,?)(\d{0,6})\}").match(self._said, self._at)
        if found is None:
            raise Unsupported
        self._at = found.end()
        least = int(found[1])
        return least, (int(found[3]) if found[3] else None) if found[2] else least

    def _atom(self) -> Tree:
        match one := self._take():
            case "(":
                if self._peek() == "?":
                    self._take()
                    self._take(":")
                inner = self._alternatives()
                self._take(")")
                return inner
            case "[":
                return self._class()
            case ".":
                return Chars(without(((10, 10),)))
            case "\\":
                return Chars(self._escaped())
            case "^" | "$" | "*" | "+" | "?" | "{" | "}" | "]" | "/":
                raise Unsupported
        return text(one)

    def _escaped(self) -> Ranges:
        one = self._take()
        if one == "d" and self._digits:
            return ((48, 57),)
        if one == "x":
            found = re.compile("[0-9a-fA-F]{2}").match(self._said, self._at)
            if found is None or int(found[0], 16) > 127:
                raise Unsupported
            self._at = found.end()
            return ((int(found[0], 16),) * 2,)
        if one.isalnum() and one not in self._ESCAPED:
            raise Unsupported
        return ((ord(self._ESCAPED.get(one, one)),) * 2,)

    def _class(self) -> Tree:
        negated = self._peek() == "^"
        if negated:
            self._take()
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]" or not ranges:
            low = self._member()
            if self._peek() == "-" and self._said[self._at + 1 : self._at + 2] not in ("]", ""):
                self._take()
                high = self._member()
                if len(low) + len(high) > 2 or low[0][0] > high[0][1]:
                    raise Unsupported
                low = ((low[0][0], high[0][1]),)
            ranges += low
        self._take()
        return _chars(without(_merged(ranges)) if negated else _merged(ranges))

    def _member(self) -> Ranges:
        one = self._take()
        if one == "\\":
            return self._escaped()
        if one in "[&~]/":  # of these some are operators
            raise Unsupported
        return ((ord(one), ord(one)),)


def _chars(ranges: Ranges) -> Chars:
    if not ranges:
        raise Unsupported  # no text at all
    return Chars(ranges)


def _merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)


def without(ranges: Ranges, among: Ranges = ((0, LAST),)) -> Ranges:
    """``among`` less ``ranges``."""
    found = []
    for low, high in among:
        for less_low, less_high in ranges:
            if less_low > high or less_high < low:
                continue
            if low < less_low:
                found.append((low, less_low - 1))
            low = less_high + 1
        if low <= high:
            found.append((low, high))
    return tuple(found)


ANY_TEXT: Final = Expression(r"(.|\n)*").tree
