"""JSON as models write it: what of a text that comes in pieces is sure to belong to a valid document.

Knows: JSON's grammar, slips that have one meaning only. Does not know: what a document means.

A text is passed on as it grows, a number or a word once it is complete, and a name with its value. So what was passed
on becomes a valid document by closing what is open.
"""

from __future__ import annotations

import json
import re
from typing import Final

_BLANKS: Final = " \t\n\r"
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_WORD: Final = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR: Final = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_ESCAPE: Final = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_CLOSED_BY: Final = {"{": "}", "[": "]"}


class JsonText:
    """One JSON value. ``done``: it is complete; ``broken``: what stands next belongs to no document. ``within``: braces
    and brackets around the value that counts; 1 for a value of an object that has been read up to it."""

    def __init__(self) -> None:
        self.done = self.broken = False
        self.within = 0
        self._open: list[str] = []  # braces and brackets
        self._state = "value"  # what must stand next; after a bracket "item" or "name", which may be its end, too
        self._in_text: str | None = None  # the state after the text that is being read
        self._escape = ""  # the beginning of one
        self._word = ""  # the beginning of a number, true, false or null
        self._waiting = ""  # blanks, a comma, a name: passed on with a value

    def feed(self, text: str, at: int = 0) -> tuple[str, int]:
        """Reads ``text`` from ``at``. Returns what is sure, and where the document ended or was broken, if it did."""
        found: list[str] = []
        while at < len(text) and not self.done and not self.broken:
            at = self._text(text, at, found) if self._in_text is not None else self._token(text, at, found)
        return "".join(found), at

    def closing(self) -> str:
        """What makes a document of what was passed on so far."""
        inside = self._in_text is not None and self._in_text != "colon"
        return '"' * inside + "".join(_CLOSED_BY[bracket] for bracket in reversed(self._open[self.within :]))

    def value(self) -> None:
        """What comes next is a value in the object, by itself."""
        self.within, self.done, self._waiting = 1, False, ""

    def rest(self) -> None:
        """The rest of the object around it comes."""
        self.within, self.done = 0, False

    def _pass(self, found: list[str], text: str) -> None:
        found.append(self._waiting + text)
        self._waiting = ""

    def _say(self, found: list[str], text: str) -> None:
        """A part of a text, or of a name."""
        if self._in_text == "colon":
            self._waiting += text
        else:
            found.append(text)

    def _text(self, text: str, at: int, found: list[str]) -> int:
        if self._escape:
            return self._escaped(text, at, found)
        run = _PLAIN.match(text, at)
        assert run is not None
        self._say(found, run[0])
        at = run.end()
        if at == len(text):
            return at
        if text[at] == '"':
            self._say(found, '"')
            assert self._in_text is not None
            self._state, self._in_text = self._in_text, None
            if self._state == "after":
                self._after()
        elif text[at] == "\\":
            self._escape = "\\"
        else:  # a newline, or another character that JSON has as an escape only
            self._say(found, json.dumps(text[at])[1:-1])
        return at + 1

    def _escaped(self, text: str, at: int, found: list[str]) -> int:
        self._escape += text[at]
        whole = _ESCAPE.fullmatch(self._escape) is not None
        if whole or not re.fullmatch(r"\\u[0-9a-fA-F]{0,4}", self._escape):
            valid = self._escape if whole else "\\\\" + self._escape[1:-1]
            self._escape = ""
            self._say(found, valid)
            return at + whole
        return at + 1

    def _token(self, text: str, at: int, found: list[str]) -> int:
        character, state = text[at], self._state
        if state == "scalar":
            return self._scalar(text, at, found)
        if character in _BLANKS:
            self._waiting += character
        elif character == '"' and state in ("value", "item"):
            self._pass(found, '"')
            self._in_text = "after"
        elif character == '"' and state in ("name", "more names"):
            self._waiting += '"'
            self._in_text = "colon"
        elif character == ":" and state == "colon":
            self._waiting += ":"
            self._state = "value"
        elif character in "{[" and state in ("value", "item"):
            self._pass(found, character)
            self._open.append(character)
            self._state = "name" if character == "{" else "item"
        elif character == "," and state == "after":
            self._waiting += ","
            self._state = "more names" if self._open[-1] == "{" else "value"
        elif character in "}]" and self._ends(character):
            self._waiting = self._waiting.replace(",", "", 1)
            self._pass(found, character)
            self._open.pop()
            self._after()
        elif state in ("value", "item") and _WORD.match(character):
            self._state = "scalar"
            return at
        else:
            self.broken = True
            return at
        return at + 1

    def _ends(self, bracket: str) -> bool:
        """Whether a bracket may stand here; after a comma it is a slip."""
        if not self._open or _CLOSED_BY[self._open[-1]] != bracket:
            return False
        after_comma = self._state in ("more names", "value") and self._waiting.strip() == ","
        return after_comma or self._state in ("after", "name" if bracket == "}" else "item")

    def _scalar(self, text: str, at: int, found: list[str]) -> int:
        run = _WORD.match(text, at)
        if run is not None:
            self._word += run[0]
            at = run.end()
        if at < len(text):
            self.broken = not _SCALAR.fullmatch(self._word)
            if not self.broken:
                self._pass(found, self._word)
                self._after()
            self._word = ""
        return at

    def _after(self) -> None:
        """A value is complete."""
        self._state = "after"
        self.done = len(self._open) == self.within
