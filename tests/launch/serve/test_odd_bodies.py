"""Whatever stands in a body, of any route: it is served, or it is a 400 or 404 with an error object."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.launch.generate.fake_engine import FakeModel
from tests.launch.serve.rig import ServedFake, served

ODD: tuple[Any, ...] = (True, -1, 2**63, 1.5, "\0", [], [None], [[1]], {}, {"a": 1})
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "required": ["a"]}, "strict": False}
SCHEMA = {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}, "strict": True}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
COMPLETION: dict[str, Any] = {
    "prompt": "a", "max_tokens": 2, "n": 1, "logprobs": 1, "echo": False, "stop": ["x"], "seed": 1,
    "logit_bias": {"5": 1}, "stream": False, "bad_words": ["q"], "allowed_token_ids": [5, 6],
    "truncate_prompt_tokens": 3, "cache_salt": "s", "stream_options": None, "prompt_logprobs": None,
}  # fmt: skip
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "r"},
        {"role": "tool", "tool_call_id": "1", "content": "z"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto", "parallel_tool_calls": True,
    "max_tokens": 2, "logprobs": True, "top_logprobs": 1, "chat_template_kwargs": {"a": 1}, "documents": [{"t": "x"}],
    "reasoning_effort": "low", "response_format": {"type": "json_schema", "json_schema": SCHEMA},
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "c"}],
        },
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "o"},
    ],
    "instructions": "i", "max_output_tokens": 2, "top_logprobs": 1, "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": "auto", "reasoning": {"effort": "low"}, "text": {"format": {"type": "json_schema", **SCHEMA}},
    "include": ["message.output_text.logprobs"], "metadata": {"a": "b"}, "stream": False,
}  # fmt: skip
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {"prompt": [[5], [6]], "max_tokens": 1, "structured_outputs": {"regex": "a"}}),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", RESPONSE),
    ("/tokenize", {"messages": CHAT["messages"], "tools": CHAT["tools"], "chat_template_kwargs": {}}),
    ("/detokenize", {"tokens": [5, 6]}),
)


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, part in parts:
        yield from places(part, (*path, step))


def replaced(body: dict[str, Any], path: tuple[Any, ...], odd: object) -> dict[str, Any]:
    found: Any = copy.deepcopy(body)
    place = found
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = odd
    return dict(found)


@pytest.mark.slow
@pytest.mark.parametrize(("route", "body"), BODIES)
def test_no_value_of_any_field_is_an_internal_error(route: str, body: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")

    async def inside() -> None:
        fake = ServedFake(model=FakeModel(max_model_len=4000, vocab_size=360))
        async with served(fake, tool_call_parser="hermes", reasoning_parser="qwen3") as client:
            assert (await client.post(route, body)).status == 200
            for path in places(body):
                for odd in ODD:
                    reply = await client.post(route, replaced(body, path, odd))
                    assert reply.status in (200, 400, 404), (path, odd, reply.body)
                    assert reply.status == 200 or reply.error["message"]

    asyncio.run(inside())
