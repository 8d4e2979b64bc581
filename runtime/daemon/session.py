"""What the daemon knows of one session and of one connection.

Knows: counts, states, what is to be sent. Does not know: verbs (desk.py), engines, sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from runtime.daemon.frames import END_OF_COMMAND, Frame, Kind, encode, pack_ids
from runtime.frontend.tokenizer import TextStream
from runtime.schedule.request import Request


class Phase(Enum):
    RUNNING = "running"  # it may gain tokens
    PARKED = "parked"  # its quantum is over, its budget is not
    COMPLETE = "complete"  # its answer is; it was started with keep


@dataclass(slots=True, eq=False)
class SlotSession:
    """``request`` is the client's id, ``engine_id`` the engine's. Counts are tokens of this turn: ``shown`` so far,
    ``wanted`` granted, ``budget`` at most; ``boundary``: where the quantum ends that is told next while it is drained.
    ``length``: all tokens it knows. ``epoch`` is the client's, and grows over sessions with the same id;
    ``engine_epoch`` counts this one's turns. ``forking``: its engine has not said yet that it is there. ``leaving``:
    what it was granted is its last for now: another gets its row. ``before``: what to go back to when an EXTEND is
    refused. ``asked``: what it was begun with. ``known``: all its token ids, where ``text`` is made of them; the prompt
    of this turn is all but the last ``shown``. ``let_go``: it came to a stop string, and the engine has it no more.
    ``owed``: commands of its client that granted it tokens, and whose end is not told yet.
    """

    connection: Connection
    request: int
    engine_id: int
    place: int
    epoch: int
    budget: int
    quantum: int
    length: int
    keep: bool
    asked: Request
    wants_text: bool = False
    text: TextStream | None = None
    known: list[int] = field(default_factory=list)
    phase: Phase = Phase.RUNNING
    shown: int = 0
    wanted: int = 0
    boundary: int = 0
    engine_epoch: int = 1
    drained: bool = False
    leaving: bool = False
    forking: bool = False
    let_go: bool = False
    owed: int = 0
    before: tuple[Phase, int, int, int, int, int, int, int] | None = None

    @property
    def left(self) -> int:
        """Of its budget."""
        return self.budget - self.shown

    @property
    def runnable(self) -> bool:
        """Whether a quantum could be granted now."""
        return self.phase is Phase.PARKED and self.left > 0

    def remember(self) -> None:
        """Before an EXTEND that the engine may refuse."""
        counts = self.shown, self.wanted, self.budget, self.boundary, self.length, len(self.known), self.engine_epoch
        self.before = self.phase, *counts

    def go_back(self) -> None:
        if self.before is not None:
            self.phase, self.shown, self.wanted, self.budget, self.boundary, self.length, known, turn = self.before
            del self.known[known:]
            self.engine_epoch = turn
            self.epoch += 1
            self.before = None


class Connection:
    """One client: its sessions, and the bytes that it is to read. ``tagged`` is what its stream is.

    ``soft``: with more bytes unread, its sessions are granted nothing by themselves and its lines wait. ``hard``: with
    more, it is lost. ``lost``: why nothing is sent any more.
    """

    def __init__(self, *, tagged: bool = False, soft: int = 1 << 18, hard: int = 1 << 23) -> None:
        self.tagged = tagged
        self.soft, self.hard = soft, hard
        self.lost: str | None = None
        self.quits = False
        self.auto = False
        self.probing = 0  # probes that it has asked for, and is not told of
        self.drains: list[int] = []  # of each SCHED_DRAIN that is to be acknowledged, the id before it, or 0
        self.sessions: dict[int, SlotSession] = {}
        self.epochs: dict[int, int] = {}  # by request: the last that was given
        self.cursor = -1  # the place that SCHED_* served last
        self.unread = bytearray()
        self.lines = 0
        self._sequence = 0

    @property
    def draining(self) -> bool:
        return bool(self.drains)

    @property
    def behind(self) -> bool:
        return len(self.unread) > self.soft

    def send(self, kind: Kind, session: SlotSession | None = None, payload: bytes = b"", request: int = 0) -> None:
        """To a tagged stream."""
        if self.lost is not None or not self.tagged:
            return
        who, epoch = (request, 0) if session is None else (session.request, session.epoch)
        self.unread += encode(Frame(kind, who, epoch, self._sequence, payload))
        self._sequence += 1
        self._check()

    def send_ids(self, token_ids: Sequence[int]) -> None:
        """To a plain stream."""
        if self.lost is None and not self.tagged:
            self.unread += pack_ids(token_ids)
            self._check()

    def end_command(self) -> None:
        """To a plain stream."""
        self.send_ids((END_OF_COMMAND,))

    def _check(self) -> None:
        if len(self.unread) > self.hard:
            self.lost = f"it has not read {len(self.unread)} bytes"
