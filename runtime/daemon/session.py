"""One session and one connection of a daemon.

Knows: counts, states, what is to be sent. Does not know: verbs (actions.py), engines, sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from runtime.daemon.frames import END_OF_COMMAND, Frame, Kind, encode
from runtime.frontend.answer_text import TextStream
from runtime.frontend.framing import pack_ids
from runtime.schedule.request import Request


class Phase(Enum):
    RUNNING = "running"  # tokens may come
    PARKED = "parked"  # its quantum is over, its budget is not
    COMPLETE = "complete"  # its answer is complete; it was started with keep


@dataclass(slots=True, eq=False)
class SlotSession:
    """``request`` is the client's id, ``engine_id`` the engine's. Counts are tokens of this turn: ``shown`` so far,
    ``wanted`` granted, ``budget`` at most; ``boundary``: where the next QUANTUM_DONE is due while it is drained.
    ``length``: all its tokens. ``epoch`` is the client's, and grows over sessions with the same id; ``engine_epoch``
    counts this one's turns. ``drained``: it continues without commands. ``forking``: the engine has not confirmed the
    fork yet. ``leaving``: its grant is the last for now, since another session needs its row. ``before``: the state to
    restore if an EXTEND is refused. ``asked``: the request it began with. ``known``: all its token ids if ``text`` is
    made of them; the prompt of this turn is all but the last ``shown``. ``let_go``: a stop string ended it in the
    engine. ``owed``: commands that granted it tokens, and whose end was not sent yet.
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
        """Whether a quantum can be granted now."""
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
    """One client: its sessions, and the bytes that it has not read. ``tagged``: its stream has frames, not ids.

    Above ``soft`` unread bytes, its sessions get no quantum in a drain and its lines wait; above ``hard`` it is lost.
    ``lost``: why nothing is sent any more.
    """

    def __init__(self, *, tagged: bool = False, soft: int = 1 << 18, hard: int = 1 << 23) -> None:
        self.tagged = tagged
        self.soft, self.hard = soft, hard
        self.lost: str | None = None
        self.quits = False
        self.auto = False
        self.probing = 0  # probes that are not answered yet
        self.drains: list[int] = []  # of each SCHED_DRAIN that is not acknowledged yet, the id before it, or 0
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
