"""The first rank of a node without rank 0: a follower, and the relay between rank 0 and the other ranks of its node.

Knows: which frames go up, which go down, and that a record is forwarded before it is handled.
Does not know: the rules of agreement (follower.py), sockets.

Frames are forwarded byte for byte: their CRC, job and rank stay the sender's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from parallel.control.errors import Cause, FrameError, Verdict
from parallel.control.follower_plane import FollowerPlane
from parallel.control.interface import FLUSH_SECONDS, FollowerLink, LeaderLink, Watch
from parallel.control.protocol.follower import Follower
from parallel.control.transport.combined_links import EitherReady
from parallel.control.wire.frames import EVERYONE, Frame, Kind


class RelayPlane(FollowerPlane):
    """A FollowerPlane that relays for the ranks that ``down`` leads to. ``either`` waits for frames from both sides."""

    def __init__(
        self, machine: Follower, link: FollowerLink, down: LeaderLink, either: EitherReady, watch: Watch | None
    ) -> None:
        super().__init__(machine, link, watch)
        self.down = down
        self._either = either
        self._numbers: deque[tuple[int, int]] = deque()  # (step, the link's frame number) of forwarded records
        self._answered = 0  # the link's frame number of the last forwarded maximum
        self._forwarded_messages = False  # a message of a rank below was forwarded

    def exchange(self, step: int, digest: int, payload: bytes = b"") -> bytes:
        self._forward_pending()
        effect = super().exchange(step, digest, payload)
        due = step - self.horizon
        while self._numbers and self._numbers[0][0] <= due:
            self._deliver(self._numbers.popleft()[1])
        return effect

    def agree_max(self, step: int, numbers: Sequence[int]) -> tuple[int, ...]:
        self._forward_pending()
        maximum = super().agree_max(step, numbers)
        self._deliver(self._answered)  # the ranks below wait for it, and read
        return maximum

    def close(self) -> None:
        if not self._closed:
            super().close()
            self.down.close()

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self._broadcast_verdict()

    def _linger_seconds(self) -> float:
        return (
            self.machine.limits.deadline if self.down.ranks else super()._linger_seconds()
        )  # rank 0 waits for their goodbyes, too

    def _lingers(self) -> bool:
        return (
            bool(self.down.ranks) or super()._lingers()
        )  # the ranks below stop in the same turn: forward their goodbyes

    def _messages_in_flight(self) -> bool:
        return self._forwarded_messages or super()._messages_in_flight()

    def _forward_pending(self) -> None:
        """Forwards what is here before we wait for anything. While diverged, no turn and no proposal may follow."""
        while self._receive(self._pause if self.diverged else 0.0) or self.diverged:
            pass

    def _receive(self, timeout: float) -> bool:
        self._forward_up()
        if super()._receive(0.0):
            return True
        if timeout <= 0.0:
            return False
        self._either.wait(timeout, self.machine.limits.spin)
        self._forward_up()
        return super()._receive(0.0)

    def _handle(self, data: bytes, frame: Frame) -> None:
        if frame.rank == EVERYONE:
            number = self.down.broadcast(data)
            if frame.kind is Kind.RECORD:
                self._numbers.append((frame.step, number))
            elif frame.kind is Kind.AGREED:
                self._answered = number
        elif frame.rank != self.rank:
            self.down.send(frame.rank, data)
            return
        super()._handle(data, frame)

    def _raise_verdict(self) -> None:
        self._broadcast_verdict()
        super()._raise_verdict()

    def _broadcast_verdict(self) -> None:
        """Broadcasts our verdict (rank 0 is silent or gone, or we end): only we can reach these ranks."""
        verdict = self.machine.verdict
        if verdict is not None:
            number = self.down.broadcast(self.machine.codec.encode(Kind.END, EVERYONE, verdict.step, body=verdict))
            until = time.monotonic() + FLUSH_SECONDS
            while self.down.behind(number) and time.monotonic() < until:
                time.sleep(0.001)

    def _forward_up(self, timeout: float = 0.0) -> bool:
        """Forwards frames of the ranks below, and a BYE for a rank that is gone. Whether any rank is left."""
        codec = self.machine.codec
        for rank, what in self.down.receive(timeout):
            try:
                if isinstance(what, FrameError):
                    raise what
                if what is None:
                    self.link.send(codec.encode(Kind.BYE, rank))
                elif (frame := codec.decode(what)).rank == rank:
                    self.link.send(what)
                    self._forwarded_messages |= frame.kind is Kind.MESSAGE
                else:
                    raise FrameError("rank", f"{frame.kind.name} of rank {frame.rank} came from rank {rank}")
            except FrameError as error:
                step = max(self.machine.step, 0)
                verdict = Verdict(Cause.FRAME, rank, step, f"rank {rank} broke the protocol: {error}")
                self.link.send(codec.encode(Kind.END, self.rank, step, body=verdict))
        return bool(self.down.ranks)

    def _deliver(self, number: int) -> None:
        """As LeaderPlane does: a record that is due has left for every rank below before our turn continues."""
        until = self._now() + self.machine.limits.deadline
        while ranks := self.down.behind(number):
            if self._now() > until:
                text = f"rank {ranks[0]} did not read a record within {self.machine.limits.deadline:g} s. It hangs"
                self.machine.give_up(Verdict(Cause.DEADLINE, ranks[0], max(self.machine.step, 0), text))
                self._flush()
                self._raise_verdict()
            self._forward_up(0.001)
