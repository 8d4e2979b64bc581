"""Reliable messages from a follower to the leader's engine: in order, none lost, and sending never waits.

Knows: message numbers, the send window, resends, acknowledgements, and the bounds of every buffer. All are pure.
Does not know: what the bytes mean, when a frame is sent (follower.py, leader.py), sockets.

The sender numbers each message and keeps it until the leader acknowledges that its engine took it. At most one window
of messages is in flight, so the leader buffers at most a window a rank, however rarely its engine takes them. The
sender buffers the rest: what an engine sends in the few turns it can take without the leader. Above MAX_KEPT bytes it
refuses: an engine that sends to a leader that never takes is a bug.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from parallel.control.errors import FrameError
from parallel.control.wire.frames import MAX_PAYLOAD, Codec, Kind

WINDOW = 256  # messages in flight: sent and not acknowledged
WINDOW_BYTES = 4 << 20  # bytes in flight; a single larger message may pass
MAX_KEPT = 8 * MAX_PAYLOAD  # bytes that a sender buffers
_MAX_BACKOFF = 16  # resend times; the longest pause between two resends


def refuse_oversized(payload: bytes) -> None:
    """Raises ValueError when ``payload`` does not fit a frame."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(
            f"control plane: a message of {len(payload)} bytes, the limit is {MAX_PAYLOAD}: send it in parts"
        )


class ReliableSender:
    """The follower's side. Its methods return the messages to send now, as (number, payload). ``resend``: seconds."""

    def __init__(self, resend: float) -> None:
        self.kept = 0  # bytes
        self._resend = resend
        self._kept: deque[bytes] = deque()
        self._taken = 0  # the number of the first message that is kept
        self._sent = 0  # the number of the first that was never sent
        self._sent_bytes = 0  # in flight
        self._backoff = resend
        self._sent_at = 0.0

    @property
    def unacknowledged(self) -> bool:
        """Whether the leader's engine has not taken all messages."""
        return bool(self._kept)

    @property
    def unsent(self) -> int:
        """How many messages wait for the window."""
        return self._taken + len(self._kept) - self._sent

    def send(self, payload: bytes, now: float) -> list[tuple[int, bytes]]:
        """Queues a message. Raises ValueError when it is larger than a frame, BufferError above MAX_KEPT bytes."""
        refuse_oversized(payload)
        if self.kept + len(payload) > MAX_KEPT:
            raise BufferError(
                f"control plane: {self.kept} bytes of messages were not taken, and {len(payload)} more make more than "
                f"{MAX_KEPT}: the leader's engine must call take_messages() in every turn"
            )
        if not self._kept:
            self._sent_at = now
        self._kept.append(payload)
        self.kept += len(payload)
        return self._fill_window()

    def acknowledged(self, taken: int, now: float) -> list[tuple[int, bytes]]:
        """The leader's engine took all messages below ``taken``. Raises FrameError when so many were never sent."""
        if taken > self._sent:
            raise FrameError("step", f"{taken} taken, {self._sent} sent")
        if taken <= self._taken:
            return []
        while self._taken < taken:
            size = len(self._kept.popleft())
            self.kept -= size
            self._sent_bytes -= size
            self._taken += 1
        self._sent_at, self._backoff = now, self._resend
        return self._fill_window()

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """The oldest message again, when nothing was acknowledged for long; with backoff, as the leader may be busy."""
        if self._sent == self._taken or now - self._sent_at <= self._backoff:
            return []
        self._sent_at, self._backoff = now, min(2 * self._backoff, _MAX_BACKOFF * self._resend)
        return [(self._taken, self._kept[0])]

    def _fill_window(self) -> list[tuple[int, bytes]]:
        sent = []
        while (at := self._sent - self._taken) < len(self._kept):
            payload = self._kept[at]
            if at > 0 and (at >= WINDOW or self._sent_bytes + len(payload) > WINDOW_BYTES):
                break
            sent.append((self._sent, payload))
            self._sent += 1
            self._sent_bytes += len(payload)
        return sent


class ReliableReceiver:
    """The leader's side for one follower: puts messages in order and keeps them until they are taken."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.taken = 0  # the number of the first message that was not taken
        self._waiting: dict[int, bytes] = {}
        self._bytes = 0

    @property
    def waiting(self) -> bool:
        """Whether ``take`` has something to return."""
        return self.taken in self._waiting

    def receive(self, number: int, payload: bytes) -> bool:
        """Whether the message is new. Raises FrameError when it lies beyond the window."""
        if number < self.taken or number in self._waiting:
            return False
        if number >= self.taken + WINDOW or self._bytes + len(payload) > WINDOW_BYTES + MAX_PAYLOAD:
            raise FrameError("step", f"message {number}, but only {self.taken} were taken")
        self._waiting[number] = payload
        self._bytes += len(payload)
        return True

    def take(self) -> list[bytes]:
        """All messages up to the first gap."""
        found = []
        while (payload := self._waiting.pop(self.taken, None)) is not None:
            self._bytes -= len(payload)
            self.taken += 1
            found.append(payload)
        return found


class Inbox:
    """Messages to the engine of the leader, rank ``rank``: from the followers ``ranks`` and from itself.

    Acknowledgements go into ``outbox`` as (rank, frame).
    """

    def __init__(self, codec: Codec, rank: int, ranks: Iterable[int], outbox: deque[tuple[int, bytes]]) -> None:
        self.rank = rank
        self._codec = codec
        self._outbox = outbox
        self._receivers = {follower: ReliableReceiver(follower) for follower in ranks}
        self._own: list[bytes] = []

    def post(self, payload: bytes) -> None:
        """A message of this rank to itself. Raises ValueError above MAX_PAYLOAD bytes."""
        refuse_oversized(payload)
        self._own.append(payload)

    def receive(self, rank: int, number: int, payload: bytes) -> bool:
        """A follower's message ``number``; whether it is new. Raises FrameError when it lies beyond the window."""
        receiver = self._receivers[rank]
        new = receiver.receive(number, payload)
        if not new and number < receiver.taken:  # its acknowledgement was lost
            self._acknowledge(receiver)
        return new

    def has_messages(self) -> bool:
        """Whether ``take`` has something to return."""
        return bool(self._own) or any(receiver.waiting for receiver in self._receivers.values())

    def take(self) -> list[tuple[int, bytes]]:
        """(rank, payload) of all messages since the last call, each rank's in its order; acknowledges them."""
        found = [(self.rank, payload) for payload in self._own]
        self._own.clear()
        for rank, receiver in self._receivers.items():
            if receiver.waiting:
                found += [(rank, payload) for payload in receiver.take()]
                self._acknowledge(receiver)
        return found

    def _acknowledge(self, receiver: ReliableReceiver) -> None:
        frame = self._codec.encode(Kind.MESSAGE_ACK, receiver.rank, receiver.taken)
        self._outbox.append((receiver.rank, frame))
