"""The leader's machine: makes the records, reads the acknowledgements, names who is late, lost or of another mind.

Knows: states.py's rules and LEADER_TABLE. Times are seconds of any steady local clock, passed in. Its parts stand
on each other: leader_verdicts.py (verdicts), leader_digests.py (digests), leader_max.py (numbers and what is told),
and the turns here. Does not know: sockets. Frames to send wait in ``outbox`` as (rank or EVERYONE, bytes) until the
plane takes them.
"""

from __future__ import annotations

from collections import deque

from parallel.control.errors import Cause, FrameError, Verdict
from parallel.control.protocol.divergence import Recent, nothing
from parallel.control.protocol.leader_max import WAITING, Agreeing
from parallel.control.protocol.states import LeaderInput, LeaderState, Limits
from parallel.control.wire.frame_template import Form
from parallel.control.wire.frames import EVERYONE, STOP, Codec, Decisions, Frame, Kind, Numbers

# Names, since a member of an Enum costs as much as a call to look up (Python 3.11).
_TURN, _STOP_TURN, _ACK = LeaderInput.TURN, LeaderInput.STOP_TURN, Kind.ACK


class Leader(Agreeing):
    """Agreement as rank ``rank`` of ``codec.world`` leads it. ``verdict`` is set once it has ended.

    ``recent`` gives this rank's last decisions for a report (runtime/schedule/digest.py's ``recent``). ``groups``:
    runs of world / groups ranks that plan alike.
    """

    def __init__(
        self,
        codec: Codec,
        horizon: int,
        limits: Limits | None = None,
        recent: Recent = nothing,
        rank: int = 0,
        groups: int = 1,
    ) -> None:
        if horizon < 1:
            raise ValueError(f"control plane: horizon {horizon} with {codec.world} ranks; it must be at least 1")
        super().__init__(codec, limits or Limits(), rank, groups, recent, horizon)
        self._record = Form(codec, Kind.RECORD, EVERYONE, horizon)
        self._coming: deque[tuple[bytes, int]] = deque((b"", 0) for _ in range(horizon))
        self._sent: dict[int, tuple[float, bytes]] = {}  # by step: when, and the record, while a rank may ask for it
        self._oldest_sent = 0
        self._stop = False
        self._stop_step: int | None = None

    # ---- the engine's side ----

    @property
    def pending(self) -> bool:
        """Whether something was submitted that is not in effect yet: then an idle engine must go on taking turns."""
        return self._stop or any(payload or flags for payload, flags in self._coming)

    def short_of_stop(self) -> tuple[int, ...]:
        """Ranks that have not begun the last turn: they still wait for records of ours."""
        if self._stop_step is None:
            return ()
        return tuple(r for r, step in self.acknowledged.items() if step < self._stop_step and r not in self.gone)

    def submit_stop(self) -> None:
        """The next record carries the stop."""
        self._enter(LeaderInput.SUBMIT_STOP)
        self._stop = True

    def turn(self, step: int, digest: int, payload: bytes, now: float) -> bytes:
        """``begin`` and ``look_back``, for callers that send nothing in between: the record goes into ``outbox``."""
        effect, record = self.begin(step, digest, payload)
        self.outbox.append((EVERYONE, record))
        self.look_back(digest, payload, record, now)
        return effect

    def begin(self, step: int, digest: int, payload: bytes) -> tuple[bytes, bytes]:
        """Begins turn ``step``; ``payload`` takes effect ``horizon`` turns later. Returns what takes effect now, and
        the record, which is to be sent to everybody.

        ``look_back`` has to follow: others may be waiting for the record, and nobody waits for what is done there.
        """
        if step != self.step + 1:
            raise ValueError(f"control plane: turn {step} after turn {self.step}; turns are taken one by one")
        effect, flags = self._coming[0]
        if self._stop:
            codec, horizon = self.codec, self.horizon
            record = codec.encode(Kind.RECORD, EVERYONE, step, digest, horizon=horizon, flags=STOP, payload=payload)
        else:
            record = self._record.fill(step, digest, payload)
        self._enter(_STOP_TURN if flags & STOP else _TURN)
        self.step = step
        return effect, record

    def look_back(self, digest: int, payload: bytes, record: bytes, now: float) -> None:
        """The rest of the turn's beginning: its books, and ``digest`` compared with those of ranks that were here
        before us."""
        step, flag = self.step, 0
        if self._stop:
            self._stop, self._stop_step, flag = False, step + self.horizon, STOP
        self._coming.popleft()
        self._coming.append((payload, flag))
        self._sent[step] = now, record
        self._forget()
        self._compare(self.rank, step, digest, now)
        self._went_on(self.rank, step)

    def leave(self, cause: Cause, text: str) -> None:
        """This rank ends the job (or, after the agreed stop, just leaves)."""
        self._enter(LeaderInput.LEAVE)
        if self.state is LeaderState.ENDED:
            self._announce(Verdict(cause, self.rank, max(self.step, 0), text))

    # ---- the ranks' side ----

    def receive(self, frame: Frame, now: float) -> None:
        """A frame from a follower. One that no follower sends is a BadPeer verdict, not an exception."""
        kind, rank = frame.kind, frame.rank
        if rank not in self.acknowledged:
            self.bad(EVERYONE, FrameError("rank", f"{kind.name} from rank {rank}, which is no follower"))
        elif kind is _ACK:
            self._acknowledge(rank, frame.step, frame.digest, now)
        elif kind is Kind.PROPOSE and isinstance(frame.body, Numbers):
            self._hear_proposal(rank, frame.step, frame.body.numbers, now)
        elif kind is Kind.TELL:
            self._hear_told(rank, frame.step, frame.payload)
        elif kind is Kind.RESEND:
            self._enter(LeaderInput.RESEND)
            for step in range(max(frame.step, self._oldest_sent), self.step + 1):
                self.outbox.append((rank, self._sent[step][1]))
        elif kind is Kind.BYE:
            self.lost(rank, now)
        elif isinstance(frame.body, Decisions):
            self._explained(rank, frame.step, frame.digest, frame.body.decisions, now)
        elif isinstance(frame.body, Verdict):
            self._end(LeaderInput.END, frame.body)
        else:
            self.bad(rank, FrameError("order", f"{kind.name} is not for a leader"))

    def lost(self, rank: int, now: float) -> None:
        """A rank's connection closed."""
        if rank in self.gone:
            return
        reached = self.acknowledged[rank]
        self.gone.add(rank)
        may_leave = self._stop_step is not None and reached >= self._stop_step
        if may_leave and self.state not in WAITING:
            self._enter(LeaderInput.LEFT)
            return
        self._lose(rank)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Looks at the time: settles a dispute that waited long enough, ends the job over a rank that is late."""
        if self._dispute is not None and self.state is LeaderState.DISPUTED:
            self._settle(now, patient=now - self._dispute.since < self.limits.dispute)
            return
        self._look_at_proposals(now)
        if self.state not in (LeaderState.RUNNING, LeaderState.AGREEING):
            return
        for rank, reached in self.acknowledged.items():
            if reached + 1 not in self._sent or rank in self.gone:
                continue
            sent_at, _ = self._sent[reached + 1]
            patience = self._patience(rank)
            if now - sent_at > patience:
                self._late(rank, f"did not reach step {reached + 1}", patience)
                return

    # ---- inside ----

    def _forget(self) -> None:
        """Drops the records that every rank has taken: one that acknowledged step s took all up to s - 1 - horizon."""
        reached = self.acknowledged
        if self.gone:
            reached = {rank: step for rank, step in reached.items() if rank not in self.gone}
        taken = min(reached.values(), default=self.step) - self.horizon
        while self._oldest_sent < taken:
            del self._sent[self._oldest_sent]
            self._agreed.pop(self._oldest_sent, None)
            for group in self._groups:
                group.forget(self._oldest_sent)
            self._oldest_sent += 1

    def _acknowledge(self, rank: int, step: int, digest: int, now: float) -> None:
        if step > self.step + self.horizon + 1:  # the turn after the one that takes our newest record
            self.bad(
                rank, FrameError("step", f"rank {rank} cannot be in step {step}, rank {self.rank} is in {self.step}")
            )
            return
        if step > self.acknowledged[rank]:
            self.acknowledged[rank] = step
        if step < self._oldest_sent:
            self.ignored += 1
            return
        self._compare(rank, step, digest, now)
        self._went_on(rank, step)
