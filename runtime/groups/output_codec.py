"""A group's outputs as bytes on their way to rank 0: msgpack, typed, strict. What does not fit exactly is refused.

Knows: the fields of StepOutput, and how arrays of log-probabilities travel. Does not know: who sends and who receives
(request_router.py), sockets (parallel/control), or what an output means to a caller.

An output that is larger than a message may be is sent as several, each with some of the ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from runtime.execute.result_reader import StepLogprobs
from runtime.execute.sampling.logprobs import PromptLogprobs
from runtime.schedule.plan import Finished, StepOutput
from runtime.schedule.request import FinishReason

TOKENS_A_MESSAGE = 1 << 20  # of ended requests: five bytes each at most, and a message may have 32 MiB


class OutputRefused(ValueError):
    """Bytes that are no output; the text says which field and why."""


_Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Int32 = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
_RowId = Annotated[int, Meta(ge=-1, lt=1 << 62)]
_Id = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Value = TypeVar("_Value", np.float32, np.int32)


class _Array(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Little-endian, row by row."""

    kind: Literal["f4", "i4"]
    shape: tuple[_Count, ...]
    content: bytes


class _Logprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    chosen: _Array
    rank: _Array
    top_ids: _Array
    top: _Array


class _Scores(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One row's; ``start`` as in PromptLogprobs."""

    start: _Count
    values: _Logprobs


class _Finished(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    request_id: _Id
    reason: FinishReason
    token_ids: tuple[_Token, ...]
    detail: str
    rounds: _Count = 0
    accepted: _Count = 0


class _Output(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    turn: Annotated[int, Meta(ge=0, lt=1 << 62)]
    step: Annotated[int, Meta(ge=0, lt=1 << 62)]
    width: Annotated[int, Meta(ge=1, le=256)]
    request_ids: list[_RowId]
    tokens: list[_Int32]  # those past a row's count may be anything
    counts: list[_Count]
    finished: tuple[_Finished, ...]
    logprobs: _Logprobs | None
    prompt_logprobs: tuple[_Scores | None, ...] | None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Output)


def encode_output(turn: int, output: StepOutput, most_tokens: int = TOKENS_A_MESSAGE) -> Iterator[bytes]:
    """What a group says of ``turn``, as one message or more: the rows in the first, the ends over all of them."""
    pieces = list(_in_pieces(output.finished, most_tokens)) or [()]
    logprobs = None if output.logprobs is None else _wire(output.logprobs)
    scores = None
    if output.prompt_logprobs is not None:
        scores = tuple(None if row is None else _Scores(row.start, _wire(row[1:])) for row in output.prompt_logprobs)
    ids, tokens, counts = list(output.request_ids), list(output.tokens), list(output.counts)
    for number, finished in enumerate(pieces):
        ends = tuple(
            _Finished(one.request_id, one.reason, one.token_ids, one.detail, one.rounds, one.accepted)
            for one in finished
        )
        if number:
            yield _ENCODER.encode(_Output(turn, output.step, output.width, [], [], [], ends, None, None))
        else:
            yield _ENCODER.encode(_Output(turn, output.step, output.width, ids, tokens, counts, ends, logprobs, scores))


def _in_pieces(finished: Iterable[Finished], most_tokens: int) -> Iterator[tuple[Finished, ...]]:
    piece: list[Finished] = []
    tokens = 0
    for one in finished:
        if piece and tokens + len(one.token_ids) > most_tokens:
            yield tuple(piece)
            piece, tokens = [], 0
        piece.append(one)
        tokens += len(one.token_ids)
    if piece:
        yield tuple(piece)


def decode_output(payload: bytes) -> tuple[int, StepOutput]:
    """The turn and the output. Raises OutputRefused for bytes that are anything else."""
    try:
        wire = _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise OutputRefused(f"{len(payload)} bytes are no output: {error}") from error
    rows, width = len(wire.request_ids), wire.width
    if (len(wire.tokens), len(wire.counts)) != (rows * width, rows):
        raise OutputRefused(
            f"step {wire.step}: {len(wire.tokens)} tokens and {len(wire.counts)} counts for {rows} rows of width "
            f"{width}"
        )
    scores = None
    if wire.prompt_logprobs is not None:
        if len(wire.prompt_logprobs) != rows:
            raise OutputRefused(f"step {wire.step}: scores of {len(wire.prompt_logprobs)} prompts for {rows} rows")
        scores = tuple(
            None if row is None else PromptLogprobs(row.start, *_columns(row.values, *row.values.chosen.shape[:1]))
            for row in wire.prompt_logprobs
        )
    output = StepOutput(
        step=wire.step,
        request_ids=wire.request_ids,
        tokens=wire.tokens,
        counts=wire.counts,
        width=width,
        finished=tuple(
            Finished(one.request_id, one.reason, one.token_ids, one.detail, one.rounds, one.accepted)
            for one in wire.finished
        ),
        logprobs=None if wire.logprobs is None else StepLogprobs(*_columns(wire.logprobs, rows, width)),
        prompt_logprobs=scores,
    )
    return wire.turn, output


# ---- log-probabilities ----


def _wire(columns: Iterable[npt.NDArray[Any]]) -> _Logprobs:
    return _Logprobs(*map(_array, columns))


def _columns(wire: _Logprobs, *leading: int) -> tuple[Any, ...]:
    """Of StepLogprobs and PromptLogprobs. Raises OutputRefused if they are of other tokens than ``leading``."""
    whole = *leading, (wire.top_ids.shape or (0,))[-1]
    return (
        _values(wire.chosen, np.float32, leading),
        _values(wire.rank, np.int32, leading),
        _values(wire.top_ids, np.int32, whole),
        _values(wire.top, np.float32, whole),
    )


def _array(values: npt.NDArray[np.float32] | npt.NDArray[np.int32]) -> _Array:
    kind: Literal["f4", "i4"] = "f4" if values.dtype == np.float32 else "i4"
    return _Array(kind, values.shape, values.astype(f"<{kind}", order="C", copy=False).tobytes())


def _values(wire: _Array, kind: type[_Value], shape: tuple[int, ...]) -> npt.NDArray[_Value]:
    dtype = np.dtype(kind).newbyteorder("<")
    if wire.kind != dtype.str[1:] or wire.shape != shape or len(wire.content) != 4 * int(np.prod(shape)):
        raise OutputRefused(
            f"an array of {wire.kind} {list(wire.shape)} in {len(wire.content)} bytes, where {dtype.str[1:]} "
            f"{list(shape)} was expected"
        )
    return np.frombuffer(wire.content, dtype).reshape(shape)
