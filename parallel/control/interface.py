"""The control plane's interface to an engine: one object a rank, one call a turn.

Knows: what an engine may ask and what it is promised; the whole implementation for a world of one.
Does not know: the implementation for several ranks (leader_plane.py, follower_plane.py), events (payloads are opaque
bytes).

    plane = open_control(...)                                    # connect.py
    plane.explain_with(scheduler.digest.recent)
    while not plane.stopped:
        if idle: plane.wait_for_events(ready)                    # the leader sleeps here, followers in exchange()
        for event in decode(plane.exchange(turn, digest.value, encode(new_events))):
            scheduler.submit(event)
        maxima = plane.agree_max(turn, numbers)                  # where groups of ranks plan differently
        plane.send_message(outputs)                              # to the leader, which calls plane.take_messages()
        ...

Only the engine's thread calls a plane. ``plane.watch`` is a second set of connections for the watchdog's thread.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, Self

from parallel.control.errors import FrameError
from parallel.control.protocol.divergence import Recent
from parallel.control.protocol.max_rounds import checked
from parallel.control.protocol.reliable_messages import refuse_oversized
from parallel.control.wire.frames import Codec, Frame


class AwakeClock:
    """Seconds, as ``clock`` counts them, but that the time between two readings counts as ``longest`` at most.

    A whole job may be stopped for minutes and then continue: scontrol suspend, gang scheduling, docker pause. Then no
    rank was late, but by time.monotonic, which runs meanwhile, every deadline is over. If one rank alone was stopped,
    the clocks of the others run, and they name it.
    """

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._longest = longest
        self._read_at = clock()
        self._away = 0.0

    def __call__(self) -> float:
        now = self._clock()
        excess = now - self._read_at - self._longest
        if excess > 0.0:
            self._away += excess
        self._read_at = now
        return now - self._away


def clock_within(deadline: float) -> AwakeClock:
    """For deadlines of so many seconds. A plane that waits reads it at least every half of one, and of a second."""
    return AwakeClock(min(1.0, deadline / 2))


IDLE_SLICE = 0.25  # seconds; an idle leader polls at least this often
ROUND_TRIPS = 9  # of which the median counts when a horizon is settled; the first ones wake sleeping processes
SECONDS = struct.Struct("<d")  # of a round trip, in a message
FLUSH_SECONDS = 1.0  # seconds that a final frame may take to leave


class LeaderLink(Protocol):
    """Connections to the ranks that a leader speaks to directly (uds_links.py, zeromq.py)."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    def broadcast(self, frame: bytes) -> int: ...
    def send(self, rank: int, frame: bytes) -> None: ...
    def receive(self, timeout: float = 0.0) -> list[tuple[int, bytes | FrameError | None]]: ...
    def behind(self, number: int) -> tuple[int, ...]: ...
    def process(self, rank: int) -> int | None: ...
    def close(self) -> None: ...


class FollowerLink(Protocol):
    """The connection of a rank to its leader."""

    def send(self, frame: bytes) -> None: ...
    def receive(self, timeout: float) -> bytes | None: ...
    def process(self) -> int | None: ...
    def flush(self, timeout: float) -> None: ...
    def close(self) -> None: ...


class Watch:
    """A rank's connections on the watch channel, for the watchdog's thread: ``down`` to followers, ``up`` to the
    leader.

    ``covers``: the ranks that a directly connected rank relays for. ``explain`` makes a follower's DECISIONS frame
    for a step, so that its watchdog can answer for an engine that hangs; ``requests`` (rank, frame) and ``answers``
    carry such frames between the leader's engine and the leader's watchdog.

    The caller that starts a watchdog on it sets ``taken`` and closes it; otherwise the plane does.
    """

    def __init__(
        self,
        codec: Codec,
        rank: int,
        down: LeaderLink | None = None,
        up: FollowerLink | None = None,
        leader: int = 0,
        covers: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        self.codec = codec
        self.rank = rank
        self.down = down
        self.up = up
        self.leader = leader
        self.covers = covers or {}
        self.taken = False
        self.explain: Callable[[int], bytes] | None = None
        self.requests: deque[tuple[int, bytes]] = deque()
        self.answers: deque[Frame] = deque()

    def close(self) -> None:
        if self.down is not None:
            self.down.close()
        if self.up is not None:
            self.up.close()

    def close_unless_taken(self) -> None:
        if not self.taken:
            self.close()


class ControlPlane(Protocol):
    """What an engine needs of agreement, independent of transport.

    ``turns`` counts signs of progress (turns, and keep-alives while idle): the watchdog reads it.
    ``clock_offset_ns``: the leader's wall clock minus this rank's, as the handshake measured it. For reports only.
    """

    rank: int
    world: int
    turns: int
    clock_offset_ns: int

    @property
    def horizon(self) -> int:
        """Turns between the announcement of an event and its effect; fixed once the first turn begins."""
        ...

    @property
    def stopped(self) -> bool:
        """The agreed stop is in effect: take no further turn."""
        ...

    @property
    def pending(self) -> bool:
        """Something submitted is not in effect yet, or a message has come that no turn has taken (leader only): go on
        taking turns, idle or not."""
        ...

    @property
    def watch(self) -> Watch | None:
        """Connections for the watchdog; None in a world of one."""
        ...

    def explain_with(self, recent: Recent) -> None:
        """``recent`` returns this rank's last decisions, for the report of a divergence."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Reports an exception to the others (``abort``), and closes."""
        ...

    def agree_horizon(self, choose: Callable[[float], int]) -> int:
        """Fixes the horizon from measured round trips, before the first turn; all ranks call it, in a job that was
        given none. Returns it, the same on every rank.

        On the leader ``choose`` gets the seconds that a record takes to the slowest rank, and returns the horizon.
        """
        ...

    def exchange(self, step: int, digest: int, payload: bytes = b"") -> bytes:
        """Begins turn ``step`` (0, 1, 2, ...): returns the payload that takes effect now, the same on every rank.

        ``digest``: the rank's rolling digest at this point. ``payload``: the leader's new events, in effect
        ``horizon`` turns later; followers pass nothing. Raises a ControlError when the ranks no longer agree.
        """
        ...

    def agree_max(self, step: int, numbers: Sequence[int]) -> tuple[int, ...]:
        """The elementwise maximum of all ranks' ``numbers``. All ranks call it, at most once, after ``exchange(step)``.

        Each is at least 0 and below 2**63; ranks of one group must propose the same, and all ranks equally many:
        Disagreement names the rank that does not. MissedDeadline names a rank that does not come.
        """
        ...

    def send_message(self, payload: bytes) -> None:
        """Sends ``payload`` to the leader's engine, reliably and in order, without waiting.

        Raises ValueError above MAX_PAYLOAD bytes (frames.py), and BufferError when the leader takes nothing any more.
        """
        ...

    def take_messages(self) -> list[tuple[int, bytes]]:
        """Messages since the last call: (rank, payload), each rank's in its order. Empty except on the leader."""
        ...

    def wait_for_events(self, ready: Callable[[float], bool], timeout: float | None = None) -> bool:
        """Called when there is nothing to run. The leader sleeps until ``ready(seconds)`` is true or a message arrives;
        followers return at once.

        ``ready`` waits up to that many seconds for new work (threading.Event.wait does). Returns whether to take a
        turn now; False after ``timeout`` seconds, when the caller may still take one.
        """
        ...

    def stop(self) -> None:
        """Leader only: proposes the end. ``stopped`` becomes true on all ranks ``horizon`` turns after the next."""
        ...

    def abort(self, reason: str) -> None:
        """This rank ends, and says why: the others raise Aborted with that reason. Does not raise; call it last."""
        ...

    def close(self) -> None:
        """Closes everything. Without an agreed stop before it, the others raise Aborted.

        After one the leader waits until every rank has begun its last turn, and raises the ControlError of a rank that
        does not.
        """
        ...


class Closing:
    """``with plane:`` reports an exception to the others, and closes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    def abort(self, reason: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class SingleRankControl(Closing):
    """The control plane of a world of one: no other rank has to receive an event before it takes effect."""

    rank = 0
    world = 1
    watch = None
    clock_offset_ns = 0

    def __init__(self, horizon: int = 0) -> None:
        self.horizon = horizon
        self.turns = 0
        self.stopped = False
        self._agreed = -1
        self._messages: list[tuple[int, bytes]] = []
        self._coming: deque[tuple[bytes, bool]] = deque((b"", False) for _ in range(horizon))
        self._stop = False

    @property
    def pending(self) -> bool:
        return self._stop or bool(self._messages) or any(payload or stop for payload, stop in self._coming)

    def explain_with(self, recent: Recent) -> None:
        pass  # no other rank to diverge from

    def agree_horizon(self, choose: Callable[[float], int]) -> int:
        return self.horizon

    def exchange(self, step: int, digest: int, payload: bytes = b"") -> bytes:
        if step != self.turns:
            raise ValueError(f"control plane: turn {step} after turn {self.turns - 1}; turns are taken one by one")
        if self.stopped:
            raise ValueError(f"control plane: turn {step} after the agreed stop")
        self.turns += 1
        self._coming.append((payload, self._stop))
        self._stop = False
        effect, self.stopped = self._coming.popleft()
        return effect

    def agree_max(self, step: int, numbers: Sequence[int]) -> tuple[int, ...]:
        maximum = checked(numbers, step, self.turns - 1, self._agreed)
        self._agreed = step
        return maximum

    def send_message(self, payload: bytes) -> None:
        refuse_oversized(payload)
        self._messages.append((0, payload))

    def take_messages(self) -> list[tuple[int, bytes]]:
        messages, self._messages = self._messages, []
        return messages

    def wait_for_events(self, ready: Callable[[float], bool], timeout: float | None = None) -> bool:
        if self.pending:
            return True
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = IDLE_SLICE if until is None else min(IDLE_SLICE, until - time.monotonic())
            if ready(max(left, 0.0)):
                return True
            if left <= 0.0:
                return False

    def stop(self) -> None:
        self._stop = True

    def abort(self, reason: str) -> None:
        self.stopped = True

    def close(self) -> None:
        self.stopped = True
