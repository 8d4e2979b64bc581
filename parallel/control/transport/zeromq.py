"""ZeroMQ between nodes: ROUTER at rank 0, DEALER at the first rank of every other node, always encrypted with CURVE.

Knows: sockets, keys, who may connect, sizes and queues, broken and restored connections.
Does not know: the handshake (rendezvous_nodes.py), the contents of frames, when one is due.

Every process has a key pair whose secret never leaves it; public keys are exchanged through the job's
rendezvous store. The ROUTER asks the ZAP handler about every connection, and the handler knows only the public keys of
this job's nodes. A frame is attributed to the rank whose key opened its connection, whatever its routing id says.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from parallel.control.errors import FrameError
from parallel.control.wire.frames import MAX_FRAME

_DOMAIN = "lockstride"
_QUEUED = 16_384  # frames a socket queues for a peer that does not read
_ENVELOPE = 64  # what CURVE adds to a message, generously
_LINGER_MS = 1000
_GOODBYE_MS = 100  # after an agreed end: rank 0 no longer needs what is queued
_MEND_SECONDS = 2.0  # a broken connection of the watch channel may reconnect within this time
_HEARTBEAT_MS = 2000
_BEATS = 5  # heartbeats that may stay unanswered


class ListenError(RuntimeError):
    """Rank 0 cannot listen on the address it was given."""


class KeyPair:
    """The CURVE key pair of one process, new for each job."""

    def __init__(self) -> None:
        self.public, self.secret = zmq.curve_keypair()


class _Allowed:
    """The ZAP handler's credentials: only the keys of this job's nodes may connect."""

    def __init__(self, rank_of: Mapping[bytes, int]) -> None:
        self.rank_of = rank_of
        self.refused = 0

    def callback(self, domain: str, key: bytes) -> bool:
        if domain == _DOMAIN and key in self.rank_of:
            return True
        self.refused += 1
        return False


class Gate:
    """Rank 0's ZeroMQ context with its ZAP handler: ``allow`` says which public key is which rank's.

    Closes with the last of the sockets that were opened on it.
    """

    def __init__(self, keys: KeyPair) -> None:
        self.keys = keys
        self.rank_of: dict[bytes, int] = {}
        self.allowed = _Allowed(self.rank_of)
        self.context = zmq.Context()
        self.opened = 0  # sockets
        self._shut = False
        self._authenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=_DOMAIN, credentials_provider=self.allowed)

    def allow(self, public_key: bytes, rank: int) -> None:
        self.rank_of[public_key] = rank

    def listen(self, address: str, watched: bool = False) -> tuple[zmq.Socket[bytes], str]:
        """A ROUTER on a free port of ``address`` only, and its endpoint. ``watched`` as in ZmqLeaderLink."""
        socket = self.context.socket(zmq.ROUTER)
        _set_limits(socket)
        if watched:
            _set_heartbeats(socket)
        socket.ipv6 = ":" in address
        socket.curve_server = True
        socket.curve_secretkey = self.keys.secret
        socket.zap_domain = _DOMAIN.encode()
        socket.router_mandatory = True
        socket.router_handover = True  # a node may reconnect before its old connection is known to be dead
        try:
            port = socket.bind_to_random_port(f"tcp://{_bracketed(address)}")
        except zmq.ZMQError as error:
            socket.close(0)
            raise ListenError(
                f"control plane: rank 0 cannot listen on {address}: {error}; it must be an address of this node"
            ) from error
        self.opened += 1
        return socket, f"tcp://{_bracketed(address)}:{port}"

    def close(self, socket: zmq.Socket[bytes]) -> None:
        socket.close(_LINGER_MS)
        self.opened -= 1
        if self.opened == 0:
            self.shut()

    def shut(self) -> None:
        """Ends the ZAP handler's thread and the context; all sockets are closed."""
        if not self._shut:
            self._shut = True
            self._authenticator.stop()
            self.context.term()


class ZmqLeaderLink:
    """Rank 0's connections to the leaders of the other nodes, on one channel. ``covers``: their ranks, by leader.

    ``watched``: a connection that broke and did not reconnect within two seconds counts as a lost rank. Otherwise (the
    step channel) only deadlines end a job.
    """

    def __init__(
        self, gate: Gate, socket: zmq.Socket[bytes], covers: Mapping[int, tuple[int, ...]], watched: bool
    ) -> None:
        self.gate = gate
        self.socket = socket
        self.ranks = tuple(sorted(covers))
        self.reached = frozenset(rank for covered in covers.values() for rank in covered)
        self.number = 0
        self.strangers = 0  # frames of authenticated peers under another rank's id: never read
        self._leader_of = {rank: leader for leader, covered in covers.items() for rank in covered}
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) if watched else None
        self._descriptors: dict[int, int] = {}
        self._broken: dict[int, float] = {}

    def broadcast(self, frame: bytes) -> int:
        self.number += 1
        for rank in self.ranks:
            self.send(rank, frame)
        return self.number

    def send(self, rank: int, frame: bytes) -> None:
        """Sends to the leader of the rank's node, which relays it."""
        leader = self._leader_of.get(rank)
        if leader is not None:
            post(self.socket, leader, frame)

    def receive(self, timeout: float = 0.0) -> list[tuple[int, bytes | FrameError | None]]:
        received: list[tuple[int, bytes | FrameError | None]] = []
        if timeout > 0.0:
            self.socket.poll(max(1, int(1000 * timeout)))
        while len(received) < 1024:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            rank = sender(self.gate, parts)
            if rank is None:
                self.strangers += 1
                continue
            if self._monitor is not None:
                self._descriptors[parts[-1].get(zmq.SRCFD)] = rank
                self._broken.pop(rank, None)
            received.append((rank, parts[1].bytes))
        if self._monitor is not None:
            received += self._lost_ranks(self._monitor)
        return received

    def behind(self, number: int) -> tuple[int, ...]:
        return ()  # ZeroMQ queues, and sends from its own thread

    def process(self, rank: int) -> int | None:
        return None

    def close(self) -> None:
        if not self.socket.closed:
            if self._monitor is not None:
                self.socket.disable_monitor()
                self._monitor.close(0)
            self.gate.close(self.socket)

    def _lost_ranks(self, monitor: zmq.Socket[bytes]) -> list[tuple[int, bytes | FrameError | None]]:
        now = time.monotonic()
        while monitor.poll(0):
            rank = self._descriptors.pop(int(recv_monitor_message(monitor)["value"]), None)
            if rank is not None:
                self._broken[rank] = now
        gone = [rank for rank, since in self._broken.items() if now - since > _MEND_SECONDS]
        for rank in gone:
            del self._broken[rank]
            self.ranks = tuple(r for r in self.ranks if r != rank)
        return [(rank, None) for rank in gone]


class ZmqFollowerLink:
    """A node leader's connection to rank 0, on one channel. ``watched`` as in ZmqLeaderLink: a loss raises EOFError."""

    def __init__(self, endpoint: str, rank: int, keys: KeyPair, server_key: bytes, spin: float, watched: bool) -> None:
        self.endpoint = endpoint
        self.spin = spin
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        _set_limits(self.socket)
        self.socket.ipv6 = "[" in endpoint
        self.socket.routing_id = routing_id(rank)
        self.socket.curve_serverkey = server_key
        self.socket.curve_publickey = keys.public
        self.socket.curve_secretkey = keys.secret
        if watched:
            _set_heartbeats(self.socket)
        self.socket.reconnect_ivl = 100
        self.socket.reconnect_ivl_max = 1000
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor = self.socket.get_monitor_socket(events) if watched else None
        self._broken: float | None = None
        self._linger_ms = _GOODBYE_MS
        self.socket.connect(endpoint)

    def send(self, frame: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # the queue is full: rank 0 has been gone for long, and a deadline is near
            self.socket.send(frame, zmq.NOBLOCK)

    def receive(self, timeout: float) -> bytes | None:
        until = time.monotonic() + timeout
        spin_until = until - timeout + min(self.spin, timeout)
        while True:
            try:
                return self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                pass
            now = time.monotonic()
            if now < spin_until:
                continue
            if self._monitor is not None:
                self._check_monitor(self._monitor, now)
            if now >= until:
                return None
            self.socket.poll(max(1, min(100, int(1000 * (until - now)))))

    def process(self) -> int | None:
        return None

    def flush(self, timeout: float) -> None:
        """Gives queued frames up to ``timeout`` seconds to leave when ``close`` is called."""
        self._linger_ms = int(1000 * timeout)

    def close(self) -> None:
        if not self.socket.closed:
            if self._monitor is not None:
                self.socket.disable_monitor()
                self._monitor.close(0)
            self.socket.close(self._linger_ms)
            self._context.term()

    def _check_monitor(self, monitor: zmq.Socket[bytes], now: float) -> None:
        while monitor.poll(0):
            broke = recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
            self._broken = now if broke else None
        if self._broken is not None and now - self._broken > _MEND_SECONDS:
            raise EOFError


def routing_id(rank: int) -> bytes:
    return b"rank-%05d" % rank


def sender(gate: Gate, parts: list[zmq.Frame]) -> int | None:
    """The rank whose key sent this message; None for a malformed message or one with another rank's id."""
    if len(parts) != 2:
        return None
    try:
        rank = gate.rank_of.get(str(parts[1].get("User-Id")).encode())
    except zmq.ZMQError:
        return None
    return rank if rank is not None and parts[0].bytes == routing_id(rank) else None


def post(socket: zmq.Socket[bytes], rank: int, frame: bytes) -> None:
    """Queues a frame for a rank. Dropped where the rank is unreachable: it asks again, or its deadline passes."""
    try:
        socket.send_multipart((routing_id(rank), frame), zmq.NOBLOCK, copy=len(frame) < 65_536)
    except zmq.ZMQError as error:
        if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            raise


def _set_limits(socket: zmq.Socket[bytes]) -> None:
    """Sets the limits of every socket: sizes and queues."""
    socket.maxmsgsize = MAX_FRAME + _ENVELOPE
    socket.sndhwm = _QUEUED
    socket.rcvhwm = _QUEUED
    socket.linger = _LINGER_MS


def _set_heartbeats(socket: zmq.Socket[bytes]) -> None:
    """Sets heartbeats: a connection without answers is dropped, with all frames in flight on it.

    Not for the step channel: there TCP resumes when the network is back, while a dropped record would have to wait for
    rank 0's next turn.
    """
    socket.heartbeat_ivl = _HEARTBEAT_MS
    socket.heartbeat_timeout = _BEATS * _HEARTBEAT_MS


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
