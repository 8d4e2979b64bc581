"""Which formats of calls and reasoning a model writes: a sample is rendered with its chat template, and read back.

Knows: what a sample must hold. Does not know: any format (table.py), where templates are kept.

What a template renders decides, and where it renders nothing, the tokenizer's marks: no name of a model, and no word
in the template's source.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Final

from launch.serve.parsers.answer_parser import AnswerParser
from launch.serve.parsers.deltas import merged
from launch.serve.parsers.reader import named
from launch.serve.parsers.table import CALLS, HARMONY, REASONING
from runtime.frontend.chat_template import ChatTemplate, ChatTemplateError

_USER: Final[Mapping[str, Any]] = {"role": "user", "content": "hello"}
_THOUGHT: Final = "some reasoning of a sample"
_ARGUMENTS: Final = {"text": "words 12", "number": 5}
_PROPERTIES: Final = {"text": {"type": "string"}, "number": {"type": "integer"}}
_SCHEMAS: Final[Mapping[str, Any]] = {
    "sample_call": {"type": "object", "properties": _PROPERTIES, "required": ["text"]},
    "empty_call": {"type": "object", "properties": {}},
}
_TOOLS: Final = [
    {"type": "function", "function": {"name": name, "description": "A sample.", "parameters": schema}}
    for name, schema in _SCHEMAS.items()
]


def calls_of(chat: ChatTemplate, variables: Mapping[str, Any], tokens: Collection[str]) -> str | None:
    """The name of the format of tool calls in which a sample is rendered; None where it is in no known one. Of a
    template that leaves calls out: the format with the most marks, all of which are ``tokens``."""
    samples = [("sample_call", _ARGUMENTS), ("empty_call", {})]
    for name in CALLS:
        if all(_reads(name, chat, variables, *sample) for sample in samples):
            return name
    if str(_ARGUMENTS["text"]) in _rendered(chat, {**variables, "tools": _TOOLS}, _call(*samples[0])):
        return None
    there = [name for name, kind in CALLS.items() if set(map(named, kind.marks)) <= set(tokens)]
    return max(there, key=lambda name: len(CALLS[name].marks), default=None)


def reasoning_of(
    chat: ChatTemplate, variables: Mapping[str, Any], tokens: Collection[str], calls: str | None
) -> str | None:
    """The name of the format of reasoning: a sample is rendered in it, the prompt ends with its beginning, or the
    tokenizer has both of its marks. None for none of these. ``calls``: the format of calls."""
    if calls == "openai":
        return HARMONY
    names = dict.fromkeys(("reasoning", "reasoning_content", "thinking"), _THOUGHT)
    written = _rendered(chat, variables, {"role": "assistant", "content": "an answer", **names})
    prompt = _rendered(chat, variables, None)
    for name, marks in REASONING.items():
        first, last = map(named, marks or ("", ""))
        before, found, behind = written.partition(_THOUGHT)
        around = bool(found) and before.rstrip().endswith(first) and behind.lstrip().startswith(last)
        if marks and (around or prompt.rstrip().endswith(first) or {first, last} <= set(tokens)):
            return name
    return None


def _reads(name: str, chat: ChatTemplate, variables: Mapping[str, Any], function: str, arguments: object) -> bool:
    """Whether the format ``name`` finds the one call of a sample."""
    with_tools = {**variables, "tools": _TOOLS}
    prompt, written = _rendered(chat, with_tools, None), _rendered(chat, with_tools, _call(function, arguments))
    parser = AnswerParser(name, None, _SCHEMAS)
    found = merged([*parser.push(written[_same(prompt, written) :]), *parser.finish()]).get("tool_calls", [])
    with suppress(ValueError):
        return [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in found] == [
            (function, arguments)
        ]
    return False


def _call(function: str, arguments: object) -> Mapping[str, Any]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": function, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _same(prompt: str, written: str) -> int:
    """Characters with which both begin, without half of a mark: one may go on with <think>, the other with a call."""
    pairs = enumerate(zip(prompt, written, strict=False))
    same = prompt[: next((at for at, (one, other) in pairs if one != other), len(prompt))]
    return min(
        len(same) if same.rfind(last) >= same.rfind(first) else same.rfind(first) for first, last in ("<>", "[]")
    )


def _rendered(chat: ChatTemplate, variables: Mapping[str, Any], said: Mapping[str, Any] | None) -> str:
    """A conversation in which the assistant has ``said``; None: the prompt of its answer."""
    messages = [_USER] if said is None else [_USER, said]
    try:
        return chat.render(messages, variables, add_generation_prompt=said is None)
    except ChatTemplateError:
        return ""
