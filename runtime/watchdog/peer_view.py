"""What one rank knows of the others, and whom it may judge by that.

Knows: whose signs a leader, a node's leader and a follower go by, when a silent leader is given up, what the kernel
says of the others' processes.
Does not know: when to look (watchdog.py), how ranks are compared (blame.py), how frames travel (heartbeat.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from parallel.control.errors import Verdict
from parallel.control.wire.frames import Heartbeat
from runtime.watchdog.blame import Patience, Sign, gone, judge, standing_still, weigh
from runtime.watchdog.heartbeat import Channel, is_gone, is_stopped


class PeerView:
    """The ranks as ``rank`` sees them. The watchdog's thread calls everything; times are those of time.monotonic.

    ``signs``: the last heartbeats of itself and of those whom it follows, a leader all, others their leader.
    """

    def __init__(self, rank: int, patience: Patience) -> None:
        self.rank = rank
        self.patience = patience
        self.signs: dict[int, Sign] = {}
        self._channel: Channel | None = None
        self._far = frozenset[int]()  # ranks on other nodes

    def begin(self, world: int, channel: Channel | None, now: float) -> None:
        """From now on: no rank has left yet. Who does not speak at all may be gone or stopped, too."""
        self._channel = channel
        followed = range(world) if channel is None or channel.leads else (channel.leader,)
        begins = Sign(Heartbeat(0, 0, "start", 0.0, inf, 0, 0, 0, ()), now)
        self.signs.update(dict.fromkeys(followed, begins))
        if channel is not None:  # processes are known of this node only
            self._far = frozenset(rank for rank in followed if rank != self.rank and channel.process(rank) is None)

    def note(self, rank: int, beat: Heartbeat, now: float) -> None:
        self.signs[rank] = Sign(beat, now)

    def was_away(self, now: float) -> None:
        """This process was stopped, or had no processor for long: the others' silence until ``now`` is its own."""
        self.signs = {rank: Sign(sign.heartbeat, max(sign.at, now)) for rank, sign in self.signs.items()}

    def judge(self, now: float) -> Verdict | None:
        """The leader judges all; a follower its leader, or itself once the leader has said goodbye."""
        channel, signs, patience = self._channel, self._there(), self.patience
        silent = [rank for rank, sign in signs.items() if now - sign.at > patience.silence]
        for rank in silent:
            if is_gone(self._process(rank)):
                return self.lost(rank)
        if channel is not None and not channel.leads:
            if channel.leader in signs:
                return self._judge_leader(channel, now)
            signs = {self.rank: signs[self.rank]}
        return judge(signs, now, patience, {rank for rank in silent if is_stopped(self._process(rank))}, self._far)

    def weigh(self, reports: Sequence[Verdict]) -> Verdict:
        """One last look at who is gone; silence counts up to this rank's own last beat, so that it was there itself."""
        signs = self._there()
        ended = {rank for rank in signs if is_gone(self._process(rank))}
        return weigh(reports, signs, self.signs[self.rank].at, self.patience.silence, ended, self._far)

    def lost(self, rank: int) -> Verdict:
        """On a rank whose connection ended."""
        return gone(rank, self.signs[rank], self._far)

    def silent(self, now: float) -> set[int]:
        """The ranks that have been silent for longer than ``patience.silence``."""
        return {rank for rank, sign in self.signs.items() if now - sign.at > self.patience.silence}

    def _judge_leader(self, channel: Channel, now: float) -> Verdict | None:
        """A leader that has fallen silent gets the time to judge first, unless it is known to be stopped."""
        sign, patience = self.signs[channel.leader], self.patience
        beat, silent = sign.heartbeat, now - sign.at
        if silent <= patience.silence:
            return None
        if is_stopped(self._process(channel.leader)):
            due = patience.stopped
        else:
            due = min(max(beat.limit - beat.still_for, 0.0) + patience.silence, patience.mute)
        if silent <= due:
            return None
        return standing_still(channel.leader, {channel.leader: sign}, now, patience.silence, self._far)

    def _there(self) -> dict[int, Sign]:
        """The signs of those who have not said goodbye."""
        left = set[int]() if self._channel is None else self._channel.left
        return {rank: sign for rank, sign in self.signs.items() if rank not in left}

    def _process(self, rank: int) -> int | None:
        return None if self._channel is None else self._channel.process(rank)
