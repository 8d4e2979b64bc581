"""How the leader's agreement ends: whoever finds a reason, there is one verdict, and everybody is told.

Knows: the leader's state, which ranks are gone and how far the others are, the verdicts on a rank that is late or
breaks the protocol. Does not know: what is agreed on (leader.py, leader_digests.py, leader_max.py).
"""

from __future__ import annotations

from collections import deque

from parallel.control.errors import Cause, FrameError, Verdict
from parallel.control.protocol.states import LEADER_TABLE, LeaderInput, LeaderState, Limits, following
from parallel.control.wire.frames import EVERYONE, Codec, Kind


class Ending:
    """The part of a leader that all its other parts stand on. ``acknowledged``: the step that each rank has reached."""

    def __init__(self, codec: Codec, limits: Limits, rank: int) -> None:
        self.codec = codec
        self.limits = limits
        self.rank = rank
        self.state = LeaderState.RUNNING
        self.verdict: Verdict | None = None
        self.step = -1
        self.outbox: deque[tuple[int, bytes]] = deque()
        self.acknowledged = {r: -1 for r in range(codec.world) if r != rank}
        self.gone: set[int] = set()
        self.ignored = 0  # frames that were legal to receive and said nothing new

    def bad(self, rank: int, error: FrameError) -> None:
        """A connected rank sent what is no frame."""
        who = f"rank {rank}" if rank != EVERYONE else "a connected process"
        step = max(self.acknowledged.get(rank, 0), 0)
        self._end(LeaderInput.END, Verdict(Cause.FRAME, rank, step, f"{who} broke the protocol: {error}"))

    def stalled(self, ranks: tuple[int, ...]) -> None:
        """The plane could not deliver a record within the deadline: the first of ``ranks`` does not read."""
        self._late(ranks[0], f"did not reach step {self.acknowledged[ranks[0]] + 1}", self.limits.deadline)

    def _enter(self, given: LeaderInput) -> None:
        state = self.state
        self.state = LEADER_TABLE[state].get(given) or following(LEADER_TABLE, state, given)  # the latter for its error

    def _announce(self, verdict: Verdict) -> None:
        if self.verdict is None:
            self.verdict = verdict
            self.outbox.append((EVERYONE, self.codec.encode(Kind.END, EVERYONE, verdict.step, body=verdict)))

    def _end(self, given: LeaderInput, verdict: Verdict) -> None:
        self._enter(given)
        if self.state is LeaderState.ENDED:
            self._announce(verdict)

    def _lose(self, rank: int) -> None:
        """A rank is gone that is still needed."""
        reached = max(self.acknowledged[rank], 0)
        text = (
            f"rank {rank} is gone: its control connection closed at step {reached}, before an agreed stop; "
            f"rank {self.rank} is at step {max(self.step, 0)}. Look at the log of rank {rank} first"
        )
        self._end(LeaderInput.LOST, Verdict(Cause.LOST, rank, reached, text))

    def _patience(self, rank: int) -> float:
        return self.limits.deadline if self.acknowledged[rank] >= 0 else self.limits.start  # it may still be loading

    def _late(self, rank: int, missed: str, seconds: float) -> None:
        text = (
            f"rank {rank} {missed} within {seconds:g} s after rank {self.rank}, which is at step {self.step}. "
            "It hangs, or is stopped"
        )
        self._end(LeaderInput.LATE, Verdict(Cause.DEADLINE, rank, max(self.acknowledged[rank], 0), text))
