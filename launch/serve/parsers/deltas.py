"""What parsers make of an answer: deltas of a chat's choice, as OpenAI streams them.

Knows: their form, blanks that belong to no text, and how deltas become a whole message. Does not know: any model's
format, chunks (chunks.py).
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Mapping
from typing import Any, Final
from uuid import uuid4

from launch.serve.parsers.reader import named

Delta = dict[str, Any]  # {"content": ...}, {"reasoning": ...} or {"tool_calls": [...]}
Tools = Mapping[str, Mapping[str, Any]]  # name of each that may be called -> JSON schema of its arguments

_LETTERS: Final = string.ascii_letters + string.digits


def long_id() -> str:
    return f"call_{uuid4().hex[:24]}"


def short_id() -> str:
    """Nine letters and digits, the only form that Mistral's templates take."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class Message:
    """Deltas of one answer, as a parser finds them. ``tools``: None where any name may be called. ``calls``: that
    began. ``thinking``: what comes now is reasoning. ``filled``: an answer that is reasoning alone is content, too.
    """

    def __init__(self, tools: Tools | None = None, *, filled: bool = False) -> None:
        self.tools = tools
        self._filled = filled
        self._reasoning: list[str] = []
        self.calls = 0
        self.thinking = False
        self._deltas: list[Delta] = []
        self._blanks = ""  # content, unless a call or reasoning comes before or after it
        self._spoken = False  # there is content since the latest call or the reasoning
        self._bare = True  # nothing but content so far
        self._newlines = ""  # between the reasoning so far and more of it
        self._thought = False

    @property
    def in_call(self) -> bool:
        """Whether a call was the latest thing."""
        return self.calls > 0 and not self._spoken

    def take(self) -> list[Delta]:
        """Those that were not taken yet."""
        taken, self._deltas = self._deltas, []
        return taken

    def finish(self) -> None:
        """No text follows."""
        if self._blanks and self._bare:
            self._deltas.append({"content": self._blanks})
        elif self._filled and self._reasoning and not (self.calls or self._spoken):
            self._deltas.append({"content": "".join(self._reasoning)})
        self._blanks = ""

    def think(self, text: str) -> None:
        """More reasoning, without newlines before and after all of it."""
        self.thinking = True
        text = self._newlines + named(text)
        text = text if self._thought else text.lstrip("\n")
        said = text.rstrip("\n")
        self._newlines = text[len(said) :]
        if said:
            self._thought = True
            self._deltas.append({"reasoning": said})
            if self._filled:
                self._reasoning.append(said)

    def thought(self) -> None:
        """The reasoning is over."""
        self.thinking = self._spoken = self._bare = False
        self._newlines, self._blanks = "\n" if self._thought else "", ""

    def say(self, text: str) -> None:
        """More content."""
        text = named(text)
        if not self._spoken:
            text, self._blanks = self._blanks + text, ""
            if not text.strip():
                self._blanks = text
                return
            self._spoken = True
            text = text if self._bare else text.lstrip()
        if text:
            self._deltas.append({"content": text})

    def knows(self, name: str) -> bool:
        """Whether a tool of that name may be called."""
        return bool(name) and (self.tools is None or name in self.tools)

    def schema(self, name: str) -> Mapping[str, Any]:
        """Of the arguments of a tool."""
        return {} if self.tools is None else self.tools.get(name, {})

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call, whose arguments follow."""
        function = {"name": named(name), "arguments": ""}
        call = {"index": self.calls, "id": call_id or long_id(), "type": "function", "function": function}
        self._deltas.append({"tool_calls": [call]})
        self.calls += 1
        self._blanks, self._spoken, self._bare = "", False, False

    def arguments(self, piece: str) -> None:
        """More of the latest call's."""
        if piece:
            call = {"index": self.calls - 1, "function": {"arguments": named(piece)}}
            self._deltas.append({"tool_calls": [call]})


def first_calls(deltas: list[Delta], most: int | None) -> list[Delta]:
    """Without calls beyond the first ``most``; None: all of them."""
    if most is None:
        return deltas
    return [delta for delta in deltas if all(call["index"] < most for call in delta.get("tool_calls", ()))]


def joined(deltas: Iterable[Delta]) -> Delta:
    """Several as one: text before a call, one entry a call: openai 2.54 takes each of a first chunk for a call."""
    found, calls = Delta(), dict[int, Delta]()
    for delta in deltas:
        for name, text in delta.items():
            if name != "tool_calls":
                found[name] = found.get(name, "") + text
        for call in delta.get("tool_calls", ()):
            if call["index"] in calls:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            else:
                calls[call["index"]] = {**call, "function": dict(call["function"])}
    if calls:
        found["tool_calls"] = [*calls.values()]
    return found or {"content": ""}


def merged(deltas: Iterable[Delta]) -> Delta:
    """A whole message: content, reasoning and tool calls. Empty content next to others is None."""
    found = joined(deltas)
    calls = [{name: value for name, value in call.items() if name != "index"} for call in found.pop("tool_calls", ())]
    texts = {name: text for name, text in found.items() if text}
    message: Delta = {"content": None if calls or texts else "", **texts}
    return {**message, "tool_calls": calls} if calls else message
