"""/v1/responses, OpenAI's newer route, as a map over a chat: its body to a chat's body, a chat's chunks to its events.

Knows: input items and output items, events and their order. Does not know: models, sampling, parsers: all of that is
the chat's. Nothing is stored, so each request carries the whole conversation (docs/serving.md lists what is refused).

Source: OpenAI's API reference, "Responses"; types as in the openai package 3.54.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterator, Sequence
from typing import Any, Final

import msgspec
from starlette.responses import Response

from launch.api.body_rules import Neutral
from launch.api.schema import Body, Function, StreamOptions, Tool
from launch.serve.bodies import ChatBody, refuse_unsupported
from launch.serve.errors import ApiError, bad_request, unsupported
from launch.serve.generation import CLIENT_CLOSED
from launch.serve.settings import ServerSettings
from launch.serve.sse import EventStream
from runtime.frontend.remote_engine import ClientGone
from runtime.schedule.request import SamplingParams

_TEXTS: Final = ("input_text", "output_text", "text")
_THOUGHTS: Final = ("reasoning_text", "summary_text", "text")
_REFUSED: Final[Neutral] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "n": (1,),
    "max_tokens": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "response_format": (),  # it is text.format here
}
_SHOWN: Final = ("message.output_text.logprobs", "reasoning.encrypted_content")  # of ``include``; nothing is encrypted
_NAMES: Final = {  # a chat's field -> the one that it was made from
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "logprobs": "top_logprobs",
}
Row = dict[str, Any]


class Reasoning(msgspec.Struct):
    effort: str | None = None


class TextForm(msgspec.Struct):
    """``format``: text, json_object, or json_schema with its name, schema and strict."""

    format: Row | None = None


class ResponsesBody(Body, kw_only=True, forbid_unknown_fields=False):
    """Of /v1/responses. Sampling parameters beyond OpenAI's are vLLM's, and refused as in the other bodies."""

    input: str | list[Row]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    tools: list[Row] | None = None
    tool_choice: str | Row | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextForm | None = None
    include: list[str] | None = None
    metadata: Any = None  # shown in the answer
    chat_template_kwargs: Row | None = None
    # Refused unless at their default (_REFUSED).
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None
    truncation: Any = None


def as_chat(body: ResponsesBody) -> ChatBody:
    """The chat that answers it, streamed whatever ``body`` asks. Raises ApiError 400, naming the field."""
    refuse_unsupported(body, _REFUSED)
    if other := [name for name in body.include or () if name not in _SHOWN]:
        raise unsupported("include", f"{other[0]!r} is not kept; possible are {', '.join(_SHOWN)}")
    shows_scores = body.top_logprobs is not None or _SHOWN[0] in (body.include or ())
    common: Row = {name: getattr(body, name) for name in Body.__struct_fields__}
    common |= {"stream": True, "stream_options": StreamOptions(include_usage=True)}
    return ChatBody(
        **{**common, "response_format": _response_format(body.text)},
        messages=[*_instructions(body), *_messages(body.input)],
        max_completion_tokens=body.max_output_tokens,
        logprobs=True if shows_scores else None,
        top_logprobs=body.top_logprobs,
        tools=[_tool(f"tools[{at}]", tool) for at, tool in enumerate(body.tools or ())] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _instructions(body: ResponsesBody) -> list[Row]:
    return [{"role": "system", "content": body.instructions}] if body.instructions is not None else []


def _messages(given: str | list[Row]) -> list[Row]:
    """Reasoning, text and calls of one turn of the assistant are one message, as a chat has them."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise bad_request("input is empty: give a text or at least one item", "input")
    found: list[Row] = []
    for at, item in enumerate(given):
        where, kind = f"input[{at}]", item.get("type") or "message"
        if kind == "message":
            role, content = item.get("role"), _text(f"{where}.content", item.get("content"))
            if role == "assistant":
                _of_assistant(found, "content")["content"] = content
            else:
                found.append({"role": role, "content": content})
        elif kind == "reasoning":
            name = "content" if item.get("content") else "summary"
            said = _text(f"{where}.{name}", item.get(name) or "", _THOUGHTS)
            _of_assistant(found, "reasoning", "content", "tool_calls")["reasoning"] = said
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _of_assistant(found).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _text(f"{where}.output", item.get("output"))
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            known = "message, reasoning, function_call and function_call_output are"
            raise bad_request(f"{where} is an item of type {str(kind)[:80]!r}, but only {known}", "input")
    return found


def _of_assistant(found: list[Row], *lacking: str) -> Row:
    """The message of the assistant that is being written; a new one where it has any of ``lacking``."""
    if not found or found[-1]["role"] != "assistant" or any(name in found[-1] for name in lacking):
        found.append({"role": "assistant"})
    return found[-1]


def _text(where: str, content: object, kinds: Sequence[str] = _TEXTS) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a text or a list of text parts", "input")
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if not isinstance(part, dict) or kind not in kinds or not isinstance(part.get("text"), str):
            raise bad_request(
                f"{where}[{at}] is a part of type {str(kind)[:80]!r}, but only text is understood: "
                f'send {{"type": "{kinds[0]}", "text": ...}}',
                "input",
            )
    return "".join(part["text"] for part in content)


def _tool(where: str, tool: Row) -> Tool:
    if tool.get("type") != "function":
        raise unsupported("tools", f"{where} is of type {str(tool.get('type'))[:80]!r}, but only functions are")
    try:
        return Tool("function", msgspec.convert(tool, Function))
    except msgspec.ValidationError as error:
        raise bad_request(f"{where}: {error}", "tools") from None


def _tool_choice(choice: str | Row | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise unsupported("tool_choice", f"{str(choice.get('type'))[:80]!r} is not known here")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(text: TextForm | None) -> Row | None:
    given = None if text is None else text.format
    if given is None or given.get("type") in (None, "text"):
        return None
    if given["type"] != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}


def as_sent(error: ApiError) -> ApiError:
    """The same of the field of /v1/responses that it is about."""
    theirs = _NAMES.get(error.param or "")
    if theirs is None:
        return error
    text = error.message.replace(str(error.param), theirs, 1)
    return ApiError(error.status, text, kind=error.kind, param=theirs, code=error.code, retry_after=error.retry_after)


async def respond(
    answer: Response | EventStream, body: ResponsesBody, settings: ServerSettings
) -> Response | EventStream:
    """``answer``: the chat's, a stream unless its client has left. Raises ApiError."""
    if not isinstance(answer, EventStream):
        return answer
    made = ResponseEvents(body, settings.reasoning_field, settings.defaults)
    if body.stream:
        return answer.translated(made.events, framed)
    try:
        async for _ in made.events(answer.each()):
            pass
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED)
    return Response(msgspec.json.encode(made.response), media_type="application/json")


class ResponseEvents:
    """Events of one response, and the response as it grows.

    ``reasoning_field``: the name that chunks give to reasoning. ``defaults``: sampling where the body does not say.
    """

    def __init__(self, body: ResponsesBody, reasoning_field: str, defaults: SamplingParams) -> None:
        self._reasoning_field = reasoning_field
        self._number = 0
        self._id = ""
        self._status, self._cut_by = "completed", ""
        self._kind = ""  # of the item that is being written, the last of the output
        self._said: list[str] = []  # its text, reasoning or arguments
        self._scores: list[Row] = []
        self._output: list[Row] = []
        self.response: Row = {
            "id": "", "object": "response", "created_at": 0, "status": "in_progress", "background": False,
            "error": None, "incomplete_details": None, "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "max_tool_calls": None, "model": "", "output": self._output,
            "parallel_tool_calls": body.parallel_tool_calls is not False, "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None}, "store": False,
            "temperature": defaults.temperature if body.temperature is None else body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto", "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0, "top_p": defaults.top_p if body.top_p is None else body.top_p,
            "truncation": "disabled", "usage": None, "user": None, "metadata": body.metadata or {},
        }  # fmt: skip

    async def events(self, chunks: AsyncIterable[bytes]) -> AsyncGenerator[Row, None]:
        """For the ``chunks`` of a chat's stream that ends with its usage. An event holds the response as it is until
        the next one is asked for."""
        async for chunk in chunks:
            for event in self._of_chunk(msgspec.json.decode(chunk)):
                yield event
        for event in self._end():
            yield event

    def _of_chunk(self, chunk: Row) -> Iterator[Row]:
        if not self._id:
            self._id = str(chunk["id"])
            self.response |= {"id": self._id, "created_at": chunk["created"], "model": chunk["model"]}
            yield self._event("response.created", response=self.response)
            yield self._event("response.in_progress", response=self.response)
        if (usage := chunk.get("usage")) is not None:
            thought = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
            self.response["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": thought},
                "total_tokens": usage["total_tokens"],
            }
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if thought := delta.get(self._reasoning_field):
                yield from self._more("reasoning", thought)
            if text := delta.get("content"):
                scores = choice.get("logprobs") or {}
                yield from self._more("message", text, scores.get("content") or [])
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    yield from self._close()
                    yield from self._open("function_call", call["id"], call["function"]["name"])
                yield from self._more("function_call", call["function"]["arguments"])
            if choice["finish_reason"] == "length":
                self._status, self._cut_by = "incomplete", "max_output_tokens"

    def _end(self) -> Iterator[Row]:
        if not self._output and self._status == "completed":
            yield from self._open("message")
        yield from self._close()
        self.response["status"] = self._status
        if self._cut_by:
            self.response["incomplete_details"] = {"reason": self._cut_by}
        yield self._event(f"response.{self._status}", response=self.response)

    def _event(self, kind: str, **fields: Any) -> Row:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Row:
        """An event of the item that is being written."""
        item = self._output[-1]
        place = {} if item["type"] == "function_call" else {"content_index": 0}
        return self._event(kind, item_id=item["id"], output_index=len(self._output) - 1, **place, **fields)

    def _open(self, kind: str, call_id: str = "", name: str = "") -> Iterator[Row]:
        self._kind = kind
        short = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: Row = {"id": f"{short}_{self._id}_{len(self._output)}", "type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {"call_id": call_id, "name": name, "arguments": ""}
        else:
            item["content"] = []
            item.update(role="assistant") if kind == "message" else item.update(summary=[])
        self._output.append(item)
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)
        if kind == "function_call":
            return
        part: Row = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"].append(part)
        yield self._of_item("response.content_part.added", part=part)

    def _more(self, kind: str, text: str, scores: Sequence[Row] = ()) -> Iterator[Row]:
        if self._kind != kind:
            yield from self._close()
            yield from self._open(kind)
        self._said.append(text)
        self._scores += scores
        if kind == "message":
            yield self._of_item("response.output_text.delta", delta=text, logprobs=scores)
        elif kind == "reasoning":
            yield self._of_item("response.reasoning_text.delta", delta=text)
        elif text:
            yield self._of_item("response.function_call_arguments.delta", delta=text)

    def _close(self) -> Iterator[Row]:
        if not self._kind:
            return
        kind, item, text, scores = self._kind, self._output[-1], "".join(self._said), self._scores
        self._kind, self._said, self._scores = "", [], []
        item["status"] = self._status
        if kind == "function_call":
            item["arguments"] = text
            yield self._of_item("response.function_call_arguments.done", arguments=text)
        else:
            part = item["content"][0]
            part["text"] = text
            if kind == "reasoning":
                yield self._of_item("response.reasoning_text.done", text=text)
            else:
                part["logprobs"] = scores
                yield self._of_item("response.output_text.done", text=text, logprobs=scores)
            yield self._of_item("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)


def framed(event: Row) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))
