"""ControlPlane (interface.py) on ranks other than 0: a follower's machine, its link to its leader, the clock.

Knows: when to send, when to wait and for how long, and that the leader is told of its end.
Does not know: events (payloads are opaque bytes), sockets (links), the rules of agreement (follower.py), the ranks that
a rank speaks for (node_relay.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from parallel.control.errors import Cause, ControlError, FrameError
from parallel.control.interface import LAST_WORDS, Closing, FollowerLink, Watch
from parallel.control.protocol.divergence import Recent
from parallel.control.protocol.follower import Follower
from parallel.control.protocol.states import FollowerState
from parallel.control.wire.frames import Frame, Kind

_WAITING, _KEEPALIVE = FollowerState.WAITING, Kind.KEEPALIVE  # a look-up through an Enum is as dear as a call


class FollowerPlane(Closing):
    """Every other rank of a node with one leader."""

    pending = False

    def __init__(self, machine: Follower, link: FollowerLink, watch: Watch | None) -> None:
        self.machine = machine
        self.link = link
        self.rank = machine.rank
        self.world = machine.codec.world
        self.horizon = machine.horizon
        self.turns = 0
        self.clock_offset_ns = 0
        self.watch = watch
        if watch is not None:
            watch.explain = machine.decisions
        self._closed = False
        self._leader_left = False
        self._pause = min(machine.limits.resend, machine.limits.deadline, machine.limits.dispute) / 2

    @property
    def stopped(self) -> bool:
        return self.machine.state is FollowerState.STOPPED

    @property
    def disputed(self) -> bool:
        """The leader and this rank differ, and the verdict is not here yet."""
        return self.machine.state is FollowerState.DISPUTED

    def explain_with(self, recent: Recent) -> None:
        self.machine.recent = recent

    def exchange(self, step: int, digest: int, payload: bytes = b"") -> bytes:
        if payload:
            raise ValueError(f"control plane: rank {self.rank} is no leader and cannot submit events")
        machine = self.machine
        if machine.verdict is not None:
            raise machine.verdict.error()
        machine.turn(step, digest, time.monotonic())
        self._speak()
        while machine.effect is None:
            self._hear(self._pause)
        self.turns += 1
        return machine.effect

    def agree_max(self, step: int, numbers: Sequence[int]) -> tuple[int, ...]:
        machine = self.machine
        if machine.verdict is not None:
            raise machine.verdict.error()
        machine.propose(step, numbers, time.monotonic())
        self._speak()
        while machine.maximum is None:
            self._hear(self._pause)
        self.turns += 1
        return machine.maximum

    def tell(self, payload: bytes) -> None:
        self.machine.tell(payload, time.monotonic())
        self._speak()

    def told(self) -> list[tuple[int, bytes]]:
        return []

    def wait_for_events(self, ready: Callable[[float], bool], timeout: float | None = None) -> bool:
        return True

    def stop(self) -> NoReturn:
        raise ValueError(f"control plane: rank {self.rank} is no leader and cannot stop the job; abort() ends it")

    def abort(self, reason: str) -> None:
        if self._closed or self.machine.verdict is not None:
            return
        self.machine.leave(Cause.ABORTED, f"rank {self.rank} ends at step {max(self.machine.step, 0)}: {reason}")
        self._speak()
        self.link.flush(LAST_WORDS)

    def close(self) -> None:
        if self._closed:
            return
        if self.stopped:
            self._see_off()
            self.machine.leave(Cause.ABORTED, "")
            self._speak()
            if self._tells():
                self.link.flush(LAST_WORDS)
        else:
            self.abort("it closed its control plane before an agreed stop")
        self._closed = True
        self.link.close()
        if self.watch is not None:
            self.watch.close_unless_taken()

    def _see_off(self) -> None:
        """After the agreed stop: what was told and waits for its turn may still go, while the leader is there."""
        until = time.monotonic() + self._stays()
        with contextlib.suppress(ControlError):
            while self._busy() and time.monotonic() < until:
                self._hear(min(self._pause, LAST_WORDS / 50))

    def _stays(self) -> float:
        """Seconds after the agreed stop, at most."""
        return LAST_WORDS

    def _busy(self) -> bool:
        return self.machine.untold and not self._leader_left

    def _tells(self) -> bool:
        """Whether what was told may be on its way still."""
        return self.machine.untaken

    def _hear(self, timeout: float) -> bool:
        """Reads one frame, if one comes in time; raises the verdict it leads to. Whether one came."""
        machine, data = self.machine, None
        try:
            data = self.link.receive(timeout)
            if data is None:
                machine.tick(time.monotonic())
            else:
                self._got(data, machine.codec.decode(data))
        except FrameError as error:
            machine.bad(error)
        except EOFError:
            self._leader_left = True
            machine.lost()
        if machine.outbox:
            self._speak()
        if machine.verdict is not None:
            self._raise()
        return data is not None

    def _got(self, data: bytes, frame: Frame) -> None:
        self.machine.receive(frame, time.monotonic())
        if frame.kind is not _KEEPALIVE or self.machine.state is _WAITING:
            self.turns += 1  # a leader that waits for somebody's numbers is no sign of progress

    def _raise(self) -> None:
        if self.machine.verdict is not None:
            raise self.machine.verdict.error()

    def _speak(self) -> None:
        outbox = self.machine.outbox
        while outbox:
            self.link.send(outbox.popleft())
