"""The part of a Leader that collects every rank's numbers and answers with their maximum: an all-reduce of integers.

Knows: when a proposal is early, late, repeated or contradictory, and when to name a rank that has made none.
Does not know: how proposals are compared (max_rounds.py), what the numbers mean, turns (leader.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.control.errors import FrameError, Verdict
from parallel.control.protocol.leader_status import LeaderStatus
from parallel.control.protocol.max_rounds import MaxRounds, Proposed, checked, one_sided
from parallel.control.protocol.states import LeaderInput, LeaderState
from parallel.control.wire.frames import EVERYONE, Kind, Numbers

COLLECTING = (LeaderState.AGREEING, LeaderState.FINISHING)  # waiting for the ranks' numbers


class MaxAgreement:
    """Agreement on maxima. ``maximum``: the last one; None while this rank has proposed and others have not.

    ``group_size``: as many consecutive ranks must propose the same numbers.
    """

    def __init__(self, status: LeaderStatus, horizon: int, group_size: int) -> None:
        self.maximum: Proposed | None = None
        self._status = status
        self.horizon = horizon
        self._rounds = MaxRounds(status.codec.world, group_size)
        self._proposed = -1, 0.0  # the step of our last proposal, and when it was made
        self._alive = 0.0  # when we last sent a sign of life while we wait for proposals
        self._answers: dict[int, bytes] = {}  # by step, for ranks that may ask again

    def propose(self, step: int, numbers: Sequence[int], now: float) -> None:
        """This rank's numbers for its current turn ``step``. ``maximum`` is set once every rank has proposed.

        Raises ValueError for another step, a second proposal, or numbers that cannot be agreed on.
        """
        status = self._status
        if step != status.step or step == self._proposed[0]:
            raise ValueError(
                f"control plane: agree_max of step {step} in turn {status.step}, last of step {self._proposed[0]}; "
                "it is called at most once a turn, for that turn's step"
            )
        mine = checked(numbers)
        status.enter(LeaderInput.PROPOSE)
        self.maximum = None
        self._proposed = step, now
        self._alive = now
        self._add(status.rank, step, mine, now)
        for rank, reached in status.reached.items():
            self.began(rank, reached)
        if status.state in COLLECTING:
            for rank in status.gone.intersection(self._rounds.missing(step)):  # harmless until now, in the last turn
                status.lose(rank)

    def receive(self, rank: int, step: int, numbers: Proposed, now: float) -> None:
        """A follower's proposal for ``step``."""
        status, answer = self._status, self._answers.get(step)
        if step > status.step + self.horizon + 1:
            said = f"rank {rank} cannot propose for step {step}, rank {status.rank} is in {status.step}"
            status.bad(rank, FrameError("step", said))
            return
        status.enter(LeaderInput.PROPOSED)
        if answer is not None:
            status.outbox.append((rank, answer))  # the answer was lost, or the proposal came twice
        elif step < status.reached[rank]:
            status.ignored += 1  # the rank has gone on since
        elif step < status.step:
            self._contradict(one_sided(rank, status.rank, rank, step))
        else:
            self._add(rank, step, numbers, now)

    def began(self, rank: int, step: int) -> None:
        """A rank began turn ``step``: a maximum of an earlier step that somebody still waits for is a contradiction."""
        status = self._status
        if rank == status.rank:
            proposes, at = self._rounds.left_open(step)
            if at < step:
                self._contradict(one_sided(proposes, rank, proposes, at))
        elif status.state in COLLECTING and step > status.step:
            self._contradict(one_sided(status.rank, rank, rank, status.step))

    def tick(self, now: float) -> None:
        """Ends the job over proposals that contradict or do not come; sends signs of life to the ranks that wait."""
        status = self._status
        if (contradiction := self._rounds.contradiction(now, status.limits.divergence)) is not None:
            self._contradict(contradiction)
        if status.state not in COLLECTING:
            return
        step, since = self._proposed
        furthest_behind = min(self._rounds.missing(step), key=status.reached.__getitem__, default=status.rank)
        deadline = status.deadline_of(furthest_behind)
        if now - since > deadline:
            status.late(furthest_behind, f"did not propose its numbers for step {step}", deadline)
        elif now - self._alive > status.limits.keepalive:
            self._alive = now
            status.outbox.append((EVERYONE, status.codec.encode(Kind.KEEPALIVE, EVERYONE, status.step)))

    def forget(self, step: int) -> None:
        """No rank can ask for the maximum of ``step`` any more."""
        self._answers.pop(step, None)

    def _add(self, rank: int, step: int, numbers: Proposed, now: float) -> None:
        """Takes a proposal; the last one makes the maximum."""
        status = self._status
        try:
            self._rounds.add(rank, step, numbers, now)
        except FrameError as error:
            status.bad(rank, error)
            return
        if (contradiction := self._rounds.contradiction(now, status.limits.divergence)) is not None:
            self._contradict(contradiction)
        elif step == self._proposed[0] and status.state in COLLECTING:
            maximum = self._rounds.maximum(step)
            if maximum is not None:
                status.enter(LeaderInput.AGREED)
                self.maximum = maximum
                self._answers[step] = status.codec.encode(Kind.AGREED, EVERYONE, step, body=Numbers(maximum))
                status.outbox.append((EVERYONE, self._answers[step]))

    def _contradict(self, verdict: Verdict) -> None:
        self._status.end(LeaderInput.CONTRADICTS, verdict)
