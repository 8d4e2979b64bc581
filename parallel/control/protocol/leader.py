"""The leader's machine: takes turns, makes records, compares digests, agrees on maxima, names a late or lost rank.

Knows: the rules of states.py, and each rank's progress. Times are seconds of any steady local clock, passed in.
Does not know: sockets, what a digest or a number stands for, how proposals are compared (max_rounds.py), how a
divergence is worded (divergence.py). Frames to send wait in ``outbox`` until the plane takes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from parallel.control.errors import Cause, FrameError, Verdict
from parallel.control.protocol.divergence import Divergence, Recent, nothing, summaries
from parallel.control.protocol.max_rounds import MaxRounds, Proposed, checked, one_sided
from parallel.control.protocol.reliable_messages import Inbox
from parallel.control.protocol.states import LEADER_TABLE, LeaderInput, LeaderState, Limits, following
from parallel.control.wire.frames import EVERYONE, STOP, Codec, Decisions, Frame, FrameTemplate, Kind, Numbers

# Names, since a member of an Enum costs as much as a call to look up (Python 3.11).
_TURN, _STOP_TURN, _SAME, _ACK = LeaderInput.TURN, LeaderInput.STOP_TURN, LeaderInput.SAME, Kind.ACK
COLLECTING = (LeaderState.AGREEING, LeaderState.FINISHING)  # waiting for the ranks' numbers


class Leader:
    """Agreement as rank ``rank`` of ``codec.world`` leads it.

    ``step``: the leader's turn, -1 before the first. ``reached``: by rank, the last step a follower acknowledged.
    ``gone``: followers whose connection closed. ``ignored`` counts legal frames that said nothing new. ``maximum``: the
    last one agreed on, None while this rank has proposed and others have not. ``verdict``: how agreement ended, or
    None. ``recent`` returns this rank's last decisions for the report of a divergence. ``groups``: runs of world /
    groups ranks that plan alike. Raises ValueError for a negative horizon.
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
        self.state = LeaderState.RUNNING
        self.verdict: Verdict | None = None
        self.step = -1
        self.reached = {r: -1 for r in range(codec.world) if r != rank}
        self.gone: set[int] = set()
        self.ignored = 0
        self.maximum: Proposed | None = None
        self.outbox: deque[tuple[int, bytes]] = deque()  # (rank or EVERYONE, frame)
        self.inbox = Inbox(codec, rank, self.reached, self.outbox)
        self._sent: dict[int, tuple[float, bytes]] = {}  # by step: when its record was made, and the frame
        self._digests: dict[int, dict[int, int]] = {}  # by step and rank
        self._answers: dict[int, bytes] = {}  # by step: the frame with the maximum
        self._oldest = 0  # the first step of these: a rank may still ask for it
        self.recent = recent
        self._groups, self._group_size = groups, codec.world // groups
        self._divergence: Divergence | None = None
        self._rounds = MaxRounds(codec.world, self._group_size)
        self._proposed = -1, 0.0  # the step of our last proposal, and when it was made
        self._alive = 0.0  # when we last sent a sign of life while we wait for proposals
        self._stop = False
        self._stop_step: int | None = None
        self.set_horizon(horizon)

    # ---- the engine's side ----

    @property
    def pending(self) -> bool:
        """Whether something was submitted that is not in effect yet: then an idle engine must take further turns."""
        return self._stop or any(payload or flags for payload, flags in self._coming)

    def set_horizon(self, horizon: int) -> None:
        """What the leader submits takes effect so many turns later. Before the first turn, else ValueError."""
        if horizon < 0 or self.step >= 0:
            raise ValueError(
                f"control plane: horizon {horizon} at step {self.step}; it is 0 or more, set before step 0"
            )
        self.horizon = horizon
        self._template = FrameTemplate(self.codec, Kind.RECORD, EVERYONE, horizon)
        self._coming: deque[tuple[bytes, int]] = deque((b"", 0) for _ in range(horizon))

    def agree_horizon(self, horizon: int) -> None:
        """``set_horizon`` here, and on every other rank by a frame in ``outbox``."""
        self.set_horizon(horizon)
        self.outbox.append((EVERYONE, self.codec.encode(Kind.HORIZON, EVERYONE, horizon=horizon)))

    def short_of_stop(self) -> tuple[int, ...]:
        """Ranks that have not begun the last turn: they still wait for our records."""
        if self._stop_step is None:
            return ()
        return tuple(r for r, step in self.reached.items() if step < self._stop_step and r not in self.gone)

    def submit_stop(self) -> None:
        """The next record carries the stop."""
        self.enter(LeaderInput.SUBMIT_STOP)
        self._stop = True

    def begin(self, step: int, digest: int, payload: bytes) -> tuple[bytes, bytes]:
        """Begins turn ``step``; ``payload`` takes effect ``horizon`` turns later. Returns what takes effect now and the
        record. Other ranks may wait for that: broadcast it, then call ``look_back``.
        """
        if step != self.step + 1:
            raise ValueError(f"control plane: turn {step} after turn {self.step}; turns are taken one by one")
        effect, flags = self._coming[0] if self._coming else (payload, STOP if self._stop else 0)
        if self._stop:
            codec, horizon = self.codec, self.horizon
            record = codec.encode(Kind.RECORD, EVERYONE, step, digest, horizon=horizon, flags=STOP, payload=payload)
        else:
            record = self._template.fill(step, digest, payload)
        self.enter(_STOP_TURN if flags & STOP else _TURN)
        self.step = step
        return effect, record

    def look_back(self, digest: int, payload: bytes, record: bytes, now: float) -> None:
        """The rest of a turn's beginning: keeps the record, compares ``digest`` with those of ranks that are ahead."""
        step, flag = self.step, 0
        if self._stop:
            self._stop, self._stop_step, flag = False, step + self.horizon, STOP
        self._coming.append((payload, flag))
        self._coming.popleft()
        self._sent[step] = now, record
        self._forget()
        self._compare(self.rank, step, digest, now)
        self._began(self.rank, step)

    def _forget(self) -> None:
        """Drops what every connected rank is past: one that acknowledged step s took all records up to s-1-horizon."""
        reached = self.reached
        if self.gone:
            reached = {rank: step for rank, step in reached.items() if rank not in self.gone}
        taken = min(reached.values(), default=self.step) - self.horizon
        while self._oldest < taken:
            del self._sent[self._oldest]
            self._digests.pop(self._oldest, None)
            self._answers.pop(self._oldest, None)
            self._oldest += 1

    def leave(self, cause: Cause, text: str) -> None:
        """This rank ends the job (or, after the agreed stop, just leaves)."""
        self._end(LeaderInput.LEAVE, Verdict(cause, self.rank, max(self.step, 0), text))

    def stalled(self, ranks: tuple[int, ...]) -> None:
        """The plane could not deliver a record within the deadline: the first of ``ranks`` does not read."""
        self._late(ranks[0], f"did not reach step {self.reached[ranks[0]] + 1}", self.limits.deadline)

    # ---- the followers' side ----

    def receive(self, frame: Frame, now: float) -> None:
        """A frame from a follower. One that no follower sends is a BadPeer verdict, not an exception."""
        kind, rank = frame.kind, frame.rank
        if rank not in self.reached:
            self.bad(EVERYONE, FrameError("rank", f"{kind.name} from rank {rank}, which is no follower"))
        elif kind is _ACK:
            self._acknowledged(rank, frame.step, frame.digest, now)
        elif kind is Kind.PROPOSE and isinstance(frame.body, Numbers):
            self._propose_for(rank, frame.step, frame.body.numbers, now)
        elif kind is Kind.MESSAGE:
            try:
                self.ignored += not self.inbox.receive(rank, frame.step, frame.payload)
            except FrameError as error:
                self.bad(rank, error)
        elif kind is Kind.RESEND:
            self.enter(LeaderInput.RESEND)
            for step in range(max(frame.step, self._oldest), self.step + 1):
                self.outbox.append((rank, self._sent[step][1]))
        elif kind is Kind.BYE:
            self.lost(rank, now)
        elif isinstance(frame.body, Decisions):
            self._explained(frame, frame.body, now)
        elif isinstance(frame.body, Verdict):
            self._end(LeaderInput.END, frame.body)
        else:
            self.bad(rank, FrameError("order", f"{kind.name} is not for a leader"))

    def lost(self, rank: int, now: float) -> None:
        """A rank's connection closed."""
        if rank in self.gone:
            return
        self.gone.add(rank)
        may_leave = self._stop_step is not None and self.reached[rank] >= self._stop_step
        if may_leave and self.state not in COLLECTING:
            self.enter(LeaderInput.LEFT)
            return
        self._lose(rank)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Looks at the time: resolves a divergence that waited long enough, ends the job over a rank that is late."""
        if self.state is LeaderState.DIVERGED:
            if self._divergence is not None:
                self._resolve(self._divergence, patient=now - self._divergence.since < self.limits.divergence)
            return
        self._tick_maxima(now)
        if self.state not in (LeaderState.RUNNING, LeaderState.AGREEING):
            return
        for rank, reached in self.reached.items():
            if reached + 1 not in self._sent or rank in self.gone:
                continue
            sent_at, _ = self._sent[reached + 1]
            deadline = self.deadline_of(rank)
            if now - sent_at > deadline:
                self._late(rank, f"did not reach step {reached + 1}", deadline)
                return

    def _acknowledged(self, rank: int, step: int, digest: int, now: float) -> None:
        if step > self.step + self.horizon + 1:  # the turn after the one that takes our newest record
            said = f"rank {rank} cannot be in step {step}, rank {self.rank} is in {self.step}"
            self.bad(rank, FrameError("step", said))
            return
        if step > self.reached[rank]:
            self.reached[rank] = step
        if step < self._oldest:
            self.ignored += 1
            return
        self._compare(rank, step, digest, now)
        self._began(rank, step)

    # ---- state and verdict ----

    def enter(self, given: LeaderInput) -> None:
        """Moves to the state that ``given`` leads to. Raises IllegalInput, and changes nothing, if it is illegal."""
        state = self.state
        self.state = LEADER_TABLE[state].get(given) or following(LEADER_TABLE, state, given)  # the latter for its error

    def _end(self, given: LeaderInput, verdict: Verdict) -> None:
        """Enters ``given``; if that ends agreement, the first ``verdict`` is the job's and goes to every rank."""
        self.enter(given)
        if self.state is LeaderState.ENDED and self.verdict is None:
            self.verdict = verdict
            self.outbox.append((EVERYONE, self.codec.encode(Kind.END, EVERYONE, verdict.step, body=verdict)))

    def bad(self, rank: int, error: FrameError) -> None:
        """A connected rank sent bytes that are no legal frame."""
        who = f"rank {rank}" if rank != EVERYONE else "a connected process"
        step = max(self.reached.get(rank, 0), 0)
        self._end(LeaderInput.END, Verdict(Cause.FRAME, rank, step, f"{who} broke the protocol: {error}"))

    def _lose(self, rank: int) -> None:
        """A rank that is still needed is gone."""
        reached = max(self.reached[rank], 0)
        text = (
            f"rank {rank} is gone: its control connection closed at step {reached}, before an agreed stop; "
            f"rank {self.rank} is at step {max(self.step, 0)}. Look at the log of rank {rank} first"
        )
        self._end(LeaderInput.LOST, Verdict(Cause.LOST, rank, reached, text))

    def _late(self, rank: int, missed: str, seconds: float) -> None:
        """A rank ``missed`` something within its deadline of ``seconds``."""
        text = (
            f"rank {rank} {missed} within {seconds:g} s after rank {self.rank}, which is at step {self.step}. "
            "It hangs, or is stopped"
        )
        self._end(LeaderInput.LATE, Verdict(Cause.DEADLINE, rank, max(self.reached[rank], 0), text))

    def deadline_of(self, rank: int) -> float:
        """Seconds that a rank may be silent; more before its first turn, while it may still load the model."""
        return self.limits.deadline if self.reached[rank] >= 0 else self.limits.start

    # ---- digests ----

    def _compare(self, rank: int, step: int, digest: int, now: float) -> None:
        """Keeps a rank's digest; compares what can be compared now with the group's reference, its first rank."""
        known, reference = self._digests.setdefault(step, {}), rank - rank % self._group_size
        known.setdefault(rank, digest)
        comparable = [rank] if reference in known else []
        if rank == reference:
            comparable = [other for other in known if reference < other < reference + self._group_size]
        if not comparable and rank != self.rank:
            self.enter(_SAME)
        for other in comparable:
            if known[other] == known[reference]:
                self.enter(_SAME)
                continue
            self._diverge(LeaderInput.DIFFERS, reference, step, now)
            if self.state is LeaderState.DIVERGED:
                for asked, theirs in ((other, known[reference]), (reference, known[other])):
                    if asked != self.rank:
                        self.outbox.append((asked, self.codec.encode(Kind.EXPLAIN, asked, step, theirs)))
        if self._divergence is not None:
            self._resolve(self._divergence, patient=True)

    def _explained(self, frame: Frame, sent: Decisions, now: float) -> None:
        """A rank sent its last decisions before its digest of a step."""
        rank, step, digest = frame.rank, frame.step, frame.digest
        known, reference = self._digests.get(step, {}), rank - rank % self._group_size
        if rank != reference and known.get(reference, digest) != digest:
            known.setdefault(rank, digest)
            self._diverge(LeaderInput.EXPLAINED, reference, step, now)
        elif rank != reference or self._divergence is None or self._divergence.step != step:
            self.ignored += 1
            return
        if self._divergence is not None and self._divergence.reference == reference:
            self._divergence.explained[rank] = sent.decisions
            self._resolve(self._divergence, patient=True)

    def _diverge(self, given: LeaderInput, reference: int, step: int, now: float) -> None:
        """Digests of ``step`` differ: it becomes the divergence, unless an earlier step's is known."""
        self.enter(given)
        before, ranks = self._divergence, range(reference, reference + self._group_size)
        if self.state is LeaderState.DIVERGED and (before is None or step < before.step):
            since = now if before is None else before.since
            self._divergence = Divergence(ranks, step, since, self._digests[step])
            if before is not None and before.reference == reference:
                self._divergence.explained |= before.explained

    def _resolve(self, divergence: Divergence, patient: bool) -> None:
        """Ends with the verdict once every rank voted and both sides sent their decisions, or when not ``patient``."""
        if self.state is not LeaderState.DIVERGED:
            return
        if divergence.reference == self.rank:
            divergence.explained[self.rank] = summaries(self.recent, divergence.digest)
        if not (patient and divergence.waits(self.reached, self.gone)):
            self._end(LeaderInput.RESOLVED, divergence.verdict(self.reached, self._groups))

    # ---- maxima: an all-reduce of integers ----

    def propose(self, step: int, numbers: Sequence[int], now: float) -> None:
        """This rank's numbers for its current turn ``step``. ``maximum`` is set once every rank has proposed.

        Raises ValueError for another step, a second proposal, or numbers that cannot be agreed on.
        """
        mine = checked(numbers, step, self.step, self._proposed[0])
        self.enter(LeaderInput.PROPOSE)
        self.maximum = None
        self._proposed, self._alive = (step, now), now
        self._add_proposal(self.rank, step, mine, now)
        for rank, reached in self.reached.items():
            self._began(rank, reached)
        if self.state in COLLECTING:
            for rank in self.gone.intersection(self._rounds.missing(step)):  # harmless until now, in the last turn
                self._lose(rank)

    def _propose_for(self, rank: int, step: int, numbers: Proposed, now: float) -> None:
        """A follower's proposal for ``step``."""
        answer = self._answers.get(step)
        if step > self.step + self.horizon + 1:
            said = f"rank {rank} cannot propose for step {step}, rank {self.rank} is in {self.step}"
            self.bad(rank, FrameError("step", said))
            return
        self.enter(LeaderInput.PROPOSED)
        if answer is not None:
            self.outbox.append((rank, answer))  # the answer was lost, or the proposal came twice
        elif step < self.reached[rank]:
            self.ignored += 1  # the rank has begun a later turn since
        elif step < self.step:
            self._end(LeaderInput.CONTRADICTS, one_sided(rank, self.rank, rank, step))
        else:
            self._add_proposal(rank, step, numbers, now)

    def _began(self, rank: int, step: int) -> None:
        """A rank began turn ``step``: a maximum of an earlier step that a rank still waits for is a contradiction."""
        if rank == self.rank:
            if self._rounds.by_step:
                proposes, at = self._rounds.left_open()
                if at < step:
                    self._end(LeaderInput.CONTRADICTS, one_sided(proposes, rank, proposes, at))
        elif self.state in COLLECTING and step > self.step:
            self._end(LeaderInput.CONTRADICTS, one_sided(self.rank, rank, rank, self.step))

    def _tick_maxima(self, now: float) -> None:
        """Ends the job over proposals that contradict or do not come; sends signs of life to the ranks that wait."""
        if (contradiction := self._rounds.contradiction(now, self.limits.divergence)) is not None:
            self._end(LeaderInput.CONTRADICTS, contradiction)
        if self.state not in COLLECTING:
            return
        step, since = self._proposed
        furthest_behind = min(self._rounds.missing(step), key=self.reached.__getitem__, default=self.rank)
        deadline = self.deadline_of(furthest_behind)
        if now - since > deadline:
            self._late(furthest_behind, f"did not propose its numbers for step {step}", deadline)
        elif now - self._alive > self.limits.keepalive:
            self._alive = now
            self.outbox.append((EVERYONE, self.codec.encode(Kind.KEEPALIVE, EVERYONE, self.step)))

    def _add_proposal(self, rank: int, step: int, numbers: Proposed, now: float) -> None:
        """The last rank's proposal makes the maximum."""
        try:
            self._rounds.add(rank, step, numbers, now)
        except FrameError as error:
            self.bad(rank, error)
            return
        if (contradiction := self._rounds.contradiction(now, self.limits.divergence)) is not None:
            self._end(LeaderInput.CONTRADICTS, contradiction)
        elif step == self._proposed[0] and self.state in COLLECTING:
            maximum = self._rounds.maximum(step)
            if maximum is not None:
                self.enter(LeaderInput.AGREED)
                self.maximum = maximum
                self._answers[step] = answer = self.codec.encode(Kind.AGREED, EVERYONE, step, body=Numbers(maximum))
                self.outbox.append((EVERYONE, answer))
