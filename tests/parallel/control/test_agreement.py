"""Leader and follower machines back to back: no divergence whatever the bus does, and every fault has a name."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from parallel.control.errors import Aborted, Cause, Disagreement, IllegalInput, LostPeer
from parallel.control.protocol.follower import Follower
from parallel.control.protocol.states import (
    FOLLOWER_TABLE,
    LEADER_TABLE,
    FollowerInput,
    FollowerState,
    LeaderInput,
    LeaderState,
    Limits,
    following,
)
from parallel.control.wire.frames import Codec, Decisions, Frame, Kind
from tests.parallel.control.bus import Faults, Job, OneCallLeader, Rank

STEPS = 12
AGREED_STEPS = 5  # where ranks wait for each other in every turn
HARD = Faults(delay=0.05, drop=0.05, twice=0.1, truncate=0.03)
LOSSLESS = Faults(delay=0.05, ordered=True)


def run(job: Job, steps: int, patience: int = 4000, dies: tuple[int, int, bool] | None = None) -> None:
    """Random progress until all ranks stopped or ended. Ranks that run together are never far apart (``window``)."""
    rng, window = job.random, job.horizon + 4
    for _ in range(patience):
        alive = [rank for rank in job.ranks if not rank.over]
        if not alive:
            return
        # Collectives hold the ranks together, a silent one too, until somebody ended and its process is gone.
        ended = any(r.machine.verdict is not None for r in job.ranks)
        held_by = [r for r in job.ranks if r in alive or (r.rank in job.silent and not ended)]
        slowest = min(rank.machine.step for rank in held_by)
        for rank in alive:
            if dies is not None and dies[0] == rank.rank and rank.machine.step >= dies[1]:
                job.die(rank.rank, told=dies[2])
                dies = None
                continue
            if rank.in_turn or rank.over or rank.diverged or rng.random() < 0.3 or rank.machine.step > slowest + window:
                continue
            if isinstance(rank.machine, OneCallLeader):
                if rank.machine.step == steps:
                    rank.machine.submit_stop()
                payload = rng.randbytes(rng.randrange(1, 9)) if rng.random() < 0.4 else b""
                job.turn(rank, payload)
            else:
                job.turn(rank)
        job.advance(rng.random() * (0.1 if job.agrees else 0.05))
    raise AssertionError(f"no end after {patience} rounds: {[r.machine.state for r in job.ranks]}")


# Each case is 250 seeds, so that test workers can share them: 5,000 seeds for each world with the long ones.
@pytest.mark.slow
@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.long) for block in range(1, 20))])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_no_divergence_whatever_the_bus_does(world: int, block: int) -> None:
    """Ranks in one, two or four groups, which agree on a maximum and tell something in every turn but a few."""
    mangled = stopped = named = 0
    for seed in range(block * 250, block * 250 + 250):
        rng = random.Random(seed)
        groups = rng.choice([number for number in (1, 2, 4) if world % number == 0])
        faults, agrees = HARD if seed % 4 else LOSSLESS, rng.random() < 0.5
        job = Job(seed, world, horizon=rng.randrange(0, 4), faults=faults, groups=groups, agrees=agrees)
        steps = AGREED_STEPS if job.agrees else STEPS
        dies = (rng.randrange(world), rng.randrange(-1, steps), rng.random() < 0.5) if seed % 5 == 0 else None
        run(job, steps, dies=dies)
        job.check()
        mangled += job.mangled
        found = [v for v in job.verdicts() if v is not None]
        if dies is None:
            assert all(rank.stopped for rank in job.ranks), f"seed {seed}: {found}"
            assert len({rank.digest.value for rank in job.ranks}) == groups
            assert len(job.ranks[0].maxima) == (job.leader.step + 1 if job.agrees else 0)
            assert len({len(rank.maxima) for rank in job.ranks}) == 1
            job.drain()
            job.check()
            stopped += 1
            continue
        # A dropped verdict leaves a rank to its own deadline, which then names its leader: the one it waits for.
        # Nobody needs to notice a rank that died while all the others were about to stop.
        assert all(v.cause in (Cause.LOST, Cause.DEADLINE) for v in found), f"seed {seed}: {found}"
        late = all(rank.stopped for rank in job.ranks if not rank.dead)
        assert late or any(v.rank == dies[0] for v in found), f"seed {seed}: {found}"
        named += not late
    assert stopped == 200
    assert named > 30
    assert mangled > 50


def test_the_simulation_notices_a_follower_that_takes_records_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: with the record's step ignored, ranks act on different events within a few seeds."""

    take = Follower._take

    def take_any(self: Follower) -> None:
        if self.step < self.horizon:
            take(self)
        elif self._records:
            frame = self._records.pop(max(self._records))
            self._enter(FollowerInput.EFFECT)
            self.effect = frame.payload

    monkeypatch.setattr(Follower, "_take", take_any)
    unchecked = noticed = 0
    for seed in range(20):
        job = Job(seed, 4, faults=HARD)
        run(job, STEPS)
        try:
            job.check()
        except AssertionError:
            unchecked += 1
        noticed += any(v is not None and v.cause is Cause.DISAGREEMENT for v in job.verdicts())
    assert unchecked > 15  # the oracle sees it
    assert noticed > 15  # and so do the digests of the ranks themselves


def test_all_ranks_say_the_same_of_a_dead_one() -> None:
    for told in (True, False):
        job = Job(1, 4, faults=LOSSLESS)
        run(job, 20, dies=(2, 5, told))
        (verdict,) = set(job.verdicts())
        assert verdict is not None
        assert (verdict.rank, verdict.cause) == (2, Cause.LOST if told else Cause.DEADLINE)
        assert "rank 2" in str(verdict.error())


@pytest.mark.parametrize("block", range(4))
def test_a_corrupted_decision_is_found_within_one_step_of_its_record(block: int) -> None:
    """100 of 100: any rank of any group, any step; all ranks name rank and step and print both decisions."""
    for seed in range(block * 25, block * 25 + 25):
        rng = random.Random(seed)
        world, groups = rng.choice([(3, 1), (4, 1), (8, 1), (4, 2), (8, 2), (8, 4)])
        size = world // groups
        job = Job(seed, world, horizon=rng.randrange(0, 4), groups=groups, agrees=seed % 4 > 0)
        job.corrupt = (rng.randrange(world), rng.randrange(10))
        rank, step = job.corrupt
        in_lockstep(job, job.anybody_ended)
        assert job.leader.step <= step + 2, f"seed {seed}"
        for _ in range(100):
            job.advance(0.02)
        assert job.leader.verdict is not None, f"seed {seed}"
        assert set(job.verdicts()) == {job.leader.verdict}
        verdict = job.leader.verdict
        error = verdict.error()
        assert isinstance(error, Disagreement)
        first = rank // size * size
        odd = rank if size > 2 else first + 1  # of two the second
        assert (verdict.rank, verdict.step) == (odd, step + 1), f"seed {seed}: {verdict.text}"
        plans = [
            d
            for r in (job.ranks[rank], job.ranks[first if rank != first else first + 1])
            for d in r.digest.recent()
            if d[1:3] == (step, "plan")
        ]
        assert plans[0].decision != plans[1].decision
        for plan in plans:
            assert f"plan({', '.join(map(str, plan.decision))}) at step {step}" in str(error)


def in_lockstep(job: Job, until: Callable[[], bool], rounds: int = 60) -> None:
    """Turns as collectives hold the ranks together: nobody begins one before all have begun the one before."""

    def holds_up(other: Rank, step: int) -> bool:
        return other.machine.step < step or (other.machine.step == step and other.in_turn and not job.agrees)

    for _ in range(rounds):
        for each in job.ranks:
            behind = any(holds_up(other, each.machine.step) for other in job.ranks)
            if not each.over and not each.in_turn and not behind:
                job.turn(each)
        if until():
            return
        job.advance(0.001)


def test_two_ranks_disagree_and_nobody_explains() -> None:
    """The verdict comes anyway, after the dispute's time."""
    leader = OneCallLeader(Codec(1, 0, 2), 1)
    leader.turn(0, 10, b"", 0.0)
    leader.receive(Frame(Kind.ACK, 0, 1, 0, 0, 11, b"", None), 0.1)
    assert leader.state is LeaderState.DIVERGED
    verdicts = []
    for now in (1.0, 2.0, 3.0):
        leader.tick(now)
        verdicts.append(leader.verdict)
    assert verdicts[:2] == [None, None]
    text = str(verdicts[2])
    assert "did not tell its decisions" in text
    assert f"{10:#018x}" in text
    assert f"{11:#018x}" in text


def test_a_follower_says_what_it_knows_when_the_leader_does_not_answer() -> None:
    """The leader may sit in a collective that waits for this very rank."""
    follower = Follower(Codec(1, 0, 2), 1, 1, Limits(divergence=1.0))
    follower.turn(0, 10, 0.0)
    follower.turn(1, 11, 0.0)
    follower.receive(Frame(Kind.RECORD, 0, 1, 1, 0, 99, b"", None), 0.5)
    assert follower.state is FollowerState.DIVERGED
    verdicts = []
    for now in (2.0, 3.0):
        follower.tick(now)
        verdicts.append(follower.verdict)
    assert verdicts[0] is None
    assert verdicts[1] is not None
    assert (verdicts[1].cause, verdicts[1].rank, verdicts[1].step) == (Cause.DISAGREEMENT, 1, 0)
    assert f"rank 1 has digest {10:#018x}, rank 0 has {99:#018x}" in verdicts[1].text


def test_the_leader_is_named_when_all_others_are_against_it() -> None:
    leader = OneCallLeader(Codec(1, 0, 4), 1)
    leader.turn(0, 10, b"", 0.0)
    for rank in (1, 2, 3):
        leader.receive(Frame(Kind.ACK, 0, rank, 0, 0, 11, b"", None), 0.1)
    leader.receive(Frame(Kind.DECISIONS, 0, 1, 0, 0, 11, b"", Decisions(())), 0.1)
    assert leader.verdict is not None
    assert leader.verdict.rank == 0


def test_a_stop_takes_effect_everywhere_in_the_same_turn() -> None:
    job = Job(5, 4, horizon=2, faults=LOSSLESS)
    run(job, 6)
    assert [rank.machine.step for rank in job.ranks] == [9] * 4
    job.leader.lost(1, job.now)
    job.leader.leave(Cause.ABORTED, "")
    assert job.leader.verdict is None


def test_a_follower_may_leave_while_the_leader_is_still_stopping() -> None:
    leader = OneCallLeader(Codec(1, 0, 2), 1)
    leader.submit_stop()
    leader.turn(0, 0, b"", 0.0)
    leader.receive(Frame(Kind.ACK, 0, 1, 0, 0, 0, b"", None), 0.0)
    leader.receive(Frame(Kind.ACK, 0, 1, 0, 1, 0, b"", None), 0.0)
    leader.lost(1, 0.0)
    assert leader.verdict is None
    leader.turn(1, 0, b"", 0.0)
    assert leader.state is LeaderState.STOPPED


def test_whoever_ends_tells_everybody() -> None:
    for rank in (0, 2):
        job = Job(3, 3, faults=LOSSLESS)
        for each in job.ranks:
            job.turn(each)
        job.advance(1.0)
        job.ranks[rank].machine.leave(Cause.ABORTED, f"rank {rank} ends at step 0: out of memory")
        job.speak(job.ranks[rank])
        job.advance(1.0)
        job.advance(1.0)
        (verdict,) = set(job.verdicts())
        assert verdict is not None
        assert isinstance(verdict.error(), Aborted)
        assert str(verdict.error()) == f"rank {rank} ends at step 0: out of memory"


def test_an_idle_leader_keeps_its_followers_waiting_without_end() -> None:
    codec = Codec(1, 0, 2)
    follower = Follower(codec, 1, 1, Limits(deadline=4.0, resend=0.5))
    follower.turn(0, 0, 0.0)
    follower.turn(1, 0, 0.0)
    for second in range(1, 100):
        follower.receive(Frame(Kind.KEEPALIVE, 0, 1, 0, 0, 0, b"", None), float(second))
        follower.tick(second + 0.9)
    assert follower.state is FollowerState.WAITING
    # It knows that record 0 was made, so it also asked for it.
    assert any(codec.decode(frame).kind is Kind.RESEND for frame in follower.outbox)
    follower.tick(104.0)
    assert follower.verdict is not None
    assert (follower.verdict.cause, follower.verdict.rank) == (Cause.DEADLINE, 0)


def test_the_first_turn_may_take_as_long_as_loading_does() -> None:
    limits = Limits(deadline=4.0, start=60.0)
    leader, follower = OneCallLeader(Codec(1, 0, 2), 1, limits), Follower(Codec(1, 0, 2), 1, 1, limits)
    leader.turn(0, 0, b"", 0.0)
    follower.turn(0, 0, 0.0)
    follower.turn(1, 0, 0.0)
    verdicts = []
    for now in (59.0, 61.0):
        leader.tick(now)
        follower.tick(now)
        verdicts.append((leader.verdict, follower.verdict))
    assert verdicts[0] == (None, None)
    assert [v.rank for v in verdicts[1] if v is not None] == [1, 0]


@pytest.mark.parametrize("state", list(LeaderState))
def test_leader_inputs_that_the_table_lacks_are_refused_by_name(state: LeaderState) -> None:
    for given in LeaderInput:
        if given not in LEADER_TABLE[state]:
            with pytest.raises(IllegalInput, match=f"LeaderState '{state}' does not take input '{given}'"):
                following(LEADER_TABLE, state, given)


@pytest.mark.parametrize("state", list(FollowerState))
def test_follower_inputs_that_the_table_lacks_are_refused_by_name(state: FollowerState) -> None:
    for given in FollowerInput:
        if given not in FOLLOWER_TABLE[state]:
            with pytest.raises(IllegalInput, match=f"FollowerState '{state}' does not take input '{given}'"):
                following(FOLLOWER_TABLE, state, given)


def test_an_illegal_input_changes_nothing() -> None:
    follower = Follower(Codec(1, 0, 2), 1, 1)
    follower.turn(0, 7, 0.0)
    follower.turn(1, 8, 0.0)  # record 0 is missing: waiting
    before = (follower.state, follower.step, list(follower.outbox), follower.verdict)
    with pytest.raises(IllegalInput, match="'waiting' does not take input 'turn'; it takes: record, alive"):
        follower.turn(2, 9, 0.0)
    assert (follower.state, follower.step, list(follower.outbox), follower.verdict) == before
    leader = OneCallLeader(Codec(1, 0, 2), 1)
    leader.lost(1, 0.0)
    assert isinstance(leader.verdict and leader.verdict.error(), LostPeer)
    with pytest.raises(IllegalInput, match="'ended' does not take input 'turn'"):
        leader.turn(0, 0, b"x", 0.0)
    assert leader.step == -1
    assert not leader.pending


@pytest.mark.parametrize("step", [0, 2, -1])
def test_turns_are_taken_one_by_one(step: int) -> None:
    leader, follower = OneCallLeader(Codec(1, 0, 2), 1), Follower(Codec(1, 0, 2), 1, 1)
    leader.turn(0, 0, b"", 0.0)
    follower.turn(0, 0, 0.0)
    with pytest.raises(ValueError, match=f"turn {step} after turn 0"):
        leader.turn(step, 0, b"", 0.0)
    with pytest.raises(ValueError, match=f"turn {step} after turn 0"):
        follower.turn(step, 0, 0.0)


def test_a_negative_horizon_is_refused() -> None:
    with pytest.raises(ValueError, match="horizon -1"):
        OneCallLeader(Codec(1, 0, 2), -1)
    with pytest.raises(ValueError, match="horizon -1"):
        Follower(Codec(1, 0, 2), 1, -1)


def test_with_a_horizon_of_zero_events_and_the_stop_take_effect_in_the_turn_that_announces_them() -> None:
    codec = Codec(1, 0, 2)
    leader, follower = OneCallLeader(codec, 0), Follower(codec, 1, 0)
    follower.turn(0, 7, 0.0)
    early = follower.effect
    assert early is None, "its record is not here: it may not plan"
    assert leader.turn(0, 7, b"now", 0.0) == b"now"
    before = leader.pending
    follower.receive(codec.decode(leader.outbox.pop()[1]), 0.0)
    assert follower.effect == b"now"
    leader.submit_stop()
    assert (before, leader.pending) == (False, True)
    leader.turn(1, 8, b"last", 0.0)
    follower.turn(1, 8, 0.0)
    follower.receive(codec.decode(leader.outbox.pop()[1]), 0.0)
    assert (leader.state, follower.state) == (LeaderState.STOPPED, FollowerState.STOPPED)
    assert follower.effect == b"last"


def test_a_horizon_is_agreed_before_the_first_turn_and_only_then() -> None:
    codec = Codec(1, 0, 2)
    leader, follower = OneCallLeader(codec, 0), Follower(codec, 1, 0)
    leader.agree_horizon(3)
    frame = codec.decode(leader.outbox.pop()[1])
    follower.receive(frame, 0.0)
    assert (leader.horizon, follower.horizon, follower.horizon_agreed) == (3, 3, True)
    for step in range(4):
        payload = b"%d" % step
        assert leader.turn(step, 0, payload, 0.0) == (b"0" if step == 3 else b"")
        follower.receive(codec.decode(leader.outbox.pop()[1]), 0.0)
        follower.turn(step, 0, 0.0)
        assert follower.effect == (b"0" if step == 3 else b"")
    with pytest.raises(ValueError, match="set before step 0"):
        leader.agree_horizon(1)
    follower.receive(frame, 0.0)
    assert follower.verdict is not None
    assert "HORIZON 3 in step 3" in follower.verdict.text
