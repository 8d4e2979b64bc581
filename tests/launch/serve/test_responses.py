"""/v1/responses: a map over a chat, with the openai package as its client, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import openai
import pytest
import tokenizers

from launch.serve.bodies import decode
from launch.serve.errors import ApiError
from launch.serve.responses import ResponseEvents, ResponsesBody, as_chat, framed
from runtime.frontend.tokenizer import Tokenizer
from runtime.schedule.request import SamplingParams
from tests.launch.generate import fake_engine
from tests.launch.generate.fake_engine import FakeModel
from tests.launch.serve.rig import Client, ServedFake, listening
from tests.launch.serve.test_app import run
from tests.runtime.frontend import small_tokenizers

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": None}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TURN = {"input": "x", "model": "m", "max_output_tokens": 150, "extra_body": {"seed": 1}}


def chat_of(body: bytes) -> Any:
    return as_chat(decode(body, ResponsesBody))


def scripted(monkeypatch: pytest.MonkeyPatch, text: str) -> Tokenizer:
    """The engine answers ``text``, whatever it is asked."""
    backend = tokenizers.Tokenizer.from_str(small_tokenizers.byte_level_backend().to_str())
    backend.add_tokens([tokenizers.AddedToken(mark, special=False) for mark in MARKS])
    tokenizer = Tokenizer(backend)
    ids = [*tokenizer.encode(text, add_special_tokens=False), 0]
    monkeypatch.setattr(fake_engine, "scripted_token", lambda request, position, vocab_size: ids[position])
    return tokenizer


def asked_with_openai(tokenizer: Tokenizer, fields: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The whole response, and the events of the same request as a stream."""
    found: list[Any] = []

    async def body(client: Client) -> None:
        async with listening(client) as port:
            options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True}
            api = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", **options)
            found.append(await api.responses.create(**fields))
            found.append([event async for event in await api.responses.create(**fields, stream=True)])
            await api.close()

    fake = ServedFake(model=FakeModel(vocab_size=364, max_model_len=400))
    run(body, fake, tokenizer=tokenizer, tool_call_parser="hermes", reasoning_parser="qwen3")
    return found[0], found[1]


def same_output(response: Any) -> list[Any]:
    """Without what differs from answer to answer: ids."""
    rows = [item.model_dump(exclude={"id"}) for item in response.output]
    return [{**row, "call_id": ""} if "call_id" in row else row for row in rows]


def test_reasoning_text_and_calls_are_items_whole_and_as_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = scripted(monkeypatch, f"<think>\nhm\n</think>\n\nSo.{CALL}{CALL}")
    whole, events = asked_with_openai(tokenizer, {**TURN, "tools": [TOOL], "instructions": "Be brief."})
    assert (whole.status, whole.object, whole.model, whole.instructions) == ("completed", "response", "m", "Be brief.")
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    thought, said, *calls = whole.output
    assert (thought.content[0].text, said.content[0].text, whole.output_text) == ("hm", "So.", "So.")
    assert [(call.name, call.arguments, call.status) for call in calls] == [("f", '{"a": 1}', "completed")] * 2
    assert calls[0].call_id != calls[1].call_id
    usage = whole.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens

    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.completed"
    assert same_output(last.response) == same_output(whole)
    for kind, text in (
        ("response.output_text", "So."),
        ("response.reasoning_text", "hm"),
        ("response.function_call_arguments", '{"a": 1}' * 2),
    ):
        assert "".join(event.delta for event in events if event.type == f"{kind}.delta") == text
    opened = [event.output_index for event in events if event.type == "response.output_item.added"]
    closed = [event.output_index for event in events if event.type == "response.output_item.done"]
    assert opened == closed == [0, 1, 2, 3]


def test_an_answer_that_is_cut_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = scripted(monkeypatch, "a longer text")
    whole, events = asked_with_openai(tokenizer, {**TURN, "max_output_tokens": 4})
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (item,) = whole.output
    assert (item.status, item.content[0].text) == ("incomplete", "a lo")
    assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "incomplete")


def test_log_probabilities_stand_beside_the_text_and_not_beside_the_reasoning() -> None:
    def chunk(delta: dict[str, str], token: str, reason: str | None = None) -> bytes:
        score = {"token": token, "logprob": -1.0, "bytes": [97], "top_logprobs": []}
        choice = {"index": 0, "delta": delta, "logprobs": {"content": [score]}, "finish_reason": reason}
        return msgspec.json.encode({"id": "resp-1", "created": 1, "model": "m", "choices": [choice]})

    async def chunks() -> AsyncIterator[bytes]:
        yield chunk({"reasoning_content": "r"}, "r")
        yield chunk({"content": "a"}, "a")
        yield chunk({"content": "b"}, "b", "stop")

    async def events() -> list[dict[str, Any]]:
        body = decode(b'{"input": "x", "top_logprobs": 0}', ResponsesBody)
        assert as_chat(body).logprobs is True
        made = ResponseEvents(body, "reasoning_content", SamplingParams())
        sent = [framed(event) async for event in made.events(chunks())]
        return [json.loads(event.partition(b"data: ")[2]) for event in sent]

    found = asyncio.run(events())
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in event["logprobs"]] for event in deltas] == [["a"], ["b"]]
    reasoning, message = found[-1]["response"]["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "r"}]
    assert [entry["token"] for entry in message["content"][0]["logprobs"]] == ["a", "b"]


def test_a_stream_has_named_events_and_no_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = scripted(monkeypatch, "ab")

    async def body(client: Client) -> None:
        reply = await client.post("/v1/responses", {"input": "x", "stream": True})
        assert reply.status == 200
        assert [name for name, _ in reply.events] == [data["type"] for _, data in reply.events]
        assert reply.events[-1][0] == "response.completed"

    run(body, ServedFake(model=FakeModel(vocab_size=364, max_model_len=400)), tokenizer=tokenizer)


def test_items_become_messages_of_a_chat() -> None:
    chat = chat_of(
        b"""{"instructions": "i", "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "y"}]},
        {"role": "developer", "content": "d"}],
        "max_output_tokens": 5, "top_k": 3, "reasoning": {"effort": "low"},
        "tool_choice": {"type": "function", "name": "f"},
        "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": true}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": true}}}"""
    )
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in "12"]
    assert chat.messages == [
        {"role": "system", "content": "i"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "reasoning": "r", "content": "c", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "tool", "tool_call_id": "2", "content": "y"},
        {"role": "developer", "content": "d"},
    ]
    assert (chat.max_completion_tokens, chat.top_k, chat.reasoning_effort) == (5, 3, "low")
    assert chat.tool_choice == {"type": "function", "function": {"name": "f"}}
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert chat.response_format == {"type": "json_schema", "json_schema": schema}
    assert (chat.tools[0].function.name, chat.tools[0].function.strict) == ("f", True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (b'"previous_response_id": "resp_1"', "previous_response_id"),
        (b'"background": true', "background"),
        (b'"truncation": "auto"', "truncation"),
        (b'"conversation": {"id": "c"}', "conversation"),
        (b'"prompt": {"id": "p"}', "prompt"),
        (b'"include": ["file_search_call.results"]', "include"),
        (b'"tools": [{"type": "web_search"}]', "tools"),
        (b'"tools": [{"type": "function"}]', "tools"),
        (b'"tool_choice": {"type": "allowed_tools"}', "tool_choice"),
        (b'"input": []', "input"),
        (b'"input": [{"type": "item_reference", "id": "i"}]', "input"),
        (b'"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]', "input"),
        (b'"input": [{"role": "user", "content": 3}]', "input"),
        (b'"n": 2', "n"),
        (b'"response_format": {"type": "json_object"}', "response_format"),
        (b'"use_beam_search": true', "use_beam_search"),
    ],
)
def test_what_is_not_kept_or_not_known_is_refused_by_name(fields: bytes, param: str) -> None:
    own = b"" if fields.startswith(b'"input"') else b'"input": "x", '
    with pytest.raises(ApiError) as refused:
        chat_of(b"{" + own + fields + b"}")
    assert (refused.value.status, refused.value.param) == (400, param)


def test_errors_of_the_chat_name_the_fields_of_the_response() -> None:
    async def body(client: Client) -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"input": [{"content": "x"}]}, "input"),
            ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
            ({"input": "x", "top_logprobs": 99}, "top_logprobs"),
        ]
        for fields, param in cases:
            reply = await client.post("/v1/responses", fields)
            assert (reply.status, reply.error["param"]) == (400, param)
            assert param in reply.error["message"]

    run(body)


def test_a_client_that_leaves_cancels_its_response() -> None:
    async def body(client: Client) -> None:
        gone = asyncio.Event()
        client.fake.pause = 0.01
        asked = b'{"input": "x", "max_output_tokens": 60, "seed": 2, "ignore_eos": true}'
        waiting = asyncio.ensure_future(client.call("POST", "/v1/responses", asked, {}, gone))
        await client.until(lambda: bool(client.fake.added))
        gone.set()
        await waiting
        await client.until(lambda: bool(client.fake.ended))

    run(body)
