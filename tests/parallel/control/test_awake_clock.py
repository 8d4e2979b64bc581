"""A job that was stopped as a whole and goes on: no rank is late for that. No threads, no sockets, no real time."""

from __future__ import annotations

from collections import deque

import pytest

from parallel.control.errors import FrameError, MissedDeadline
from parallel.control.follower_plane import FollowerPlane
from parallel.control.interface import AwakeClock
from parallel.control.leader_plane import LeaderPlane
from parallel.control.protocol.follower import Follower
from parallel.control.protocol.leader import Leader
from parallel.control.protocol.states import Limits
from parallel.control.wire.frames import EVERYONE, Codec, Kind

CODEC = Codec(7, 0, 2)
LIMITS = Limits(deadline=10.0)
KEEPALIVE = CODEC.encode(Kind.KEEPALIVE, EVERYONE, 0)
RECORD = CODEC.encode(Kind.RECORD, EVERYONE, 0, 5, payload=b"event")


class Time:
    """``wait`` lets so many seconds pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def clock(self) -> AwakeClock:
        return AwakeClock(1.0, lambda: self.now)


class Link:
    """To one other rank. ``coming``: what each receive returns, after how many seconds."""

    ranks = (1,)

    def __init__(self, time: Time) -> None:
        self.time = time
        self.coming: deque[tuple[float, bytes | None]] = deque()

    def next(self) -> bytes | None:
        seconds, frame = self.coming.popleft() if self.coming else (0.0, None)
        self.time.wait(seconds)
        return frame

    def flush(self, timeout: float) -> None:
        pass

    def close(self) -> None:
        pass

    def process(self, *rank: int) -> int | None:
        return None


class FollowerEnd(Link):
    def send(self, frame: bytes) -> None:
        pass

    def receive(self, timeout: float) -> bytes | None:
        return self.next()


class LeaderEnd(Link):
    def send(self, rank: int, frame: bytes) -> None:
        pass

    def broadcast(self, frame: bytes) -> int:
        return 0

    def behind(self, number: int) -> tuple[int, ...]:
        return ()

    def receive(self, timeout: float = 0.0) -> list[tuple[int, bytes | FrameError | None]]:
        frame = self.next()
        return [] if frame is None else [(1, frame)]


def test_the_clock_stands_while_nobody_reads_it() -> None:
    time = Time()
    clock = time.clock()
    assert clock() == 100.0
    for seconds, reads in ((0.25, 100.25), (1.0, 101.25), (3600.0, 102.25), (0.5, 102.75)):
        time.wait(seconds)
        assert clock() == reads


@pytest.mark.parametrize("stopped", [14.0, 3600.0])
def test_a_follower_that_was_stopped_does_not_blame_its_leader(stopped: float) -> None:
    time = Time()
    link = FollowerEnd(time)
    plane = FollowerPlane(Follower(CODEC, 1, 0, LIMITS), link, None)
    plane._now = time.clock()
    link.coming.extend([(0.0, KEEPALIVE), (2.0, None), (stopped, None), (0.5, None), (0.5, RECORD)])
    assert plane.exchange(0, 5) == b"event"


def test_a_follower_that_waits_names_a_leader_that_is_silent() -> None:
    time = Time()
    link = FollowerEnd(time)
    plane = FollowerPlane(Follower(CODEC, 1, 0, LIMITS), link, None)
    plane._now = time.clock()
    link.coming.extend([(0.0, KEEPALIVE), *[(0.5, None)] * 21, (0.0, RECORD)])
    with pytest.raises(MissedDeadline, match="rank 0 was silent for more than 10 s"):
        plane.exchange(0, 5)


def leader(time: Time, link: LeaderEnd) -> LeaderPlane:
    """In step 1, which rank 1 has not begun."""
    plane = LeaderPlane(Leader(CODEC, 0, LIMITS), link, None)
    plane._now = time.clock()
    link.coming.append((0.0, CODEC.encode(Kind.ACK, 1, 0, 5)))
    plane.exchange(0, 5)
    plane.exchange(1, 5)
    return plane


def test_a_leader_that_was_stopped_does_not_blame_its_followers() -> None:
    """Wherever it stood: in a step, or while it waited for numbers."""
    time = Time()
    link = LeaderEnd(time)
    plane = leader(time, link)
    time.wait(14.0)
    plane.exchange(2, 5)
    link.coming.extend([(0.0, None), (14.0, None), (0.1, CODEC.encode(Kind.ACK, 1, 2, 5))])
    for _ in range(3):
        plane.poll()


def test_a_leader_that_looks_names_a_follower_that_is_late() -> None:
    time = Time()
    link = LeaderEnd(time)
    plane = leader(time, link)
    link.coming.extend([(0.5, None)] * 21)
    for _ in range(20):
        plane.poll()
    with pytest.raises(MissedDeadline, match="rank 1 did not reach step 1 within 10 s"):
        plane.poll()
