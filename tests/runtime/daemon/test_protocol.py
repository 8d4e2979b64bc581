"""The protocol against a pure model of it: what a client that only reads frames may expect, whatever is said when.

Knows: the verbs as docs/daemon.md has them, and what each turn generates alone. Does not know: the desk's own records.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from runtime.daemon import actions, grants
from runtime.daemon.desk import Desk
from runtime.daemon.frames import Frame, Kind
from runtime.daemon.session import Connection, SlotSession
from runtime.daemon.state import DaemonState
from runtime.daemon.verbs import Command
from runtime.schedule.request import FinishReason
from tests.runtime.daemon.listener import Listener, is_refusal
from tests.runtime.daemon.scripted import ScriptedEngine, ScriptedModel
from tests.runtime.schedule.fake_device import VOCABULARY, complete_alone
from tests.runtime.schedule.mutants import Mutant, plant

EXAMPLES, MORE = 250, 10_000
STEPS = 14
PLACES = 4
LONGEST = 40
EOS = (3,)

CHOICES = st.integers(0, 11)  # of whom a line is about: see ``pick``
NEW_IDS = st.integers(1, 6)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4)
TOTALS = st.integers(1, 24)
QUANTA = st.integers(1, 4)


@dataclass
class Expected:
    """A session as its client knows it. ``answer``: what this turn generates alone, and why it ends."""

    engine_id: int
    known: list[int]
    budget: int
    quantum: int
    granted: int
    keep: bool
    epoch: int
    shown: list[int] = field(default_factory=list)
    phase: str = "running"
    drained: bool = False
    from_parent: int = 0  # tokens of ``shown`` that it was forked with

    def answer(self) -> tuple[list[int], FinishReason]:
        mine = self.shown[: self.from_parent]
        if self.from_parent >= self.budget or (mine and mine[-1] in EOS):
            return mine, FinishReason.LENGTH if self.from_parent >= self.budget else FinishReason.STOP
        longest = len(self.known) + self.budget
        tokens, reason = complete_alone(self.engine_id, (*self.known, *mine), EOS, longest)
        return [*mine, *tokens], reason

    def spoken_to(self, said: list[int], total: int, quantum: int, epoch: int) -> None:
        self.known += [*self.shown, *said]
        self.shown, self.from_parent = [], 0
        self.budget = min(total, LONGEST - len(self.known))
        self.quantum, self.granted, self.epoch = quantum, min(quantum, self.budget), epoch
        self.phase = "running"


class Protocol(RuleBasedStateMachine):
    @initialize(depth=st.integers(0, 4), rows=st.integers(1, 3), blocks=st.sampled_from((30, 100)))
    def begin(self, depth: int, rows: int, blocks: int) -> None:
        self.engine = ScriptedEngine(
            depth=depth,
            rows=rows,
            slots=rows + PLACES + 2,
            max_sessions=PLACES,
            blocks=blocks,
            max_model_len=LONGEST,
        )
        self.engine.model_config = ScriptedModel(max_model_len=LONGEST, eos_token_ids=EOS)
        self.client = Listener(self.engine, Desk(self.engine))
        self.read = len(self.client.frames)
        self.sessions: dict[int, Expected] = {}
        self.epochs: dict[int, int] = {}
        self.next_engine_id = 0
        self.draining = self.auto = False

    # ---- what is said ----

    def say(self, line: str, *, right: bool) -> Frame | None:
        """The daemon takes the line exactly if that is ``right``."""
        answer = self.client.say(line)
        if line == "SCHED_DRAIN" and right:
            assert answer is None or answer.kind is Kind.ACK
        else:
            assert answer is not None, line
            assert (answer.kind is not Kind.ERROR) == right, (line, answer)
        self.hear()
        return answer

    def epoch_of(self, request: int) -> int:
        self.epochs[request] = self.epochs.get(request, 0) + 1
        return self.epochs[request]

    def pick(self, choice: int) -> int:
        """Mostly a session that there is."""
        there = sorted(self.sessions)
        return there[choice % len(there)] if there and choice < 10 else 1 + choice % 6

    @rule(request=NEW_IDS, prompt=TOKENS, total=TOTALS, quantum=QUANTA, keep=st.booleans())
    def start(self, request: int, prompt: list[int], total: int, quantum: int, keep: bool) -> None:
        right = request not in self.sessions and len(self.sessions) < PLACES
        self.say(f"REQ {request} START {prompt} {total} {quantum} keep={int(keep)}", right=right)
        if right:
            epoch, granted = self.epoch_of(request), min(quantum, total)
            self.sessions[request] = Expected(self.new_id(), list(prompt), total, quantum, granted, keep, epoch)
            self.sessions[request].drained = self.draining or self.auto

    def new_id(self) -> int:
        self.next_engine_id += 1
        return self.next_engine_id - 1

    @rule(choice=CHOICES, tokens=QUANTA, stale=st.sampled_from((False, False, False, True)))
    def go_on(self, choice: int, tokens: int, stale: bool) -> None:
        request = self.pick(choice)
        session = self.sessions.get(request)
        can = session is not None and not session.drained and session.phase != "complete"
        right = session is not None and can and session.granted < session.budget and not stale
        epoch = 1 if session is None else session.epoch - stale
        self.say(f"REQ {request} CONTINUE {tokens} {epoch}", right=right)
        if session is not None and right:
            self.grant(session, tokens)

    @staticmethod
    def grant(session: Expected, tokens: int) -> None:
        session.granted = min(session.granted + tokens, session.budget)
        session.phase = "running"

    @rule(choice=CHOICES, said=TOKENS, total=TOTALS, quantum=QUANTA)
    def extend(self, choice: int, said: list[int], total: int, quantum: int) -> None:
        request = self.pick(choice)
        session = self.sessions.get(request)
        room = 0 if session is None else LONGEST - len(session.known) - len(session.shown)
        right = session is not None and session.phase != "running" and len(said) < room
        self.say(f"REQ {request} EXTEND {said} {total} {quantum}", right=right)
        if session is not None and right:
            session.spoken_to(said, total, quantum, self.epoch_of(request))
            session.drained = self.draining or self.auto

    @rule(request=NEW_IDS, choice=CHOICES)
    def fork(self, request: int, choice: int) -> None:
        parent = self.pick(choice)
        old = self.sessions.get(parent)
        right = old is not None and old.phase != "running" and request not in self.sessions
        right = right and len(self.sessions) < PLACES
        self.say(f"REQ {request} FORK {parent}", right=right)
        if old is not None and right:
            epoch, shown = self.epoch_of(request), len(old.shown)
            child = Expected(self.new_id(), list(old.known), old.budget, old.quantum, shown, old.keep, epoch)
            child.shown, child.phase, child.from_parent = list(old.shown), old.phase, shown
            self.sessions[request] = child

    @rule(choice=CHOICES)
    def cancel(self, choice: int) -> None:
        request = self.pick(choice)
        right = request in self.sessions
        if right:
            self.epoch_of(request)
        self.say(f"REQ {request} CANCEL", right=right)
        assert request not in self.sessions, "it was told that it is closed"

    @rule(most=st.sampled_from((None, 0, 1, 3)))
    def batch_step(self, most: int | None) -> None:
        ready = {
            r for r, s in self.sessions.items() if s.phase == "parked" and not s.drained and len(s.shown) < s.budget
        }
        answer = self.say("SCHED_BATCH_STEP" + ("" if most is None else f" {most}"), right=True)
        assert answer is not None
        chosen = answer.answer.get("requests", [])
        assert set(chosen) <= ready
        assert len(chosen) == (len(ready) if most is None else min(most, len(ready)))
        for request in chosen:
            self.grant(self.sessions[request], 1)

    @rule()
    def drain(self) -> None:
        for session in self.sessions.values():
            if session.phase != "complete":  # from now on a client does not see whether it is parked for a moment
                session.drained, session.phase = True, "running"
        self.draining = any(session.drained for session in self.sessions.values())
        self.say("SCHED_DRAIN", right=True)

    @rule()
    def list_requests(self) -> None:
        answer = self.say("LIST_REQUESTS", right=True)
        assert answer is not None
        found = {r["request"]: (r["phase"], r["emitted"], r["epoch"]) for r in answer.answer["requests"]}
        assert found.keys() == self.sessions.keys()
        for request, session in self.sessions.items():
            phase = found[request][0] if session.drained else session.phase
            assert found[request] == (phase, len(session.shown), session.epoch)

    @rule(turns=st.integers(1, 8))
    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.client.turn()
            self.hear()

    @precondition(lambda self: self.sessions)
    @rule()
    def rest(self) -> None:
        """When nothing goes on, each session has what it was granted, and what is not its client's to say is over."""
        self.client.run_until_idle()
        self.hear()
        assert not self.draining
        for session in self.sessions.values():
            tokens, _ = session.answer()
            assert session.phase != "running", session
            if session.phase == "parked":
                assert len(session.shown) == session.granted < max(len(tokens), session.granted + 1), session
            else:
                assert session.shown == tokens
            assert not session.drained or session.phase == "complete", session

    # ---- what is heard ----

    def hear(self) -> None:
        frames, self.read = self.client.frames[self.read :], len(self.client.frames)
        for frame in frames:
            if frame.kind is Kind.ACK and frame.answer.get("verb") == "SCHED_DRAIN":
                assert not any(session.drained for session in self.sessions.values())
                self.draining = False
            if frame.kind in (Kind.ACK, Kind.STATS) or is_refusal(frame):
                continue
            session = self.sessions[frame.request]
            assert frame.epoch == (self.epochs[frame.request] if frame.kind is Kind.CLOSED else session.epoch), frame
            self.hear_of(frame.request, session, frame)

    def hear_of(self, request: int, session: Expected, frame: Frame) -> None:
        if frame.kind is Kind.TOKEN:
            session.shown += frame.tokens
            assert session.phase == "running", frame
            assert len(session.shown) <= (session.budget if session.drained else session.granted)
            assert session.shown == session.answer()[0][: len(session.shown)]
        elif frame.kind is Kind.QUANTUM_DONE:
            assert frame.count <= len(session.shown)
            if not session.drained:
                assert frame.count == len(session.shown) == session.granted
                session.phase = "parked"
        elif frame.kind is Kind.DONE:
            tokens, reason = session.answer()
            assert frame.done == (reason, len(tokens))
            assert session.shown == tokens
            session.phase, session.drained = "complete", False
            if not session.keep:
                del self.sessions[request]
        elif frame.kind is Kind.CLOSED:
            del self.sessions[request]
        elif frame.kind is Kind.EVICTED:
            assert frame.count == len(session.known) + len(session.shown)
        else:
            assert frame.kind is Kind.ERROR, frame
            assert session.answer()[1] is FinishReason.STOP, "only what a stop id overtook is refused late"

    def teardown(self) -> None:
        if not hasattr(self, "client"):
            return
        self.client.run_until_idle()
        self.hear()
        self.client.desk.disconnect(self.client.connection)
        self.client.run_until_idle()
        self.engine.check_all_is_back()


EVERY = settings(
    max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
TestProtocol = pytest.mark.slow(Protocol.TestCase)
TestProtocol.settings = EVERY


@pytest.mark.long
def test_more_of_the_same() -> None:
    run_state_machine_as_test(Protocol, settings=settings(EVERY, max_examples=MORE))


# ---- desks that break the protocol ----


def lets_stale_ones_continue(usual: Mutant, daemon: DaemonState, connection: Connection, command: Command) -> Any:
    return usual(daemon, connection, replace(command, epoch=None))


def grants_one_too_many(usual: Mutant, daemon: DaemonState, session: SlotSession, tokens: int) -> None:
    usual(daemon, session, tokens + 1)


def shows_what_was_cancelled(usual: Mutant, daemon: DaemonState, session: SlotSession) -> None:
    """Tokens in flight of a session that is closed go to the next one with its id."""
    usual(daemon, session)
    daemon.by_engine[session.engine_id] = session


def forgets_whose_turn_it_is(usual: Mutant, daemon: DaemonState) -> None:
    """Sessions that are drained and come to the end of a quantum are granted no other."""
    daemon.ring.clear()
    usual(daemon)


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (actions.ACTIONS, "CONTINUE", lets_stale_ones_continue),
        (grants, "proceed", grants_one_too_many),
        (DaemonState, "forget", shows_what_was_cancelled),
        (grants, "grant", forgets_whose_turn_it_is),
    ],
    ids=lambda given: given.__name__ if callable(given) and not isinstance(given, type) else "",
)
def test_desks_that_break_the_protocol_are_found_out(
    owner: Any, name: str, mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(owner, dict):
        monkeypatch.setitem(owner, name, partial(mutant, owner[name]))
    else:
        plant(monkeypatch, owner, name, mutant)
    broken = type("Broken", (Protocol,), {})
    with pytest.raises(Exception):  # noqa: B017, PT011  (hypothesis wraps what several examples raise in a group)
        run_state_machine_as_test(broken, settings=settings(EVERY, max_examples=300, phases=[Phase.generate]))
