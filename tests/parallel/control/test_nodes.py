"""Several nodes: ZeroMQ with CURVE between them, Unix sockets within; the same promises as on one node."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from parallel.control.connect import RelayPlane
from parallel.control.errors import Aborted, Disagreement, HandshakeRefused, LostPeer, MissedDeadline
from parallel.control.follower_plane import FollowerPlane
from parallel.control.interface import ControlPlane
from parallel.control.leader_plane import LeaderPlane
from parallel.control.transport.zeromq import (
    Gate,
    KeyPair,
    ListenError,
    ZmqFollowerLink,
    ZmqLeaderLink,
    post,
    routing_id,
)
from parallel.control.wire.frames import Codec, Kind
from runtime.schedule.digest import RollingDigest
from tests.parallel.control.ranks import (
    LIMITS,
    PATIENCE_S,
    ThreadStore,
    identity_of,
    run_nodes,
    short_folder,
    take_turns,
)
from tests.parallel.control.test_interface import errors


@pytest.fixture
def place() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder / "control"


@pytest.mark.parametrize(("nodes", "local", "horizon"), [(2, 1, 1), (2, 2, 2), (2, 2, 0), (3, 2, 1)])
def test_every_rank_of_every_node_gets_the_same_events(place: Path, nodes: int, local: int, horizon: int) -> None:
    rng = random.Random(nodes)
    submitted = [rng.randbytes(rng.randrange(40)) if rng.random() < 0.5 else b"" for _ in range(200)]
    submitted[50] = rng.randbytes(3 << 20)
    ended = run_nodes(nodes, local, place, lambda plane: take_turns(plane, submitted), horizon=horizon)
    expected = [b""] * horizon + submitted + [b""]
    assert set(ended) == set(range(nodes * local))
    for rank, effects in ended.items():
        assert effects == expected, f"rank {rank}: {effects!r:.300}"


def test_the_horizon_is_agreed_over_relays_too(place: Path) -> None:
    submitted = [b"%d" % step for step in range(20)]

    def body(plane: ControlPlane) -> list[bytes]:
        assert plane.agree_horizon(lambda hop_s: 2 if hop_s > 0.0 else 0) == plane.horizon == 2
        return take_turns(plane, submitted)

    expected = [b"", b"", *submitted, b""]
    assert run_nodes(2, 3, place, body, horizon=0) == dict.fromkeys(range(6), expected)


def paced(plane: ControlPlane, reached: list[int], step: int) -> None:
    """As collectives do, keeps the leader from running ahead.

    For half a second: a leader that waits here reads no frames, and a diverged rank never reaches the step.
    """
    until = time.monotonic() + 0.5
    while plane.rank == 0 and min(reached[1:]) < step - 1 and time.monotonic() < until:
        time.sleep(0.0002)
    reached[plane.rank] = step


@pytest.mark.parametrize("culprit", [0, 1, 2, 3])
def test_a_disagreement_on_any_node_ends_all_with_both_decisions(place: Path, culprit: int) -> None:
    reached = [0] * 4

    def body(plane: ControlPlane) -> None:
        digest = RollingDigest()
        plane.explain_with(digest.recent)
        for step in range(60):
            paced(plane, reached, step)
            plane.exchange(step, digest.value)
            digest.fold(step, "plan", (step, 4 if (plane.rank, step) == (culprit, 20) else 3))

    found = errors(run_nodes(2, 2, place, body, limits=replace(LIMITS, divergence=4.0)))
    assert len({str(error) for error in found.values()}) == 1
    for error in found.values():
        assert isinstance(error, Disagreement)
        assert (error.verdict.rank, error.verdict.step) == (culprit, 21)
        assert "plan(20, 3) at step 20" in str(error)
        assert "plan(20, 4) at step 20" in str(error)


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_an_exception_of_any_rank_ends_all_with_its_reason(place: Path, first: int) -> None:
    reached = [0] * 4

    def body(plane: ControlPlane) -> None:
        for step in range(60):
            if (plane.rank, step) == (first, 7):
                reached[plane.rank] = 1000
                raise MemoryError("no room")
            paced(plane, reached, step)
            plane.exchange(step, step)

    ended = run_nodes(2, 2, place, body)
    assert isinstance(ended.pop(first), MemoryError)
    for error in errors(ended).values():
        assert isinstance(error, Aborted)
        assert f"rank {first} ends at step 6: MemoryError: no room" in str(error)


def test_a_rank_behind_another_nodes_leader_that_dies_is_named(place: Path) -> None:
    reached = [0] * 4

    def body(plane: ControlPlane) -> None:
        for step in range(500):
            if plane.rank == 3 and step == 10:
                assert isinstance(plane, FollowerPlane)
                plane.link.close()
                plane._closed = True
                assert plane.watch is not None
                plane.watch.close()
                reached[3] = 1000
                return
            paced(plane, reached, step)
            plane.exchange(step, step)
            time.sleep(0.001)

    ended = run_nodes(2, 2, place, body)
    assert ended.pop(3) is None
    for error in errors(ended).values():
        assert isinstance(error, LostPeer)
        assert error.verdict.rank == 3


@pytest.mark.parametrize("odd_rank", [2, 3])
def test_a_rank_of_another_node_that_differs_is_refused_everywhere(place: Path, odd_rank: int) -> None:
    odd = {odd_rank: replace(identity_of(4), model="m1")}
    found = errors(run_nodes(2, 2, place, lambda plane: take_turns(plane, []), odd=odd))
    for error in found.values():
        assert isinstance(error, HandshakeRefused)
        assert "in model: rank " in str(error)
        assert f"rank {odd_rank} differs" in str(error) or odd_rank == 2
        assert "'m0'" in str(error)
        assert "'m1'" in str(error)


def test_ports_that_other_nodes_cannot_reach_are_named_by_both_sides(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"

        class Firewalled(ThreadStore):
            def set(self, key: str, value: str) -> None:
                if "/endpoint/" in key:
                    opened.append(value)
                    value = endpoint
                super().set(key, value)

        opened: list[str] = []
        limits = replace(LIMITS, start=0.3, divergence=0.1)
        found = errors(run_nodes(2, 1, place, lambda plane: None, limits=limits, store=Firewalled()))
    assert all(isinstance(error, MissedDeadline) for error in found.values())
    assert f"at {opened[0]} and {opened[1]}: is a firewall between the nodes?" in str(found[0])
    assert f"at {endpoint}: is a firewall between the nodes?" in str(found[1])


def test_a_node_that_stays_silent_is_named(place: Path) -> None:
    limits = replace(LIMITS, deadline=0.5, resend=0.1)
    reached = [0] * 2

    def body(plane: ControlPlane) -> None:
        for step in range(10_000):
            if plane.rank == 1 and step == 10:
                time.sleep(1.5)
            reached[plane.rank] = step
            plane.exchange(step, step)
            time.sleep(0.001)

    found = errors(run_nodes(2, 1, place, body, limits=limits))
    assert isinstance(found[0], MissedDeadline)
    assert found[0].verdict.rank == 1
    assert str(found[1]) == str(found[0])


def test_only_loopback_listens_and_only_public_keys_are_stored(place: Path) -> None:
    store = ThreadStore()
    before = listening()

    def body(plane: ControlPlane) -> set[tuple[str, int]]:
        found = listening() - before
        take_turns(plane, [])
        return found

    ended = run_nodes(2, 2, place, body, store=store)
    opened = ended[0]
    assert isinstance(opened, set)
    assert len(opened) == 2  # the step and the watch channel
    assert {address for address, _ in opened} == {"127.0.0.1"}
    assert listening() == before
    prefix = f"lockstride/{identity_of(4).job:x}/0"
    assert {key.removeprefix(prefix) for key in store.content} == {
        "/endpoint/step",
        "/endpoint/watch",
        "/key",
        "/key/2",
        "/open",
    }


def listening() -> set[tuple[str, int]]:
    """(address, port) of every listening TCP socket of this network namespace that belongs to this process."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
        except FileNotFoundError:
            continue
    found = set()
    for table, family, size in (("tcp", socket.AF_INET, 8), ("tcp6", socket.AF_INET6, 32)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != "0A" or fields[9] not in inodes:
                continue
            address, port = fields[1].split(":")
            words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, size, 8)]
            found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def test_rank_0_listens_on_addresses_of_its_own_only() -> None:
    gate = Gate(KeyPair())
    with pytest.raises(ListenError, match=r"cannot listen on 192.0.2.1: .* must be an address of this node"):
        gate.listen("192.0.2.1")
    gate.shut()


def test_10000_junk_messages_none_is_read(place: Path) -> None:
    """Raw bytes, wrong keys, no keys, right keys under another's name: the link delivers nothing, and then a frame."""
    gate, stranger = Gate(KeyPair()), KeyPair()
    node, other = KeyPair(), KeyPair()
    gate.allow(node.public, 1)
    gate.allow(other.public, 2)
    server, endpoint = gate.listen("127.0.0.1")
    link = ZmqLeaderLink(gate, server, {1: (1,), 2: (2,)}, watched=False)
    rng = random.Random(5)
    host, port = endpoint.removeprefix("tcp://").split(":")
    for _ in range(50):
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(rng.randbytes(2000) if rng.random() < 0.5 else b"GET / HTTP/1.1\r\n\r\n")
    context = zmq.Context()
    impostors = []
    for keys in (None, stranger, other):
        router = context.socket(zmq.DEALER)
        router.linger = 0
        router.routing_id = routing_id(1)  # rank 1's name
        if keys is not None:
            router.curve_serverkey = gate.keys.public
            router.curve_publickey, router.curve_secretkey = keys.public, keys.secret
        router.connect(endpoint)
        impostors.append(router)
    received: Sequence[tuple[int, object]] = []
    for _ in range(10_000):
        for router in impostors[:2]:  # they find the door closed, and then have nowhere to send to
            with contextlib.suppress(zmq.Again):
                router.send(rng.randbytes(50), zmq.NOBLOCK)
        impostors[2].send(rng.randbytes(rng.randrange(1, 100)))
        received = [*received, *link.receive()]
    until = time.monotonic() + PATIENCE_S
    while link.strangers < 10_000 and time.monotonic() < until:
        received = [*received, *link.receive(0.05)]
    assert received == []
    assert link.strangers == 10_000  # those of rank 2 under rank 1's name; the others were not let in
    assert gate.allowed.refused > 0
    for router in impostors:
        router.close()
    context.term()
    good = ZmqFollowerLink(endpoint, 1, node, gate.keys.public, 0.0, watched=False)
    frame = Codec(1, 0, 3).encode(Kind.ACK, 1, 5)
    while not received:
        good.send(frame)
        received = link.receive(0.05)
    assert set(received) == {(1, frame)}
    good.close()
    link.close()


def test_a_message_larger_than_any_frame_is_dropped_with_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel.control.transport.zeromq.MAX_FRAME", 1000)
    gate, node = Gate(KeyPair()), KeyPair()
    gate.allow(node.public, 1)
    server, endpoint = gate.listen("127.0.0.1")
    link = ZmqLeaderLink(gate, server, {1: (1,)}, watched=False)
    good = ZmqFollowerLink(endpoint, 1, node, gate.keys.public, 0.0, watched=False)
    good.send(b"x" * 1000)
    assert link.receive(PATIENCE_S) == [(1, b"x" * 1000)]
    good.send(b"x" * 1100)
    assert link.receive(0.2) == []
    received: Sequence[tuple[int, object]] = []
    while not received:  # it may come back
        good.send(b"y")
        received = link.receive(0.05)
    assert set(received) == {(1, b"y")}
    good.close()
    link.close()


def test_a_watched_connection_that_breaks_is_noticed_on_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel.control.transport.zeromq._MEND_SECONDS", 0.2)
    gate, node = Gate(KeyPair()), KeyPair()
    gate.allow(node.public, 1)
    server, endpoint = gate.listen("127.0.0.1")
    link = ZmqLeaderLink(gate, server, {1: (1, 2)}, watched=True)
    follower = ZmqFollowerLink(endpoint, 1, node, gate.keys.public, 0.0, watched=True)
    follower.send(b"a")
    assert link.receive(PATIENCE_S) == [(1, b"a")]
    link.send(2, b"for a rank behind it")
    assert follower.receive(PATIENCE_S) == b"for a rank behind it"
    follower.close()
    until = time.monotonic() + PATIENCE_S
    heard: Sequence[tuple[int, object]] = []
    while not heard and time.monotonic() < until:
        heard = link.receive(0.05)
    assert heard == [(1, None)]
    again = ZmqFollowerLink(endpoint, 1, node, gate.keys.public, 0.0, watched=True)
    again.send(b"b")
    assert link.receive(PATIENCE_S) == [(1, b"b")]
    link.close()
    with pytest.raises(EOFError):
        again.receive(PATIENCE_S)
    again.close()


def test_a_node_that_comes_back_before_its_old_connection_is_found_dead_is_heard() -> None:
    """A link that was cut for longer than TCP took to try again: each end finds the old connection dead by itself."""
    gate, node = Gate(KeyPair()), KeyPair()
    gate.allow(node.public, 1)
    server, endpoint = gate.listen("127.0.0.1")
    link = ZmqLeaderLink(gate, server, {1: (1,)}, watched=False)
    with zmq.Context() as context, context.socket(zmq.DEALER) as old:
        old.linger = 0
        old.reconnect_ivl = -1
        old.routing_id = routing_id(1)
        old.curve_serverkey = gate.keys.public
        old.curve_publickey, old.curve_secretkey = node.public, node.secret
        old.connect(endpoint)
        old.send(b"a")
        assert link.receive(30.0) == [(1, b"a")]
        again = ZmqFollowerLink(endpoint, 1, node, gate.keys.public, 0.0, watched=False)
        again.send(b"b")
        assert link.receive(30.0) == [(1, b"b")]
        link.send(1, b"c")
        assert again.receive(30.0) == b"c"
        again.close()
    link.close()


def test_the_planes_are_of_the_right_kind(place: Path) -> None:
    def body(plane: ControlPlane) -> type:
        take_turns(plane, [])
        return type(plane)

    assert run_nodes(2, 2, place, body) == {0: LeaderPlane, 1: FollowerPlane, 2: RelayPlane, 3: FollowerPlane}


def test_a_leader_that_is_done_stays_until_every_node_has_what_it_sent(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing slows a leader down that speaks to its ranks over a queue: it is done long before one asks again."""
    posted = 0

    def loses_one(socket: zmq.Socket[bytes], rank: int, frame: bytes) -> None:
        nonlocal posted
        posted += 1
        if posted != 30:
            post(socket, rank, frame)

    monkeypatch.setattr("parallel.control.transport.zeromq.post", loses_one)
    submitted = [b"event"] * 60
    ended = run_nodes(2, 1, place, lambda plane: len(take_turns(plane, submitted)), limits=replace(LIMITS, resend=0.1))
    assert posted > 60
    assert ended == dict.fromkeys(range(2), len(submitted) + 2)


def test_a_rank_that_ends_before_the_agreed_stop_reaches_it_is_named(place: Path) -> None:
    leader_is_done = threading.Event()

    def body(plane: ControlPlane) -> None:
        if plane.rank == 1:
            plane.exchange(0, 0)
            leader_is_done.wait(PATIENCE_S)
            raise MemoryError("no room")
        take_turns(plane, [b""], lambda step: 0)
        leader_is_done.set()

    ended = run_nodes(2, 1, place, body)
    assert isinstance(ended[0], Aborted)
    assert "rank 1 ends at step 0: MemoryError: no room" in str(ended[0])
