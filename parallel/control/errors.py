"""The errors that end agreement. Every rank of a job raises the same error with the same text.

Knows: the causes, the rank and step that a verdict blames, and how a verdict travels between ranks.
Does not know: how a cause is detected (states.py, handshake.py) or carried (frames.py).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Cause(StrEnum):
    """Why a job's agreement ended. The values travel on the wire: never rename them."""

    DISAGREEMENT = "disagreement"  # two ranks decided differently
    DEADLINE = "deadline"  # a rank did not answer in time
    LOST = "lost"  # a rank's connection closed
    ABORTED = "aborted"  # a rank said that it ends
    FRAME = "frame"  # a rank sent bytes that are no frame of this job
    REFUSED = "refused"  # a rank's handshake differed
    COLLECTIVE = "collective"  # a collective failed, or a rank called another one than the others
    TERMINATED = "terminated"  # a signal from outside ended a rank before it could agree on an end
    NO_PROGRESS = "no_progress"  # a rank lives and talks, but its engine does not move (runtime/watchdog/watchdog.py)


class Verdict(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a job ended, as the leader sends it to every rank: its cause, the rank and step to blame, the full text."""

    cause: Cause
    rank: int
    step: int
    text: str

    def error(self) -> ControlError:
        """The exception for this verdict: the class is its cause's, the message is ``text`` word for word."""
        return _CLASSES[self.cause](self)


class ControlError(RuntimeError):
    """Agreement ended. ``verdict`` says why, and blames a rank and a step; str() is the same on every rank."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.text)
        self.verdict = verdict


class Disagreement(ControlError):
    """Ranks decided differently; the text has the first differing decision of both."""


class MissedDeadline(ControlError):
    """A rank was silent, or made no progress, for longer than its deadline."""


class LostPeer(ControlError):
    """A rank's connection closed without an agreed stop: its process died or exited early."""


class Aborted(ControlError):
    """A rank announced its own end, and why."""


class BadPeer(ControlError):
    """A rank sent bytes that are no frame of this job after it had passed the handshake."""


class HandshakeRefused(ControlError):
    """A rank has another job, code, configuration or model; the text names the field and both values."""


class BrokenCollective(ControlError):
    """A collective failed; the text names the rank that called another one, where that is known."""


class Terminated(ControlError):
    """A signal from outside ended a rank."""


class NoProgress(ControlError):
    """A rank's process lives, but its engine made no progress in time."""


_CLASSES: dict[Cause, type[ControlError]] = {
    Cause.DISAGREEMENT: Disagreement,
    Cause.DEADLINE: MissedDeadline,
    Cause.LOST: LostPeer,
    Cause.ABORTED: Aborted,
    Cause.FRAME: BadPeer,
    Cause.REFUSED: HandshakeRefused,
    Cause.COLLECTIVE: BrokenCollective,
    Cause.TERMINATED: Terminated,
    Cause.NO_PROGRESS: NoProgress,
}


class FrameError(ValueError):
    """Bytes that are no valid frame. ``field`` names the part that is wrong.

    ``rank``, ``ours`` and ``theirs`` are set for a well-formed frame of another version, job or epoch.
    """

    def __init__(self, field: str, detail: str, rank: int = -1, ours: int = 0, theirs: int = 0) -> None:
        super().__init__(f"control frame refused at {field}: {detail}")
        self.field = field
        self.rank = rank
        self.ours = ours
        self.theirs = theirs


class IllegalInput(RuntimeError):
    """A state machine got an input that its state does not allow, and did not change: a bug of the caller."""
