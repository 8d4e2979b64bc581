"""The ControlPlane (interface.py) of ranks other than 0: drives a follower's machine over its link and a clock.

Knows: when to send, when to wait and for how long, and that the leader learns of this rank's end.
Does not know: events (payloads are opaque bytes), sockets (links), the rules of agreement (follower.py), relaying for
other ranks (connect.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from parallel.control.errors import Cause, ControlError, FrameError
from parallel.control.interface import FLUSH_SECONDS, ROUND_TRIPS, SECONDS, Closing, FollowerLink, Watch, clock_within
from parallel.control.protocol.divergence import Recent
from parallel.control.protocol.follower import Follower
from parallel.control.protocol.states import FollowerState
from parallel.control.wire.frames import Frame, Kind

_WAITING, _KEEPALIVE = FollowerState.WAITING, Kind.KEEPALIVE  # a look-up through an Enum costs as much as a call


class FollowerPlane(Closing):
    """A rank with one link, to rank 0 or to the first rank of its node."""

    pending = False

    def __init__(self, machine: Follower, link: FollowerLink, watch: Watch | None) -> None:
        self.machine = machine
        self.link = link
        self.rank = machine.rank
        self.world = machine.codec.world
        self.turns = 0
        self.clock_offset_ns = 0
        self.watch = watch
        if watch is not None:
            watch.explain = machine.decisions
        self._closed = False
        self._leader_left = False
        self._now = clock_within(machine.limits.deadline)
        self._pause = min(machine.limits.resend, machine.limits.deadline, machine.limits.divergence) / 2

    @property
    def horizon(self) -> int:
        return self.machine.horizon

    @property
    def stopped(self) -> bool:
        return self.machine.state is FollowerState.STOPPED

    @property
    def diverged(self) -> bool:
        """This rank's digest differs from the leader's, and the verdict is not here yet."""
        return self.machine.state is FollowerState.DIVERGED

    def explain_with(self, recent: Recent) -> None:
        self.machine.recent = recent

    def agree_horizon(self, choose: Callable[[float], int]) -> int:
        took = sorted(self._round_trip(b"") for _ in range(ROUND_TRIPS))
        self._round_trip(SECONDS.pack(took[ROUND_TRIPS // 2]))
        while not self.machine.horizon_agreed:
            self._receive(self._pause)
        return self.machine.horizon

    def _round_trip(self, payload: bytes) -> float:
        """Seconds until the leader's engine has taken a message and we know it."""
        began = time.perf_counter()
        self.send_message(payload)
        while self.machine.unacknowledged:
            self._receive(self._pause)
        return time.perf_counter() - began

    def exchange(self, step: int, digest: int, payload: bytes = b"") -> bytes:
        if payload:
            raise ValueError(f"control plane: rank {self.rank} is no leader and cannot submit events")
        machine = self.machine
        if machine.verdict is not None:
            raise machine.verdict.error()
        machine.turn(step, digest, self._now())
        self._flush()
        while machine.effect is None:
            self._receive(self._pause)
        self.turns += 1
        return machine.effect

    def agree_max(self, step: int, numbers: Sequence[int]) -> tuple[int, ...]:
        machine = self.machine
        if machine.verdict is not None:
            raise machine.verdict.error()
        machine.propose(step, numbers, self._now())
        self._flush()
        while machine.maximum is None:
            self._receive(self._pause)
        self.turns += 1
        return machine.maximum

    def send_message(self, payload: bytes) -> None:
        self.machine.send_message(payload, self._now())
        self._flush()

    def take_messages(self) -> list[tuple[int, bytes]]:
        return []

    def wait_for_events(self, ready: Callable[[float], bool], timeout: float | None = None) -> bool:
        return True

    def stop(self) -> NoReturn:
        raise ValueError(f"control plane: rank {self.rank} is no leader and cannot stop the job; abort() ends it")

    def abort(self, reason: str) -> None:
        if self._closed or self.machine.verdict is not None:
            return
        self.machine.leave(Cause.ABORTED, f"rank {self.rank} ends at step {max(self.machine.step, 0)}: {reason}")
        self._flush()
        self.link.flush(FLUSH_SECONDS)

    def close(self) -> None:
        if self._closed:
            return
        if self.stopped:
            self._linger()
            self.machine.leave(Cause.ABORTED, "")
            self._flush()
            if self._messages_in_flight():
                self.link.flush(FLUSH_SECONDS)
        else:
            self.abort("it closed its control plane before an agreed stop")
        self._closed = True
        self.link.close()
        if self.watch is not None:
            self.watch.close_unless_taken()

    def _linger(self) -> None:
        """After the agreed stop: messages that wait for the send window still go, while the leader is there."""
        until = self._now() + self._linger_seconds()
        with contextlib.suppress(ControlError):
            while self._lingers() and self._now() < until:
                self._receive(min(self._pause, FLUSH_SECONDS / 50))

    def _linger_seconds(self) -> float:
        """The most seconds to linger after the agreed stop."""
        return FLUSH_SECONDS

    def _lingers(self) -> bool:
        return self.machine.unsent and not self._leader_left

    def _messages_in_flight(self) -> bool:
        """Whether a message may still be in flight."""
        return self.machine.unacknowledged

    def _receive(self, timeout: float) -> bool:
        """Handles one frame if one comes within ``timeout``; raises the verdict it leads to. Whether one came."""
        machine, data = self.machine, None
        try:
            data = self.link.receive(timeout)
            if data is None:
                machine.tick(self._now())
            else:
                self._handle(data, machine.codec.decode(data))
        except FrameError as error:
            machine.bad(error)
        except EOFError:
            self._leader_left = True
            machine.lost()
        if machine.outbox:
            self._flush()
        if machine.verdict is not None:
            self._raise_verdict()
        return data is not None

    def _handle(self, data: bytes, frame: Frame) -> None:
        self.machine.receive(frame, self._now())
        if frame.kind is not _KEEPALIVE or self.machine.state is _WAITING:
            self.turns += 1  # a leader that waits for numbers makes no progress

    def _raise_verdict(self) -> None:
        if self.machine.verdict is not None:
            raise self.machine.verdict.error()

    def _flush(self) -> None:
        outbox = self.machine.outbox
        while outbox:
            self.link.send(outbox.popleft())
