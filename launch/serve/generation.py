"""One HTTP request that generates: from the checked request to the response, whole or as a stream.

Knows: which end is which status, when headers go out, what is measured of a request. Does not know: routes (app.py),
field names of answers (chunks.py), how tokens come (runtime/frontend/remote_engine.py).

Nothing is sent before the first token, or the end without one: until then a request can still be refused with a status
of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from launch.serve.chunks import ChunkWriter, finish_reason, usage_of, whole
from launch.serve.errors import ApiError, bad_request, engine_failed, refused_by_engine, unavailable
from launch.serve.metrics import Metrics
from launch.serve.parsers.answer_parser import AnswerParser
from launch.serve.parsers.deltas import Delta, first_calls
from launch.serve.requests import Asked
from launch.serve.settings import ServerSettings
from launch.serve.sse import EventStream
from runtime.frontend.answer import Answer, Piece
from runtime.frontend.remote_engine import ClientGone, EngineLost, Mailbox, RemoteEngine, Update
from runtime.frontend.tokenizer import Tokenizer
from runtime.schedule.request import FinishReason

CLIENT_CLOSED = 499  # its client has left
_SHORT = 1 << 14  # tokens of prompts and answers that are written down in a millisecond or two
_FAILED = (FinishReason.ERROR, FinishReason.CANCELLED)


class Generation:
    """See the module's docstring. ``respond`` once."""

    def __init__(
        self,
        asked: Asked,
        engine: RemoteEngine,
        settings: ServerSettings,
        metrics: Metrics,
        tokenizer: Tokenizer | None,
        answer_id: str,
        arrived_at: float,
    ) -> None:
        self._asked = asked
        self._engine = engine
        self._settings = settings
        self._tokenizer = tokenizer
        self._id = answer_id
        self._created = int(time.time())
        self._parsers = parsers_for(asked, settings, tokenizer)
        marks = self._parsers[0].marks if self._parsers else ()
        self._answers = [
            Answer(tokenizer, asked.sampling, sequence.stop_token_ids, sequence.prompt_token_ids, marks)
            for sequence in asked.sequences
        ]
        self._pieces: list[list[Piece]] = [[] for _ in asked.sequences]
        self._deltas: list[list[Delta]] = [[] for _ in asked.sequences]
        self._thought = 0  # tokens of reasoning
        self._keep_pieces = asked.sampling.logprobs is not None and not asked.stream
        self._open = len(asked.sequences)
        self._watch = _Stopwatch(metrics, asked, arrived_at)

    async def respond(self, request: Request) -> Response | EventStream:
        """Raises ApiError. The caller sends the response; a stream cleans up after itself."""
        try:
            mailbox = self._engine.submit(self._asked.sequences, self._watch.arrived_at)
        except EngineLost as error:
            lost = unavailable(str(error), "engine_lost", self._settings.retry_after)
            self._watch.rejected(lost)
            raise lost from None
        watcher = asyncio.ensure_future(_watch_disconnect(request.receive, mailbox))

        def leave() -> None:
            watcher.cancel()
            mailbox.leave()
            self._watch.left(self._answers)

        try:
            first = await mailbox.take()
            self._refuse(first)
            if self._asked.stream:
                return EventStream(self._events(mailbox, first), leave, self._settings.comment_seconds)
            body = await self._whole(mailbox, first)
        except ClientGone:
            leave()
            return Response(status_code=CLIENT_CLOSED)
        except EngineLost as error:
            leave()
            raise self._lost(error) from None
        except BaseException:
            leave()
            raise
        leave()
        return Response(body, media_type="application/json")

    async def _whole(self, mailbox: Mailbox, updates: list[Update]) -> bytes:
        awaited = self._asked.sampling.prompt_logprobs is not None
        while True:
            for update in updates:
                self._take(mailbox, update)
            if not self._open and not (awaited and mailbox.live):
                break
            updates = await mailbox.take()
        deltas, usage = self._deltas if self._parsers else None, self._usage()
        parts = self._asked, self._id, self._created, self._answers, self._pieces, deltas, self._tokenizer, usage
        tokens = usage["total_tokens"] * self._asked.sampling.n
        if self._keep_pieces or awaited or tokens > _SHORT:
            return await asyncio.to_thread(whole, *parts)
        return whole(*parts)

    def _take(self, mailbox: Mailbox, update: Update) -> tuple[list[Piece], str]:
        """The pieces of an update, and text that came without a token. Raises ApiError for an end that is a failure."""
        index = update.choice
        answer = self._answers[index]
        ended_before = answer.reason is not None
        gain = answer.take(update)
        self._watch.gained(index, len(gain.pieces))
        if gain.found_stop:
            mailbox.stop(index, await_end=self._asked.sampling.prompt_logprobs is not None)
        if self._keep_pieces:
            self._pieces[index] += gain.pieces
        if not self._asked.stream and self._parsers:
            for piece in gain.pieces:
                self._deltas[index] += self._parsed(index, piece, False)
            if answer.reason is not None and not ended_before:
                self._deltas[index] += self._parsed(index, Piece(-1, gain.rest, None), True)
        if answer.reason is not None and not ended_before:
            self._open -= 1
            self._raise_failure(answer)
        return gain.pieces, gain.rest

    def _raise_failure(self, answer: Answer) -> None:
        if answer.reason is FinishReason.ERROR:
            detail = (answer.end and answer.end.detail) or "the model's logits were not finite"
            if self._asked.sampling.grammar:  # that it leaves no token, or takes too much work, is the client's fault
                raise bad_request(f"{self._asked.grammar_field}: {detail}", self._asked.grammar_field)
            raise engine_failed(detail)
        if answer.reason is FinishReason.CANCELLED:
            raise unavailable("the server is shutting down", "shutting_down", self._settings.retry_after)
        if answer.reason is FinishReason.REJECTED:
            raise self._rejected((answer.end and answer.end.detail) or "")

    def _refuse(self, updates: list[Update]) -> None:
        """What the engine did not even begin, or gave up before its first token, has its status as a stream,
        too."""
        for update in updates:
            if update.end is not None and update.end.reason is FinishReason.REJECTED:
                raise self._rejected(update.end.detail)
            if update.end is not None and update.end.reason in _FAILED and not update.token_ids:
                answer = self._answers[update.choice]
                answer.take(update)
                self._raise_failure(answer)

    def _rejected(self, detail: str) -> ApiError:
        error = refused_by_engine(detail, self._settings.retry_after)
        self._watch.rejected(error)
        return error

    def _lost(self, error: EngineLost) -> ApiError:
        text = str(error)
        if self._engine.failed:
            return ApiError(500, text, kind="internal_server_error", code="engine_lost")
        return unavailable(text, "shutting_down", self._settings.retry_after)

    async def _events(self, mailbox: Mailbox, updates: list[Update]) -> AsyncGenerator[bytes, None]:
        """Chunks: one a token, then the usage if asked for."""
        asked = self._asked
        writer = ChunkWriter(asked, self._id, self._created, self._tokenizer)
        try:
            while True:
                for update in updates:
                    for chunk in self._chunks(writer, mailbox, update):
                        yield chunk
                if not self._open:
                    break
                updates = await mailbox.take()
        except EngineLost as error:
            raise self._lost(error) from None
        if asked.include_usage:
            yield writer.usage(self._usage())

    def _chunks(self, writer: ChunkWriter, mailbox: Mailbox, update: Update) -> list[bytes]:
        index = update.choice
        answer = self._answers[index]
        if answer.reason is not None:
            return []
        pieces, rest = self._take(mailbox, update)
        ended = answer.reason is not None
        if self._asked.hidden:
            pieces, rest = [Piece(-1, "", None) for _ in pieces], ""
        if ended and not pieces:
            pieces = [Piece(-1, rest, None)]
        chunks = []
        for at, piece in enumerate(pieces):
            last = ended and at == len(pieces) - 1
            deltas = self._parsed(index, piece, last) if self._parsers else None
            if deltas is not None and not any(delta.keys() - {"content"} for delta in deltas):
                piece, deltas = piece._replace(text="".join(delta["content"] for delta in deltas)), None
            usage = self._usage() if self._asked.continuous_usage else None
            chunks.append(writer.token(index, piece, self._reason(index) if last else None, deltas, usage))
        return chunks

    def _parsed(self, index: int, piece: Piece, last: bool) -> list[Delta]:
        """What the parser makes of a piece of text."""
        parser = self._parsers[index]
        before = parser.thinking
        deltas = parser.push(piece.text, piece.mark)
        self._thought += before and parser.thinking and piece.token_id >= 0
        if last:
            deltas += parser.finish()
        return shown(deltas, self._asked, self._settings)

    def _usage(self) -> dict[str, Any]:
        reads = self._parsers and self._settings.reasoning_parser != "none"
        return usage_of(self._asked, self._answers, self._thought if reads else None)

    def _reason(self, index: int) -> str:
        called = bool(self._parsers) and self._parsers[index].calls > 0
        return finish_reason(self._asked, self._answers[index], called)


def parsers_for(asked: Asked, settings: ServerSettings, tokenizer: Tokenizer | None) -> list[AnswerParser]:
    """One an answer; none where its text goes out as it is."""
    calls = settings.tool_call_parser if asked.tools else None
    reasoning = None if settings.reasoning_parser == "none" else settings.reasoning_parser
    if not asked.chat or tokenizer is None or (calls is None and reasoning is None):
        return []
    tokens = frozenset(tokenizer.added_ids.values())
    return [
        AnswerParser(calls, reasoning, asked.tools or {}, tokens, begun=asked.begun, filled=asked.filled)
        for _ in asked.sequences
    ]


def shown(deltas: list[Delta], asked: Asked, settings: ServerSettings) -> list[Delta]:
    """Of an answer's deltas those that its client wants, under the names that it wants."""
    found = first_calls(deltas, asked.most_calls)
    if not asked.reasoning:
        found = [delta for delta in found if "reasoning" not in delta]
    if settings.reasoning_field != "reasoning":
        found = [
            {settings.reasoning_field if name == "reasoning" else name: delta[name] for name in delta}
            for delta in found
        ]
    return found


class _Stopwatch:
    """What is measured of one request, for the metrics."""

    def __init__(self, metrics: Metrics, asked: Asked, arrived_at: float) -> None:
        self.arrived_at = arrived_at
        self._metrics = metrics
        self._asked = asked
        self._first_at: float | None = None
        self._begun = [0.0] * len(asked.sequences)
        self._latest = [0.0] * len(asked.sequences)
        self._tokens = [0] * len(asked.sequences)
        self._left = False
        if asked.form:
            metrics.constrained(asked.form)

    def gained(self, index: int, tokens: int) -> None:
        if not tokens:
            return
        now, metrics = time.monotonic(), self._metrics
        if self._first_at is None:
            self._first_at = now
            metrics.observe("vllm:time_to_first_token_seconds", now - self.arrived_at)
        if self._tokens[index]:
            metrics.observe("vllm:inter_token_latency_seconds", (now - self._latest[index]) / tokens, tokens)
        else:
            self._begun[index] = now
        self._latest[index] = now
        self._tokens[index] += tokens
        metrics.count("vllm:generation_tokens", tokens)

    def rejected(self, error: ApiError) -> None:
        """The request was refused: of its answers none has ended, and none of it was served."""
        if not self._left:
            self._left = True
            self._metrics.rejected(error.code)

    def left(self, answers: list[Answer]) -> None:
        """The request is over, however it ended."""
        if self._left:
            return
        self._left = True
        metrics, now = self._metrics, time.monotonic()
        for answer in answers:
            metrics.finished(_outcome(answer))
        ends = [answer.end for answer in answers if answer.end is not None]
        queued = max((end.queued for end in ends), default=0.0)
        metrics.count("vllm:prompt_tokens", self._asked.prompt_tokens)
        for prompt in self._asked.prompts:
            metrics.observe("vllm:request_prompt_tokens", len(prompt.token_ids))
        metrics.observe("vllm:request_generation_tokens", sum(self._tokens))
        metrics.observe("vllm:request_max_num_generation_tokens", max(self._tokens))
        metrics.observe("vllm:request_params_n", self._asked.sampling.n)
        metrics.observe("vllm:request_params_max_tokens", self._asked.sampling.max_tokens)
        metrics.observe("vllm:e2e_request_latency_seconds", now - self.arrived_at)
        metrics.observe("vllm:request_queue_time_seconds", queued)
        metrics.observe("vllm:request_inference_time_seconds", max(0.0, now - self.arrived_at - queued))
        if self._first_at is None:
            return
        metrics.observe("vllm:request_prefill_time_seconds", max(0.0, self._first_at - self.arrived_at - queued))
        metrics.observe("vllm:request_decode_time_seconds", max(self._latest) - self._first_at)
        for begun, latest, tokens in zip(self._begun, self._latest, self._tokens, strict=True):
            if tokens > 1:
                metrics.observe("vllm:request_time_per_output_token_seconds", (latest - begun) / (tokens - 1))


def _outcome(answer: Answer) -> str:
    """vLLM's word for it."""
    if answer.reason in (FinishReason.STOP, FinishReason.LENGTH):
        return answer.reason.label
    return "error" if answer.reason is FinishReason.ERROR else "abort"


async def _watch_disconnect(receive: Receive, mailbox: Mailbox) -> None:
    """The body has been read: what comes next is the end of the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    mailbox.fail(ClientGone())
