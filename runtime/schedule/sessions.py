"""Sessions: requests that pause after a token quota and resume, or get another user turn, on command.

Knows: turns, quotas and budgets; what Continue, Extend and Branch change; how a session comes to be parked.
Does not know: rows of steps (planner.py), how slots and blocks change hands (ledger.py), callers, text.

    Admit(quantum) -> ... -> its quota ended, by length or by a stop id       the device has masked the row
                             the last step with a row of it has landed        PARKED: slot, blocks, device state stay
    Continue       -> STALLED -> DECODE   a SlotUpdate moves the end and revives the slot; no token is computed again
    Extend         -> STALLED -> PREFILL  computes the new tokens and the newest one before, which has no KV yet
    evicted        -> PARKED without slot; Continue and Extend then queue, and compute what the prefix index has not

The end of a quota is a length that the device checks, like the end of a request. While no step in flight can have
reached it, it is moved as the row runs: the chain does not break and the row loses nothing. Otherwise the row ends
first and then resumes. So a session that is continued early enough never waits.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

from runtime.schedule import prefix, reservation, session_rules
from runtime.schedule.fence import Fence
from runtime.schedule.ledger import Ledger
from runtime.schedule.plan import Branch, Continue, Extend, Parked, Refused
from runtime.schedule.request import FinishReason
from runtime.schedule.sequence import SequenceState, Session
from runtime.schedule.states import State, Trigger

_PLANNED_FURTHER = (State.PREFILL, State.DECODE, State.STALLED)
_OVER_BY = {FinishReason.NONE: "its quantum", FinishReason.STOP: "a stop", FinishReason.LENGTH: "its budget"}


class Sessions:
    """Applies events and landed results to sessions; ``ledger`` holds them and their ``news``."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._parking: Fence[SequenceState] = Fence(ledger.fenced)
        self._count = 0  # times that a session was parked or resumed

    # ---- events ----

    def submit(self, event: Continue | Extend | Branch) -> None:
        """Apply it, or note why it was refused."""
        ledger = self._ledger
        about = event.parent if isinstance(event, Branch) else event.request_id
        sequence = ledger.sequences.get(about)
        why = self._refusal(event, sequence)
        ledger.digest.fold(ledger.chain.step, type(event).__name__, (event.request_id, about, why is None))
        if why is not None or sequence is None or sequence.session is None:
            ledger.counters.session_refusals += 1
            ledger.news.append(Refused(event.request_id, type(event).__name__, why or ""))
        elif isinstance(event, Continue):
            self._continue(sequence, sequence.session, event.tokens)
        elif isinstance(event, Extend):
            self._extend(sequence, sequence.session, event)
        else:
            self._branch(sequence, sequence.session, event)

    def _refusal(self, event: Continue | Extend | Branch, sequence: SequenceState | None) -> str | None:
        """Why ``event`` cannot be; None where it can."""
        if sequence is None:
            return "there is no such session: it has ended, or never was"
        session = sequence.session
        if session is None:
            return "the request is no session"
        if isinstance(event, Branch):
            return self._branch_refusal(event, sequence, session)
        if event.epoch != session.epoch:
            return f"stale: it was meant for epoch {event.epoch}, the session is in epoch {session.epoch}"
        if event.tokens < 1:
            return f"a quantum of {event.tokens} tokens: at least 1"
        if isinstance(event, Extend):
            return self._extend_refusal(event, sequence)
        if session.over not in (None, FinishReason.NONE):
            return f"its answer is complete, by {_OVER_BY[session.over]}: extend or close it"
        if session.wanted_length >= session.budget_length:
            return "all of its budget was asked for"
        return None

    def _extend_refusal(self, event: Extend, sequence: SequenceState) -> str | None:
        ledger = self._ledger
        if sequence.state is not State.PARKED:
            return f"it is {sequence.state.value}: only a parked session can be extended"
        known, new, most = sequence.landed_tokens, len(event.token_ids), ledger.limits.max_model_len
        if not new or event.max_tokens < 1:
            return "needs at least one token and max_tokens >= 1"
        if known + new >= most:
            return f"it has {known} tokens and would get {new} more, max_model_len is {most}"
        return session_rules.refusal(ledger, min(known + new + event.max_tokens, most), sequence)

    def _branch_refusal(self, event: Branch, parent: SequenceState, session: Session) -> str | None:
        if parent.state is not State.PARKED:
            return f"it is {parent.state.value}: only a parked session can be forked"
        if event.request_id in self._ledger.sequences:
            return f"request id {event.request_id} is in use"
        return session_rules.refusal(self._ledger, session.budget_length)

    def _continue(self, sequence: SequenceState, session: Session, tokens: int) -> None:
        ledger = self._ledger
        ledger.counters.session_continues += 1
        session.wanted_length = min(session.wanted_length + tokens, session.budget_length)
        if sequence.state is State.PARKED:
            self._go_on(sequence, session)
        elif sequence.state is State.WAITING or (sequence.state is State.PREFILL and not sequence.prefill_begun):
            sequence.max_length = session.wanted_length  # its slot write will say so
        elif sequence.state in _PLANNED_FURTHER and (session.revive or sequence.planned_tokens < sequence.max_length):
            sequence.max_length = session.wanted_length
            if not (session.revive or session.extends):
                ledger.update_slot(sequence, revive=False)
            if sequence.state is State.DECODE:
                reservation.set_wake(ledger, sequence)

    def _go_on(self, sequence: SequenceState, session: Session) -> None:
        """From PARKED: a row again as soon as there is room."""
        self._count += 1
        session.over, session.parked_at, session.since = None, 0, self._count
        sequence.max_length = session.wanted_length
        if sequence.slot:
            session.revive = not session.extends
            self._ledger.move(sequence, Trigger.CONTINUE)
        else:
            self._ledger.move(sequence, Trigger.CONTINUE_WAITING)
            self._ledger.queue.push(sequence)

    def _extend(self, sequence: SequenceState, session: Session, event: Extend) -> None:
        """All known tokens become prompt. Blocks are trusted again once a further token has landed."""
        ledger = self._ledger
        ledger.counters.session_extends += 1
        known = sequence.landed_tokens
        sequence.tokens.extend(event.token_ids)
        sampling, most = sequence.request.sampling, event.max_tokens
        least = min(session.min_tokens, most)
        sampling = replace(sampling, max_tokens=most, min_tokens=least, prompt_logprobs=None)
        sequence.request = replace(sequence.request, prompt_token_ids=array("i", sequence.tokens), sampling=sampling)
        length = sequence.planned_tokens = sequence.score_at = sequence.landed_tokens
        session.epoch += 1
        session.budget_length = min(length + event.max_tokens, ledger.limits.max_model_len)
        session.wanted_length = min(length + event.tokens, session.budget_length)
        sequence.trusted = sequence.borrowed = False
        sequence.publish_at = 0
        if sequence.slot:
            session.extends, sequence.prefilled = True, known - 1
        self._go_on(sequence, session)

    def _branch(self, parent: SequenceState, session: Session, event: Branch) -> None:
        """Copy what the parent holds; if that is impossible the child holds nothing, and shares the parent's blocks
        through the prefix index when it resumes."""
        ledger = self._ledger
        ledger.counters.session_forks += 1
        child = session_rules.copy_of(ledger, parent, event.request_id)
        if event.scored and child.request.sampling.logprobs is None:
            child.request = replace(child.request, sampling=replace(child.request.sampling, logprobs=0))
        child.session = replace(session, epoch=1, revive=False)
        ledger.sessions[event.request_id] = child
        self._park(child, child.session)
        if not session_rules.admit_copy(ledger, parent, child):
            ledger.counters.session_forks_without_copy += 1

    # ---- landing ----

    def over(self, sequence: SequenceState, session: Session, reason: FinishReason) -> None:
        """The device has ended its quota. It is parked once none of its steps is in flight."""
        ledger = self._ledger
        prefix.gained(ledger, sequence)
        spent = sequence.landed_tokens >= session.budget_length
        session.over = FinishReason.NONE if reason is FinishReason.LENGTH and not spent else reason
        if sequence.state is State.EVICTING:  # it is parked when its fence opens
            return
        if sequence.state is not State.DRAINING:
            ledger.move(sequence, Trigger.QUANTUM_OVER)
        if ledger.chain.landed_after(sequence.last_step):
            self._park(sequence, session)
        else:
            self._parking.hold(sequence.last_step, sequence)

    def landed(self, step: int) -> None:
        """``step`` has landed, and the ledger has opened its fences."""
        for sequence in self._parking.landed(step):
            if sequence.state is State.DRAINING and sequence.session is not None:
                self._park(sequence, sequence.session)
        evicted, self._ledger.evicted_sessions = self._ledger.evicted_sessions, []
        for sequence in evicted:
            if sequence.state is State.PARKED and sequence.session is not None:
                self._park(sequence, sequence.session)

    def _park(self, sequence: SequenceState, session: Session) -> None:
        ledger = self._ledger
        self._count += 1
        session.parked_at = self._count
        if sequence.state is not State.PARKED:
            ledger.move(sequence, Trigger.PARK)
        if session.over is FinishReason.NONE and session.wanted_length > sequence.max_length:
            self._go_on(sequence, session)
            return
        ledger.counters.session_parks += 1
        answered = sequence.landed_tokens - len(sequence.request.prompt_token_ids)
        id_, over = sequence.request.request_id, session.over or FinishReason.NONE
        ledger.digest.fold(ledger.chain.step, "park", (id_, int(over), answered))
        ledger.news.append(Parked(id_, session.epoch, over, answered))
