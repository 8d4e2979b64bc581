"""The leader's machine: takes turns, makes the records, reads the acknowledgements, names who is late or lost.

Knows: states.py's rules, turns and records. It has four parts: leader_status.py (state, progress and verdict),
leader_digests.py (comparing digests), leader_max.py (maxima), leader_inbox.py (reliable messages). Times are seconds of
any steady local clock, passed in. Does not know: sockets. Frames to send wait in ``outbox`` as (rank or EVERYONE,
bytes) until the plane takes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from parallel.control.errors import Cause, FrameError, Verdict
from parallel.control.protocol.divergence import Recent, nothing
from parallel.control.protocol.leader_digests import DigestComparison
from parallel.control.protocol.leader_inbox import LeaderInbox
from parallel.control.protocol.leader_max import COLLECTING, MaxAgreement
from parallel.control.protocol.leader_status import LeaderStatus
from parallel.control.protocol.max_rounds import Proposed
from parallel.control.protocol.states import LeaderInput, LeaderState, Limits
from parallel.control.wire.frame_template import FrameTemplate
from parallel.control.wire.frames import EVERYONE, STOP, Codec, Decisions, Frame, Kind, Numbers

# Names, since a member of an Enum costs as much as a call to look up (Python 3.11).
_TURN, _STOP_TURN, _ACK = LeaderInput.TURN, LeaderInput.STOP_TURN, Kind.ACK


class Leader:
    """Agreement as rank ``rank`` of ``codec.world`` leads it.

    ``recent`` gives this rank's last decisions for a report (runtime/schedule/digest.py's ``recent``). ``groups``:
    runs of world / groups ranks that plan alike. Raises ValueError for a negative horizon.
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
        self.codec = codec
        self.limits = limits or Limits()
        self.rank = rank
        self.status = status = LeaderStatus(codec, self.limits, rank)
        self.digests = DigestComparison(status, groups, recent)
        self.maxima = MaxAgreement(status, horizon, self.digests.group_size)
        self.inbox = LeaderInbox(status)
        self.outbox = status.outbox
        self.reached = status.reached
        self.set_horizon(horizon)
        self._sent: dict[int, tuple[float, bytes]] = {}  # by step: when, and the record, while a rank may ask for it
        self._oldest_sent = 0
        self._stop = False
        self._stop_step: int | None = None

    # ---- the engine's side ----

    @property
    def state(self) -> LeaderState:
        return self.status.state

    @property
    def verdict(self) -> Verdict | None:
        """How agreement ended; None while it goes on."""
        return self.status.verdict

    @property
    def step(self) -> int:
        """The current turn; -1 before the first."""
        return self.status.step

    @property
    def ignored(self) -> int:
        """How many frames were legal and said nothing new."""
        return self.status.ignored

    @property
    def maximum(self) -> Proposed | None:
        """See MaxAgreement."""
        return self.maxima.maximum

    @property
    def pending(self) -> bool:
        """Whether something was submitted that is not in effect yet: then an idle engine must go on taking turns."""
        return self._stop or any(payload or flags for payload, flags in self._coming)

    def explain_with(self, recent: Recent) -> None:
        """``recent`` returns this rank's last decisions, for the report of a divergence."""
        self.digests.recent = recent

    def set_horizon(self, horizon: int) -> None:
        """What the leader submits takes effect so many turns later. Before the first turn, else ValueError."""
        if horizon < 0 or self.step >= 0:
            raise ValueError(
                f"control plane: horizon {horizon} at step {self.step}; it is 0 or more, set before step 0"
            )
        self.horizon = self.maxima.horizon = horizon
        self._record = FrameTemplate(self.codec, Kind.RECORD, EVERYONE, horizon)
        self._coming: deque[tuple[bytes, int]] = deque((b"", 0) for _ in range(horizon))

    def agree_horizon(self, horizon: int) -> None:
        """``set_horizon`` here, and on every other rank by a frame in ``outbox``."""
        self.set_horizon(horizon)
        self.outbox.append((EVERYONE, self.codec.encode(Kind.HORIZON, EVERYONE, horizon=horizon)))

    def short_of_stop(self) -> tuple[int, ...]:
        """Ranks that have not begun the last turn: they still wait for our records."""
        if self._stop_step is None:
            return ()
        status = self.status
        return tuple(r for r, step in status.reached.items() if step < self._stop_step and r not in status.gone)

    def submit_stop(self) -> None:
        """The next record carries the stop."""
        self.status.enter(LeaderInput.SUBMIT_STOP)
        self._stop = True

    def turn(self, step: int, digest: int, payload: bytes, now: float) -> bytes:
        """``begin`` and ``look_back``, for callers that send nothing in between: the record goes into ``outbox``."""
        effect, record = self.begin(step, digest, payload)
        self.outbox.append((EVERYONE, record))
        self.look_back(digest, payload, record, now)
        return effect

    def begin(self, step: int, digest: int, payload: bytes) -> tuple[bytes, bytes]:
        """Begins turn ``step``; ``payload`` takes effect ``horizon`` turns later. Returns the payload that takes effect
        now, and the record, which must be sent to every rank.

        ``look_back`` must follow. It is apart because other ranks may wait for the record, and nobody waits for it.
        """
        status = self.status
        if step != status.step + 1:
            raise ValueError(f"control plane: turn {step} after turn {status.step}; turns are taken one by one")
        effect, flags = self._coming[0] if self._coming else (payload, STOP if self._stop else 0)
        if self._stop:
            codec, horizon = self.codec, self.horizon
            record = codec.encode(Kind.RECORD, EVERYONE, step, digest, horizon=horizon, flags=STOP, payload=payload)
        else:
            record = self._record.fill(step, digest, payload)
        status.enter(_STOP_TURN if flags & STOP else _TURN)
        status.step = step
        return effect, record

    def look_back(self, digest: int, payload: bytes, record: bytes, now: float) -> None:
        """The rest of a turn's beginning: keeps the record for resends, and compares ``digest`` with those of ranks
        that reached this step before us."""
        step, flag = self.status.step, 0
        if self._stop:
            self._stop, self._stop_step, flag = False, step + self.horizon, STOP
        self._coming.append((payload, flag))
        self._coming.popleft()
        self._sent[step] = now, record
        self._forget()
        self.digests.add(self.rank, step, digest, now)
        self.maxima.began(self.rank, step)

    def propose(self, step: int, numbers: Sequence[int], now: float) -> None:
        """See MaxAgreement."""
        self.maxima.propose(step, numbers, now)

    def leave(self, cause: Cause, text: str) -> None:
        """This rank ends the job (or, after the agreed stop, just leaves)."""
        self.status.enter(LeaderInput.LEAVE)
        if self.status.state is LeaderState.ENDED:
            self.status.announce(Verdict(cause, self.rank, max(self.status.step, 0), text))

    def stalled(self, ranks: tuple[int, ...]) -> None:
        """The plane could not deliver a record within the deadline: the first of ``ranks`` does not read."""
        step = self.status.reached[ranks[0]] + 1
        self.status.late(ranks[0], f"did not reach step {step}", self.limits.deadline)

    # ---- the followers' side ----

    def receive(self, frame: Frame, now: float) -> None:
        """A frame from a follower. One that no follower sends is a BadPeer verdict, not an exception."""
        kind, rank, status = frame.kind, frame.rank, self.status
        if rank not in status.reached:
            self.bad(EVERYONE, FrameError("rank", f"{kind.name} from rank {rank}, which is no follower"))
        elif kind is _ACK:
            self._acknowledged(rank, frame.step, frame.digest, now)
        elif kind is Kind.PROPOSE and isinstance(frame.body, Numbers):
            self.maxima.receive(rank, frame.step, frame.body.numbers, now)
        elif kind is Kind.MESSAGE:
            self.inbox.receive(rank, frame.step, frame.payload)
        elif kind is Kind.RESEND:
            status.enter(LeaderInput.RESEND)
            for step in range(max(frame.step, self._oldest_sent), status.step + 1):
                self.outbox.append((rank, self._sent[step][1]))
        elif kind is Kind.BYE:
            self.lost(rank, now)
        elif isinstance(frame.body, Decisions):
            self.digests.explained(rank, frame.step, frame.digest, frame.body.decisions, now)
        elif isinstance(frame.body, Verdict):
            status.end(LeaderInput.END, frame.body)
        else:
            self.bad(rank, FrameError("order", f"{kind.name} is not for a leader"))

    def bad(self, rank: int, error: FrameError) -> None:
        """A connected rank sent bytes that are no legal frame."""
        self.status.bad(rank, error)

    def lost(self, rank: int, now: float) -> None:
        """A rank's connection closed."""
        status = self.status
        if rank in status.gone:
            return
        status.gone.add(rank)
        may_leave = self._stop_step is not None and status.reached[rank] >= self._stop_step
        if may_leave and status.state not in COLLECTING:
            status.enter(LeaderInput.LEFT)
            return
        status.lose(rank)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Looks at the time: resolves a divergence that waited long enough, ends the job over a rank that is late."""
        status = self.status
        if status.state is LeaderState.DIVERGED:
            self.digests.tick(now)
            return
        self.maxima.tick(now)
        if status.state not in (LeaderState.RUNNING, LeaderState.AGREEING):
            return
        for rank, reached in status.reached.items():
            if reached + 1 not in self._sent or rank in status.gone:
                continue
            sent_at, _ = self._sent[reached + 1]
            deadline = status.deadline_of(rank)
            if now - sent_at > deadline:
                status.late(rank, f"did not reach step {reached + 1}", deadline)
                return

    # ---- inside ----

    def _forget(self) -> None:
        """Drops the records that every rank has taken: one that acknowledged step s took all up to s - 1 - horizon."""
        status = self.status
        reached = status.reached
        if status.gone:
            reached = {rank: step for rank, step in reached.items() if rank not in status.gone}
        taken = min(reached.values(), default=status.step) - self.horizon
        while self._oldest_sent < taken:
            del self._sent[self._oldest_sent]
            self.maxima.forget(self._oldest_sent)
            self.digests.forget(self._oldest_sent)
            self._oldest_sent += 1

    def _acknowledged(self, rank: int, step: int, digest: int, now: float) -> None:
        status = self.status
        if step > status.step + self.horizon + 1:  # the turn after the one that takes our newest record
            said = f"rank {rank} cannot be in step {step}, rank {self.rank} is in {status.step}"
            self.bad(rank, FrameError("step", said))
            return
        if step > status.reached[rank]:
            status.reached[rank] = step
        if step < self._oldest_sent:
            status.ignored += 1
            return
        self.digests.add(rank, step, digest, now)
        self.maxima.began(rank, step)
