"""The handshake machines without sockets: who is the same may start, who differs is refused by name on both sides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parallel.control.errors import Cause, FrameError, HandshakeRefused
from parallel.control.protocol.handshake import CHANNELS, FollowerHandshake, Greeting, Identity, LeaderHandshake
from parallel.control.wire.frames import EVERYONE, Kind, Probe, Start

IDENTITY = Identity(job=11, epoch=0, world=3, horizon=2, config="c0", model="m0", code="x0")


def follower(rank: int, channel: str = "step", identity: Identity = IDENTITY) -> FollowerHandshake:
    return FollowerHandshake(identity, rank, identity.hello(channel, (rank,), "host", 100 + rank))


def leader(identity: Identity = IDENTITY) -> LeaderHandshake[str]:
    return LeaderHandshake(identity, 0, {1: (1,), 2: (2,)})


def converse(
    lead: LeaderHandshake[str], follow: FollowerHandshake, connection: str, skew_ns: int = 0, latency_ns: int = 50
) -> None:
    """All messages of one connection until the follower is ready or refused; one way takes ``latency_ns``."""
    now = 1_000_000
    to_leader = [follow.begin()]
    while to_leader:
        now += latency_ns
        to_follower = [reply for frame in to_leader for reply in lead.receive(connection, frame, now)]
        now += latency_ns
        to_leader = [reply for frame in to_follower for reply in follow.receive(frame, now + skew_ns)]


def test_ranks_that_are_the_same_start_together() -> None:
    lead = leader()
    follows = {(channel, rank): follower(rank, channel) for channel in CHANNELS for rank in (1, 2)}
    for i, (key, follow) in enumerate(follows.items()):
        assert len(lead.missing) == 4 - i
        converse(lead, follow, f"{key}", skew_ns=-3_600_000_000_000 * key[1])
        assert follow.state is Greeting.READY
    frame = lead.start(lead.offset_ns)
    for follow in follows.values():
        assert follow.receive(frame, 0) == []
        assert follow.state is Greeting.STARTED
        assert follow.offsets_ns == (0, 3_600_000_000_000, 7_200_000_000_000)
        assert follow.round_trip_ns == 100
    assert lead.connections == {key: f"{key}" for key in follows}


def test_the_start_waits_for_everybody() -> None:
    lead = leader()
    converse(lead, follower(1), "a")
    assert lead.missing == (("watch", 1), ("step", 2), ("watch", 2))
    with pytest.raises(ValueError, match="missing"):
        lead.start({})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("job", 12),
        ("epoch", 1),
        ("world", 4),
        ("horizon", 1),
        ("groups", 3),
        ("config", "c1"),
        ("model", "m1"),
        ("code", "x1"),
    ],
)
def test_what_differs_is_named_with_both_values_on_both_sides(field: str, value: Any) -> None:
    lead, follow = leader(), follower(2, identity=replace(IDENTITY, **{field: value}))
    converse(lead, follow, "a")
    ours = getattr(IDENTITY, field)
    said = f"rank 2 differs from rank 0 in {field}: rank 0 has {ours!r}, rank 2 has {value!r}"
    assert follow.state is Greeting.REFUSED
    for verdict in (lead.verdict, follow.verdict):
        assert verdict is not None
        assert isinstance(verdict.error(), HandshakeRefused)
        assert (verdict.cause, verdict.rank) == (Cause.REFUSED, 2)
        assert said in verdict.text
    assert lead.verdict == follow.verdict


def test_of_many_options_those_that_differ_are_told() -> None:
    ours = "model=/a folder/x tensor_parallel=2 speculative_config={'k': 'a b'} chain_depth=0 seed=0"
    lead = leader(identity=replace(IDENTITY, config=ours))
    follow = follower(2, identity=replace(IDENTITY, config=ours.replace("depth=0", "depth=2").replace("a b", "a c")))
    converse(lead, follow, "a")
    for verdict in (lead.verdict, follow.verdict):
        assert verdict is not None
        assert (
            "differs from rank 0 in config: rank 0 has \"speculative_config={'k': 'a b'} chain_depth=0\", rank 2 has "
            "\"speculative_config={'k': 'a c'} chain_depth=2\"; give every rank the same options"
        ) in verdict.text
    without = ours.removesuffix(" seed=0")
    lead, follow = (
        leader(identity=replace(IDENTITY, config=ours)),
        follower(1, identity=replace(IDENTITY, config=without)),
    )
    converse(lead, follow, "a")
    assert lead.verdict is not None
    assert "rank 0 has 'seed=0', rank 1 has ''" in lead.verdict.text
    lead = leader(identity=replace(IDENTITY, config="seed=0 depth=2"))
    converse(lead, follower(1, identity=replace(IDENTITY, config="depth=2 seed=0")), "a")
    assert lead.verdict is not None
    assert "rank 0 has 'seed=0 depth=2', rank 1 has 'depth=2 seed=0'" in lead.verdict.text


def test_another_protocol_version_is_named_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = follower(1)
    with monkeypatch.context() as patch:
        patch.setattr("parallel.control.wire.frames.VERSION", 9)
        hello = follow.begin()
    lead = leader()
    (end,) = lead.receive("a", hello, 0)
    with monkeypatch.context() as patch:
        patch.setattr("parallel.control.wire.frames.VERSION", 9)
        assert follow.receive(end, 0) == []
    assert lead.verdict == follow.verdict
    assert lead.verdict is not None
    assert "rank 1 differs from rank 0 in version: rank 0 has 2, rank 1 has 9" in lead.verdict.text


def test_a_rank_without_a_place_is_refused() -> None:
    lead, follow = leader(), follower(0)
    converse(lead, follow, "a")
    assert lead.verdict is not None
    assert "rank 0 has 'a place for [1, 2]', rank 0 has 0" in lead.verdict.text


def test_a_rank_that_comes_twice_is_refused() -> None:
    lead, second = leader(), follower(1)
    converse(lead, follower(1), "a")
    converse(lead, second, "b")
    assert second.verdict is not None
    assert second.verdict == lead.verdict
    assert "rank 0 has 'rank 1 already', rank 1 has '1 again, pid 101 on host'" in second.verdict.text


def test_a_connection_that_speaks_for_other_ranks_is_refused() -> None:
    lead = leader()
    follow = FollowerHandshake(IDENTITY, 1, IDENTITY.hello("step", (1, 2), "host", 1))
    converse(lead, follow, "a")
    assert lead.verdict is not None
    assert "differs from rank 0 in covers: rank 0 has (1,), rank 1 has (1, 2)" in lead.verdict.text


def test_a_rank_whose_connection_broke_may_come_again() -> None:
    lead = leader()
    converse(lead, follower(1), "a")
    lead.lost("a")
    again = follower(1)
    converse(lead, again, "b")
    assert (again.state, lead.verdict) == (Greeting.READY, None)


def test_frames_out_of_order_change_nothing() -> None:
    lead = leader()
    codec = IDENTITY.codec()
    with pytest.raises(FrameError, match="PROBE in handshake state new, where HELLO is legal"):
        lead.receive("a", codec.encode(Kind.PROBE, 1, body=Probe(1, 0)), 0)
    converse(lead, follower(1), "a")
    with pytest.raises(FrameError, match="HELLO in handshake state ready, where START, END is legal"):
        lead.receive("a", follower(1).begin(), 0)
    for kind in (Kind.ACK, Kind.RECORD, Kind.BYE):
        with pytest.raises(FrameError, match="refused at order"):
            lead.receive("c", codec.encode(kind, 1), 0)
    assert lead.verdict is None
    assert ("step", 1) not in lead.missing
    follow = follower(2)
    follow.begin()
    with pytest.raises(FrameError, match="START in handshake state greeted"):
        follow.receive(codec.encode(Kind.START, EVERYONE, body=Start((0, 0, 0))), 0)


def test_junk_is_not_answered() -> None:
    lead = leader()
    for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(200), follower(1).begin()[:-1]):
        with pytest.raises(FrameError):
            lead.receive("a", junk, 0)
    with pytest.raises(FrameError, match="HELLO for channel 'gossip'"):
        lead.receive("a", follower(1, "gossip").begin(), 0)
    converse(lead, follower(1), "b")
    assert lead.verdict is None
    assert ("step", 1) in lead.connections
