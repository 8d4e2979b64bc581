"""The handshake: every rank proves that it has the same job, code, configuration and model before anything else runs.

Knows: what must be equal, the order of frames, how a clock offset is measured. Two pure machines without sockets or
clock: connections are opaque keys, times are passed in.
Does not know: how frames travel (uds.py, zeromq.py) or what follows (states.py).

    follower                         leader
    HELLO who I am            -->                      compared with the leader's own identity, field by field
                              <--    WELCOME           or END: refused, with the field and both values
    PROBE my clock            -->
                              <--    PROBE both clocks
    READY my clock's offset   -->                      when all ranks are ready on all channels:
                              <--    START all offsets

A refusal ends the start of the whole job, on every rank, with the same text. Bytes that are no frame raise FrameError:
the caller closes that connection, and the others go on.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from parallel.control.errors import Cause, FrameError, Verdict
from parallel.control.wire.frames import CLOCK_REPLY, EVERYONE, Codec, Frame, Hello, Kind, Probe, Ready, Start

CHANNELS = ("step", "watch")  # records and acknowledgements; the watchdog's heartbeats
_NAME = re.compile(r" (?=\w+=)")  # before one, a value ends

_WHAT_TO_DO = {
    "version": "install the same Lockstride on every node",
    "job": "two jobs share a socket directory or port: give each its own",
    "epoch": "a process of an earlier restart is still alive: end it",
    "world": "start every rank with the same world size",
    "horizon": "give every rank the same options",
    "groups": "give every rank the same options",
    "config": "give every rank the same options",
    "model": "give every rank the same checkpoint",
    "code": "install the same Lockstride on every node",
    "rank": "start every rank once, each with its own rank",
    "covers": "give every rank the same node layout",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """What all ranks of a job must have in common. ``config``, ``model`` and ``code`` are digests, compared as text.

    ``groups``: runs of world / groups consecutive ranks; the ranks of one run make identical plans.
    """

    job: int
    epoch: int
    world: int
    horizon: int
    config: str
    model: str
    code: str
    groups: int = 1

    def codec(self) -> Codec:
        return Codec(self.job, self.epoch, self.world)

    def hello(self, channel: str, covers: tuple[int, ...], host: str, pid: int) -> Hello:
        same = (self.world, self.horizon, self.groups, self.config, self.model, self.code)
        return Hello(*same, channel, covers, host, pid)


def refusal(rank: int, field: str, ours: object, theirs: object, leader: int = 0) -> Verdict:
    """The verdict on a rank that differs: the rank, the field, both values, and what to do about it."""
    who = f"rank {rank}" if 0 <= rank < EVERYONE else "a process of unknown rank"
    if isinstance(ours, str) and isinstance(theirs, str):
        ours, theirs = _differing(ours, theirs)
    text = f"{who} differs from rank {leader} in {field}: rank {leader} has {ours!r}, {who} has {theirs!r}"
    return Verdict(Cause.REFUSED, max(rank, 0), 0, f"handshake refused: {text}; {_WHAT_TO_DO[field]}")


def _differing(ours: str, theirs: str) -> tuple[str, str]:
    """Of two lists of ``name=value``, what is not in both: of fifty options a user looks for one. Else as they are."""
    lists = [_NAME.split(text) for text in (ours, theirs)]
    both = set(lists[0]) & set(lists[1])
    mine, others = (" ".join(item for item in items if item not in both) for items in lists)
    return (mine, others) if both and mine != others else (ours, theirs)


class Greeting(StrEnum):
    """The state of one connection; the same states on both sides."""

    NEW = "new"
    GREETED = "greeted"  # HELLO was sent / accepted
    PROBED = "probed"  # the clock question was answered
    READY = "ready"
    STARTED = "started"
    REFUSED = "refused"


LEADER_GREETING: Mapping[Greeting, Mapping[Kind, Greeting]] = {
    Greeting.NEW: {Kind.HELLO: Greeting.GREETED},
    Greeting.GREETED: {Kind.PROBE: Greeting.PROBED, Kind.END: Greeting.REFUSED},  # END: a node refused its own rank
    Greeting.PROBED: {Kind.READY: Greeting.READY, Kind.END: Greeting.REFUSED},
    Greeting.READY: {Kind.START: Greeting.STARTED, Kind.END: Greeting.REFUSED},  # START is the leader's own
    Greeting.STARTED: {},
    Greeting.REFUSED: {},
}
FOLLOWER_GREETING: Mapping[Greeting, Mapping[Kind, Greeting]] = {
    Greeting.NEW: {Kind.HELLO: Greeting.GREETED},  # HELLO is the follower's own
    Greeting.GREETED: {Kind.WELCOME: Greeting.PROBED, Kind.END: Greeting.REFUSED},
    Greeting.PROBED: {Kind.PROBE: Greeting.READY, Kind.END: Greeting.REFUSED},
    Greeting.READY: {Kind.START: Greeting.STARTED, Kind.END: Greeting.REFUSED},
    Greeting.STARTED: {},
    Greeting.REFUSED: {},
}


def _advance(table: Mapping[Greeting, Mapping[Kind, Greeting]], state: Greeting, kind: Kind) -> Greeting:
    following = table[state].get(kind)
    if following is None:
        legal = ", ".join(k.name for k in table[state]) or "nothing"
        raise FrameError("order", f"{kind.name} in handshake state {state}, where {legal} is legal")
    return following


Connection = TypeVar("Connection", bound=Hashable)


class LeaderHandshake(Generic[Connection]):
    """Greets the ranks of ``expected`` (rank -> the ranks that its connection covers) on every channel.

    ``receive`` takes a frame from a connection and returns the frames to send; ``verdict`` is set when a rank is
    refused, and then goes to everybody. ``offset_ns`` lists the clocks of the ranks greeted so far.
    """

    def __init__(self, identity: Identity, leader: int, expected: Mapping[int, tuple[int, ...]]) -> None:
        self.identity = identity
        self.codec = identity.codec()
        self.leader = leader
        self.expected = dict(expected)
        self.verdict: Verdict | None = None
        self.offset_ns: dict[int, int] = {}
        self.connections: dict[tuple[str, int], Connection] = {}
        self.seen: set[int] = set()  # ranks that sent anything
        self._states: dict[Connection, Greeting] = {}

    @property
    def missing(self) -> tuple[tuple[str, int], ...]:
        """(channel, rank) of everyone who is not ready yet, in order."""
        ready = {k for k, connection in self.connections.items() if self._states[connection] is Greeting.READY}
        return tuple((c, r) for r in sorted(self.expected) for c in CHANNELS if (c, r) not in ready)

    def receive(self, connection: Connection, data: bytes, now_ns: int) -> list[bytes]:
        """The frames to answer with. Raises FrameError for bytes that are no frame, or one out of order: nothing
        changed, close the connection."""
        try:
            frame = self.codec.decode(data)
        except FrameError as error:
            if error.field not in ("version", "job", "epoch"):
                raise
            self.seen.add(error.rank)
            return self._refuse(error.rank, error.field, error.ours, error.theirs)
        self.seen.add(frame.rank)
        if self.verdict is not None:
            return [self.refuse(self.verdict)]
        state = self._states.get(connection, Greeting.NEW)
        following = _advance(LEADER_GREETING, state, frame.kind)
        replies: list[bytes] = []
        if isinstance(frame.body, Hello):
            replies = self._greet(connection, frame, frame.body)
        elif isinstance(frame.body, Probe):
            answer = Probe(frame.body.asked, now_ns)
            replies = [self.codec.encode(Kind.PROBE, frame.rank, flags=CLOCK_REPLY, body=answer)]
        elif isinstance(frame.body, Ready):
            self.offset_ns[frame.rank] = frame.body.offset_ns
        elif isinstance(frame.body, Verdict):
            replies = [self.refuse(frame.body)]
        if self.verdict is None:
            self._states[connection] = following
        return replies

    def lost(self, connection: Connection) -> None:
        """A connection closed: its rank may connect again until the deadline."""
        self._states.pop(connection, None)
        for key in [k for k, c in self.connections.items() if c == connection]:
            del self.connections[key]

    def start(self, offsets_ns: Mapping[int, int]) -> bytes:
        """The START frame for every rank. Raises ValueError while ranks are ``missing``."""
        if self.missing:
            raise ValueError(f"handshake: START with {self.missing} missing")
        for connection in self.connections.values():
            self._states[connection] = _advance(LEADER_GREETING, self._states[connection], Kind.START)
        body = Start(tuple(offsets_ns.get(rank, 0) for rank in range(self.identity.world)))
        return self.codec.encode(Kind.START, EVERYONE, body=body)

    def refuse(self, verdict: Verdict) -> bytes:
        """Ends the handshake with ``verdict``; returns the frame for every connected rank."""
        self.verdict = verdict
        return self.codec.encode(Kind.END, EVERYONE, body=verdict)

    def _greet(self, connection: Connection, frame: Frame, hello: Hello) -> list[bytes]:
        rank, ours = frame.rank, self.identity
        for field in ("world", "horizon", "groups", "config", "model", "code"):
            if getattr(hello, field) != getattr(ours, field):
                return self._refuse(rank, field, getattr(ours, field), getattr(hello, field))
        if rank not in self.expected:
            return self._refuse(rank, "rank", f"a place for {sorted(self.expected)}", rank)
        if hello.covers != self.expected[rank]:
            return self._refuse(rank, "covers", self.expected[rank], hello.covers)
        if hello.channel not in CHANNELS:
            raise FrameError("body", f"HELLO for channel {hello.channel!r}, there are {CHANNELS}")
        if (hello.channel, rank) in self.connections:
            return self._refuse(rank, "rank", f"rank {rank} already", f"{rank} again, pid {hello.pid} on {hello.host}")
        self.connections[hello.channel, rank] = connection
        return [self.codec.encode(Kind.WELCOME, rank)]

    def _refuse(self, rank: int, field: str, ours: object, theirs: object) -> list[bytes]:
        return [self.refuse(refusal(rank, field, ours, theirs, self.leader))]


class FollowerHandshake:
    """One channel's side of a follower. ``verdict`` is set when the leader, or this rank, refuses."""

    def __init__(self, identity: Identity, rank: int, hello: Hello, leader: int = 0) -> None:
        self.codec = identity.codec()
        self.rank = rank
        self.leader = leader
        self.hello = hello
        self.state = Greeting.NEW
        self.verdict: Verdict | None = None
        self.offset_ns = 0
        self.round_trip_ns = 0
        self.offsets_ns: tuple[int, ...] = ()

    def begin(self) -> bytes:
        self.state = _advance(FOLLOWER_GREETING, self.state, Kind.HELLO)
        return self.codec.encode(Kind.HELLO, self.rank, body=self.hello)

    def receive(self, data: bytes, now_ns: int) -> list[bytes]:
        """The frames to answer with. Raises FrameError for bytes that are no frame, or one out of order."""
        try:
            frame = self.codec.decode(data)
        except FrameError as error:
            if error.field not in ("version", "job", "epoch"):
                raise
            self.state = Greeting.REFUSED
            self.verdict = refusal(self.rank, error.field, error.theirs, error.ours, self.leader)
            return []
        self.state = _advance(FOLLOWER_GREETING, self.state, frame.kind)
        body = frame.body
        if frame.kind is Kind.WELCOME:
            return [self.codec.encode(Kind.PROBE, self.rank, body=Probe(now_ns, 0))]
        if isinstance(body, Probe):
            self.round_trip_ns = now_ns - body.asked
            self.offset_ns = body.answered - (body.asked + now_ns) // 2
            return [self.codec.encode(Kind.READY, self.rank, body=Ready(self.offset_ns, self.round_trip_ns))]
        if isinstance(body, Start):
            self.offsets_ns = body.offsets_ns
        elif isinstance(body, Verdict):
            self.verdict = body
        return []
