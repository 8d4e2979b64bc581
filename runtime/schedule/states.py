"""A request's states and what moves it from one to the next.

Knows: the transition table. Does not know: what a request holds in a state (sequence.py), or when a trigger comes
(ledger.py, planner.py). An illegal (state, trigger) raises IllegalTransition, which names both, and changes nothing.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    WAITING = "waiting"  # in the queue; holds nothing
    JOINING = "joining"  # another answer is computing the same prompt; it forks at its end; holds nothing
    PREFILL = "prefill"  # holds a slot and blocks; part of its prompt is still to be planned
    DECODE = "decode"  # a row of every decode step
    STALLED = "stalled"  # would be a row, but no block (or no row) is free yet; holds what it has
    DRAINING = "draining"  # the steps in flight are enough to end it by length; waits for them to land
    PAUSED = "paused"  # a caller asked; holds what it has
    PARKED = "parked"  # of a session: its token quota has landed; holds what it has until memory is short
    EVICTING = "evicting"  # gave up slot and blocks; waits for its fence
    ENDED = "ended"  # finished, cancelled or rejected

    __hash__ = object.__hash__  # Enum's own is Python code, and a dozen look-ups a request are by state


class Trigger(Enum):
    ADMIT = "admit"
    JOIN = "prompt is begun"
    FORK = "fork"
    LEFT_OUT = "left out"
    PROMPT_PLANNED = "prompt planned"
    OUT_OF_BLOCKS = "out of blocks"
    GOT_ROOM = "got room"
    ALL_PLANNED = "all planned"
    FELL_SHORT = "fell short"
    PAUSE = "pause"
    RESUME_WAITING = "resume, holding nothing"
    RESUME = "resume"
    QUANTUM_OVER = "quantum over"
    PARK = "park"
    CONTINUE_WAITING = "continue, holding nothing"
    CONTINUE = "continue"
    GOT_ROOM_TO_EXTEND = "got room to extend"
    EVICT = "evict"
    FENCE_LANDED = "fence landed"
    END = "end"


TRANSITIONS: dict[State, dict[Trigger, State]] = {
    State.WAITING: {
        Trigger.ADMIT: State.PREFILL,
        Trigger.JOIN: State.JOINING,
        Trigger.PAUSE: State.PAUSED,
        Trigger.PARK: State.PARKED,  # it was evicted, or is a fork that holds nothing yet
        Trigger.END: State.ENDED,
    },
    State.JOINING: {
        Trigger.FORK: State.DECODE,
        Trigger.LEFT_OUT: State.WAITING,
        Trigger.PAUSE: State.PAUSED,
        Trigger.END: State.ENDED,
    },
    State.PREFILL: {  # a pause waits until the prompt is planned
        Trigger.PROMPT_PLANNED: State.DECODE,
        Trigger.EVICT: State.EVICTING,
        Trigger.END: State.ENDED,
    },
    State.DECODE: {
        Trigger.OUT_OF_BLOCKS: State.STALLED,
        Trigger.ALL_PLANNED: State.DRAINING,
        Trigger.QUANTUM_OVER: State.DRAINING,  # a stop id, with ghost rows still in flight
        Trigger.PAUSE: State.PAUSED,
        Trigger.EVICT: State.EVICTING,
        Trigger.END: State.ENDED,
    },
    State.STALLED: {
        Trigger.GOT_ROOM: State.DECODE,
        Trigger.GOT_ROOM_TO_EXTEND: State.PREFILL,
        Trigger.QUANTUM_OVER: State.DRAINING,
        Trigger.PAUSE: State.PAUSED,
        Trigger.EVICT: State.EVICTING,
        Trigger.END: State.ENDED,
    },
    State.DRAINING: {  # a step that gave a live row no token leaves it short of its end
        Trigger.FELL_SHORT: State.STALLED,
        Trigger.PARK: State.PARKED,
        Trigger.EVICT: State.EVICTING,  # not for its memory: it was computed over blocks that broke
        Trigger.END: State.ENDED,
    },
    State.PAUSED: {
        Trigger.RESUME_WAITING: State.WAITING,
        Trigger.RESUME: State.STALLED,
        Trigger.EVICT: State.EVICTING,
        Trigger.END: State.ENDED,
    },
    State.PARKED: {
        Trigger.CONTINUE_WAITING: State.WAITING,
        Trigger.CONTINUE: State.STALLED,
        Trigger.EVICT: State.EVICTING,
        Trigger.END: State.ENDED,
    },
    State.EVICTING: {Trigger.FENCE_LANDED: State.WAITING, Trigger.END: State.ENDED},
    State.ENDED: {},
}


class IllegalTransition(RuntimeError):
    """A trigger that the table does not have for this state; the sequence is unchanged."""
