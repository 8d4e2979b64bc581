"""The leader's part that compares digests, and settles a dispute when they differ.

Knows: who is compared with whom (group_digests.py), whom to ask for decisions, when a dispute is over.
Does not know: what a digest stands for, how the verdict is worded (divergence.py).
"""

from __future__ import annotations

from parallel.control.protocol.divergence import Divergence, Recent, summaries
from parallel.control.protocol.group_digests import GroupDigests
from parallel.control.protocol.leader_verdicts import Ending
from parallel.control.protocol.states import LeaderInput, LeaderState, Limits
from parallel.control.wire.frames import Codec, DecisionSummary, Kind

_SAME = LeaderInput.SAME  # a name costs less to look up


class Comparing(Ending):
    """``groups``: runs of world / groups ranks that plan alike. ``recent``: this rank's last decisions."""

    def __init__(self, codec: Codec, limits: Limits, rank: int, groups: int, recent: Recent) -> None:
        super().__init__(codec, limits, rank)
        self.recent = recent
        self._size = size = codec.world // groups
        self._groups = [GroupDigests(number, range(number * size, (number + 1) * size)) for number in range(groups)]
        self._dispute: Divergence | None = None

    def _compare(self, rank: int, step: int, digest: int, now: float) -> None:
        """Takes a rank's digest, and compares what can be compared now."""
        group = self._groups[rank // self._size]
        comparable = group.add(rank, step, digest)
        if not comparable and rank != self.rank:
            self._enter(_SAME)
        for other in comparable:
            if group.same(other, step):
                self._enter(_SAME)
            else:
                self._differs(LeaderInput.DIFFERS, group, step, now)
                self._ask(group, other, step)
        if self._dispute is not None:
            self._settle(now, patient=True)

    def _ask(self, group: GroupDigests, rank: int, step: int) -> None:
        """Asks both sides of a difference for their decisions."""
        if self.state is LeaderState.DISPUTED:
            for asked, other in ((rank, group.reference), (group.reference, rank)):
                if asked != self.rank:
                    theirs = group.at(other, step) or 0
                    self.outbox.append((asked, self.codec.encode(Kind.EXPLAIN, asked, step, theirs)))

    def _differs(self, given: LeaderInput, group: GroupDigests, step: int, now: float) -> None:
        self._enter(given)
        before = self._dispute
        if self.state is LeaderState.DISPUTED and (before is None or step < before.step):
            self._dispute = Divergence(group, step, now if before is None else before.since)
            if before is not None and before.group is group:
                self._dispute.explained |= before.explained

    def _explained(self, rank: int, step: int, digest: int, decisions: tuple[DecisionSummary, ...], now: float) -> None:
        group, dispute = self._groups[rank // self._size], self._dispute
        ours = group.at(group.reference, step)
        if rank != group.reference and ours not in (None, digest):
            group.add(rank, step, digest)
            self._differs(LeaderInput.EXPLAINED, group, step, now)
            dispute = self._dispute
        elif rank != group.reference or dispute is None or dispute.step != step:
            self.ignored += 1
            return
        if dispute is not None and dispute.group is group:
            dispute.explained[rank] = decisions
            self._settle(now, patient=True)

    def _settle(self, now: float, patient: bool) -> None:
        """Ends the dispute once everybody voted and both sides explained themselves, or when patience is over."""
        dispute = self._dispute
        if dispute is None or self.state is not LeaderState.DISPUTED:
            return
        if dispute.group.reference == self.rank:
            dispute.explained[self.rank] = summaries(self.recent, dispute.digest)
        if patient and dispute.waits(self.acknowledged, self.gone):
            return
        self._enter(LeaderInput.SETTLED)
        self._announce(dispute.verdict(self.acknowledged, len(self._groups)))
