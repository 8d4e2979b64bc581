"""The follower's machine: takes each record once, in its turn, and compares its digest with the leader's.

Knows: states.py's rules and FOLLOWER_TABLE. Times are seconds of any steady local clock, passed in.
Does not know: sockets. Frames to send to the leader wait in ``outbox`` until the plane takes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from parallel.control.errors import Cause, FrameError, Verdict
from parallel.control.protocol.divergence import Recent, nothing, summaries
from parallel.control.protocol.max_rounds import Proposed, checked
from parallel.control.protocol.reliable_messages import ReliableSender
from parallel.control.protocol.states import FOLLOWER_TABLE, FollowerInput, FollowerState, Limits, following
from parallel.control.wire.frames import STOP, Codec, Decisions, Frame, FrameTemplate, Kind, Numbers

# Names, since a member of an Enum costs as much as a call to look up (Python 3.11), and a turn takes ten of them.
_WAITING = FollowerState.WAITING
_TURN, _RECORD, _EFFECT = FollowerInput.TURN, FollowerInput.RECORD, FollowerInput.EFFECT
_RECORD_KIND = Kind.RECORD

_REMEMBERED = 256  # own digests kept beyond those still to compare, for DECISIONS frames
_MAX_STORED = 4096  # records ahead of our turn; the leader cannot get so far ahead of a rank it needs


class Follower:
    """Agreement as follower ``rank`` sees it.

    ``effect``: the payload that takes effect in the current turn, None until its record is here. ``maximum``: the last
    one agreed on, None while this rank has proposed and the leader has not answered. ``groups``: runs of world / groups
    ranks that plan alike; a follower compares digests with the leader if both are of one group. ``verdict`` is set once
    agreement has ended: the leader's, or this rank's own when the leader is silent or gone. ``ignored`` counts records
    that came twice or for a turn that is over. ``recent`` returns this rank's last decisions, for the report of a
    divergence. Raises ValueError for a negative horizon.
    """

    def __init__(
        self,
        codec: Codec,
        rank: int,
        horizon: int,
        limits: Limits | None = None,
        recent: Recent = nothing,
        leader: int = 0,
        groups: int = 1,
    ) -> None:
        if horizon < 0:
            raise ValueError(f"control plane: horizon {horizon}; it is 0 or more")
        self.codec = codec
        self.rank = rank
        self.horizon = horizon
        self.horizon_agreed = False  # the leader has said HORIZON
        self.limits = limits or Limits()
        self.recent = recent
        self.leader = leader
        self.state = FollowerState.PLANNING
        self.verdict: Verdict | None = None
        self.step = -1
        self.effect: bytes | None = None
        self.maximum: Proposed | None = None
        self.outbox: deque[bytes] = deque()
        self.ignored = 0
        self._digests: dict[int, int] = {}
        self._records: dict[int, Frame] = {}
        size = codec.world // groups
        self._reference = rank // size * size  # the rank that our digest is compared with
        self._acknowledgement = FrameTemplate(codec, Kind.ACK, rank)
        self._proposal = -1, b""  # the step of our last one, and its frame
        self._sender = ReliableSender(self.limits.resend)
        self._started = False  # a frame of the leader came; until then it may still be loading the model
        self._divergence = 0, 0  # step and the leader's digest, once digests differ
        self._heard = 0.0
        self._asked = 0.0

    # ---- the engine's side ----

    def turn(self, step: int, digest: int, now: float) -> None:
        """Begins turn ``step`` and acknowledges it. ``effect`` is set now, or when the record is received."""
        if step != self.step + 1:
            raise ValueError(f"control plane: turn {step} after turn {self.step}; turns are taken one by one")
        acknowledgement = self._acknowledgement.fill(step, digest)
        self._enter(_TURN)
        self.step = step
        self.effect = None
        self._digests[step] = digest
        self._digests.pop(step - self.horizon - _REMEMBERED, None)
        self._heard = self._asked = now
        self.outbox.append(acknowledgement)
        self._queue_messages(self._sender.due(now))
        self._take()

    def propose(self, step: int, numbers: Sequence[int], now: float) -> None:
        """This rank's numbers for its current turn ``step``. ``maximum`` is set when the leader answers.

        Raises ValueError for another step, a second proposal, or numbers that cannot be agreed on.
        """
        mine = Numbers(checked(numbers, step, self.step, self._proposal[0]))
        proposal = self.codec.encode(Kind.PROPOSE, self.rank, step, body=mine)
        self._enter(FollowerInput.PROPOSE)
        self.maximum = None
        self._proposal = step, proposal
        self._heard = self._asked = now
        self.outbox.append(proposal)

    def send_message(self, payload: bytes, now: float) -> None:
        """A message for the leader's engine. Raises as ``ReliableSender.send``."""
        self._queue_messages(self._sender.send(payload, now))

    @property
    def unacknowledged(self) -> bool:
        """Whether the leader's engine has not taken all messages."""
        return self._sender.unacknowledged

    @property
    def unsent(self) -> bool:
        """Whether a message still waits for the send window."""
        return self._sender.unsent > 0

    def leave(self, cause: Cause, text: str) -> None:
        """This rank ends the job (or, after the agreed stop, just leaves)."""
        before = self.state
        self._enter(FollowerInput.LEAVE)
        if before is FollowerState.STOPPED:
            self.outbox.append(self.codec.encode(Kind.BYE, self.rank, self.step))
        elif self.verdict is None:
            self.verdict = Verdict(cause, self.rank, max(self.step, 0), text)
            self.outbox.append(self.codec.encode(Kind.END, self.rank, self.verdict.step, body=self.verdict))

    # ---- the leader's side ----

    def receive(self, frame: Frame, now: float) -> None:
        """A frame from the leader. One that no leader sends is a BadPeer verdict, not an exception."""
        kind = frame.kind
        if kind is _RECORD_KIND:
            self._enter(_RECORD)
            self._heard = now
            self._started = True
            self._store(frame)
        elif kind is Kind.KEEPALIVE:
            self._enter(FollowerInput.ALIVE)
            self._heard = now
            self._started = True
            record_missing = frame.step >= self.step - self.horizon  # the leader made and sent it
            if self.state is FollowerState.WAITING and not record_missing:
                self._asked = now
        elif kind is Kind.AGREED and isinstance(frame.body, Numbers):
            self._heard = now
            self._started = True
            self._agree(frame.step, frame.body.numbers)
        elif kind is Kind.MESSAGE_ACK:
            self._heard = now
            self._messages_taken(frame.step, now)
        elif kind is Kind.HORIZON:
            self._agree_horizon(frame.horizon)
        elif kind is Kind.EXPLAIN:
            self._enter(FollowerInput.EXPLAIN)
            self._heard = now
            self._explain(frame.step, frame.digest)
        elif isinstance(frame.body, Verdict):
            self._end(FollowerInput.VERDICT, frame.body)
        elif kind is Kind.BYE:
            self.lost()
        else:
            self.bad(FrameError("order", f"{kind.name} is not for a follower"))

    def lost(self) -> None:
        """The leader's connection closed."""
        text = (
            f"rank {self.leader} is gone: its control connection to rank {self.rank} closed at step "
            f"{max(self.step, 0)}, before an agreed stop. Look at the log of rank {self.leader} first"
        )
        self._end(FollowerInput.LOST, Verdict(Cause.LOST, self.leader, max(self.step, 0), text))

    def bad(self, error: FrameError) -> None:
        """The leader sent bytes that are no legal frame."""
        text = f"rank {self.leader} broke the protocol: {error}"
        self._end(FollowerInput.VERDICT, Verdict(Cause.FRAME, self.leader, max(self.step, 0), text))

    def give_up(self, verdict: Verdict) -> None:
        """This rank ends the job because of another rank that only it can see (a rank of its node)."""
        self._enter(FollowerInput.LEAVE)
        if self.verdict is None:
            self.verdict = verdict
            self.outbox.append(self.codec.encode(Kind.END, self.rank, verdict.step, body=verdict))

    def tick(self, now: float) -> None:
        """Looks at the time: asks again for a missing record or answer, gives up on a silent leader."""
        if self.state is FollowerState.DIVERGED:
            if now - self._heard > 2 * self.limits.divergence:
                self._give_up_on_leader(self._unanswered())
        elif self.state in (FollowerState.WAITING, FollowerState.AGREEING, FollowerState.FINISHING):
            waits_for_record = self.state is FollowerState.WAITING
            patience = self.limits.deadline if self._started else self.limits.start
            wanted = self.step - self.horizon
            if now - self._heard > patience:
                what = f"record of step {wanted}" if waits_for_record else "maximum of all ranks' numbers"
                self._late(patience, f"rank {self.rank} waits in step {self.step} for the {what}")
            elif now - self._asked > self.limits.resend:
                self._asked = now
                if waits_for_record:
                    self.outbox.append(self.codec.encode(Kind.RESEND, self.rank, wanted))
                else:
                    self.outbox.append(self._proposal[1])
                digest = self._digests[self.step]
                self.outbox.append(self.codec.encode(Kind.ACK, self.rank, self.step, digest))
        if self.state is not FollowerState.ENDED:
            self._queue_messages(self._sender.due(now))

    def decisions(self, step: int) -> bytes:
        """The DECISIONS frame that explains our digest at ``step``. Only reads: the watchdog's thread may call it."""
        digest = self._digests.get(step)
        body = Decisions(summaries(self.recent, digest))
        return self.codec.encode(Kind.DECISIONS, self.rank, step, digest or 0, body=body)

    # ---- inside ----

    def _enter(self, given: FollowerInput) -> None:
        state = self.state
        self.state = FOLLOWER_TABLE[state].get(given) or following(FOLLOWER_TABLE, state, given)  # ... for its error

    def _end(self, given: FollowerInput, verdict: Verdict) -> None:
        self._enter(given)
        if self.state is FollowerState.ENDED and self.verdict is None:
            self.verdict = verdict

    def _unanswered(self) -> Verdict:
        """The verdict of a follower that knows of a divergence and receives no more from the leader."""
        step, theirs = self._divergence
        ours = self._digests.get(step, 0)
        other = f"rank {self._reference}" if self._reference != self.rank else "another rank of its group"
        text = (
            f"ranks disagree at step {step}: rank {self.rank} has digest {ours:#018x}, {other} has "
            f"{theirs:#018x}, and rank {self.leader} did not say more within {2 * self.limits.divergence:g} s"
        )
        return Verdict(Cause.DISAGREEMENT, self.rank, step, text)

    def _late(self, seconds: float, when: str) -> None:
        text = f"rank {self.leader} was silent for more than {seconds:g} s while {when}. It hangs, or is stopped"
        self._give_up_on_leader(Verdict(Cause.DEADLINE, self.leader, max(self.step, 0), text))

    def _give_up_on_leader(self, verdict: Verdict) -> None:
        """Ends with ``verdict`` and sends it: a leader that was only slow then ends every rank with the same text."""
        self._end(FollowerInput.LATE, verdict)
        self.outbox.append(self.codec.encode(Kind.END, self.rank, verdict.step, body=verdict))

    def _store(self, frame: Frame) -> None:
        step = frame.step
        due = step + self.horizon
        if frame.horizon != self.horizon:
            self.bad(FrameError("horizon", f"record of step {step} has {frame.horizon}, we agreed on {self.horizon}"))
        elif due == self.step and self.state is _WAITING:
            self._records[step] = frame
            self._take()
        elif due <= self.step:
            self.ignored += 1
        elif step in self._records:
            self.ignored += 1
            if frame != self._records[step]:
                self.bad(FrameError("step", f"two different records of step {step}"))
        elif len(self._records) >= _MAX_STORED:
            self.bad(FrameError("step", f"record of step {step} is too far ahead of step {self.step}"))
        else:
            self._records[step] = frame

    def _take(self) -> None:
        """Takes the record of the current turn, if it has arrived."""
        wanted = self.step - self.horizon
        if wanted < 0:
            self._enter(FollowerInput.EFFECT)
            self.effect = b""
            return
        frame = self._records.pop(wanted, None)
        if frame is None:
            return
        if self._reference == 0 and frame.digest != self._digests[wanted]:
            self._enter(FollowerInput.DIFFERS)
            self._explain(wanted, frame.digest)
            return
        self._enter(FollowerInput.STOP_EFFECT if frame.flags & STOP else _EFFECT)
        self.effect = frame.payload

    def _agree_horizon(self, horizon: int) -> None:
        """Before the first turn: the horizon that rank 0 chose."""
        if self.step >= 0 or self.horizon_agreed:
            self.bad(FrameError("order", f"HORIZON {horizon} in step {self.step}, after horizon {self.horizon}"))
            return
        self.horizon, self.horizon_agreed = horizon, True

    def _agree(self, step: int, maximum: Proposed) -> None:
        """Takes the answer to the proposal that waits for it; one that came before says nothing new."""
        proposed, _ = self._proposal
        if step > proposed:
            self.bad(FrameError("step", f"a maximum of step {step}, for which rank {self.rank} proposed nothing"))
        elif step == proposed and self.state in (FollowerState.AGREEING, FollowerState.FINISHING):
            self._enter(FollowerInput.AGREED)
            self.maximum = maximum
        else:
            self.ignored += 1

    def _queue_messages(self, messages: Iterable[tuple[int, bytes]]) -> None:
        for number, payload in messages:
            self.outbox.append(self.codec.encode(Kind.MESSAGE, self.rank, number, payload=payload))

    def _messages_taken(self, taken: int, now: float) -> None:
        try:
            self._queue_messages(self._sender.acknowledged(taken, now))
        except FrameError as error:
            self.bad(error)

    def _explain(self, step: int, theirs: int) -> None:
        self._divergence = step, theirs
        self.outbox.append(self.decisions(step))
