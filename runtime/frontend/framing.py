"""Frames of a stream of bytes: a length in four bytes, little-endian, then that many bytes of body.

Knows: how bodies are found in bytes that come in any pieces, and token ids as bytes. Does not know: what a body says
(serve_messages.py, runtime/daemon/frames.py), sockets' files (runtime/client_socket.py).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Final

_LENGTH: Final = struct.Struct("<I")
_ID_BYTES: Final = 4
_READ_BYTES: Final = 1 << 20


class BadFrame(ValueError):
    """Bytes that are no frame of the protocol; the text says what is wrong with them."""


def framed(body: bytes) -> bytes:
    """As it travels."""
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Bytes as they come, in any pieces, to whole bodies of ``least`` to ``most`` bytes."""

    def __init__(self, most: int, least: int = 0) -> None:
        self._most, self._least = most, least
        self._held = bytearray()

    def bodies(self, data: bytes) -> Iterator[bytes]:
        """Those that are complete now. Raises BadFrame; nothing after a bad frame can be read."""
        held, at = self._held, 0
        held += data
        try:
            while len(held) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(held, at)
                if not self._least <= length <= self._most:
                    raise BadFrame(f"a frame of {length} bytes; it has {self._least} to {self._most}")
                end = at + _LENGTH.size + length
                if len(held) < end:
                    return
                body, at = bytes(held[at + _LENGTH.size : end]), end
                yield body
        finally:
            del held[:at]


def bodies_from(end: socket.socket, most: int) -> Iterator[bytes]:
    """Every body that comes through a blocking socket, until the other side has gone. Raises BadFrame."""
    reader = FrameReader(most)
    while True:
        try:
            data = end.recv(_READ_BYTES)
        except OSError:
            return
        if not data:
            return
        yield from reader.bodies(data)


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Little-endian int32."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def unpack_ids(packed_ids: bytes) -> tuple[int, ...]:
    """Raises BadFrame for bytes that are no whole number of ids."""
    if len(packed_ids) % _ID_BYTES:
        raise BadFrame(f"{len(packed_ids)} bytes are no int32 token ids")
    return struct.unpack(f"<{len(packed_ids) // _ID_BYTES}i", packed_ids)
