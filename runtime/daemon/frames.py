"""The two streams that a daemon answers on, as bytes.

Knows: the tagged frame and its kinds, the plain stream of token ids, how both are read again from any pieces.
Does not know: what a session is (session.py), verbs (verbs.py), sockets (server.py).

A tagged frame, all numbers little-endian:

    u32 length    bytes that follow, header included: 16 to 16 + MAX_PAYLOAD
    u8  version   1
    u8  kind      Kind
    u16 zero      reserved
    u32 request   the client's own id of the session; 0 where the frame is about none
    u32 epoch     of the session; 0 where the frame is about none
    u32 sequence  of the frame in its connection, from 0, modulo 2^32: a gap is a lost frame
    payload       by kind

The plain stream is i32 token ids, and -1 at the end of every command that was answered.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from runtime.frontend import framing
from runtime.frontend.framing import BadFrame
from runtime.frontend.outputs import TokenLogprob
from runtime.schedule.request import FinishReason

VERSION: Final = 1
MAX_PAYLOAD: Final = 1 << 24  # bytes
END_OF_COMMAND: Final = -1  # on the plain stream
_HEADER: Final = struct.Struct("<BBHIII")
_I32: Final = struct.Struct("<i")
_LOGPROB: Final = struct.Struct("<ifIH")
_LIKELY: Final = struct.Struct("<if")
_DONE: Final = struct.Struct("<ii")


class Kind(IntEnum):
    """What a frame says. Never renumber them: clients have them compiled in."""

    TOKEN = 1
    TEXT = 2
    LOGPROBS = 3
    ACK = 4
    ERROR = 5
    QUANTUM_DONE = 6
    DONE = 7
    EVICTED = 8
    CLOSED = 9
    STATS = 10


# What each kind's payload is, and when it comes; docs/daemon.md shows this table.
PAYLOADS: Final[dict[Kind, tuple[str, str]]] = {
    Kind.TOKEN: ("i32 a token", "tokens of one step"),
    Kind.TEXT: ("UTF-8", "with `text=1`: text that is complete; a character may need several tokens"),
    Kind.LOGPROBS: (
        "a token: i32 id, f32 log-probability, u32 rank, u16 n, n times (i32 id, f32 log-probability)",
        "before the TOKEN frame with the same tokens, with `logprobs=N`",
    ),
    Kind.ACK: ("UTF-8 JSON", "one for each accepted line; its answer, or an empty object"),
    Kind.ERROR: ("UTF-8", "a refused line, or a session's verb that came too late"),
    Kind.QUANTUM_DONE: ("i32 tokens", "the quantum is over; tokens of this turn so far"),
    Kind.DONE: (
        "i32 finish reason, i32 tokens",
        "the turn's answer is complete: 1 by a stop id or stop string, 2 by its budget",
    ),
    Kind.EVICTED: ("i32 tokens", "memory was short: tokens that the next quantum recomputes first"),
    Kind.CLOSED: ("UTF-8", "the session ended, and why"),
    Kind.STATS: ("UTF-8 JSON", "the answer to STATS"),
}


@dataclass(frozen=True, slots=True)
class Frame:
    """One tagged frame. ``payload`` as it travels; the properties below read it."""

    kind: Kind
    request: int
    epoch: int
    sequence: int
    payload: bytes = b""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of TOKEN: the ids."""
        return framing.unpack_ids(self.payload)

    @property
    def text(self) -> str:
        """Of TEXT, ERROR and CLOSED."""
        return self.payload.decode()

    @property
    def answer(self) -> Any:
        """Of ACK and STATS: what the JSON says."""
        return json.loads(self.payload)

    @property
    def count(self) -> int:
        """Of QUANTUM_DONE and EVICTED: tokens."""
        return int(_I32.unpack(self.payload)[0])

    @property
    def done(self) -> tuple[FinishReason, int]:
        """Of DONE: why, and the tokens of the turn."""
        reason, tokens = _DONE.unpack(self.payload)
        return FinishReason(reason), tokens

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of LOGPROBS: one entry a token."""
        return tuple(_logprobs(self.payload))


def encode(frame: Frame) -> bytes:
    """The frame as it travels. Raises BadFrame for one that no reader would take."""
    if len(frame.payload) > MAX_PAYLOAD:
        raise BadFrame(f"a payload of {len(frame.payload)} bytes, but none has more than {MAX_PAYLOAD}")
    header = _HEADER.pack(VERSION, frame.kind, 0, frame.request, frame.epoch, frame.sequence % (1 << 32))
    return framing.framed(header + frame.payload)


class FrameReader:
    """Bytes as they come, in any pieces, to whole frames."""

    def __init__(self) -> None:
        self._bodies = framing.FrameReader(_HEADER.size + MAX_PAYLOAD, _HEADER.size)

    def frames(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete now. Raises BadFrame; nothing after a bad frame can be read."""
        for body in self._bodies.bodies(data):
            yield _decode(body)


def _decode(body: bytes) -> Frame:
    version, kind, reserved, request, epoch, sequence = _HEADER.unpack_from(body)
    if version != VERSION:
        raise BadFrame(f"a frame of version {version}; this reader knows version {VERSION}")
    if kind not in PAYLOADS or reserved:
        raise BadFrame(f"a frame of kind {kind} with reserved bits {reserved:#x}; kinds are 1 to {max(Kind)}, and 0")
    frame = Frame(Kind(kind), request, epoch, sequence, body[_HEADER.size :])
    _check_payload(frame)
    return frame


def _check_payload(frame: Frame) -> None:
    """Raises BadFrame where the payload is not what its kind says, so that no property of the frame fails."""
    try:
        if frame.kind is Kind.TOKEN:
            _ = frame.tokens
        elif frame.kind in (Kind.TEXT, Kind.ERROR, Kind.CLOSED):
            _ = frame.text
        elif frame.kind in (Kind.ACK, Kind.STATS):
            if not isinstance(frame.answer, dict):
                raise ValueError("the JSON is no object")
        elif frame.kind is Kind.DONE:
            _ = frame.done
        elif frame.kind is Kind.LOGPROBS:
            _ = frame.logprobs
        else:
            _ = frame.count
    except (ValueError, struct.error, RecursionError) as error:
        raise BadFrame(f"{len(frame.payload)} bytes are no payload of {frame.kind.name}: {error}") from error


# ---- payloads ----


def pack_count(count: int) -> bytes:
    return _I32.pack(count)


def pack_done(reason: FinishReason, tokens: int) -> bytes:
    return _DONE.pack(reason, tokens)


def pack_json(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def pack_logprobs(entries: Sequence[TokenLogprob]) -> bytes:
    parts = []
    for entry in entries:
        parts.append(_LOGPROB.pack(entry.token_id, entry.logprob, entry.rank, len(entry.top)))
        parts += [_LIKELY.pack(token, value) for token, value in entry.top]
    return b"".join(parts)


def _logprobs(payload: bytes) -> Iterator[TokenLogprob]:
    at = 0
    while at < len(payload):
        token, value, rank, likely = _LOGPROB.unpack_from(payload, at)
        at += _LOGPROB.size
        top = tuple(_LIKELY.unpack_from(payload, at + i * _LIKELY.size) for i in range(likely))
        at += likely * _LIKELY.size
        yield TokenLogprob(token, value, rank, top)
