"""What ranks tell the leader: in order, none lost, and bounded on both sides. Two machines, no frames."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from parallel.control.errors import FrameError
from parallel.control.protocol.reliable_messages import MAX_KEPT, WINDOW, WINDOW_BYTES, ReliableReceiver, ReliableSender
from parallel.control.wire.frames import MAX_PAYLOAD


def test_all_that_is_told_is_taken_in_order_whatever_is_lost() -> None:
    rng = random.Random(1)
    for _ in range(200):
        sender, receiver = ReliableSender(1.0), ReliableReceiver(3)
        told: list[bytes] = []
        taken: list[bytes] = []
        way: list[tuple[int, bytes]] = []
        now = 0.0
        while len(taken) < 100:
            now += rng.random()
            if len(told) < 100 and rng.random() < 0.5:
                told.append(rng.randbytes(3))
                way += sender.send(told[-1], now)
            way += sender.due(now)
            rng.shuffle(way)
            while way and rng.random() < 0.7:
                number, payload = way.pop()
                if rng.random() < 0.8:
                    receiver.receive(number, payload)
            if rng.random() < 0.3:
                waiting, more = receiver.waiting, receiver.take()
                assert waiting == bool(more)
                taken += more
            if rng.random() < 0.3:
                way += sender.acknowledged(receiver.taken, now)
        assert taken == told


def test_a_window_is_on_the_way_and_the_rest_waits() -> None:
    sender, receiver = ReliableSender(1.0), ReliableReceiver(1)
    sent = [frame for number in range(WINDOW + 10) for frame in sender.send(b"%d" % number, 0.0)]
    assert [number for number, _ in sent] == list(range(WINDOW))
    for frame in sent:
        assert receiver.receive(*frame)
    assert len(receiver.take()) == WINDOW
    assert sender.acknowledged(WINDOW, 0.0) == [(WINDOW + n, b"%d" % (WINDOW + n)) for n in range(10)]
    assert sender.kept == sum(len(b"%d" % (WINDOW + n)) for n in range(10))


def test_large_payloads_go_one_by_one() -> None:
    sender = ReliableSender(1.0)
    large = bytes(WINDOW_BYTES)
    assert [number for _ in range(3) for number, _ in sender.send(large, 0.0)] == [0]
    assert [number for number, _ in sender.acknowledged(1, 0.0)] == [1]


def test_the_oldest_is_sent_again_ever_more_seldom() -> None:
    """A leader may be busy, and has it already: it should not find thousands of echoes then."""
    sender = ReliableSender(1.0)
    for payload in (b"a", b"b"):
        sender.send(payload, 0.0)
    again = [now for now in range(1, 200) if sender.due(float(now) + 0.5) == [(0, b"a")]]
    assert again[:4] == [1, 4, 9, 18]
    assert max(later - sooner for sooner, later in pairwise(again)) <= 17
    sender.acknowledged(1, 200.0)
    assert sender.due(201.5) == [(1, b"b")]
    sender.acknowledged(2, 202.0)
    assert sender.due(300.0) == []


def test_echoes_say_nothing_new() -> None:
    sender, receiver = ReliableSender(1.0), ReliableReceiver(1)
    (frame,) = sender.send(b"a", 0.0)
    assert receiver.receive(*frame)
    assert not receiver.receive(*frame)
    assert receiver.take() == [b"a"]
    assert not receiver.receive(*frame)
    assert not receiver.waiting
    assert sender.acknowledged(1, 0.0) == sender.acknowledged(1, 0.0) == sender.acknowledged(0, 0.0) == []


def test_what_is_kept_is_bounded_on_both_sides() -> None:
    sender, receiver = ReliableSender(1.0), ReliableReceiver(1)
    with pytest.raises(ValueError, match=f"a message of {MAX_PAYLOAD + 1} bytes, the limit is {MAX_PAYLOAD}"):
        sender.send(bytes(MAX_PAYLOAD + 1), 0.0)
    most = bytes(MAX_PAYLOAD)
    for _ in range(MAX_KEPT // MAX_PAYLOAD):
        sender.send(most, 0.0)
    with pytest.raises(BufferError, match=r"the leader's engine must call take_messages\(\) in every turn"):
        sender.send(b"x", 0.0)
    with pytest.raises(FrameError, match="2 taken, 1 sent"):
        sender.acknowledged(2, 0.0)
    with pytest.raises(FrameError, match=f"message {WINDOW}, but only 0 were taken"):
        receiver.receive(WINDOW, b"")
    receiver.receive(0, most)
    with pytest.raises(FrameError, match="message 1"):
        receiver.receive(1, bytes(WINDOW_BYTES + 1))
