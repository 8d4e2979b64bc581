"""A Leader alone: no follower, no sockets; frames are read from its outbox."""

from __future__ import annotations

import pytest

from parallel.control.errors import Cause, FrameError, IllegalInput
from parallel.control.protocol.divergence import nothing
from parallel.control.protocol.states import LeaderInput, LeaderState, Limits
from parallel.control.wire.frames import EVERYONE, Body, Codec, Decisions, DecisionSummary, Frame, Kind, Numbers
from tests.parallel.control.bus import OneCallLeader

LIMITS = Limits(deadline=4.0, divergence=1.0, start=9.0)


def leader(world: int = 4, turns: int = 0, groups: int = 1) -> OneCallLeader:
    made = OneCallLeader(Codec(7, 0, world), 1, LIMITS, nothing, groups=groups)
    for step in range(turns):
        made.turn(step, 99, b"", 0.0)
    made.outbox.clear()
    return made


def send(
    to: OneCallLeader, kind: Kind, rank: int, step: int = 0, digest: int = 0, now: float = 0.0, body: Body | None = None
) -> None:
    to.receive(Frame(kind, 0, rank, 0, step, digest, b"", body), now)


def said(given: OneCallLeader, rank: int, number: int, payload: bytes) -> None:
    given.receive(Frame(Kind.MESSAGE, 0, rank, 0, number, 0, payload, None), 0.0)


def sent(given: OneCallLeader) -> list[tuple[int, Frame]]:
    """What waits in the outbox, which is empty then."""
    frames = [(to, given.codec.decode(frame)) for to, frame in given.outbox]
    given.outbox.clear()
    return frames


def state_of(given: OneCallLeader) -> LeaderState:
    """A function, as mypy believes that an attribute which was compared stays what it was."""
    return given.state


# ---- state and verdict ----


def test_the_first_verdict_stays_and_every_rank_receives_it_once() -> None:
    given = leader(turns=1)
    given.reached[2] = 0
    given.lost(2, 0.0)
    given.stalled((1,))  # legal in ENDED, and says nothing new
    assert state_of(given) is LeaderState.ENDED
    assert given.verdict is not None
    assert (given.verdict.cause, given.verdict.rank, given.verdict.step) == (Cause.LOST, 2, 0)
    assert [(to, frame.kind, frame.body) for to, frame in sent(given)] == [(EVERYONE, Kind.END, given.verdict)]


def test_an_illegal_input_changes_nothing() -> None:
    given = leader()
    with pytest.raises(IllegalInput, match="'running' does not take input 'agreed'"):
        given.enter(LeaderInput.AGREED)
    assert (given.state, given.verdict) == (LeaderState.RUNNING, None)


def test_a_rank_may_be_silent_longer_before_its_first_turn() -> None:
    given = leader()
    given.reached[1] = 0
    assert [given.deadline_of(rank) for rank in (1, 2)] == [LIMITS.deadline, LIMITS.start]


def test_a_broken_frame_names_its_rank_or_none() -> None:
    for rank, who in ((3, "rank 3"), (EVERYONE, "a connected process")):
        given = leader()
        given.bad(rank, FrameError("crc", "computed 1"))
        assert given.verdict is not None
        assert given.verdict.text.startswith(f"{who} broke the protocol")


# ---- digests ----


def test_equal_digests_leave_the_state_alone_in_any_order_of_ranks() -> None:
    given = leader()
    send(given, Kind.ACK, 1, 0, 99)
    given.turn(0, 99, b"", 0.0)
    sent(given)
    for rank in (3, 2):
        send(given, Kind.ACK, rank, 0, 99)
    assert (given.state, sent(given)) == (LeaderState.RUNNING, [])


def test_a_divergence_is_resolved_once_both_sides_sent_their_decisions() -> None:
    given = leader(turns=1)
    given.recent = lambda: [(0, 0, "admit", (1, 2), 10), (1, 0, "row", (5,), 99)]
    for rank, digest in ((1, 99), (3, 99), (2, 98)):
        send(given, Kind.ACK, rank, 0, digest)
    assert state_of(given) is LeaderState.DIVERGED
    assert [(to, frame.kind, frame.digest) for to, frame in sent(given)] == [(2, Kind.EXPLAIN, 99)]
    theirs = (DecisionSummary(0, 0, "admit", 2, (1, 2), 10), DecisionSummary(1, 0, "row", 1, (6,), 98))
    send(given, Kind.DECISIONS, 2, 0, 98, 0.5, Decisions(theirs))
    assert state_of(given) is LeaderState.ENDED
    assert given.verdict is not None
    assert (given.verdict.cause, given.verdict.rank) == (Cause.DISAGREEMENT, 2)
    assert "rank 0 decided row(5) at step 0, rank 2 decided row(6)" in given.verdict.text


def test_a_divergence_ends_by_time_when_a_side_is_silent() -> None:
    given = leader(turns=1)
    send(given, Kind.ACK, 1, 0, 2, 10.0)
    given.tick(10.9)
    assert state_of(given) is LeaderState.DIVERGED
    given.tick(11.0)
    assert state_of(given) is LeaderState.ENDED
    assert given.verdict is not None
    assert "rank 1 did not tell its decisions" in given.verdict.text


def test_groups_are_compared_each_within_itself() -> None:
    given = leader(turns=1, groups=2)
    for rank, digest in ((2, 5), (1, 99), (3, 5)):
        send(given, Kind.ACK, rank, 0, digest)
    assert (given.state, sent(given)) == (LeaderState.RUNNING, [])
    send(given, Kind.ACK, 2, 1, 6)
    send(given, Kind.ACK, 3, 1, 7)
    assert state_of(given) is LeaderState.DIVERGED
    assert {to for to, frame in sent(given) if frame.kind is Kind.EXPLAIN} == {2, 3}


# ---- maxima ----


def propose(given: OneCallLeader, rank: int, *numbers: int, now: float = 0.0) -> None:
    send(given, Kind.PROPOSE, rank, 0, now=now, body=Numbers(numbers))


def test_the_maximum_is_sent_to_all_and_again_to_a_rank_that_asks() -> None:
    given = leader(turns=1, groups=4)
    given.propose(0, (1, 9), 0.0)
    assert (given.state, given.maximum) == (LeaderState.AGREEING, None)
    for rank, numbers in ((3, (4, 0)), (1, (2, 2)), (2, (0, 3))):
        propose(given, rank, *numbers)
    assert (state_of(given), given.maximum) == (LeaderState.RUNNING, (4, 9))
    answer = sent(given)
    assert [(to, frame.body) for to, frame in answer] == [(EVERYONE, Numbers((4, 9)))]
    propose(given, 1, 2, 2, now=0.1)
    assert [(to, frame) for to, frame in sent(given)] == [(1, answer[0][1])]
    for step in (1, 2, 3):
        given.reached.update(dict.fromkeys((1, 2, 3), step))
        given.turn(step, 99, b"", 0.0)  # all ranks took record 0: its answer is forgotten
    sent(given)
    propose(given, 1, 2, 2, now=0.2)
    assert (sent(given), given.ignored) == ([], 1)


def test_the_rank_that_does_not_propose_is_named_by_time() -> None:
    given = leader(turns=1, groups=4)
    given.reached.update({1: 0, 2: 0, 3: 0})
    given.propose(0, (1,), 0.0)
    propose(given, 1, 1)
    propose(given, 3, 1)
    given.tick(1.5)
    assert [frame.kind for _, frame in sent(given)] == [Kind.KEEPALIVE]
    given.tick(4.1)
    assert given.verdict is not None
    assert (given.verdict.cause, given.verdict.rank) == (Cause.DEADLINE, 2)


def test_a_rank_that_begins_a_turn_without_proposing_contradicts() -> None:
    given = leader(turns=1, groups=4)
    given.propose(0, (1,), 0.0)
    send(given, Kind.ACK, 2, 1, 99)
    assert given.verdict is not None
    assert (given.verdict.cause, given.verdict.rank) == (Cause.DISAGREEMENT, 2)


def test_two_numbers_of_one_group_contradict() -> None:
    given = leader(turns=1)
    given.propose(0, (1,), 0.0)
    for rank, number in ((1, 1), (2, 8), (3, 1)):
        propose(given, rank, number)
    assert given.verdict is not None
    assert (given.verdict.cause, given.verdict.rank) == (Cause.DISAGREEMENT, 2)


# ---- messages ----


def test_messages_are_taken_in_order_and_acknowledged() -> None:
    given = leader()
    said(given, 2, 1, b"second")
    assert not given.inbox.has_messages(), "the first is missing"
    said(given, 2, 0, b"first")
    said(given, 1, 0, b"other")
    given.inbox.post(b"own")
    assert given.inbox.has_messages()
    assert given.inbox.take() == [(0, b"own"), (1, b"other"), (2, b"first"), (2, b"second")]
    assert [(to, frame.kind, frame.step) for to, frame in sent(given)] == [
        (1, Kind.MESSAGE_ACK, 1),
        (2, Kind.MESSAGE_ACK, 2),
    ]
    assert (given.inbox.take(), given.inbox.has_messages()) == ([], False)


def test_a_message_that_comes_again_is_acknowledged_again() -> None:
    given = leader()
    said(given, 1, 0, b"once")
    said(given, 1, 0, b"once")
    assert (given.ignored, sent(given)) == (1, []), "not taken yet"
    given.inbox.take()
    sent(given)
    said(given, 1, 0, b"once")
    assert [(to, frame.step) for to, frame in sent(given)] == [(1, 1)]
    assert given.inbox.take() == []


def test_a_message_beyond_the_window_ends_the_job() -> None:
    given = leader()
    said(given, 3, 100_000, b"")
    assert given.verdict is not None
    assert (given.verdict.cause, given.verdict.rank) == (Cause.FRAME, 3)
