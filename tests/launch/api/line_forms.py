"""Lines of the three forms, right but for the fields that a test gives them."""

from __future__ import annotations

import json
from typing import Any


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
