"""The wire format of the control plane: a fixed header and a payload. No payload is ever executed.

Knows: the encoding of every frame, byte by byte, and every reason to refuse one.
Does not know: sockets, who may send what in which state (handshake.py, states.py), what events mean.

A frame is a 48-byte little-endian header and its payload (docs/control-plane.md has the table). The header's layout
is fixed for all versions, so that two versions can refuse each other by name; ``VERSION`` governs kinds and bodies.
The CRC catches accidents; who may connect at all is decided by the sockets' permissions and keys.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Annotated
from zlib import crc32

import msgspec

from parallel.control.errors import FrameError, Verdict

MAGIC = b"LSCP"
VERSION = 2
MAX_PAYLOAD = 32 << 20  # about eight million prompt tokens in one step; more is a bug or an attack
EVERYONE = 0xFFFF  # in the rank field: a frame to all followers
MAX_WORLD = EVERYONE
MAX_NUMBER = (1 << 63) - 1  # the largest number that agree_max takes
MAX_NUMBERS = 256  # that agree_max takes at once

STOP = 1  # flag of a RECORD: the turn in which it takes effect is the last one
CLOCK_REPLY = 1  # flag of a PROBE: the leader's answer

_HEADER = struct.Struct("<4sBBHQIHHQQI")  # everything before the CRC
_CRC = struct.Struct("<I")
_HEADER_AND_CRC = struct.Struct(_HEADER.format + "I")
_CRC_AT = _HEADER.size
HEADER_SIZE = _CRC_AT + _CRC.size
MAX_FRAME = HEADER_SIZE + MAX_PAYLOAD
# The prefix, all before the step, is the same in every frame of a kind between two ranks: it is validated once and
# remembered, with its CRC, from which the frame's CRC continues.
_PREFIX = struct.Struct("<4sBBHQIHH")
_AFTER_PREFIX = struct.Struct("<QQI")  # step, digest, length
_STEP_AT = _PREFIX.size
_PREFIX_AND_REST = struct.Struct(f"<{_STEP_AT}sQQII")
_MAX_PREFIXES = 4096  # remembered, of some 300 bytes each


class Kind(IntEnum):
    """What a frame is. L: sent by the leader, F: by a follower. Numbers are on the wire: never renumber them."""

    HELLO = 1  # F: identity of this rank (body Hello)
    WELCOME = 2  # L: identities match
    PROBE = 3  # F, L: clock question and answer (body Probe)
    READY = 4  # F: offset of this rank's clock (body Ready)
    START = 5  # L: all ranks are ready (body Start)
    RECORD = 6  # L: step, leader's digest, events that take effect at step + horizon (payload opaque)
    ACK = 7  # F: this step was reached with this digest
    RESEND = 8  # F: this record is missing
    KEEPALIVE = 9  # L: idle, but alive
    EXPLAIN = 10  # L: the digest at this step differs; send the last decisions
    DECISIONS = 11  # F: the last decisions before this step (body Decisions)
    END = 12  # F: this rank ends, and why. L: the job ends, and why (body Verdict)
    BYE = 13  # F, L: this channel closes as agreed
    HEARTBEAT = 14  # F, L: progress, on the watch channel (body Heartbeat)
    PROPOSE = 15  # F: this rank's numbers for the maximum of this step (body Numbers)
    AGREED = 16  # L: the maximum of all ranks' numbers of this step (body Numbers)
    MESSAGE = 17  # F: a reliable message to the leader's engine; step is its number (payload opaque)
    MESSAGE_ACK = 18  # L: the engine took all of this rank's messages below number step
    HORIZON = 19  # L: before the first turn: the horizon of all records, in the header's field


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A follower's identity. A difference in any field up to ``code`` is refused by name (handshake.py)."""

    world: int
    horizon: int
    groups: int
    config: str
    model: str
    code: str
    channel: str
    covers: tuple[int, ...]
    host: str
    pid: int


class Probe(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Wall clocks in ns: ``asked`` on the follower's, ``answered`` on the leader's (0 in the question)."""

    asked: int
    answered: int


class Ready(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Leader's clock minus mine, and the round trip that bounds its error, in ns. For reports only: no plan uses it."""

    offset_ns: int
    round_trip_ns: int


class Start(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Clock offsets of all ranks, in ns, indexed by rank."""

    offsets_ns: tuple[int, ...]


class DecisionSummary(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One decision of a rank's ring: its number, step and kind, the first integers of it, and the digest after it."""

    number: int
    step: int
    kind: str
    length: int
    head: tuple[int, ...]
    value: int


class Decisions(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rank's last decisions before it reached ``step`` of the frame's header."""

    decisions: tuple[DecisionSummary, ...]


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A watchdog's report on its engine: ``turns`` counts progress, ``still_for`` is seconds without any.

    ``called`` counts its collectives; ``calls`` are the last of them, as runs of equal calls: (number of the first,
    call). ``group`` is the first of the ranks that make the same calls.
    """

    turns: int
    step: int
    phase: str
    still_for: float
    limit: float
    digest: int
    group: int
    called: int
    calls: tuple[tuple[int, str], ...]


_Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]


class Numbers(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rank's proposal, or the agreed maximum, for a step: at most MAX_NUMBERS numbers, each below 2**63."""

    numbers: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=MAX_NUMBERS)]


Body = Hello | Probe | Ready | Start | Decisions | Verdict | Heartbeat | Numbers

_BODIES: dict[int, msgspec.msgpack.Decoder[Body]] = {
    Kind.HELLO: msgspec.msgpack.Decoder(Hello),
    Kind.PROBE: msgspec.msgpack.Decoder(Probe),
    Kind.READY: msgspec.msgpack.Decoder(Ready),
    Kind.START: msgspec.msgpack.Decoder(Start),
    Kind.DECISIONS: msgspec.msgpack.Decoder(Decisions),
    Kind.END: msgspec.msgpack.Decoder(Verdict),
    Kind.HEARTBEAT: msgspec.msgpack.Decoder(Heartbeat),
    Kind.PROPOSE: msgspec.msgpack.Decoder(Numbers),
    Kind.AGREED: msgspec.msgpack.Decoder(Numbers),
}
_OPAQUE = frozenset((Kind.RECORD, Kind.MESSAGE))  # kinds whose payload the control plane does not read
_KINDS = {int(kind): kind for kind in Kind}
_FLAGS = {Kind.RECORD: STOP, Kind.PROBE: CLOCK_REPLY}
# A validated prefix: the CRC so far, the largest payload, kind, flags, rank, horizon, and the decoder of the body.
_Prefix = tuple[int, int, Kind, int, int, int, msgspec.msgpack.Decoder[Body] | None]
_BODY_ENCODER = msgspec.msgpack.Encoder()
# Of FrameTemplate: names of a module are looked up in half the time of attributes.
_pack, _seal, _join = _AFTER_PREFIX.pack, _CRC.pack, b"".join


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A decoded frame. ``rank``: a follower's frames carry its own, the leader's the receiver's or EVERYONE.

    ``payload`` is meant for RECORD and MESSAGE only, ``body`` for the kinds that have one; the other is empty.
    A msgspec Struct, as one is made for each received frame and nothing is made faster; gc=False as it has no cycles.
    """

    kind: Kind
    flags: int
    rank: int
    horizon: int
    step: int
    digest: int
    payload: bytes
    body: Body | None


class Codec:
    """Writes and reads the frames of one job: its 64-bit id, the epoch that counts its restarts, its world of ranks."""

    __slots__ = ("_prefixes", "epoch", "job", "world")

    def __init__(self, job: int, epoch: int, world: int) -> None:
        if not 0 <= job < 1 << 64 or not 0 <= epoch < 1 << 32 or not 1 <= world <= MAX_WORLD:
            raise ValueError(
                f"control plane: job id {job}, epoch {epoch}, world {world}: they must fit 64 bits, 32 bits "
                f"and 1..{MAX_WORLD}"
            )
        self.job = job
        self.epoch = epoch
        self.world = world
        self._prefixes: dict[bytes, _Prefix] = {}  # of valid frames

    def encode(
        self,
        kind: Kind,
        rank: int,
        step: int = 0,
        digest: int = 0,
        *,
        horizon: int = 0,
        flags: int = 0,
        payload: bytes = b"",
        body: Body | None = None,
    ) -> bytes:
        """The frame's bytes. Raises ValueError when the payload is larger than MAX_PAYLOAD or a number has no place."""
        if body is not None:
            payload = _BODY_ENCODER.encode(body)
        if len(payload) > MAX_PAYLOAD:
            raise ValueError(
                f"control plane: the payload of {kind.name} at step {step} has {len(payload)} bytes, the limit is "
                f"{MAX_PAYLOAD}: submit fewer requests in one step"
            )
        try:
            head = _HEADER.pack(
                MAGIC, VERSION, kind, flags, self.job, self.epoch, rank, horizon, step, digest, len(payload)
            )
        except struct.error as error:
            raise ValueError(
                f"control plane: {kind.name} with rank {rank}, step {step}, horizon {horizon}, digest {digest} "
                f"does not fit the header: {error}"
            ) from error
        return head + _CRC.pack(crc32(payload, crc32(head))) + payload

    def decode(self, data: bytes) -> Frame:
        """The frame that ``data`` is, whole. Raises FrameError naming the part at fault, and looks no further."""
        if len(data) < HEADER_SIZE:
            raise FrameError("size", f"{len(data)} bytes, a header has {HEADER_SIZE}")
        prefix, step, digest, length, crc = _PREFIX_AND_REST.unpack_from(data)
        payload = data[HEADER_SIZE:]
        known = self._prefixes.get(prefix)
        if (
            known is None
            or length != len(payload)
            or length > known[1]
            or crc != crc32(payload, crc32(data[_STEP_AT:_CRC_AT], known[0]))
        ):
            known = self._validate(data, prefix)
        _, _, kind, flags, rank, horizon, decoder = known
        if decoder is None:
            return Frame(kind, flags, rank, horizon, step, digest, payload, None)
        try:
            body = decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError("body", f"{kind.name}: {error}") from error
        return Frame(kind, flags, rank, horizon, step, digest, b"", body)

    def _validate(self, data: bytes, prefix: bytes) -> _Prefix:
        """Validates everything before the body of a frame whose prefix is new, and remembers the prefix. Raises
        FrameError for the first part that is wrong."""
        head = _HEADER_AND_CRC.unpack_from(data)
        magic, version, number, flags, job, epoch, rank, horizon, _, _, length, crc = head
        if magic != MAGIC:
            raise FrameError("magic", f"{magic!r}, expected {MAGIC!r}")
        if length != len(data) - HEADER_SIZE or length > MAX_PAYLOAD:
            raise FrameError("length", f"{length} said, {len(data) - HEADER_SIZE} there, {MAX_PAYLOAD} allowed")
        computed = crc32(data[HEADER_SIZE:], crc32(data[:_CRC_AT]))
        if crc != computed:
            raise FrameError("crc", f"computed {computed:#010x}, the frame says {crc:#010x}")
        if version != VERSION:
            raise FrameError("version", f"ours is {VERSION}, theirs is {version}", rank, VERSION, version)
        if job != self.job:
            raise FrameError("job", f"ours is {self.job}, theirs is {job}", rank, self.job, job)
        if epoch != self.epoch:
            raise FrameError("epoch", f"ours is {self.epoch}, theirs is {epoch}", rank, self.epoch, epoch)
        kind = _KINDS.get(number)
        if kind is None:
            raise FrameError("kind", f"{number} is none")
        if flags and flags & ~_FLAGS.get(kind, 0):
            raise FrameError("flags", f"{flags:#x} on {kind.name}")
        if rank >= self.world and rank != EVERYONE:
            raise FrameError("rank", f"{rank} of a world of {self.world}")
        decoder = _BODIES.get(kind)
        most = MAX_PAYLOAD if decoder is not None or kind in _OPAQUE else 0
        if length > most:
            raise FrameError("payload", f"{length} bytes on {kind.name}, which has none")
        found = crc32(prefix), most, kind, flags, rank, horizon, decoder
        if len(self._prefixes) < _MAX_PREFIXES:
            self._prefixes[prefix] = found
        return found


class FrameTemplate:
    """Encodes frames of one kind for (or from) ``rank`` in half the time of ``Codec.encode``, with the same bytes.

    Step, digest and payload change from frame to frame; the rest is encoded once.
    """

    __slots__ = ("_codec", "_crc", "_horizon", "_kind", "_prefix", "_rank")

    def __init__(self, codec: Codec, kind: Kind, rank: int, horizon: int = 0) -> None:
        self._codec = codec
        self._kind = kind
        self._rank = rank
        self._horizon = horizon
        self._prefix = codec.encode(kind, rank, horizon=horizon)[:_STEP_AT]
        self._crc = crc32(self._prefix)

    def fill(self, step: int, digest: int, payload: bytes = b"") -> bytes:
        """The frame's bytes. Raises ValueError as ``Codec.encode`` does."""
        size = len(payload)
        try:
            middle = _pack(step, digest, size)
        except struct.error:
            size = MAX_PAYLOAD + 1
        if size > MAX_PAYLOAD:  # for its error message
            return self._codec.encode(self._kind, self._rank, step, digest, horizon=self._horizon, payload=payload)
        return _join((self._prefix, middle, _seal(crc32(payload, crc32(middle, self._crc))), payload))


def announced_size(packet: bytes | memoryview) -> int:
    """The full size of the frame that starts with ``packet``; raises FrameError when nothing could start like this.

    Transports that split large frames use it to know how much follows. What it returns is <= MAX_FRAME.
    """
    if len(packet) < HEADER_SIZE or packet[: len(MAGIC)] != MAGIC:
        raise FrameError("magic", f"a frame cannot start with {bytes(packet[:8])!r}")
    length: int = _HEADER.unpack_from(packet)[-1]
    if length > MAX_PAYLOAD:
        raise FrameError("length", f"{length} payload bytes, the limit is {MAX_PAYLOAD}")
    return HEADER_SIZE + length
