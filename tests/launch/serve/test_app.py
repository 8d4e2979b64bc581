"""Routes, streams, refusals and ends, around an engine that is late and out of order."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import msgspec
import pytest
import tokenizers
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send

from launch.serve import bodies, chunks
from launch.serve.parsers.deltas import merged
from runtime.frontend.engine_protocol import Occupancy
from runtime.frontend.engine_server import EngineServer
from runtime.frontend.framing import unpack_ids
from runtime.frontend.remote_engine import EngineLost
from runtime.frontend.tokenizer import Tokenizer
from runtime.schedule.plan import StepOutput
from runtime.schedule.request import FinishReason, Request, SamplingParams
from tests.launch.api.line_forms import NEUTRAL, NEUTRAL_IN_CHATS
from tests.launch.generate import fake_engine
from tests.launch.generate.fake_engine import FakeModel, serial_answer
from tests.launch.serve.rig import Client, Reply, ServedFake, listening, served
from tests.runtime.engine.rig import request as request_of
from tests.runtime.engine.rig import rig
from tests.runtime.engine.rig import run as run_engine
from tests.runtime.frontend import small_tokenizers

TOKENIZER = small_tokenizers.byte_level()
PROMPT = [5, 6, 7]


def run(body: Callable[[Client], Awaitable[None]], fake: ServedFake | None = None, **settings: Any) -> None:
    async def inside() -> None:
        async with served(fake, **settings) as client:
            await body(client)

    asyncio.run(inside())


def expected(prompt: list[int], max_tokens: int, seed: int, **sampling: Any) -> tuple[tuple[int, ...], FinishReason]:
    """What the engine's serial form generates."""
    params = SamplingParams(max_tokens=max_tokens, seed=seed, **sampling)
    return serial_answer(Request(0, tuple(prompt), params, (0,)), FakeModel())


def text_of(tokens: tuple[int, ...]) -> str:
    return TOKENIZER.decode([token for token in tokens if token != 0])


def chunks_of(reply: Reply) -> list[dict[str, Any]]:
    assert reply.events[-1] == ("", "[DONE]")
    assert all(name == "" for name, _ in reply.events)
    return [data for _, data in reply.events[:-1]]


@pytest.mark.parametrize("width", [1, 3])
def test_a_completion_is_the_engine_s_answer_whole_and_as_a_stream(width: int) -> None:
    async def body(client: Client) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 30, "seed": 3, "n": 2}
        plain = await client.post("/v1/completions", asked, x_request_id="abc")
        assert plain.status == 200
        assert plain.headers["x-request-id"] == "abc"
        assert plain.json["id"] == "cmpl-abc"
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = chunks_of(await client.post("/v1/completions", {**asked, **options}))
        *chunks, usage = chunks
        assert usage["choices"] == []
        assert usage["usage"] == plain.json["usage"]
        for index in range(2):
            tokens, reason = expected(PROMPT, 30, 3 + index)
            choice = plain.json["choices"][index]
            assert (choice["text"], choice["finish_reason"]) == (text_of(tokens), reason.label)
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            assert len(mine) == len(tokens), "one chunk a token"
            assert "".join(c["text"] for c in mine) == text_of(tokens)
            assert [c["finish_reason"] for c in mine] == [None] * (len(tokens) - 1) + [reason.label]

    run(body, ServedFake(width=width))


def test_a_chat_has_its_role_in_the_first_token_s_chunk() -> None:
    async def body(client: Client) -> None:
        messages = [
            {"role": "system", "content": None, "name": None},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]
        asked = {"messages": messages[1:], "max_completion_tokens": 8, "seed": 1, "top_p": None, "tools": None}
        plain = await client.post("/v1/chat/completions", {**asked, "unknown_field": 1})
        prompt = TOKENIZER.encode("<user>ab<a>", add_special_tokens=False)
        tokens, reason = expected(prompt, 8, 1)
        message = plain.json["choices"][0]
        assert message["message"] == {"role": "assistant", "content": text_of(tokens)}
        assert message["finish_reason"] == reason.label
        chunks = chunks_of(await client.post("/v1/chat/completions", {**asked, "stream": True}))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0]["role"] == "assistant"
        assert all("role" not in delta for delta in deltas[1:])
        assert "".join(delta["content"] for delta in deltas) == text_of(tokens)
        assert len(deltas) == len(tokens)
        assert "usage" not in chunks[0]
        refused = await client.post("/v1/chat/completions", {"messages": messages})
        assert (refused.status, refused.error["param"]) == (400, "messages")

    run(body)


def test_prompts_come_as_text_ids_and_lists_of_both() -> None:
    async def body(client: Client) -> None:
        text = "ab"
        ids = TOKENIZER.encode(text)
        base = {"max_tokens": 5, "seed": 2}
        answers = []
        for prompt in (text, ids, [text], [ids], [text, "abc"], [ids, TOKENIZER.encode("abc")]):
            reply = await client.post("/v1/completions", {**base, "prompt": prompt})
            answers.append([choice["text"] for choice in reply.json["choices"]])
        assert answers[0] == answers[1] == answers[2] == answers[3] == answers[4][:1] == answers[5][:1]
        assert answers[4] == answers[5]
        mixed = await client.post("/v1/completions", {**base, "prompt": [1, "a"]})
        assert (mixed.status, mixed.error["param"]) == (400, "prompt")

    run(body)


def test_a_stop_string_ends_the_answer_where_it_stands_and_the_engine_s_row() -> None:
    tokens, _ = expected(PROMPT, 50, 4, ignore_eos=True)
    whole = TOKENIZER.decode(tokens)
    stop = whole[6:9]

    async def body(client: Client) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 50, "seed": 4, "stop": stop}
        plain = await client.post("/v1/completions", asked)
        choice = plain.json["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == whole[: whole.index(stop)]
        assert plain.json["usage"]["completion_tokens"] < 50
        chunks = chunks_of(await client.post("/v1/completions", {**asked, "stream": True}))
        assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]
        assert len(chunks) == plain.json["usage"]["completion_tokens"]
        await client.until(lambda: client.engine.live == 0)
        assert client.fake.ended[-1] is FinishReason.STOP

    run(body, ServedFake(pause=0.001))


def test_a_client_that_leaves_cancels_its_request() -> None:
    """The engine stands still from the moment when the client leaves until the server has noticed."""

    async def body(client: Client) -> None:
        for stream in (True, False):
            gone = asyncio.Event()

            def leave(data: bytes = b"", gone: asyncio.Event = gone) -> None:
                client.fake.hold.set()
                gone.set()

            asked = {"prompt": PROMPT, "max_tokens": 400, "seed": 1, "n": 3, "stream": stream, "ignore_eos": True}
            call = client.call("POST", "/v1/completions", json.dumps(asked).encode(), {}, gone, leave)
            task = asyncio.ensure_future(call)
            await client.until(lambda: client.engine.live == 3)
            if not stream:  # what still waits on rank 0 would not end in the scheduler
                await client.until(lambda: len(client.fake.added) == 6)
                leave()
            await task
            client.fake.hold.clear()
            await client.until(lambda: client.engine.live == 0 and client.server.live == 0)
        assert client.fake.ended.count(FinishReason.CANCELLED) >= 4
        assert client.server.disconnected >= 4

    run(body, ServedFake(pause=0.005))


def test_who_leaves_before_the_scheduler_had_his_request_is_an_abort_for_the_client_alone() -> None:
    """What waits on rank 0 for room in the scheduler is cancelled there: docs/serving.md tells the counters apart."""

    async def body(client: Client) -> None:
        asked = json.dumps({"prompt": PROMPT, "max_tokens": 50, "seed": 1, "ignore_eos": True}).encode()
        running = asyncio.ensure_future(client.call("POST", "/v1/completions", asked, {}))
        await client.until(lambda: len(client.fake.added) == 1)
        client.fake.hold.set()
        await client.until(client.fake.held.is_set)  # in a step: what comes now waits on rank 0
        gone = asyncio.Event()
        leaving = asyncio.ensure_future(client.call("POST", "/v1/completions", asked, {}, gone))
        await client.until(lambda: client.engine.live == 2)
        gone.set()
        await leaving
        client.fake.hold.clear()
        assert (await running).status == 200
        await client.until(lambda: client.server.live == 0)
        assert client.fake.ended == [FinishReason.LENGTH]
        finished = client.app.metrics.all().finished
        assert {reason: count for reason, count in finished.items() if count} == {"length": 1, "abort": 1}

    run(body, ServedFake(pause=0.005))


LACKING: list[tuple[str, object]] = [
    ("best_of", 4),
    ("use_beam_search", True),
    ("ebnf", "a"),
    ("skip_special_tokens", False),
    ("include_stop_str_in_output", True),
    ("suffix", "x"),
]


def test_a_field_that_the_engine_lacks_is_refused_by_name() -> None:
    async def body(client: Client) -> None:
        for field, value in LACKING:
            reply = await client.post("/v1/completions", {"prompt": "a", field: value})
            assert (reply.status, reply.error["param"], reply.error["type"]) == (400, field, "invalid_request_error")
            assert field in reply.error["message"]

    run(body)


def test_fields_at_their_default_change_nothing() -> None:
    async def body(client: Client) -> None:
        neutral = {
            "logit_bias": {}, "bad_words": [], "allowed_token_ids": [], "best_of": 1, "use_beam_search": False,
            "response_format": {"type": "text"}, "skip_special_tokens": True, "spaces_between_special_tokens": True,
            "suffix": "", "logprobs": None, "stream": None, "stop": None, "user": "u", "metadata": {"a": 1},
            "top_k": -1, **NEUTRAL,
        }  # fmt: skip
        reply = await client.post("/v1/completions", {"prompt": "a", "max_tokens": 2, **neutral})
        assert reply.status == 200
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **NEUTRAL, **NEUTRAL_IN_CHATS}
        assert (await client.post("/v1/chat/completions", chat)).status == 200

    run(body)


BAD_BODIES: list[tuple[str, bytes, int, str | None]] = [
        ("/v1/completions", b"", 400, None),
        ("/v1/completions", b"[]", 400, None),
        ("/v1/completions", b"{}", 400, "prompt"),
        ("/v1/chat/completions", b'{"model": "m"}', 400, "messages"),
        ("/v1/completions", b'{"prompt": "\xff"}', 400, None),
        ("/v1/completions", b'{"prompt": "\\ud800"}', 400, None),
        ("/v1/completions", b'{"prompt": ' + b"[" * 100_000, 400, None),
        ("/v1/completions", b'{"prompt": "a", "chat_template_kwargs": ' + b'{"a":' * 50_000, 400, None),
        ("/v1/completions", b'{"prompt": ""}', 400, "prompt"),
        ("/v1/completions", b'{"prompt": []}', 400, "prompt"),
        ("/v1/completions", b'{"prompt": [999999]}', 400, "prompt"),
        ("/v1/completions", b'{"prompt": [-1]}', 400, "prompt"),
        ("/v1/completions", b'{"prompt": 5}', 400, "prompt"),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": "5"}', 400, "max_tokens"),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 0}', 400, "max_tokens"),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 99999999999999999999999}', 400, "max_tokens"),
        ("/v1/completions", b'{"prompt": "a", "temperature": -1}', 400, "temperature"),
        ("/v1/completions", b'{"prompt": "a", "temperature": 1e400}', 400, "temperature"),
        ("/v1/completions", b'{"prompt": "a", "n": 0}', 400, "n"),
        ("/v1/completions", b'{"prompt": "a", "n": 129}', 400, "n"),
        ("/v1/completions", b'{"prompt": "a", "n": 2000}', 400, "n"),
        ("/v1/completions", b'{"prompt": ["a", "b", "c", "d", "e", "f", "g", "h", "i"], "n": 2000}', 400, "n"),
        ("/v1/completions", b'{"prompt": ["a", "b", "c", "d", "e", "f", "g", "h", "i"], "n": 128}', 400, "prompt"),
        ("/v1/completions", b'{"prompt": "a", "n": -5}', 400, "n"),
        ("/v1/completions", b'{"prompt": "a", "logprobs": 21}', 400, "logprobs"),
        ("/v1/completions", b'{"prompt": "a", "stop": [""]}', 400, "stop"),
        ("/v1/completions", b'{"prompt": "a", "stop": ""}', 400, "stop"),
        ("/v1/completions", b'{"prompt": "a", "stop_token_ids": [-1]}', 400, "stop_token_ids"),
        ("/v1/completions", b'{"prompt": "a", "stop_token_ids": [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]}', 400,
         "stop_token_ids"),
        ("/v1/completions", b'{"prompt": "a", "allowed_token_ids": [999999]}', 400, "allowed_token_ids"),
        ("/v1/completions", b'{"prompt": "a", "logit_bias": {"999999": 1}}', 400, "logit_bias"),
        ("/v1/completions", b'{"prompt": "a", "bad_words": [" "]}', 400, "bad_words"),
        ("/v1/completions", b'{"prompt": "a", "priority": 9999999999}', 400, "priority"),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 2, "min_tokens": 3}', 400, "min_tokens"),
        ("/v1/completions", b'{"prompt": "a", "stop": ["\\udc00"]}', 400, None),
        ("/v1/completions", b'{"prompt": "a", "stream_options": {"include_usage": true}}', 400, "stream_options"),
        ("/v1/completions", b'{"prompt": "a", "model": "other"}', 404, "model"),
        ("/v1/chat/completions", b'{"messages": []}', 400, "messages"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user"}]}', 400, "messages"),
        ("/v1/chat/completions", b'{"messages": [{"role": 1, "content": "a"}]}', 400, "messages"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', 400, None),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
            400,
            "messages",
        ),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}', 400,
         "top_logprobs"),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": []}}',
            400,
            "chat_template_kwargs",
        ),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}', 400,
         "tool_choice"),
        ("/tokenize", b"{}", 400, "prompt"),
        ("/detokenize", b'{"tokens": [1, 99999999]}', 400, "tokens"),
        ("/v1/embeddings", b"{}", 404, None),
]  # fmt: skip


def test_a_bad_body_is_an_error_object_and_no_500() -> None:
    async def body(client: Client) -> None:
        for path, data, status, param in BAD_BODIES:
            reply = await client.post(path, data)
            assert reply.status == status, (data[:60], reply.body)
            assert set(reply.error) == {"message", "type", "param", "code"}
            assert reply.error["message"]
            assert param is None or reply.error["param"] == param, (data[:60], reply.body)

    run(body)


def test_a_prompt_that_leaves_no_room_says_so() -> None:
    async def body(client: Client) -> None:
        reply = await client.post("/v1/completions", {"prompt": [1] * 64})
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        cut = await client.post("/v1/completions", {"prompt": [1] * 64, "truncate_prompt_tokens": 3, "max_tokens": 1})
        assert cut.json["usage"]["prompt_tokens"] == 3

    run(body)


def test_keys_guard_all_but_the_probes() -> None:
    async def body(client: Client) -> None:
        for path in ("/v1/models", "/tokenizer_info", "/nowhere"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first"}):
                reply = await client.get(path, **headers)
                assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        for key in ("first", "second"):
            assert (await client.get("/v1/models", authorization=f"Bearer {key}")).status == 200
        for path in ("/health", "/ready", "/ping", "/version", "/metrics", "/load"):
            assert (await client.get(path)).status == 200

    run(body, api_keys=("first", "second"))


def test_the_prefix_cache_is_reset_before_what_is_asked_for_after_it() -> None:
    async def body(client: Client) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 3, "seed": 1}
        await client.post("/v1/completions", asked)
        reset = await client.post("/reset_prefix_cache", None)
        assert (reset.status, reset.body, client.fake.resets) == (200, b"", [1])
        await client.post("/v1/completions", asked)
        assert (await client.get("/reset_prefix_cache")).status == 405
        client.fake.hold.set()
        waiting = asyncio.ensure_future(client.engine.reset_prefix_cache())
        await asyncio.sleep(0)
        client.engine.connection_lost(None)
        with pytest.raises(EngineLost, match="rank 0 is gone"):
            await waiting
        lost = await client.post("/reset_prefix_cache", None)
        assert (lost.status, lost.error["code"]) == (503, "engine_lost")

    run(body)


def test_models_are_named_when_the_model_is_loaded() -> None:
    """Clients wait for it; before it named a model that no request could reach."""

    async def body(client: Client) -> None:
        ready, client.engine.ready = client.engine.ready, None
        for path in ("/v1/models", "/v1/models/m"):
            loading = await client.get(path)
            assert (loading.status, loading.error["code"], loading.headers["retry-after"]) == (503, "loading", "5")
        client.engine.ready = ready
        assert (await client.get("/v1/models")).status == 200

    run(body)


def test_answers_to_one_prompt_are_one_request_to_the_engine() -> None:
    """So that they fork from one prefill, without a prefix cache, too; each ends, and is stopped, by itself."""
    fake, added = ServedFake(pause=0.002), list[int]()
    add = fake.add

    def noted(request: Request) -> None:
        added.append(request.sampling.n)
        add(request)

    fake.add = noted  # type: ignore[method-assign]

    async def body(client: Client) -> None:
        asked = {"prompt": [PROMPT, PROMPT[::-1]], "max_tokens": 12, "seed": 3, "n": 3, "logprobs": 1, "echo": False}
        choices = (await client.post("/v1/completions", asked)).json["choices"]
        assert added == [3, 3]
        alone = [expected(prompt, 12, 3 + i) for prompt in (PROMPT, PROMPT[::-1]) for i in range(3)]
        shown = [tokens[:-1] if reason is FinishReason.STOP else tokens for tokens, reason in alone]
        assert [choice["text"] for choice in choices] == [text_of(tokens) for tokens in shown]
        stop = text_of(alone[1][0])[2:4]
        streamed = await client.post("/v1/completions", {**asked, "prompt": PROMPT, "stop": [stop], "stream": True})
        chunks = [choice for _, event in streamed.events[:-1] for choice in event["choices"]]
        texts = ["".join(chunk["text"] for chunk in chunks if chunk["index"] == i) for i in range(3)]
        whole = [text_of(tokens) for tokens in shown[:3]]
        assert texts == [text.split(stop)[0] for text in whole]
        await client.until(lambda: len(fake.ended) == 9)
        assert client.server.live == client.engine.live == 0

    run(body, fake)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_eight_answers_without_a_prefix_cache_compute_their_prompt_once(stream: bool) -> None:
    """By a real engine's counters of computed tokens; each answer is the one that a request of its own gets."""
    prompt = [3 + at % 50 for at in range(41)]
    asked = {"prompt": prompt, "max_tokens": 6, "temperature": 1.0, "return_token_ids": True, "ignore_eos": True}

    async def body(engine: Any) -> tuple[list[list[int]], dict[str, int]]:
        engine.hold = threading.Event()
        async with served(engine) as client:
            reply = await client.post("/v1/completions", {**asked, "seed": 5, "n": 8, "stream": stream})
            chunks = chunks_of(reply) if stream else [reply.json]
            counted = dict(engine.counters)
            alone = [await client.post("/v1/completions", {**asked, "seed": 5 + i}) for i in range(8)]
        tokens = [[t for chunk in chunks for c in chunk["choices"] if c["index"] == i for t in c["token_ids"]]
                  for i in range(8)]  # fmt: skip
        assert tokens == [one.json["choices"][0]["token_ids"] for one in alone]
        return tokens, counted

    with rig(rows=9, prefix_caching=False) as engine:  # of nine rows one request may have eight
        tokens, counted = asyncio.run(body(engine))
    assert (counted["prefill_tokens"], counted["forks"], counted["forked_tokens"]) == (41, 7, 7 * 41)
    assert len({tuple(one) for one in tokens}) == 8


@pytest.mark.parametrize(
    "large",
    [{"prompt": [[5, i] for i in range(12)]}, {"prompt": [5, 6], "n": 12}, {"prompt": [5, 6], "n": 12, "stream": True}],
)
def test_one_request_leaves_rows_to_others(large: dict[str, Any]) -> None:
    """Of four rows it has three at most, whether it has many prompts or many answers to one."""
    fake = ServedFake(pause=0.002)

    async def body(client: Client) -> None:
        asked = {"max_tokens": 40, "min_tokens": 40, "seed": 3}
        waits = asyncio.ensure_future(client.post("/v1/completions", {**asked, **large}))
        await client.until(lambda: len(fake.added) == 3)
        assert (await client.post("/v1/completions", {"prompt": [7], "max_tokens": 2})).status == 200
        assert not waits.done()
        assert len(fake.added) < 12, "it came before most of the others"
        reply = await waits
        assert reply.status == 200
        seeds = [request.sampling.seed or 0 for request in fake.added if request.prompt_token_ids[0] == 5]
        assert sorted(seeds) == ([3] * 12 if "n" not in large else list(range(3, 15)))
        if "stream" not in large:
            choices = reply.json["choices"]
            prompts = large["prompt"] if "n" not in large else [large["prompt"]] * 12
            alone = [expected(prompt, 40, 3 + i * ("n" in large), min_tokens=40) for i, prompt in enumerate(prompts)]
            assert [choice["text"] for choice in choices] == [text_of(tokens) for tokens, _ in alone]
        assert fake.most_live == 4

    run(body, fake)


def test_one_request_leaves_kv_blocks_to_others() -> None:
    """Of eight blocks, seven hold two answers of up to 42 tokens."""

    class Small(ServedFake):
        @property
        def occupancy(self) -> Occupancy:
            return super().occupancy._replace(blocks=8)

    async def body(client: Client) -> None:
        asked = {"max_tokens": 40, "min_tokens": 40, "prompt": [[5, i] for i in range(6)]}
        assert (await client.post("/v1/completions", asked)).status == 200
        assert client.fake.most_live == 2

    run(body, Small())


def test_models_and_tokens() -> None:
    async def body(client: Client) -> None:
        card = (await client.get("/v1/models")).json["data"][0]
        assert (card["id"], card["root"], card["max_model_len"]) == ("m", "none", 64)
        assert (await client.get("/v1/models/m")).json == card
        missing = await client.get("/v1/models/other/name")
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")
        tokens = (await client.post("/tokenize", {"prompt": "abc", "return_token_strs": True})).json
        assert tokens["tokens"] == TOKENIZER.encode("abc")
        assert "".join(tokens["token_strs"]) == "abc"
        assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 64)
        chat = (await client.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})).json
        assert chat["tokens"] == TOKENIZER.encode("<user>x<a>", add_special_tokens=False)
        assert (await client.post("/detokenize", {"tokens": tokens["tokens"]})).json == {"prompt": "abc"}
        assert (await client.get("/v1/completions")).status == 405

    run(body)


def test_tokens_are_shown_whole_and_without_the_answer_s_beginning_where_that_is_asked() -> None:
    async def body(client: Client) -> None:
        text = "<|im_start|>é<|im_end|>"
        shown = (await client.post("/tokenize", {"prompt": text, "return_token_strs": True})).json
        assert (shown["token_strs"][0], shown["token_strs"][-1]) == ("<|im_start|>", "<|im_end|>")
        assert "\ufffd" not in "".join(shown["token_strs"]), "pieces of the vocabulary"
        assert (await client.post("/detokenize", {"tokens": shown["tokens"]})).json == {"prompt": text}
        chat = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
        assert (await client.post("/tokenize", chat)).json["tokens"] == TOKENIZER.encode("<user>x")
        for field, value in (("continue_final_message", True), ("chat_template", "x")):
            refused = await client.post("/tokenize", {**chat, field: value})
            assert (refused.status, refused.error["param"]) == (400, field)

    run(body)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_text_without_characters_has_the_special_tokens_that_are_added(kind: str) -> None:
    tokenizer = getattr(small_tokenizers, kind)()

    async def body(client: Client) -> None:
        begin = [] if kind == "byte_level" else [1]
        for fields, ids in (({}, begin), ({"add_special_tokens": False}, [])):
            reply = await client.post("/tokenize", {"prompt": "", **fields})
            assert (reply.status, reply.json["count"], reply.json["tokens"]) == (200, len(ids), ids)
        asked = {"prompt": ["", "a"], "max_tokens": 1, "ignore_eos": True}
        reply = await client.post("/v1/completions", asked)
        if begin:
            assert reply.json["usage"]["prompt_tokens"] == 1 + len(tokenizer.encode("a"))
            reply = await client.post("/v1/completions", {**asked, "add_special_tokens": False})
        assert (reply.status, reply.error["param"]) == (400, "prompt")
        assert reply.error["message"] == "the prompt is empty: give at least one token"

    run(body, tokenizer=tokenizer)


@pytest.mark.parametrize("wrong", [99999999, -3])
def test_an_id_that_is_no_token_is_named_by_its_place(wrong: int) -> None:
    async def body(client: Client) -> None:
        reply = await client.post("/detokenize", {"tokens": [1, wrong]})
        assert (reply.status, reply.error["param"]) == (400, "tokens")
        assert reply.error["message"] == f"tokens[1] is {wrong}, but the vocabulary has ids 0 to 359"
        assert (await client.post("/detokenize", {"tokens": []})).json == {"prompt": ""}

    run(body)


def test_a_browser_may_read_errors_too() -> None:
    async def body(client: Client) -> None:
        for path, headers, status in (
            ("/v1/completions", {"authorization": "Bearer key"}, 400),
            ("/v1/completions", {}, 401),
            ("/nowhere", {"authorization": "Bearer key"}, 404),
        ):
            reply = await client.post(path, {}, origin="http://a.com", **headers)
            assert reply.status == status
            assert reply.headers["access-control-allow-origin"] == "http://a.com"
            assert reply.headers["x-request-id"]
        other = await client.post("/v1/completions", {}, origin="http://b.com", authorization="Bearer key")
        assert "access-control-allow-origin" not in other.headers

    run(body, allowed_origins=("http://a.com",), api_keys=("key",))


def test_what_vllm_says_of_a_chat_s_prompt_stands_beside_the_choices() -> None:
    async def body(client: Client) -> None:
        asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "seed": 1, "ignore_eos": True}
        reply = (await client.post("/v1/chat/completions", {**asked, "return_token_ids": True, "n": 2})).json
        assert reply["prompt_token_ids"] == TOKENIZER.encode("<user>x<a>")
        assert [len(choice["token_ids"]) for choice in reply["choices"]] == [3, 3]
        assert all("prompt_token_ids" not in choice for choice in reply["choices"])

    run(body)


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_has_each_choice_s_prompt_in_its_first_chunk_alone(echo: bool) -> None:
    async def body(client: Client) -> None:
        asked = {"max_tokens": 3, "seed": 1, "ignore_eos": True, "return_token_ids": True, "n": 2, "stream": True}
        prompts = [[5, 6], [7]]
        first: dict[int, list[int]] = {}
        for chunk in chunks_of(await client.post("/v1/completions", {**asked, "prompt": prompts, "echo": echo})):
            choice = chunk["choices"][0]
            assert ("prompt_token_ids" in choice) == (choice["index"] not in first)
            assert "prompt_token_ids" not in chunk
            first.setdefault(choice["index"], choice.get("prompt_token_ids", []))
        assert first == {0: [5, 6], 1: [5, 6], 2: [7], 3: [7]}

    run(body)


@pytest.mark.parametrize("usage", [{}, {"continuous_usage_stats": True}])
def test_a_streamed_chat_has_its_prompt_beside_the_first_chunk_of_each_choice(usage: dict[str, bool]) -> None:
    async def body(client: Client) -> None:
        asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "seed": 1, "ignore_eos": True}
        more = {"return_token_ids": True, "n": 2, "stream": True, "stream_options": usage}
        begun = set()
        for chunk in chunks_of(await client.post("/v1/chat/completions", {**asked, **more})):
            choice = chunk["choices"][0]
            first = choice["index"] not in begun
            assert chunk.get("prompt_token_ids") == (TOKENIZER.encode("<user>x<a>") if first else None)
            assert "prompt_token_ids" not in choice
            assert ("usage" in chunk) == bool(usage)
            begun.add(choice["index"])
        assert begun == {0, 1}
        plain = chunks_of(await client.post("/v1/chat/completions", {**asked, "stream": True}))
        assert not any("prompt_token_ids" in chunk for chunk in plain)

    run(body)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_usage_of_a_stream_is_every_answer_once_and_each_prompt_once_in_the_last_chunk(route: str, width: int) -> None:
    async def body(client: Client) -> None:
        asked = {"max_tokens": 7, "seed": 1, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
        if route == "completions":
            fields: dict[str, Any] = {"prompt": [[5, 6, 7, 8], [9, 10]]}
            prompt, answers = 6, 6
        else:
            fields = {"messages": [{"role": "user", "content": "x"}]}
            prompt, answers = len(TOKENIZER.encode("<user>x<a>")), 3
        for ignore_eos in (True, False):
            more = {"ignore_eos": ignore_eos, "return_token_ids": True}
            *chunks, last = chunks_of(await client.post(f"/v1/{route}", {**asked, **fields, **more}))
            assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
            generated = sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks)
            assert generated == 7 * answers or not ignore_eos
            usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
            assert (last["choices"], last["usage"]) == ([], usage)

    run(body, ServedFake(width=width))


def test_the_token_behind_an_echo_alone_is_shown_nowhere() -> None:
    async def body(client: Client) -> None:
        asked = {"prompt": "ab", "echo": True, "max_tokens": 0, "return_token_ids": True, "seed": 1}
        reply = (await client.post("/v1/completions", asked)).json
        assert reply["usage"]["completion_tokens"] == 0
        assert [choice["token_ids"] for choice in reply["choices"]] == [[]]
        chunks = (await client.post("/v1/completions", {**asked, "stream": True})).events[:-1]
        assert [chunk["choices"][0]["token_ids"] for _, chunk in chunks] == [[]]
        said = (await client.post("/v1/completions", {**asked, "max_tokens": 1})).json["choices"][0]["token_ids"]
        ended = {**asked, "stop_token_ids": said}
        assert (await client.post("/v1/completions", ended)).json["choices"][0]["finish_reason"] == "length"
        ((_, chunk), _) = (await client.post("/v1/completions", {**ended, "stream": True})).events
        assert chunk["choices"][0]["finish_reason"] == "length", "it has no answer that could stop"

    run(body)


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": 1}, {"prompt_logprobs": 2}])
def test_scored_prompts_end_by_length(fields: dict[str, Any]) -> None:
    """Also where the one token that is generated all the same is an end token. Log-probabilities of prompts are not
    streamed."""

    async def body(client: Client) -> None:
        asked = {"prompt": [[5, 6, 7], [8, 9]], "seed": 1, "return_token_ids": True}
        said = (await client.post("/v1/completions", {**asked, "max_tokens": 1, "n": 2})).json["choices"]
        ends = [token for choice in said for token in choice["token_ids"]]
        scored = {**asked, **fields, "echo": True, "max_tokens": 0, "stop_token_ids": ends}
        choices = (await client.post("/v1/completions", scored)).json["choices"]
        assert len(choices) == 2 * fields.get("n", 1)
        assert {(choice["finish_reason"], len(choice["token_ids"])) for choice in choices} == {("length", 0)}
        reply = await client.post("/v1/completions", {**scored, "stream": True})
        if fields.keys() & {"logprobs", "prompt_logprobs"}:
            assert (reply.status, reply.error["param"]) == (400, "stream")
            return
        chunks = chunks_of(reply)
        last = {choice["index"]: choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]}
        assert last == dict.fromkeys(range(len(choices)), "length")

    run(body)


def test_a_byte_that_is_not_utf_8_is_shown_and_no_place_is_made_up() -> None:
    async def body(client: Client) -> None:
        reply = await client.post("/v1/completions", b'{"prompt": "\xff"}')
        assert reply.json["error"]["message"] == "the body is not UTF-8: invalid start byte (byte 0xff)"

    run(body)


@pytest.mark.parametrize(
    ("path", "data", "param", "name"),
    [
        ("/v1/completions", rb'{"prompt": "ab\ud800"}', "prompt", "prompt is no Unicode text: character 2"),
        ("/v1/completions", rb'{"prompt": ["a", "\udc00"]}', "prompt", "prompt[1] is no Unicode text: character 0"),
        ("/v1/completions", rb'{"prompt": "a", "user": "\ud800\u0041"}', "user", "user is no Unicode text"),
        ("/v1/chat/completions", rb'{"messages": [{"role": "user", "content": "\uD800x"}]}', "messages",
         "messages[0].content is no Unicode text"),
        ("/v1/completions", rb'{"prompt": "a", "metadata": {"\ud800": 1}}', "metadata",
         "a name in metadata is no Unicode text"),
        ("/v1/completions", rb'{"\ud800": 1}', None, "a name in the body is no Unicode text"),
        ("/tokenize", rb'{"prompt": "\ud800"}', "prompt", "prompt is no Unicode text"),
        ("/tokenize", rb'{"prompt": "\ud83d\ude00", "model": "\ud83d"}', "model", "model is no Unicode text"),
    ],
)  # fmt: skip
def test_half_of_a_surrogate_pair_is_told_by_the_field_that_has_it(
    path: str, data: bytes, param: str | None, name: str
) -> None:
    async def body(client: Client) -> None:
        reply = await client.post(path, data)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert reply.error["message"].startswith(name)
        assert reply.error["message"].endswith("half of a surrogate pair")

    run(body)


def test_what_is_wrong_before_a_surrogate_is_told_first() -> None:
    async def body(client: Client) -> None:
        for data, words in (
            (rb'{"prompt": 1, "user": "\ud800"}', "prompt: Expected"),
            (rb'{"prompt": "\ud800"', "the body is no JSON"),
            (rb'{"prompt": "a", "user": ' + b"[" * 60_000 + rb'"\ud800"', "the body is nested too deeply"),
        ):
            reply = await client.post("/v1/completions", data)
            assert (reply.status, reply.error["message"][: len(words)]) == (400, words)

    run(body)


def test_of_a_long_body_no_field_is_looked_for() -> None:
    """Reading it a second time would stop every stream for as long."""

    async def body(client: Client) -> None:
        with mock.patch.object(bodies, "_half_of_a_pair", side_effect=AssertionError):
            for text, words in (
                (rb"\ud800", "the body is no Unicode text"),
                (rb"\uDC00", "the body is no Unicode text"),
                (rb"\\\uD83D\\ude00", "the body is no Unicode text"),  # two backslashes, and half of a pair
                (rb"\ud83d\ude00\\ud800", "the body is no JSON"),  # a pair, and a backslash beside letters
            ):
                data = b'{"prompt": "' + b"a" * (70 << 10) + text + b'", '
                reply = await client.post("/v1/completions", data)
                assert (reply.status, reply.error["message"][: len(words)]) == (400, words), text

    run(body)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    async def body(client: Client) -> None:
        tokenizer, ready = client.app._tokenizer, client.engine.ready
        assert tokenizer is not None
        assert tokenizer.longest is not None
        assert ready is not None
        text = "a" * (ready.max_model_len * tokenizer.longest)
        chats = [{"role": "user", "content": "a"}] * ready.max_model_len
        cases: tuple[tuple[str, dict[str, Any]], ...] = (
            ("/v1/completions", {"prompt": text}),
            ("/v1/completions", {"prompt": ["a", text]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ("/v1/chat/completions", {"messages": chats}),
        )
        encode = tokenizer.encode
        with mock.patch.object(tokenizer, "encode", lambda text, **how: encode(text[:10], **how)):
            for path, fields in cases:
                reply = await client.post(path, fields)
                assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
                assert f"the prompt has at least {ready.max_model_len}" in reply.error["message"]
                cut = await client.post(path, fields | {"truncate_prompt_tokens": 2, "max_tokens": 1})
                assert cut.status == 200, "its end is asked for"

    run(body)


def test_a_text_that_need_not_fit_is_bounded_too() -> None:
    """Tokenising takes a hundred times a text's memory, and two seconds for each MiB."""

    async def body(client: Client) -> None:
        words = "a" * (1 << 19)
        for path, fields in (
            ("/tokenize", {"prompt": words + "b"}),
            ("/tokenize", {"messages": [{"role": "user", "content": words}]}),
            ("/v1/completions", {"prompt": words + "b", "truncate_prompt_tokens": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": words}], "truncate_prompt_tokens": 2}),
        ):
            with mock.patch.object(client.app._tokenizer, "_encoding", None):
                reply = await client.post(path, fields)
            assert (reply.status, reply.error["param"]) == (400, "messages" if "messages" in fields else "prompt")
            assert re.search(r"the text has 5242\d\d characters, more than are tokenised", reply.error["message"])

    run(body)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        # 64 prompts of 1,000 tokens with 20 alternatives each: 1.3 million objects, twice
        ("/v1/completions", {"prompt": [[5] * 1000] * 64, "prompt_logprobs": 20}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [[5] * 1000] * 64, "echo": True, "logprobs": 20}, "logprobs"),
        ("/v1/completions", {"prompt": [[5] * 500] * 8, "n": 8, "prompt_logprobs": 20}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [5], "n": 20, "logprobs": 20, "max_tokens": 2000}, "logprobs"),
        ("/v1/chat/completions", {"n": 20, "logprobs": True, "top_logprobs": 20, "max_tokens": 2000}, "logprobs"),
        ("/v1/completions", {"prompt": [[5, 6]] * 700, "allowed_token_ids": list(range(1600))}, "prompt"),
        ("/v1/completions", {"prompt": [[5] * 400] * 5}, "prompt"),
        ("/v1/completions", {"prompt": [[5] * 400] * 2, "n": 3, "echo": True}, "echo"),
        ("/v1/completions", {"prompt": [5] * 700, "n": 3, "return_token_ids": True}, "return_token_ids"),
        ("/v1/completions", {"prompt": [[5]] * 7, "n": 128, "max_tokens": 1000}, "max_tokens"),
        ("/v1/chat/completions", {"n": 128, "max_completion_tokens": 4000}, "max_completion_tokens"),
    ],
)
def test_what_would_stop_others_while_it_is_written_down_is_refused(
    path: str, fields: dict[str, Any], param: str
) -> None:
    async def body(client: Client) -> None:
        chat = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {}
        reply = await client.post(path, {**chat, **fields})
        assert (reply.status, reply.error["param"]) == (400, param), reply.body
        assert "send several" in reply.error["message"]
        assert not client.fake.added

    prompts = 100_000 if "logprobs" in str(fields) else 1999
    with mock.patch.multiple("launch.serve.requests", MOST_PROMPT_TOKENS=prompts, MOST_ANSWER_TOKENS=500_000):
        run(body, ServedFake(model=FakeModel(vocab_size=2000, max_model_len=4096)))


def test_where_no_length_is_asked_for_what_is_possible_bounds_it() -> None:
    """Of a chat, whose answer may otherwise have all that fits."""

    async def body(client: Client) -> None:
        chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 4, "n": 2}
        with mock.patch("launch.serve.requests.MOST_SCORES", 100):
            reply = await client.post("/v1/chat/completions", {**chat, "seed": 1})
        assert reply.status == 200
        assert {request.sampling.max_tokens for request in client.fake.added} == {10}
        del chat["logprobs"], chat["top_logprobs"]
        with mock.patch("launch.serve.requests.MOST_ANSWER_TOKENS", 100):
            reply = await client.post("/v1/chat/completions", {**chat, "n": 5, "seed": 1})
        assert reply.status == 200
        assert {request.sampling.max_tokens for request in client.fake.added[2:]} == {20}

    run(body)


def test_long_answers_are_written_down_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    made = chunks.whole

    def noted(*parts: Any) -> bytes:
        seen.append(threading.current_thread() is threading.main_thread())
        return made(*parts)

    monkeypatch.setattr("launch.serve.generation.whole", noted)
    monkeypatch.setattr("launch.serve.generation._SHORT", len(PROMPT) + 3)

    async def body(client: Client) -> None:
        for fields in ({}, {"logprobs": 2}, {"n": 4}):
            reply = await client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "seed": 1, **fields})
            assert reply.status == 200
        assert seen == [True, False, False]

    run(body)


def test_a_cache_salt_reaches_the_engine() -> None:
    async def body(client: Client) -> None:
        chat = {"messages": [{"role": "user", "content": "a"}]}
        for path, fields in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", chat)):
            asked = {**fields, "max_tokens": 1, "cache_salt": "user 7"}
            assert (await client.post(path, asked)).status == 200
            for salt, words in (("", "cache_salt is empty"), ("x" * 1025, "cache_salt has more than 1024 characters")):
                reply = await client.post(path, {**asked, "cache_salt": salt})
                assert (reply.status, reply.error["param"]) == (400, "cache_salt")
                assert words in reply.error["message"]
        assert (await client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})).status == 200
        assert [request.sampling.cache_salt for request in client.fake.added] == ["user 7", "user 7", ""]

    run(body)


def test_a_panic_of_the_tokenizer_library_is_a_400() -> None:
    async def body(client: Client) -> None:
        for path, fields in (
            ("/v1/completions", {"prompt": "abc"}),
            ("/v1/completions", {"prompt": "abc" * 20_000}),
            ("/v1/completions", {"prompt": PROMPT, "bad_words": ["abc"]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
            ("/tokenize", {"prompt": "abc"}),
        ):
            reply = await client.post(path, fields)
            assert (reply.status, "cannot be tokenised" in reply.error["message"]) == (400, True)
        assert (await client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})).status == 200

    run(
        body,
        tokenizer=Tokenizer(small_tokenizers.panicking_backend()),
        fake=ServedFake(model=FakeModel(max_model_len=200_000)),
    )


def test_a_client_that_offers_http_2_is_served_in_http_1() -> None:
    """As Java's HttpClient does with its first request, and curl --http2: the body is not lost."""

    async def body(client: Client) -> None:
        asked = json.dumps({"prompt": PROMPT, "max_tokens": 2, "seed": 1}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: here\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            f"HTTP2-Settings: AAMAAABkAAQBAAAAAAIAAAAA\r\nContent-Length: {len(asked)}\r\n\r\n"
        ).encode()
        async with listening(client) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for data in (head + asked, head, asked):  # twice, the second time in two pieces
                writer.write(data)
                if data != head:
                    status = await reader.readline()
                    assert b" 200 " in status
                    length = 0
                    while (line := await reader.readline()) != b"\r\n":
                        name, _, value = line.partition(b":")
                        length = int(value) if name.lower() == b"content-length" else length
                    answer = json.loads(await reader.readexactly(length))
                    assert answer["usage"]["completion_tokens"] == 2
                else:
                    await writer.drain()
            writer.close()

    run(body)


def test_few_long_bodies_are_read_at_once_and_none_of_who_has_left() -> None:
    async def body(client: Client) -> None:
        asked = json.dumps({"prompt": [5] * 8, "max_tokens": 1, "seed": 1, "user": "x" * (20 << 10)}).encode()
        gone, turns = asyncio.Event(), client.app._incoming.medium
        async with turns.of("somebody"):
            waits = [asyncio.ensure_future(client.call("POST", "/v1/completions", asked, {}, gone)) for _ in range(2)]
            await client.until(lambda: [len(futures) for futures in turns.waiting.values()] == [2])
            gone.set()
        assert [(await one).status for one in waits] == [0, 0], "nobody reads an answer"
        assert not client.fake.added
        assert (await client.post("/v1/completions", asked)).status == 200

    run(body)


def test_an_echo_is_of_the_tokens_that_a_cut_prompt_has() -> None:
    async def body(client: Client) -> None:
        asked = {"prompt": "abcdefgh", "truncate_prompt_tokens": 2, "echo": True, "max_tokens": 2, "seed": 1}
        (choice,) = (await client.post("/v1/completions", asked)).json["choices"]
        kept = TOKENIZER.encode("abcdefgh")[-2:]
        assert choice["text"].startswith(TOKENIZER.decode(kept))

    run(body)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"echo": True}, "echo", "echo is not supported"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "is not supported"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids", "is not supported"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21, but must be 0 to 20"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0, but must be"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "Expected `int`"),
    ],
)
def test_a_chat_s_error_names_the_field_that_was_sent(fields: dict[str, Any], param: str, words: str) -> None:
    async def body(client: Client) -> None:
        asked = {"messages": [{"role": "user", "content": "x"}], "seed": 1, **fields}
        reply = await client.post("/v1/chat/completions", asked)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert words in reply.error["message"]

    run(body)


def test_a_body_that_is_too_long_is_413_however_it_comes() -> None:
    async def body(client: Client) -> None:
        data = json.dumps({"prompt": "a" * 3000}).encode()
        for headers in ({}, {"content_length": str(len(data))}, {"content_length": "9" * 30}):
            reply = await client.call("POST", "/v1/completions", data, dict(headers))
            assert reply.status == 413, reply.body

    run(body, max_body_bytes=2000)


def test_a_full_queue_is_503_with_retry_after_and_ready_says_so() -> None:
    async def body(client: Client) -> None:
        client.fake.hold.set()
        asked = {"prompt": PROMPT, "max_tokens": 3, "seed": 1}
        first = [asyncio.ensure_future(client.post("/v1/completions", asked)) for _ in range(4)]
        await asyncio.sleep(0.05)
        client.fake.hold.clear()
        client.fake.pause = 0.3
        reply = await client.post("/v1/completions", {**asked, "n": 4})
        assert (reply.status, reply.error["code"]) == (503, "queue_full")
        assert reply.headers["retry-after"] == "1"
        more = [asyncio.ensure_future(client.post("/v1/completions", asked)) for _ in range(4)]
        await client.until(lambda: client.engine.stats is not None and client.engine.stats.full)
        ready = await client.get("/ready")
        assert (ready.status, ready.json["reason"]) == (503, "the queue is full")
        client.fake.pause = 0.0
        assert {reply.status for reply in await asyncio.gather(*more)} <= {200, 503}
        assert {reply.status for reply in await asyncio.gather(*first)} <= {200, 503}
        await client.until(lambda: client.server.live == 0)
        await client.until(lambda: client.engine.stats is not None and not client.engine.stats.full)
        assert (await client.get("/ready")).status == 200
        assert (await client.post("/v1/completions", asked)).status == 200

    run(body, ServedFake(rows=2), max_queued=4)


def test_a_request_that_no_queue_would_ever_hold_is_a_400() -> None:
    async def body(client: Client) -> None:
        for asked, param in (({"prompt": "a", "n": 5}, "n"), ({"prompt": ["a"] * 5}, "prompt")):
            reply = await client.post("/v1/completions", {"max_tokens": 1, "seed": 1, **asked})
            assert (reply.status, reply.error["param"]) == (400, param)
            assert "5 answers of one request, but at most 4 may wait" in reply.error["message"]
        assert (await client.post("/v1/completions", {"prompt": "a", "n": 4, "max_tokens": 1})).status == 200

    run(body, max_queued=4)


def test_health_is_progress_and_metrics_answer_while_it_is_missing() -> None:
    async def body(client: Client) -> None:
        assert (await client.get("/health")).json == {"status": "ok"}
        assert client.engine.ready is not None
        client.engine.ready = replace_limit(client.engine.ready, 3.0)
        client.fake.hold.set()
        task = asyncio.ensure_future(client.post("/v1/completions", {"prompt": PROMPT, "seed": 1}))
        await client.until(lambda: "no progress" in (client.engine.health().trouble or ""))
        assert (await client.get("/health")).status == 503
        assert (await client.get("/ready")).status == 503
        assert b"vllm:num_requests_running" in (await client.get("/metrics")).body
        client.fake.silent = (1,)
        client.fake.hold.clear()
        await task
        await client.until(lambda: "rank 1" in (client.engine.health().trouble or ""))
        client.fake.silent = ()
        await client.until(lambda: client.engine.health().trouble is None)

    run(body)


def test_a_process_that_was_busy_does_not_take_its_own_silence_for_the_engine_s() -> None:
    async def body(client: Client) -> None:
        assert (await client.get("/health")).status == 200
        assert client.engine.ready is not None
        client.engine.ready = replace_limit(client.engine.ready, 3.0)
        time.sleep(2.5)  # nothing is read meanwhile; beats come twice a second
        assert "rank 0 has said nothing" in (client.engine.health().trouble or "")
        assert (await client.get("/health")).status == 200

    run(body)


def replace_limit(ready: Any, limit: float) -> Any:
    fields = {name: getattr(ready, name) for name in ready.__struct_fields__}
    return type(ready)(**{**fields, "limit": limit})


def test_a_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    class Waiting(ServedFake):
        def step(self) -> StepOutput:
            """While ``hold`` is set nobody gains a token, but orders are taken."""
            if not (self.hold.is_set() and self._running):
                return super().step()
            time.sleep(0.005)
            return StepOutput(self._now)

    async def body(client: Client) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 60, "seed": 1, "ignore_eos": True, "stream": True}
        running = asyncio.ensure_future(client.post("/v1/completions", asked))
        await client.until(lambda: client.server.live == 1)
        client.server.drain(60.0)
        await client.until(lambda: client.engine.draining)
        refused = await client.post("/v1/completions", asked)
        assert (refused.status, refused.error["code"]) == (503, "shutting_down")
        assert "retry-after" in refused.headers
        assert (await client.get("/ready")).status == 503
        assert (await client.get("/health")).status == 200
        client.fake.hold.clear()
        assert len(chunks_of(await running)) == 60
        await client.until(lambda: client.engine.ended is not None)
        assert (await client.get("/health")).status == 503

    fake = Waiting()
    fake.hold.set()  # what runs does not end before the checks do
    run(body, fake)


def test_who_still_waits_when_a_drain_ends_may_ask_another_server() -> None:
    """A stream without a token, too: after a 200 no client asks again."""

    async def body(client: Client) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 60, "seed": 1, "ignore_eos": True}
        running = asyncio.ensure_future(client.post("/v1/completions", asked))
        await client.until(lambda: client.engine.live == 1)
        waiting = [
            asyncio.ensure_future(client.post("/v1/completions", {**asked, "stream": stream}))
            for stream in (True, False)
        ]
        await client.until(lambda: client.engine.live == 3)
        client.server.drain(0.05)
        for one in [running, *waiting]:
            reply = await one
            assert (reply.status, reply.error["code"]) == (503, "shutting_down")
            assert "retry-after" in reply.headers

    run(body, ServedFake(pause=0.1, rows=1))


def test_what_fails_unforeseen_in_a_stream_is_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(client: Client) -> None:
        monkeypatch.setattr(chunks.ChunkWriter, "usage", mock.Mock(side_effect=ZeroDivisionError))
        asked = {"prompt": PROMPT, "max_tokens": 3, "seed": 1, "ignore_eos": True, "stream": True}
        reply = await client.post("/v1/completions", asked | {"stream_options": {"include_usage": True}})
        *tokens, (name, data), done = reply.events
        assert len(tokens) == 3
        assert (name, data["error"]["type"]) == ("error", "internal_server_error")
        assert done == ("", "[DONE]")

    run(body)


def test_what_a_drain_cannot_wait_for_is_told_that_the_server_ends() -> None:
    async def body(client: Client) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 60, "seed": 1, "ignore_eos": True}
        calls = [client.post("/v1/completions", {**asked, "stream": stream}) for stream in (True, False)]
        waiting = [asyncio.ensure_future(call) for call in calls]
        await client.until(lambda: client.app.metrics.own.counters["vllm:generation_tokens"] >= 4)
        client.server.drain(0.05)
        streamed, whole = await asyncio.gather(*waiting)
        name, data = streamed.events[-2]
        assert (name, data["error"]["code"]) == ("error", "shutting_down")
        assert (whole.status, whole.error["code"]) == (503, "shutting_down")

    run(body, ServedFake(pause=0.1))


def test_an_engine_that_fails_in_a_stream_is_an_error_event_that_clients_notice() -> None:
    class Failing(ServedFake):
        def step(self) -> Any:
            if self.most_live and self._now > 40:
                raise RuntimeError("the device is gone")
            return super().step()

    async def body(client: Client) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 60, "seed": 1, "ignore_eos": True, "stream": True}
        reply = await client.post("/v1/completions", asked)
        *tokens, (name, data), done = reply.events
        assert tokens
        assert name == "error"
        assert "the device is gone" in data["error"]["message"]
        assert set(data["error"]) == {"message", "type", "param", "code"}
        assert done == ("", "[DONE]")
        late = await client.post("/v1/completions", asked)
        assert late.status == 503

    with pytest.raises(RuntimeError, match="the device is gone"):
        run(body, Failing(pause=0.001))


def test_a_rank_0_that_is_gone_is_told_to_those_who_wait() -> None:
    async def body(client: Client) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 60, "seed": 1, "ignore_eos": True}
        calls = [client.post("/v1/completions", {**asked, "stream": stream}) for stream in (True, False)]
        waiting = [asyncio.ensure_future(call) for call in calls]
        await client.until(lambda: client.engine.live == 2)
        await client.until(lambda: client.app.metrics.own.counters["vllm:generation_tokens"] >= 4)
        client.engine.connection_lost(None)
        streamed, whole = await asyncio.gather(*waiting)
        name, data = streamed.events[-2]
        assert (name, data["error"]["code"]) == ("error", "engine_lost")
        assert (whole.status, whole.error["code"]) == (500, "engine_lost")
        assert (await client.get("/health")).json["reason"] == "the engine ended: rank 0 is gone"

    run(body, ServedFake(pause=0.1))


def test_what_fails_unforeseen_is_a_500_but_no_second_answer_behind_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> NoReturn:
        raise ZeroDivisionError

    async def breaks_off(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    async def body(client: Client) -> None:
        monkeypatch.setattr(client.app.metrics, "text", fails)
        failed = await client.get("/metrics")
        assert (failed.status, failed.error["type"]) == (500, "internal_server_error")
        monkeypatch.setattr(client.app, "_router", breaks_off)
        sent: list[str] = []

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message["type"])

        with pytest.raises(ZeroDivisionError):
            await client.app._answer({"type": "http", "method": "GET", "path": "/", "headers": []}, receive, send)
        assert sent == ["http.response.start"]

    run(body)


def test_logits_that_are_not_finite_are_a_500_of_that_request_alone() -> None:
    def fails(request: Request) -> bool:
        return list(request.prompt_token_ids) == [9, 9]

    async def body(client: Client) -> None:
        bad = await client.post("/v1/completions", {"prompt": [9, 9], "seed": 1})
        assert (bad.status, bad.error["type"]) == (500, "internal_server_error")
        streamed = await client.post("/v1/completions", {"prompt": [9, 9], "seed": 1, "stream": True})
        assert (streamed.status, streamed.error["type"]) == (500, "internal_server_error"), "no token had come"
        assert (await client.post("/v1/completions", {"prompt": PROMPT, "seed": 1})).status == 200

    run(body, ServedFake(fail=fails))


def test_a_probe_does_not_wait_for_requests_that_came_before_it() -> None:
    async def body(client: Client) -> None:
        body = {"prompt": PROMPT, "max_tokens": 2, "n": 2, "ignore_eos": True}
        asked = [asyncio.ensure_future(client.post("/v1/completions", {**body, "seed": i})) for i in range(40)]
        probed = asyncio.ensure_future(client.get("/health"))
        assert (await probed).status == 200
        assert client.engine.live < 40, "most of the requests were not looked at yet"
        assert {(await one).status for one in asked} == {200}

    run(body)


def test_what_the_scheduler_refuses_is_told_before_a_stream_begins() -> None:
    async def body(client: Client) -> None:
        reply = await client.post("/v1/completions", {"prompt": PROMPT, "stream": True})
        assert (reply.status, reply.error["message"]) == (400, "no such memory")

    run(body, ServedFake(reject=lambda request: "no such memory"))


@pytest.mark.parametrize("stream", [False, True])
def test_who_is_refused_is_counted_as_refused_and_as_no_end(stream: bool) -> None:
    """By the engine, of which the first refuses some: a full queue, what it cannot hold; and at the door. One a
    request, however many answers it wants."""
    reasons = {7: "queue full: 4 requests wait already", 8: "no such memory"}

    async def counted(client: Client) -> dict[str, dict[str, float]]:
        page = (await client.get("/metrics")).body.decode()
        samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
        wanted = {"vllm:request_success_total": "finished_reason", "lockstride:request_rejections_total": "reason"}
        return {
            name: {s.labels[label]: s.value for s in samples if s.name == name and s.value}
            for name, label in wanted.items()
        }

    async def body(client: Client) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True, "stream": stream}
        found = [(await client.post("/v1/completions", {**asked, "seed": seed})).status for seed in (1, 7, 8)]
        found.append((await client.post("/v1/completions", {**asked, "seed": 7, "n": 2})).status)
        assert found == [200, 503, 400, 503]
        client.engine.draining = True
        assert (await client.post("/v1/completions", asked)).status == 503
        assert await counted(client) == {
            "vllm:request_success_total": {"length": 1},
            "lockstride:request_rejections_total": {"queue_full": 2, "invalid": 1, "shutting_down": 1},
        }

    run(body, ServedFake(reject=lambda request: reasons.get(request.sampling.seed or 0, "")))


PLACES = {
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "compared": "lockstride:spec_decode_num_compared_tokens",
}


def test_metrics_are_parsed_and_have_the_names_that_tools_read() -> None:
    async def body(client: Client) -> None:
        await client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 9, "seed": 1, "ignore_eos": True})
        await client.get("/never/heard/of")
        await client.until(lambda: client.engine.stats is not None and client.engine.stats.counters["steps"] > 8)
        page = (await client.get("/metrics")).body.decode()
        families = {family.name: family for family in text_string_to_metric_families(page)}
        samples = {(s.name, *sorted(s.labels.items())): s.value for f in families.values() for s in f.samples}

        def value(name: str, **labels: str) -> float:
            return samples[name, *sorted({**labels, "model_name": "m", "engine": "0"}.items())]

        assert value("vllm:prompt_tokens_total") == 3
        assert value("vllm:generation_tokens_total") == 9
        assert value("vllm:request_success_total", finished_reason="length") == 1
        assert value("vllm:inter_token_latency_seconds_count") == 8
        assert value("vllm:time_to_first_token_seconds_count") == 1
        assert value("vllm:iteration_tokens_total_sum") == 9
        assert value("lockstride:chain_breaks_total", reason="start") == 1
        assert value("lockstride:ghost_rows_total") == 2
        assert value("lockstride:agreement_seconds_bucket", le="2e-05") == 3
        assert value("lockstride:agreement_seconds_sum") == 5e-5
        http = {name: number for name, number in samples.items() if name[0] == "http_requests_total"}
        assert ("http_requests_total", ("handler", "unknown"), ("method", "GET"), ("status", "4xx")) in http
        for name in (
            *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
            *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
            *("num_preemptions", "prefix_cache_hits", "prefix_cache_queries", "e2e_request_latency_seconds"),
            *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        ):
            assert f"vllm:{name}" in families

    run(body)


def test_metrics_say_how_weights_and_cache_are_stored() -> None:
    fake = ServedFake()
    fake.config = replace(fake.config, kv_cache_dtype="fp8")
    fake.model_config = replace(fake.model_config, quantization="compressed-tensors")

    async def body(client: Client) -> None:
        families = text_string_to_metric_families((await client.get("/metrics")).body.decode())
        (labels,) = [s.labels for family in families for s in family.samples if s.name == "vllm:cache_config_info"]
        assert (labels["cache_dtype"], labels["quantization"]) == ("fp8", "compressed-tensors")

    run(body, fake)


def test_what_windows_gained_is_told_by_position() -> None:
    async def body(client: Client) -> None:
        await client.post("/v1/completions", {"prompt": PROMPT, "seed": 1})
        engine = client.engine
        assert engine.stats is not None
        counted = {f"spec_{what}_per_position{{{i}}}": 10.0 * i + n for i in range(2) for n, what in enumerate(PLACES)}
        engine.stats = msgspec.structs.replace(engine.stats, counters=counted)
        page = (await client.get("/metrics")).body.decode()
        samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
        found = {(s.name, s.labels["position"]): s.value for s in samples if "position" in s.labels}
        assert found == {
            (f"{name}_per_pos_total", str(i)): 10.0 * i + n for i in range(2) for n, name in enumerate(PLACES.values())
        }

    run(body)


def test_fallbacks_and_late_captures_are_told_by_reason() -> None:
    counted = {"fallbacks{eager_prefill_scored}": 2.0, "fallbacks{eager_prefill_beyond_buckets}": 3.0}
    counted |= {"late_captures{random, penalties}": 1.0}

    async def body(client: Client) -> None:
        await client.post("/v1/completions", {"prompt": PROMPT, "seed": 1})
        engine = client.engine
        assert engine.stats is not None
        engine.stats = msgspec.structs.replace(engine.stats, counters=counted)
        page = (await client.get("/metrics")).body.decode()
        samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
        taken = {s.labels["what"]: s.value for s in samples if s.name == "lockstride:fallbacks_total"}
        assert taken == {"eager_prefill_scored": 2, "eager_prefill_beyond_buckets": 3}
        late = {s.labels["variant"]: s.value for s in samples if s.name == "lockstride:late_captures_total"}
        assert late == {"random, penalties": 1}

    run(body)


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    dashboard = json.loads((Path(__file__).parents[3] / "docs/grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"(?:vllm:|lockstride:|http_)\w+", query)}
    labels = {name for query in queries for by in re.findall(r"by \((\w+)\)", query) for name in [by]}

    with rig(depth=1) as real:
        run_engine(real, [request_of(0, [1, 2, 3], max_tokens=3)])
        counted = {name: float(value) for name, value in real.counters.items()}

    async def body(client: Client) -> None:
        await client.post("/v1/completions", {"prompt": PROMPT, "seed": 1})
        engine = client.engine
        assert engine.stats is not None
        engine.stats = msgspec.structs.replace(engine.stats, counters=counted)
        page = (await client.get("/metrics")).body.decode()
        samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
        assert asked <= {sample.name for sample in samples}, asked - {sample.name for sample in samples}
        assert labels - {"le"} <= {label for sample in samples for label in sample.labels}

    run(body)
    assert len(asked) > 15


def test_tools_reach_the_template_and_a_choice_of_none_of_them_is_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

    async def body(client: Client) -> None:
        asked = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "max_tokens": 3, "seed": 1}
        with_tools = (await client.post("/v1/chat/completions", asked)).json["usage"]["prompt_tokens"]
        without = (await client.post("/v1/chat/completions", {**asked, "tool_choice": "none"})).json["usage"]
        assert with_tools > without["prompt_tokens"]
        for choice in ("always", {"type": "function", "function": {"name": "g"}}, {"type": "function"}, 5):
            reply = await client.post("/v1/chat/completions", {**asked, "tool_choice": choice})
            assert (reply.status, reply.error["param"]) == (400, "tool_choice")

    run(body, ServedFake(model=FakeModel(max_model_len=400)), tool_call_parser="hermes")


@pytest.mark.parametrize("stop", [None, "SEE", "never </tool_call>"])
@pytest.mark.parametrize("special", [False, True])
def test_tool_calls_whose_marks_are_tokens(monkeypatch: pytest.MonkeyPatch, special: bool, stop: str | None) -> None:
    """Special or not, whole and streamed, with a call's closing mark in its arguments, and with text that is held back
    for a stop string before a mark."""
    backend = tokenizers.Tokenizer.from_str(small_tokenizers.byte_level_backend().to_str())
    backend.add_tokens([tokenizers.AddedToken(mark, special=special) for mark in ("<tool_call>", "</tool_call>")])
    tokenizer = Tokenizer(backend)
    arguments = '{"text": "the </tool_call> mark"}'
    text = 'S<tool_call>\n{"name": "f", "arguments": ' + arguments + "}\n</tool_call>"
    ids = [*tokenizer.encode(text, add_special_tokens=False), 0]
    monkeypatch.setattr(fake_engine, "scripted_token", lambda request, position, vocab_size: ids[position])
    tool = {"type": "function", "function": {"name": "f"}}

    async def body(client: Client) -> None:
        asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 99, "stop": stop, "seed": 1}
        choice = (await client.post("/v1/chat/completions", {**asked, "tools": [tool]})).json["choices"][0]
        chunks = chunks_of(await client.post("/v1/chat/completions", {**asked, "tools": [tool], "stream": True}))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0].pop("role") == "assistant"
        streamed = merged(deltas)
        assert streamed["content"] == choice["message"]["content"] == "S"
        for found in (streamed["tool_calls"], choice["message"]["tool_calls"]):
            assert [call["function"] for call in found] == [{"name": "f", "arguments": arguments}]
        assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        plain = (await client.post("/v1/chat/completions", asked)).json["choices"][0]["message"]["content"]
        assert plain == tokenizer.decode(ids[:-1]), "without tools special tokens are no text"

    fake = ServedFake(model=FakeModel(vocab_size=362, max_model_len=400))
    run(body, fake, tokenizer=tokenizer, tool_call_parser="hermes")


def test_comments_are_sent_only_where_they_are_asked_for() -> None:
    async def body(client: Client) -> None:
        asked = {"prompt": PROMPT, "max_tokens": 4, "seed": 1, "stream": True, "ignore_eos": True}
        reply = await client.post("/v1/completions", asked)
        lines = reply.body.decode().split("\n")
        assert sum(line.startswith("data: {") for line in lines) == 4
        assert any(line.startswith(":") for line in lines) == (client.app.settings.comment_seconds > 0)

    run(body, ServedFake(pause=0.03))
    run(body, ServedFake(pause=0.03), comment_seconds=0.005)


def test_seeds_that_nobody_gave_differ() -> None:
    async def body(client: Client) -> None:
        replies = [await client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 12}) for _ in range(3)]
        assert len({reply.json["choices"][0]["text"] for reply in replies}) > 1

    run(body)


def test_tokens_that_are_no_int32_are_refused() -> None:
    with pytest.raises(ValueError, match="no int32"):
        unpack_ids(b"abc")


def test_sampling_params_travel_unchanged() -> None:
    async def body(client: Client) -> None:
        given: dict[str, Any] = {
            "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5,
            "presence_penalty": 0.25, "frequency_penalty": -0.5, "min_tokens": 2, "max_tokens": 6, "seed": -4,
            "stop_token_ids": [11, 12], "ignore_eos": True, "priority": -3,
        }  # fmt: skip
        assert (await client.post("/v1/completions", {"prompt": PROMPT, "n": 2, **given})).status == 200
        sent = [request.sampling for request in client.fake.added]
        base = SamplingParams(**{**{k: v for k, v in given.items() if k != "priority"}, "stop_token_ids": (11, 12)})
        assert sent == [replace(base, seed=-4), replace(base, seed=-3)]
        assert [request.priority for request in client.fake.added] == [-3, -3]
        assert client.fake.added[0].stop_token_ids == (11, 12)

    run(body)


def test_a_request_that_comes_while_a_turn_is_put_off_is_in_it() -> None:
    class Late(ServedFake):
        """Whose first turn is put off, once, until a second request is there."""

        def __init__(self) -> None:
            super().__init__(lag=0)
            self.server: EngineServer | None = None
            self.put_off = 0
            self.added_at: list[int] = []

        def slack(self) -> float:
            if self._now > 0 or self.server is None or self.server.live > 1:
                return 0.0
            self.put_off += 1
            return 0.0015  # once more, until it has come

        def add(self, request: Request) -> None:
            self.added_at.append(self._now)
            super().add(request)

    fake = Late()

    async def body(client: Client) -> None:
        fake.server = client.server
        first = asyncio.ensure_future(client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "seed": 1}))
        await client.until(lambda: fake.put_off > 0)
        second = await client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "seed": 2})
        assert ((await first).status, second.status) == (200, 200)
        assert fake.added_at == [0, 0]

    run(body, fake)


def test_a_client_that_left_while_it_waited_for_its_turn_costs_the_engine_nothing() -> None:
    """Clients may come and leave faster than requests are read: those that are gone must not pile up."""

    async def body(client: Client) -> None:
        asked = json.dumps({"prompt": PROMPT, "max_tokens": 4, "seed": 1}).encode()
        gone = asyncio.Event()
        async with client.app._incoming.on_loop.of("somebody"):
            waits = asyncio.ensure_future(client.call("POST", "/v1/completions", asked, {}, gone))
            await client.until(lambda: bool(client.app._incoming.on_loop.waiting))
            gone.set()
        reply = await waits
        assert reply.status == 0, "nobody reads an answer"
        assert (await client.post("/v1/completions", asked)).status == 200
        assert len(client.fake.added) == 1

    run(body)


def test_a_call_that_must_come_and_a_strict_tool_have_a_grammar() -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    strict = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    unlike = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}

    async def body(client: Client) -> None:
        async def grammar(status: int = 200, **fields: object) -> str:
            client.fake.added.clear()
            asked = {
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 3,
                "seed": 1,
                "tools": [tool],
                **fields,
            }
            reply = await client.post("/v1/chat/completions", asked)
            assert reply.status == status, reply.body
            return client.fake.added[0].sampling.grammar if status == 200 else str(reply.error["message"])

        assert await grammar() == ""
        required = await grammar(tool_choice="required")
        named = await grammar(tool_choice={"type": "function", "function": {"name": "f"}})
        assert required not in ("", named)
        assert named == await grammar(tool_choice="required", parallel_tool_calls=False)
        assert '\\"arguments\\": ' in required
        free = await grammar(tools=[strict])
        assert free not in ("", required)
        assert "tools[0].function.parameters: keyword 'not' is not supported" in await grammar(400, tools=[unlike])
        form: dict[str, Any] = {"response_format": {"type": "json_object"}}
        assert await grammar(**form) != ""
        assert "no other form" in await grammar(400, tool_choice="required", **form)
        assert "one constraint" in await grammar(400, structured_outputs={"regex": "a", "choice": ["b"]})
        assert "one form" in await grammar(400, structured_outputs={"regex": "a"}, **form)
        assert "schema" in await grammar(400, response_format={"type": "json_schema"})
        for form in ({"structured_outputs": {"json_object": False, "regex": "a"}}, {"guided_choice": ["b"]}):
            await grammar(**form)
        counts = client.app.metrics.all()
        assert counts.constrained == {"tools": 4, "json_object": 1, "regex": 1, "choice": 1}
        assert counts.unconstrained == {"tools": 2, "structured_outputs": 2, "response_format": 1}
        page = (await client.get("/metrics")).body.decode()
        found = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        kinds = {s.labels["kind"]: s.value for s in found if s.name == "lockstride:structured_output_requests_total"}
        fields = {s.labels["field"]: s.value for s in found if s.name == "lockstride:structured_output_refusals_total"}
        assert (kinds, fields) == (counts.constrained, counts.unconstrained)

    run(body, ServedFake(model=FakeModel(vocab_size=400, max_model_len=400)), tool_call_parser="hermes")


def test_an_answer_without_a_next_token_is_the_fault_of_its_grammar_or_of_the_engine() -> None:
    """A grammar that takes too much work behind its first tokens is a 400, as one that is refused before them."""
    pytest.importorskip("llguidance")

    async def body(client: Client) -> None:
        asked = {"prompt": "x", "max_tokens": 9, "seed": 1}
        reply = await client.post("/v1/completions", asked)
        assert (reply.status, reply.error["code"]) == (500, "engine_error"), reply.body
        reply = await client.post("/v1/completions", {**asked, "structured_outputs": {"regex": "a+"}})
        assert (reply.status, reply.error["param"]) == (400, "structured_outputs")
        chat = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 9, "seed": 1}
        reply = await client.post("/v1/chat/completions", {**chat, "response_format": {"type": "json_object"}})
        assert (reply.status, reply.error["param"]) == (400, "response_format")

    run(body, ServedFake(model=FakeModel(vocab_size=400, max_model_len=400), fail=lambda request: True))
