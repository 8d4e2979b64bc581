"""The lines that `generate` accepts, as typed structures: the simple form and the OpenAI batch form.

Knows: field names and types of each form. Does not know: legal ranges (runtime/frontend/validation.py), files,
tokenizers.

Decoding is strict: no conversion between types, and an unknown field is an error, because a misspelt parameter that is
silently dropped gives wrong results. A field that is null is the same as one that is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec

from runtime.schedule.request import SamplingParams


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The sampling parameters all forms share; names and meanings are OpenAI's and, beyond those, vLLM's."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None


class SimpleLine(SamplingFields, kw_only=True):
    """One line of the simple form. Exactly one of ``prompt`` and ``prompt_token_ids``."""

    id: str | int | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: int | None = None


class CompletionBody(SamplingFields, kw_only=True):
    """Body of a `/v1/completions` line: one prompt, as text or as token ids.

    ``echo`` puts the prompt before the answer, in the text and, where ``logprobs`` are asked for, in those.
    """

    model: str | None = None
    prompt: str | list[int]
    logprobs: int | None = None
    echo: bool | None = None
    stream: bool | None = None
    user: str | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A piece of a message's content. Only text is understood."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn of a chat."""

    role: str
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates want it: content is one text."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content, **named}


class ChatBody(SamplingFields, kw_only=True):
    """Body of a `/v1/chat/completions` line."""

    model: str | None = None
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    user: str | None = None


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the OpenAI batch form. ``body`` is decoded after ``url`` has said what it is."""

    custom_id: str
    url: Literal["/v1/completions", "/v1/chat/completions"]  # the values of Form
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


class LinePeek(msgspec.Struct):
    """What tells the two forms apart, and the id for an error row when the rest of a line is wrong."""

    id: Any = None
    custom_id: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()

    @property
    def is_batch(self) -> bool:
        return self.custom_id is not None or self.url is not None or bool(self.body)


# Fields that have another form here than in SamplingParams, or none at all in one of the two.
_CONVERTED = {"max_tokens", "stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "priority"}
_COPIED = tuple(name for name in SamplingFields.__struct_fields__ if name not in _CONVERTED)


def sampling_params(
    fields: SamplingFields, defaults: SamplingParams, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """What the line says, and ``defaults`` where it says nothing, but for bad_words, which need a tokenizer.

    Ranges are not checked here.
    """
    said = {name: value for name in _COPIED if (value := getattr(fields, name)) is not None}
    if said.get("top_k") == -1:  # vLLM's old word for all tokens
        said["top_k"] = 0
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    return replace(
        defaults,
        **said,
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=stop,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        logit_bias=tuple((fields.logit_bias or {}).items()),
        allowed_token_ids=tuple(fields.allowed_token_ids or ()),
    )
