"""Outputs: what the tokens, notices and ends of a step mean for sessions, and the frames that say so.

Knows: stop strings, quanta, refusals of the engine. Does not know: verbs (actions.py), the bytes of frames (frames.py).
"""

from __future__ import annotations

from runtime.daemon import grants
from runtime.daemon.frames import Kind, pack_count, pack_done, pack_logprobs
from runtime.daemon.session import Phase, SlotSession
from runtime.daemon.state import DaemonState
from runtime.frontend.answer_text import TextStream
from runtime.frontend.framing import pack_ids
from runtime.frontend.logprobs import row_logprobs
from runtime.schedule.plan import Evicted, Finished, Parked, Refused, StepOutput
from runtime.schedule.request import FinishReason

_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


def output(daemon: DaemonState, output: StepOutput) -> None:
    """Send frames for a step's tokens, notices and ends."""
    for row, (engine_id, count) in enumerate(zip(output.request_ids, output.counts, strict=True)):
        if count and engine_id >= 0:
            tokens = tuple(output.tokens[row * output.width : row * output.width + count])
            session = daemon.by_engine.get(engine_id)
            if session is not None:
                _gained(daemon, session, tokens, output, row)
            for probe in daemon.probes:
                if probe.has(engine_id):
                    columns = output.logprobs
                    scores = [] if columns is None else row_logprobs(columns, row, tokens, 0)
                    probe.gained(engine_id, tokens, [entry.logprob for entry in scores])
    for notice in output.notices:
        session = daemon.by_engine.get(notice.request_id)
        if session is not None:
            _noticed(daemon, session, notice)
        for probe in daemon.probes:
            probe.noticed(notice)
    for finished in output.finished:
        session = daemon.by_engine.get(finished.request_id)
        if session is not None:
            _ended(daemon, session, finished)
        for probe in daemon.probes:
            probe.ended(finished)
    for probe in [probe for probe in daemon.probes if probe.over]:
        daemon.probes.remove(probe)
        probe.connection.probing -= 1
        probe.answer()


def _gained(daemon: DaemonState, session: SlotSession, tokens: tuple[int, ...], output: StepOutput, row: int) -> None:
    connection = session.connection
    session.before = None
    shown = ""
    if session.text is not None:
        for at, token in enumerate(tokens):
            shown += "" if token in session.asked.stop_token_ids else session.text.push(token)
            if session.text.stopped:
                tokens = tokens[: at + 1]
                break
        session.known += tokens
    session.shown += len(tokens)
    session.length += len(tokens)
    logprobs = session.asked.sampling.logprobs
    if logprobs is not None and output.logprobs is not None:
        entries = row_logprobs(output.logprobs, row, tokens, logprobs)
        connection.send(Kind.LOGPROBS, session, pack_logprobs(entries))
    connection.send(Kind.TOKEN, session, pack_ids(tokens))
    connection.send_ids(tokens)
    if shown and session.wants_text:
        connection.send(Kind.TEXT, session, shown.encode("utf-8", "replace"))
    while session.drained and session.boundary <= session.shown and session.boundary < session.budget:
        connection.send(Kind.QUANTUM_DONE, session, pack_count(session.boundary))
        session.boundary += session.quantum
    if session.text is not None and session.text.stopped:
        _stopped(daemon, session)


def _stopped(daemon: DaemonState, session: SlotSession) -> None:
    """By a stop string. The engine ends it next; tokens that it has sampled beyond are not sent."""
    session.wanted = session.boundary = session.shown
    _let_go(daemon, session)
    if session.keep:
        session.phase = Phase.COMPLETE
    else:
        daemon.forget(session)
    _complete(daemon, session, FinishReason.STOP)


def _let_go(daemon: DaemonState, session: SlotSession) -> None:
    """End it in the engine only, which knows more tokens than its client."""
    daemon.engine.cancel(session.engine_id, FinishReason.STOP)
    del daemon.by_engine[session.engine_id]
    session.let_go = True


def _noticed(daemon: DaemonState, session: SlotSession, notice: Parked | Refused | Evicted) -> None:
    connection = session.connection
    if isinstance(notice, Evicted):
        connection.send(Kind.EVICTED, session, pack_count(notice.tokens))
    elif isinstance(notice, Refused):
        _refused(daemon, session, notice)
    elif session.forking:
        session.forking = False
    elif notice.reason is not FinishReason.NONE:
        session.phase = Phase.COMPLETE
        _complete(daemon, session, notice.reason)
    elif session.wanted <= session.shown:
        session.phase = Phase.PARKED
        if session.drained:
            daemon.ring.append(session)
        else:
            connection.send(Kind.QUANTUM_DONE, session, pack_count(session.shown))
            end_commands(session)


def _refused(daemon: DaemonState, session: SlotSession, notice: Refused) -> None:
    """By the engine, when it applied the event: for want of memory, or because a stop id was on its way."""
    said = f"{notice.verb.upper()}: {notice.detail}"
    if notice.verb == "Extend":
        _go_back(daemon, session, said)
        return
    session.connection.send(Kind.ERROR, session, said.encode())
    if notice.verb == "Branch":
        close(daemon, session, f"the fork was refused: {notice.detail}")


def end_commands(session: SlotSession) -> None:
    """To a plain stream: one end for each command, even if several ended together or a drain took over."""
    for _ in range(session.owed):
        session.connection.end_command()
    session.owed = 0


def _go_back(daemon: DaemonState, session: SlotSession, said: str) -> None:
    """Undo an EXTEND that was refused; the error has the epoch that the session is in then."""
    session.go_back()
    session.text = text_of(daemon, session)
    session.connection.epochs[session.request] = session.epoch
    session.connection.send(Kind.ERROR, session, said.encode())
    session.drained = False
    end_commands(session)
    grants.drained_to_the_end(session.connection)


def _complete(daemon: DaemonState, session: SlotSession, reason: FinishReason) -> None:
    connection = session.connection
    if session.text is not None:
        rest, reason = session.text.end(reason)
        if rest and session.wants_text:
            connection.send(Kind.TEXT, session, rest.encode("utf-8", "replace"))
    connection.send(Kind.DONE, session, pack_done(reason, session.shown))
    end_commands(session)
    session.drained = False
    grants.drained_to_the_end(connection)


def _ended(daemon: DaemonState, session: SlotSession, finished: Finished) -> None:
    connection = session.connection
    if finished.reason is FinishReason.REJECTED and session.before is not None:  # taken back, and refused
        del daemon.by_engine[session.engine_id]
        session.let_go = True
        _go_back(daemon, session, f"EXTEND: {finished.detail or finished.reason.label}")
        return
    daemon.forget(session)
    if finished.reason in _COMPLETE:
        _complete(daemon, session, finished.reason)
        return
    session.epoch = daemon.next_epoch(connection, session.request)
    why = finished.detail or finished.reason.label
    if finished.reason is FinishReason.REJECTED:
        connection.send(Kind.ERROR, session, f"START: {why}".encode())
    connection.send(Kind.CLOSED, session, why.encode())
    end_commands(session)
    session.drained = False
    grants.drained_to_the_end(connection)


def close(daemon: DaemonState, session: SlotSession, why: str) -> None:
    """End a session for its client now and in the engine next. Its tokens in flight are dropped."""
    session.epoch = daemon.next_epoch(session.connection, session.request)
    session.connection.send(Kind.CLOSED, session, why.encode())
    end_commands(session)
    daemon.end(session)
    grants.drained_to_the_end(session.connection)


def text_of(daemon: DaemonState, session: SlotSession) -> TextStream | None:
    """The text of its turn so far; None unless the client reads text or a stop string is looked for."""
    stop, known = session.asked.sampling.stop, session.known
    if daemon.tokenizer is None or not (session.wants_text or stop):
        session.known = []
        return None
    answer_at = len(known) - session.shown
    least = min(session.asked.sampling.min_tokens, session.budget)
    text = TextStream(daemon.tokenizer, stop, least, known[:answer_at])
    for token in known[answer_at:]:
        if token not in session.asked.stop_token_ids:
            text.push(token)
    return text
