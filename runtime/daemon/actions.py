"""Actions: what each verb of a client does. A function returns the answer of its ACK, or None if that comes later.

Knows: sessions, and which commands are possible when. Does not know: how a line is parsed (verbs.py), who is granted
quanta in a drain (grants.py), frames of sessions (outputs.py). A command that cannot be carried out raises BadLine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.daemon import grants, outputs
from runtime.daemon.frames import Kind, pack_json
from runtime.daemon.probe import Probe
from runtime.daemon.session import Connection, Phase, SlotSession
from runtime.daemon.state import DaemonState
from runtime.daemon.verbs import BadLine, Command
from runtime.frontend.output_processor import drawn_seed
from runtime.frontend.validation import stop_ids_of
from runtime.schedule.request import Request

_NOT_SAMPLING = ("keep", "text", "priority", "stop_ids", "add_special_tokens")


def _tagged(daemon: DaemonState, connection: Connection, command: Command) -> dict[str, Any]:
    if connection.lines != 1:
        raise BadLine("TAGGED is the first line of a connection, or none")
    if command.other != 1:
        raise BadLine(f"frames of version {command.other} are not known; type TAGGED 1")
    connection.tagged = True
    model = str(Path(daemon.engine.config.model).resolve())  # a client may be in another folder
    return {"version": 1, "model": model, "max_model_len": daemon.model.max_model_len, "places": len(daemon.places)}


def _start(daemon: DaemonState, connection: Connection, command: Command) -> dict[str, Any]:
    request = daemon.new_id(connection, command.request)
    place = daemon.new_place(command.place)
    token_ids = _ids_of(command)
    options = command.options
    seed = options.get("seed")
    given = {name: value for name, value in options.items() if name not in _NOT_SAMPLING}
    given["seed"] = drawn_seed(daemon.engine.config.seed, f"session {daemon.next_id}") if seed is None else seed
    if "stop_ids" in options:
        given["stop_token_ids"] = options["stop_ids"]
    sampling = replace(daemon.defaults, max_tokens=command.total, **given)
    if sampling.stop and daemon.tokenizer is None:
        raise BadLine("stop strings are found in text, but the model folder has no tokenizer: give stop_ids")
    stop_ids = stop_ids_of(sampling, daemon.model.eos_token_ids)
    engine_id, keep = daemon.take_id(), bool(options.get("keep"))
    asked = Request(engine_id, token_ids, sampling, stop_ids, options.get("priority", 0))
    daemon.engine.start(asked, command.quantum, keep=keep)
    session = SlotSession(
        connection,
        request,
        engine_id,
        place,
        daemon.next_epoch(connection, request),
        budget=min(command.total, daemon.model.max_model_len - len(token_ids)),
        quantum=command.quantum,
        length=len(token_ids),
        keep=keep,
        asked=asked,
        wants_text=bool(options.get("text")) and daemon.tokenizer is not None,
    )
    daemon.open(session)
    _begin_turn(daemon, session, token_ids)
    return {"place": place, "epoch": session.epoch, "tokens": len(token_ids)}


def _begin_turn(daemon: DaemonState, session: SlotSession, token_ids: tuple[int, ...]) -> None:
    session.phase, session.shown, session.leaving = Phase.RUNNING, 0, False
    session.owed += 1
    session.wanted = session.boundary = min(session.quantum, session.budget)
    session.drained = session.connection.auto or session.connection.draining
    session.known += token_ids
    session.text = outputs.text_of(daemon, session)


def _continue(daemon: DaemonState, connection: Connection, command: Command) -> dict[str, Any]:
    session = daemon.named(connection, command)
    if command.epoch is not None and command.epoch != session.epoch:
        raise BadLine(f"stale: it was meant for epoch {command.epoch}, the session is in epoch {session.epoch}")
    if session.drained:
        raise BadLine("the session goes on by itself, in a drain")
    if session.phase is Phase.COMPLETE:
        raise BadLine("its answer is complete: EXTEND or CANCEL it")
    if session.wanted >= session.budget:
        raise BadLine("all of its budget was asked for")
    session.owed += 1
    grants.proceed(daemon, session, command.quantum)
    return {"epoch": session.epoch, "left": session.budget - session.wanted}


def _extend(daemon: DaemonState, connection: Connection, command: Command) -> dict[str, Any]:
    session = daemon.named(connection, command)
    if session.phase is Phase.RUNNING or session.drained:
        raise BadLine("it is running: only a session whose quantum is over can be extended")
    token_ids = _ids_of(command)
    room = daemon.model.max_model_len - session.length - len(token_ids)
    if not token_ids or room < 1:
        most = daemon.model.max_model_len
        raise BadLine(f"{session.length} tokens and {len(token_ids)} new ones; max_model_len is {most}")
    session.remember()
    if session.let_go:
        _take_back(daemon, session, token_ids, command)
    else:
        daemon.engine.extend(session.engine_id, session.engine_epoch, token_ids, command.total, command.quantum)
        session.engine_epoch += 1
    daemon.leave_ring(session)
    session.epoch = daemon.next_epoch(connection, session.request)
    session.budget, session.quantum = min(command.total, room), command.quantum
    session.length += len(token_ids)
    _begin_turn(daemon, session, token_ids)
    return {"epoch": session.epoch, "tokens": len(token_ids)}


def _take_back(daemon: DaemonState, session: SlotSession, token_ids: tuple[int, ...], command: Command) -> None:
    """A session that a stop string ended in the engine begins there again, with all that its client saw."""
    asked, most = session.asked, command.total
    sampling = replace(asked.sampling, max_tokens=most, min_tokens=min(asked.sampling.min_tokens, most))
    known = (*session.known, *token_ids)
    engine_id = daemon.take_id()
    again = replace(asked, request_id=engine_id, prompt_token_ids=known, sampling=sampling)
    daemon.engine.start(again, command.quantum, keep=session.keep)
    session.engine_id, session.engine_epoch, session.let_go = engine_id, 1, False
    daemon.by_engine[engine_id] = session


def _fork(daemon: DaemonState, connection: Connection, command: Command) -> dict[str, Any]:
    parent = daemon.session(connection, command.other)
    if parent.phase is Phase.RUNNING or parent.drained:
        raise BadLine("the parent is running: only a session whose quantum is over can be forked")
    request = daemon.new_id(connection, command.request)
    place = daemon.new_place(command.place)
    engine_id = daemon.take_id()
    if not parent.let_go:
        daemon.engine.fork(engine_id, parent.engine_id)
    child = replace(
        parent,
        request=request,
        engine_id=engine_id,
        place=place,
        epoch=daemon.next_epoch(connection, request),
        known=list(parent.known),
        wanted=parent.shown,
        boundary=parent.shown,
        engine_epoch=1,
        leaving=False,
        forking=not parent.let_go,
        owed=0,
        before=None,
    )
    child.text = outputs.text_of(daemon, child)
    daemon.open(child)
    return {"place": place, "epoch": child.epoch, "tokens": child.length}


def _restore(daemon: DaemonState, connection: Connection, command: Command) -> dict[str, Any]:
    parent = daemon.session(connection, command.other)
    if command.request is None or command.request == parent.request:
        raise BadLine("REQ names the session that is to know what the other one knows: REQ id RESTORE parent")
    old = connection.sessions.get(command.request)
    if parent.phase is Phase.RUNNING or parent.drained:
        raise BadLine("the parent is running: only a session whose quantum is over can be forked")
    if command.place is not None and (old is None or command.place != old.place):
        daemon.new_place(command.place, ending=old is not None)  # or it raises, before anything is closed
    if old is not None:
        outputs.close(daemon, old, "restored from another session")
    return _fork(daemon, connection, command)


def _cancel(daemon: DaemonState, connection: Connection, command: Command) -> dict[str, Any]:
    if command.other is not None and command.request not in (None, command.other):
        raise BadLine(f"REQ {command.request} CANCEL {command.other}: name one session")
    if command.other is not None:
        session = daemon.session(connection, command.other)
    else:
        session = daemon.named(connection, command)
    outputs.close(daemon, session, "cancelled")
    return {"epoch": connection.epochs[session.request]}


def _step(daemon: DaemonState, connection: Connection, command: Command) -> dict[str, Any]:
    return _run(daemon, connection, list(grants.from_cursor(connection))[:1])


def _batch_step(daemon: DaemonState, connection: Connection, command: Command) -> dict[str, Any]:
    return _run(daemon, connection, grants.batch(connection, command), 1)


def _run(daemon: DaemonState, connection: Connection, chosen: list[SlotSession], tokens: int = 0) -> dict[str, Any]:
    """One quantum of each, or so many tokens."""
    for session in chosen:
        connection.cursor = session.place
        session.owed += 1
        grants.proceed(daemon, session, tokens or session.quantum)
    return {"requests": [session.request for session in chosen]} if chosen else {"idle": True}


def _peek(daemon: DaemonState, connection: Connection, command: Command) -> dict[str, Any]:
    return {"requests": [session.request for session in grants.batch(connection, command)]}


def _drain(daemon: DaemonState, connection: Connection, command: Command) -> dict[str, Any] | None:
    connection.drains.append(command.request or 0)
    for session in grants.from_cursor(connection):
        grants.let_run(daemon, session)
    for session in connection.sessions.values():
        if session.phase is Phase.RUNNING and not session.drained:
            session.drained = True
            session.boundary = session.wanted
    grants.drained_to_the_end(connection)
    return None


def _mode(daemon: DaemonState, connection: Connection, command: Command) -> dict[str, Any]:
    connection.auto = command.word == "auto"
    for session in list(connection.sessions.values()):
        if connection.auto:
            if session.runnable and not session.drained:
                grants.let_run(daemon, session)
            elif session.phase is Phase.RUNNING:
                session.drained = True
        elif not connection.draining:
            session.drained = False
            daemon.leave_ring(session)
    return {"mode": command.word}


def _list_requests(daemon: DaemonState, connection: Connection, command: Command) -> dict[str, Any]:
    return {
        "requests": [
            {
                "request": s.request,
                "slot": s.place,
                "phase": s.phase.value,
                "remaining": s.left,
                "emitted": s.shown,
                "quantum": s.quantum,
                "epoch": s.epoch,
                "tokens": s.length,
            }
            for s in connection.sessions.values()
        ]
    }


def _list_slots(daemon: DaemonState, connection: Connection, command: Command) -> dict[str, Any]:
    taken = {s.place: s.request if s.connection is connection else -1 for s in daemon.places if s is not None}
    return {"slots": len(daemon.places), "taken": {str(place): request for place, request in taken.items()}}


def _reset_prefix_cache(daemon: DaemonState, connection: Connection, command: Command) -> dict[str, Any]:
    daemon.engine.reset_prefix_cache()
    return {}


def _stats(daemon: DaemonState, connection: Connection, command: Command) -> None:
    stats = {"sessions": daemon.sessions, "connections": len(daemon.connections), **daemon.engine.counters}
    connection.send(Kind.STATS, None, pack_json(stats), command.request or 0)
    connection.end_command()


def _quit(daemon: DaemonState, connection: Connection, command: Command) -> dict[str, Any]:
    connection.quits = True
    return {}


def _probe(daemon: DaemonState, connection: Connection, command: Command) -> dict[str, Any] | None:
    room = (len(daemon.places) - daemon.sessions - sum(probe.forks for probe in daemon.probes)) // 2
    chosen = grants.batch(connection, command)[:room]
    if not chosen:
        raise BadLine(f"there is nothing to probe, or no room: {room} sessions can be forked twice")
    parents = [(session.engine_id, min(2, session.left)) for session in chosen]
    daemon.probes.append(Probe(connection, command.request or 0, daemon.engine, parents, daemon.take_id))
    connection.probing += 1
    return None


def _ids_of(command: Command) -> tuple[int, ...]:
    assert isinstance(command.prompt, tuple), "Desk.read makes ids of a text"
    return command.prompt


ACTIONS: dict[str, Callable[[DaemonState, Connection, Command], dict[str, Any] | None]] = {
    "START": _start,
    "CONTINUE": _continue,
    "EXTEND": _extend,
    "FORK": _fork,
    "RESTORE": _restore,
    "CANCEL": _cancel,
    "SCHED_STEP": _step,
    "SCHED_BATCH_STEP": _batch_step,
    "SCHED_DRAIN": _drain,
    "SCHED_PEEK": _peek,
    "SCHED_PROBE": _probe,
    "MODE": _mode,
    "LIST_REQUESTS": _list_requests,
    "LIST_SLOTS": _list_slots,
    "RESET_PREFIX_CACHE": _reset_prefix_cache,
    "STATS": _stats,
    "QUIT": _quit,
    "TAGGED": _tagged,
}
