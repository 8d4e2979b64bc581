"""Explains a divergence: the first decision in which two ranks whose digests differ disagree.

Knows: how a ring of decisions is shortened for the wire, how two of them are compared, which rank to blame.
Does not know: who noticed, when, or what happens then (states.py); what a decision means (runtime/schedule).

Digests are chained, so equal digests after decision i mean that all decisions up to i are equal. The first decision
whose digests differ, after one whose digests are equal, is therefore the first that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from parallel.control.errors import Cause, Verdict
from parallel.control.wire.frames import DecisionSummary

# (number, step, kind, decision, digest after it), as runtime/schedule/digest.py's Decision
Recent = Callable[[], Iterable[tuple[int, int, str, "tuple[int, ...] | bytes", int]]]

SUMMARIES = 64  # decisions sent
HEAD = 64  # integers sent of each
_SHOWN = 12  # integers printed of each


_Said = TypeVar("_Said")


def odd_one(reference: int, said: Mapping[int, _Said], size: int) -> int:
    """The rank to blame when ranks of a group of ``size`` differ; ``said`` includes the reference.

    The first rank that differs from the reference, or the reference itself if a majority of the group agree against
    it.
    """
    against = {rank: what for rank, what in sorted(said.items()) if what != said[reference]}
    first = next(iter(against))
    same = [rank for rank, what in against.items() if what == against[first]]
    return reference if len(same) > 1 and len(same) > size / 2 else first


@dataclass(slots=True)
class Divergence:
    """A divergence of the group ``ranks`` in ``step``, known ``since`` a time in seconds.

    ``digests``: of ``step``, by rank; later ones are added. ``explained``: the decisions that ranks sent.
    """

    ranks: range
    step: int
    since: float
    digests: Mapping[int, int]
    explained: dict[int, tuple[DecisionSummary, ...]] = field(default_factory=dict)

    @property
    def reference(self) -> int:
        """The rank that all others are compared with: the group's first."""
        return self.ranks[0]

    @property
    def digest(self) -> int:
        """The reference's digest."""
        return self.digests[self.reference]

    def votes(self, reached: Mapping[int, int]) -> dict[int, int]:
        """The other ranks' digests, in rank order. ``reached``: the step of each rank.

        A rank past this step whose digest is unknown agreed in it: its acknowledgement would have differed otherwise.
        """
        voted = (rank for rank in self.ranks[1:] if rank in self.digests or reached[rank] >= self.step)
        return {rank: self.digests.get(rank, self.digest) for rank in voted}

    def odd(self, reached: Mapping[int, int]) -> int:
        """The first rank that differs from the reference."""
        return next(rank for rank, digest in self.votes(reached).items() if digest != self.digest)

    def waits(self, reached: Mapping[int, int], gone: Collection[int]) -> bool:
        """Whether a connected rank's digest is missing, or one of the two sides has not sent its decisions."""
        sides = {self.odd(reached), self.reference} - self.explained.keys()
        silent = set(self.ranks[1:]) - self.votes(reached).keys()
        return not (sides | silent) <= set(gone)

    def verdict(self, reached: Mapping[int, int], groups: int) -> Verdict:
        ours, votes, reference = self.digest, self.votes(reached), self.reference
        rank = self.odd(reached)
        culprit = odd_one(reference, {reference: ours, **votes}, len(self.ranks))
        agreeing = [r for r, digest in votes.items() if digest == ours]
        against = [r for r, digest in votes.items() if digest != ours]
        difference = first_difference(reference, self.explained.get(reference), rank, self.explained.get(rank))
        who = "ranks" if groups == 1 else f"ranks of group {reference // len(self.ranks)}"
        text = (
            f"{who} disagree at step {self.step}: rank {rank} has digest {votes[rank]:#018x}, rank {reference} has "
            f"{ours:#018x} (with it: {agreeing or 'nobody'}; against it: {against}). "
            f"Rank {culprit} is the odd one. First difference: {difference}"
        )
        return Verdict(Cause.DISAGREEMENT, culprit, self.step, text)


def nothing() -> tuple[tuple[int, int, str, tuple[int, ...], int], ...]:
    """The empty ring of a rank that keeps no decisions."""
    return ()


def summaries(recent: Recent, until: int | None) -> tuple[DecisionSummary, ...]:
    """The last decisions before the digest was ``until`` (all of the ring when that is no longer in it)."""
    kept = list(recent())
    cut = next((i + 1 for i, decision in enumerate(kept) if decision[4] == until), len(kept))
    return tuple(
        DecisionSummary(number, step, kind, len(decision), tuple(decision[:HEAD]), value)
        for number, step, kind, decision, value in kept[max(0, cut - SUMMARIES) : cut]
    )


def first_difference(
    rank: int, ours: Sequence[DecisionSummary] | None, other: int, theirs: Sequence[DecisionSummary] | None
) -> str:
    """One sentence: the first decision in which ``rank`` (ours) and ``other`` (theirs) differ, with both decisions."""
    if ours is None or theirs is None:
        return f"rank {rank if ours is None else other} did not tell its decisions"
    mine, yours = {d.number: d for d in ours}, {d.number: d for d in theirs}
    common = sorted(mine.keys() & yours.keys())
    differing = next((n for n in common if mine[n].value != yours[n].value), None)
    if differing is not None:
        if differing > 0 and differing - 1 not in common:
            return f"the first differing decision is older than decision {differing}, the oldest that both kept"
        return _describe(rank, mine[differing], other, yours[differing])
    beyond = common[-1] + 1 if common else 0
    for who, only, without in ((rank, mine, other), (other, yours, rank)):
        if beyond in only:
            return f"decision {beyond}: rank {who} decided {_text(only[beyond])}, rank {without} decided nothing"
    return f"rank {rank} and rank {other} kept no decision in common"


def _describe(rank: int, a: DecisionSummary, other: int, b: DecisionSummary) -> str:
    said = f"decision {a.number}: rank {rank} decided {_text(a)}, rank {other} decided {_text(b)}"
    if (a.kind, a.step, a.length) != (b.kind, b.step, b.length):
        return said
    at = next((i for i, (x, y) in enumerate(zip(a.head, b.head, strict=True)) if x != y), None)
    if at is None:
        return f"{said} (the first {HEAD} of {a.length} integers are the same, a later one is not)"
    return f"{said} (integer {at}: {a.head[at]} against {b.head[at]})"


def _text(summary: DecisionSummary) -> str:
    shown = ", ".join(map(str, summary.head[:_SHOWN]))
    more = ", ..." if summary.length > _SHOWN else ""
    return f"{summary.kind}({shown}{more}) at step {summary.step}"
