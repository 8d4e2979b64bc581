"""The rendezvous of nodes: the handshake machines of handshake.py driven over the ZeroMQ sockets of zeromq.py.

Knows: the store by which endpoints and public keys are exchanged, the deadlines of the start.
Does not know: what is compared (handshake.py), the ranks of one node (rendezvous_local.py), what follows
(leader_plane.py, connect.py).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import NoReturn, Protocol

import zmq

from parallel.control.errors import Cause, FrameError, Verdict
from parallel.control.protocol.handshake import CHANNELS, FollowerHandshake, Greeting, Identity, LeaderHandshake
from parallel.control.protocol.states import Limits
from parallel.control.transport.rendezvous_local import failure, greet, raise_refusal
from parallel.control.transport.zeromq import Gate, KeyPair, ZmqFollowerLink, ZmqLeaderLink, post, sender
from parallel.control.wire.frames import Kind


class Store(Protocol):
    """The part of torch.distributed's TCPStore that is used here. ``get`` blocks until the key is set."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


class NodeRendezvous:
    """Rank 0's side: listens on ``address`` for the node leaders ``expected`` (rank -> ranks of its node)."""

    def __init__(
        self, address: str, store: Store, identity: Identity, expected: Mapping[int, tuple[int, ...]], limits: Limits
    ) -> None:
        self.limits = limits
        self.handshake: LeaderHandshake[tuple[str, int]] = LeaderHandshake(identity, 0, expected)
        self.turned_away = 0
        self.gate = Gate(KeyPair())
        self.sockets: dict[str, zmq.Socket[bytes]] = {}
        self.endpoints: list[str] = []
        prefix = _prefix(identity)
        try:
            for channel in CHANNELS:
                self.sockets[channel], endpoint = self.gate.listen(address, watched=channel == "watch")
                self.endpoints.append(endpoint)
                store.set(f"{prefix}/endpoint/{channel}", endpoint)
            store.set(f"{prefix}/key", self.gate.keys.public.decode())
            for rank in expected:
                self.gate.allow(store.get(f"{prefix}/key/{rank}"), rank)
            store.set(f"{prefix}/open", "yes")
        except BaseException:
            self.close()
            raise

    def gather(self) -> None:
        """Raises HandshakeRefused when a node differs, MissedDeadline naming the node leaders that did not come."""
        handshake = self.handshake
        until = (
            time.monotonic() + self.limits.start + self.limits.divergence
        )  # a node leader gives up first, and names its own rank
        while handshake.missing and handshake.verdict is None:
            self._serve(50)
            if time.monotonic() > until:
                handshake.refuse(self._absent())
        if handshake.verdict is not None:
            self.refuse(handshake.verdict)

    def start(self) -> dict[str, ZmqLeaderLink]:
        """Sends START to the node leaders; the links by channel."""
        handshake = self.handshake
        frame = handshake.start(self.offsets())
        covers = handshake.expected
        links = {c: ZmqLeaderLink(self.gate, self.sockets.pop(c), covers, watched=c == "watch") for c in CHANNELS}
        for link in links.values():
            link.broadcast(frame)
        return links

    def offsets(self) -> dict[int, int]:
        """Clock offsets by rank; all ranks of a node share a clock."""
        return {r: self.handshake.offset_ns[n] for n, covered in self.handshake.expected.items() for r in covered}

    def refuse(self, verdict: Verdict) -> NoReturn:
        """Sends ``verdict`` to every node, also to those that connect a moment later, and raises it."""
        frame = self.handshake.refuse(verdict)
        for channel, rank in self.handshake.connections.values():
            post(self.sockets[channel], rank, frame)
        until = time.monotonic() + self.limits.divergence
        while not self.handshake.seen.issuperset(self.handshake.expected) and time.monotonic() < until:
            self._serve(20)
        self.close()
        raise verdict.error()

    def close(self) -> None:
        """Closes what ``start`` has not handed out."""
        if not self.gate.opened:
            self.gate.shut()
        for unused in self.sockets.values():
            self.gate.close(unused)
        self.sockets.clear()

    def _absent(self) -> Verdict:
        """All ranks have met through the store: a port that is closed to other nodes is likelier than a hang."""
        missing = sorted({rank for _, rank in self.handshake.missing})
        text = (
            f"the leaders of other nodes, ranks {missing}, did not finish the handshake within {self.limits.start:g} s "
            f"at {' and '.join(self.endpoints)}: is a firewall between the nodes? Look at their logs, too"
        )
        return Verdict(Cause.DEADLINE, missing[0], 0, text)

    def _serve(self, milliseconds: int) -> None:
        self.sockets["step"].poll(milliseconds)
        for channel, at in self.sockets.items():
            while True:
                try:
                    parts = at.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                rank = sender(self.gate, parts)
                if rank is None:
                    self.turned_away += 1
                    continue
                try:
                    replies = self.handshake.receive((channel, rank), parts[1].bytes, time.time_ns())
                except FrameError:
                    self.turned_away += 1
                    self.handshake.lost((channel, rank))
                    continue
                for reply in replies:
                    post(at, rank, reply)


class NodeJoin:
    """A node leader's side. Made when ``step`` is READY; then ``finish`` once its own node is complete, or ``decline``;
    after ``finish``, ``await_start``.

    Rank 0 starts when both channels of all node leaders are READY, so READY on the second says that this node is
    complete. On any error the links are closed. Raises as rendezvous_local.join.
    """

    def __init__(self, store: Store, identity: Identity, rank: int, covers: tuple[int, ...], limits: Limits) -> None:
        self.links: dict[str, ZmqFollowerLink] = {}
        self.machines: dict[str, FollowerHandshake] = {}
        self._store, self._identity, self._rank, self._covers = store, identity, rank, covers
        self._limits = limits
        self._keys = KeyPair()
        prefix = _prefix(identity)
        store.set(f"{prefix}/key/{rank}", self._keys.public.decode())
        self._server_key = store.get(f"{prefix}/key")
        store.get(f"{prefix}/open")  # rank 0 knows our key
        self._until = time.monotonic() + limits.start + limits.divergence
        self._greet("step")

    def finish(self) -> None:
        """READY on the other channel."""
        self._until = time.monotonic() + self._limits.start + self._limits.divergence
        self._greet("watch")

    def await_start(self) -> None:
        """Waits for START on all channels."""
        self._until = time.monotonic() + self._limits.start + self._limits.divergence
        for channel in CHANNELS:
            self._reach(channel, Greeting.STARTED)

    def decline(self, verdict: Verdict) -> None:
        """A rank of this node was refused: reports it to rank 0, which refuses all."""
        step = self.links["step"]
        step.send(self.machines["step"].codec.encode(Kind.END, self._rank, body=verdict))
        step.flush(self._limits.divergence)
        self._close()

    def _greet(self, channel: str) -> None:
        endpoint = self._store.get(f"{_prefix(self._identity)}/endpoint/{channel}").decode()
        spin, watched = (self._limits.spin, False) if channel == "step" else (0.0, True)
        link = ZmqFollowerLink(endpoint, self._rank, self._keys, self._server_key, spin, watched)
        hello = self._identity.hello(channel, self._covers, socket.gethostname(), os.getpid())
        self.links[channel] = link
        self.machines[channel] = FollowerHandshake(self._identity, self._rank, hello)
        link.send(self.machines[channel].begin())
        self._reach(channel, Greeting.READY)

    def _reach(self, channel: str, goal: Greeting) -> None:
        try:
            try:
                greet(self.links[channel], self.machines[channel], goal, self._until)
            except (TimeoutError, EOFError, FrameError) as error:
                raise_refusal(self.links, self.machines)
                raise self._failure(error, channel).error() from error
        except BaseException:
            self._close()
            raise

    def _failure(self, error: TimeoutError | EOFError | FrameError, channel: str) -> Verdict:
        if isinstance(error, TimeoutError) and self.machines[channel].state is Greeting.GREETED:
            here, endpoint = socket.gethostname(), self.links[channel].endpoint
            error = TimeoutError(f"nothing answers {here} at {endpoint}: is a firewall between the nodes?")
        return failure(error, self._rank, 0)

    def _close(self) -> None:
        for link in self.links.values():
            link.close()


def _prefix(identity: Identity) -> str:
    return f"lockstride/{identity.job:x}/{identity.epoch}"
