"""From a body to the sequences that an engine is asked for, or to the error that the client gets.

Knows: defaults, prompts, chat templates, what a client may name the model. Does not know: HTTP, how answers are
written down (chunks.py), the engine.

A long prompt takes long to tokenise: what makes a request may be called in a worker thread.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.api.body_rules import (
    REFUSED_IN_CHATS,
    Neutral,
    Prompt,
    as_sent,
    chat_logprobs,
    field_of_grammar,
    form_of,
    grammar_of,
    plain_messages,
    prompts_of,
    score_prompts,
)
from launch.api.parser import COMPLETION_MAX_TOKENS
from launch.api.schema import Body, Tool, sampling_params
from launch.serve.bodies import ChatBody, CompletionBody, TokenizeBody, refuse_unsupported
from launch.serve.errors import ApiError, bad_request, unsupported
from launch.serve.parsers.call_grammar import grammar_of_calls
from launch.serve.parsers.deltas import Tools
from launch.serve.parsers.reader import named
from launch.serve.parsers.reasoning_grammar import with_reasoning
from launch.serve.parsers.table import HARMONY, REASONING
from launch.serve.settings import ServerSettings
from runtime.frontend.chat_template import ChatTemplate, ChatTemplateError
from runtime.frontend.prompt_text import WIDEST_TOKEN, PromptTooLong, bad_words_token_ids, prompt_ids
from runtime.frontend.remote_engine import SequenceRequest
from runtime.frontend.serve_messages import Ready
from runtime.frontend.tokenizer import Tokenizer, added_tokens
from runtime.frontend.validation import (
    RequestError,
    checked_priority,
    checked_prompt,
    checked_sampling,
    stop_ids_of,
)
from runtime.schedule.request import SamplingParams

MOST_TOKENS = 1 << 18  # at least, of a text that need not fit: one that is cut, or only tokenised
_CUT_CHARACTERS = 1 << 19
MOST_SCORES = 1 << 19  # log-probabilities of one request: some 60 MB of objects and 40 MB of JSON
MOST_PROMPT_TOKENS = 1 << 20  # of one request, where its prompts are several or are shown with several answers
MOST_ANSWER_TOKENS = 1 << 23  # of all answers to one request together
MOST_LISTED = 1 << 20  # token ids in allowed_token_ids, logit_bias and bad_words, for each prompt of a request
_RANDOM = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request. Answer ``i`` of prompt ``p`` is choice ``p * n + i``, and the sequence of that number.

    ``hidden``: max_tokens is 0: one token is generated, for the prompt's log-probabilities, and not shown.
    """

    chat: bool
    model: str
    prompts: tuple[Prompt, ...]
    sequences: tuple[SequenceRequest, ...]
    sampling: SamplingParams  # as asked for, with n and stop strings
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool = False
    hidden: bool = False
    scored_prompt: bool = False  # vLLM's prompt_logprobs were asked for
    tools: Tools | None = None  # that may be called
    token_ids: bool = False
    form: str = ""  # kind of a constrained answer, as /metrics has it
    grammar_field: str = ""  # that asks for the answers' grammar
    named_tool: bool = False  # a named tool must be called: finish_reason is then "stop", as in OpenAI's API
    most_calls: int | None = None  # of tools, in an answer; None: as many as the model writes
    reasoning: bool = True  # is shown
    begun: bool = False  # the prompt ends with the beginning of the reasoning
    filled: bool = False  # reasoning without content is content, too

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of a choice."""
        return self.prompts[index // self.sampling.n]


class RequestBuilder:
    """For one model. ``tokenizer`` and ``chat`` are None where its folder has none."""

    def __init__(
        self, settings: ServerSettings, ready: Ready, tokenizer: Tokenizer | None, chat: ChatTemplate | None
    ) -> None:
        self._settings = settings
        self._ready = ready
        self._tokenizer = tokenizer
        self._chat = chat

    def completion(self, body: CompletionBody) -> Asked:
        """Raises ApiError."""
        name = self._common(body)
        scored = body.prompt_logprobs is not None
        try:
            hidden = score_prompts(body)
        except RequestError as error:
            raise bad_request(str(error), error.field) from None
        if body.stream and body.prompt_logprobs is not None:
            raise bad_request("stream is true: log-probabilities of the prompt come with whole answers only", "stream")
        prompts = self._prompts(body)
        if body.echo or body.return_token_ids:
            _refuse_repeated(prompts, body.n or 1, "echo" if body.echo else "return_token_ids")
        asked = COMPLETION_MAX_TOKENS if self._settings.max_tokens is None else self._settings.max_tokens
        return self._asked(
            body, name, prompts, body.max_tokens, asked, body.logprobs, False, echo=bool(body.echo), hidden=hidden,
            scored=scored,
        )  # fmt: skip

    def chat(self, body: ChatBody) -> Asked:
        """Raises ApiError."""
        name = self._common(body, REFUSED_IN_CHATS)
        tools = self._tools(body)
        try:
            logprobs = chat_logprobs(body)
        except RequestError as error:
            raise bad_request(str(error), error.field) from None
        if body.stream and body.prompt_logprobs is not None:
            raise bad_request("stream is true: log-probabilities of the prompt come with whole answers only", "stream")
        variables = {**self._settings.template_kwargs, **(body.chat_template_kwargs or {})}
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        if len(body.messages) >= self._ready.max_model_len and body.truncate_prompt_tokens is None:
            raise self._too_long(f"at least {len(body.messages)} tokens, one a message", "messages")
        text = self._rendered(body.messages, tools, variables, body.documents)
        cut = body.truncate_prompt_tokens is not None
        ids = self._encoded(text, "messages", bool(body.add_special_tokens), cut=cut)  # the template wrote them
        ids = self._fitting(ids, body.truncate_prompt_tokens, "messages")
        given = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        otherwise = self._ready.max_model_len if self._settings.max_tokens is None else self._settings.max_tokens
        scored = body.prompt_logprobs is not None
        asked = self._asked(body, name, (Prompt(text, ids),), given, otherwise, logprobs, True, scored=scored)
        first = named(REASONING.get(self._settings.reasoning_parser, "")[:1])
        return replace(
            asked,
            tools={one.function.name: one.function.parameters or {} for one in body.tools or ()} if tools else None,
            named_tool=body.tool_choice not in (None, "none", "auto", "required"),
            most_calls=1 if body.parallel_tool_calls is False else None,
            reasoning=body.include_reasoning is not False,
            begun=bool(first) and text.rstrip().endswith(first),
            filled=variables.get("force_nonempty_content") is True,
        )

    def tokens(self, body: TokenizeBody) -> tuple[int, ...]:
        """Of /tokenize; as long as may be. Raises ApiError."""
        self.model_name(body.model)
        refuse_unsupported(body)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if body.messages is not None:
            tools = [_plain_tool(tool) for tool in body.tools or ()]
            variables = {**self._settings.template_kwargs, **(body.chat_template_kwargs or {})}
            answers = body.add_generation_prompt is not False
            text = self._rendered(body.messages, tools, variables, None, add_generation_prompt=answers)
            return self._encoded(text, "messages", bool(body.add_special_tokens), cut=True)
        return self._encoded(body.prompt or "", "prompt", body.add_special_tokens is not False, cut=True)

    def model_name(self, asked: str | None) -> str:
        """The name that the answer carries. Raises ApiError 404 for one that is not served."""
        names = self._settings.names
        if asked is None:
            return names[0]
        if asked not in names:
            raise ApiError(
                404, f"the model {asked[:200]!r} is not served here: {', '.join(names)}", code="model_not_found",
                param="model",
            )  # fmt: skip
        return asked

    # ---- parts ----

    def _common(self, body: Body, *lacking: Neutral) -> str:
        name = self.model_name(body.model)
        refuse_unsupported(body, *lacking)
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options are set, but stream is not true", "stream_options")
        return name

    def _prompts(self, body: CompletionBody) -> tuple[Prompt, ...]:
        try:
            each = prompts_of(body)
        except RequestError as error:
            raise bad_request(str(error), error.field) from None
        prompts, tokens = list[Prompt](), 0
        for one in each:
            if isinstance(one, str):
                cut = body.truncate_prompt_tokens is not None
                ids = self._encoded(one, "prompt", body.add_special_tokens is not False, cut=cut)
            else:
                ids = tuple(one)
            fitting = self._fitting(ids, body.truncate_prompt_tokens, "prompt")
            whole = isinstance(one, str) and len(fitting) == len(ids)
            prompts.append(Prompt(one if isinstance(one, str) and whole else None, fitting))
            tokens += len(fitting)
            if tokens > MOST_PROMPT_TOKENS and len(prompts) > 1:
                raise bad_request(
                    f"the prompts of one request have more than {MOST_PROMPT_TOKENS} tokens: send several", "prompt"
                )
        return tuple(prompts)

    def _encoded(self, text: str, param: str, add_special_tokens: bool, *, cut: bool = False) -> tuple[int, ...]:
        """``param``: what the text was made from. ``cut``: it may have more tokens than fit."""
        if self._tokenizer is None:
            raise bad_request("the model folder has no tokenizer.json: give token ids instead of text", param)
        most = self._ready.max_model_len
        limits = (max(4 * most, MOST_TOKENS), max(WIDEST_TOKEN * most, _CUT_CHARACTERS)) if cut else (most,)
        try:
            return tuple(prompt_ids(self._tokenizer, text, *limits, add_special_tokens=add_special_tokens))
        except PromptTooLong as error:
            if cut:
                raise bad_request(f"the text has {error.length}, more than are tokenised: send less", param) from None
            raise self._too_long(error.length, param) from None
        except RequestError as error:
            raise bad_request(str(error), param) from None

    def _too_long(self, length: str, param: str) -> ApiError:
        return bad_request(
            f"this model's maximum context length is {self._ready.max_model_len} tokens, but the prompt has {length}, "
            "which leaves no room for an answer: shorten it",
            param,
            "context_length_exceeded",
        )

    def _fitting(self, ids: tuple[int, ...], truncate: int | None, param: str) -> tuple[int, ...]:
        """Checked; the last ``truncate`` of them, or as many as leave room for an answer for -1."""
        most = self._ready.max_model_len
        if truncate is not None:
            if truncate == 0 or truncate < -1 or truncate >= most:
                raise bad_request(
                    f"truncate_prompt_tokens is {truncate}, but must be -1 or 1 to {most - 1}", "truncate_prompt_tokens"
                )
            ids = ids[-(most - 1 if truncate == -1 else truncate) :]
        if len(ids) >= most:
            raise self._too_long(f"{len(ids)} tokens", param)
        try:
            return checked_prompt(ids, self._ready.vocab_size, most)
        except RequestError as error:
            raise bad_request(str(error), param) from None

    def _asked(
        self,
        body: Body,
        name: str,
        prompts: tuple[Prompt, ...],
        given: int | None,
        otherwise: int,
        logprobs: int | None,
        chat: bool,
        *,
        echo: bool = False,
        hidden: bool = False,
        scored: bool = False,
    ) -> Asked:
        try:
            max_tokens = given if given is not None else max(otherwise, body.min_tokens or 0)
            said = sampling_params(body, self._settings.defaults, max_tokens=max_tokens, logprobs=logprobs)
            if body.bad_words:
                said = replace(said, bad_words_token_ids=bad_words_token_ids(body.bad_words, self._tokenizer))
            said = replace(said, grammar=self._grammar(body, prompts[0].text or ""))
            sampling = checked_sampling(said, self._ready.vocab_size)
            stops = stop_ids_of(sampling, self._ready.eos_token_ids)
            priority = checked_priority(body.priority or 0)
            if given is not None:
                _check_lengths(prompts, sampling, self._ready.max_model_len)
        except RequestError as error:
            named = as_sent(error, body)
            raise bad_request(str(named), named.field) from None
        if (answers := len(prompts) * sampling.n) > self._settings.max_queued:
            raise bad_request(
                f"{answers} answers of one request, but at most {self._settings.max_queued} may wait "
                "(--max-queued-requests): send several",
                "n" if len(prompts) == 1 else "prompt",
            )
        if sampling.stop and self._tokenizer is None:
            raise bad_request("stop strings need a tokenizer, and the model folder has none", "stop")
        if given is None:
            fits = MOST_ANSWER_TOKENS if logprobs is None else MOST_SCORES // (logprobs + 1)
            sampling = replace(
                sampling, max_tokens=max(1, sampling.min_tokens, min(sampling.max_tokens, fits // answers))
            )
        _refuse_costly(prompts, sampling, self._ready.max_model_len, "prompt_logprobs" if scored else "logprobs")
        options = body.stream_options
        return Asked(
            chat,
            name,
            prompts,
            tuple(_sequences(prompts, sampling, stops, priority, self._ready)),
            sampling,
            bool(body.stream),
            options is not None and bool(options.include_usage),
            options is not None and bool(options.continuous_usage_stats),
            echo,
            hidden,
            scored,
            token_ids=bool(body.return_token_ids),
            form=(form_of(body) or "tools") if sampling.grammar else "",
            grammar_field=field_of_grammar(body),
        )

    def _grammar(self, body: Body, prompt: str) -> str:
        """Of the answer to ``prompt``; "" for any. Raises RequestError."""
        grammar = grammar_of(body, self._tokenizer)
        if not isinstance(body, ChatBody):
            return grammar
        calls = self._grammar_of_calls(body)
        if grammar and calls:
            raise RequestError("tools must be called, or are strict: no other form can be asked for", "tools")
        if not (grammar or calls):
            return ""
        settings = self._settings
        form = HARMONY if settings.tool_call_parser == "openai" else settings.reasoning_parser
        return with_reasoning(grammar or calls, form, prompt, added_tokens(self._tokenizer), calls=bool(calls))

    def _tools(self, body: ChatBody) -> list[dict[str, Any]]:
        """What the template gets of tools; none where the model may not call any."""
        choice = body.tool_choice
        if not body.tools:
            if choice not in (None, "none", "auto"):
                raise bad_request("tool_choice is set, but there are no tools", "tool_choice")
            return []
        if choice == "none":
            return []
        if self._settings.tool_call_parser == "none":
            why = "no format of tool calls is known of this model; start the server with --tool-call-parser FORMAT"
            raise unsupported("tools", why)
        if choice not in (None, "auto", "required"):
            names = [tool.function.name for tool in body.tools]
            if _named_tool(choice) not in names:
                raise bad_request(f"tool_choice names none of the tools {', '.join(names)[:200]}", "tool_choice")
        return [_plain_tool(tool) for tool in body.tools]

    def _grammar_of_calls(self, body: ChatBody) -> str:
        """What an answer may be where a tool must be called, or one is strict; else "". Raises RequestError."""
        choice, tools = body.tool_choice, body.tools or []
        if not tools or choice == "none":
            return ""
        wanted = None if choice in (None, "auto") else "" if choice == "required" else _named_tool(choice)
        if wanted is None and not any(tool.function.strict for tool in tools):
            return ""
        parser, one = self._settings.tool_call_parser, body.parallel_tool_calls is False
        return grammar_of_calls(parser, tools, added_tokens(self._tokenizer), choice=wanted, one=one)

    def _rendered(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]],
        variables: dict[str, Any],
        documents: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        if self._chat is None:
            raise bad_request(
                "the model folder has no chat template: start with --chat-template FILE, or use /v1/completions",
                "messages",
            )
        if tools:
            variables["tools"] = tools
        if documents:
            variables["documents"] = documents
        try:
            plain = plain_messages(messages)
            return self._chat.render(plain, variables, add_generation_prompt=add_generation_prompt)
        except (RequestError, ChatTemplateError) as error:
            raise bad_request(str(error), error.field) from None


def _refuse_costly(prompts: tuple[Prompt, ...], sampling: SamplingParams, most: int, param: str) -> None:
    """Raises ApiError for what would stop others while it is handed over or written down. ``param``: the field that
    asked for log-probabilities."""
    edits = sampling.allowed_token_ids, sampling.logit_bias, *sampling.bad_words_token_ids
    if (listed := sum(map(len, edits)) * len(prompts)) > MOST_LISTED:
        raise bad_request(
            f"allowed_token_ids, logit_bias and bad_words have {listed} ids for {len(prompts)} prompts, but at most "
            f"{MOST_LISTED} are possible: send several requests",
            "prompt",
        )
    scores = 0
    for prompt in prompts:
        tokens = len(prompt.token_ids)
        if sampling.logprobs is not None:
            scores += min(sampling.max_tokens, most - tokens) * (sampling.logprobs + 1)
        if sampling.prompt_logprobs is not None:
            scores += tokens * (sampling.prompt_logprobs + 1)
    if (scores := scores * sampling.n) > MOST_SCORES:
        raise bad_request(
            f"the request asks for up to {scores} log-probabilities, but at most {MOST_SCORES} are possible: send "
            "several requests, or ask for fewer tokens or alternatives",
            param,
        )


def _check_lengths(prompts: tuple[Prompt, ...], sampling: SamplingParams, most: int) -> None:
    """Raises RequestError for answers that would have more tokens together than are kept for one request."""
    tokens = sampling.n * sum(min(sampling.max_tokens, most - len(prompt.token_ids)) for prompt in prompts)
    if tokens > MOST_ANSWER_TOKENS:
        raise RequestError(
            f"max_tokens allows the answers {tokens} tokens together, but at most {MOST_ANSWER_TOKENS} are possible: "
            "send several requests, or ask for fewer tokens",
            "max_tokens",
        )


def _refuse_repeated(prompts: tuple[Prompt, ...], times: int, param: str) -> None:
    """Raises ApiError for prompts that are too long to be shown with each of their answers, as ``param`` asks."""
    tokens = times * sum(len(prompt.token_ids) for prompt in prompts)
    if times > 1 and tokens > MOST_PROMPT_TOKENS:
        raise bad_request(
            f"{param} shows prompts of {tokens} tokens with their answers, but at most {MOST_PROMPT_TOKENS} are "
            "possible: send several requests",
            param,
        )


def _sequences(
    prompts: Iterable[Prompt], sampling: SamplingParams, stops: tuple[int, ...], priority: int, ready: Ready
) -> Iterable[SequenceRequest]:
    """Answer i of a prompt is drawn with seed + i, so that each can be had again alone."""
    together = ready.most_together
    base = _RANDOM.getrandbits(63) if sampling.seed is None else sampling.seed
    for prompt in prompts:
        room = ready.max_model_len - len(prompt.token_ids)
        for i in range(sampling.n):
            one = replace(
                sampling,
                n=1,
                stop=(),
                seed=(base + i + 2**63) % 2**64 - 2**63,
                max_tokens=min(sampling.max_tokens, room),
                min_tokens=min(sampling.min_tokens, room),
                prompt_logprobs=sampling.prompt_logprobs if i == 0 else None,  # the prompt is the same
            )
            answers = 0 if i % together else min(together, sampling.n - i)
            yield SequenceRequest(prompt.token_ids, one, stops, priority, answers)


def _named_tool(choice: Any) -> str:
    """Of {"type": "function", "function": {"name": ...}}. Raises ApiError."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise bad_request(
            'tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}', "tool_choice"
        )
    return name


def _plain_tool(tool: Tool) -> dict[str, Any]:
    function = tool.function
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}
