"""The rendezvous of one node's ranks: the handshake machines of handshake.py driven over the sockets of uds.py.

Knows: the listener's lifetime, the deadlines of the start, and when to turn a connection away.
Does not know: what is compared (handshake.py), other nodes (zeromq.py), what follows the start (control/interface.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from parallel.control.errors import Cause, FrameError, Verdict
from parallel.control.interface import FollowerLink
from parallel.control.protocol.handshake import CHANNELS, FollowerHandshake, Greeting, Identity, LeaderHandshake
from parallel.control.protocol.states import Limits
from parallel.control.transport.uds import PacketSocket, accept, connect, listen
from parallel.control.transport.uds_links import UdsFollowerLink, UdsLeaderLink

_SPARE = 64  # unidentified connections that are allowed in addition to the expected ones


class LocalRendezvous:
    """The leader's side: listens at ``path`` for the followers ``ranks`` of this node.

    ``gather`` returns when all are there with our identity; ``start`` sends START. In between, a node leader other than
    rank 0 asks rank 0 (rendezvous_nodes.py). After either the socket's path is removed: no one else can connect.
    """

    def __init__(self, path: Path, identity: Identity, leader: int, ranks: tuple[int, ...], limits: Limits) -> None:
        self.path = path
        self.limits = limits
        self.handshake: LeaderHandshake[int] = LeaderHandshake(identity, leader, {rank: (rank,) for rank in ranks})
        self.turned_away = 0
        self._listener: socket.socket | None = listen(path)
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._connections: dict[int, PacketSocket] = {}

    def gather(self) -> None:
        """Raises HandshakeRefused when a rank differs, MissedDeadline naming the ranks that did not come."""
        handshake = self.handshake
        until = time.monotonic() + self.limits.start
        while handshake.missing and handshake.verdict is None:
            self._serve()
            if time.monotonic() > until:
                handshake.refuse(self._absent())
        if handshake.verdict is not None:
            self.refuse(handshake.verdict)

    def start(self, offsets_ns: Mapping[int, int]) -> dict[str, UdsLeaderLink]:
        """Sends START; the links by channel. ``offsets_ns`` are all ranks' clock offsets against rank 0."""
        frame = self.handshake.start(offsets_ns)
        links: dict[str, UdsLeaderLink] = {}
        for channel in CHANNELS:
            mine = {r: k for (c, r), k in self.handshake.connections.items() if c == channel}
            links[channel] = UdsLeaderLink({r: self._connections.pop(k) for r, k in mine.items()})
            links[channel].broadcast(frame)
        self.close()
        return links

    def refuse(self, verdict: Verdict) -> NoReturn:
        """Sends ``verdict`` to every rank, also to those that connect a moment later, and raises it."""
        frame = self.handshake.refuse(verdict)
        for connection in self._connections.values():
            connection.send(frame)
        until = time.monotonic() + self.limits.divergence
        while not self.handshake.seen.issuperset(self.handshake.expected) and time.monotonic() < until:
            self._serve()
        self.close()
        raise verdict.error()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self.path.unlink(missing_ok=True)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _serve(self) -> None:
        """Accepts connections and handles frames for a moment."""
        for descriptor, _ in self._poll.poll(20):
            if descriptor in self._connections:
                self._handle(descriptor)
            elif self._listener is not None:
                self._admit(self._listener)

    def _admit(self, listener: socket.socket) -> None:
        connection = accept(listener)
        if connection is None:
            self.turned_away += 1
        elif len(self._connections) >= len(CHANNELS) * len(self.handshake.expected) + _SPARE:
            self.turned_away += 1
            connection.close()
        else:
            self._connections[connection.fileno()] = connection
            self._poll.register(connection, select.POLLIN)

    def _handle(self, descriptor: int) -> None:
        connection = self._connections[descriptor]
        try:
            frame = connection.receive()
            if frame is not None:
                for reply in self.handshake.receive(descriptor, frame, time.time_ns()):
                    connection.send(reply)
            return
        except FrameError:
            self.turned_away += 1
        except EOFError:
            pass
        self.handshake.lost(descriptor)
        self._poll.unregister(descriptor)
        del self._connections[descriptor]
        connection.close()

    def _absent(self) -> Verdict:
        missing = sorted({rank for _, rank in self.handshake.missing})
        away = f"; {self.turned_away} connections that spoke no frame of this job were turned away"
        text = (
            f"ranks {missing} did not finish the handshake within {self.limits.start:g} s at {self.path}"
            f"{away if self.turned_away else ''}. Look at their logs first"
        )
        return Verdict(Cause.DEADLINE, missing[0], 0, text)


@dataclass(frozen=True, slots=True)
class Joined:
    """A follower's links by channel, and the offsets of all ranks' clocks to the leader's."""

    links: dict[str, UdsFollowerLink]
    offsets_ns: tuple[int, ...]


def join(path: Path, identity: Identity, rank: int, leader: int, limits: Limits) -> Joined:
    """The follower's side of a LocalRendezvous: connects, greets, waits for START.

    Raises HandshakeRefused (the leader says the same), MissedDeadline or LostPeer naming the leader.
    """
    until = (
        time.monotonic() + limits.start + limits.divergence
    )  # longer than the leader, which can name the missing rank
    links: dict[str, UdsFollowerLink] = {}
    machines: dict[str, FollowerHandshake] = {}
    try:
        for channel in CHANNELS:
            hello = identity.hello(channel, (rank,), socket.gethostname(), os.getpid())
            machines[channel] = FollowerHandshake(identity, rank, hello, leader)
            connection = connect(path, until, lambda: raise_refusal(links, machines))
            links[channel] = UdsFollowerLink(connection, limits.spin if channel == "step" else 0.0)
            links[channel].send(machines[channel].begin())
            greet(links[channel], machines[channel], Greeting.READY, until)
        for channel in CHANNELS:
            greet(links[channel], machines[channel], Greeting.STARTED, until)
    except (TimeoutError, EOFError, FrameError) as error:
        raise_refusal(links, machines)
        raise failure(error, rank, leader).error() from error
    finally:
        if any(m.state is not Greeting.STARTED for m in machines.values()) or len(links) < len(CHANNELS):
            for link in links.values():
                link.close()
    step = machines["step"]
    return Joined(links, step.offsets_ns)


def greet(link: FollowerLink, machine: FollowerHandshake, goal: Greeting, until: float) -> None:
    """Exchanges frames until the machine reaches ``goal``. Raises its verdict, TimeoutError, EOFError, FrameError."""
    while machine.state is not goal:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"the handshake stands at {machine.state.value!r} and the start deadline passed")
        frame = link.receive(left)
        if frame is None:
            continue
        for reply in machine.receive(frame, time.time_ns()):
            link.send(reply)
        if machine.verdict is not None:
            raise machine.verdict.error()


def raise_refusal(links: Mapping[str, FollowerLink], machines: Mapping[str, FollowerHandshake]) -> None:
    """Raises the leader's refusal if it arrived on another channel."""
    for channel, link in links.items():
        with contextlib.suppress(EOFError, FrameError):
            while (frame := link.receive(0.0)) is not None:
                machines[channel].receive(frame, time.time_ns())
        verdict = machines[channel].verdict
        if verdict is not None:
            raise verdict.error()


def failure(error: Exception, rank: int, leader: int) -> Verdict:
    """The verdict on a leader that did not answer, closed the connection, or sent something else."""
    if isinstance(error, TimeoutError):
        return Verdict(Cause.DEADLINE, leader, 0, f"rank {leader} did not come to the handshake: {error}")
    if isinstance(error, FrameError):
        return Verdict(Cause.FRAME, leader, 0, f"rank {leader} broke the protocol in the handshake: {error}")
    return Verdict(Cause.LOST, leader, 0, f"rank {leader} closed the connection of rank {rank} during the handshake")
