"""The leader's part that hears the ranks' numbers and answers with their maximum, and hears what ranks tell.

Knows: when a proposal is early, late, an echo or a contradiction, and when to name a rank that has made none.
Does not know: how proposals are compared (max_rounds.py), what numbers and payloads mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.control.errors import FrameError, Verdict
from parallel.control.protocol.divergence import Recent
from parallel.control.protocol.leader_digests import Comparing
from parallel.control.protocol.max_rounds import MaxRounds, Proposed, checked, one_sided
from parallel.control.protocol.reliable_messages import ReliableReceiver, refuse_oversized
from parallel.control.protocol.states import LeaderInput, LeaderState, Limits
from parallel.control.wire.frames import EVERYONE, Codec, Kind, Numbers

WAITING = (LeaderState.AGREEING, LeaderState.FINISHING)  # for the ranks' numbers


class Agreeing(Comparing):
    """``maximum`` is what was agreed on last; None while this rank has proposed and others have not."""

    def __init__(self, codec: Codec, limits: Limits, rank: int, groups: int, recent: Recent, horizon: int) -> None:
        super().__init__(codec, limits, rank, groups, recent)
        self.horizon = horizon
        self.maximum: Proposed | None = None
        self._proposals = MaxRounds(codec.world, self._size)
        self._proposed = -1, 0.0  # the step of our last proposal, and when it was made
        self._alive = 0.0  # when the others last heard of us while we wait for proposals
        self._agreed: dict[int, bytes] = {}  # by step, for ranks that may ask again
        self._hearers = {r: ReliableReceiver(r) for r in self.acknowledged}
        self._own: list[bytes] = []

    def propose(self, step: int, numbers: Sequence[int], now: float) -> None:
        """This rank's numbers for turn ``step``, in which it is. ``maximum`` is set when all ranks have proposed."""
        if step != self.step or step == self._proposed[0]:
            raise ValueError(
                f"control plane: agree_max of step {step} in turn {self.step}, last of step {self._proposed[0]}; "
                "it is called at most once a turn, for that turn's step"
            )
        mine = checked(numbers)
        self._enter(LeaderInput.PROPOSE)
        self.maximum = None
        self._proposed = step, now
        self._alive = now
        self._add(self.rank, step, mine, now)
        for rank, reached in self.acknowledged.items():
            self._went_on(rank, reached)
        if self.state in WAITING:
            for rank in self.gone.intersection(self._proposals.missing(step)):  # in the last turn nobody minded so far
                self._lose(rank)

    def tell(self, payload: bytes) -> None:
        refuse_oversized(payload)
        self._own.append(payload)

    def was_told(self) -> bool:
        """Whether ``told`` has something to return."""
        return bool(self._own) or any(hearer.waiting for hearer in self._hearers.values())

    def told(self) -> list[tuple[int, bytes]]:
        """(rank, payload) of all that was told since the last call, each rank's in its order."""
        found = [(self.rank, payload) for payload in self._own]
        self._own.clear()
        for rank, hearer in self._hearers.items():
            if hearer.waiting:
                found += [(rank, payload) for payload in hearer.take()]
                self.outbox.append((rank, self.codec.encode(Kind.HEARD, rank, hearer.taken)))
        return found

    def _hear_proposal(self, rank: int, step: int, numbers: Proposed, now: float) -> None:
        answer = self._agreed.get(step)
        if step > self.step + self.horizon + 1:
            said = f"rank {rank} cannot propose for step {step}, rank {self.rank} is in {self.step}"
            self.bad(rank, FrameError("step", said))
            return
        self._enter(LeaderInput.PROPOSED)
        if answer is not None:
            self.outbox.append((rank, answer))  # it did not get it, or this is an echo
        elif step < self.acknowledged[rank]:
            self.ignored += 1  # it has gone on since
        elif step < self.step:
            self._contradict(one_sided(rank, self.rank, rank, step))
        else:
            self._add(rank, step, numbers, now)

    def _add(self, rank: int, step: int, numbers: Proposed, now: float) -> None:
        """Takes a proposal; the last one makes the maximum."""
        try:
            self._proposals.add(rank, step, numbers, now)
        except FrameError as error:
            self.bad(rank, error)
            return
        if (contradiction := self._proposals.contradiction(now, self.limits.dispute)) is not None:
            self._contradict(contradiction)
        elif step == self._proposed[0] and self.state in WAITING:
            maximum = self._proposals.maximum(step)
            if maximum is not None:
                self._enter(LeaderInput.AGREED)
                self.maximum = maximum
                self._agreed[step] = self.codec.encode(Kind.AGREED, EVERYONE, step, body=Numbers(maximum))
                self.outbox.append((EVERYONE, self._agreed[step]))

    def _contradict(self, verdict: Verdict) -> None:
        self._end(LeaderInput.CONTRADICTS, verdict)

    def _went_on(self, rank: int, step: int) -> None:
        """A rank is in ``step``: then no maximum of an earlier one is waited for, by it or for it."""
        if rank == self.rank:
            proposes, at = self._proposals.left_open(step)
            if at < step:
                self._contradict(one_sided(proposes, rank, proposes, at))
        elif self.state in WAITING and step > self.step:
            self._contradict(one_sided(self.rank, rank, rank, self.step))

    def _look_at_proposals(self, now: float) -> None:
        """Ends the job over proposals that do not fit, or do not come; those who wait hear that we are there."""
        if (contradiction := self._proposals.contradiction(now, self.limits.dispute)) is not None:
            self._contradict(contradiction)
        if self.state not in WAITING:
            return
        step, since = self._proposed
        furthest_behind = min(self._proposals.missing(step), key=self.acknowledged.__getitem__, default=self.rank)
        patience = self._patience(furthest_behind)
        if now - since > patience:
            self._late(furthest_behind, f"did not propose its numbers for step {step}", patience)
        elif now - self._alive > self.limits.keepalive:
            self._alive = now
            self.outbox.append((EVERYONE, self.codec.encode(Kind.KEEPALIVE, EVERYONE, self.step)))

    def _hear_told(self, rank: int, number: int, payload: bytes) -> None:
        hearer = self._hearers[rank]
        try:
            new = hearer.hear(number, payload)
        except FrameError as error:
            self.bad(rank, error)
            return
        if not new:
            self.ignored += 1
            if number < hearer.taken:
                self.outbox.append((rank, self.codec.encode(Kind.HEARD, rank, hearer.taken)))
