"""Lines of the three forms, right but for the fields that a test gives them."""

from __future__ import annotations

import json
from typing import Any

# Fields of OpenAI's bodies at values that change no answer.
NEUTRAL: dict[str, Any] = {
    "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s",
    "prompt_cache_key": "k", "response_format": {"type": "text"}, "best_of": 1, "skip_special_tokens": True,
    "stream": False, "stream_options": None, "logit_bias": {}, "bad_words": [],
}  # fmt: skip
NEUTRAL_IN_CHATS: dict[str, Any] = {
    "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "functions": [], "function_call": "none",
    "modalities": ["text"], "audio": None, "echo": False, "add_generation_prompt": True, "top_logprobs": 0,
    "logprobs": False, "documents": [],
}  # fmt: skip


def simple(**fields: Any) -> bytes:
    return json.dumps({"id": "x", "prompt": "the dog"} | fields).encode()


def batch(url: str = "/v1/completions", **fields: Any) -> bytes:
    body = {"prompt": "the dog"} | fields
    return json.dumps({"custom_id": "x", "method": "POST", "url": url, "body": body}).encode()


def chat(**fields: Any) -> bytes:
    body = {"messages": [{"role": "user", "content": "hello"}]} | fields
    return json.dumps({"custom_id": "x", "url": "/v1/chat/completions", "body": body}).encode()


def envelope(**fields: Any) -> bytes:
    """The batch form with something else around the body; a field that is None is left out."""
    line = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "the dog"}} | fields
    return json.dumps({name: value for name, value in line.items() if value is not None}).encode()
