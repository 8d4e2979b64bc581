"""Links inside a node: a follower's connection to its leader, and the leader's to its followers by rank.

Knows: which connection is whose, which are readable, spinning and sleeping until one is.
Does not know: packets (uds.py), the contents of frames (frames.py), when a frame is due (leader_plane.py,
follower_plane.py).
"""

from __future__ import annotations

import select
import time

from parallel.control.errors import FrameError
from parallel.control.transport.uds import PacketSocket, peer_credentials

_AT_ONCE = 1024  # frames that a leader receives in one call


class UdsFollowerLink:
    """A follower's connection to its leader. ``spin`` seconds of polling come before a receive sleeps."""

    def __init__(self, connection: PacketSocket, spin: float) -> None:
        self.connection = connection
        self.spin = spin
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def send(self, frame: bytes) -> None:
        self.connection.send(frame)

    def receive(self, timeout: float) -> bytes | None:
        """The next frame within ``timeout`` seconds, else None. Raises EOFError and FrameError like PacketSocket."""
        connection = self.connection
        frame = connection.receive()
        if frame is not None or timeout <= 0:
            return frame
        now = time.monotonic()
        until = now + timeout
        if self.spin > 0.0:
            frame = connection.receive(now + min(self.spin, timeout))
            if frame is not None:
                return frame
            now = time.monotonic()
        while now < until:
            connection.pump()
            if self._poll.poll(max(1, 1000 * (until - now)) if not connection.queue else 1):
                frame = connection.receive()
                if frame is not None:
                    return frame
            now = time.monotonic()
        return None

    def process(self) -> int | None:
        """The leader's process id, as the kernel knows it."""
        return None if self.connection.socket.fileno() < 0 else peer_credentials(self.connection.socket)[0]

    def flush(self, timeout: float) -> None:
        """Waits up to ``timeout`` seconds until queued frames have left."""
        until = time.monotonic() + timeout
        while self.connection.queue and not self.connection.closed and time.monotonic() < until:
            self.connection.pump()
            time.sleep(0.001)

    def close(self) -> None:
        self.connection.close()


class UdsLeaderLink:
    """The leader's connections to its followers, by rank."""

    def __init__(self, connections: dict[int, PacketSocket]) -> None:
        self.connections = dict(sorted(connections.items()))
        self.number = 0
        self._poll = select.poll()
        self._rank_of = {}
        for rank, connection in self.connections.items():
            self._poll.register(connection, select.POLLIN)
            self._rank_of[connection.fileno()] = rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who is connected."""
        return tuple(self.connections)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptors of open connections."""
        return tuple(self._rank_of)

    def broadcast(self, frame: bytes) -> int:
        """Sends to every rank; returns the frame's number, for ``behind``."""
        self.number += 1
        for connection in self.connections.values():
            connection.send(frame, self.number)
        return self.number

    def send(self, rank: int, frame: bytes) -> None:
        connection = self.connections.get(rank)
        if connection is not None:
            connection.send(frame, self.number)

    def receive(self, timeout: float = 0.0) -> list[tuple[int, bytes | FrameError | None]]:
        """(rank, what came): a frame, a FrameError for bytes that are none, None when the rank is gone.

        Ranks are read round-robin, one frame each. Frames beyond a limit, and incomplete ones, are left for the next
        call.
        """
        received: list[tuple[int, bytes | FrameError | None]] = []
        ready = self._poll.poll(1000 * timeout)
        while ready and len(received) <= _AT_ONCE:
            before = len(received)
            for descriptor, _ in ready:
                rank = self._rank_of[descriptor]
                try:
                    frame = self.connections[rank].receive()
                    if frame is not None:
                        received.append((rank, frame))
                except FrameError as error:
                    received.append((rank, error))
                except EOFError:
                    received.append((rank, None))
                    self._drop(rank)
            if len(received) == before:
                break
            ready = self._poll.poll(0)  # one poll for all: a receive that finds nothing costs more than a frame
        return received

    def behind(self, number: int) -> tuple[int, ...]:
        """The ranks whose socket has not taken frame ``number`` whole, after one more try."""
        late = []
        for rank, connection in self.connections.items():
            if connection.queue:
                connection.pump()
                if connection.queue and connection.queue[0][0] <= number:
                    late.append(rank)
        return tuple(late)

    def process(self, rank: int) -> int | None:
        """The process id of a connected rank of this node, as the kernel knows it; None when it is gone."""
        connection = self.connections.get(rank)
        return None if connection is None else peer_credentials(connection.socket)[0]

    def close(self) -> None:
        for rank in tuple(self.connections):
            self._drop(rank)

    def _drop(self, rank: int) -> None:
        connection = self.connections.pop(rank)
        self._poll.unregister(connection)
        del self._rank_of[connection.fileno()]
        connection.close()
