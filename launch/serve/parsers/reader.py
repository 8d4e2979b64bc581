"""What the parsers of answers read: text in which each mark is one character, kept as long as they may go back.

Knows: marks that are tokens, marks that are spelled in text, where a text may still become one. Does not know: any
format.

A mark, such as <tool_call>, is written as half of a surrogate pair: no decoder makes one, so no text of a model can
spell it. Where the tokenizer has a token for a mark, only that token is one.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Generator
from functools import cache
from typing import Final, TypeVar

_Found = TypeVar("_Found")
Steps = Generator[None, None, _Found]  # a parser: it yields where it needs more text, and returns what it found

_FIRST: Final = 0xD800
_NAMES: Final[dict[int, str]] = {}  # code point of a mark -> its name
BLANKS: Final = " \n\r\t"


def mark(name: str) -> str:
    """The character that stands for the mark ``name``, the same for all formats."""
    point = next((point for point, known in _NAMES.items() if known == name), _FIRST + len(_NAMES))
    _NAMES[point] = name
    return chr(point)


def named(text: str) -> str:
    """``text`` with the names of its marks."""
    return text if text.isascii() else text.translate(_NAMES)


@cache
def _any_of(characters: str) -> re.Pattern[str]:
    return re.compile(f"[{re.escape(characters)}]")


class MarkedText:
    """Replaces marks by their characters; see the module's docstring. ``marks``: those of the formats in use.
    ``tokens``: names of the tokenizer's added tokens.
    """

    def __init__(self, marks: str, tokens: Collection[str]) -> None:
        spelled = [name for name in map(named, marks) if name not in tokens]
        self._spelled = re.compile("|".join(map(re.escape, spelled))) if spelled else None
        self._characters = {named(character): character for character in marks}
        self._starts = {name[:size] for name in spelled for size in range(1, len(name))}
        self._longest = max(map(len, spelled), default=1) - 1
        self._text = ""  # not returned yet: the beginning of a mark
        self._at = 0  # place of its first character in the answer
        self._places: deque[tuple[int, int]] = deque()

    def push(self, text: str, place: tuple[int, int] | None = None) -> str:
        """More text of the answer; returns what is sure by now. ``place``: first and last place, in the whole text, of
        a token that is a mark. Its characters may come later than it does."""
        if place is not None:
            self._places.append(place)
        self._text += text
        found = ""
        while self._places and self._places[0][1] <= self._at + len(self._text):
            begin, end = (at - self._at for at in self._places.popleft())
            found += self._replaced(self._take(begin)) + self._characters[self._take(end - begin)]
        if self._places:
            return found + self._replaced(self._take(self._places[0][0] - self._at))
        return found + self._replaced(self._take(self._sure()))

    def finish(self) -> str:
        """No text follows."""
        return self._replaced(self._take(len(self._text)))

    def _take(self, size: int) -> str:
        taken, self._text = self._text[:size], self._text[size:]
        self._at += len(taken)
        return taken

    def _replaced(self, text: str) -> str:
        return text if self._spelled is None else self._spelled.sub(lambda found: self._characters[found[0]], text)

    def _sure(self) -> int:
        """Characters of the text before what may be the beginning of a mark."""
        text, least = self._text, 0
        if self._spelled is None:
            return len(text)
        for found in self._spelled.finditer(text):
            least = found.end()
        for at in range(max(least, len(text) - self._longest), len(text)):
            if text[at:] in self._starts:
                return at
        return len(text)


class Reader:
    """Text as it comes, for a parser that may go back to where it held on. ``closed``: no more comes."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # of it, what has been read
        self._held: int | None = None
        self.closed = False

    def feed(self, text: str) -> None:
        kept = max(0, (self._at if self._held is None else self._held) - 1)  # a character may be unread
        self._text, self._at = self._text[kept:] + text, self._at - kept
        self._held = None if self._held is None else self._held - kept

    def hold(self) -> None:
        """Where ``back`` goes to."""
        self._held = self._at

    def back(self) -> None:
        assert self._held is not None
        self._at, self._held = self._held, None

    def go_on(self) -> None:
        """What was read is read for good."""
        self._held = None

    @property
    def next(self) -> str:
        """The next character; nothing where none has come."""
        return self._text[self._at : self._at + 1]

    def rest(self) -> tuple[str, int]:
        """The text there is, and where what is not read begins in it; see ``read_to``."""
        return self._text, self._at

    def read_to(self, at: int) -> None:
        self._at = at

    def unread(self) -> None:
        """The last character was not read."""
        self._at -= 1

    def upto(self, stops: str) -> tuple[str, str]:
        """What there is before the first of ``stops``, and that one, which is read, too; nothing where it has not
        come."""
        found = _any_of(stops).search(self._text, self._at) if stops else None
        begin, self._at = self._at, len(self._text) if found is None else found.end()
        return (self._text[begin:], "") if found is None else (self._text[begin : found.start()], found[0])

    def until(self, stops: str, most: int = 1 << 30) -> Steps[tuple[str, str]]:
        """``upto`` as a whole; nothing as the stop at the end of the text, or after more than ``most`` characters."""
        parts, size = list[str](), 0
        while True:
            text, stop = self.upto(stops)
            parts.append(text)
            size += len(text)
            if size > most:
                return "", ""
            if stop or self.closed:
                return "".join(parts), stop
            yield

    def after_blanks(self) -> Steps[str]:
        """Reads blanks; returns the next character, which is not read; nothing at the end of the text."""
        while True:
            while self.next and self.next in BLANKS:
                self._at += 1
            if self.next or self.closed:
                return self.next
            yield

    def skip(self, character: str) -> Steps[bool]:
        """Reads blanks and ``character``; False where another one stands there."""
        if (yield from self.after_blanks()) != character:
            return False
        self._at += 1
        return True
