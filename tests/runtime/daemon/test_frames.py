"""Frames: golden bytes, any pieces, and junk; lines: junk. And the page that shows their tables is current."""

from __future__ import annotations

import random

import pytest

from runtime.daemon.frames import (
    Frame,
    FrameReader,
    Kind,
    encode,
    pack_count,
    pack_done,
    pack_json,
    pack_logprobs,
)
from runtime.daemon.verbs import BadLine, parse
from runtime.frontend.framing import BadFrame, pack_ids
from runtime.frontend.outputs import TokenLogprob
from runtime.schedule.request import FinishReason
from tests.runtime.daemon.listener import Listener
from tests.runtime.daemon.scripted import ScriptedEngine
from tests.tools.diagrams.daemon import PAGE, redrawn

JUNK_FRAMES = 50_000
JUNK_LINES = 20_000
ENTRY = TokenLogprob(7, -0.5, 2, ((3, -0.25), (7, -0.5)))

ONE_OF_EACH = {
    Kind.TOKEN: pack_ids((1, 70_000)),
    Kind.TEXT: "né".encode(),
    Kind.LOGPROBS: pack_logprobs((ENTRY,)),
    Kind.ACK: pack_json({"verb": "START", "place": 0}),
    Kind.ERROR: b"stale",
    Kind.QUANTUM_DONE: pack_count(16),
    Kind.DONE: pack_done(FinishReason.STOP, 20),
    Kind.EVICTED: pack_count(300),
    Kind.CLOSED: b"cancelled",
    Kind.STATS: pack_json({"steps": 5}),
}
# Compiled into clients: what a change of these breaks.
GOLDEN = {
    Kind.TOKEN: "18000000 01 01 0000 09000000 02000000 05000000 01000000 70110100",
    Kind.TEXT: "13000000 01 02 0000 09000000 02000000 05000000 6ec3a9",
    Kind.LOGPROBS: "2e000000 01 03 0000 09000000 02000000 05000000 07000000 000000bf 02000000 0200"
    "03000000 000080be 07000000 000000bf",
    Kind.QUANTUM_DONE: "14000000 01 06 0000 09000000 02000000 05000000 10000000",
    Kind.DONE: "18000000 01 07 0000 09000000 02000000 05000000 01000000 14000000",
    Kind.EVICTED: "14000000 01 08 0000 09000000 02000000 05000000 2c010000",
    Kind.CLOSED: "19000000 01 09 0000 09000000 02000000 05000000 63616e63656c6c6564",
}


def frame(kind: Kind) -> Frame:
    return Frame(kind, 9, 2, 5, ONE_OF_EACH[kind])


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_bytes(kind: Kind) -> None:
    assert encode(frame(kind)).hex() == GOLDEN[kind].replace(" ", "")


def test_what_was_packed_is_read() -> None:
    (token, text, logprobs, ack, error, quantum, done, evicted, closed, stats) = (
        next(FrameReader().frames(encode(frame(kind)))) for kind in Kind
    )
    assert (token.tokens, text.text, logprobs.logprobs) == ((1, 70_000), "né", (ENTRY,))
    assert (ack.answer, error.text, quantum.count) == ({"verb": "START", "place": 0}, "stale", 16)
    assert (done.done, evicted.count, closed.text) == ((FinishReason.STOP, 20), 300, "cancelled")
    assert stats.answer == {"steps": 5}


def test_frames_come_in_any_pieces() -> None:
    draw = random.Random(0)
    sent = [frame(draw.choice(list(Kind))) for _ in range(300)]
    stream = b"".join(map(encode, sent))
    reader, at = FrameReader(), 0
    read: list[Frame] = []
    while at < len(stream):
        size = draw.choice((1, 2, 3, 19, 64))
        read += reader.frames(stream[at : at + size])
        at += size
    assert read == sent


def test_junk_is_refused_or_read_but_never_harms() -> None:
    """Frames with bytes changed, cut or made up: what is read has a payload that its properties can read."""
    draw = random.Random(1)
    refused = 0
    for _ in range(JUNK_FRAMES):
        data = bytearray(encode(frame(draw.choice(list(Kind)))))
        for _ in range(draw.choice((1, 1, 2, 8))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            for found in FrameReader().frames(bytes(data[: draw.choice((len(data), draw.randrange(len(data) + 1)))])):
                assert encode(found)
        except BadFrame:
            refused += 1
    assert refused > JUNK_FRAMES // 10


def test_a_frame_that_no_reader_would_take_is_not_made() -> None:
    with pytest.raises(BadFrame, match="a payload of 16777217 bytes, but none has more than 16777216"):
        encode(Frame(Kind.TEXT, 1, 1, 0, bytes((1 << 24) + 1)))


WORDS = (
    "REQ", "SLOT", "START", "CONTINUE", "EXTEND", "FORK", "RESTORE", "CANCEL", "SCHED_STEP", "SCHED_DRAIN",
    "MODE", "auto", "client", "LIST_REQUESTS", "LIST_SLOTS", "STATS", "[1,2]", '"x"', "[1,", "1", "2", "0",
    "-1", "99999999999", "=", "keep=1", "seed=x", "\x00", "é", "SCHED_PROBE", "SCHED_BATCH_STEP", "TAGGED",
    "1.5", "[[1]]", "{", "logprobs=1",
)  # fmt: skip


def test_junk_lines_are_answered_and_nothing_is_left() -> None:
    draw = random.Random(2)
    client = Listener(ScriptedEngine())
    understood = 0
    for _ in range(JUNK_LINES):
        line = draw.choice(" =").join(draw.choice(WORDS) for _ in range(draw.randrange(1, 7)))
        try:
            parse(line)
            understood += 1
        except BadLine:
            pass
        client.say(line)
        if draw.random() < 0.2:
            client.turn()
    assert understood > JUNK_LINES // 50
    client.run_until_idle()
    client.desk.disconnect(client.connection)
    client.run_until_idle()
    client.engine.check_all_is_back()


def test_the_page_is_current() -> None:
    text = PAGE.read_text()
    assert redrawn(text) == text, "run: make diagram"
