"""The maximum of all ranks, and what ranks tell: machines without sockets, and what must be found when it is wrong."""

from __future__ import annotations

import pytest

from parallel.control.errors import Cause, Disagreement, MissedDeadline, Verdict
from parallel.control.protocol.follower import Follower
from parallel.control.protocol.max_rounds import MaxRounds
from parallel.control.protocol.states import FollowerInput, FollowerState, LeaderState, Limits
from parallel.control.wire.frames import EVERYONE, MAX_NUMBER, MAX_NUMBERS, Codec, Frame, Kind, Numbers
from tests.parallel.control.bus import Faults, Job, OneCallLeader
from tests.parallel.control.test_agreement import AGREED_STEPS, HARD, LOSSLESS, in_lockstep, run

CODEC = Codec(1, 0, 4)
LIMITS = Limits(deadline=8.0, resend=1.0, divergence=2.0, start=60.0)


def leader(groups: int = 2) -> OneCallLeader:
    """Rank 0 of four, in turn 0."""
    lead = OneCallLeader(CODEC, 1, LIMITS, groups=groups)
    lead.turn(0, 0, b"", 0.0)
    return lead


def acknowledges(lead: OneCallLeader, rank: int, step: int, now: float = 0.0, digest: int = 0) -> None:
    lead.receive(Frame(Kind.ACK, 0, rank, 0, step, digest, b"", None), now)


def proposes(lead: OneCallLeader, rank: int, step: int, *numbers: int, now: float = 0.0) -> None:
    lead.receive(Frame(Kind.PROPOSE, 0, rank, 0, step, 0, b"", Numbers(numbers)), now)


def follower() -> Follower:
    """Rank 1 of four, in turn 0."""
    follow = Follower(CODEC, 1, 1, LIMITS, groups=2)
    follow.turn(0, 0, 0.0)
    follow.outbox.clear()
    return follow


def answered(follow: Follower, step: int, *numbers: int, now: float = 0.0) -> None:
    follow.receive(Frame(Kind.AGREED, 0, EVERYONE, 0, step, 0, b"", Numbers(numbers)), now)


def sent(machine: OneCallLeader | Follower, kind: Kind) -> list[Frame]:
    """The frames of a kind in the outbox, which is empty then."""
    frames = [CODEC.decode(f if isinstance(f, bytes) else f[1]) for f in machine.outbox]
    machine.outbox.clear()
    return [frame for frame in frames if frame.kind is kind]


def disagreement(machine: OneCallLeader) -> Verdict:
    assert machine.verdict is not None
    assert isinstance(machine.verdict.error(), Disagreement)
    return machine.verdict


# ---- the maximum ----


def test_the_answer_comes_with_the_last_proposal_whoever_makes_it() -> None:
    for last in range(4):
        lead = leader()
        for rank in (*(r for r in range(4) if r != last), last):
            assert lead.maximum is None
            assert sent(lead, Kind.AGREED) == []
            if rank == 0:
                lead.propose(0, (3, 0, MAX_NUMBER), 0.0)
                assert lead.state is (LeaderState.RUNNING if last == 0 else LeaderState.AGREEING)
            else:
                proposes(lead, rank, 0, *((3, 0, MAX_NUMBER) if rank < 2 else (1, 7, 0)))
        assert lead.maximum == (3, 7, MAX_NUMBER)
        assert [(f.rank, f.step, f.body) for f in sent(lead, Kind.AGREED)] == [
            (EVERYONE, 0, Numbers((3, 7, MAX_NUMBER)))
        ]
        assert lead.state is LeaderState.RUNNING


def test_a_rank_that_lost_the_answer_gets_it_again_and_only_that_rank() -> None:
    lead = leader()
    lead.propose(0, (), 0.0)
    for rank in (1, 2, 3):
        acknowledges(lead, rank, 0)
        proposes(lead, rank, 0)
    lead.turn(1, 0, b"", 0.0)
    sent(lead, Kind.AGREED)
    proposes(lead, 2, 0)
    (again,) = lead.outbox
    assert (again[0], CODEC.decode(again[1]).body) == (2, Numbers(()))


def test_a_proposal_for_a_coming_turn_waits_for_it() -> None:
    """A rank that did not need to agree in turn 0 may be in turn 1, and propose there, before the leader is."""
    lead = leader()
    for rank in (1, 2, 3):
        acknowledges(lead, rank, 1)
        proposes(lead, rank, 1, rank // 2)
    lead.turn(1, 0, b"", 0.0)
    assert lead.state is LeaderState.RUNNING
    lead.propose(1, (0,), 0.0)
    assert lead.maximum == (1,)


def test_a_follower_takes_the_answer_once_and_asks_again_until_it_comes() -> None:
    follow = follower()
    follow.propose(0, (4,), 0.0)
    assert (follow.state, follow.maximum) == (FollowerState.AGREEING, None)
    assert [frame.body for frame in sent(follow, Kind.PROPOSE)] == [Numbers((4,))]
    follow.tick(0.9)
    assert not follow.outbox
    follow.tick(1.1)
    follow.tick(1.2)
    assert [frame.body for frame in sent(follow, Kind.PROPOSE)] == [Numbers((4,))]
    for _ in range(3):
        answered(follow, 0, 9)
    assert (follow.maximum, follow.state, follow.ignored) == ((9,), FollowerState.PLANNING, 2)
    follow.turn(1, 0, 2.0)
    answered(follow, 0, 9)
    assert (follow.state, follow.verdict) == (FollowerState.WAITING, None)


def test_an_answer_to_nothing_breaks_the_protocol() -> None:
    follow = follower()
    answered(follow, 0, 9)
    assert follow.verdict is not None
    assert follow.verdict.cause is Cause.FRAME
    assert "a maximum of step 0, for which rank 1 proposed nothing" in follow.verdict.text


def test_the_last_turn_agrees_too_and_stays_the_last() -> None:
    job = Job(4, 4, faults=LOSSLESS, groups=2)
    run(job, 3)
    assert all(rank.stopped and len(rank.maxima) == rank.machine.step + 1 for rank in job.ranks)
    job.check()


@pytest.mark.parametrize("before", [True, False])
def test_a_rank_that_is_gone_in_the_last_turn_is_missed_if_its_numbers_are(before: bool) -> None:
    lead = OneCallLeader(CODEC, 1, LIMITS)
    lead.submit_stop()
    lead.turn(0, 0, b"", 0.0)
    lead.turn(1, 0, b"", 0.0)
    for rank in (1, 2, 3):
        acknowledges(lead, rank, 1)
    if before:
        lead.lost(2, 0.0)
    assert (lead.state, lead.verdict) == (LeaderState.STOPPED, None)
    lead.propose(1, (1,), 0.0)
    if not before:
        lead.lost(2, 0.0)
    assert lead.verdict is not None
    assert (lead.verdict.cause, lead.verdict.rank) == (Cause.LOST, 2)


# ---- what does not fit ----


def test_ranks_of_a_group_that_propose_differently_are_named_with_both_values() -> None:
    lead = leader()
    proposes(lead, 2, 0, 5, 0)
    proposes(lead, 3, 0, 5, 1)
    verdict = disagreement(lead)
    assert (verdict.rank, verdict.step) == (3, 0)
    assert "ranks of group 1 disagree on the numbers of step 0" in verdict.text
    assert "rank 2 proposes (5, 0), rank 3 proposes (5, 1)" in verdict.text


@pytest.mark.parametrize("odd", range(4))
def test_of_four_ranks_the_odd_one_is_named_and_waited_for(odd: int) -> None:
    lead = leader(groups=1)
    lead.propose(0, (7 if odd == 0 else 3,), 0.0)
    for rank in (1, 2, 3):
        assert lead.verdict is None
        proposes(lead, rank, 0, 7 if odd == rank else 3)
    assert disagreement(lead).rank == odd


def test_a_contradiction_does_not_wait_for_a_rank_that_hangs() -> None:
    lead = leader(groups=1)
    lead.propose(0, (1,), 0.0)
    proposes(lead, 2, 0, 2, now=1.0)
    lead.tick(2.9)
    assert lead.state is LeaderState.AGREEING
    lead.tick(3.1)
    assert disagreement(lead).rank == 2


def test_different_lengths_are_named_between_groups_too() -> None:
    lead = leader()
    lead.propose(0, (1, 2), 0.0)
    proposes(lead, 1, 0, 1, 2)
    proposes(lead, 3, 0, 1)
    verdict = disagreement(lead)
    assert verdict.rank == 3
    assert "rank 0 proposes (1, 2), rank 3 proposes (1,)" in verdict.text


def test_a_rank_that_goes_on_without_proposing_is_named() -> None:
    lead = leader()
    lead.propose(0, (1,), 0.0)
    acknowledges(lead, 3, 1)
    verdict = disagreement(lead)
    assert (verdict.rank, verdict.step) == (3, 0)
    assert "rank 0 proposes numbers for it, rank 3 goes on to step 1 without" in verdict.text
    early = leader()
    acknowledges(early, 3, 1)
    early.propose(0, (1,), 0.0)
    assert disagreement(early).text == verdict.text


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_proposes_alone_is_named(first: bool) -> None:
    lead = leader()
    acknowledges(lead, 2, 0)
    if first:
        proposes(lead, 2, 0, 1)
    lead.turn(1, 0, b"", 0.0)
    if not first:
        proposes(lead, 2, 0, 1)
    verdict = disagreement(lead)
    assert (verdict.rank, verdict.step) == (2, 0)
    assert "rank 2 proposes numbers for it, rank 0 goes on to step 1 without" in verdict.text


def test_a_rank_that_changes_its_mind_breaks_the_protocol() -> None:
    lead = leader()
    verdicts = []
    for number in (1, 1, 2):
        proposes(lead, 2, 0, number)
        verdicts.append(lead.verdict is not None)
    assert verdicts == [False, False, True]
    assert lead.verdict is not None
    assert (lead.verdict.cause, lead.verdict.rank) == (Cause.FRAME, 2)


def test_a_proposal_far_ahead_breaks_the_protocol() -> None:
    lead = leader()
    proposes(lead, 2, 3, 1)
    assert lead.verdict is not None
    assert lead.verdict.cause is Cause.FRAME
    assert "rank 2 cannot propose for step 3, rank 0 is in 0" in lead.verdict.text


@pytest.mark.parametrize("numbers", [(-1,), (MAX_NUMBER + 1,), (0,) * (MAX_NUMBERS + 1)])
def test_numbers_that_cannot_travel_are_refused_where_they_are_proposed(numbers: tuple[int, ...]) -> None:
    lead, follow = leader(), follower()
    for machine in (lead, follow):
        with pytest.raises(ValueError, match="agree"):
            machine.propose(0, numbers, 0.0)
    assert (lead.state, follow.state) == (LeaderState.RUNNING, FollowerState.PLANNING)


def test_one_maximum_a_turn_and_only_of_that_turn() -> None:
    lead, follow = leader(), follower()
    for machine in (lead, follow):
        with pytest.raises(ValueError, match="agree_max of step 1 in turn 0"):
            machine.propose(1, (1,), 0.0)
        machine.propose(0, (1,), 0.0)
        with pytest.raises(ValueError, match="last of step 0"):
            machine.propose(0, (1,), 0.0)


# ---- time ----


def test_a_rank_that_proposes_late_is_named_and_those_who_wait_are_told() -> None:
    """Over the bus: rank 2 takes no turn any more. Those who wait outlive their own deadlines, and hear who it is."""
    job = Job(1, 4, faults=LOSSLESS, groups=2)
    in_lockstep(job, lambda: job.leader.step == 4)
    while job.leader.verdict is None and job.now < 60.0:
        for each in job.ranks:
            if each.rank != 2 and not each.in_turn and not each.over:
                job.turn(each)
        job.advance(0.1)
    job.advance(0.1)
    (verdict,) = {rank.machine.verdict for rank in job.ranks}
    assert verdict is not None
    assert isinstance(verdict.error(), MissedDeadline)
    assert verdict.rank == 2
    assert "rank 2 did not" in verdict.text


def test_a_rank_in_its_turn_that_does_not_propose_is_late_for_that() -> None:
    lead = leader()
    for rank in (1, 2, 3):
        acknowledges(lead, rank, 0)
    lead.propose(0, (1,), 1.0)
    for rank in (1, 3):
        proposes(lead, rank, 0, 1, now=1.0)
    heard = 0
    for tenth in range(10, 91):
        lead.tick(tenth / 10)
        heard += len(sent(lead, Kind.KEEPALIVE))
    assert (heard, lead.state) == (3, LeaderState.AGREEING)
    lead.tick(9.1)
    assert lead.verdict is not None
    assert lead.verdict.rank == 2
    assert "rank 2 did not propose its numbers for step 0 within 8 s after rank 0" in lead.verdict.text


def test_a_rank_that_still_loads_gets_the_time_of_the_start() -> None:
    lead = leader()
    lead.propose(0, (1,), 0.0)
    verdicts = []
    for now in (59.0, 61.0):
        lead.tick(now)
        verdicts.append(lead.verdict is not None)
    assert verdicts == [False, True]


def test_a_silent_leader_is_named_by_who_waits_for_the_maximum() -> None:
    follow = follower()
    follow.receive(Frame(Kind.KEEPALIVE, 0, EVERYONE, 0, 0, 0, b"", None), 0.0)
    follow.propose(0, (1,), 0.0)
    for _ in range(2):
        follow.tick(7.9)
        follow.receive(Frame(Kind.KEEPALIVE, 0, EVERYONE, 0, 0, 0, b"", None), 7.9)
        follow.tick(15.8)
    assert follow.state is FollowerState.AGREEING
    follow.tick(16.0)
    assert follow.verdict is not None
    assert (follow.verdict.cause, follow.verdict.rank) == (Cause.DEADLINE, 0)
    assert "while rank 1 waits in step 0 for the maximum of all ranks' numbers" in follow.verdict.text


# ---- digests of groups ----


@pytest.mark.parametrize("order", [(2, 3), (3, 2)])
def test_a_group_is_compared_with_its_first_rank_whoever_comes_first(order: tuple[int, int]) -> None:
    lead = leader()
    states = []
    for rank in order:
        acknowledges(lead, rank, 0, digest=70 + rank)
        states.append(lead.state)
    assert states == [LeaderState.RUNNING, LeaderState.DIVERGED]
    asked = sent(lead, Kind.EXPLAIN)
    assert {(frame.rank, frame.digest) for frame in asked} == {(2, 73), (3, 72)}
    lead.tick(2.1)
    text = disagreement(lead).text
    assert f"ranks of group 1 disagree at step 0: rank 3 has digest {73:#018x}, rank 2 has {72:#018x}" in text
    assert "Rank 3 is the odd one" in text


def test_groups_may_be_ahead_of_the_leader_and_differ_from_it() -> None:
    lead = leader()
    for step in (0, 1, 2):
        for rank in (2, 3):
            acknowledges(lead, rank, step, digest=100 + step)
    assert (lead.state, lead.ignored) == (LeaderState.RUNNING, 0)
    acknowledges(lead, 1, 0, digest=5)
    assert lead.state is LeaderState.DIVERGED  # rank 1 is of the leader's group


def test_followers_of_other_groups_do_not_compare_with_the_record() -> None:
    for rank, state in ((1, FollowerState.DIVERGED), (2, FollowerState.PLANNING)):
        follow = Follower(CODEC, rank, 1, LIMITS, groups=2)
        follow.turn(0, 0, 0.0)
        follow.turn(1, 0, 0.0)
        follow.receive(Frame(Kind.RECORD, 0, EVERYONE, 1, 0, 99, b"", None), 0.0)
        assert follow.state is state


# ---- what the tests above must be able to see ----


def seeds_that_notice(faults: Faults, seeds: int = 20) -> int:
    """How many of some jobs end otherwise than with every maximum right."""
    noticed = 0
    for seed in range(seeds):
        job = Job(seed, 4, faults=faults, groups=2)
        try:
            run(job, AGREED_STEPS)
            job.check()
            assert all(rank.stopped for rank in job.ranks)
        except AssertionError:
            noticed += 1
    return noticed


def test_the_machines_as_they_are_pass_what_follows() -> None:
    assert seeds_that_notice(HARD) == seeds_that_notice(LOSSLESS) == 0


def test_a_maximum_over_stale_numbers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that keeps a group's numbers of an earlier step when that group's new ones are late."""
    add = MaxRounds.add
    last: dict[tuple[int, int], tuple[int, ...]] = {}

    def stale(self: MaxRounds, rank: int, step: int, numbers: tuple[int, ...], now: float) -> None:
        before = last.get((id(self), rank), numbers) if rank >= 2 else numbers
        last[id(self), rank] = numbers
        add(self, rank, step, (before + numbers)[: len(numbers)], now)

    monkeypatch.setattr(MaxRounds, "add", stale)
    assert seeds_that_notice(LOSSLESS) == 20


def test_a_maximum_that_waits_for_all_but_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MaxRounds.maximum

    def hasty(self: MaxRounds, step: int) -> tuple[int, ...] | None:
        self.world -= 1
        try:
            return whole(self, step)
        finally:
            self.world += 1

    monkeypatch.setattr(MaxRounds, "maximum", hasty)
    assert seeds_that_notice(LOSSLESS) > 10


def test_an_echo_taken_for_the_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_any(self: Follower, step: int, maximum: tuple[int, ...]) -> None:
        if self.state in (FollowerState.AGREEING, FollowerState.FINISHING):
            self._enter(FollowerInput.AGREED)
            self.maximum = maximum

    monkeypatch.setattr(Follower, "_agree", take_any)
    assert seeds_that_notice(Faults(delay=0.05, twice=0.5)) > 15
