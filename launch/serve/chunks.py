"""Answers in OpenAI's JSON: chunks of a stream, and whole answers.

Knows: field names of both routes, what is the same in every chunk of a stream. Does not know: HTTP, events of a stream
(sse.py), where tokens come from.

A chunk is put together from bytes: of most of them only the text is new.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from launch.api import response_logprobs
from launch.api.response_logprobs import Placed, TokenPlaces
from launch.serve.parsers.deltas import Delta, joined, merged
from launch.serve.requests import Asked
from runtime.frontend.answer import Answer, Piece
from runtime.frontend.logprobs import prompt_logprobs
from runtime.frontend.outputs import TokenLogprob
from runtime.frontend.tokenizer import Tokenizer
from runtime.schedule.request import FinishReason

_LEAST: Final = -9999.0  # in place of minus infinity, which is no JSON; vLLM's number
_json = msgspec.json.encode
Row = dict[str, Any]


class ChunkWriter:
    """Chunks of one stream. ``begun``: choices whose role, or whose prompt where it is shown, has gone out."""

    def __init__(self, asked: Asked, answer_id: str, created: int, tokenizer: Tokenizer | None) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._begun: set[int] = set()
        self._places: dict[int, TokenPlaces] = {}
        kind = "chat.completion.chunk" if asked.chat else "text_completion"
        head = {"id": answer_id, "object": kind, "created": created, "model": asked.model}
        self._head = _json(head)[:-1] + b',"choices":['
        # With usage asked for, the chunks before the last one have a null there, as OpenAI's do.
        self._tail = b'],"usage":null}' if asked.include_usage else b"]}"
        text = '"delta":{"content":' if asked.chat else '"text":'
        self._middle = [b'{"index":%d,%s' % (i, text.encode()) for i in range(len(asked.sequences))]
        closing = "}" if asked.chat else ""
        self._plain_end = (closing + ',"logprobs":null,"finish_reason":null}').encode() + self._tail

    def token(
        self, index: int, piece: Piece, reason: str | None, deltas: list[Delta] | None, usage: Row | None
    ) -> bytes:
        """The chunk of one token. ``deltas``: what a parser made of its text; ``usage``: where every chunk has it."""
        asked = self._asked
        plain = reason is None and piece.logprob is None and deltas is None and usage is None and not asked.token_ids
        if plain and index in self._begun:
            return self._head + self._middle[index] + _json(piece.text) + self._plain_end
        logprobs = self._logprobs(index, piece)
        extra: Row = {}
        beside: Row = {}  # of a chat's one prompt, next to its choices, as in ``whole``
        if asked.token_ids:
            extra["token_ids"] = [piece.token_id] if piece.token_id >= 0 else []
            if index not in self._begun:
                of_prompt = beside if asked.chat else extra
                of_prompt["prompt_token_ids"] = asked.prompt_of(index).token_ids
        if not asked.chat:
            return self._choice({"index": index, "text": self._text(index, piece.text), "logprobs": logprobs,
                                 "finish_reason": reason, **extra}, usage)  # fmt: skip
        delta: Row = {"content": piece.text} if deltas is None else joined(deltas)
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", **delta}
        return self._choice(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason, **extra}, usage, beside
        )

    def usage(self, usage: Row) -> bytes:
        """The last chunk of all: no choices."""
        return self._head + b'],"usage":' + _json(usage) + b"}"

    def _choice(self, choice: Row, usage: Row | None, beside: Row | None = None) -> bytes:
        tail = self._tail if usage is None else b'],"usage":' + _json(usage) + b"}"
        if beside:
            tail = tail[:-1] + b"," + _json(beside)[1:]
        return self._head + _json(choice) + tail

    def _text(self, index: int, text: str) -> str:
        if index in self._begun or not self._asked.echo:
            self._begun.add(index)
            return text
        self._begun.add(index)
        return prompt_text(self._asked, index, self._tokenizer) + text

    def _logprobs(self, index: int, piece: Piece) -> Row | None:
        if piece.logprob is None:
            return None
        entry, places = _finite(piece.logprob), self._places.get(index)
        if places is None:
            places = self._places[index] = TokenPlaces(self._tokenizer, self._asked.prompt_of(index).token_ids)
        if self._asked.chat:
            return {"content": response_logprobs.of_chat([entry], places)}
        return response_logprobs.of_completion([(piece.token_id, entry)], places)


def usage_of(asked: Asked, answers: list[Answer], thought: int | None = None) -> Row:
    """Tokens of prompts and answers; a prompt counts once, however many answers it has. ``thought``: of them, those of
    reasoning, where that is read."""
    generated = 0 if asked.hidden else sum(len(answer.token_ids) for answer in answers)
    prompt = asked.prompt_tokens
    usage: Row = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    return usage if thought is None else {**usage, "completion_tokens_details": {"reasoning_tokens": thought}}


def finish_reason(asked: Asked, answer: Answer, called: bool) -> str:
    """OpenAI's word for how an answer ended."""
    assert answer.reason is not None
    if asked.hidden:  # of the prompt alone, nothing was to be generated
        return FinishReason.LENGTH.label
    if called and answer.reason is FinishReason.STOP and not asked.named_tool:
        return "tool_calls"
    return answer.reason.label


def prompt_text(asked: Asked, index: int, tokenizer: Tokenizer | None) -> str:
    prompt = asked.prompt_of(index)
    if prompt.text is not None:
        return prompt.text
    return "" if tokenizer is None else tokenizer.decode(prompt.token_ids)


def whole(
    asked: Asked,
    answer_id: str,
    created: int,
    answers: list[Answer],
    pieces: list[list[Piece]],
    deltas: list[list[Delta]] | None,
    tokenizer: Tokenizer | None,
    usage: Row,
) -> bytes:
    """The JSON of an answer that is not streamed. ``deltas``: of each choice's text, where a parser reads it.

    Choice by choice: between two of them other threads run.
    """
    choices: list[msgspec.Raw] = []
    whole_prompt: Row = {}  # of a chat's one prompt, next to its choices, as in vLLM
    for index, answer in enumerate(answers):
        first = answers[index // asked.sampling.n * asked.sampling.n]  # of the prompt: it alone scored it
        scores = _prompt_scores(asked, index, first) if asked.sampling.prompt_logprobs is not None else ()
        if asked.chat:
            found = None if deltas is None else deltas[index]
            row = _chat_choice(asked, index, answer, pieces[index], found, tokenizer)
        else:
            row = _completion_choice(asked, index, answer, pieces[index], scores, tokenizer)
        of_prompt = whole_prompt if asked.chat else row
        if asked.token_ids:
            row["token_ids"] = [] if asked.hidden else answer.token_ids.tolist()
            of_prompt["prompt_token_ids"] = asked.prompt_of(index).token_ids
        if asked.scored_prompt:
            rows = (response_logprobs.of_prompt([entry], tokenizer)[0] for entry in scores)
            of_prompt["prompt_logprobs"] = [_written(one) for one in rows]
        choices.append(_written(row))
    return _json(
        {
            "id": answer_id,
            "object": "chat.completion" if asked.chat else "text_completion",
            "created": created,
            "model": asked.model,
            "choices": choices,
            "usage": usage,
            **whole_prompt,
        }
    )


def _chat_choice(
    asked: Asked,
    index: int,
    answer: Answer,
    pieces: list[Piece],
    deltas: list[Delta] | None,
    tokenizer: Tokenizer | None,
) -> Row:
    message: Row = {"role": "assistant", **({"content": answer.text} if deltas is None else merged(deltas))}
    logprobs = None
    if asked.sampling.logprobs is not None:
        entries = [piece.logprob for piece in pieces if piece.logprob is not None]
        places = TokenPlaces(tokenizer, asked.prompt_of(index).token_ids)
        rows = (response_logprobs.of_chat([_finite(entry)], places)[0] for entry in entries)
        logprobs = {"content": [_written(one) for one in rows]}
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason(asked, answer, "tool_calls" in message),
    }


def _completion_choice(
    asked: Asked,
    index: int,
    answer: Answer,
    pieces: list[Piece],
    scores: Sequence[TokenLogprob | None],
    tokenizer: Tokenizer | None,
) -> Row:
    text = "" if asked.hidden else answer.text
    prompt = asked.prompt_of(index).token_ids
    shown = prompt_text(asked, index, tokenizer) if asked.echo else ""
    logprobs = None
    if asked.sampling.logprobs is not None:
        if asked.echo:
            places = TokenPlaces(tokenizer, source=asked.prompt_of(index).text)
            logprobs = _columns(zip(prompt, scores, strict=False), places)
        said = [(p.token_id, None if p.logprob is None else _finite(p.logprob)) for p in pieces]
        places = TokenPlaces(tokenizer, prompt, len(shown))
        logprobs = _columns([] if asked.hidden else said, places, logprobs)
    return {"index": index, "text": shown + text, "logprobs": logprobs,
            "finish_reason": finish_reason(asked, answer, False)}  # fmt: skip


def _columns(placed: Iterable[Placed], places: TokenPlaces, before: Row | None = None) -> Row:
    """``of_completion``, whose objects of one token alone are there at a time."""
    row = response_logprobs.of_completion([], places, before)
    for one in placed:
        row = response_logprobs.of_completion([one], places, row)
        row["top_logprobs"][-1] = _written(row["top_logprobs"][-1])
    return row


def _written(row: object) -> msgspec.Raw:
    return msgspec.Raw(_json(row))


def _prompt_scores(asked: Asked, index: int, answer: Answer) -> tuple[TokenLogprob | None, ...]:
    if answer.end is None or answer.end.prompt_logprobs is None:
        return ()
    entries = prompt_logprobs(asked.prompt_of(index).token_ids, answer.end.prompt_logprobs)
    return tuple(None if entry is None else _finite(entry) for entry in entries)


def _finite(entry: TokenLogprob) -> TokenLogprob:
    """``entry`` in numbers that JSON has."""
    if entry.logprob >= _LEAST and all(value >= _LEAST for _, value in entry.top):
        return entry
    top = tuple((token, max(value, _LEAST)) for token, value in entry.top)
    return replace(entry, logprob=max(entry.logprob, _LEAST), top=top)
