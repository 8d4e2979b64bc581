"""The bodies that the routes take, as typed structures.

Knows: field names and types, what is refused unless it is at its default. Does not know: legal ranges
(runtime/frontend/validation.py), what is done with a body (completions.py, chat.py).

Unlike a line of `generate`, a body may have fields that nobody knows: clients send what other servers understand. A
null is the same as a field that is left out. But a field that would change the answer, and that this engine does not
have, is refused by name: ignoring it would give wrong results.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from launch.api.body_rules import REFUSED, Neutral, refuse
from launch.api.schema import ChatFields, CompletionFields, Tool
from launch.serve.errors import bad_request, undecodable
from runtime.frontend.validation import RequestError

_Typed = TypeVar("_Typed")


class CompletionBody(CompletionFields, kw_only=True, forbid_unknown_fields=False):
    """Of /v1/completions: one prompt or several, each as text or as token ids."""

    prompt: str | list[str | int | list[int]]


class ChatBody(ChatFields, kw_only=True, forbid_unknown_fields=False):
    """Of /v1/chat/completions."""


class TokenizeBody(msgspec.Struct):
    """Of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Refused unless at their default (body_rules.REFUSED).
    continue_final_message: Any = None
    chat_template: Any = None


class DetokenizeBody(msgspec.Struct):
    """Of /detokenize."""

    tokens: list[int]
    model: str | None = None


def decode(data: bytes, kind: type[_Typed]) -> _Typed:
    """The body. Raises ApiError 400, naming the field where one is to blame."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
        raise undecodable(error) from None


def refuse_unsupported(body: object, *lacking: Neutral) -> None:
    """Raises ApiError for the first field that this engine, or this route, lacks and that is not at its default."""
    try:
        for table in (REFUSED, *lacking):
            refuse(body, table)
    except RequestError as error:
        raise bad_request(str(error), error.field, "unsupported_parameter") from None
