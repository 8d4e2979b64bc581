"""Agreement and schedules of a world of any size in one process: the real machines and schedulers, without sockets.

Knows: the tree that control records go down, what one hop of it costs, how to run every rank's turns one after another.
Does not know: sockets, devices, models.

A rank here is its control machine (parallel/control), its scheduler (runtime/schedule), and a device that answers at
once with tokens that nobody looks at. All take the same turns; whatever they disagree on is an error of the plan.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from parallel.control.protocol.follower import Follower
from parallel.control.protocol.leader import Leader
from parallel.control.wire.frames import EVERYONE, HEADER_SIZE, Codec
from parallel.topology import ParallelDegrees, Topology
from runtime.replicate.event_codec import decode_events, encode_events
from runtime.schedule.config import SchedulerConfig, StepLimits
from runtime.schedule.digest import RollingDigest
from runtime.schedule.plan import Admit, StepPlan, StepResult
from runtime.schedule.request import FinishReason, Request, SamplingParams
from runtime.schedule.scheduler import Scheduler

_T = TypeVar("_T")

HORIZON = 2
DEPTH = 2
_ROWS = 8
_REQUESTS_PER_GROUP = 12  # more than there are rows, so that some wait
_PROMPT, _ANSWER = 40, 12


@dataclass(frozen=True, slots=True)
class HopCosts:
    """Microseconds. ``hop``: from the send until the receiver has the record; ``send``: what each further receiver of
    the same record adds to that; ``busy``: what it keeps the sender's thread from other work. Near: Unix sockets inside
    a node; far: ZeroMQ with CURVE to the first rank of another node. docs/lab/scaling.md says where they come from."""

    near_hop: float = 15.5
    near_send: float = 1.1
    near_busy: float = 1.1
    far_hop: float = 55.0
    far_send: float = 11.2
    far_busy: float = 2.1


@dataclass(frozen=True, slots=True)
class ControlTree:
    """``children``: rank -> the ranks it hands records to, in the order of sending: other nodes before its own."""

    children: dict[int, tuple[int, ...]]
    nodes: int
    errors: tuple[str, ...]

    @property
    def depth(self) -> int:
        """Hops to the farthest rank."""
        depth = {0: 0}
        for rank, below in sorted(self.children.items()):
            depth |= dict.fromkeys(below, depth.get(rank, 0) + 1)
        return max(depth.values())

    def arrivals(self, costs: HopCosts, local_world: int) -> dict[int, float]:
        """Microseconds after the leader begins to send until each rank has the record."""
        at = {0: 0.0}
        for rank in sorted(self.children):
            now = at[rank]
            for child in self.children[rank]:
                near = child // local_world == rank // local_world
                now += costs.near_send if near else costs.far_send
                at[child] = now + (costs.near_hop if near else costs.far_hop)
        return at


def control_tree(topologies: Sequence[Topology]) -> ControlTree:
    """As parallel/control/connect.py connects these ranks. ``errors``: ranks that are reached twice, or never."""
    children: dict[int, tuple[int, ...]] = {}
    for place in topologies:
        if place.is_leader:
            children[place.rank] = (*place.node_leaders[1:], *place.node_ranks[1:])
        elif place.is_node_leader:
            children[place.rank] = place.node_ranks[1:]
    reached = [child for below in children.values() for child in below]
    errors = [
        f"rank {rank} is handed records by {reached.count(rank)} ranks" for rank in _wrong(reached, len(topologies))
    ]
    return ControlTree(children, topologies[0].nodes, tuple(errors))


def _wrong(reached: Sequence[int], world: int) -> list[int]:
    """Ranks other than the leader that are not there exactly once."""
    times = [0] * world
    for rank in reached:
        times[rank] += 1
    return [rank for rank in range(world) if times[rank] != (rank != 0)]


class _EchoDevice:
    """Gives every live row a token, and ends it at its length."""

    def __init__(self) -> None:
        self._lengths: dict[int, tuple[int, int]] = {}

    def run(self, plan: StepPlan | None) -> StepResult | None:
        if plan is None:
            return None
        for write in plan.slot_writes:
            self._lengths[write.slot] = (len(write.token_ids), write.max_length)
        counts, finish = [], []
        for number, slot in enumerate(plan.slots):
            length, longest = self._lengths[slot]
            gains = length < longest and plan.draws(number)
            self._lengths[slot] = (length + gains, longest)
            counts.append(int(gains))
            finish.append(int(FinishReason.LENGTH) if gains and length + 1 == longest else 0)
        return StepResult(plan.step, [7] * (len(plan.slots) * plan.width), counts, finish)


@dataclass(slots=True)
class _Rank:
    """``digest``: of everything agreed, the same on all ranks; the scheduler's own is the same within a group."""

    group: int
    scheduler: Scheduler
    device: _EchoDevice = field(default_factory=_EchoDevice)
    digest: RollingDigest = field(default_factory=RollingDigest)
    flying: deque[StepResult | None] = field(default_factory=deque)
    finished: int = 0

    def turn(self, effect: bytes, groups: int) -> None:
        """One turn of the engine's loop: events, plan, launch, land."""
        self.digest.fold(self.scheduler.step, "agreed", effect)
        for event in decode_events(effect):
            if isinstance(event, Admit) and event.request.request_id % groups == self.group:
                self.scheduler.submit(event)
        self.flying.append(self.device.run(self.scheduler.plan()))
        if len(self.flying) > DEPTH:
            landed = self.scheduler.land(self.scheduler.step - len(self.flying), self.flying.popleft())
            self.finished += len(landed.finished)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What running all ranks' turns showed. ``leader_us``: of rank 0's control machine a turn, on this CPU: making the
    record and reading the acknowledgement of every other rank. ``record_bytes``: of the largest record."""

    turns: int
    groups: int
    finished: int
    leader_us: float
    record_bytes: int
    errors: tuple[str, ...]


def rehearse(sharing: ParallelDegrees, turns: int) -> Rehearsal:
    """Every rank of ``sharing``, for ``turns`` turns, or until the ranks disagree."""
    return _Job(sharing).run(turns)


class _Job:
    """All ranks and what is between them: frames arrive at once, in order."""

    def __init__(self, sharing: ParallelDegrees) -> None:
        self._sharing = sharing
        self._codec = codec = Codec(1, 0, sharing.world)
        config = _scheduler_config()
        self._ranks = [_Rank(rank // sharing.tensor, Scheduler(config)) for rank in range(sharing.world)]
        self._leader = Leader(codec, HORIZON, recent=self._ranks[0].digest.recent)
        self._followers = [
            Follower(codec, rank, HORIZON, recent=self._ranks[rank].digest.recent) for rank in range(1, sharing.world)
        ]
        self._spent = 0.0
        self._largest = 0

    def run(self, turns: int) -> Rehearsal:
        events = _requests(self._sharing.data)
        errors: list[str] = []
        done = 0
        while done < turns and not errors:
            errors = self._turn(done, encode_events(events.popleft()) if events else b"")
            done += 1
        errors = errors or self._disagreements()
        finished = sum(rank.finished for rank in self._ranks[:: self._sharing.tensor])
        per_turn = 1e6 * self._spent / done
        return Rehearsal(done, self._sharing.data, finished, per_turn, self._largest - HEADER_SIZE, tuple(errors))

    def _turn(self, step: int, payload: bytes) -> list[str]:
        """One turn of every rank; returns what went wrong."""
        ranks, leader = self._ranks, self._leader
        began = time.perf_counter()
        effect = leader.turn(step, ranks[0].digest.value, payload, 0.0)
        self._spent += time.perf_counter() - began
        self._from_leader()
        for rank, follower in zip(ranks[1:], self._followers, strict=True):
            follower.turn(step, rank.digest.value, 0.0)
        while self._to_leader():  # more than once only in a dispute
            self._from_leader()
        if leader.verdict is not None:
            return [leader.verdict.text]
        effects = [effect, *(follower.effect for follower in self._followers)]
        if None in effects:
            return [f"rank {effects.index(None)} has no record in turn {step}"]
        for rank, agreed in zip(ranks, effects, strict=True):
            rank.turn(agreed or b"", self._sharing.data)
        return []

    def _from_leader(self) -> None:
        for to, frame in _taken(self._leader.outbox):
            self._largest = max(self._largest, len(frame))
            decoded = self._codec.decode(frame)
            for follower in self._followers if to == EVERYONE else [self._followers[to - 1]]:
                follower.receive(decoded, 0.0)

    def _to_leader(self) -> bool:
        """Whether there was anything to say."""
        frames = [frame for follower in self._followers for frame in _taken(follower.outbox)]
        began = time.perf_counter()
        for frame in frames:
            self._leader.receive(self._codec.decode(frame), 0.0)
        self._spent += time.perf_counter() - began
        return bool(frames)

    def _disagreements(self) -> list[str]:
        """Ranks of a group agree on all steps, not only on events."""
        firsts = self._ranks[:: self._sharing.tensor]
        return [
            f"rank {rank} planned other steps than the first rank of its group"
            for rank, state in enumerate(self._ranks)
            if state.scheduler.digest.value != firsts[state.group].scheduler.digest.value
        ]


def _taken(outbox: deque[_T]) -> list[_T]:
    taken = list(outbox)
    outbox.clear()
    return taken


def _scheduler_config() -> SchedulerConfig:
    return SchedulerConfig(
        StepLimits(_ROWS, 2 * _ROWS, block_size=16, max_model_len=128, depth=DEPTH, max_prefill_tokens=128),
        blocks=_ROWS * 8,
    )


def _requests(groups: int) -> deque[list[Admit]]:
    """Events by turn: each group's requests arrive over several turns."""
    turns: deque[list[Admit]] = deque()
    for wave in range(_REQUESTS_PER_GROUP // 4):
        arriving = []
        for number in range(wave * 4 * groups, (wave + 1) * 4 * groups):
            prompt = tuple((number * 31 + i) % 1000 for i in range(_PROMPT))
            arriving.append(Admit(Request(number, prompt, SamplingParams(max_tokens=_ANSWER + number // groups % 3))))
        turns.append(arriving)
    return turns
