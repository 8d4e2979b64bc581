"""The digests of one group of ranks, which must be equal: each is compared with that of the group's reference.

Knows: which ranks can be compared once a digest is known, in any order of arrival. Pure.
Does not know: what a difference leads to (leader.py, divergence.py), other groups, frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class GroupDigests:
    """Group ``number``: the consecutive ``ranks``, of which the first is the ``reference``.

    Keeps every rank's digest of every step until ``forget``; the leader forgets what no rank can need any more.
    """

    def __init__(self, number: int, ranks: range) -> None:
        self.number = number
        self.ranks = ranks
        self.reference = ranks[0]
        self._at: dict[int, dict[int, int]] = {}  # step -> rank -> digest

    def add(self, rank: int, step: int, digest: int) -> Sequence[int]:
        """Adds ``rank``'s digest of ``step``; returns the ranks that can now be compared with the reference."""
        known = self._at.setdefault(step, {})
        known.setdefault(rank, digest)
        if rank == self.reference:
            return [other for other in known if other != rank]
        return (rank,) if self.reference in known else ()

    def same(self, rank: int, step: int) -> bool:
        """Whether two ranks that can be compared agree."""
        known = self._at[step]
        return known[rank] == known[self.reference]

    def at(self, rank: int, step: int) -> int | None:
        """A rank's digest of a step, if it is known."""
        return self._at.get(step, {}).get(rank)

    def votes(self, step: int, reached: Mapping[int, int]) -> dict[int, int]:
        """The other ranks' digests of ``step``, in rank order. ``reached``: the step of each rank.

        A rank past this step whose digest is unknown agreed in it: its acknowledgement would have differed otherwise.
        """
        known = self._at[step]
        ours = known[self.reference]
        return {r: known.get(r, ours) for r in self.ranks[1:] if r in known or reached[r] >= step}

    def forget(self, step: int) -> None:
        self._at.pop(step, None)
