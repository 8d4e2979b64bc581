"""From one line of input to a request that an engine may see, or to the reason why not.

Knows: the forms of a line, defaults, prompts and templates. Does not know: files, other lines (input_file.py),
engines, or how an answer or an error is written down (response.py).

Nothing in a line can raise out of here: a line becomes a PreparedRequest or a BadLine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

import msgspec

from launch.api.body_rules import (
    REFUSED,
    REFUSED_IN_CHATS,
    SERVED_ONLY_CHATS,
    SERVED_ONLY_COMPLETIONS,
    Neutral,
    Prompt,
    as_sent,
    chat_logprobs,
    grammar_of,
    plain_messages,
    prompts_of,
    refuse,
    score_prompts,
)
from launch.api.json_weight import too_heavy
from launch.api.schema import (
    BatchLine,
    Body,
    ChatBody,
    CompletionBody,
    LinePeek,
    SamplingFields,
    SimpleLine,
    sampling_params,
)
from runtime.frontend.chat_template import ChatTemplate
from runtime.frontend.engine_protocol import ModelFacts
from runtime.frontend.output_processor import drawn_seed
from runtime.frontend.prompt_text import bad_words_token_ids, prompt_ids
from runtime.frontend.structured import after_reasoning
from runtime.frontend.tokenizer import Tokenizer, added_tokens
from runtime.frontend.validation import (
    RequestError,
    checked_priority,
    checked_prompt,
    checked_sampling,
    fitted,
    stop_ids_of,
)
from runtime.schedule.request import SamplingParams

LineId = str | int

MAX_ID_CHARACTERS = 512
COMPLETION_MAX_TOKENS = 16  # the OpenAI API's default for prompts; a chat may use all that fits
_Typed = TypeVar("_Typed")


class Form(Enum):
    """What a line asks for decides how its answer is written."""

    SIMPLE = "simple"
    COMPLETION = "/v1/completions"
    CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request: every field is legal for the model, the seed is set, max_tokens fits the shortest prompt.

    Of completions only: several ``prompts``; ``echo``: each answer begins with its prompt; ``hidden``: prompts are only
    to be scored, and what is generated is not shown; ``scored``: prompt_logprobs were asked for, not only an echo's.
    Of chats with a grammar only: ``reasoning``: marks around what comes before the text of the grammar.
    """

    line: int
    id: LineId
    form: Form
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    priority: int = 0
    model: str | None = None
    echo: bool = False
    hidden: bool = False
    scored: bool = True
    reasoning: tuple[str, str] | None = None

    @property
    def answers(self) -> int:
        return len(self.prompts) * self.sampling.n


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be served. ``id`` None: it has none that can be read."""

    line: int
    id: LineId | None
    form: Form
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Peeked:
    """A line's form and id, as far as they can be read, before anything else of it is looked at."""

    form: Form
    id: LineId | None
    trouble: str | None = None


class RequestParser:
    """Parses lines for one model.

    ``tokenizer`` and ``chat`` are None where the model folder has none: requests that need them are bad lines.
    ``defaults`` are the sampling parameters of lines that do not say; ``max_tokens`` the same for that one, where None
    means the OpenAI API's defaults. ``base_seed`` gives the seeds of lines without one, ``model_name`` the model of
    bodies without one. ``reasoning``: marks around the reasoning of chats; a grammar constrains what follows.
    """

    def __init__(
        self,
        model: ModelFacts,
        tokenizer: Tokenizer | None,
        chat: ChatTemplate | None = None,
        *,
        defaults: SamplingParams | None = None,
        max_tokens: int | None = None,
        base_seed: int = 0,
        model_name: str | None = None,
        reasoning: tuple[str, str] | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._chat = chat
        self._defaults = defaults or SamplingParams()
        self._max_tokens = max_tokens
        self._base_seed = base_seed
        self._model_name = model_name
        self._reasoning = reasoning
        self._decode_peek = msgspec.json.Decoder(LinePeek).decode

    def peek(self, number: int, data: bytes) -> Peeked:
        """Form and id of a line. A line of the simple form without an id gets one from its number."""
        if (why := too_heavy(data)) is not None:
            return Peeked(Form.SIMPLE, None, f"the line is too large: {why}")
        try:
            peek = self._decode_peek(data)
        except (ValueError, RecursionError) as error:
            return Peeked(Form.SIMPLE, None, _reason(error))
        form = Form.SIMPLE
        if peek.is_batch:
            form = Form.CHAT if peek.url == Form.CHAT.value else Form.COMPLETION
        name, value = ("custom_id", peek.custom_id) if peek.is_batch else ("id", peek.id)
        if value is None and form is Form.SIMPLE:
            return Peeked(form, f"line-{number}")
        trouble = _id_trouble(name, value)
        return Peeked(form, None if trouble else value, trouble)

    def parse(self, number: int, data: bytes, peeked: Peeked) -> PreparedRequest | BadLine:
        """The whole line."""
        try:
            if peeked.id is None:
                raise RequestError(peeked.trouble or "the line has no id")
            if peeked.form is Form.SIMPLE:
                return self._simple(number, peeked.id, _decode(data, SimpleLine))
            return self._batch(number, peeked.id, _decode(data, BatchLine))
        except (
            ValueError,
            RecursionError,
        ) as error:  # msgspec's errors, RequestError, ChatTemplateError: all ValueErrors
            return BadLine(number, peeked.id, peeked.form, "bad_line", _reason(error))

    def _simple(self, number: int, line_id: LineId, line: SimpleLine) -> PreparedRequest:
        prompts = [prompt for prompt in (line.prompt, line.prompt_token_ids) if prompt is not None]
        if len(prompts) != 1:
            raise RequestError(f"the line has {len(prompts)} of prompt and prompt_token_ids, but must have one")
        prompt = self._prompt(prompts[0])
        sampling = self._sampling(line, line_id, line.max_tokens, COMPLETION_MAX_TOKENS, line.logprobs, prompt)
        return PreparedRequest(number, line_id, Form.SIMPLE, (prompt,), sampling, _priority(line))

    def _batch(self, number: int, line_id: LineId, line: BatchLine) -> PreparedRequest:
        if Form(line.url) is Form.CHAT:
            return self._chat_request(number, line_id, _decode(line.body, ChatBody))
        body = _decode(line.body, CompletionBody)
        _refuse_unsupported(body, REFUSED, served_only=SERVED_ONLY_COMPLETIONS)
        scored, hidden = body.prompt_logprobs is not None, score_prompts(body)
        prompts = tuple(map(self._prompt, prompts_of(body)))
        sampling = self._sampling(body, line_id, body.max_tokens, COMPLETION_MAX_TOKENS, body.logprobs, *prompts)
        form, rest = Form.COMPLETION, (self._name(body), bool(body.echo), hidden, scored)
        return PreparedRequest(number, line_id, form, prompts, sampling, _priority(body), *rest)

    def _chat_request(self, number: int, line_id: LineId, body: ChatBody) -> PreparedRequest:
        if body.tool_choice == "none":
            body.tools = None  # the model may not call any: it is shown none
        _refuse_unsupported(body, REFUSED, REFUSED_IN_CHATS, served_only=SERVED_ONLY_CHATS)
        if self._chat is None:
            raise RequestError("the model folder has no chat template: add chat_template.jinja, or send a prompt")
        logprobs = chat_logprobs(body)
        text = self._chat.render(plain_messages(body.messages, strict=True), body.chat_template_kwargs)
        prompt = self._prompt(text, add_special_tokens=False)  # the template wrote them
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        try:
            sampling = self._sampling(body, line_id, asked, self._model.max_model_len, logprobs, prompt, chat=True)
        except RequestError as error:
            raise as_sent(error, body) from None
        request = PreparedRequest(number, line_id, Form.CHAT, (prompt,), sampling, _priority(body), self._name(body))
        return replace(request, reasoning=self._reasoning) if sampling.grammar else request

    def _name(self, body: Body) -> str | None:
        return self._model_name if body.model is None else body.model

    def _prompt(self, prompt: str | list[int], *, add_special_tokens: bool = True) -> Prompt:
        if isinstance(prompt, list):
            ids = tuple(prompt)
        elif self._tokenizer is None:
            raise RequestError("the model folder has no tokenizer.json: give prompt_token_ids instead of text")
        else:
            most = self._model.max_model_len
            ids = tuple(prompt_ids(self._tokenizer, prompt, most, add_special_tokens=add_special_tokens))
        ids = checked_prompt(ids, self._model.vocab_size, self._model.max_model_len)
        return Prompt(prompt if isinstance(prompt, str) else None, ids)

    def _sampling(
        self,
        fields: SamplingFields,
        line_id: LineId,
        asked: int | None,
        otherwise: int,
        logprobs: int | None,
        *prompts: Prompt,
        chat: bool = False,
    ) -> SamplingParams:
        """Checked parameters; ``asked`` max_tokens, else the run's default, else ``otherwise``, cut to what fits."""
        default = otherwise if self._max_tokens is None else self._max_tokens
        min_tokens = fields.min_tokens or 0
        max_tokens = asked if asked is not None else max(default, min_tokens)
        said = sampling_params(fields, self._defaults, max_tokens=max_tokens, logprobs=logprobs)
        if fields.bad_words:
            said = replace(said, bad_words_token_ids=bad_words_token_ids(fields.bad_words, self._tokenizer))
        grammar = grammar_of(fields, self._tokenizer)
        if grammar and chat and self._reasoning is not None:
            grammar = after_reasoning(grammar, self._reasoning, prompts[0].text or "", added_tokens(self._tokenizer))
        said = replace(said, grammar=grammar)
        sampling = checked_sampling(said, self._model.vocab_size)
        stop_ids_of(sampling, self._model.eos_token_ids)
        if sampling.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and the model folder has no tokenizer.json")
        if sampling.seed is None:
            sampling = replace(sampling, seed=drawn_seed(self._base_seed, line_id))
        return fitted(sampling, min(len(prompt.token_ids) for prompt in prompts), self._model)


def _decode(data: bytes | msgspec.Raw, kind: type[_Typed]) -> _Typed:
    return msgspec.json.decode(data, type=kind)


def _refuse_unsupported(body: Body, *lacking: Neutral, served_only: Neutral) -> None:
    """Raises RequestError for the first field that batches lack and that is not at its default."""
    if body.stream:
        raise RequestError("stream is true, but a batch can only do without: leave it out")
    for table in lacking:
        refuse(body, table)
    refuse(body, served_only, "only `serve` has it")


def _priority(fields: SamplingFields) -> int:
    return checked_priority(fields.priority or 0)


def _id_trouble(name: str, value: object) -> str | None:
    """What is wrong with an id, or None. Ids are short texts, or in the simple form also whole numbers."""
    if isinstance(value, str):
        if 1 <= len(value) <= MAX_ID_CHARACTERS:
            return None
        return f"{name} has {len(value)} characters, but must have 1 to {MAX_ID_CHARACTERS}"
    if isinstance(value, int) and not isinstance(value, bool) and name == "id":
        return None if -(2**63) <= value < 2**63 else "id is a number beyond 64 bits"
    if value is None:
        return f"{name} is missing"
    return f"{name} is a {type(value).__name__}, but must be a text"


def _reason(error: Exception) -> str:
    """One line for the error row."""
    if isinstance(error, RecursionError):
        return "JSON is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"the line is not UTF-8: {error.reason} (byte 0x{error.object[error.start]:02x})"
    return " ".join(str(error).split()) or type(error).__name__
