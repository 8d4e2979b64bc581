"""Tool calls as Hermes and Qwen models write them, found in a text that grows: <tool_call>{"name": ..., "arguments":
...}</tool_call>.

Knows: that form, and OpenAI's deltas of it. Does not know: tokens, chunks (chunks.py), what a tool does.

The arguments are passed on as they are written, piece by piece; nothing checks them against the tool's schema. What
looks like a call but is none becomes content again.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final
from uuid import uuid4

from runtime.frontend.validation import is_unicode

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_LONGEST_HEAD: Final = 4096  # characters within which the name must stand

Delta = dict[str, Any]


class ToolCallStream:
    """Text in, deltas of a chat's choice out: ``{"content": ...}`` and ``{"tool_calls": [...]}``, in order.

    ``most``: calls that are told, the first ones; None tells all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._buffer = ""
        self._call: _Call | None = None
        self.calls = 0  # that began
        self._behind_call = False  # nothing but blanks came since the latest one

    def push(self, text: str) -> list[Delta]:
        """What can be told by now."""
        self._buffer += text
        found: list[Delta] = []
        while self._advance(found):
            pass
        return self._told(found)

    def finish(self) -> list[Delta]:
        """No text follows: a call that is cut off ends where it is."""
        found: list[Delta] = []
        if self._call is not None:
            found += self._call.feed(self._buffer)
            found += self._end_call(self._call, closed=False)
        elif self._buffer:
            found.append({"content": self._buffer})
        self._buffer = ""
        return self._told(found)

    def _told(self, found: list[Delta]) -> list[Delta]:
        if self._most is None:
            return found
        return [delta for delta in found if all(call["index"] < self._most for call in delta.get("tool_calls", ()))]

    def _advance(self, found: list[Delta]) -> bool:
        """One mark, or what stands before one; whether there may be another."""
        mark = _OPEN if self._call is None else _CLOSE
        at = self._buffer.find(mark)
        before = self._buffer[:at] if at >= 0 else self._buffer[: len(self._buffer) - _held(self._buffer, mark)]
        self._buffer = self._buffer[at + len(mark) if at >= 0 else len(before) :]
        if self._call is not None:
            found += self._call.feed(before)
            if at >= 0:
                found += self._end_call(self._call, closed=True)
        else:
            if before.strip() or (before and at < 0 and not self._behind_call):
                found.append({"content": before})
                self._behind_call = False
            if at >= 0:
                self._call = _Call(self.calls)
        return at >= 0

    def _end_call(self, call: _Call, *, closed: bool) -> list[Delta]:
        self._call = None
        deltas = call.end(_CLOSE if closed else "")
        self.calls += call.named
        self._behind_call = call.named
        return deltas


class _Call:
    """One call, from behind its opening mark."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._raw = ""
        self._told = 0  # characters of it that are out
        self._depth = 0
        self._in_text = self._escaped = False
        self._whole = False  # the arguments are complete
        self.named = False

    def feed(self, text: str) -> list[Delta]:
        self._raw += text
        if not self.named:
            head = _HEAD.match(self._raw) if len(self._raw) <= _LONGEST_HEAD + len(text) else None
            name = None if head is None else _name(head.group(1))
            if head is None or name is None:
                return []
            self.named, self._told = True, head.end()
            return [self._begin(name), *self._arguments()]
        return self._arguments()

    def _arguments(self) -> list[Delta]:
        """Characters up to the brace that closes the first one."""
        at = begin = self._told
        while at < len(self._raw) and not self._whole:
            self._see(self._raw[at])
            at += 1
        self._told = at
        piece = self._raw[begin:at]
        return [_piece(self._index, piece)] if piece else []

    def _see(self, character: str) -> None:
        if self._in_text:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_text = False
        elif character == '"':
            self._in_text = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self._whole = self._depth == 0

    def _begin(self, name: str) -> Delta:
        function = {"name": name, "arguments": ""}
        call = {"index": self._index, "id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
        return {"tool_calls": [call]}

    def end(self, mark: str) -> list[Delta]:
        """A call in another order of fields is told whole; what is none is content."""
        if self.named:
            return []
        try:
            call = json.loads(self._raw)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return [{"content": _OPEN + self._raw + mark}]
        if not isinstance(name, str) or not is_unicode(name):
            return [{"content": _OPEN + self._raw + mark}]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if not is_unicode(text):
            if isinstance(arguments, str):
                return [{"content": _OPEN + self._raw + mark}]
            text = json.dumps(arguments)
        self.named = True
        return [self._begin(name), _piece(self._index, text)]


def _name(written: str) -> str | None:
    """A JSON text as it stands in the head of a call; None for one that no JSON text can be."""
    try:
        name = json.loads(written, strict=False)
    except ValueError:
        return None
    return name if isinstance(name, str) and is_unicode(name) else None


def _piece(index: int, arguments: str) -> Delta:
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


def _held(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that begins ``mark``."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def merged(deltas: list[Delta]) -> tuple[str | None, list[Delta]]:
    """A whole message's content and tool calls, put together from its deltas. No content beside calls is None."""
    content, calls = "", dict[int, Delta]()
    for delta in deltas:
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] in calls:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            else:
                calls[call["index"]] = {**call, "function": dict(call["function"])}
    listed = [{name: value for name, value in call.items() if name != "index"} for call in calls.values()]
    return (content if content or not listed else None), listed
