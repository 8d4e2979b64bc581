"""The first rank of a node that rank 0 is not on: a follower itself, and rank 0's voice to the others of its node.

Knows: which frames go up, which go down, and that a record is handed on before it is acted on.
Does not know: agreement's rules (follower.py), sockets.

Frames are handed on as they are, byte for byte: their CRC, job and rank stay those of the sender.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from parallel.control.errors import Cause, FrameError, Verdict
from parallel.control.follower_plane import FollowerPlane
from parallel.control.interface import LAST_WORDS, FollowerLink, LeaderLink, Watch
from parallel.control.protocol.follower import Follower
from parallel.control.transport.combined_links import EitherReady
from parallel.control.wire.frames import EVERYONE, Frame, Kind


class RelayPlane(FollowerPlane):
    """A FollowerPlane with ``down``, the links to the other ranks of the node. ``either`` waits for both sides."""

    def __init__(
        self, machine: Follower, link: FollowerLink, down: LeaderLink, either: EitherReady, watch: Watch | None
    ) -> None:
        super().__init__(machine, link, watch)
        self.down = down
        self._either = either
        self._numbers: deque[tuple[int, int]] = deque()  # (step, the link's number) of records handed on
        self._answered = 0  # the link's number of the last maximum handed on
        self._lifted_told = False  # something that a rank below told

    def exchange(self, step: int, digest: int, payload: bytes = b"") -> bytes:
        self._hand_on()
        effect = super().exchange(step, digest, payload)
        due = step - self.horizon
        while self._numbers and self._numbers[0][0] <= due:
            self._deliver(self._numbers.popleft()[1])
        return effect

    def agree_max(self, step: int, numbers: Sequence[int]) -> tuple[int, ...]:
        self._hand_on()
        maximum = super().agree_max(step, numbers)
        self._deliver(self._answered)  # those below wait for it, and read
        return maximum

    def close(self) -> None:
        if not self._closed:
            super().close()
            self.down.close()

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self._tell_below()

    def _stays(self) -> float:
        return self.machine.limits.deadline if self.down.ranks else super()._stays()  # rank 0 waits for theirs, too

    def _busy(self) -> bool:
        return bool(self.down.ranks) or super()._busy()  # the others stop in the same turn: pass their goodbyes on

    def _tells(self) -> bool:
        return self._lifted_told or super()._tells()

    def _hand_on(self) -> None:
        """What is here already goes down before we wait for anything. A dispute takes no turns, nor proposals."""
        while self._hear(self._pause if self.disputed else 0.0) or self.disputed:
            pass

    def _hear(self, timeout: float) -> bool:
        self._lift()
        if super()._hear(0.0):
            return True
        if timeout <= 0.0:
            return False
        self._either.wait(timeout, self.machine.limits.spin)
        self._lift()
        return super()._hear(0.0)

    def _got(self, data: bytes, frame: Frame) -> None:
        if frame.rank == EVERYONE:
            number = self.down.broadcast(data)
            if frame.kind is Kind.RECORD:
                self._numbers.append((frame.step, number))
            elif frame.kind is Kind.AGREED:
                self._answered = number
        elif frame.rank != self.rank:
            self.down.send(frame.rank, data)
            return
        super()._got(data, frame)

    def _raise(self) -> None:
        self._tell_below()
        super()._raise()

    def _tell_below(self) -> None:
        """A verdict of our own (rank 0 is silent or gone, or we end) is the node's: nobody else tells it here."""
        verdict = self.machine.verdict
        if verdict is not None:
            number = self.down.broadcast(self.machine.codec.encode(Kind.END, EVERYONE, verdict.step, body=verdict))
            until = time.monotonic() + LAST_WORDS
            while self.down.behind(number) and time.monotonic() < until:
                time.sleep(0.001)

    def _lift(self, timeout: float = 0.0) -> bool:
        """Hands on what the ranks below say; a rank that is gone says goodbye through us. Whether any is left."""
        codec = self.machine.codec
        for rank, what in self.down.receive(timeout):
            try:
                if isinstance(what, FrameError):
                    raise what
                if what is None:
                    self.link.send(codec.encode(Kind.BYE, rank))
                elif (frame := codec.decode(what)).rank == rank:
                    self.link.send(what)
                    self._lifted_told |= frame.kind is Kind.TELL
                else:
                    raise FrameError("rank", f"{frame.kind.name} of rank {frame.rank} came from rank {rank}")
            except FrameError as error:
                step = max(self.machine.step, 0)
                verdict = Verdict(Cause.FRAME, rank, step, f"rank {rank} broke the protocol: {error}")
                self.link.send(codec.encode(Kind.END, self.rank, step, body=verdict))
        return bool(self.down.ranks)

    def _deliver(self, number: int) -> None:
        """As the leader does: a record that is due is with every rank below before our turn goes on."""
        until = time.monotonic() + self.machine.limits.deadline
        while ranks := self.down.behind(number):
            if time.monotonic() > until:
                text = f"rank {ranks[0]} did not read a record within {self.machine.limits.deadline:g} s. It hangs"
                self.machine.give_up(Verdict(Cause.DEADLINE, ranks[0], max(self.machine.step, 0), text))
                self._speak()
                self._raise()
            self._lift(0.001)
