"""The lines that `generate` accepts, as typed structures: the simple form and the OpenAI batch form.

Knows: field names and types of each form, of bodies also those that `serve` takes. Does not know: legal ranges
(runtime/frontend/validation.py), which values are refused (body_rules.py), files, tokenizers.

Decoding is strict: no conversion between types, and an unknown field is an error, because a misspelt parameter that is
silently dropped gives wrong results. A field that is null is the same as one that is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec

from runtime.frontend.validation import RequestError
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
    cache_salt: str | None = None
    response_format: Any = None
    structured_outputs: Any = None


class SimpleLine(SamplingFields, kw_only=True):
    """One line of the simple form. Exactly one of ``prompt`` and ``prompt_token_ids``."""

    id: str | int | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: int | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(SamplingFields, kw_only=True):
    """What all bodies of OpenAI's two routes have, in lines of `generate` and over HTTP."""

    model: str | None = None
    stream: bool | None = None
    # Only `serve` has them; `generate` takes their defaults (body_rules.SERVED_ONLY).
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    # vLLM's older names of structured_outputs.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    # Whatever they hold, no answer depends on it: no objects are made of them.
    user: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()
    store: msgspec.Raw = msgspec.Raw()
    service_tier: msgspec.Raw = msgspec.Raw()
    safety_identifier: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    prompt_cache_retention: msgspec.Raw = msgspec.Raw()
    # Refused unless at their default (body_rules.REFUSED).
    best_of: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    logits_processors: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    structural_tag: Any = None
    prompt_embeds: Any = None
    lora_path: Any = None
    kv_transfer_params: Any = None
    return_tokens_as_token_ids: Any = None


class CompletionFields(Body, kw_only=True):
    """Of `/v1/completions`: one prompt or several, each as text or as token ids.

    ``echo`` puts the prompt before the answer, in the text and, where ``logprobs`` are asked for, in those.
    """

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Any = None  # refused unless at its default


class Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class ChatFields(Body, kw_only=True):
    """Of `/v1/chat/completions`. What a message is, says body_rules.py."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    # Only `serve` has them; `generate` takes what does without (body_rules.SERVED_ONLY_CHATS).
    documents: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    # Other routes have these; a chat takes their defaults only (body_rules.REFUSED_IN_CHATS).
    echo: bool | None = None
    add_generation_prompt: Any = None
    # Refused unless at their default (body_rules.REFUSED).
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    continue_final_message: Any = None
    chat_template: Any = None


class CompletionBody(CompletionFields, kw_only=True):
    """Body of a `/v1/completions` line."""


class ChatBody(ChatFields, kw_only=True):
    """Body of a `/v1/chat/completions` line."""


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the OpenAI batch form. ``body`` is decoded after ``url`` has said what it is."""

    custom_id: str
    url: Literal["/v1/completions", "/v1/chat/completions"]  # the values of Form
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


class LinePeek(msgspec.Struct):
    """What distinguishes the two forms, and the id for an error row when the rest of a line is wrong."""

    id: Any = None
    custom_id: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()

    @property
    def is_batch(self) -> bool:
        return self.custom_id is not None or self.url is not None or bool(self.body)


# Fields that have another form here than in SamplingParams, or none at all in one of the two.
_CONVERTED = {
    "max_tokens", "stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "priority",
    "response_format", "structured_outputs",
}  # fmt: skip
_COPIED = tuple(name for name in SamplingFields.__struct_fields__ if name not in _CONVERTED)


def sampling_params(
    fields: SamplingFields, defaults: SamplingParams, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """What the line says, and ``defaults`` where it says nothing, but for bad_words and what makes a grammar, which
    need a tokenizer.

    Ranges are not checked here. Raises RequestError for an empty cache_salt.
    """
    if fields.cache_salt == "":
        raise RequestError("cache_salt is empty: leave it out, or send a text", "cache_salt")
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
