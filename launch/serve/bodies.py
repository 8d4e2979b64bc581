"""The bodies that the routes take, as typed structures.

Knows: field names and types, what is refused unless it is at its default. Does not know: legal ranges
(runtime/frontend/validation.py), what is done with a body (completions.py, chat.py).

Unlike a line of `generate`, a body may have fields that nobody knows: clients send what other servers understand. A
null is the same as a field that is left out. But a field that would change the answer, and that this engine does not
have, is refused by name: ignoring it would give wrong results.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeVar

import msgspec

from launch.api.schema import SamplingFields
from launch.serve.errors import undecodable, unsupported

_Typed = TypeVar("_Typed")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(SamplingFields, kw_only=True, forbid_unknown_fields=False):
    """What both routes share; sampling is said as in lines of `generate`. Unknown fields are ignored."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    # Refused unless at their default (REFUSED).
    best_of: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    logits_processors: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    structural_tag: Any = None
    prompt_embeds: Any = None
    lora_path: Any = None
    cache_salt: Any = None
    kv_transfer_params: Any = None
    return_tokens_as_token_ids: Any = None


class CompletionBody(Body, kw_only=True):
    """Of /v1/completions: one prompt or several, each as text or as token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Any = None


class Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class ChatBody(Body, kw_only=True):
    """Of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    # Other routes have these; a chat takes their defaults only (requests.py).
    echo: bool | None = None
    add_generation_prompt: Any = None
    # Refused unless at their default (REFUSED).
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    continue_final_message: Any = None
    chat_template: Any = None


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
    # Refused unless at their default (REFUSED).
    continue_final_message: Any = None
    chat_template: Any = None


class DetokenizeBody(msgspec.Struct):
    """Of /detokenize."""

    tokens: list[int]
    model: str | None = None


# Field -> the values, null and absence aside, that change nothing.
REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # of slow tokenizers only; this one is fast
    "logits_processors": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "structural_tag": (),
    "prompt_embeds": ([],),
    "lora_path": (),
    "cache_salt": (),
    "kv_transfer_params": (),
    "return_tokens_as_token_ids": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "continue_final_message": (False,),
    "chat_template": (),
}


def decode(data: bytes, kind: type[_Typed]) -> _Typed:
    """The body. Raises ApiError 400, naming the field where one is to blame."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
        raise undecodable(error) from None


def refuse_unsupported(body: Body | TokenizeBody) -> None:
    """Raises ApiError for the first field that this engine lacks and that is not at its default."""
    for name, neutral in REFUSED.items():
        value = getattr(body, name, None)
        if value is None or any(value == same and type(value) is type(same) for same in neutral):
            continue
        if name == "best_of" and isinstance(body, Body) and value == body.n:  # nothing would be thrown away
            continue
        raise unsupported(name)
