"""The parts of a Leader, each alone: no Leader, no follower, no sockets; frames are read from the shared outbox."""

from __future__ import annotations

import pytest

from parallel.control.errors import Cause, FrameError, IllegalInput
from parallel.control.protocol.divergence import nothing
from parallel.control.protocol.leader_digests import DigestComparison
from parallel.control.protocol.leader_inbox import LeaderInbox
from parallel.control.protocol.leader_max import MaxAgreement
from parallel.control.protocol.leader_status import LeaderStatus
from parallel.control.protocol.states import LeaderInput, LeaderState, Limits
from parallel.control.wire.frames import EVERYONE, Codec, DecisionSummary, Frame, Kind, Numbers

LIMITS = Limits(deadline=4.0, divergence=1.0, start=9.0)


def status(world: int = 4, step: int = 0) -> LeaderStatus:
    made = LeaderStatus(Codec(7, 0, world), LIMITS, 0)
    made.step = step
    return made


def sent(given: LeaderStatus) -> list[tuple[int, Frame]]:
    """What waits in the outbox, which is empty then."""
    frames = [(to, given.codec.decode(frame)) for to, frame in given.outbox]
    given.outbox.clear()
    return frames


def state_of(given: LeaderStatus) -> LeaderState:
    """A function, as mypy believes that an attribute which was compared stays what it was."""
    return given.state


# ---- status ----


def test_the_first_verdict_stays_and_every_rank_hears_it_once() -> None:
    given = status(step=5)
    given.reached[2] = 3
    given.lose(2)
    given.late(1, "did not reach step 4", 4.0)  # legal in ENDED, and says nothing new
    assert state_of(given) is LeaderState.ENDED
    assert given.verdict is not None
    assert (given.verdict.cause, given.verdict.rank, given.verdict.step) == (Cause.LOST, 2, 3)
    assert [(to, frame.kind, frame.body) for to, frame in sent(given)] == [(EVERYONE, Kind.END, given.verdict)]


def test_an_illegal_input_changes_nothing() -> None:
    given = status()
    with pytest.raises(IllegalInput, match="'running' does not take input 'agreed'"):
        given.enter(LeaderInput.AGREED)
    assert (given.state, given.verdict) == (LeaderState.RUNNING, None)


def test_a_rank_may_be_silent_longer_before_its_first_turn() -> None:
    given = status()
    given.reached[1] = 0
    assert [given.deadline_of(rank) for rank in (1, 2)] == [LIMITS.deadline, LIMITS.start]


def test_a_broken_frame_names_its_rank_or_nobody() -> None:
    for rank, who in ((3, "rank 3"), (EVERYONE, "a connected process")):
        given = status()
        given.bad(rank, FrameError("crc", "computed 1"))
        assert given.verdict is not None
        assert given.verdict.text.startswith(f"{who} broke the protocol")


# ---- digests ----


def test_equal_digests_leave_the_state_alone_whoever_comes_first() -> None:
    given = status()
    digests = DigestComparison(given, 1, nothing)
    for rank in (1, 0, 3, 2):
        digests.add(rank, 0, 99, 0.0)
    assert (given.state, sent(given)) == (LeaderState.RUNNING, [])


def test_a_divergence_is_resolved_once_both_sides_explained_themselves() -> None:
    given = status()
    digests = DigestComparison(given, 1, lambda: [(0, 0, "admit", (1, 2), 10), (1, 0, "row", (5,), 99)])
    for rank, digest in ((0, 99), (1, 99), (3, 99), (2, 98)):
        digests.add(rank, 0, digest, 0.0)
    assert state_of(given) is LeaderState.DIVERGED
    assert [(to, frame.kind, frame.digest) for to, frame in sent(given)] == [(2, Kind.EXPLAIN, 99)]
    theirs = (DecisionSummary(0, 0, "admit", 2, (1, 2), 10), DecisionSummary(1, 0, "row", 1, (6,), 98))
    digests.explained(2, 0, 98, theirs, 0.5)
    assert state_of(given) is LeaderState.ENDED
    assert given.verdict is not None
    assert (given.verdict.cause, given.verdict.rank) == (Cause.DISAGREEMENT, 2)
    assert "rank 0 decided row(5) at step 0, rank 2 decided row(6)" in given.verdict.text


def test_a_divergence_ends_by_time_when_a_side_is_silent() -> None:
    given = status()
    digests = DigestComparison(given, 1, nothing)
    digests.add(0, 0, 1, 10.0)
    digests.add(1, 0, 2, 10.0)
    digests.tick(10.9)
    assert state_of(given) is LeaderState.DIVERGED
    digests.tick(11.0)
    assert state_of(given) is LeaderState.ENDED
    assert given.verdict is not None
    assert "rank 1 did not tell its decisions" in given.verdict.text


def test_groups_are_compared_each_within_itself() -> None:
    given = status()
    digests = DigestComparison(given, 2, nothing)
    for rank, digest in ((0, 1), (2, 5), (1, 1), (3, 5)):
        digests.add(rank, 0, digest, 0.0)
    assert (digests.group_size, given.state) == (2, LeaderState.RUNNING)
    digests.add(2, 1, 6, 0.0)
    digests.add(3, 1, 7, 0.0)
    assert state_of(given) is LeaderState.DIVERGED
    assert {to for to, frame in sent(given) if frame.kind is Kind.EXPLAIN} == {2, 3}


# ---- maxima ----


def test_the_maximum_is_sent_to_all_and_again_to_whoever_asks() -> None:
    given = status()
    maxima = MaxAgreement(given, 1, 1)
    maxima.propose(0, (1, 9), 0.0)
    assert (given.state, maxima.maximum) == (LeaderState.AGREEING, None)
    for rank, numbers in ((3, (4, 0)), (1, (2, 2)), (2, (0, 3))):
        maxima.receive(rank, 0, numbers, 0.0)
    assert (given.state, maxima.maximum) == (LeaderState.RUNNING, (4, 9))
    answer = sent(given)
    assert [(to, frame.body) for to, frame in answer] == [(EVERYONE, Numbers((4, 9)))]
    maxima.receive(1, 0, (2, 2), 0.1)
    assert [(to, frame) for to, frame in sent(given)] == [(1, answer[0][1])]
    maxima.forget(0)
    given.reached[1] = 1
    maxima.receive(1, 0, (2, 2), 0.2)
    assert (sent(given), given.ignored) == ([], 1)


def test_the_rank_that_does_not_propose_is_named_by_time() -> None:
    given = status()
    given.reached.update({1: 0, 2: 0, 3: 0})
    maxima = MaxAgreement(given, 1, 1)
    maxima.propose(0, (1,), 0.0)
    maxima.receive(1, 0, (1,), 0.0)
    maxima.receive(3, 0, (1,), 0.0)
    maxima.tick(1.5)
    assert [frame.kind for _, frame in sent(given)] == [Kind.KEEPALIVE]
    maxima.tick(4.1)
    assert given.verdict is not None
    assert (given.verdict.cause, given.verdict.rank) == (Cause.DEADLINE, 2)


def test_a_rank_that_goes_on_without_proposing_contradicts() -> None:
    given = status()
    maxima = MaxAgreement(given, 1, 1)
    maxima.propose(0, (1,), 0.0)
    maxima.began(2, 1)
    assert given.verdict is not None
    assert (given.verdict.cause, given.verdict.rank) == (Cause.DISAGREEMENT, 2)


def test_two_numbers_of_one_group_contradict() -> None:
    given = status()
    maxima = MaxAgreement(given, 1, 4)
    maxima.propose(0, (1,), 0.0)
    for rank, number in ((1, 1), (2, 8), (3, 1)):
        maxima.receive(rank, 0, (number,), 0.0)
    assert given.verdict is not None
    assert (given.verdict.cause, given.verdict.rank) == (Cause.DISAGREEMENT, 2)


# ---- inbox ----


def test_messages_are_taken_in_order_and_acknowledged() -> None:
    given = status()
    inbox = LeaderInbox(given)
    inbox.receive(2, 1, b"second")
    assert not inbox.has_messages(), "the first is missing"
    inbox.receive(2, 0, b"first")
    inbox.receive(1, 0, b"other")
    inbox.post(b"own")
    assert inbox.has_messages()
    assert inbox.take() == [(0, b"own"), (1, b"other"), (2, b"first"), (2, b"second")]
    assert [(to, frame.kind, frame.step) for to, frame in sent(given)] == [
        (1, Kind.MESSAGE_ACK, 1),
        (2, Kind.MESSAGE_ACK, 2),
    ]
    assert (inbox.take(), inbox.has_messages()) == ([], False)


def test_a_message_that_comes_again_is_acknowledged_again() -> None:
    given = status()
    inbox = LeaderInbox(given)
    inbox.receive(1, 0, b"once")
    inbox.receive(1, 0, b"once")
    assert (given.ignored, sent(given)) == (1, []), "not taken yet"
    inbox.take()
    sent(given)
    inbox.receive(1, 0, b"once")
    assert [(to, frame.step) for to, frame in sent(given)] == [(1, 1)]
    assert inbox.take() == []


def test_a_message_beyond_the_window_ends_the_job() -> None:
    given = status()
    LeaderInbox(given).receive(3, 100_000, b"")
    assert given.verdict is not None
    assert (given.verdict.cause, given.verdict.rank) == (Cause.FRAME, 3)
