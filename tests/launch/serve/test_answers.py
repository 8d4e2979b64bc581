"""Tool calls and reasoning over HTTP: fields, ends, usage, and what a server or a request switches off."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from launch.errors import UsageError
from launch.serve.parsers.deltas import merged
from runtime.frontend.tokenizer import Tokenizer
from tests.launch.generate import fake_engine
from tests.launch.generate.fake_engine import FakeModel
from tests.launch.serve.parsers.templates import TEMPLATES
from tests.launch.serve.rig import Client, ServedFake
from tests.launch.serve.test_app import chunks_of, run
from tests.launch.serve.test_command import settings
from tests.runtime.frontend import small_tokenizers

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "seed": 1}
TEMPLATE = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}{% if think %}<think>\n{% endif %}"


def with_tokens(special: bool = False) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(small_tokenizers.byte_level_backend().to_str())
    backend.add_tokens([tokenizers.AddedToken(mark, special=special) for mark in MARKS])
    return Tokenizer(backend)


def answering(monkeypatch: pytest.MonkeyPatch, ids: list[int], body: Callable[[Client], Awaitable[None]],
              tokenizer: Tokenizer, **options: Any) -> None:  # fmt: skip
    """A server of a model that says ``ids``, and then its stop token."""
    said = [*ids, 0]
    monkeypatch.setattr(fake_engine, "scripted_token", lambda request, position, vocab_size: said[position])
    formats = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "template": TEMPLATE, **options}
    run(body, ServedFake(model=FakeModel(vocab_size=400, max_model_len=900)), tokenizer=tokenizer, **formats)


async def both(client: Client, **asked: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A whole answer's choice, the same of a stream, and the usage, which is the same."""
    body = {**CHAT, "tools": [TOOL], **asked}
    reply = (await client.post("/v1/chat/completions", body)).json
    chunks = chunks_of(
        await client.post("/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    )
    assert chunks[-1]["usage"] == reply["usage"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0].pop("role") == "assistant"
    streamed = {"message": merged(deltas), "finish_reason": chunks[-2]["choices"][0]["finish_reason"]}
    whole = reply["choices"][0]
    for choice in (whole, streamed):
        for call in choice["message"].get("tool_calls", ()):
            del call["id"]
    assert whole["message"].pop("role") == "assistant"
    assert streamed["message"] == whole["message"]
    assert streamed["finish_reason"] == whole["finish_reason"]
    return whole, streamed, reply["usage"]


@pytest.mark.parametrize("special", [False, True])
def test_reasoning_content_and_calls(monkeypatch: pytest.MonkeyPatch, special: bool) -> None:
    tokenizer = with_tokens(special)
    ids = tokenizer.encode(f"<think>\nhm\n</think>\n\nso {CALL}")

    async def body(client: Client) -> None:
        whole, _, usage = await both(client)
        function = {"name": "f", "arguments": '{"a": "b"}'}
        calls = [{"type": "function", "function": function}]
        assert whole["message"] == {"content": "so ", "reasoning": "hm", "tool_calls": calls}
        assert whole["finish_reason"] == "tool_calls"
        assert usage["completion_tokens"] == len(ids) + 1
        assert usage["completion_tokens_details"] == {"reasoning_tokens": len(tokenizer.encode("\nhm\n"))}
        silent, _, usage = await both(client, include_reasoning=False)
        assert silent["message"] == {"content": "so ", "tool_calls": calls}
        assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
        without, _, _ = await both(client, tools=None)
        text = "so " if special else f"so {CALL}"
        assert without["message"]["content"].startswith(text)
        assert (without["message"]["reasoning"], without["finish_reason"]) == ("hm", "stop")

    answering(monkeypatch, ids, body, tokenizer)


def test_the_other_name_of_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_tokens()

    async def body(client: Client) -> None:
        whole, _, _ = await both(client)
        assert whole["message"] == {"content": "so", "reasoning_content": "hm"}

    ids = tokenizer.encode("<think>hm</think>so")
    answering(monkeypatch, ids, body, tokenizer, reasoning_field="reasoning_content")


@pytest.mark.parametrize(("said", "content"), [("hm\nhm</think>", "hm\nhm"), ("hm", "hm"), ("hm</think>so", "so")])
def test_reasoning_alone_is_content_too_where_content_may_not_be_empty(
    monkeypatch: pytest.MonkeyPatch, said: str, content: str
) -> None:
    """Nemotron's force_nonempty_content."""
    tokenizer = with_tokens()

    async def body(client: Client) -> None:
        whole, _, _ = await both(client, chat_template_kwargs={"think": True, "force_nonempty_content": True})
        assert whole["message"] == {"content": content, "reasoning": said.partition("</think>")[0]}
        silent, _, _ = await both(
            client, include_reasoning=False, chat_template_kwargs={"think": True, "force_nonempty_content": True}
        )
        assert silent["message"] == {"content": content}

    answering(monkeypatch, tokenizer.encode(said), body, tokenizer)
    called = tokenizer.encode(f"hm</think>{CALL}")

    async def calls(client: Client) -> None:
        whole, _, _ = await both(client, chat_template_kwargs={"think": True, "force_nonempty_content": True})
        assert whole["message"]["content"] is None

    answering(monkeypatch, called, calls, tokenizer)


def test_where_thinking_starts_is_read_from_the_rendered_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever switch the template has; a server's variables are its defaults, and a request's win."""
    tokenizer = with_tokens()

    async def body(client: Client) -> None:
        begun, _, _ = await both(client)
        assert begun["message"] == {"content": "so", "reasoning": "hm"}
        off, _, _ = await both(client, chat_template_kwargs={"think": False})
        assert off["message"] == {"content": "hm</think>so"}
        spelled, _, _ = await both(
            client, chat_template_kwargs={"think": False}, messages=[{"role": "user", "content": "what is <think>?"}]
        )
        assert spelled["message"] == {"content": "hm</think>so"}

    ids = tokenizer.encode("hm</think>so")
    answering(monkeypatch, ids, body, tokenizer, template_kwargs={"think": True})


@pytest.mark.parametrize("tokens", [10, 16, 30])
def test_an_answer_that_is_cut_off_says_length(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Also within a call: never tool_calls."""
    tokenizer = with_tokens()
    ids = tokenizer.encode(f"<think>hm</think>{CALL}")
    assert tokens < len(ids)

    async def body(client: Client) -> None:
        whole, _, _ = await both(client, max_tokens=tokens)
        assert whole["finish_reason"] == "length"

    answering(monkeypatch, ids, body, tokenizer)


def test_one_call_at_most_where_calls_may_not_be_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_tokens()

    async def body(client: Client) -> None:
        two, _, _ = await both(client)
        assert len(two["message"]["tool_calls"]) == 2
        one, _, _ = await both(client, parallel_tool_calls=False)
        assert one["message"]["tool_calls"] == two["message"]["tool_calls"][:1]
        assert one["finish_reason"] == "tool_calls"

    answering(monkeypatch, tokenizer.encode(f"{CALL}\n{CALL}"), body, tokenizer)


def test_a_named_tool_ends_with_stop_and_others_with_tool_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As OpenAI's API; cut answers say length (vllm#25054)."""
    pytest.importorskip("llguidance")
    tokenizer = with_tokens()
    ids = tokenizer.encode(CALL)

    async def body(client: Client) -> None:
        named = {"type": "function", "function": {"name": "f"}}
        for choice, end in (("auto", "tool_calls"), ("required", "tool_calls"), (named, "stop")):
            whole, _, _ = await both(client, tool_choice=choice)
            assert (len(whole["message"]["tool_calls"]), whole["finish_reason"]) == (1, end)
            whole, _, _ = await both(client, tool_choice=choice, max_tokens=len(ids) - 2)
            assert whole["finish_reason"] == "length"

    answering(monkeypatch, ids, body, tokenizer)


@pytest.mark.parametrize("stop", [None, "all>\n{no", "hm</think>no"])
def test_marks_that_are_only_spelled_are_text(monkeypatch: pytest.MonkeyPatch, stop: str | None) -> None:
    """The tokenizer has a token for each: pieces of words that read the same are none. A stop string that begins with
    the end of a mark holds a part of it back."""
    tokenizer, words = with_tokens(), small_tokenizers.byte_level()
    spelled = words.encode(f"<think>hm</think>{CALL}")

    async def body(client: Client) -> None:
        whole, _, _ = await both(client, stop=stop)
        assert whole["message"] == {"content": f"<think>hm</think>{CALL}"}

    answering(monkeypatch, spelled, body, tokenizer)

    async def as_tokens(client: Client) -> None:
        whole, _, _ = await both(client, stop=stop)
        assert whole["message"]["reasoning"] == "hm"
        assert [call["function"]["name"] for call in whole["message"]["tool_calls"]] == ["f"]

    answering(monkeypatch, tokenizer.encode(f"<think>hm</think>{CALL}"), as_tokens, tokenizer)


def test_tools_are_refused_where_no_format_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_tokens()

    async def body(client: Client) -> None:
        reply = await client.post("/v1/chat/completions", {**CHAT, "tools": [TOOL]})
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert "--tool-call-parser" in reply.error["message"]

    answering(monkeypatch, [5], body, tokenizer, tool_call_parser="none")


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_command_finds_the_formats_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    family = TEMPLATES[name]
    small_tokenizers.byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(family.template)
    with caplog.at_level(logging.INFO, "lockstride"):
        made = settings(model=str(tmp_path))
    found = (family.calls or "none", family.reasoning or "none")
    assert (made.tool_call_parser, made.reasoning_parser) == found
    assert f"tool calls in the format {found[0]}, reasoning in {found[1]}" in caplog.text
    chosen = settings("--tool-call-parser", "glm47", "--reasoning-parser", "none", model=str(tmp_path))
    assert (chosen.tool_call_parser, chosen.reasoning_parser) == ("glm47", "none")
    if family.calls is None:
        with pytest.raises(UsageError, match="--tool-call-parser"):
            settings("--enable-auto-tool-choice", model=str(tmp_path))
    else:
        settings("--enable-auto-tool-choice", model=str(tmp_path))


def test_variables_of_templates_are_a_json_object() -> None:
    assert settings("--default-chat-template-kwargs", json.dumps({"a": 1})).template_kwargs == {"a": 1}
    for wrong in ("[1]", "{", "a"):
        with pytest.raises(SystemExit):
            settings("--default-chat-template-kwargs", wrong)
