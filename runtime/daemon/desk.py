"""The desk: lines of clients in, frames out, over an engine that has sessions.

Knows: what each verb does, which client owns which session, what an engine's outputs mean for them, and who is granted
the next quantum. Does not know: sockets, turns of the engine (server.py), how a line is parsed (verbs.py).

Every line is answered at once by one ACK or ERROR; what it brings about follows as frames of its session. Whatever is
decided here is decided when the line is read: the engine gets its events in the same order, and only memory and a stop
id that is on its way can make it refuse one, which comes as an ERROR of that session.

Who goes on in a drain. At most as many sessions as the engine has rows have tokens to come, beside those that are about
to be parked. While nobody waits, each is granted its next quantum before the last is over, so that no chain breaks.
While somebody does, whoever comes to its end gives its row to the next in the ring, and joins it at its end: so of S
sessions over R rows each has its quantum once in every round. Nobody is granted anything while a new session waits for
its first token, so a drain keeps nobody out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from runtime.daemon.engine import SessionEngine
from runtime.daemon.frames import Kind, pack_count, pack_done, pack_ids, pack_json, pack_logprobs
from runtime.daemon.probe import Probe
from runtime.daemon.session import Connection, Phase, SlotSession
from runtime.daemon.verbs import BadLine, Command, parse
from runtime.frontend.logprobs import row_logprobs
from runtime.frontend.output_processor import drawn_seed
from runtime.frontend.prompt_text import prompt_ids
from runtime.frontend.tokenizer import TextStream, Tokenizer
from runtime.frontend.validation import RequestError, stop_ids_of
from runtime.schedule.plan import Evicted, Finished, Parked, Refused, StepOutput
from runtime.schedule.request import FinishReason, Request, SamplingParams

_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)
_MOST_SAID = 4096  # characters of why a line is not carried out
_NOT_SAMPLING = ("keep", "text", "priority", "stop_ids", "add_special_tokens")


class Read(NamedTuple):
    """A line that was read: the id before its verb, or 0; its command, with a prompt of ids, or why there is none."""

    request: int
    command: Command | None
    refused: str = ""


class Desk:
    """``connect`` clients, give it their lines, tell it every output, and ``grant`` before each turn.

    ``defaults``: sampling parameters that START does not give.
    """

    def __init__(
        self, engine: SessionEngine, tokenizer: Tokenizer | None = None, defaults: SamplingParams | None = None
    ) -> None:
        self._defaults = defaults or SamplingParams()
        self._engine = engine
        self._tokenizer = tokenizer
        self._model = engine.model_config
        config = engine.config
        self._rows = config.max_num_seqs
        # Tokens: no step in flight may have come to the old end, and each may gain a whole window.
        self._ahead = config.width * ((config.chain_depth or 0) + (config.horizon or 0) + 2)
        self._places: list[SlotSession | None] = [None] * config.max_sessions
        self._by_engine: dict[int, SlotSession] = {}
        self._connections: list[Connection] = []
        self._ring: deque[SlotSession] = deque()  # parked, and to go on by themselves
        self._probes: list[Probe] = []
        self._next_id = 0
        self._verbs: dict[str, Callable[[Connection, Command], dict[str, Any] | None]] = {
            "START": self._start,
            "CONTINUE": self._continue,
            "EXTEND": self._extend,
            "FORK": self._fork,
            "RESTORE": self._restore,
            "CANCEL": self._cancel,
            "SCHED_STEP": self._step,
            "SCHED_BATCH_STEP": self._batch_step,
            "SCHED_DRAIN": self._drain,
            "SCHED_PEEK": self._peek,
            "SCHED_PROBE": self._probe,
            "MODE": self._mode,
            "LIST_REQUESTS": self._list_requests,
            "LIST_SLOTS": self._list_slots,
            "RESET_PREFIX_CACHE": self._reset_prefix_cache,
            "STATS": self._stats,
            "QUIT": self._quit,
            "TAGGED": self._tagged,
        }

    # ---- connections ----

    def connect(self, connection: Connection) -> None:
        self._connections.append(connection)

    def disconnect(self, connection: Connection) -> None:
        """It is gone: so are its sessions."""
        self._connections.remove(connection)
        connection.lost = connection.lost or "closed"
        for session in list(connection.sessions.values()):
            self._end(session)
        for probe in [probe for probe in self._probes if probe.connection is connection]:
            self._probes.remove(probe)
            probe.close()

    @property
    def sessions(self) -> int:
        """Open ones, of all connections."""
        return sum(session is not None for session in self._places)

    # ---- lines ----

    def line(self, connection: Connection, text: str) -> None:
        """Carry out one line, and answer it. Whatever it holds, it does not raise."""
        self.carry_out(connection, self.read(text))

    def read(self, text: str) -> Read:
        """What one line says. Takes as long as its prompt is long; may be called in any thread."""
        request = 0
        try:
            command = parse(text, self._model.max_model_len)
            request = command.request or 0
            if isinstance(command.prompt, str):
                begins = command.verb == "START" and command.options.get("add_special_tokens", True)
                command = replace(command, prompt=self._token_ids(command.prompt, begins))
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
            answer = self._verbs[command.verb](connection, command)
        except (BadLine, RequestError) as error:
            self.refuse(connection, str(error), line.request)
            return
        if answer is not None:
            connection.send(Kind.ACK, None, pack_json({"verb": command.verb, **answer}), line.request)
            if command.verb not in ("START", "CONTINUE", "EXTEND", "SCHED_STEP", "SCHED_BATCH_STEP") or answer.get(
                "idle"
            ):
                connection.end_command()

    def refuse(self, connection: Connection, why: str, request: int = 0) -> None:
        """Answer a line that is not carried out."""
        connection.send(Kind.ERROR, None, why[:_MOST_SAID].encode("utf-8", "replace"), request)
        connection.end_command()

    def _tagged(self, connection: Connection, command: Command) -> dict[str, Any]:
        if connection.lines != 1:
            raise BadLine("TAGGED is the first line of a connection, or none")
        if command.other != 1:
            raise BadLine(f"frames of version {command.other} are not known; type TAGGED 1")
        connection.tagged = True
        model = str(Path(self._engine.config.model).resolve())  # a client may be in another folder
        return {"version": 1, "model": model, "max_model_len": self._model.max_model_len, "places": len(self._places)}

    def _start(self, connection: Connection, command: Command) -> dict[str, Any]:
        request = self._new_id(connection, command.request)
        place = self._new_place(command.place)
        token_ids = _ids_of(command)
        options = command.options
        seed = options.get("seed")
        given = {name: value for name, value in options.items() if name not in _NOT_SAMPLING}
        given["seed"] = drawn_seed(self._engine.config.seed, f"session {self._next_id}") if seed is None else seed
        if "stop_ids" in options:
            given["stop_token_ids"] = options["stop_ids"]
        sampling = replace(self._defaults, max_tokens=command.total, **given)
        if sampling.stop and self._tokenizer is None:
            raise BadLine("stop strings are found in text, but the model folder has no tokenizer: give stop_ids")
        stop_ids = stop_ids_of(sampling, self._model.eos_token_ids)
        engine_id, keep = self._take_id(), bool(options.get("keep"))
        asked = Request(engine_id, token_ids, sampling, stop_ids, options.get("priority", 0))
        self._engine.start(asked, command.quantum, keep=keep)
        session = SlotSession(
            connection,
            request,
            engine_id,
            place,
            self._next_epoch(connection, request),
            budget=min(command.total, self._model.max_model_len - len(token_ids)),
            quantum=command.quantum,
            length=len(token_ids),
            keep=keep,
            asked=asked,
            wants_text=bool(options.get("text")) and self._tokenizer is not None,
        )
        self._open(session)
        self._begin_turn(session, token_ids)
        return {"place": place, "epoch": session.epoch, "tokens": len(token_ids)}

    def _begin_turn(self, session: SlotSession, token_ids: tuple[int, ...]) -> None:
        session.phase, session.shown, session.leaving = Phase.RUNNING, 0, False
        session.owed += 1
        session.wanted = session.boundary = min(session.quantum, session.budget)
        session.drained = session.connection.auto or session.connection.draining
        session.known += token_ids
        session.text = self._text_of(session)

    def _text_of(self, session: SlotSession) -> TextStream | None:
        """The text of its turn so far, where somebody reads it or a stop string is looked for in it."""
        stop, known = session.asked.sampling.stop, session.known
        if self._tokenizer is None or not (session.wants_text or stop):
            session.known = []
            return None
        answer_at = len(known) - session.shown
        text = TextStream(self._tokenizer, stop, self._least(session), known[:answer_at])
        for token in known[answer_at:]:
            if token not in session.asked.stop_token_ids:
                text.push(token)
        return text

    @staticmethod
    def _least(session: SlotSession) -> int:
        return min(session.asked.sampling.min_tokens, session.budget)

    def _continue(self, connection: Connection, command: Command) -> dict[str, Any]:
        session = self._named(connection, command)
        if command.epoch is not None and command.epoch != session.epoch:
            raise BadLine(f"stale: it was meant for epoch {command.epoch}, the session is in epoch {session.epoch}")
        if session.drained:
            raise BadLine("the session goes on by itself, in a drain")
        if session.phase is Phase.COMPLETE:
            raise BadLine("its answer is complete: EXTEND or CANCEL it")
        if session.wanted >= session.budget:
            raise BadLine("all of its budget was asked for")
        session.owed += 1
        self._proceed(session, command.quantum)
        return {"epoch": session.epoch, "left": session.budget - session.wanted}

    def _extend(self, connection: Connection, command: Command) -> dict[str, Any]:
        session = self._named(connection, command)
        if session.phase is Phase.RUNNING or session.drained:
            raise BadLine("it is running: only a session whose quantum is over can be extended")
        token_ids = _ids_of(command)
        room = self._model.max_model_len - session.length - len(token_ids)
        if not token_ids or room < 1:
            most = self._model.max_model_len
            raise BadLine(f"{session.length} tokens and {len(token_ids)} new ones; max_model_len is {most}")
        session.remember()
        if session.let_go:
            self._take_back(session, token_ids, command)
        else:
            self._engine.extend(session.engine_id, session.engine_epoch, token_ids, command.total, command.quantum)
            session.engine_epoch += 1
        self._leave_ring(session)
        session.epoch = self._next_epoch(connection, session.request)
        session.budget, session.quantum = min(command.total, room), command.quantum
        session.length += len(token_ids)
        self._begin_turn(session, token_ids)
        return {"epoch": session.epoch, "tokens": len(token_ids)}

    def _take_back(self, session: SlotSession, token_ids: tuple[int, ...], command: Command) -> None:
        """A session that the engine had let go begins there again: with all that its client saw, and what it says."""
        asked, most = session.asked, command.total
        sampling = replace(asked.sampling, max_tokens=most, min_tokens=min(asked.sampling.min_tokens, most))
        known = (*session.known, *token_ids)
        engine_id = self._take_id()
        again = replace(asked, request_id=engine_id, prompt_token_ids=known, sampling=sampling)
        self._engine.start(again, command.quantum, keep=session.keep)
        session.engine_id, session.engine_epoch, session.let_go = engine_id, 1, False
        self._by_engine[engine_id] = session

    def _let_go(self, session: SlotSession) -> None:
        """What the engine knows of it beyond its stop string is nothing that its client was told."""
        self._engine.cancel(session.engine_id, FinishReason.STOP)
        del self._by_engine[session.engine_id]
        session.let_go = True

    def _fork(self, connection: Connection, command: Command) -> dict[str, Any]:
        parent = self._session(connection, command.other)
        if parent.phase is Phase.RUNNING or parent.drained:
            raise BadLine("the parent is running: only a session whose quantum is over can be forked")
        request = self._new_id(connection, command.request)
        place = self._new_place(command.place)
        engine_id = self._take_id()
        if not parent.let_go:
            self._engine.fork(engine_id, parent.engine_id)
        child = SlotSession(
            connection,
            request,
            engine_id,
            place,
            self._next_epoch(connection, request),
            parent.budget,
            parent.quantum,
            parent.length,
            parent.keep,
            parent.asked,
            parent.wants_text,
            known=list(parent.known),
            phase=parent.phase,
            shown=parent.shown,
            wanted=parent.shown,
            boundary=parent.shown,
            forking=not parent.let_go,
            let_go=parent.let_go,
        )
        child.text = self._text_of(child)
        self._open(child)
        return {"place": place, "epoch": child.epoch, "tokens": child.length}

    def _restore(self, connection: Connection, command: Command) -> dict[str, Any]:
        parent = self._session(connection, command.other)
        if command.request is None or command.request == parent.request:
            raise BadLine("REQ names the session that is to know what the other one knows: REQ id RESTORE parent")
        old = connection.sessions.get(command.request)
        if parent.phase is Phase.RUNNING or parent.drained:
            raise BadLine("the parent is running: only a session whose quantum is over can be forked")
        if command.place is not None and (old is None or command.place != old.place):
            self._new_place(command.place, ending=old is not None)  # or it raises, before anything is closed
        if old is not None:
            self._close(old, "restored from another session")
        return self._fork(connection, command)

    def _cancel(self, connection: Connection, command: Command) -> dict[str, Any]:
        if command.other is not None and command.request not in (None, command.other):
            raise BadLine(f"REQ {command.request} CANCEL {command.other}: name one session")
        if command.other is not None:
            session = self._session(connection, command.other)
        else:
            session = self._named(connection, command)
        self._close(session, "cancelled")
        return {"epoch": connection.epochs[session.request]}

    def _close(self, session: SlotSession, why: str) -> None:
        """Now, for its client; the engine hears of it next. What is in flight of it is dropped."""
        session.epoch = self._next_epoch(session.connection, session.request)
        session.connection.send(Kind.CLOSED, session, why.encode())
        self._end_commands(session)
        self._end(session)
        self._drained_to_the_end(session.connection)

    # ---- quanta ----

    def _step(self, connection: Connection, command: Command) -> dict[str, Any]:
        for session in self._from_cursor(connection):
            connection.cursor = session.place
            session.owed += 1
            self._proceed(session, session.quantum)
            return {"requests": [session.request]}
        return {"idle": True}

    def _batch_step(self, connection: Connection, command: Command) -> dict[str, Any]:
        chosen = self._batch(connection, command)
        for session in chosen:
            connection.cursor = session.place
            session.owed += 1
            self._proceed(session, 1)
        return {"requests": [session.request for session in chosen]} if chosen else {"idle": True}

    def _peek(self, connection: Connection, command: Command) -> dict[str, Any]:
        return {"requests": [session.request for session in self._batch(connection, command)]}

    def _batch(self, connection: Connection, command: Command) -> list[SlotSession]:
        runnable = list(self._from_cursor(connection))
        return runnable if command.other is None else runnable[: command.other]

    def _from_cursor(self, connection: Connection) -> Iterator[SlotSession]:
        """Those that wait for a quantum and are not drained, by place, from behind the last one served."""
        mine = sorted(connection.sessions.values(), key=lambda session: session.place)
        behind = [session for session in mine if session.place > connection.cursor]
        ordered = behind + [session for session in mine if session.place <= connection.cursor]
        return (session for session in ordered if session.runnable and not session.drained)

    def _drain(self, connection: Connection, command: Command) -> dict[str, Any] | None:
        connection.drains.append(command.request or 0)
        for session in self._from_cursor(connection):
            self._let_run(session)
        for session in connection.sessions.values():
            if session.phase is Phase.RUNNING and not session.drained:
                session.drained = True
                session.boundary = session.wanted
        self._drained_to_the_end(connection)
        return None

    def _mode(self, connection: Connection, command: Command) -> dict[str, Any]:
        connection.auto = command.word == "auto"
        for session in list(connection.sessions.values()):
            if connection.auto:
                if session.runnable and not session.drained:
                    self._let_run(session)
                elif session.phase is Phase.RUNNING:
                    session.drained = True
            elif not connection.draining:
                session.drained = False
                self._leave_ring(session)
        return {"mode": command.word}

    def _let_run(self, session: SlotSession) -> None:
        session.drained = True
        session.boundary = session.shown + session.quantum
        self._ring.append(session)

    def _leave_ring(self, session: SlotSession) -> None:
        if session in self._ring:
            self._ring.remove(session)

    def _drained_to_the_end(self, connection: Connection) -> None:
        """Answer every SCHED_DRAIN, once all sessions have spent their budgets."""
        if connection.draining and not any(session.drained for session in connection.sessions.values()):
            drains, connection.drains = connection.drains, []
            for request in drains:
                connection.send(Kind.ACK, None, pack_json({"verb": "SCHED_DRAIN"}), request)
                connection.end_command()

    def _proceed(self, session: SlotSession, tokens: int) -> None:
        tokens = min(tokens, session.budget - session.wanted)
        if session.phase is Phase.PARKED and not session.drained:
            session.boundary = session.shown + tokens
        session.wanted += tokens
        session.phase = Phase.RUNNING
        session.leaving = False
        self._engine.proceed(session.engine_id, session.engine_epoch, tokens)

    def grant(self) -> None:
        """Before each turn: whoever goes on by itself gets its next quantum in time; see the module's docstring."""
        going = [session for session in self._by_engine.values() if session.drained and session.phase is Phase.RUNNING]
        newcomers = any(s.phase is Phase.RUNNING and not s.shown for s in self._by_engine.values())
        staying = sum(not session.leaving for session in going)
        # Whoever goes on by command, and is owed tokens, may wait for a row that one of these has.
        owed = sum(s.phase is Phase.RUNNING and not s.drained and s.shown < s.wanted for s in self._by_engine.values())
        for session in going:
            if session.leaving or session.wanted >= session.budget or session.connection.behind:
                continue
            if session.wanted - session.shown > self._ahead:
                continue
            if self._ring or staying + owed > self._rows:
                session.leaving = True
                staying -= 1
                continue
            while session.wanted < session.budget and session.wanted - session.shown <= self._ahead:
                self._proceed(session, session.quantum)
        if newcomers and len(going) >= self._rows:
            return
        for session in list(self._ring):
            if staying >= self._rows or len(going) >= 2 * self._rows:
                return
            if session.connection.behind:
                continue
            self._ring.remove(session)
            self._proceed(session, session.quantum)
            going.append(session)
            staying += 1

    # ---- what is known ----

    def _list_requests(self, connection: Connection, command: Command) -> dict[str, Any]:
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

    def _list_slots(self, connection: Connection, command: Command) -> dict[str, Any]:
        taken = {s.place: s.request if s.connection is connection else -1 for s in self._places if s is not None}
        return {"slots": len(self._places), "taken": {str(place): request for place, request in taken.items()}}

    def _reset_prefix_cache(self, connection: Connection, command: Command) -> dict[str, Any]:
        self._engine.reset_prefix_cache()
        return {}

    def _stats(self, connection: Connection, command: Command) -> None:
        stats = {"sessions": self.sessions, "connections": len(self._connections), **self._engine.counters}
        connection.send(Kind.STATS, None, pack_json(stats), command.request or 0)
        connection.end_command()

    def _quit(self, connection: Connection, command: Command) -> dict[str, Any]:
        connection.quits = True
        return {}

    # ---- the probe ----

    def _probe(self, connection: Connection, command: Command) -> dict[str, Any] | None:
        room = (len(self._places) - self.sessions - sum(probe.forks for probe in self._probes)) // 2
        chosen = self._batch(connection, command)[:room]
        if not chosen:
            raise BadLine(f"there is nothing to probe, or no room: {room} sessions can be forked twice")
        parents = [(session.engine_id, min(2, session.left)) for session in chosen]
        self._probes.append(Probe(connection, command.request or 0, self._engine, parents, self._take_id))
        connection.probing += 1
        return None

    # ---- outputs of the engine ----

    def output(self, output: StepOutput) -> None:
        """Frames for whoever gained something, or came to an end."""
        for row, (engine_id, count) in enumerate(zip(output.request_ids, output.counts, strict=True)):
            if count and engine_id >= 0:
                tokens = tuple(output.tokens[row * output.width : row * output.width + count])
                session = self._by_engine.get(engine_id)
                if session is not None:
                    self._gained(session, tokens, output, row)
                for probe in self._probes:
                    if probe.has(engine_id):
                        columns = output.logprobs
                        scores = [] if columns is None else row_logprobs(columns, row, tokens, 0)
                        probe.gained(engine_id, tokens, [entry.logprob for entry in scores])
        for notice in output.notices:
            session = self._by_engine.get(notice.request_id)
            if session is not None:
                self._noticed(session, notice)
            for probe in self._probes:
                probe.noticed(notice)
        for finished in output.finished:
            session = self._by_engine.get(finished.request_id)
            if session is not None:
                self._ended(session, finished)
            for probe in self._probes:
                probe.ended(finished)
        for probe in [probe for probe in self._probes if probe.over]:
            self._probes.remove(probe)
            probe.connection.probing -= 1
            probe.answer()

    def _gained(self, session: SlotSession, tokens: tuple[int, ...], output: StepOutput, row: int) -> None:
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
            self._stopped(session)

    def _stopped(self, session: SlotSession) -> None:
        """By a stop string. The engine does not know yet, and may have more tokens of it: nobody is told those."""
        session.wanted = session.boundary = session.shown
        self._let_go(session)
        if session.keep:
            session.phase = Phase.COMPLETE
        else:
            self._forget(session)
        self._complete(session, FinishReason.STOP)

    def _noticed(self, session: SlotSession, notice: Parked | Refused | Evicted) -> None:
        connection = session.connection
        if isinstance(notice, Evicted):
            connection.send(Kind.EVICTED, session, pack_count(notice.tokens))
        elif isinstance(notice, Refused):
            self._refused(session, notice)
        elif session.forking:
            session.forking = False
        elif notice.reason is not FinishReason.NONE:
            session.phase = Phase.COMPLETE
            self._complete(session, notice.reason)
        elif session.wanted <= session.shown:
            session.phase = Phase.PARKED
            if session.drained:
                self._ring.append(session)
            else:
                connection.send(Kind.QUANTUM_DONE, session, pack_count(session.shown))
                self._end_commands(session)

    def _refused(self, session: SlotSession, notice: Refused) -> None:
        """By the engine, when it came to it: for want of memory, or because a stop id was on its way."""
        said = f"{notice.verb.upper()}: {notice.detail}"
        if notice.verb == "Extend":
            self._go_back(session, said)
            return
        session.connection.send(Kind.ERROR, session, said.encode())
        if notice.verb == "Branch":
            self._close(session, f"the fork was refused: {notice.detail}")

    @staticmethod
    def _end_commands(session: SlotSession) -> None:
        """To a plain stream: one end for each command, also where several ended together or a drain took over."""
        for _ in range(session.owed):
            session.connection.end_command()
        session.owed = 0

    def _go_back(self, session: SlotSession, said: str) -> None:
        """To where it was before an EXTEND that is refused; the error tells the epoch in which it is then."""
        session.go_back()
        session.text = self._text_of(session)
        session.connection.epochs[session.request] = session.epoch
        session.connection.send(Kind.ERROR, session, said.encode())
        session.drained = False
        self._end_commands(session)
        self._drained_to_the_end(session.connection)

    def _complete(self, session: SlotSession, reason: FinishReason) -> None:
        connection = session.connection
        if session.text is not None:
            rest = session.text.finish()
            if rest and session.wants_text:
                connection.send(Kind.TEXT, session, rest.encode("utf-8", "replace"))
            if session.text.stopped:  # by the rest of a character that never became whole
                reason = FinishReason.STOP
        connection.send(Kind.DONE, session, pack_done(reason, session.shown))
        self._end_commands(session)
        session.drained = False
        self._drained_to_the_end(connection)

    def _ended(self, session: SlotSession, finished: Finished) -> None:
        connection = session.connection
        if finished.reason is FinishReason.REJECTED and session.before is not None:  # taken back, and refused
            del self._by_engine[session.engine_id]
            session.let_go = True
            self._go_back(session, f"EXTEND: {finished.detail or finished.reason.label}")
            return
        self._forget(session)
        if finished.reason in _COMPLETE:
            self._complete(session, finished.reason)
            return
        session.epoch = self._next_epoch(connection, session.request)
        why = finished.detail or finished.reason.label
        if finished.reason is FinishReason.REJECTED:
            connection.send(Kind.ERROR, session, f"START: {why}".encode())
        connection.send(Kind.CLOSED, session, why.encode())
        self._end_commands(session)
        session.drained = False
        self._drained_to_the_end(connection)

    # ---- names ----

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _open(self, session: SlotSession) -> None:
        self._places[session.place] = session
        if not session.let_go:  # a fork of one that the engine has let go: it has none of this one either
            self._by_engine[session.engine_id] = session
        session.connection.sessions[session.request] = session

    def _forget(self, session: SlotSession) -> None:
        self._leave_ring(session)
        self._places[session.place] = None
        if not session.let_go:
            del self._by_engine[session.engine_id]
        del session.connection.sessions[session.request]

    def _end(self, session: SlotSession) -> None:
        self._forget(session)
        if not session.let_go:
            self._engine.cancel(session.engine_id)

    def _next_epoch(self, connection: Connection, request: int) -> int:
        epoch = connection.epochs[request] = connection.epochs.get(request, 0) + 1
        return epoch

    def _new_id(self, connection: Connection, request: int | None) -> int:
        if not connection.tagged:
            if connection.sessions:
                raise BadLine("the plain stream has one session: CANCEL it first, or begin with TAGGED 1")
            return request or 1
        if not request:
            raise BadLine("a session has an id of its own, 1 or more: REQ id ...")
        if request in connection.sessions:
            raise BadLine(f"REQ {request} is a session already")
        return request

    def _new_place(self, wanted: int | None, *, ending: bool = False) -> int:
        """``ending``: a session ends for the one that is to have it."""
        if wanted is not None:
            if wanted >= len(self._places):
                raise BadLine(f"SLOT {wanted}: places are 0 to {len(self._places) - 1}; see --max-sessions")
            if self._places[wanted] is not None:
                raise BadLine(f"SLOT {wanted} is taken: a slot in use is never overwritten")
            self._refuse_beside_probes(ending=ending)
            return wanted
        free = next((place for place, session in enumerate(self._places) if session is None), None)
        if free is None:
            raise BadLine(f"all {len(self._places)} places are taken: CANCEL a session, or raise --max-sessions")
        self._refuse_beside_probes(ending=False)
        return free

    def _refuse_beside_probes(self, *, ending: bool) -> None:
        """Forks of a probe are sessions of the engine, too: one more would end another one that is parked."""
        probing = sum(probe.forks for probe in self._probes)
        if probing and self.sessions - ending + probing >= len(self._places):
            raise BadLine(f"a probe takes the {probing} places that are left: say it again when that is told")

    def _session(self, connection: Connection, request: int | None) -> SlotSession:
        session = connection.sessions.get(-1 if request is None else request)
        if session is None:
            raise BadLine(f"there is no session {request} on this connection")
        return session

    def _named(self, connection: Connection, command: Command) -> SlotSession:
        """By REQ, by SLOT, by both where they agree; on a plain stream by neither."""
        if command.place is not None:
            at = self._places[command.place] if command.place < len(self._places) else None
            if at is None or at.connection is not connection or command.request not in (None, at.request):
                raise BadLine(f"SLOT {command.place} has no such session of this connection")
            return at
        if command.request is None and not connection.tagged and len(connection.sessions) == 1:
            return next(iter(connection.sessions.values()))
        return self._session(connection, command.request)

    def _token_ids(self, text: str, begins: bool) -> tuple[int, ...]:
        """``begins``: a session begins with it, with BOS where the tokenizer adds one to a text."""
        if self._tokenizer is None:
            raise BadLine("the prompt is a text, but the model folder has no tokenizer: give [token, ids]")
        return tuple(prompt_ids(self._tokenizer, text, self._model.max_model_len, add_special_tokens=begins))


def _ids_of(command: Command) -> tuple[int, ...]:
    assert isinstance(command.prompt, tuple), "Desk.read makes ids of a text"
    return command.prompt
