"""The state of a daemon: its connections, open sessions and probes, and how sessions are found by id and by place.

Knows: which ids and places are free, which client owns which session. Does not know: what a verb does (actions.py), who
is granted a quantum (grants.py), frames (outputs.py).
"""

from __future__ import annotations

from collections import deque

from runtime.daemon.probe import Probe, SessionEngine
from runtime.daemon.session import Connection, SlotSession
from runtime.daemon.verbs import BadLine, Command
from runtime.frontend.prompt_text import prompt_ids
from runtime.frontend.tokenizer import Tokenizer
from runtime.schedule.request import SamplingParams


class DaemonState:
    """``places``: sessions by place; None: free. ``by_engine``: sessions that the engine has, by engine id.

    ``ring``: parked sessions that continue without a command, in the order of their turns. ``rows``: of the engine.
    ``ahead``: granted tokens below which a session needs its next quantum: no step in flight may have come to the old
    end, and each may append a whole window. ``defaults``: sampling parameters that START does not give.
    """

    def __init__(self, engine: SessionEngine, tokenizer: Tokenizer | None, defaults: SamplingParams) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.model = engine.model_config
        config = engine.config
        self.rows = config.max_num_seqs
        self.ahead = config.width * ((config.chain_depth or 0) + (config.horizon or 0) + 2)
        self.places: list[SlotSession | None] = [None] * config.max_sessions
        self.by_engine: dict[int, SlotSession] = {}
        self.connections: list[Connection] = []
        self.ring: deque[SlotSession] = deque()
        self.probes: list[Probe] = []
        self.next_id = 0

    @property
    def sessions(self) -> int:
        """Open sessions of all connections."""
        return sum(session is not None for session in self.places)

    def take_id(self) -> int:
        """A new engine id."""
        self.next_id += 1
        return self.next_id - 1

    def open(self, session: SlotSession) -> None:
        """Enter a new session."""
        self.places[session.place] = session
        if not session.let_go:  # else a fork of one that the engine does not have any more
            self.by_engine[session.engine_id] = session
        session.connection.sessions[session.request] = session

    def forget(self, session: SlotSession) -> None:
        """The session has ended, for the engine, too."""
        self.leave_ring(session)
        self.places[session.place] = None
        if not session.let_go:
            del self.by_engine[session.engine_id]
        del session.connection.sessions[session.request]

    def end(self, session: SlotSession) -> None:
        """End it here and in the engine."""
        self.forget(session)
        if not session.let_go:
            self.engine.cancel(session.engine_id)

    def new_id(self, connection: Connection, request: int | None) -> int:
        """The client's id of a new session. Raises BadLine."""
        if not connection.tagged:
            if connection.sessions:
                raise BadLine("the plain stream has one session: CANCEL it first, or begin with TAGGED 1")
            return request or 1
        if not request:
            raise BadLine("a session has an id of its own, 1 or more: REQ id ...")
        if request in connection.sessions:
            raise BadLine(f"REQ {request} is a session already")
        return request

    def new_place(self, wanted: int | None, *, ending: bool = False) -> int:
        """A free place, ``wanted`` or the first. Raises BadLine. ``ending``: a session ends to make room for it."""
        if wanted is not None:
            if wanted >= len(self.places):
                raise BadLine(f"SLOT {wanted}: places are 0 to {len(self.places) - 1}; see --max-sessions")
            if self.places[wanted] is not None:
                raise BadLine(f"SLOT {wanted} is taken: a slot in use is never overwritten")
            self._refuse_with_probes(ending=ending)
            return wanted
        free = next((place for place, session in enumerate(self.places) if session is None), None)
        if free is None:
            raise BadLine(f"all {len(self.places)} places are taken: CANCEL a session, or raise --max-sessions")
        self._refuse_with_probes(ending=False)
        return free

    def _refuse_with_probes(self, *, ending: bool) -> None:
        """Forks of a probe are sessions of the engine, too: one more would end another one that is parked."""
        probing = sum(probe.forks for probe in self.probes)
        if probing and self.sessions - ending + probing >= len(self.places):
            raise BadLine(f"a probe takes the {probing} places that are left: say it again when that is told")

    def session(self, connection: Connection, request: int | None) -> SlotSession:
        """By the client's id. Raises BadLine."""
        session = connection.sessions.get(-1 if request is None else request)
        if session is None:
            raise BadLine(f"there is no session {request} on this connection")
        return session

    def named(self, connection: Connection, command: Command) -> SlotSession:
        """By REQ, by SLOT, by both if they agree; on a plain stream by neither. Raises BadLine."""
        if command.place is not None:
            at = self.places[command.place] if command.place < len(self.places) else None
            if at is None or at.connection is not connection or command.request not in (None, at.request):
                raise BadLine(f"SLOT {command.place} has no such session of this connection")
            return at
        if command.request is None and not connection.tagged and len(connection.sessions) == 1:
            return next(iter(connection.sessions.values()))
        return self.session(connection, command.request)

    def token_ids(self, text: str, command: Command) -> tuple[int, ...]:
        """Of the prompt of START, with BOS if the tokenizer adds one, or of text that continues a session."""
        if self.tokenizer is None:
            raise BadLine("the prompt is a text, but the model folder has no tokenizer: give [token, ids]")
        continues = command.verb != "START"
        begins = not continues and bool(command.options.get("add_special_tokens", True))
        most = self.model.max_model_len
        return tuple(prompt_ids(self.tokenizer, text, most, add_special_tokens=begins, continues=continues))

    def leave_ring(self, session: SlotSession) -> None:
        """It waits for no quantum in a drain any more."""
        if session in self.ring:
            self.ring.remove(session)

    def next_epoch(self, connection: Connection, request: int) -> int:
        """Count another epoch of this id of the client's."""
        epoch = connection.epochs[request] = connection.epochs.get(request, 0) + 1
        return epoch
