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
        teller, hearer = ReliableSender(1.0), ReliableReceiver(3)
        told: list[bytes] = []
        taken: list[bytes] = []
        way: list[tuple[int, bytes]] = []
        now = 0.0
        while len(taken) < 100:
            now += rng.random()
            if len(told) < 100 and rng.random() < 0.5:
                told.append(rng.randbytes(3))
                way += teller.tell(told[-1], now)
            way += teller.due(now)
            rng.shuffle(way)
            while way and rng.random() < 0.7:
                number, payload = way.pop()
                if rng.random() < 0.8:
                    hearer.hear(number, payload)
            if rng.random() < 0.3:
                waiting, more = hearer.waiting, hearer.take()
                assert waiting == bool(more)
                taken += more
            if rng.random() < 0.3:
                way += teller.heard(hearer.taken, now)
        assert taken == told


def test_a_window_is_on_the_way_and_the_rest_waits() -> None:
    teller, hearer = ReliableSender(1.0), ReliableReceiver(1)
    sent = [frame for number in range(WINDOW + 10) for frame in teller.tell(b"%d" % number, 0.0)]
    assert [number for number, _ in sent] == list(range(WINDOW))
    for frame in sent:
        assert hearer.hear(*frame)
    assert len(hearer.take()) == WINDOW
    assert teller.heard(WINDOW, 0.0) == [(WINDOW + n, b"%d" % (WINDOW + n)) for n in range(10)]
    assert teller.kept == sum(len(b"%d" % (WINDOW + n)) for n in range(10))


def test_large_payloads_go_one_by_one() -> None:
    teller = ReliableSender(1.0)
    large = bytes(WINDOW_BYTES)
    assert [number for _ in range(3) for number, _ in teller.tell(large, 0.0)] == [0]
    assert [number for number, _ in teller.heard(1, 0.0)] == [1]


def test_the_oldest_is_sent_again_ever_more_seldom() -> None:
    """A leader may be busy, and has it already: it should not find thousands of echoes then."""
    teller = ReliableSender(1.0)
    for payload in (b"a", b"b"):
        teller.tell(payload, 0.0)
    again = [now for now in range(1, 200) if teller.due(float(now) + 0.5) == [(0, b"a")]]
    assert again[:4] == [1, 4, 9, 18]
    assert max(later - sooner for sooner, later in pairwise(again)) <= 17
    teller.heard(1, 200.0)
    assert teller.due(201.5) == [(1, b"b")]
    teller.heard(2, 202.0)
    assert teller.due(300.0) == []


def test_echoes_say_nothing_new() -> None:
    teller, hearer = ReliableSender(1.0), ReliableReceiver(1)
    (frame,) = teller.tell(b"a", 0.0)
    assert hearer.hear(*frame)
    assert not hearer.hear(*frame)
    assert hearer.take() == [b"a"]
    assert not hearer.hear(*frame)
    assert not hearer.waiting
    assert teller.heard(1, 0.0) == teller.heard(1, 0.0) == teller.heard(0, 0.0) == []


def test_what_is_kept_is_bounded_on_both_sides() -> None:
    teller, hearer = ReliableSender(1.0), ReliableReceiver(1)
    with pytest.raises(ValueError, match=f"{MAX_PAYLOAD + 1} bytes told at once, the limit is {MAX_PAYLOAD}"):
        teller.tell(bytes(MAX_PAYLOAD + 1), 0.0)
    most = bytes(MAX_PAYLOAD)
    for _ in range(MAX_KEPT // MAX_PAYLOAD):
        teller.tell(most, 0.0)
    with pytest.raises(BufferError, match=r"the leader's engine must call told\(\) in every turn"):
        teller.tell(b"x", 0.0)
    with pytest.raises(FrameError, match="2 taken, 1 told"):
        teller.heard(2, 0.0)
    with pytest.raises(FrameError, match=f"told number {WINDOW}, but only 0 were taken"):
        hearer.hear(WINDOW, b"")
    hearer.hear(0, most)
    with pytest.raises(FrameError, match="told number 1"):
        hearer.hear(1, bytes(WINDOW_BYTES + 1))
