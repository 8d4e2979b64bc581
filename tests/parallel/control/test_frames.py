"""The wire format: what is written is read back, and nothing else is."""

from __future__ import annotations

import random
import struct
import zlib

import msgspec
import pytest

from parallel.control.errors import Cause, ControlError, FrameError, Verdict
from parallel.control.wire.frames import (
    EVERYONE,
    HEADER_SIZE,
    MAX_NUMBER,
    MAX_NUMBERS,
    MAX_PAYLOAD,
    STOP,
    VERSION,
    Body,
    Codec,
    Decisions,
    DecisionSummary,
    Frame,
    Heartbeat,
    Hello,
    Kind,
    Numbers,
    Probe,
    Ready,
    Start,
    announced_size,
)

CODEC = Codec(0x1234_5678_9ABC_DEF0, 3, 8)
BODIES: dict[Kind, Body] = {
    Kind.HELLO: Hello(8, 2, 4, "c", "m", "x", "step", (1,), "host", 77),
    Kind.PROBE: Probe(1, 2),
    Kind.READY: Ready(-5, 9),
    Kind.START: Start((0, -5, 3)),
    Kind.DECISIONS: Decisions((DecisionSummary(4, 9, "plan", 2, (1, -2), 1 << 63),)),
    Kind.END: Verdict(Cause.LOST, 3, 9, "rank 3 is gone"),
    Kind.PROPOSE: Numbers((0, 5, MAX_NUMBER)),
    Kind.AGREED: Numbers(()),
    Kind.HEARTBEAT: Heartbeat(5, 6, "run", 0.5, 10.0, 7, 0, 9, ((0, "all_reduce"), (5, "all_gather"))),
}


def sealed(head: bytes, payload: bytes) -> bytes:
    """A frame with a right CRC, however wrong the rest is."""
    return head + struct.pack("<I", zlib.crc32(head + payload)) + payload


def header(**other: int) -> bytes:
    fields = {
        "version": VERSION,
        "kind": 6,
        "flags": 0,
        "job": CODEC.job,
        "epoch": 3,
        "rank": 1,
        "horizon": 2,
        "step": 9,
    }
    fields |= {"digest": 5, "length": 3} | other
    return struct.pack("<4sBBHQIHHQQI", b"LSCP", *fields.values())


def test_every_kind_comes_back_as_it_went() -> None:
    for kind in Kind:
        body = BODIES.get(kind)
        payload = b"opaque" if kind in (Kind.RECORD, Kind.MESSAGE) else b""
        flags = STOP if kind is Kind.RECORD else 0
        frame = CODEC.decode(
            CODEC.encode(kind, 7, (1 << 64) - 1, 1 << 63, horizon=2, flags=flags, payload=payload, body=body)
        )
        assert frame == Frame(kind, flags, 7, 2, (1 << 64) - 1, 1 << 63, payload, body)
        assert type(frame.body) is type(body)


def test_the_layout_is_the_documented_one() -> None:
    """Byte for byte: another implementation could be written from this line and docs/control-plane.md."""
    frame = CODEC.encode(Kind.RECORD, EVERYONE, 9, 5, horizon=2, flags=STOP, payload=b"abc")
    assert frame == sealed(header(rank=EVERYONE, flags=1), b"abc")
    assert HEADER_SIZE == 48
    assert frame[:8].hex() == "4c534350" + "02" + "06" + "0100"


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "size"),
        (b"LSCP" + bytes(43), "size"),
        (b"XXXX" + bytes(44), "magic"),
        (sealed(header(length=2), b"abc"), "length"),
        (sealed(header(length=MAX_PAYLOAD + 1), b"abc"), "length"),
        (header() + b"\0\0\0\0" + b"abc", "crc"),
        (sealed(header(version=1), b"abc"), "version"),
        (sealed(header(job=7), b"abc"), "job"),
        (sealed(header(epoch=4), b"abc"), "epoch"),
        (sealed(header(kind=0), b"abc"), "kind"),
        (sealed(header(kind=200), b"abc"), "kind"),
        (sealed(header(flags=2), b"abc"), "flags"),
        (sealed(header(kind=7, flags=1, length=0), b""), "flags"),
        (sealed(header(rank=8), b"abc"), "rank"),
        (sealed(header(kind=7), b"abc"), "payload"),
        (sealed(header(kind=14), b"abc"), "body"),
        (sealed(header(kind=14, length=0), b""), "body"),
        (sealed(header(kind=12, length=4), msgspec.msgpack.encode([1, 2])[:3] + b"\xff"), "body"),
    ],
)
def test_what_is_wrong_is_refused_by_name(data: bytes, field: str) -> None:
    with pytest.raises(FrameError, match=f"refused at {field}") as caught:
        CODEC.decode(data)
    assert caught.value.field == field


@pytest.mark.parametrize(("field", "other"), [("version", 1), ("job", 7), ("epoch", 4)])
def test_a_frame_of_another_job_names_rank_and_both_values(field: str, other: int) -> None:
    with pytest.raises(FrameError) as caught:
        CODEC.decode(sealed(header(**{field: other}), b"abc"))
    ours = {"version": VERSION, "job": CODEC.job, "epoch": 3}[field]
    assert (caught.value.rank, caught.value.ours, caught.value.theirs) == (1, ours, other)


@pytest.mark.parametrize("kind", BODIES)
def test_bodies_are_strict(kind: Kind) -> None:
    """No missing field, no extra field, no field of another type."""
    fields = list(msgspec.structs.astuple(BODIES[kind]))
    wrong_type = [{"no": "such type"}, *fields[1:]]
    bodies: list[object] = [fields[:-1], [*fields, 1], wrong_type, {}, None, [*fields[:-1], None]]
    for body in bodies:
        payload = msgspec.msgpack.encode(body)
        with pytest.raises(FrameError, match="refused at body"):
            CODEC.decode(sealed(header(kind=int(kind), length=len(payload)), payload))


@pytest.mark.parametrize("numbers", [[-1], [MAX_NUMBER + 1], [True], [1.5], [None], [0] * (MAX_NUMBERS + 1), 3])
def test_numbers_to_agree_on_are_bounded(numbers: object) -> None:
    payload = msgspec.msgpack.encode([numbers])
    with pytest.raises(FrameError, match="refused at body"):
        CODEC.decode(sealed(header(kind=int(Kind.PROPOSE), length=len(payload)), payload))


def test_a_large_payload_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ValueError, match=f"RECORD at step 4 has {MAX_PAYLOAD + 1} bytes, the limit is {MAX_PAYLOAD}"):
        CODEC.encode(Kind.RECORD, 0, 4, payload=bytes(MAX_PAYLOAD + 1))


def test_numbers_without_a_place_are_refused() -> None:
    with pytest.raises(ValueError, match="ACK with rank 1, step -1"):
        CODEC.encode(Kind.ACK, 1, -1)
    for job, epoch, world in ((-1, 0, 2), (1 << 64, 0, 2), (0, 1 << 32, 2), (0, 0, 0), (0, 0, EVERYONE + 1)):
        with pytest.raises(ValueError, match=f"job id {job}, epoch {epoch}, world {world}"):
            Codec(job, epoch, world)


def test_the_announced_size_is_bounded() -> None:
    frame = CODEC.encode(Kind.RECORD, 0, payload=b"abc")
    assert announced_size(frame[:HEADER_SIZE]) == len(frame)
    for junk in (b"", frame[:47], b"XSCP" + frame[4:], header(length=MAX_PAYLOAD + 1) + bytes(4)):
        with pytest.raises(FrameError):
            announced_size(junk)


@pytest.mark.parametrize("remembered", [False, True])
def test_20000_mangled_frames_none_is_read(remembered: bool) -> None:
    """Random bytes, flipped bits, cuts and joins: a frame that is decoded is one that was encoded.

    ``remembered``: good frames that open alike were read before.
    """
    rng = random.Random(1)
    codec = Codec(CODEC.job, CODEC.epoch, CODEC.world)
    good = [codec.encode(kind, 1, 5, body=BODIES.get(kind)) for kind in Kind]
    if remembered:
        assert [codec.decode(frame).kind for frame in good] == list(Kind)
    refused = 0
    for _ in range(20_000):
        frame = bytearray(rng.choice(good))
        match rng.randrange(5):
            case 0:
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            case 1:
                del frame[rng.randrange(len(frame)) :]
            case 2:
                frame += rng.randbytes(rng.randrange(1, 40))
            case 3:
                frame[rng.randrange(len(frame)) :] = rng.randbytes(rng.randrange(1, 40))
            case 4:
                frame = bytearray(rng.randbytes(rng.randrange(120)))
        if bytes(frame) in good:
            continue
        with pytest.raises(FrameError):
            codec.decode(bytes(frame))
        refused += 1
    assert refused > 19_000


@pytest.mark.parametrize("kind", [Kind.RECORD, Kind.ACK, Kind.MESSAGE])
def test_a_good_frame_vouches_for_no_other_that_opens_alike(kind: Kind) -> None:
    codec = Codec(CODEC.job, CODEC.epoch, CODEC.world)
    payload = b"" if kind is Kind.ACK else b"abc"
    for step in (9, 10):  # the second is read by what is remembered of the first
        frame = codec.encode(kind, 1, step, step + 5, horizon=2, payload=payload)
        assert codec.decode(frame) == Frame(kind, 0, 1, 2, step, step + 5, payload, None)
    wrong = {
        "size": frame[: HEADER_SIZE - 1],
        "length": frame + b"d",
        "crc": frame[:30] + bytes([frame[30] ^ 1]) + frame[31:],
    }
    if kind is Kind.ACK:
        wrong["payload"] = sealed(header(kind=7), b"abc")
    for field, data in wrong.items():
        with pytest.raises(FrameError, match=f"refused at {field}"):
            codec.decode(data)


def test_few_prefixes_are_remembered() -> None:
    """A peer that sends good frames with ever new openings gets no memory for them."""
    codec = Codec(CODEC.job, CODEC.epoch, CODEC.world)
    for horizon in range(6000):
        assert codec.decode(codec.encode(Kind.ACK, 1, 5, 6, horizon=horizon)).horizon == horizon
    assert len(codec._prefixes) == 4096


def test_a_verdict_becomes_the_error_of_its_cause() -> None:
    for cause in Cause:
        error = Verdict(cause, 2, 5, "what happened").error()
        assert isinstance(error, ControlError)
        assert str(error) == "what happened"
        assert (error.verdict.rank, error.verdict.step) == (2, 5)
    assert len({type(Verdict(cause, 0, 0, "").error()) for cause in Cause}) == len(Cause)
