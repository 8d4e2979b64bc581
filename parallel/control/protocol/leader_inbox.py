"""The part of a Leader that receives the followers' reliable messages and keeps them until its engine takes them.

Knows: one ReliableReceiver a follower, and when to acknowledge. Does not know: what messages mean, how they are
numbered and bounded (reliable_messages.py), turns (leader.py).
"""

from __future__ import annotations

from parallel.control.errors import FrameError
from parallel.control.protocol.leader_status import LeaderStatus
from parallel.control.protocol.reliable_messages import ReliableReceiver, refuse_oversized
from parallel.control.wire.frames import Kind


class LeaderInbox:
    """Messages to the leader's engine, of the followers and of its own rank."""

    def __init__(self, status: LeaderStatus) -> None:
        self._status = status
        self._receivers = {rank: ReliableReceiver(rank) for rank in status.reached}
        self._own: list[bytes] = []

    def post(self, payload: bytes) -> None:
        """A message of this rank to itself. Raises ValueError above MAX_PAYLOAD bytes."""
        refuse_oversized(payload)
        self._own.append(payload)

    def receive(self, rank: int, number: int, payload: bytes) -> None:
        """A follower's message ``number``."""
        status, receiver = self._status, self._receivers[rank]
        try:
            new = receiver.receive(number, payload)
        except FrameError as error:
            status.bad(rank, error)
            return
        if not new:
            status.ignored += 1
            if number < receiver.taken:  # its acknowledgement was lost
                self._acknowledge(receiver)

    def has_messages(self) -> bool:
        """Whether ``take`` has something to return."""
        return bool(self._own) or any(receiver.waiting for receiver in self._receivers.values())

    def take(self) -> list[tuple[int, bytes]]:
        """(rank, payload) of all messages since the last call, each rank's in its order; acknowledges them."""
        found = [(self._status.rank, payload) for payload in self._own]
        self._own.clear()
        for rank, receiver in self._receivers.items():
            if receiver.waiting:
                found += [(rank, payload) for payload in receiver.take()]
                self._acknowledge(receiver)
        return found

    def _acknowledge(self, receiver: ReliableReceiver) -> None:
        frame = self._status.codec.encode(Kind.MESSAGE_ACK, receiver.rank, receiver.taken)
        self._status.outbox.append((receiver.rank, frame))
