"""The state that all parts of a Leader share: its state machine, the ranks' progress, and the one verdict at the end.

Knows: LEADER_TABLE, which step each rank has reached, which ranks are gone, the verdicts on a rank that is lost, late
or breaks the protocol. Does not know: what is agreed on (leader_digests.py, leader_max.py), turns (leader.py).
"""

from __future__ import annotations

from collections import deque

from parallel.control.errors import Cause, FrameError, Verdict
from parallel.control.protocol.states import LEADER_TABLE, LeaderInput, LeaderState, Limits, following
from parallel.control.wire.frames import EVERYONE, Codec, Kind


class LeaderStatus:
    """Where a leader and its followers are.

    ``step``: the leader's turn, -1 before the first. ``reached``: the last step each follower acknowledged, by rank.
    ``gone``: followers whose connection closed. ``outbox``: frames to send, as (rank or EVERYONE, bytes). ``ignored``
    counts frames that were legal and said nothing new. ``verdict`` is set once agreement has ended.
    """

    def __init__(self, codec: Codec, limits: Limits, rank: int) -> None:
        self.codec = codec
        self.limits = limits
        self.rank = rank
        self.state = LeaderState.RUNNING
        self.verdict: Verdict | None = None
        self.step = -1
        self.outbox: deque[tuple[int, bytes]] = deque()
        self.reached = {r: -1 for r in range(codec.world) if r != rank}
        self.gone: set[int] = set()
        self.ignored = 0

    def enter(self, given: LeaderInput) -> None:
        """Moves to the state that ``given`` leads to. Raises IllegalInput, and changes nothing, where it is illegal."""
        state = self.state
        self.state = LEADER_TABLE[state].get(given) or following(LEADER_TABLE, state, given)  # the latter for its error

    def end(self, given: LeaderInput, verdict: Verdict) -> None:
        """Enters ``given``; where that ends agreement, announces ``verdict``."""
        self.enter(given)
        if self.state is LeaderState.ENDED:
            self.announce(verdict)

    def announce(self, verdict: Verdict) -> None:
        """Makes ``verdict`` the job's, and sends it to every rank. Only the first one counts."""
        if self.verdict is None:
            self.verdict = verdict
            self.outbox.append((EVERYONE, self.codec.encode(Kind.END, EVERYONE, verdict.step, body=verdict)))

    def bad(self, rank: int, error: FrameError) -> None:
        """A connected rank sent bytes that are no legal frame."""
        who = f"rank {rank}" if rank != EVERYONE else "a connected process"
        step = max(self.reached.get(rank, 0), 0)
        self.end(LeaderInput.END, Verdict(Cause.FRAME, rank, step, f"{who} broke the protocol: {error}"))

    def lose(self, rank: int) -> None:
        """A rank that is still needed is gone."""
        reached = max(self.reached[rank], 0)
        text = (
            f"rank {rank} is gone: its control connection closed at step {reached}, before an agreed stop; "
            f"rank {self.rank} is at step {max(self.step, 0)}. Look at the log of rank {rank} first"
        )
        self.end(LeaderInput.LOST, Verdict(Cause.LOST, rank, reached, text))

    def late(self, rank: int, missed: str, seconds: float) -> None:
        """A rank ``missed`` something within its deadline of ``seconds``."""
        text = (
            f"rank {rank} {missed} within {seconds:g} s after rank {self.rank}, which is at step {self.step}. "
            "It hangs, or is stopped"
        )
        self.end(LeaderInput.LATE, Verdict(Cause.DEADLINE, rank, max(self.reached[rank], 0), text))

    def deadline_of(self, rank: int) -> float:
        """Seconds that a rank may be silent; more before its first turn, while it may still load the model."""
        return self.limits.deadline if self.reached[rank] >= 0 else self.limits.start
