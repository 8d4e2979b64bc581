"""The agreement protocol: its rules, and the state machines of leader and follower as two tables.

Knows: which input is legal in which state, the state that follows, and the time limits.
Does not know: what the machines do then (leader.py, follower.py: pure, no sockets, no clock, no threads), how frames
travel (control/interface.py, uds.py, zeromq.py), what the events in a payload mean.

Rules
 1. A *turn* is one pass of the engine's loop. Turns are numbered 0, 1, 2, ... by ``step``; every rank takes each once.
 2. What the leader submits in turn N takes effect in turn N + L on every rank (L is the horizon). The leader sends it
    in the record of step N; a follower needs that record only in turn N + L, so with L > 0 it normally lies there
    already, and with L = 0 it comes a moment later. L is part of the identity, or the leader settles it from measured
    round trips before the first turn (HORIZON); a record with another L is an error.
 3. The digest of step N is the rolling digest a rank has when it begins turn N: after plan(N-1), before any event of
    turn N. The leader's travels in record N, a follower's in its acknowledgement of step N.
 4. A follower compares when it takes a record; the leader compares when it reads an acknowledgement (or, if the
    follower is ahead, when it reaches that step itself). If either finds a divergence, the leader asks for the last
    decisions, waits a moment for every rank's, and ends the job with one verdict that all ranks raise.
 5. Stopping is agreed like an event: a record with the STOP flag, in effect L turns later (L = 0: at once).
 6. Frames may be delayed, duplicated, reordered or lost. A record is taken once, in its turn. A follower that misses
    one asks again; the leader keeps every record that some rank may still need.
 7. Ranks form groups, runs of consecutive ranks. Those of one group make the same plans and have the same digest: it is
    compared within the group, with the group's *reference*: the leader, or the group's first rank.
 8. After its turn began, and at most once a turn, all ranks may agree on the elementwise maximum of numbers. Every rank
    proposes; the leader answers when it has all proposals. Proposals must match: equally many numbers, the same ones
    within a group, in the same step. The answer for a step is the same however often it is asked for.
 9. A follower's message to the leader is numbered, and kept until the leader's engine has taken it.
10. Time only ends things: a rank that is silent for ``deadline`` seconds ends the job and is named. Times are of the
    rank's local clock, passed in; only differences are used, so clocks may disagree by any amount.

Everything that changes a state goes through the two tables below. An input that the table has no entry for raises
IllegalInput, which names state and input, and nothing has changed. tests/tools/diagrams/control.py draws the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from parallel.control.errors import IllegalInput


@dataclass(frozen=True, slots=True)
class Limits:
    """All time limits of the control plane, in seconds.

    ``deadline``: the longest silence of a live rank. ``resend``: how often a follower asks again for a missing record.
    ``divergence``: how long the leader waits for the ranks' decisions once digests differ. ``spin``: how long a receive
    polls before it sleeps; spinning has the lowest latency but keeps a core busy. ``start``: the handshake, which waits
    for the slowest import, and then each rank's first turn, which waits for the slowest model load.
    """

    deadline: float = 30.0
    resend: float = 1.0
    divergence: float = 2.0
    spin: float = 50e-6
    start: float = 120.0

    @property
    def keepalive(self) -> float:
        """How often an idle leader says that it is there."""
        return self.deadline / 4


_State = TypeVar("_State", bound=StrEnum)
_Input = TypeVar("_Input", bound=StrEnum)


def _table(edges: Mapping[_State, Mapping[_State, tuple[_Input, ...]]]) -> Mapping[_State, Mapping[_Input, _State]]:
    """By state and input the state that follows, of the inputs that lead from each state to each other one."""
    return {state: {given: after for after in row for given in row[after]} for state, row in edges.items()}


class LeaderState(StrEnum):
    RUNNING = "running"
    AGREEING = "agreeing"  # waiting for all ranks' numbers
    DIVERGED = "diverged"  # digests differ; waiting for the ranks' decisions
    STOPPED = "stopped"  # the agreed stop is in effect
    FINISHING = "finishing"  # agreeing, in the last turn
    ENDED = "ended"  # there is a verdict


class LeaderInput(StrEnum):
    TURN = "turn"  # the engine begins a turn
    STOP_TURN = "stop turn"  # ... in which a stop takes effect
    SUBMIT_STOP = "submit stop"
    SAME = "same"  # a rank acknowledged a step with our digest (or one we have not reached)
    DIFFERS = "differs"  # ... with another digest
    RESEND = "resend"
    PROPOSE = "propose"  # this rank has its numbers
    PROPOSED = "proposed"  # a rank sent its numbers
    AGREED = "agreed"  # all numbers are here
    CONTRADICTS = "contradicts"  # they do not match
    EXPLAINED = "explained"  # a rank sent its decisions
    RESOLVED = "resolved"  # the divergence has its verdict
    LEFT = "left"  # a rank closed its connection after the agreed stop took effect for it
    LOST = "lost"  # a rank closed it before
    LATE = "late"  # a rank's deadline passed
    END = "end"  # a rank announced its end, or sent an illegal frame
    LEAVE = "leave"  # this rank ends


_L, _LI = LeaderState, LeaderInput
# What ranks may send, or how they go, until the end.
_SENT = (_LI.SAME, _LI.DIFFERS, _LI.RESEND, _LI.PROPOSED, _LI.CONTRADICTS, _LI.EXPLAINED, _LI.LEFT, _LI.LOST, _LI.END)
LEADER_TABLE: Final[Mapping[LeaderState, Mapping[LeaderInput, LeaderState]]] = _table(
    {
        _L.RUNNING: {
            _L.RUNNING: (_LI.TURN, _LI.SUBMIT_STOP, _LI.SAME, _LI.RESEND, _LI.PROPOSED, _LI.LEFT),
            _L.STOPPED: (_LI.STOP_TURN,),
            _L.DIVERGED: (_LI.DIFFERS, _LI.EXPLAINED),
            _L.AGREEING: (_LI.PROPOSE,),
            _L.ENDED: (_LI.CONTRADICTS, _LI.LOST, _LI.LATE, _LI.END, _LI.LEAVE),
        },
        _L.AGREEING: {
            _L.AGREEING: (_LI.SUBMIT_STOP, _LI.SAME, _LI.RESEND, _LI.PROPOSED),
            _L.DIVERGED: (_LI.DIFFERS, _LI.EXPLAINED),
            _L.RUNNING: (_LI.AGREED,),
            _L.ENDED: (_LI.CONTRADICTS, _LI.LOST, _LI.LATE, _LI.END, _LI.LEAVE),
        },
        _L.DIVERGED: {
            _L.DIVERGED: _SENT,  # LOST: the diverging rank may have given up already; the verdict still comes
            _L.ENDED: (_LI.RESOLVED, _LI.LEAVE),
        },
        _L.STOPPED: {
            _L.STOPPED: (_LI.SAME, _LI.RESEND, _LI.PROPOSED, _LI.LEFT, _LI.LEAVE),
            _L.DIVERGED: (_LI.DIFFERS, _LI.EXPLAINED),
            _L.FINISHING: (_LI.PROPOSE,),
            _L.ENDED: (_LI.CONTRADICTS, _LI.LOST, _LI.LATE, _LI.END),
        },
        _L.FINISHING: {
            _L.FINISHING: (_LI.SAME, _LI.RESEND, _LI.PROPOSED),
            _L.DIVERGED: (_LI.DIFFERS, _LI.EXPLAINED),
            _L.STOPPED: (_LI.AGREED,),
            _L.ENDED: (_LI.CONTRADICTS, _LI.LOST, _LI.LATE, _LI.END, _LI.LEAVE),
        },
        _L.ENDED: {_L.ENDED: (*_SENT, _LI.LATE, _LI.LEAVE)},
    }
)


class FollowerState(StrEnum):
    PLANNING = "planning"  # between turns
    WAITING = "waiting"  # in a turn whose record is not here
    AGREEING = "agreeing"  # in a turn whose maximum is not here
    DIVERGED = "diverged"  # our digest differs; waiting for the leader's verdict
    STOPPED = "stopped"
    FINISHING = "finishing"  # agreeing, in the last turn
    ENDED = "ended"


class FollowerInput(StrEnum):
    TURN = "turn"  # the engine begins a turn
    RECORD = "record"  # one arrived
    ALIVE = "alive"  # the leader is alive and has nothing to run
    EFFECT = "effect"  # the turn's record is here: its events take effect
    STOP_EFFECT = "stop effect"  # ... and it is the last
    DIFFERS = "differs"  # the record's digest is not ours
    PROPOSE = "propose"  # this rank has its numbers
    AGREED = "agreed"  # the maximum of all ranks' is here
    EXPLAIN = "explain"  # the leader asks for our decisions
    VERDICT = "verdict"  # the leader ends the job
    LOST = "lost"  # the leader's connection closed
    LATE = "late"  # the leader's deadline passed
    LEAVE = "leave"  # this rank ends


_F, _FI = FollowerState, FollowerInput
FOLLOWER_TABLE: Final[Mapping[FollowerState, Mapping[FollowerInput, FollowerState]]] = _table(
    {
        _F.PLANNING: {
            _F.PLANNING: (_FI.RECORD, _FI.ALIVE),
            _F.WAITING: (_FI.TURN,),
            _F.AGREEING: (_FI.PROPOSE,),
            _F.DIVERGED: (_FI.EXPLAIN,),
            _F.ENDED: (_FI.VERDICT, _FI.LOST, _FI.LEAVE),
        },
        _F.WAITING: {
            _F.WAITING: (_FI.RECORD, _FI.ALIVE),
            _F.PLANNING: (_FI.EFFECT,),
            _F.STOPPED: (_FI.STOP_EFFECT,),
            _F.DIVERGED: (_FI.DIFFERS, _FI.EXPLAIN),
            _F.ENDED: (_FI.VERDICT, _FI.LOST, _FI.LATE, _FI.LEAVE),
        },
        _F.AGREEING: {
            _F.AGREEING: (_FI.RECORD, _FI.ALIVE),
            _F.PLANNING: (_FI.AGREED,),
            _F.DIVERGED: (_FI.EXPLAIN,),
            _F.ENDED: (_FI.VERDICT, _FI.LOST, _FI.LATE, _FI.LEAVE),
        },
        _F.DIVERGED: {
            _F.DIVERGED: (_FI.RECORD, _FI.ALIVE, _FI.EXPLAIN),
            _F.ENDED: (_FI.VERDICT, _FI.LOST, _FI.LATE, _FI.LEAVE),
        },
        _F.STOPPED: {
            _F.STOPPED: (_FI.RECORD, _FI.ALIVE, _FI.EXPLAIN, _FI.LOST, _FI.LEAVE),
            _F.FINISHING: (_FI.PROPOSE,),
            _F.ENDED: (_FI.VERDICT,),
        },
        _F.FINISHING: {
            _F.FINISHING: (_FI.RECORD, _FI.ALIVE),
            _F.STOPPED: (_FI.AGREED,),
            _F.DIVERGED: (_FI.EXPLAIN,),
            _F.ENDED: (_FI.VERDICT, _FI.LOST, _FI.LATE, _FI.LEAVE),
        },
        _F.ENDED: {
            _F.ENDED: (_FI.RECORD, _FI.ALIVE, _FI.EXPLAIN, _FI.VERDICT, _FI.LOST, _FI.LEAVE),
        },
    }
)


def following(table: Mapping[_State, Mapping[_Input, _State]], state: _State, given: _Input) -> _State:
    """The state after ``given``; raises IllegalInput, naming both and what would have been legal."""
    after = table[state].get(given)
    if after is None:
        legal = ", ".join(table[state])
        raise IllegalInput(
            f"{type(state).__name__} {state.value!r} does not take input {given.value!r}; it takes: {legal}"
        )
    return after
