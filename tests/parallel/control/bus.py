"""A leader machine and its follower machines back to back over a bus that may do anything to a frame.

No sockets, no threads, no clock: time is a number that the simulation advances, and every rank reads it with a skew of
its own. Every rank folds what takes effect into a real rolling digest, as a scheduler would, and groups decide
differently. In every turn all ranks agree on a maximum, and each tells the leader something.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

from parallel.control.errors import FrameError, Verdict
from parallel.control.protocol.follower import Follower
from parallel.control.protocol.leader import Leader
from parallel.control.protocol.states import FollowerState, LeaderState, Limits
from parallel.control.wire.frames import EVERYONE, Codec
from runtime.schedule.digest import RollingDigest

# States in which a turn has begun and its record is here: not where a divergence or an end came first.
PROPOSES = (LeaderState.RUNNING, LeaderState.STOPPED, FollowerState.PLANNING, FollowerState.STOPPED)


class OneCallLeader(Leader):
    """A leader that sends nothing between the two halves of a turn: the record goes into ``outbox``."""

    def turn(self, step: int, digest: int, payload: bytes, now: float) -> bytes:
        effect, record = self.begin(step, digest, payload)
        self.outbox.append((EVERYONE, record))
        self.look_back(digest, payload, record, now)
        return effect


@dataclass(frozen=True)
class Faults:
    """Chances per frame, and the longest delay in seconds. ``ordered`` is what a socket promises and a bus need not."""

    delay: float = 0.0
    drop: float = 0.0
    twice: float = 0.0
    truncate: float = 0.0
    ordered: bool = False


@dataclass(eq=False)
class Rank:
    """One simulated rank: its machine, its decisions, what took effect in each turn, and the maximum of each turn.

    ``in_turn`` until the turn's maximum is here. ``numbers`` overrides what it proposes, by step. ``tells`` counts.
    """

    rank: int
    group: int
    machine: OneCallLeader | Follower
    skew: float
    digest: RollingDigest = field(default_factory=lambda: RollingDigest(keep=64))
    effects: list[bytes] = field(default_factory=list)
    dead: bool = False
    in_turn: bool = False
    decided: bool = False
    maxima: list[tuple[int, ...]] = field(default_factory=list)
    numbers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    tells: int = 0

    @property
    def stopped(self) -> bool:
        return self.machine.state in (LeaderState.STOPPED, FollowerState.STOPPED)

    @property
    def diverged(self) -> bool:
        return self.machine.state in (LeaderState.DIVERGED, FollowerState.DIVERGED)

    @property
    def over(self) -> bool:
        return self.dead or self.machine.verdict is not None or (self.stopped and not self.in_turn)

    def decide(self, effect: bytes, corrupt: bool = False) -> None:
        """What a scheduler does in a turn: two decisions that depend on all that was agreed so far."""
        step = self.machine.step
        self.effects.append(effect)
        self.digest.fold(step, "submit", effect)
        rows = (step, len(self.effects), self.digest.value >> 33, self.group)
        self.digest.fold(step, "plan", (*rows[:2], rows[2] ^ 1, self.group) if corrupt else rows)


class Job:
    """``world`` ranks in ``groups`` and the bus between them. ``agrees``: whether they agree on a maximum in turns."""

    def __init__(
        self,
        seed: int,
        world: int,
        horizon: int = 1,
        faults: Faults | None = None,
        limits: Limits | None = None,
        groups: int = 1,
        agrees: bool = True,
    ) -> None:
        self.seed = seed
        self.groups = groups
        self.agrees = agrees
        self.random = random.Random(seed)
        self.world = world
        self.horizon = horizon
        self.faults = faults or Faults()
        self.now = 0.0
        self.codec = Codec(seed & 0xFFFF_FFFF, 0, world)
        self.limits = limits or Limits(deadline=4.0, resend=0.2, divergence=1.0, start=4.0)
        self.leader = OneCallLeader(self.codec, horizon, self.limits, groups=groups)
        self.ranks = [Rank(0, 0, self.leader, self._skew())]
        for number in range(1, world):
            follower = Follower(self.codec, number, horizon, self.limits, groups=groups)
            self.ranks.append(Rank(number, number * groups // world, follower, self._skew()))
        for rank in self.ranks:
            rank.machine.recent = rank.digest.recent
        self.submitted: list[bytes] = []
        self.told: dict[int, list[bytes]] = {rank: [] for rank in range(world)}
        self.mangled = 0
        self.corrupt: tuple[int, int] | None = None  # rank, step
        self.silent: set[int] = set()  # ranks that died without anybody being told
        self._bus: list[tuple[float, int, int, bytes]] = []  # due, order, receiver, frame
        self._order = 0
        self._last_due: dict[tuple[int, int], float] = {}

    def _skew(self) -> float:
        return self.random.uniform(-3600.0, 3600.0)

    # ---- what a rank does ----

    def turn(self, rank: Rank, payload: bytes = b"") -> None:
        """Begins a turn; it is finished when its record and its maximum are there."""
        machine, now = rank.machine, self.now + rank.skew
        step = machine.step + 1
        rank.in_turn, rank.decided = True, False
        if isinstance(machine, OneCallLeader):
            effect = machine.turn(step, rank.digest.value, payload, now)
            self.submitted.append(payload)
            self.take_told()
            self._decide(rank, effect)
        else:
            machine.turn(step, rank.digest.value, now)
        self.finish(rank)
        self.speak(rank)

    def finish(self, rank: Rank) -> None:
        machine = rank.machine
        if isinstance(machine, Follower) and not rank.decided and machine.effect is not None:
            self._decide(rank, machine.effect)
        if rank.decided and (not self.agrees or machine.maximum is not None):
            rank.in_turn = False
            if machine.maximum is not None:
                rank.maxima.append(machine.maximum)
            for _ in range((0, 0, 1, 2)[self._mix(rank.rank, machine.step) % 4]):
                self._tell(rank)

    def _decide(self, rank: Rank, effect: bytes) -> None:
        step = rank.machine.step
        rank.decide(effect, self.corrupt == (rank.rank, step))
        rank.decided = True
        if self.agrees and rank.machine.state in PROPOSES:
            rank.machine.propose(step, rank.numbers.get(step, self.numbers(rank.group, step)), self.now + rank.skew)

    def _tell(self, rank: Rank) -> None:
        payload = b"%d of rank %d" % (rank.tells, rank.rank)
        rank.tells += 1
        if isinstance(rank.machine, OneCallLeader):
            rank.machine.inbox.post(payload)
        else:
            rank.machine.send_message(payload, self.now + rank.skew)

    def take_told(self) -> None:
        for rank, payload in self.leader.inbox.take():
            self.told[rank].append(payload)

    def numbers(self, group: int, step: int) -> tuple[int, ...]:
        """What a group proposes: other numbers in every step, of which now this group's, now that one's is the most."""
        return tuple(self._mix(group + 101 * place, step) for place in range(1 + step % 4))

    def _mix(self, what: int, step: int) -> int:
        return ((self.seed << 20) + (step << 10) + what + 1) * 0x9E37_79B9_7F4A_7C15 % (1 << 64) >> 1

    def die(self, rank: int, told: bool) -> None:
        """A process ends; ``told``: the others see its connection close, otherwise it is just silent."""
        self.ranks[rank].dead = True
        if not told:
            self.silent.add(rank)
        elif rank == 0:
            for other in self.ranks[1:]:
                if isinstance(other.machine, Follower) and not other.dead:
                    other.machine.lost()
        else:
            self.leader.lost(rank, self.now + self.ranks[0].skew)
            self.speak(self.ranks[0])

    def anybody_ended(self) -> bool:
        return any(rank.over or rank.diverged for rank in self.ranks)

    # ---- the bus ----

    def speak(self, rank: Rank) -> None:
        if rank.dead:
            rank.machine.outbox.clear()
            return
        machine = rank.machine
        if isinstance(machine, OneCallLeader):
            while machine.outbox:
                to, frame = machine.outbox.popleft()
                for receiver in range(1, self.world) if to == EVERYONE else (to,):
                    self.post(0, receiver, frame)
        else:
            while machine.outbox:
                self.post(rank.rank, 0, machine.outbox.popleft())

    def post(self, sender: int, receiver: int, frame: bytes) -> None:
        faults, chance = self.faults, self.random.random
        copies = 2 if faults.twice and chance() < faults.twice else 1
        for _ in range(copies):
            if faults.drop and chance() < faults.drop:
                continue
            sent = frame
            if faults.truncate and chance() < faults.truncate:
                sent = frame[: self.random.randrange(len(frame))]
            due = self.now + (chance() * faults.delay if faults.delay else 0.0)
            if faults.ordered:
                due = self._last_due[sender, receiver] = max(due, self._last_due.get((sender, receiver), 0.0))
            self._order += 1
            heapq.heappush(self._bus, (due, self._order, receiver, sent))

    def advance(self, seconds: float) -> None:
        """Time passes: what is due arrives, then every rank looks at its clock."""
        self.now += seconds
        while self._bus and self._bus[0][0] <= self.now:
            _, _, receiver, data = heapq.heappop(self._bus)
            rank = self.ranks[receiver]
            if rank.dead:
                continue
            try:
                frame = self.codec.decode(data)
            except FrameError:
                self.mangled += 1
                continue
            rank.machine.receive(frame, self.now + rank.skew)
            if rank.in_turn:
                self.finish(rank)
            if rank.machine.outbox:
                self.speak(rank)
        for rank in self.ranks:
            if not rank.dead and rank.machine.verdict is None:
                rank.machine.tick(self.now + rank.skew)
                if rank.machine.outbox:
                    self.speak(rank)

    # ---- what must hold ----

    def check(self) -> None:
        """No rank ever acted on anything but what was submitted, in its turn."""
        due = [b""] * self.horizon + self.submitted
        for rank in self.ranks:
            assert rank.effects == due[: len(rank.effects)], f"rank {rank.rank} diverged"
            for step, maximum in enumerate(rank.maxima):
                most = tuple(map(max, zip(*(self.numbers(group, step) for group in range(self.groups)), strict=True)))
                assert maximum == most, f"rank {rank.rank} has {maximum} as the maximum of step {step}, not {most}"
            told = self.told[rank.rank]
            assert told == [b"%d of rank %d" % (number, rank.rank) for number in range(len(told))]
            assert len(told) <= rank.tells

    def drain(self) -> None:
        """After the stop: the leader gets what was told and is still on its way."""
        for _ in range(1000):
            self.take_told()
            self.speak(self.ranks[0])
            if all(len(self.told[rank.rank]) == rank.tells for rank in self.ranks):
                return
            self.advance(0.05)
        raise AssertionError(f"told and never heard: {[(r.tells, len(self.told[r.rank])) for r in self.ranks]}")

    def verdicts(self) -> list[Verdict | None]:
        return [rank.machine.verdict for rank in self.ranks if not rank.dead]
