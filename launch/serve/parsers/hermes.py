"""Tool calls as Hermes and Qwen models write them: <tool_call>{"name": ..., "arguments": ...}</tool_call>.

Knows: that form. Does not know: tokens, chunks (chunks.py), what a tool does.

A mark inside a JSON text is text. The arguments are passed on as they are written, piece by piece; nothing checks them
against the tool's schema. What looks like a call but is none becomes content again.
"""

from __future__ import annotations

import json
import re
from typing import ClassVar, Final

from launch.serve.parsers.deltas import Delta, arguments_piece, call_begins
from runtime.frontend.validation import is_unicode

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_LONGEST_HEAD: Final = 4096  # characters within which the name must stand


class HermesParser:
    """See ToolParser."""

    marks: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE)

    def __init__(self) -> None:
        self._buffer = ""
        self._call: _Call | None = None
        self.calls = 0
        self._blanks = ""  # content, unless a call comes before or after it
        self._spoken = False  # there is content since the latest call

    def push(self, text: str) -> list[Delta]:
        self._buffer += text
        found: list[Delta] = []
        while self._advance(found):
            pass
        return found

    def finish(self) -> list[Delta]:
        found: list[Delta] = []
        while self._call is not None:
            self._buffer = self._call.cut_off()
            self._end_call(self._call, found, _CLOSE if self._buffer else "")
            self._buffer = self._buffer.removeprefix(_CLOSE)
            while self._advance(found):
                pass
        self._say(self._buffer, found)
        if self._blanks and not self.calls:
            found.append({"content": self._blanks})
        self._buffer = self._blanks = ""
        return found

    def _advance(self, found: list[Delta]) -> bool:
        """One mark, or what stands before one; whether there may be another."""
        if self._call is not None:
            deltas, rest = self._call.feed(self._buffer)
            found += deltas
            self._buffer = rest or ""
            if rest is not None:
                self._end_call(self._call, found, _CLOSE)
            return rest is not None
        at = self._buffer.find(_OPEN)
        before = self._buffer[:at] if at >= 0 else self._buffer[: len(self._buffer) - _held(self._buffer)]
        self._buffer = self._buffer[at + len(_OPEN) if at >= 0 else len(before) :]
        self._say(before, found)
        if at >= 0:
            self._call = _Call(self.calls)
        return at >= 0

    def _say(self, content: str, found: list[Delta]) -> None:
        if not self._spoken:
            content, self._blanks = self._blanks + content, ""
            if not content.strip():
                self._blanks = content
                return
            self._spoken = True
            content = content.lstrip() if self.calls else content
        if content:
            found.append({"content": content})

    def _end_call(self, call: _Call, found: list[Delta], mark: str) -> None:
        self._call = None
        deltas = call.end()
        if call.named:
            found += deltas
            self.calls += 1
            self._blanks, self._spoken = "", False
        else:
            self._say(_OPEN + call.raw + mark, found)


class _Call:
    """One call. ``raw``: what stands between its marks."""

    def __init__(self, index: int) -> None:
        self._index = index
        self.raw = ""
        self._at = 0  # characters of it that were looked at
        self._sent = 0  # of them, those that are in deltas
        self._end: int | None = None  # where the arguments end
        self._depth = 0
        self._in_text = self._escaped = False
        self.named = False

    def feed(self, text: str) -> tuple[list[Delta], str | None]:
        """Deltas, and what stands after the closing mark; None where that has not come."""
        self.raw += text
        deltas: list[Delta] = []
        if not self.named and len(self.raw) <= _LONGEST_HEAD + len(text):
            head = _HEAD.match(self.raw)
            name = None if head is None else _name(head.group(1))
            if head is not None and name is not None:
                self.named, self._sent = True, head.end()
                deltas.append(call_begins(self._index, name))
        rest = self._look()
        return [*deltas, *self._arguments()], rest

    def _look(self) -> str | None:
        """Reads up to the closing mark; see ``feed``."""
        while self._at < len(self.raw):
            character = self.raw[self._at]
            if character == "<" and not self._in_text:
                here = self.raw[self._at : self._at + len(_CLOSE)]
                if here == _CLOSE:
                    rest = self.raw[self._at + len(_CLOSE) :]
                    self.raw = self.raw[: self._at]
                    return rest
                if _CLOSE.startswith(here):
                    return None
            self._see(character)
            self._at += 1
        return None

    def _see(self, character: str) -> None:
        if self._in_text:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_text = False
        elif character == '"':
            self._in_text = self._depth > 0  # else it is no JSON
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self.named and self._end is None and self._depth == 1:
                self._end = self._at + 1

    def _arguments(self) -> list[Delta]:
        """Characters up to the brace that closes the first one."""
        end = self._at if self._end is None else self._end
        if not self.named or end <= self._sent:
            return []
        piece, self._sent = self.raw[self._sent : end], end
        return [arguments_piece(self._index, piece)]

    def cut_off(self) -> str:
        """No text follows. What is no call ends at its first closing mark all the same, quotes or not: returns what
        stands from there."""
        at = -1 if self.named else self.raw.find(_CLOSE)
        if at < 0:
            return ""
        self.raw, rest = self.raw[:at], self.raw[at:]
        return rest

    def end(self) -> list[Delta]:
        """What is left to report: all of a call in another order of fields, nothing of what is none."""
        self._at = len(self.raw)
        if self.named:
            return self._arguments()
        try:
            call = json.loads(self.raw)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []
        if not isinstance(name, str) or not is_unicode(name):
            return []
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if not is_unicode(text):
            if isinstance(arguments, str):
                return []
            text = json.dumps(arguments)
        self.named = True
        return [call_begins(self._index, name), arguments_piece(self._index, text)]


def _name(written: str) -> str | None:
    """A JSON text as it stands in the head of a call; None for one that no JSON text can be."""
    try:
        name = json.loads(written, strict=False)
    except ValueError:
        return None
    return name if isinstance(name, str) and is_unicode(name) else None


def _held(text: str) -> int:
    """Length of the longest end of ``text`` that begins the opening mark."""
    return next((n for n in range(min(len(_OPEN) - 1, len(text)), 0, -1) if text.endswith(_OPEN[:n])), 0)
