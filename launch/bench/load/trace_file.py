"""Trace files: one JSON object a line, with or without an arrival time, that has a prompt or only its lengths.

Knows: what a line may say. Does not know: rates, how requests are sent.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}    Mooncake's form
    {"arrival_time": 0.25, "input_length": 300, "output_length": 40}
    {"arrival_time": 0.5, "prompt_token_ids": [5, 7, 9], "max_tokens": 40, "ignore_eos": true}
    {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [...]}}

``timestamp`` is in milliseconds, ``arrival_time`` in seconds; either all lines have one or none has. Where there are
lengths, ids are drawn; equal ``hash_ids`` give the same 512 tokens, so that prompts share what they shared. Every other
line is one that `generate` reads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from launch.api.parser import BadLine, RequestParser
from launch.bench.workload import greedy
from launch.errors import BenchError
from launch.generate.input_file import read_lines
from runtime.frontend.chat_template import ChatTemplate
from runtime.frontend.client import PromptRequest
from runtime.frontend.engine_protocol import ModelFacts
from runtime.frontend.tokenizer import Tokenizer

HASHED_TOKENS = 512  # that one of Mooncake's hash_ids stands for
_MAX_LINE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Trace:
    """In order of arrival. ``offsets``: seconds after the first; None in a file without times. ``drawn``: all prompts
    are random ids."""

    requests: Sequence[PromptRequest]
    offsets: Sequence[float] | None
    drawn: bool


class _Times(msgspec.Struct):
    """What a trace adds to a request; other fields are the request's."""

    timestamp: float | None = None
    arrival_time: float | None = None
    input_length: int | None = None
    output_length: int | None = None
    hash_ids: list[int] = []


_TIMES = ("timestamp", "arrival_time")


def read_trace(
    path: Path,
    count: int | None,
    tokenizer: Tokenizer | None,
    chat: ChatTemplate | None,
    output_len: int | None,
    model: ModelFacts,
    seed: int,
    ids: range,
) -> Trace:
    """The first ``count`` lines of ``path``, all of them with None. ``output_len``: of lines with a prompt that do not
    say. Raises BenchError, naming the line, for one that cannot be measured."""
    parser = RequestParser(model, tokenizer, chat, max_tokens=output_len, base_seed=seed)
    found: list[tuple[float | None, PromptRequest]] = []
    drawn = True
    with path.open("rb") as stream:
        for line in read_lines(stream, _MAX_LINE_BYTES):
            if count is not None and len(found) == count:
                break
            where = f"{path}, line {line.number}"
            if line.data is None:
                raise BenchError(f"{where} has {line.length} bytes, but may have {_MAX_LINE_BYTES}")
            times = _decoded(line.data, where)
            at = times.arrival_time if times.timestamp is None else times.timestamp / 1e3
            if found and (at is None) != (found[0][0] is None):
                raise BenchError(f"{where}: some lines have an arrival time and some have none: give all of them one")
            if times.input_length is None:
                drawn = False
                request = _request(line.number, line.data, parser, where)
            else:
                request = _lengths(line.number, times, seed, ids, where)
            found.append((at, request))
    if not found:
        raise BenchError(f"{path} gives 0 requests: name another file")
    if count is not None and len(found) < count:
        raise BenchError(
            f"{path} gives {len(found)} requests, {count} are asked for: type --num-prompts {len(found)} or less"
        )
    if any(at is None for at, _ in found):
        return Trace([request for _, request in found], None, drawn)
    found.sort(key=lambda entry: entry[0] or 0.0)  # stable: lines of one moment keep their order
    first = found[0][0] or 0.0
    return Trace([request for _, request in found], [(at or 0.0) - first for at, _ in found], drawn)


def _decoded(data: bytes, where: str) -> _Times:
    try:
        return msgspec.json.decode(data, type=_Times)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BenchError(f"{where} is no line of a trace: {error}") from None


def _lengths(number: int, times: _Times, seed: int, ids: range, where: str) -> PromptRequest:
    prompt, answer = times.input_length or 0, times.output_length
    if prompt < 1 or answer is None or answer < 1:
        raise BenchError(
            f"{where}: input_length is {times.input_length} and output_length {answer}: both must be at least 1"
        )
    tokens: list[int] = []
    for name in times.hash_ids[: -(-prompt // HASHED_TOKENS)]:
        tokens += random.Random(f"{seed} block {name}").choices(ids, k=HASHED_TOKENS)
    del tokens[prompt:]
    if len(tokens) < prompt:
        tokens += random.Random(f"{seed} line {number}").choices(ids, k=prompt - len(tokens))
    return PromptRequest(tuple(tokens), greedy(answer))


def _request(number: int, data: bytes, parser: RequestParser, where: str) -> PromptRequest:
    """A line as `generate` reads it, its times taken out."""
    fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    if fields.keys() & set(_TIMES):
        data = msgspec.json.encode({name: value for name, value in fields.items() if name not in _TIMES})
    item = parser.parse(number, data, parser.peek(number, data))
    if isinstance(item, BadLine):
        raise BenchError(f"{where}: {item.message}")
    if item.answers > 1 or item.sampling.stop:
        raise BenchError(f"{where}: n > 1, several prompts and stop strings are not measured")
    return PromptRequest(item.prompts[0].token_ids, item.sampling, priority=item.priority)
