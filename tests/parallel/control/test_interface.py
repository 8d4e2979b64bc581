"""Control planes over real Unix sockets: agreement, the idle wait, the agreed stop, and every way to end by name."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallel.control.errors import (
    Aborted,
    BadPeer,
    Cause,
    ControlError,
    Disagreement,
    HandshakeRefused,
    LostPeer,
    MissedDeadline,
)
from parallel.control.follower_plane import FollowerPlane
from parallel.control.interface import ControlPlane, SingleRankControl
from parallel.control.leader_plane import LeaderPlane
from parallel.control.protocol.states import Limits
from parallel.control.transport.uds import PACKET, connect, socket_path
from parallel.control.transport.uds_links import UdsFollowerLink
from parallel.control.wire.frames import Codec, Kind
from runtime.schedule.digest import RollingDigest
from tests.parallel.control.ranks import IDENTITY, LIMITS, PATIENCE_S, identity_of, run_ranks, short_folder, take_turns


@pytest.fixture
def place() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder / "control"


def errors(ended: Mapping[int, object]) -> dict[int, ControlError]:
    for what in ended.values():
        assert isinstance(what, ControlError), repr(what)
    return {rank: what for rank, what in ended.items() if isinstance(what, ControlError)}


@pytest.mark.parametrize(("world", "horizon"), [(2, 0), (2, 1), (2, 3), (4, 0), (4, 2)])
def test_every_rank_gets_the_same_events_in_the_same_turn(place: Path, world: int, horizon: int) -> None:
    rng = random.Random(world)
    submitted = [rng.randbytes(rng.randrange(40)) if rng.random() < 0.5 else b"" for _ in range(300)]
    ended = run_ranks(world, place, lambda plane: take_turns(plane, submitted), horizon=horizon)
    expected = [b""] * horizon + submitted + [b""]
    assert ended == dict.fromkeys(range(world), expected)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("wanted", [0, 3])
def test_all_ranks_agree_on_the_horizon_that_the_leader_chose_from_measured_round_trips(
    place: Path, wanted: int
) -> None:
    """What follows runs with it, and messages of the engines are not mixed up with those that were timed."""
    submitted, hops = [b"%d" % step for step in range(20)], []

    def choose(hop_s: float) -> int:
        hops.append(hop_s)
        return wanted

    def body(plane: ControlPlane) -> list[bytes]:
        assert plane.agree_horizon(choose) == plane.horizon == wanted
        assert plane.take_messages() == []
        return take_turns(plane, submitted)

    limits = replace(LIMITS, resend=PATIENCE_S / 2)
    ended = run_ranks(3, place, body, horizon=0, limits=limits)
    assert ended == dict.fromkeys(range(3), [b""] * wanted + submitted + [b""])
    (hop_s,) = hops
    assert 0.0 < hop_s < limits.resend / 2, "nothing was sent twice"


def test_events_larger_than_any_socket_buffer_do_not_stop_the_leader(place: Path) -> None:
    """Ranks in lockstep as under serial collectives: nobody begins a turn before all finished the one before."""
    world = 3
    barrier = threading.Barrier(world)
    submitted = [b"", b"x" * (12 << 20), b"y" * PACKET, b"", b"z" * (5 << 20), b""]

    def body(plane: ControlPlane) -> list[int]:
        sizes = []
        for step, payload in enumerate([*submitted, b""]):
            sizes.append(len(plane.exchange(step, step, payload if plane.rank == 0 else b"")))
            barrier.wait(PATIENCE_S)
        if plane.rank == 0:
            plane.stop()
        plane.exchange(len(submitted) + 1, 0)
        plane.exchange(len(submitted) + 2, 0)
        return sizes

    ended = run_ranks(world, place, body)
    assert ended == {rank: [0, *map(len, submitted)] for rank in range(world)}


def test_a_record_leaves_before_its_leader_looks_at_anything_else(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may be waiting for it; what they said can be read after it was sent."""
    order: list[str] = []

    def noting(owner: object, name: str) -> None:
        method = getattr(owner, name)

        def noted(*given: Any) -> Any:
            order.append(name)
            return method(*given)

        monkeypatch.setattr(owner, name, noted)

    def body(plane: ControlPlane) -> list[bytes]:
        if isinstance(plane, LeaderPlane):
            noting(plane.link, "broadcast")
            noting(plane.link, "receive")
            noting(plane.machine, "look_back")
        return take_turns(plane, [b"an event"])

    ended = run_ranks(2, place, body)
    assert ended[0] == ended[1] == [b"", b"an event", b""]
    assert order[:3] == ["broadcast", "look_back", "receive"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("horizon", 2), ("config", "c1"), ("model", "m1"), ("code", "x1")],
)
def test_a_rank_that_differs_is_refused_on_every_rank(place: Path, field: str, value: Any) -> None:
    odd = replace(identity_of(3), **{field: value})
    found = errors(run_ranks(3, place, lambda plane: take_turns(plane, []), odd={2: odd}))
    said = f"rank 2 differs from rank 0 in {field}: rank 0 has {getattr(identity_of(3), field)!r}, rank 2 has {value!r}"
    assert len(found) == 3
    for error in found.values():
        assert isinstance(error, HandshakeRefused)
        assert said in str(error)


def test_ranks_that_do_not_come_are_named(place: Path) -> None:
    limits = replace(LIMITS, start=1.0, divergence=0.5)
    found = errors(run_ranks(4, place, lambda plane: take_turns(plane, []), limits=limits, absent=(1, 3)))
    assert isinstance(found[0], MissedDeadline)
    assert "ranks [1, 3] did not finish the handshake within 1 s" in str(found[0])
    assert str(found[2]) == str(found[0])


def test_a_leader_that_does_not_come_is_named(place: Path) -> None:
    found = errors(
        run_ranks(
            2,
            place,
            lambda plane: take_turns(plane, []),
            limits=replace(LIMITS, start=0.2, divergence=0.1),
            absent=(0,),
        )
    )
    assert isinstance(found[1], MissedDeadline)
    assert "rank 0 did not come to the handshake: nobody listens at control socket" in str(found[1])


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_decides_differently_ends_all_with_both_decisions(place: Path, culprit: int) -> None:
    reached = [0, 0, 0]

    def body(plane: ControlPlane) -> None:
        digest = RollingDigest()
        plane.explain_with(digest.recent)
        for step in range(50):
            while plane.rank == 0 and min(reached[1:]) < step - 1:  # collectives keep the leader from running ahead
                time.sleep(0.0002)
            reached[plane.rank] = step
            plane.exchange(step, digest.value)
            digest.fold(step, "plan", (step, 4 if (plane.rank, step) == (culprit, 20) else 3))

    found = errors(run_ranks(3, place, body))
    assert len({str(error) for error in found.values()}) == 1
    for error in found.values():
        assert isinstance(error, Disagreement)
        assert (error.verdict.rank, error.verdict.step) == (culprit, 21)
        assert "plan(20, 3) at step 20" in str(error)
        assert "plan(20, 4) at step 20" in str(error)


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_whose_connection_closes_is_named(place: Path, gone: int) -> None:
    def body(plane: ControlPlane) -> None:
        for step in range(1000):
            if plane.rank == gone and step == 10:
                assert isinstance(plane, LeaderPlane | FollowerPlane)
                plane.link.close()  # what the kernel does when a process dies
                plane._closed = True
                assert plane.watch is not None
                plane.watch.close()
                return
            plane.exchange(step, step)
            time.sleep(0.001)

    ended = run_ranks(3, place, body)
    assert ended.pop(gone) is None
    for error in errors(ended).values():
        assert isinstance(error, LostPeer)
        assert error.verdict.rank == gone
        assert f"rank {gone} is gone" in str(error)


@pytest.mark.parametrize("first", [0, 1])
def test_an_exception_of_one_rank_ends_all_with_its_reason(place: Path, first: int) -> None:
    def body(plane: ControlPlane) -> None:
        for step in range(1000):
            if plane.rank == first and step == 7:
                raise MemoryError("no room for 12 blocks")
            plane.exchange(step, step)
            time.sleep(0.001)

    ended = run_ranks(3, place, body)
    assert isinstance(ended.pop(first), MemoryError)
    for error in errors(ended).values():
        assert isinstance(error, Aborted)
        assert error.verdict.rank == first
        assert f"rank {first} ends at step 6: MemoryError: no room for 12 blocks" in str(error)


def test_a_rank_that_stands_still_is_named(place: Path) -> None:
    limits = Limits(deadline=0.4, resend=0.1, divergence=0.1, spin=0.0, start=PATIENCE_S)
    release = threading.Event()

    def body(plane: ControlPlane) -> None:
        try:
            for step in range(1000):
                if plane.rank == 2 and step == 5:
                    release.wait(PATIENCE_S)
                plane.exchange(step, step)
                time.sleep(0.002)
        finally:
            if plane.rank == 0:
                release.set()

    found = errors(run_ranks(3, place, body, limits=limits))
    for error in found.values():
        assert isinstance(error, MissedDeadline)
        assert error.verdict.rank == 2
        assert "rank 2 did not reach step 5 within 0.4 s" in str(error)


def test_a_silent_leader_is_named_by_its_followers(place: Path) -> None:
    limits = Limits(deadline=0.3, resend=0.1, divergence=0.1, spin=0.0, start=PATIENCE_S)
    given_up = threading.Barrier(3)

    def body(plane: ControlPlane) -> None:
        try:
            for step in range(10_000):
                if plane.rank == 0 and step == 3:
                    given_up.wait(PATIENCE_S)
                plane.exchange(step, step)
        except MissedDeadline:
            if plane.rank != 0:
                given_up.wait(PATIENCE_S)
            raise

    found = errors(run_ranks(3, place, body, limits=limits))
    for rank in (1, 2):
        assert isinstance(found[rank], MissedDeadline)
        assert found[rank].verdict.rank == 0
        assert f"rank 0 was silent for more than 0.3 s while rank {rank} waits in step" in str(found[rank])
    assert str(found[0]) in (str(found[1]), str(found[2]))  # it was only slow, and hears of it


def test_an_idle_job_outlives_its_deadlines_without_burning_a_core(place: Path) -> None:
    limits = Limits(deadline=0.4, resend=0.1, divergence=0.1, spin=50e-6, start=PATIENCE_S)
    work = threading.Event()

    def body(plane: ControlPlane) -> float:
        busy = time.thread_time()
        step = 0
        while not plane.stopped:
            if plane.wait_for_events(work.wait) and plane.rank == 0 and not plane.pending:
                plane.stop()
            plane.exchange(step, 7)
            step += 1
        return time.thread_time() - busy

    threading.Timer(1.5, work.set).start()  # several deadlines later
    ended = run_ranks(3, place, body, limits=limits)
    for seconds in ended.values():
        assert isinstance(seconds, float)
        assert seconds < 0.5


def test_waiting_can_time_out(place: Path) -> None:
    def body(plane: ControlPlane) -> list[bool]:
        woken = [plane.wait_for_events(threading.Event().wait, 0.05)] if plane.rank == 0 else []
        take_turns(plane, [])
        return woken

    assert run_ranks(2, place, body) == {0: [False], 1: []}


def test_followers_may_neither_submit_nor_stop(place: Path) -> None:
    def body(plane: ControlPlane) -> None:
        if plane.rank == 1:
            with pytest.raises(ValueError, match="rank 1 is no leader and cannot submit events"):
                plane.exchange(0, 0, b"me too")
            with pytest.raises(ValueError, match="rank 1 is no leader and cannot stop the job"):
                plane.stop()
        take_turns(plane, [])

    assert run_ranks(2, place, body) == {0: None, 1: None}


def test_10000_junk_frames_at_the_listener_and_the_engine_still_answers(place: Path) -> None:
    """Strangers of the same user talk to the socket while the ranks meet; none of it is read, nobody is hurt."""
    path = socket_path(place, IDENTITY.job, IDENTITY.epoch, "node0")
    rng = random.Random(2)
    codec = identity_of(2).codec()
    hello = codec.encode(Kind.HELLO, 1, body=identity_of(2).hello("step", (1,), "host", 1))
    sent = 0

    def strangers() -> None:
        nonlocal sent
        while sent < 10_000:
            stranger = connect(path, time.monotonic() + PATIENCE_S)
            for _ in range(64):
                match rng.randrange(5):
                    case 0:
                        junk = rng.randbytes(rng.randrange(1, 300))
                    case 1:
                        at = rng.randrange(len(hello))
                        junk = hello[:at] + bytes([hello[at] ^ 1 << rng.randrange(8)]) + hello[at + 1 :]
                    case 2:
                        junk = hello[: rng.randrange(1, len(hello))]
                    case 3:
                        junk = codec.encode(Kind.RECORD, 1, rng.randrange(99), payload=rng.randbytes(30))
                    case _:
                        junk = rng.randbytes(PACKET) + b"!" if sent % 50 == 0 else b"LSCP" + rng.randbytes(60)
                try:
                    stranger.socket.send(junk)
                except OSError:
                    break
                sent += 1
            stranger.close()

    def late_rank(plane: ControlPlane) -> list[bytes]:
        return take_turns(plane, [b"a", b"b"])

    leader = threading.Thread(target=strangers)
    leader.start()
    second: dict[int, object] = {}

    def follower() -> None:
        leader.join()
        second.update(run_ranks(2, place, late_rank, absent=(0,)))

    other = threading.Thread(target=follower)
    other.start()
    first = run_ranks(2, place, late_rank, absent=(1,))
    other.join()
    assert sent >= 10_000
    assert {**first, **second} == {rank: [b"", b"a", b"b", b""] for rank in range(2)}


def test_junk_on_an_established_connection_ends_the_job_by_name(place: Path) -> None:
    """Only a rank can send there, so this is a broken rank: every mangled frame is refused, none is acted on."""
    rng = random.Random(3)
    for case in range(12):
        good = identity_of(3).codec().encode(Kind.ACK, 1, 3, 3)
        other = Codec(1, 0, 3).encode(Kind.ACK, 1, 3, 3)
        spoofed = identity_of(3).codec().encode(Kind.ACK, 2, 3, 3)
        wrong_kind = identity_of(3).codec().encode(Kind.WELCOME, 1)
        mangled = bytearray(good)
        mangled[rng.randrange(48)] ^= 0x40
        junk = [good[:47], other, spoofed, wrong_kind, bytes(mangled), rng.randbytes(70), rng.randbytes(PACKET + 1)][
            case % 7
        ]

        def body(plane: ControlPlane, junk: bytes = junk) -> None:
            for step in range(2000):
                if plane.rank == 1 and step == 3:
                    assert isinstance(plane, FollowerPlane)
                    assert isinstance(plane.link, UdsFollowerLink)
                    plane.link.send(junk) if len(junk) <= PACKET else plane.link.connection.socket.send(junk)
                plane.exchange(step, step)
                time.sleep(0.001)

        found = errors(run_ranks(3, place, body))
        for error in found.values():
            assert isinstance(error, BadPeer), f"case {case}: {error}"
            assert error.verdict.rank == 1
            assert "rank 1 broke the protocol: control frame refused at" in str(error)


def test_a_world_of_one_agrees_with_itself() -> None:
    with SingleRankControl(horizon=2) as plane:
        assert take_turns(plane, [b"a", b"b"]) == [b"", b"", b"a", b"b", b""]
        with pytest.raises(ValueError, match="turn 5 after the agreed stop"):
            plane.exchange(5, 0)
    with SingleRankControl() as plane:
        assert plane.exchange(0, 0, b"now") == b"now"
        assert not plane.pending
        assert plane.wait_for_events(lambda seconds: True)
        assert not plane.wait_for_events(lambda seconds: False, timeout=0.01)
        with pytest.raises(ValueError, match="turn 2 after turn 0"):
            plane.exchange(2, 0)


def test_closing_early_is_told(place: Path) -> None:
    def body(plane: ControlPlane) -> None:
        for step in range(1000):
            if plane.rank == 1 and step == 4:
                return
            plane.exchange(step, step)
            time.sleep(0.001)

    ended = run_ranks(2, place, body)
    assert isinstance(ended[0], Aborted)
    assert ended[0].verdict.cause is Cause.ABORTED
    assert "rank 1 ends at step 3: it closed its control plane before an agreed stop" in str(ended[0])


def open_descriptors() -> dict[int, str]:
    """Number and target of every open descriptor: a socket's target is its own."""
    found = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def test_nothing_of_the_network_is_touched(place: Path) -> None:
    before = set(open_descriptors().values())  # another test of this process may have left a socket

    def body(plane: ControlPlane) -> set[int]:
        assert isinstance(plane, LeaderPlane | FollowerPlane)
        found = set()
        for descriptor in (number for number, target in open_descriptors().items() if target not in before):
            try:
                sock = socket.socket(fileno=os.dup(descriptor))
            except OSError:
                continue
            with sock:
                found.add(int(sock.family))
        take_turns(plane, [])
        return found

    ended = run_ranks(2, place, body)
    for families in ended.values():
        assert isinstance(families, set)
        assert socket.AF_UNIX in families
        assert not families & {int(socket.AF_INET), int(socket.AF_INET6)}
