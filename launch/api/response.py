"""One line of output for one line of input: the simple form, the OpenAI response envelope, and error rows.

Knows: field names of each form, and how to read back whose row a line is. Does not know: files (output_file.py).

Simple form    {"id", "text", "token_ids", "finish_reason", "seed", "logprobs"?, "speculation"?, "prompt_logprobs"?,
               "usage", "timing"}; with n > 1 the answers stand in "choices", each with its "index".
OpenAI form    {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}; the body is that of the
               endpoint, with "token_ids", "seed", "timing", with drafts "speculation" and, where asked for, vLLM's
               "prompt_logprobs" added.
Errors         {"id", "error": {"line", "code", "message"}}; in the OpenAI form the envelope with status 400 or 500 and
               the same "error". docs/generate.md has a row of each form, and the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import msgspec

from launch.api import response_logprobs
from launch.api.parser import BadLine, Form, LineId, PreparedRequest
from launch.api.response_logprobs import TokenPlaces
from runtime.frontend.outputs import Completion, RequestOutput
from runtime.frontend.tokenizer import Tokenizer, added_tokens
from runtime.schedule.request import FinishReason

Row = dict[str, Any]


def answer_row(
    request: PreparedRequest, outputs: Sequence[RequestOutput], tokenizer: Tokenizer | None, created: int
) -> bytes:
    """The row of a request that ended, of one output a prompt; an error row if one of its answers did not end by stop
    or length.

    ``created``: seconds since the epoch, which the OpenAI form carries.
    """
    failed = next((output.failed for output in outputs if output.failed is not None), None)
    if failed is not None:
        refused = failed.finish_reason is FinishReason.REJECTED or request.sampling.grammar
        code = "rejected" if refused else "engine_error"
        message = failed.detail or f"the request ended with {failed.finish_reason.label}"
        return error_row(BadLine(request.line, request.id, request.form, code, message))
    if request.form is Form.SIMPLE:
        return _line(_simple(request, *outputs))
    if request.hidden:
        outputs = [_unsaid(output) for output in outputs]
    if request.form is Form.CHAT:
        body = _chat_body(request, outputs[0], tokenizer)
    else:
        choices = [choice for output in outputs for choice in _completion_choices(request, output, tokenizer)]
        body = {"choices": [{**choice, "index": index} for index, choice in enumerate(choices)]}
    digest = _digest(request.id)
    kind = "chat.completion" if request.form is Form.CHAT else "text_completion"
    prefix = "chatcmpl-" if request.form is Form.CHAT else "cmpl-"
    body = {"id": prefix + digest, "object": kind, "created": created, "model": request.model, **body}
    body |= {"usage": _usage(*outputs), "timing": _timing(*outputs)}
    return _line(_envelope(request.id, 200, body, None))


def error_row(bad: BadLine) -> bytes:
    """The row of a line that was not served."""
    error = {"line": bad.line, "code": bad.code, "message": bad.message}
    if bad.form is Form.SIMPLE:
        return _line({"id": bad.id, "error": error})
    kind = "server_error" if bad.code == "engine_error" else "invalid_request_error"
    body = {"error": {"message": bad.message, "type": kind, "code": bad.code, "param": None}}
    return _line(_envelope(bad.id, 500 if bad.code == "engine_error" else 400, body, error))


class _WrittenError(msgspec.Struct):
    line: int


class WrittenRow(msgspec.Struct):
    """What is read back of a row to resume: whose it is, and for an error row also of which line."""

    id: LineId | None
    custom_id: LineId | msgspec.UnsetType | None = msgspec.UNSET
    error: _WrittenError | None = None
    usage: msgspec.Raw = msgspec.Raw()
    response: msgspec.Raw = msgspec.Raw()

    def __post_init__(self) -> None:
        if self.error is None and not self.usage and not self.response:
            raise ValueError("it has neither an answer nor an error")

    @property
    def line_id(self) -> LineId | None:
        return self.id if isinstance(self.custom_id, msgspec.UnsetType) else self.custom_id


read_back = msgspec.json.Decoder(WrittenRow).decode


def _line(row: Row) -> bytes:
    return msgspec.json.encode(row) + b"\n"


def _digest(line_id: LineId | None) -> str:
    return blake2b(repr(line_id).encode(), digest_size=12).hexdigest()


def _envelope(line_id: LineId | None, status: int, body: Row, error: Row | None) -> Row:
    digest = _digest(line_id)
    response = {"status_code": status, "request_id": f"req-{digest}", "body": body}
    return {"id": f"batch_req_{digest}", "custom_id": line_id, "response": response, "error": error}


def _unsaid(output: RequestOutput) -> RequestOutput:
    """Without its answers, for a request that only scores its prompts."""

    def unsaid(c: Completion) -> Completion:
        logprobs = None if c.logprobs is None else ()
        return replace(c, text="", token_ids=(), logprobs=logprobs, finish_reason=FinishReason.LENGTH)

    return replace(output, completions=tuple(map(unsaid, output.completions)))


def _usage(*outputs: RequestOutput) -> Row:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(output.generated_tokens for output in outputs)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _timing(*outputs: RequestOutput) -> Row:
    """Seconds, to the microsecond. Of several prompts: until the first of them is queued or has a token, the mean of
    their tpot, and until the last of them ends."""
    every = [output.timing for output in outputs]
    ttft = [timing.ttft for timing in every if timing.ttft is not None]
    tpot = [timing.tpot for timing in every if timing.tpot is not None]
    values = {
        "queued": min(timing.queued for timing in every),
        "ttft": min(ttft, default=None),
        "tpot": sum(tpot) / len(tpot) if tpot else None,
        "e2e": max(timing.e2e for timing in every),
    }
    return {name: None if value is None else round(value, 6) for name, value in values.items()}


def _simple(request: PreparedRequest, output: RequestOutput) -> Row:
    answers = [_simple_answer(completion) for completion in output.completions]
    row: Row = {"id": request.id}
    if len(answers) == 1:
        row |= answers[0]
    else:
        row["choices"] = [{"index": i, **answer} for i, answer in enumerate(answers)]
    if output.prompt_logprobs is not None:
        row["prompt_logprobs"] = response_logprobs.simple(output.prompt_logprobs)
    return row | {"usage": _usage(output), "timing": _timing(output)}


def _simple_answer(completion: Completion) -> Row:
    answer: Row = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason.label,
        "seed": completion.seed,
    }
    if completion.logprobs is not None:
        answer["logprobs"] = response_logprobs.simple(completion.logprobs)
    return answer | _speculation(completion)


def _choice(completion: Completion) -> Row:
    choice: Row = {
        "index": completion.index,
        "finish_reason": completion.finish_reason.label,
        "token_ids": completion.token_ids,
        "seed": completion.seed,
    }
    return choice | _speculation(completion)


def _speculation(completion: Completion) -> Row:
    """What proposals did for an answer; nothing where no step checked any."""
    if not completion.rounds:
        return {}
    return {"speculation": {"rounds": completion.rounds, "accepted_tokens": completion.accepted}}


def _completion_choices(request: PreparedRequest, output: RequestOutput, tokenizer: Tokenizer | None) -> list[Row]:
    """With ``echo`` every choice begins with the prompt; its token_ids are the answer's all the same."""
    echoed = _prompt_text(output, tokenizer) if request.echo else ""
    before: tuple[response_logprobs.Placed, ...] = ()
    if request.echo and output.prompt_logprobs is not None:
        before = tuple(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))
    choices = []
    for completion in output.completions:
        choice = {**_choice(completion), "text": echoed + completion.text, "logprobs": None}
        if completion.logprobs is not None:
            if before:
                places = TokenPlaces(tokenizer, source=output.prompt)
                choice["logprobs"] = response_logprobs.of_completion(before, places)
            said = [(entry.token_id, entry) for entry in completion.logprobs]
            places = TokenPlaces(tokenizer, output.prompt_token_ids, len(echoed))
            choice["logprobs"] = response_logprobs.of_completion(said, places, choice["logprobs"])
        if output.prompt_logprobs is not None and request.scored:
            choice["prompt_logprobs"] = response_logprobs.of_prompt(output.prompt_logprobs, tokenizer)
        choices.append(choice)
    return choices


def _apart(completion: Completion, first: str, last: str, tokenizer: Tokenizer | None) -> Row:
    """Reasoning and content of a message; nothing where the reasoning did not end. Marks may begin and end with tokens
    that have no text of their own."""
    ids, added = completion.token_ids, added_tokens(tokenizer)
    begins = next((token for name, token in added.items() if name and last.startswith(name)), None)
    ends = next((token for name, token in added.items() if name and last.endswith(name)), None)
    if tokenizer is not None and begins in ids and ends in ids:
        end = len(ids) - ids[::-1].index(ends)
        begin = len(ids) - ids[::-1].index(begins, len(ids) - end) - 1
        opened = tuple(tokenizer.encode(first, add_special_tokens=False))
        thoughts = ids[len(opened) : begin] if ids[: len(opened)] == opened else ids[:begin]
        before, after = tokenizer.decode(thoughts), tokenizer.decode(ids[end:])
    else:
        before, found, after = completion.text.partition(last)
        if not found:
            return {}
        before = before.strip().removeprefix(first)
    return {"reasoning": before.strip(), "content": after.lstrip()}


def _prompt_text(output: RequestOutput, tokenizer: Tokenizer | None) -> str:
    if output.prompt is not None:
        return output.prompt
    return "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids)


def _chat_body(request: PreparedRequest, output: RequestOutput, tokenizer: Tokenizer | None) -> Row:
    choices = []
    for completion in output.completions:
        logprobs = None
        if completion.logprobs is not None:
            places = TokenPlaces(tokenizer, output.prompt_token_ids)
            logprobs = {"content": response_logprobs.of_chat(completion.logprobs, places)}
        message = {"role": "assistant", "content": completion.text}
        if request.reasoning is not None:
            message |= _apart(completion, *request.reasoning, tokenizer)
        choices.append({**_choice(completion), "message": message, "logprobs": logprobs})
    if output.prompt_logprobs is None:
        return {"choices": choices}
    return {"choices": choices, "prompt_logprobs": response_logprobs.of_prompt(output.prompt_logprobs, tokenizer)}
