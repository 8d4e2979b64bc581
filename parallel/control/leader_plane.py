"""The ControlPlane (interface.py) of rank 0 of several: drives the leader's machine over links and a clock.

Knows: when to send, when to wait and for how long, and that every verdict reaches every rank.
Does not know: events (payloads are opaque bytes), sockets (links), the rules of agreement (leader.py), followers
(follower_plane.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from parallel.control.errors import Cause, FrameError
from parallel.control.interface import FLUSH_SECONDS, SECONDS, Closing, LeaderLink, Watch, clock_within
from parallel.control.protocol.divergence import Recent
from parallel.control.protocol.leader import Leader
from parallel.control.protocol.states import LeaderState
from parallel.control.wire.frames import EVERYONE, Kind

_RUNNING = LeaderState.RUNNING  # a look-up through an Enum costs as much as a call
FIRST_POLL, LAST_POLL = 0.001, 0.02  # seconds between polls of an idle leader, with backoff


class LeaderPlane(Closing):
    """Rank 0 of several. ``covers``: the ranks that a directly connected rank relays for (None: only itself)."""

    def __init__(
        self,
        machine: Leader,
        link: LeaderLink,
        watch: Watch | None,
        covers: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        self.machine = machine
        self.link = link
        self.rank = machine.rank
        self.world = machine.codec.world
        self.turns = 0
        self.clock_offset_ns = 0
        self.watch = watch
        self._covers = covers or {rank: (rank,) for rank in link.ranks}
        self._numbers: deque[int] = deque(maxlen=machine.horizon + 1)
        self._closed = False
        self._now = clock_within(machine.limits.deadline)
        self._next_tick = 0.0
        self._tick_every = min(0.1, machine.limits.deadline / 8)

    @property
    def horizon(self) -> int:
        return self.machine.horizon

    @property
    def stopped(self) -> bool:
        return self.machine.state is LeaderState.STOPPED

    @property
    def pending(self) -> bool:
        return self.machine.pending or self.machine.inbox.has_messages()

    def explain_with(self, recent: Recent) -> None:
        self.machine.recent = recent

    def agree_horizon(self, choose: Callable[[float], int]) -> int:
        """Every follower sends itself messages through us, one after the other, and then the median of their times."""
        machine = self.machine
        trips: dict[int, float] = {}
        while len(trips) < self.world - 1:
            self._receive(self._tick_every)
            for rank, payload in machine.inbox.take():
                if payload:
                    (trips[rank],) = SECONDS.unpack(payload)
            self._flush()
        machine.agree_horizon(choose(max(trips.values()) / 2))
        self._numbers = deque(maxlen=machine.horizon + 1)
        self._deliver(self._flush())
        return machine.horizon

    def exchange(self, step: int, digest: int, payload: bytes = b"") -> bytes:
        machine = self.machine
        if machine.verdict is not None:
            raise machine.verdict.error()
        effect, record = machine.begin(step, digest, payload)
        self._numbers.append(self.link.broadcast(record))  # first of all: followers may be waiting for it
        now = self._now()
        machine.look_back(digest, payload, record, now)
        self._receive(0.0, now)
        if len(self._numbers) > machine.horizon and self.link.behind(self._numbers[0]):
            self._deliver(self._numbers[0])
        self.turns += 1
        return effect

    def agree_max(self, step: int, numbers: Sequence[int]) -> tuple[int, ...]:
        machine = self.machine
        self._receive(0.0)
        machine.propose(step, numbers, self._now())
        number = self._flush()
        spin_until = self._now() + machine.limits.spin
        while machine.maximum is None:
            number = self._receive(0.0 if self._now() < spin_until else self._tick_every)
        if self.link.behind(number):
            self._deliver(number)  # followers read now; next we might wait for them, and not send
        return machine.maximum

    def send_message(self, payload: bytes) -> None:
        self.machine.inbox.post(payload)

    def take_messages(self) -> list[tuple[int, bytes]]:
        if self.stopped and not self._closed:
            self._receive(0.0)  # no further turn will
        return self.machine.inbox.take()

    def wait_for_events(self, ready: Callable[[float], bool], timeout: float | None = None) -> bool:
        if self.pending or self.stopped:
            return True
        now = time.monotonic()
        until = None if timeout is None else now + timeout
        next_keepalive, pause = now, FIRST_POLL
        while True:
            if now >= next_keepalive:
                next_keepalive = now + self.machine.limits.keepalive
                self.link.broadcast(self.machine.codec.encode(Kind.KEEPALIVE, EVERYONE, max(self.machine.step, 0)))
            wait = min(pause, self.machine.limits.keepalive)
            if ready(max(wait if until is None else min(wait, until - now), 0.0)):
                return True
            pause = min(2 * pause, LAST_POLL)
            self.turns += 1
            self._receive(0.0)
            if self.machine.inbox.has_messages():
                return True
            now = time.monotonic()
            if until is not None and now >= until:
                return False

    def poll(self) -> None:
        """Handles received frames without taking a turn; raises as ``exchange`` does."""
        self._receive(0.0)

    def stop(self) -> None:
        self.machine.submit_stop()

    def abort(self, reason: str) -> None:
        if self._closed or self.machine.verdict is not None:
            return
        self.machine.leave(Cause.ABORTED, f"rank {self.rank} ends at step {max(self.machine.step, 0)}: {reason}")
        self._flush_last()

    def close(self) -> None:
        if self._closed:
            return
        try:
            if self.stopped:
                self._linger()
            else:
                self.abort("it closed its control plane before an agreed stop")
        finally:
            self._closed = True
            self.link.close()
            if self.watch is not None:
                self.watch.close_unless_taken()

    def _linger(self) -> None:
        """Waits until every rank has the records up to the stop: a link drops its queue when it closes.

        A rank that ends before its last turn, or does not reach it in time, is named as in any other turn.
        """
        until = self._now() + self.machine.limits.deadline
        while ranks := self.machine.short_of_stop():
            if self._now() > until:
                self.machine.stalled(ranks)
            self._receive(0.001)

    def _receive(self, timeout: float, now: float | None = None) -> int:
        """Handles frames received within ``timeout`` seconds; returns the number of the last broadcast they led to.

        ``now``: by our clock, if the caller has just read it.
        """
        machine, number = self.machine, 0
        received = self.link.receive(timeout)
        now = self._now() if now is None else now
        for via, what in received:
            self._handle(via, what, now)
        if now >= self._next_tick:
            self._next_tick = now + self._tick_every
            machine.tick(now)
        if machine.outbox:
            number = self._flush()
        if machine.state is not _RUNNING:
            self._conclude()
        return number

    def _handle(self, via: int, what: bytes | FrameError | None, now: float) -> None:
        machine = self.machine
        if what is None:
            for rank in sorted(self._covers[via]):
                machine.lost(rank, now)
        elif isinstance(what, FrameError):
            machine.bad(via, what)
        else:
            try:
                frame = machine.codec.decode(what)
                if frame.rank not in self._covers[via]:
                    raise FrameError("rank", f"{frame.kind.name} of rank {frame.rank} came from rank {via}")
            except FrameError as error:
                machine.bad(via, error)
            else:
                machine.receive(frame, now)

    def _flush(self) -> int:
        """Sends the machine's outbox; returns the number of the last broadcast."""
        number, outbox = 0, self.machine.outbox
        while outbox:
            rank, frame = outbox.popleft()
            if rank == EVERYONE:
                number = self.link.broadcast(frame)
            else:
                self.link.send(rank, frame)
                if self.watch is not None and self.machine.state is LeaderState.DIVERGED:
                    self.watch.requests.append((rank, frame))  # its engine may hang; its watchdog can answer
        return number

    def _deliver(self, number: int) -> None:
        """Waits until frame ``number`` has left for every rank that needs it in its current turn.

        A rank reaches that turn without our help, and then reads: so this ends, or the rank hangs. Waiting for newer
        records could deadlock: the rank may be in a collective that waits for us.
        """
        until = self._now() + self.machine.limits.deadline
        while ranks := self.link.behind(number):
            if self._now() > until:
                self.machine.stalled(ranks)
            self._receive(0.001)

    def _conclude(self) -> None:
        """No longer running: waits until a divergence is resolved, and raises the verdict. Nothing after an agreed
        stop.
        """
        machine = self.machine
        while machine.state is LeaderState.DIVERGED:
            for via, what in self.link.receive(0.01):
                self._handle(via, what, self._now())
            if self.watch is not None:
                while self.watch.answers:
                    machine.receive(self.watch.answers.popleft(), self._now())
            machine.tick(self._now())
            self._flush()
        if machine.verdict is not None:
            self._flush_last()
            raise machine.verdict.error()

    def _flush_last(self) -> None:
        number = self._flush()
        until = time.monotonic() + FLUSH_SECONDS
        while self.link.behind(number) and time.monotonic() < until:
            time.sleep(0.001)
