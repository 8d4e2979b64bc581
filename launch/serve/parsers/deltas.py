"""What a parser of tool calls makes of a text: deltas of a chat's choice, as OpenAI streams them.

Knows: their form, and how they become a whole message. Does not know: any model's format, chunks (chunks.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Protocol
from uuid import uuid4

Delta = dict[str, Any]  # {"content": ...} or {"tool_calls": [...]}


class ToolParser(Protocol):
    """One answer's text in pieces of any size, deltas out, in order: they do not depend on how the text was cut.

    ``marks``: the texts that separate calls from content. A token that is one of them is text even if it is special.
    ``calls``: those that began.
    """

    marks: ClassVar[tuple[str, ...]]
    calls: int

    def push(self, text: str) -> list[Delta]:
        """What is certain by now."""

    def finish(self) -> list[Delta]:
        """No text follows: a call that is cut off ends where it is."""


def call_begins(index: int, name: str) -> Delta:
    function = {"name": name, "arguments": ""}
    call = {"index": index, "id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
    return {"tool_calls": [call]}


def arguments_piece(index: int, arguments: str) -> Delta:
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


def first_calls(deltas: list[Delta], most: int | None) -> list[Delta]:
    """Without calls beyond the first ``most``; None: all of them."""
    if most is None:
        return deltas
    return [delta for delta in deltas if all(call["index"] < most for call in delta.get("tool_calls", ()))]


def merged(deltas: Iterable[Delta]) -> tuple[str | None, list[Delta]]:
    """A whole message's content and tool calls, put together from its deltas. No content next to calls is None."""
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
