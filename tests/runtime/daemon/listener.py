"""A client of a desk without sockets: it says lines, takes turns of the engine, and reads frames.

Knows: the desk's three calls. Does not know: what a test wants to see.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from runtime.daemon.desk import Desk
from runtime.daemon.frames import Frame, FrameReader, Kind
from runtime.daemon.server import DaemonEngine
from runtime.daemon.session import Connection

Served = TypeVar("Served", bound=DaemonEngine)
MOST_TURNS = 2000
LATE = ("SCHED_DRAIN", "SCHED_PROBE")  # they are answered when they are over


class Listener(Generic[Served]):
    """``frames``: all that came, in order."""

    def __init__(self, engine: Served, desk: Desk | None = None) -> None:
        self.engine = engine
        self.desk = Desk(engine) if desk is None else desk
        self.connection = Connection()
        self.desk.connect(self.connection)
        self.frames: list[Frame] = []
        self._reader = FrameReader()
        self.say("TAGGED 1")

    def say(self, line: str) -> Frame | None:
        """Returns its ACK or ERROR, where that came at once."""
        before = len(self.frames)
        self.desk.line(self.connection, line)
        self.read()
        answers = [f for f in self.frames[before:] if f.kind in (Kind.ACK, Kind.STATS) or is_refusal(f)]
        if not any(verb in line for verb in LATE):
            answers = [f for f in answers if f.kind is not Kind.ACK or f.answer["verb"] not in LATE]
        assert len(answers) <= 1
        return answers[0] if answers else None

    def ask(self, line: str) -> Any:
        """The ACK's answer; a refusal fails."""
        answer = self.say(line)
        assert answer is not None
        assert answer.kind is not Kind.ERROR, answer.text
        return answer.answer

    def refused(self, line: str) -> str:
        answer = self.say(line)
        assert answer is not None
        assert answer.kind is Kind.ERROR, answer
        return answer.text

    def read(self) -> list[Frame]:
        found = list(self._reader.frames(bytes(self.connection.unread)))
        self.connection.unread.clear()
        for frame in found:
            assert frame.sequence == len(self.frames), "no frame is lost"
            self.frames.append(frame)
        return found

    def turn(self) -> None:
        """One of the daemon's, as server.py takes it."""
        self.desk.grant()
        if self.engine.has_work:
            self.desk.output(self.engine.step())
        self.read()

    def run_until_idle(self) -> None:
        """Until nothing goes on by itself."""
        for _ in range(MOST_TURNS):
            self.desk.grant()
            if not self.engine.has_work:
                self.read()
                return
            self.desk.output(self.engine.step())
        raise AssertionError("the daemon does not come to rest")

    def of(self, request: int, *kinds: Kind) -> list[Frame]:
        return [f for f in self.frames if f.request == request and (not kinds or f.kind in kinds)]

    def tokens(self, request: int, epoch: int | None = None) -> list[int]:
        found = self.of(request, Kind.TOKEN)
        return [token for f in found if epoch in (None, f.epoch) for token in f.tokens]


def is_refusal(frame: Frame) -> bool:
    """Of a line; not of a session's verb that the engine refused later."""
    return frame.kind is Kind.ERROR and not frame.epoch
