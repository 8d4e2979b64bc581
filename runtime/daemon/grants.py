"""Grants: which session gets its next quantum, and when.

Knows: rows, rings, budgets. Does not know: verbs (actions.py), frames of sessions (outputs.py), how an engine works.

A drain. Each session is granted its next quantum before the last is over, so that no chain breaks, while no other waits
for a row. If another waits, a session that comes to the end of its quantum gives its row to the first of the ring and
joins the ring at its end: of S sessions over R rows each has its quantum once in every cycle. At most R sessions have
tokens to come, in addition to those that are about to be parked. While a new session waits for its first token nothing
is granted, so a drain keeps no session out.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.daemon.frames import Kind, pack_json
from runtime.daemon.session import Connection, Phase, SlotSession
from runtime.daemon.state import DaemonState
from runtime.daemon.verbs import Command


def proceed(daemon: DaemonState, session: SlotSession, tokens: int) -> None:
    """Grant it ``tokens`` more, within its budget."""
    tokens = min(tokens, session.budget - session.wanted)
    if session.phase is Phase.PARKED and not session.drained:
        session.boundary = session.shown + tokens
    session.wanted += tokens
    session.phase = Phase.RUNNING
    session.leaving = False
    daemon.engine.proceed(session.engine_id, session.engine_epoch, tokens)


def grant(daemon: DaemonState) -> None:
    """Before each turn of the engine: sessions in a drain get their next quantum in time."""
    going = [session for session in daemon.by_engine.values() if session.drained and session.phase is Phase.RUNNING]
    newcomers = any(s.phase is Phase.RUNNING and not s.shown for s in daemon.by_engine.values())
    staying = sum(not session.leaving for session in going)
    # Sessions that continue by command, and are owed tokens, may wait for a row that one of these has.
    owed = sum(s.phase is Phase.RUNNING and not s.drained and s.shown < s.wanted for s in daemon.by_engine.values())
    for session in going:
        if session.leaving or session.wanted >= session.budget or session.connection.behind:
            continue
        if session.wanted - session.shown > daemon.ahead:
            continue
        if daemon.ring or staying + owed > daemon.rows:
            session.leaving = True
            staying -= 1
            continue
        while session.wanted < session.budget and session.wanted - session.shown <= daemon.ahead:
            proceed(daemon, session, session.quantum)
    if newcomers and len(going) >= daemon.rows:
        return
    for session in list(daemon.ring):
        if staying >= daemon.rows or len(going) >= 2 * daemon.rows:
            return
        if session.connection.behind:
            continue
        daemon.ring.remove(session)
        proceed(daemon, session, session.quantum)
        going.append(session)
        staying += 1


def from_cursor(connection: Connection) -> Iterator[SlotSession]:
    """Sessions that wait for a quantum and are not drained, by place, from the one after the last one served."""
    mine = sorted(connection.sessions.values(), key=lambda session: session.place)
    after = [session for session in mine if session.place > connection.cursor]
    ordered = after + [session for session in mine if session.place <= connection.cursor]
    return (session for session in ordered if session.runnable and not session.drained)


def batch(connection: Connection, command: Command) -> list[SlotSession]:
    """The sessions of a SCHED_BATCH verb: all that wait for a quantum, or as many as it names."""
    runnable = list(from_cursor(connection))
    return runnable if command.other is None else runnable[: command.other]


def let_run(daemon: DaemonState, session: SlotSession) -> None:
    """A parked session continues without a command from now on."""
    session.drained = True
    session.boundary = session.shown + session.quantum
    daemon.ring.append(session)


def drained_to_the_end(connection: Connection) -> None:
    """Answer every SCHED_DRAIN, once all sessions have spent their budgets."""
    if connection.draining and not any(session.drained for session in connection.sessions.values()):
        drains, connection.drains = connection.drains, []
        for request in drains:
            connection.send(Kind.ACK, None, pack_json({"verb": "SCHED_DRAIN"}), request)
            connection.end_command()
