"""The part of a Leader that compares digests, and resolves a divergence into a verdict.

Knows: who is compared with whom (group_digests.py), whom to ask for decisions, when a divergence is resolved.
Does not know: what a digest stands for, how the verdict is worded (divergence.py), turns (leader.py).
"""

from __future__ import annotations

from parallel.control.protocol.divergence import Divergence, Recent, summaries
from parallel.control.protocol.group_digests import GroupDigests
from parallel.control.protocol.leader_status import LeaderStatus
from parallel.control.protocol.states import LeaderInput, LeaderState
from parallel.control.wire.frames import DecisionSummary, Kind

_SAME = LeaderInput.SAME  # a name costs less to look up


class DigestComparison:
    """Compares the digests of ``groups`` runs of world / groups ranks that plan alike, each within itself.

    ``recent``: this rank's last decisions, for the report of a divergence.
    """

    def __init__(self, status: LeaderStatus, groups: int, recent: Recent) -> None:
        self.recent = recent
        self._status = status
        self.group_size = size = status.codec.world // groups
        self._groups = [GroupDigests(number, range(number * size, (number + 1) * size)) for number in range(groups)]
        self._divergence: Divergence | None = None

    def add(self, rank: int, step: int, digest: int, now: float) -> None:
        """Takes a rank's digest of ``step``, and compares what can be compared now."""
        status = self._status
        group = self._groups[rank // self.group_size]
        comparable = group.add(rank, step, digest)
        if not comparable and rank != status.rank:
            status.enter(_SAME)
        for other in comparable:
            if group.same(other, step):
                status.enter(_SAME)
            else:
                self._diverge(LeaderInput.DIFFERS, group, step, now)
                self._ask(group, other, step)
        if self._divergence is not None:
            self._resolve(patient=True)

    def explained(self, rank: int, step: int, digest: int, decisions: tuple[DecisionSummary, ...], now: float) -> None:
        """Takes a rank's last ``decisions`` before its ``digest`` of ``step``."""
        group, divergence = self._groups[rank // self.group_size], self._divergence
        ours = group.at(group.reference, step)
        if rank != group.reference and ours not in (None, digest):
            group.add(rank, step, digest)
            self._diverge(LeaderInput.EXPLAINED, group, step, now)
            divergence = self._divergence
        elif rank != group.reference or divergence is None or divergence.step != step:
            self._status.ignored += 1
            return
        if divergence is not None and divergence.group is group:
            divergence.explained[rank] = decisions
            self._resolve(patient=True)

    def tick(self, now: float) -> None:
        """Resolves a divergence that has waited ``Limits.divergence`` seconds, or for which nobody is missing."""
        if self._divergence is not None:
            self._resolve(patient=now - self._divergence.since < self._status.limits.divergence)

    def forget(self, step: int) -> None:
        """No rank needs the digests of ``step`` any more."""
        for group in self._groups:
            group.forget(step)

    def _ask(self, group: GroupDigests, rank: int, step: int) -> None:
        """Asks both sides of a difference for their decisions."""
        status = self._status
        if status.state is LeaderState.DIVERGED:
            for asked, other in ((rank, group.reference), (group.reference, rank)):
                if asked != status.rank:
                    theirs = group.at(other, step) or 0
                    status.outbox.append((asked, status.codec.encode(Kind.EXPLAIN, asked, step, theirs)))

    def _diverge(self, given: LeaderInput, group: GroupDigests, step: int, now: float) -> None:
        """Digests of ``step`` differ: it becomes the divergence, unless an earlier step's is known."""
        self._status.enter(given)
        before = self._divergence
        if self._status.state is LeaderState.DIVERGED and (before is None or step < before.step):
            self._divergence = Divergence(group, step, now if before is None else before.since)
            if before is not None and before.group is group:
                self._divergence.explained |= before.explained

    def _resolve(self, patient: bool) -> None:
        """Announces the verdict once every rank voted and both sides explained themselves, or when not ``patient``."""
        status, divergence = self._status, self._divergence
        if divergence is None or status.state is not LeaderState.DIVERGED:
            return
        if divergence.group.reference == status.rank:
            divergence.explained[status.rank] = summaries(self.recent, divergence.digest)
        if patient and divergence.waits(status.reached, status.gone):
            return
        status.enter(LeaderInput.RESOLVED)
        status.announce(divergence.verdict(status.reached, len(self._groups)))
