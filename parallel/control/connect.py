"""Opens the control plane of a rank: leader, follower or relay, over which sockets.

Knows: how a rank's place becomes rendezvous, links and machines.
Does not know: where place, directory, store and identity come from (launch/ranks/rendezvous.py).

On one node rank 0 meets the others over Unix sockets. With several nodes the first rank of each node meets the others
of its node, then rank 0 over ZeroMQ, and relays for its node. No rank starts before all are there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from parallel.control.errors import Cause, ControlError, FrameError, Verdict
from parallel.control.follower_plane import FollowerPlane
from parallel.control.interface import FLUSH_SECONDS, ControlPlane, FollowerLink, LeaderLink, SingleRankControl, Watch
from parallel.control.leader_plane import LeaderPlane
from parallel.control.protocol.follower import Follower
from parallel.control.protocol.handshake import CHANNELS, Identity
from parallel.control.protocol.leader import Leader
from parallel.control.protocol.states import Limits
from parallel.control.transport.combined_links import CombinedLinks, EitherReady
from parallel.control.transport.rendezvous_local import LocalRendezvous, join
from parallel.control.transport.rendezvous_nodes import NodeJoin, NodeRendezvous, Store
from parallel.control.transport.uds import socket_path
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


class Place(Protocol):
    """Where a rank is: the part of parallel/topology.py's Topology that is needed here; control may not import it."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def nodes(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def node_leader(self) -> int: ...
    @property
    def node_leaders(self) -> tuple[int, ...]: ...
    @property
    def node_ranks(self) -> tuple[int, ...]: ...
    def ranks_led_by(self, node_leader: int) -> tuple[int, ...]: ...


def open_control(
    place: Place,
    identity: Identity,
    directory: Path,
    limits: Limits | None = None,
    store: Store | None = None,
    address: str = "127.0.0.1",
    groups: int = 1,
) -> ControlPlane:
    """Meets the other ranks, and returns when all are there with the same identity.

    ``directory`` belongs to this user on this node and is the same for all its ranks (see uds.private_directory). With
    several nodes, ``store`` is the job's rendezvous store, and rank 0 listens on ``address``, an interface of its node
    that the other nodes can reach. ``groups``: runs of world / groups consecutive ranks that plan separately; the ranks
    of one run make identical plans. Raises a ControlError that names the rank that differs or is missing;
    SocketPlaceError for the directory; ValueError when ``groups`` does not divide the world.
    """
    limits = limits or Limits()
    if groups < 1 or place.world % groups:
        raise ValueError(
            f"control plane: {groups} groups do not divide {place.world} ranks: choose from "
            f"{[n for n in range(1, place.world + 1) if place.world % n == 0]}"
        )
    identity = replace(identity, groups=groups)
    if identity.world != place.world:
        raise ValueError(f"control plane: identity of a world of {identity.world}, place in a world of {place.world}")
    if place.world == 1:
        return SingleRankControl(0)  # no other rank has to receive an event before it takes effect
    if place.nodes > 1 and store is None:
        raise ValueError(f"control plane: {place.nodes} nodes need the job's rendezvous store to exchange keys")
    path = socket_path(directory, identity.job, identity.epoch, f"node{place.node_rank}")
    if place.rank != place.node_leader:
        return _follow(place, identity, path, limits)
    local = LocalRendezvous(path, identity, place.rank, place.node_ranks[1:], limits)
    try:
        if place.rank != 0:
            assert store is not None
            return _relay(place, identity, local, store, limits)
        return _lead(place, identity, local, store, address, limits)
    finally:
        local.close()


def _follow(place: Place, identity: Identity, path: Path, limits: Limits) -> ControlPlane:
    rank, leader, codec = place.rank, place.node_leader, identity.codec()
    joined = join(path, identity, rank, leader, limits)
    watch = Watch(codec, rank, up=joined.links["watch"], leader=leader)
    machine = Follower(codec, rank, identity.horizon, limits, leader=leader, groups=identity.groups)
    plane = FollowerPlane(machine, joined.links["step"], watch)
    plane.clock_offset_ns = joined.offsets_ns[rank]
    return plane


def _lead(
    place: Place, identity: Identity, local: LocalRendezvous, store: Store | None, address: str, limits: Limits
) -> ControlPlane:
    covers: dict[int, tuple[int, ...]] = {rank: (rank,) for rank in place.node_ranks[1:]}
    offsets: dict[int, int] = {}
    remote: NodeRendezvous | None = None
    if place.nodes > 1 and store is not None:
        other_nodes = {rank: place.ranks_led_by(rank) for rank in place.node_leaders if rank != 0}
        covers |= other_nodes
        remote = NodeRendezvous(address, store, identity, other_nodes, limits)
    try:
        try:
            local.gather()
        except ControlError as error:
            if remote is not None:
                remote.refuse(error.verdict)
            raise
        if remote is not None:
            try:
                remote.gather()
            except ControlError as error:
                local.refuse(error.verdict)
            offsets |= remote.offsets()
        offsets |= local.handshake.offset_ns
        local_links = local.start(offsets)
        links: dict[str, LeaderLink] = dict(local_links)
        if remote is not None:
            remote_links = remote.start()
            links = {channel: CombinedLinks(local_links[channel], remote_links[channel]) for channel in CHANNELS}
    finally:
        if remote is not None:
            remote.close()
    codec = identity.codec()
    watch = Watch(codec, 0, down=links["watch"], covers=covers)
    machine = Leader(codec, identity.horizon, limits, groups=identity.groups)
    return LeaderPlane(machine, links["step"], watch, covers)


def _relay(place: Place, identity: Identity, local: LocalRendezvous, store: Store, limits: Limits) -> ControlPlane:
    rank, codec = place.rank, identity.codec()
    try:
        remote = NodeJoin(store, identity, rank, place.node_ranks, limits)
    except ControlError as error:
        local.refuse(error.verdict)
    try:
        local.gather()
    except ControlError as error:
        remote.decline(error.verdict)
        raise
    try:
        remote.finish()
        remote.await_start()
    except ControlError as error:
        local.refuse(error.verdict)
    up, offsets_ns = remote.links, remote.machines["step"].offsets_ns
    down = local.start(dict(enumerate(offsets_ns)))
    covers = {r: (r,) for r in place.node_ranks[1:]}
    watch = Watch(codec, rank, down=down["watch"], up=up["watch"], covers=covers)
    machine = Follower(codec, rank, identity.horizon, limits, groups=identity.groups)
    either = EitherReady(down["step"], up["step"].socket)
    plane = RelayPlane(machine, up["step"], down["step"], either, watch)
    plane.clock_offset_ns = offsets_ns[rank]
    return plane
