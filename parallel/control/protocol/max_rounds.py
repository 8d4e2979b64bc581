"""Rounds of agreement on a maximum: the ranks' proposals for a step, whether they match, and the result.

Knows: which numbers may be proposed, which proposals contradict each other, which ranks are missing. Pure.
Does not know: what the numbers mean (runtime/groups/step_sync.py), states (states.py), frames, sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from parallel.control.errors import Cause, FrameError, Verdict
from parallel.control.protocol.divergence import odd_one
from parallel.control.wire.frames import MAX_NUMBER, MAX_NUMBERS

Proposed = tuple[int, ...]


def checked(numbers: Sequence[int], step: int, turn: int, last: int) -> Proposed:
    """``numbers`` as a proposal for ``step`` in ``turn``, after one for step ``last``.

    Raises ValueError for another step than the turn's, for the second proposal of a turn, for too many numbers, and for
    a number below 0 or above MAX_NUMBER.
    """
    if step != turn or step == last:
        raise ValueError(
            f"control plane: agree_max of step {step} in turn {turn}, last of step {last}; it is called at most once a "
            "turn, for that turn's step"
        )
    if len(numbers) > MAX_NUMBERS:
        raise ValueError(f"control plane: {len(numbers)} numbers to agree on, the limit is {MAX_NUMBERS}")
    if numbers and not 0 <= min(numbers) <= max(numbers) <= MAX_NUMBER:
        raise ValueError(
            f"control plane: {tuple(numbers)} cannot be agreed on: only numbers from 0 to {MAX_NUMBER} can"
        )
    return tuple(numbers)


@dataclass(slots=True)
class Round:
    """The proposals for one step. ``by_group``: the first proposal of each group.

    ``contradicted``: the time in seconds at which a contradiction was seen.
    """

    by_rank: dict[int, Proposed] = field(default_factory=dict)
    by_group: dict[int, Proposed] = field(default_factory=dict)
    contradicted: float | None = None


class MaxRounds:
    """All ranks' proposals. Groups are runs of ``size`` ranks.

    ``by_step``: the steps without a maximum for which a rank has proposed; more than one when ranks are ahead.
    """

    def __init__(self, world: int, size: int) -> None:
        self.world = world
        self.size = size
        self.by_step: dict[int, Round] = {}

    def add(self, rank: int, step: int, numbers: Proposed, now: float) -> None:
        """Adds a proposal. It may come again; raises FrameError when it differs from the first."""
        found = self.by_step.get(step)
        if found is None:
            found = self.by_step[step] = Round()
        if found.by_rank.setdefault(rank, numbers) != numbers:
            raise FrameError("step", f"rank {rank} proposes {numbers} at step {step}, and {found.by_rank[rank]} before")
        of_group = found.by_group.setdefault(rank // self.size, numbers)
        first = next(iter(found.by_group.values()))
        if found.contradicted is None and (numbers != of_group or len(numbers) != len(first)):
            found.contradicted = now

    def maximum(self, step: int) -> Proposed | None:
        """The elementwise maximum, which ends the round; None until all ranks have made matching proposals."""
        found = self.by_step[step]
        if len(found.by_rank) < self.world or found.contradicted is not None:
            return None
        del self.by_step[step]
        return tuple(map(max, zip(*found.by_group.values(), strict=True)))

    def missing(self, step: int) -> tuple[int, ...]:
        """The ranks that have not proposed for ``step``."""
        found = self.by_step[step].by_rank
        return tuple(rank for rank in range(self.world) if rank not in found)

    def left_open(self) -> tuple[int, int]:
        """(rank, step) of a proposal for the earliest step of ``by_step``, which is not empty."""
        earliest = min(self.by_step)
        return next(iter(self.by_step[earliest].by_rank)), earliest

    def contradiction(self, now: float, patience: float) -> Verdict | None:
        """The verdict on a contradiction, once all ranks concerned have proposed or after ``patience`` seconds."""
        for step, found in self.by_step.items():
            if found.contradicted is not None:
                return self._verdict(step, found, patient=now - found.contradicted < patience)
        return None

    def _verdict(self, step: int, found: Round, patient: bool) -> Verdict | None:
        for number in sorted(found.by_group):
            ranks = range(number * self.size, (number + 1) * self.size)
            said = {rank: found.by_rank[rank] for rank in ranks if rank in found.by_rank}
            if len(set(said.values())) > 1:
                who = "ranks" if self.size == self.world else f"ranks of group {number}"
                culprit = odd_one(next(iter(said)), said, self.size)
                return None if patient and len(said) < self.size else _disagree(who, step, culprit, said)
        groups = self.world // self.size
        spoke = {rank // self.size: rank for rank in sorted(found.by_rank, reverse=True)}
        said = {spoke[number]: found.by_rank[spoke[number]] for number in sorted(spoke)}
        culprit = odd_one(next(iter(said)), {rank: len(numbers) for rank, numbers in said.items()}, groups)
        return None if patient and len(said) < groups else _disagree("ranks", step, culprit, said)


def _disagree(who: str, step: int, culprit: int, said: dict[int, Proposed]) -> Verdict:
    proposed = ", ".join(f"rank {rank} proposes {numbers}" for rank, numbers in said.items())
    text = f"{who} disagree on the numbers of step {step}: {proposed}. Rank {culprit} is the odd one"
    return Verdict(Cause.DISAGREEMENT, culprit, step, text)


def one_sided(proposes: int, other: int, culprit: int, step: int) -> Verdict:
    """The verdict if a rank proposes numbers for a step that another has left without proposing."""
    text = (
        f"ranks disagree at step {step}: rank {proposes} proposes numbers for it, rank {other} goes on to step "
        f"{step + 1} without. Rank {culprit} is the odd one"
    )
    return Verdict(Cause.DISAGREEMENT, culprit, step, text)
