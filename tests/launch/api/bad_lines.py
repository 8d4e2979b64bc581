"""Lines that must not work: some written by hand, and a generator of as many as one likes.

Every one is wrong whatever the model, as long as it has a vocabulary of 360 and a context of 64 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.launch.api.bad_lines_by_hand import MORE
from tests.launch.api.line_forms import batch, chat, envelope, simple

# The line, and words that its error must have.
HAND_WRITTEN: list[tuple[bytes, str]] = [
    # not JSON, or not an object
    (b"{", "truncated"),
    (b"hello", "malformed"),
    (b"null", "object"),
    (b"[]", "object"),
    (b'"text"', "object"),
    (b"17", "object"),
    (b'{"id": "x", "prompt": "a"} {}', "trailing"),
    (b"{'id': 'x', 'prompt': 'a'}", "malformed"),
    (b'{"id": "x", "prompt": "a",}', "malformed"),
    (b'{"id": "x" "prompt": "a"}', "malformed"),
    (b'{"id": "x", "prompt": "a\x00b"}', "malformed"),
    (b'{"id": "x", "prompt": "\\ud800"}', "truncated"),
    (b'{"id": "x", "prompt": "\xff\xfe"}', "UTF-8"),
    (b'{"id": "\xc3\x28", "prompt": "a"}', "UTF-8"),
    (b"\x00\x01\x02", "malformed"),
    (b'{"id": "x", "prompt": "a", "deep": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nested too deeply"),
    (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nested too deeply"),
    (b'{"id": "x", "prompt": "a", "deep": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "it has too many values"),
    # ids
    (simple(id=""), "id has 0 characters"),
    (simple(id="y" * 600), "id has 600 characters"),
    (simple(id=1.5), "id is a float"),
    (simple(id=True), "id is a bool"),
    (simple(id=[]), "id is a list"),
    (simple(id=2**70), "id"),
    (b'{"url": "/v1/completions", "body": {"prompt": "a"}}', "custom_id is missing"),
    (b'{"custom_id": 7, "url": "/v1/completions", "body": {"prompt": "a"}}', "custom_id is a int"),
    # fields
    (simple(temprature=1), "unknown field `temprature`"),
    (simple(messages=[]), "unknown field"),
    (simple(logit_bias={"1": 200}), "logit_bias of token 1 is 200"),
    (simple(logit_bias={"x": 1}), "$.logit_bias"),
    (simple(logit_bias={"99999": 1}), "logit_bias has 99999"),
    (simple(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias has 1025 tokens"),
    (simple(allowed_token_ids=[-1]), "allowed_token_ids has -1"),
    (simple(allowed_token_ids=["a"]), "$.allowed_token_ids"),
    (simple(bad_words=[" "]), "at least one letter"),
    (simple(bad_words=["x" * 2000]), "a word of 2000 letters"),
    (simple(bad_words=["zyxwvutsrqponmlkj"]), "but may be 1 to 16"),
    (simple(bad_words="x"), "$.bad_words"),
    (simple(bad_words_token_ids=[[1]]), "unknown field"),
    (batch(best_of=2), "best_of is not supported as 2: this engine does not have it; leave it out, or send 1"),
    (batch(functions=[]), "unknown field `functions`"),
    (batch(return_token_ids=True), "return_token_ids is not supported as true: only `serve` has it"),
    (batch(stream_options={"include_usage": True}), "stream_options is not supported"),
    (simple(echo=True), "unknown field `echo`"),
    (chat(echo=True), "echo is not supported as true: a chat's answer does not repeat its messages"),
    (batch(echo=1), "$.echo"),
    (batch(echo=True, logprobs=21), "logprobs is 21"),
    (batch(prompt_logprobs=-1), "prompt_logprobs is -1"),
    (simple(prompt_logprobs=21), "prompt_logprobs is 21"),
    (batch(stream=True), "stream is true"),
    (batch(url="/v1/embeddings"), "/v1/embeddings"),
    (b'{"custom_id": "x", "body": {"prompt": "a"}}', "url"),
    (b'{"custom_id": "x", "url": "/v1/completions"}', "body"),
    (b'{"custom_id": "x", "url": "/v1/completions", "body": []}', "object"),
    (b'{"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {"prompt": "a"}}', "GET"),
    # prompts
    (b'{"id": "x"}', "0 of prompt and prompt_token_ids"),
    (simple(prompt_token_ids=[1]), "2 of prompt and prompt_token_ids"),
    (simple(prompt=""), "empty"),
    (simple(prompt=7), "$.prompt"),
    (simple(prompt=["a", "b"]), "$.prompt"),
    (batch(prompt=["a", ""]), "the prompt is empty: give at least one token"),
    (batch(prompt=["a"] * 9, n=128), "9 prompts with n 128 are more than 1024 answers"),
    (batch(max_tokens=0), "must be at least 1 unless echo is true"),
    (batch(prompt=[]), "empty"),
    (simple(prompt="x" * 500), "64"),
    (simple(prompt=None, prompt_token_ids=[]), "empty"),
    (simple(prompt=None, prompt_token_ids=[5] * 64), "64 tokens"),
    (simple(prompt=None, prompt_token_ids=[360]), "360"),
    (simple(prompt=None, prompt_token_ids=[1, -1]), "-1"),
    (simple(prompt=None, prompt_token_ids=[2**40]), str(2**40)),
    (simple(prompt=None, prompt_token_ids=[1.0]), "$.prompt_token_ids[0]"),
    (simple(prompt=None, prompt_token_ids=["1"]), "$.prompt_token_ids[0]"),
    (simple(prompt=None, prompt_token_ids=[True]), "$.prompt_token_ids[0]"),
    # chats
    (chat(messages=[]), "messages is empty"),
    (chat(messages="hello"), "$.messages"),
    (chat(messages=[{"role": "user"}]), "content"),
    (chat(messages=[{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]), "image_url"),
    (chat(messages=[{"role": "nobody", "content": "a"}]), "unknown role"),
    (chat(messages=[{"role": "user", "content": "a", "tool_calls": {}}]), "messages[0].tool_calls is {}, but must be"),
    (chat(messages=[{"role": "assistant", "tool_calls": [{}]}]), "messages[0].tool_calls[0] has no function: send"),
    (chat(messages=[{"role": "user", "contents": "a", "content": "b"}]), "messages[0] has an unknown field `contents`"),
    (chat(messages=[{"role": "tool", "content": None}]), "messages[0] has no content: send a text"),
    (chat(top_logprobs=3), "logprobs is not true"),
    (chat(logprobs=True, top_logprobs=21), "20"),
    (chat(logprobs=1), "$.logprobs"),
    (chat(chat_template_kwargs={"messages": []}), "'messages'"),
    (chat(tools=[{"type": "function", "function": {"name": "f"}}]), "tools is not supported as [{"),
    (chat(tool_choice="required"), "a batch has no tools; leave it out, or send"),
    (chat(max_tokens=0), "max_tokens is 0"),
    # sampling
    (b'{"id": "x", "prompt": "a", "temperature": NaN}', "malformed"),
    (b'{"id": "x", "prompt": "a", "temperature": Infinity}', "malformed"),
    (b'{"id": "x", "prompt": "a", "temperature": 1e999}', "out of range"),
    (simple(temperature=-0.5), "temperature is -0.5"),
    (simple(temperature="1"), "$.temperature"),
    (simple(temperature=1e300), "temperature is 1e+300"),
    (simple(repetition_penalty=1e-300), "repetition_penalty is 1e-300"),
    (simple(top_p=0), "top_p is 0"),
    (simple(top_p=1.01), "at most 1"),
    (simple(min_p=-0.1), "min_p"),
    (simple(top_k=-2), "top_k is -2"),
    (simple(top_k=2**80), "top_k is a number of 81 bits"),
    (simple(top_k=1.5), "$.top_k"),
    (simple(repetition_penalty=0), "repetition_penalty"),
    (simple(presence_penalty=2.5), "presence_penalty"),
    (simple(frequency_penalty=-3), "frequency_penalty"),
    (simple(max_tokens=0), "max_tokens is 0"),
    (simple(max_tokens=-5), "max_tokens is -5"),
    (simple(max_tokens=True), "$.max_tokens"),
    (simple(max_tokens=4, min_tokens=5), "min_tokens is 5"),
    (simple(min_tokens=-1), "min_tokens is -1"),
    (simple(n=0), "n is 0"),
    (simple(n=10**6), "n is 1000000"),
    (simple(seed=2**63), "seed"),
    (simple(seed=0.5), "$.seed"),
    (simple(logprobs=-1), "logprobs"),
    (simple(logprobs=21), "logprobs is 21"),
    (simple(stop=""), "0 characters"),
    (simple(stop=["a"] * 17), "17 strings"),
    (simple(stop=[3]), "$.stop"),
    (simple(stop="s" * 2000), "2000 characters"),
    (simple(stop_token_ids=[360]), "stop_token_ids has 360"),
    (simple(stop_token_ids=list(range(1, 17))), "17 stop token ids"),
    (simple(ignore_eos=1), "$.ignore_eos"),
    (simple(priority=2**31), "priority"),
    *MORE,
]


def _mutate_bytes(rng: random.Random) -> bytes:
    """A good line with some of its bytes cut off, so that it cannot be an object any more."""
    line = simple(id=f"g{rng.randrange(10**9)}", max_tokens=rng.randrange(1, 9))
    return line[: rng.randrange(1, len(line) - 1)]


def _wrong_value(rng: random.Random) -> bytes:
    """One field with a value of a wrong type or out of range."""
    field = rng.choice(("temperature", "top_p", "top_k", "max_tokens", "n", "seed", "logprobs", "stop", "min_p"))
    wrong: list[Any] = [-1 - rng.random(), {"a": rng.random()}, [[rng.random()]], 7 if field == "stop" else "true"]
    make = rng.choice((simple, batch, chat))
    return make(**{field: rng.choice(wrong)})


def _wrong_ids(rng: random.Random) -> bytes:
    """A prompt of ids of which one is out of the vocabulary."""
    ids = [rng.randrange(360) for _ in range(rng.randrange(1, 30))]
    ids[rng.randrange(len(ids))] = rng.choice((-1, 1)) * rng.randrange(360, 2**62)
    return simple(prompt=None, prompt_token_ids=ids)


def _unknown_field(rng: random.Random) -> bytes:
    make: Callable[..., bytes] = rng.choice((simple, batch, chat))
    return make(**{f"field_{rng.randrange(10**6)}": rng.choice((None, 1, "a", []))})


def _too_long(rng: random.Random) -> bytes:
    return simple(prompt=None, prompt_token_ids=[5] * rng.randrange(64, 400))


def _rubbish(rng: random.Random) -> bytes:
    """Bytes that start no JSON object; no line ends, and no blank line."""
    return b"\x01" + bytes(byte for byte in rng.randbytes(rng.randrange(1, 60)) if byte not in b"\r\n")


def _not_utf8(rng: random.Random) -> bytes:
    """A byte that begins no character, in the middle of a text."""
    line = bytearray(simple(prompt="the quick brown fox"))
    line[line.index(b"quick") + rng.randrange(5)] = rng.choice((0x80, 0xC0, 0xF8, 0xFF))
    return bytes(line)


def _deep(rng: random.Random) -> bytes:
    depth = rng.randrange(2, 3000)
    opened, closed = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    field = rng.choice((b"prompt", b"prompt_token_ids", b"stop", b"temperature", b"nowhere"))
    return b'{"id": "x", "%s": ' % field + opened * depth + b"1" + closed * rng.randrange(depth + 1) + b"}"


def _wrong_envelope(rng: random.Random) -> bytes:
    wrong: dict[str, list[Any]] = {
        "custom_id": [1, 1.5, [], {}, "", "z" * rng.randrange(513, 900)],
        "method": ["GET", "", 1, []],
        "url": ["", "/", "/v1/completion", "/v1/embeddings", 1, [], "/v1/chat/completions"],
        "body": ["", 1, [], {}, {"prompt": rng.random()}, {"prompt": ""}],
    }
    field = rng.choice(list(wrong))
    return envelope(**{field: rng.choice(wrong[field])})


def _wrong_chat(rng: random.Random) -> bytes:
    """A sound message or more, and one that is not."""
    messages: list[Any] = [{"role": "user", "content": "a"} for _ in range(rng.randrange(3))]
    wrong: list[Any] = [None, rng.random(), "a", {}, {"role": "user"}, {"role": f"r{rng.random()}", "content": "a"}]
    wrong += [{"role": "user", "content": [{"type": "audio", "text": "a"}]}, {"role": "user", "content": "b" * 400}]
    messages.insert(rng.randrange(len(messages) + 1), rng.choice(wrong))
    return chat(messages=messages)


def _extreme(rng: random.Random) -> bytes:
    """A parameter far outside of its range, or no number at all."""
    field = rng.choice(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"))
    finite = (f"-{2.1 + rng.random()}", f"1e{rng.randrange(4, 300)}")
    value = rng.choice(("NaN", "Infinity", "-Infinity", "1e999", "-1e999", *finite))
    make: Callable[..., bytes] = rng.choice((simple, batch, chat))
    return make(**{field: 77.5}).replace(b"77.5", value.encode())


def _wrong_stop(rng: random.Random) -> bytes:
    wrong: list[Any] = ["", ["a"] * rng.randrange(17, 90), "s" * rng.randrange(1025, 3000), [rng.random()], {"a": 1}]
    many = list(range(1, 1 + rng.randrange(16, 90)))
    ids: list[Any] = [[rng.randrange(360, 2**40)], [-1 - rng.randrange(9)], many, 5]
    field, values = rng.choice((("stop", wrong), ("stop_token_ids", ids)))
    make: Callable[..., bytes] = rng.choice((simple, batch, chat))
    return make(**{field: rng.choice(values)})


_KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    _mutate_bytes,
    _wrong_value,
    _wrong_ids,
    _unknown_field,
    _too_long,
    _rubbish,
    _not_utf8,
    _deep,
    _wrong_envelope,
    _wrong_chat,
    _extreme,
    _wrong_stop,
)


def generated(how_many: int, seed: int = 0) -> Iterator[bytes]:
    """``how_many`` bad lines, the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(how_many):
        yield rng.choice(_KINDS)(rng)
