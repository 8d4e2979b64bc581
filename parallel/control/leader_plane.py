"""ControlPlane (interface.py) on rank 0 of several: the leader's machine, the links it speaks over, the clock.

Knows: when to send, when to wait and for how long, and that every end is told to everybody.
Does not know: events (payloads are opaque bytes), sockets (links), the rules of agreement (leader.py), what the other
ranks do meanwhile (follower_plane.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from parallel.control.errors import Cause, FrameError
from parallel.control.interface import LAST_WORDS, Closing, LeaderLink, Watch
from parallel.control.protocol.divergence import Recent
from parallel.control.protocol.leader import Leader
from parallel.control.protocol.states import LeaderState
from parallel.control.wire.frames import EVERYONE, Kind

_RUNNING = LeaderState.RUNNING  # a look-up through an Enum is as dear as a call
FIRST_LOOK, LAST_LOOK = 0.001, 0.02  # seconds: an idle leader looks around ever more seldom, for what ranks told


class LeaderPlane(Closing):
    """Rank 0 of several. ``covers`` says which ranks a directly connected rank may speak for (None: for itself)."""

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
        self.horizon = machine.horizon
        self.turns = 0
        self.clock_offset_ns = 0
        self.watch = watch
        self._covers = covers or {rank: (rank,) for rank in link.ranks}
        self._numbers: deque[int] = deque(maxlen=machine.horizon + 1)
        self._closed = False
        self._next_tick = 0.0
        self._tick_every = min(0.1, machine.limits.deadline / 8)

    @property
    def stopped(self) -> bool:
        return self.machine.state is LeaderState.STOPPED

    @property
    def pending(self) -> bool:
        return self.machine.pending

    def explain_with(self, recent: Recent) -> None:
        self.machine.recent = recent

    def exchange(self, step: int, digest: int, payload: bytes = b"") -> bytes:
        machine = self.machine
        if machine.verdict is not None:
            raise machine.verdict.error()
        effect, record = machine.begin(step, digest, payload)
        self._numbers.append(self.link.broadcast(record))  # before all that can wait: others may be waiting for it
        machine.look_back(digest, payload, record, time.monotonic())
        self._hear(0.0)
        if len(self._numbers) > self.horizon and self.link.behind(self._numbers[0]):
            self._deliver(self._numbers[0])
        self.turns += 1
        return effect

    def agree_max(self, step: int, numbers: Sequence[int]) -> tuple[int, ...]:
        machine = self.machine
        self._hear(0.0)
        machine.propose(step, numbers, time.monotonic())
        number = self._speak()
        spin_until = time.monotonic() + machine.limits.spin
        while machine.maximum is None:
            number = self._hear(0.0 if time.monotonic() < spin_until else self._tick_every)
        if self.link.behind(number):
            self._deliver(number)  # the others wait for it and read; we might wait for them next, and not send
        return machine.maximum

    def tell(self, payload: bytes) -> None:
        self.machine.tell(payload)

    def told(self) -> list[tuple[int, bytes]]:
        if self.stopped and not self._closed:
            self._hear(0.0)  # no turn comes that would
        return self.machine.told()

    def wait_for_events(self, ready: Callable[[float], bool], timeout: float | None = None) -> bool:
        if self.machine.pending or self.stopped or self.machine.was_told():
            return True
        now = time.monotonic()
        until = None if timeout is None else now + timeout
        next_keepalive, look = now, FIRST_LOOK
        while True:
            if now >= next_keepalive:
                next_keepalive = now + self.machine.limits.keepalive
                self.link.broadcast(self.machine.codec.encode(Kind.KEEPALIVE, EVERYONE, max(self.machine.step, 0)))
            pause = min(look, self.machine.limits.keepalive)
            if ready(max(pause if until is None else min(pause, until - now), 0.0)):
                return True
            look = min(2 * look, LAST_LOOK)
            self.turns += 1
            self._hear(0.0)
            if self.machine.was_told():
                return True
            now = time.monotonic()
            if until is not None and now >= until:
                return False

    def poll(self) -> None:
        """Hears what is there without taking a turn; raises as ``exchange`` does."""
        self._hear(0.0)

    def stop(self) -> None:
        self.machine.submit_stop()

    def abort(self, reason: str) -> None:
        if self._closed or self.machine.verdict is not None:
            return
        self.machine.leave(Cause.ABORTED, f"rank {self.rank} ends at step {max(self.machine.step, 0)}: {reason}")
        self._speak_last()

    def close(self) -> None:
        if self._closed:
            return
        try:
            if self.stopped:
                self._see_off()
            else:
                self.abort("it closed its control plane before an agreed stop")
        finally:
            self._closed = True
            self.link.close()
            if self.watch is not None:
                self.watch.close_unless_taken()

    def _see_off(self) -> None:
        """Nobody is left without a record that it needs: a link that queues drops the queue when it closes.

        A rank that ends before its last turn, or does not get there in time, is named as in any other turn.
        """
        until = time.monotonic() + self.machine.limits.deadline
        while ranks := self.machine.short_of_stop():
            if time.monotonic() > until:
                self.machine.stalled(ranks)
            self._hear(0.001)

    def _hear(self, timeout: float) -> int:
        """Hears what comes within ``timeout`` seconds; returns the number of the last broadcast that it led to."""
        machine, number = self.machine, 0
        received = self.link.receive(timeout)
        now = time.monotonic()
        for via, what in received:
            self._take(via, what, now)
        if now >= self._next_tick:
            self._next_tick = now + self._tick_every
            machine.tick(now)
        if machine.outbox:
            number = self._speak()
        if machine.state is not _RUNNING:
            self._conclude()
        return number

    def _take(self, via: int, what: bytes | FrameError | None, now: float) -> None:
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

    def _speak(self) -> int:
        """Sends what the machine has to say; returns the number of the last broadcast."""
        number, outbox = 0, self.machine.outbox
        while outbox:
            rank, frame = outbox.popleft()
            if rank == EVERYONE:
                number = self.link.broadcast(frame)
            else:
                self.link.send(rank, frame)
                if self.watch is not None and self.machine.state is LeaderState.DISPUTED:
                    self.watch.requests.append((rank, frame))  # its engine may hang; its watchdog can answer
        return number

    def _deliver(self, number: int) -> None:
        """Waits until every rank has been handed the record that it needs in its current turn.

        A rank reaches that turn without any help of ours, and then reads: so this ends, or the rank hangs. Waiting for
        newer records could not be defended: the rank may be in a collective that waits for us.
        """
        until = time.monotonic() + self.machine.limits.deadline
        while ranks := self.link.behind(number):
            if time.monotonic() > until:
                self.machine.stalled(ranks)
            self._hear(0.001)

    def _conclude(self) -> None:
        """Not running: waits for a dispute's verdict, then raises it. After an agreed stop, nothing."""
        machine = self.machine
        while machine.state is LeaderState.DISPUTED:
            for via, what in self.link.receive(0.01):
                self._take(via, what, time.monotonic())
            if self.watch is not None:
                while self.watch.answers:
                    machine.receive(self.watch.answers.popleft(), time.monotonic())
            machine.tick(time.monotonic())
            self._speak()
        if machine.verdict is not None:
            self._speak_last()
            raise machine.verdict.error()

    def _speak_last(self) -> None:
        number = self._speak()
        until = time.monotonic() + LAST_WORDS
        while self.link.behind(number) and time.monotonic() < until:
            time.sleep(0.001)
