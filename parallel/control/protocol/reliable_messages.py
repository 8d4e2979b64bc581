"""What ranks tell the leader: bytes, in order, none lost, and never a reason to wait.

Knows: numbers, what is kept until it was taken, what is sent again, and what bounds all of it. Two pure machines.
Does not know: what the bytes mean, frames (frames.py), sockets.

A rank numbers what it tells and keeps it until the leader says that its engine took it. Not more than a window of it is
on the way, so the leader holds a window a rank, however long its engine does not look. The rank holds the rest: what
its engine tells in the few turns that it can take without the leader. More than MAX_KEPT is refused: that is an engine
which tells, and a leader that never asks.
"""

from __future__ import annotations

from collections import deque

from parallel.control.errors import FrameError
from parallel.control.wire.frames import MAX_PAYLOAD

WINDOW = 256  # told and not taken, on the way or with the leader
WINDOW_BYTES = 4 << 20  # ... or so many bytes, or one that is larger
MAX_KEPT = 8 * MAX_PAYLOAD  # bytes that a rank keeps
_SLOWEST = 16  # a resend comes at least every so many resend times


def refuse_oversized(payload: bytes) -> None:
    """Raises ValueError when ``payload`` does not fit a frame."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(
            f"control plane: {len(payload)} bytes told at once, the limit is {MAX_PAYLOAD}: tell them in parts"
        )


class ReliableSender:
    """A rank's side. Its methods return what is to be sent now, as (number, payload). ``resend``: seconds."""

    def __init__(self, resend: float) -> None:
        self.kept = 0  # bytes
        self._resend = resend
        self._kept: deque[bytes] = deque()
        self._taken = 0  # the number of the first that is kept
        self._sent = 0  # the number of the first that was not sent
        self._sent_bytes = 0  # of those that were, and are kept
        self._patience = resend
        self._asked = 0.0

    @property
    def untaken(self) -> bool:
        """Whether anything is kept."""
        return bool(self._kept)

    @property
    def unsent(self) -> int:
        """How many payloads wait for the window."""
        return self._taken + len(self._kept) - self._sent

    def tell(self, payload: bytes, now: float) -> list[tuple[int, bytes]]:
        """Raises ValueError for a payload larger than a frame, BufferError when nothing was taken for too long."""
        refuse_oversized(payload)
        if self.kept + len(payload) > MAX_KEPT:
            raise BufferError(
                f"control plane: {self.kept} bytes were told and not taken, and {len(payload)} more make more than "
                f"{MAX_KEPT}: the leader's engine must call told() in every turn"
            )
        if not self._kept:
            self._asked = now
        self._kept.append(payload)
        self.kept += len(payload)
        return self._send()

    def heard(self, taken: int, now: float) -> list[tuple[int, bytes]]:
        """The leader took all below ``taken``. Raises FrameError when that is more than was sent."""
        if taken > self._sent:
            raise FrameError("step", f"{taken} taken, {self._sent} told")
        if taken <= self._taken:
            return []
        while self._taken < taken:
            size = len(self._kept.popleft())
            self.kept -= size
            self._sent_bytes -= size
            self._taken += 1
        self._asked, self._patience = now, self._resend
        return self._send()

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """The oldest again, when nothing was taken for long; ever more seldom, for the leader may just be busy."""
        if self._sent == self._taken or now - self._asked <= self._patience:
            return []
        self._asked, self._patience = now, min(2 * self._patience, _SLOWEST * self._resend)
        return [(self._taken, self._kept[0])]

    def _send(self) -> list[tuple[int, bytes]]:
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
    """The leader's side for one rank: puts in order what came, and keeps it until it is taken."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.taken = 0  # the number of the first that was not
        self._here: dict[int, bytes] = {}
        self._bytes = 0

    @property
    def waiting(self) -> bool:
        """Whether there is something to take."""
        return self.taken in self._here

    def hear(self, number: int, payload: bytes) -> bool:
        """Whether it is new. Raises FrameError when it is more than a rank may send before something was taken."""
        if number < self.taken or number in self._here:
            return False
        if number >= self.taken + WINDOW or self._bytes + len(payload) > WINDOW_BYTES + MAX_PAYLOAD:
            raise FrameError("step", f"told number {number}, but only {self.taken} were taken")
        self._here[number] = payload
        self._bytes += len(payload)
        return True

    def take(self) -> list[bytes]:
        """All that is here without a gap."""
        found = []
        while (payload := self._here.pop(self.taken, None)) is not None:
            self._bytes -= len(payload)
            self.taken += 1
            found.append(payload)
        return found
