"""What `generate` and `serve` agree on for OpenAI's bodies: refused fields, a chat's messages, names in errors.

Knows: which values of a field that is not there change nothing, what a message may hold. Does not know: legal ranges
(runtime/frontend/validation.py), fields' types (schema.py), how an error is shown.

Everything here raises RequestError, with the field to blame.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from launch.api.json_weight import too_heavy
from launch.api.schema import ChatFields, CompletionFields, SamplingFields
from runtime.frontend.structured import of_response_format, of_structured_outputs
from runtime.frontend.tokenizer import Tokenizer, added_tokens
from runtime.frontend.validation import RequestError
from runtime.schedule.request import MAX_CHOICES, MAX_TOP_LOGPROBS

MAX_SEQUENCES: Final = 1024  # of one request: prompts x n
# Each table: field -> the values, null and absence aside, that change nothing.
Neutral = Mapping[str, tuple[Any, ...]]
REFUSED: Final[Neutral] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # of slow tokenizers only; this one is fast
    "logits_processors": ([],),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "structural_tag": (),
    "prompt_embeds": ([],),
    "lora_path": (),
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
REFUSED_IN_CHATS: Final[Neutral] = {"echo": (False,), "add_generation_prompt": (True,)}  # other routes have these
SERVED_ONLY: Final[Neutral] = {"stream_options": (), "truncate_prompt_tokens": (), "return_token_ids": (False,)}
SERVED_ONLY_COMPLETIONS: Final[Neutral] = {**SERVED_ONLY, "add_special_tokens": (True,)}
SERVED_ONLY_CHATS: Final[Neutral] = {
    **SERVED_ONLY,
    "add_special_tokens": (False,),
    "documents": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "reasoning_effort": (),
    "include_reasoning": (True,),
}
# What a message of a batch may have. Over HTTP there may be more: a template may know it.
_IN_MESSAGES: Final = {
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "thinking", "refusal",
    "annotations",
}  # fmt: skip
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")  # one text by the names that templates read
_WHY: Final = {
    "echo": "a chat's answer does not repeat its messages",
    "add_generation_prompt": "what is generated is the assistant's answer",
    "tool_choice": "a batch has no tools",
}
# Fields that ask for a form of the answer.
FORMS: Final = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
_LONGEST_SHOWN: Final = 80  # characters of a value


def refuse(body: object, lacking: Neutral, why: str = "this engine does not have it") -> None:
    """Raises RequestError for the first field of ``lacking`` whose value would change the answer."""
    for name, neutral in lacking.items():
        value = getattr(body, name, None)
        if value is None or any(value == same and type(value) is type(same) for same in neutral):
            continue
        if name == "best_of" and value == getattr(body, "n", None):  # nothing would be thrown away
            continue
        or_send = f", or send {json.dumps(neutral[0])}" if neutral else ""
        raise RequestError(
            f"{name} is not supported as {_shown(value)}: {_WHY.get(name, why)}; leave it out{or_send}", name
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """``text``: as it was given, or as the chat template wrote it; None where token ids were given."""

    text: str | None
    token_ids: tuple[int, ...]


def prompts_of(body: CompletionFields) -> list[str | list[int]]:
    """A text, texts, ids, or lists of ids: one entry a prompt."""
    given: Any = body.prompt
    if isinstance(given, str) or (given and all(isinstance(part, int) for part in given)):
        return [given]
    if not given:
        raise RequestError("the prompt is empty: give at least one", "prompt")
    if any(isinstance(part, int) for part in given):
        raise RequestError("the prompt mixes token ids with texts or lists", "prompt")
    n = 1 if body.n is None else body.n
    if len(given) * max(1, min(n, MAX_CHOICES)) > MAX_SEQUENCES:  # before they are tokenised
        raise RequestError(
            f"{len(given)} prompts with n {n} are more than {MAX_SEQUENCES} answers of one request: send several",
            "n" if n > MAX_CHOICES else "prompt",
        )
    return list(given)


def score_prompts(body: CompletionFields) -> bool:
    """Asks for log-probabilities of prompts where they are echoed, among those of answers. Whether that is all that is
    asked for (max_tokens 0): the one token that is generated all the same is not shown."""
    if body.echo and body.prompt_logprobs is None:
        body.prompt_logprobs = body.logprobs
    if body.max_tokens != 0:
        return False
    if not body.echo:
        raise RequestError("max_tokens is 0, but must be at least 1 unless echo is true", "max_tokens")
    body.max_tokens = 1
    return True


def chat_logprobs(body: ChatFields) -> int | None:
    """How many likely tokens are shown for each of a chat's answer; None: no log-probabilities."""
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise RequestError(f"top_logprobs is {_shown(top)}, but must be 0 to {MAX_TOP_LOGPROBS}", "top_logprobs")
    if top and not body.logprobs:
        raise RequestError("top_logprobs is set, but logprobs is not true", "top_logprobs")
    return (top or 0) if body.logprobs else None


def grammar_of(body: SamplingFields, tokenizer: Tokenizer | None) -> str:
    """Of response_format, structured_outputs, or one of vLLM's older names for it; "" without any."""
    added = added_tokens(tokenizer)
    made = {}
    for name in FORMS:
        value = getattr(body, name, None)
        if name == "response_format":
            grammar = of_response_format(value, added)
        else:
            older = name.startswith("guided_") and value is not None
            given = {name.removeprefix("guided_"): value} if older else value
            grammar = of_structured_outputs(given, name, added)
        if grammar:
            made[name] = grammar
    if len(made) > 1:
        raise RequestError(f"{' and '.join(made)} are set, but an answer has one form: send one of them", [*made][-1])
    return next(iter(made.values()), "")


def form_of(body: SamplingFields) -> str:
    """Which kind of form a body asks for that ``grammar_of`` takes: a name of structured_outputs, or "json_schema"; ""
    for none."""
    given: Any = getattr(body, "response_format", None)
    if isinstance(given, Mapping) and given.get("type") != "text":
        return str(given["type"])
    if given := getattr(body, "structured_outputs", None):
        return next((name for name, value in given.items() if value not in (None, False)), "")
    older = (name for name in FORMS if name.startswith("guided_") and getattr(body, name, None))
    return next(older, "").removeprefix("guided_")


def field_of_grammar(body: object) -> str:
    """That asks for the answer's grammar."""
    return next((name for name in FORMS if getattr(body, name, None)), "tools")


def as_sent(error: RequestError, body: object) -> RequestError:
    """The same of the field that the client sent: a chat's max_tokens has two names, a grammar several."""
    if error.field == "grammar":
        sent = field_of_grammar(body)
        return RequestError(f"{sent}: {error}", sent)
    if error.field == "max_tokens" and getattr(body, "max_completion_tokens", None) is not None:
        return RequestError(str(error).replace("max_tokens", "max_completion_tokens", 1), "max_completion_tokens")
    return error


def plain_messages(messages: Sequence[dict[str, Any]], *, strict: bool = False) -> list[dict[str, Any]]:
    """As chat templates want them: content is a text or text parts, reasoning has all its names, arguments of tool
    calls are objects, nothing is null, and an empty list of tool calls is none.

    ``strict``: unknown fields are refused.
    """
    if not messages:
        raise _bad("messages is empty: give at least one message")
    arguments = [written for written in _arguments_in(messages) if too_heavy(written) is None]
    if (why := too_heavy(*arguments)) is not None:
        raise _bad(f"arguments of tool calls: {why}")
    return [_plain_message(f"messages[{at}]", message, strict) for at, message in enumerate(messages)]


def _bad(text: str) -> RequestError:
    return RequestError(text, "messages")


def _plain_message(where: str, message: dict[str, Any], strict: bool) -> dict[str, Any]:
    plain = {name: value for name, value in message.items() if value is not None}
    for name in ("role", "name"):
        if not isinstance(plain.get(name, ""), str):
            raise _bad(f"{where}.{name} is {_shown(plain[name])}, but must be a text")
    if "role" not in plain:
        raise _bad(f'{where} has no role: send "role": "user", or another that the chat template knows')
    unknown = sorted(plain.keys() - _IN_MESSAGES) if strict else []
    if unknown:
        raise _bad(f"{where} has an unknown field `{unknown[0][:80]}`: leave it out")
    content = plain.get("content")
    if isinstance(content, list):
        texts = [_part_text(f"{where}.content[{at}]", part) for at, part in enumerate(content)]
        plain["content"] = [{"type": "text", "text": text} for text in texts]
    elif content is None:
        if plain["role"] != "assistant":
            raise _bad(f"{where} has no content: send a text; only an assistant's message may have none")
        plain["content"] = ""
    elif not isinstance(content, str):
        raise _bad(f"{where}.content is {_shown(content)}, but must be a text or a list of text parts")
    if "tool_calls" in plain:
        calls = plain["tool_calls"]
        if not isinstance(calls, list):
            raise _bad(f"{where}.tool_calls is {_shown(calls)}, but must be a list")
        plain["tool_calls"] = [_plain_call(f"{where}.tool_calls[{at}]", call) for at, call in enumerate(calls)]
        if not calls:
            del plain["tool_calls"]
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    return plain if reasoning is None else {**dict.fromkeys(_REASONING, reasoning), **plain}


def _part_text(where: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or kind not in ("text", "input_text"):
        send = 'send {"type": "text", "text": ...}'
        raise _bad(f"{where} is a part of type {_shown(kind)}, but only text is understood: {send}")
    if not isinstance(part.get("text"), str):
        raise _bad(f"{where} has no text")
    return str(part["text"])


def _plain_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise _bad(f'{where} has no function: send "function": {{"name": ..., "arguments": ...}}')
    return {**call, "function": {**function, "arguments": _plain_arguments(function.get("arguments"))}}


def _arguments_in(messages: Sequence[dict[str, Any]]) -> Iterator[bytes]:
    """Of tool calls, as far as they are texts: JSON within JSON, which nothing has looked at yet."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(written := function.get("arguments"), str):
                yield written.encode("utf-8", "replace")


def _plain_arguments(written: object) -> dict[str, Any]:
    """An object that a template can write down: of what a model wrote, such as JSON that is cut off, an empty one."""
    try:
        if isinstance(written, str) and too_heavy(written.encode()) is not None:
            return {}
        arguments = json.loads(written) if isinstance(written, str) else written
        json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _shown(value: object) -> str:
    """As JSON, and short; whatever it is, it does not raise."""
    try:
        text = json.dumps(msgspec.to_builtins(value))
    except (ValueError, TypeError, RecursionError):
        return f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
