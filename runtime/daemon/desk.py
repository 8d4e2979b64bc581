"""The desk: lines of clients in, frames out, over an engine that has sessions.

Knows: that each line is answered at once by one ACK or ERROR, and that what it brings about follows as frames of its
session. Does not know: verbs (actions.py), what an output means (outputs.py), sockets, turns of the engine (server.py).

What a line asks for is decided when it is read: the engine gets its events in the same order. Only memory and a stop id
that is on its way can make the engine refuse one, which comes as an ERROR of that session.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from runtime.daemon import grants, outputs
from runtime.daemon.actions import ACTIONS
from runtime.daemon.frames import Kind, pack_json
from runtime.daemon.probe import SessionEngine
from runtime.daemon.session import Connection
from runtime.daemon.state import DaemonState
from runtime.daemon.verbs import BadLine, Command, parse
from runtime.frontend.tokenizer import Tokenizer
from runtime.frontend.validation import RequestError
from runtime.schedule.plan import StepOutput
from runtime.schedule.request import SamplingParams

_MOST_SAID = 4096  # characters of why a line is not carried out
_ENDED_BY_FRAMES = ("START", "CONTINUE", "EXTEND", "SCHED_STEP", "SCHED_BATCH_STEP")  # on a plain stream


class Read(NamedTuple):
    """A line that was read: the id before its verb, or 0; its command, with a prompt of ids, or why there is none."""

    request: int
    command: Command | None
    refused: str = ""


class Desk:
    """``connect`` clients, give it their lines and every output, and ``grant`` before each turn.

    ``defaults``: sampling parameters that START does not give.
    """

    def __init__(
        self, engine: SessionEngine, tokenizer: Tokenizer | None = None, defaults: SamplingParams | None = None
    ) -> None:
        self.daemon = DaemonState(engine, tokenizer, defaults or SamplingParams())

    def connect(self, connection: Connection) -> None:
        self.daemon.connections.append(connection)

    def disconnect(self, connection: Connection) -> None:
        """Its sessions end with it."""
        daemon = self.daemon
        daemon.connections.remove(connection)
        connection.lost = connection.lost or "closed"
        for session in list(connection.sessions.values()):
            daemon.end(session)
        for probe in [probe for probe in daemon.probes if probe.connection is connection]:
            daemon.probes.remove(probe)
            probe.close()

    def line(self, connection: Connection, text: str) -> None:
        """Carry out one line, and answer it. No line makes this raise."""
        self.carry_out(connection, self.read(text))

    def read(self, text: str) -> Read:
        """What one line says. Takes as long as its prompt is long; may be called in any thread."""
        request = 0
        try:
            command = parse(text, self.daemon.model.max_model_len)
            request = command.request or 0
            if isinstance(command.prompt, str):
                command = replace(command, prompt=self.daemon.token_ids(command.prompt, command))
        except (BadLine, RequestError) as error:
            return Read(request, None, str(error))
        return Read(request, command)

    def carry_out(self, connection: Connection, line: Read) -> None:
        """And answer it."""
        connection.lines += 1
        command = line.command
        if command is None:
            self.refuse(connection, line.refused, line.request)
            return
        try:
            answer = ACTIONS[command.verb](self.daemon, connection, command)
        except (BadLine, RequestError) as error:
            self.refuse(connection, str(error), line.request)
            return
        if answer is not None:
            connection.send(Kind.ACK, None, pack_json({"verb": command.verb, **answer}), line.request)
            if command.verb not in _ENDED_BY_FRAMES or answer.get("idle"):
                connection.end_command()

    def refuse(self, connection: Connection, why: str, request: int = 0) -> None:
        """Answer a line that is not carried out."""
        connection.send(Kind.ERROR, None, why[:_MOST_SAID].encode("utf-8", "replace"), request)
        connection.end_command()

    def grant(self) -> None:
        """Before each turn of the engine."""
        grants.grant(self.daemon)

    def output(self, output: StepOutput) -> None:
        """After each turn of the engine."""
        outputs.output(self.daemon, output)
