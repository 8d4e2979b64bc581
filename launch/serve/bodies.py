"""The bodies that the routes take, as typed structures.

Knows: field names and types, what is refused unless it is at its default. Does not know: legal ranges
(runtime/frontend/validation.py), what is done with a body (requests.py, generation.py).

Unlike a line of `generate`, a body may have fields that are unknown: clients send what other servers understand. A
null is the same as a field that is left out. But a field that would change the answer, and that this engine does not
have, is refused by name: ignoring it would give wrong results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from launch.api.body_rules import REFUSED, Neutral, refuse
from launch.api.json_weight import too_heavy
from launch.api.schema import ChatFields, CompletionFields, Tool
from launch.serve.errors import bad_request, undecodable
from runtime.frontend.validation import RequestError, checked_text, is_unicode

_SHOWN = 40  # characters of a field's name
_LONG = 64 << 10  # bytes of a body of which no field is named
_SLICE = 1 << 20  # bytes of it that are searched at once
_PAIR = 12  # bytes of a pair of escapes
_HALF_OF_A_PAIR = re.compile(  # an escape that has no other half next to it, where no backslash is escaped
    rb"(?i)\\ud[89ab][0-9a-f]{2}(?!\\ud[c-f])|(?<!\\ud[89ab][0-9a-f]{2})\\ud[c-f]"
)
_Typed = TypeVar("_Typed")


class CompletionBody(CompletionFields, kw_only=True, forbid_unknown_fields=False):
    """Of /v1/completions."""


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


def decode(data: bytes | bytearray, kind: type[_Typed]) -> _Typed:
    """The body. Raises ApiError 400, naming the field where one is to blame."""
    if (why := too_heavy(data)) is not None:
        raise bad_request(f"the body is too large: {why}")
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
        if not isinstance(error, msgspec.ValidationError | RecursionError):  # which come before any other fault of it
            _refuse_surrogates(data)
        raise undecodable(error) from None


def _refuse_surrogates(data: bytes | bytearray) -> None:
    """Raises ApiError for a text that has half of a surrogate pair, of which msgspec says that the body is cut off."""
    if rb"\ud" not in data.lower():
        return
    if len(data) > _LONG:  # json.loads would stop every stream of this process while it reads
        plain = data.replace(rb"\\", b"")
        for at in range(0, len(plain), _SLICE):  # between them other threads run
            found = _HALF_OF_A_PAIR.search(plain, at, at + _SLICE + _PAIR)
            if found is not None and found.start() < at + _SLICE:
                raise bad_request("the body is no Unicode text: it has half of a surrogate pair")
        return
    try:
        wrong = _half_of_a_pair(json.loads(data))
    except (ValueError, RecursionError):
        return
    if wrong is not None:
        path, kind, text = wrong
        path = path.lstrip(".")
        try:
            checked_text(kind + (path or "the body"), text)
        except RequestError as error:
            raise bad_request(str(error), path.split(".")[0].split("[")[0] or None) from None


def _half_of_a_pair(value: object) -> tuple[str, str, str] | None:
    """(path, "" or that it is a name there, text) of the first text in ``value`` that is not valid Unicode."""
    if isinstance(value, str):
        return None if is_unicode(value) else ("", "", value)
    parts: Iterable[tuple[str, object]] = ()
    if isinstance(value, list):
        parts = ((f"[{at}]", part) for at, part in enumerate(value))
    elif isinstance(value, dict):
        if (name := next((name for name in value if not is_unicode(name)), None)) is not None:
            return "", "a name in ", name
        parts = ((f".{name[:_SHOWN]}", part) for name, part in value.items())
    for step, part in parts:
        if (found := _half_of_a_pair(part)) is not None:
            path, kind, text = found
            return step + path, kind, text
    return None


def refuse_unsupported(body: object, *lacking: Neutral) -> None:
    """Raises ApiError for the first field that this engine, or this route, lacks and that is not at its default."""
    try:
        for table in (REFUSED, *lacking):
            refuse(body, table)
    except RequestError as error:
        raise bad_request(str(error), error.field, "unsupported_parameter") from None
