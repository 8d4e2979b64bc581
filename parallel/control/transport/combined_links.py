"""Rank 0's links over Unix sockets (its own node) and ZeroMQ (other nodes) as one, and waiting for both.

Knows: which of the two reaches a rank, and how to sleep until either is readable.
Does not know: the contents of frames.
"""

from __future__ import annotations

import time

import zmq

from parallel.control.errors import FrameError
from parallel.control.transport.uds_links import UdsLeaderLink
from parallel.control.transport.zeromq import ZmqLeaderLink


class EitherReady:
    """Sleeps until ``far`` or a connection of ``near`` is readable or closed."""

    def __init__(self, near: UdsLeaderLink, far: zmq.Socket[bytes]) -> None:
        self._near = near
        self._far = far
        self._watched: tuple[int, ...] | None = None
        self._poller = zmq.Poller()

    def wait(self, seconds: float, spin: float = 0.0) -> None:
        """Waits up to ``seconds``; polls for the first ``spin`` of them. May return early with nothing readable."""
        near = self._near.descriptors
        if near != self._watched:  # a closed connection's descriptor may soon be reused
            self._watched = near
            self._poller = zmq.Poller()
            for source in (self._far, *near):
                self._poller.register(source, zmq.POLLIN)
        now = time.monotonic()
        until, spin_until = now + seconds, now + min(spin, seconds)
        while now < spin_until:
            if self._poller.poll(0):
                return
            now = time.monotonic()
        if now < until:
            self._poller.poll(max(1, int(1000 * (until - now))))


class CombinedLinks:
    """A LeaderLink over ``near`` (Unix sockets) and ``far`` (ZeroMQ)."""

    def __init__(self, near: UdsLeaderLink, far: ZmqLeaderLink) -> None:
        self.near = near
        self.far = far
        self._either = EitherReady(near, far.socket)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.near.ranks + self.far.ranks

    def broadcast(self, frame: bytes) -> int:
        self.far.broadcast(frame)
        return self.near.broadcast(frame)

    def send(self, rank: int, frame: bytes) -> None:
        (self.far if rank in self.far.reached else self.near).send(rank, frame)

    def receive(self, timeout: float = 0.0) -> list[tuple[int, bytes | FrameError | None]]:
        received = self.near.receive() + self.far.receive()
        if not received and timeout > 0.0:
            self._either.wait(timeout)
            received = self.near.receive() + self.far.receive()
        return received

    def behind(self, number: int) -> tuple[int, ...]:
        return self.near.behind(number)

    def process(self, rank: int) -> int | None:
        return self.near.process(rank)

    def close(self) -> None:
        self.near.close()
        self.far.close()
