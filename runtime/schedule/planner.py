"""The planner: which rows make the next step.

Knows: kinds of steps, decode rows and their widths. Does not know: which prompts get chunks (prefill.py), what a plan
reports to the device (plan_draft.py), how requests get and return what they hold (ledger.py), events, results.

Policy, in one place:
  * With mixed steps (``config.mixed``) every step has all decode rows. Prefill chunks join them, up to the token budget
    of the step (budget.py), and fill its bucket while enough prompt tokens wait; shares.py says whose. Without decode
    rows a prefill step takes ``max_prefill_tokens``. Scored prompts run without graphs, in separate prefill steps with
    the budget of the mixed step that they replace; a step of the decode rows comes between two of them.
    Groups that share experts have their few chunks in the same steps (``MixedSteps.stride``). A step is as long as the
    longest of theirs, so the budget is the smallest of all groups (``room``).
  * Without, a step is a prefill step or a decode step. While rows are decoding, at most ``prefill_burst`` prefill steps
    run in a row, so that neither side starves.
  * Admission is in order of (priority, arrival) and stops at the first that does not fit. It never takes a block from
    a running request, and waits while any request is stalled. With mixed steps a request that would get no tokens of
    the step is not admitted: a long prompt waits for the one before it, and shorter prompts, or those of the other kind
    (scored or not), pass it. No request passes one that is due, unless both fit.
  * The last chunk of a prompt forks the other answers to it, as many as there are rows, slots and blocks for. Rows are
    kept for them from the prompt's admission on, unless it is a long one. Answers left out queue again.
  * A row that needs a block when none is free waits for blocks that are fenced or whose owner is draining; only when
    those could not be enough does a parked session give up its blocks, or else the last in line (recompute).
  * A resumed session (sessions.py) is stalled until there is a row and room, so it comes before the queue.
  * A request with a grammar is a row of a step only if all its tokens have landed, since they decide which token may be
    next: of every (D+1)-th step. Other requests run in all of them.
"""

from __future__ import annotations

from runtime.schedule import prefill, reservation
from runtime.schedule.budget import NO_BOUND, TokenBudget
from runtime.schedule.config import MixedSteps
from runtime.schedule.ledger import Ledger
from runtime.schedule.plan import StepKind, StepPlan
from runtime.schedule.plan_draft import PlanDraft
from runtime.schedule.prefill import Cut, Prefill
from runtime.schedule.sequence import SequenceState
from runtime.schedule.speculation import SpeculationPolicy
from runtime.schedule.states import State, Trigger

NEVER = -2  # no step's number, nor that of the one before a step

# A plan and the sequences of its rows.
Planned = tuple[StepPlan, tuple[SequenceState, ...]]


class Planner:
    """Makes plans out of ``ledger``. It launches nothing: the caller puts the plan into the chain."""

    def __init__(self, ledger: Ledger) -> None:
        config = ledger.config
        self.config, self.limits = config, config.limits
        self.ledger = ledger
        self._waiting = ledger.by_state[State.WAITING]
        self._decoding = ledger.by_state[State.DECODE]
        self._stalled = ledger.by_state[State.STALLED]
        self._burst = 0  # prefill steps in a row
        self._mixed = config.mixed
        self._budget = TokenBudget(config.mixed or MixedSteps(), config.limits.max_prefill_tokens)
        self._draft = PlanDraft(ledger)
        self.prefill = Prefill(ledger, self._draft, self._budget)
        self.room = NO_BOUND  # tokens that the next step may have because of decode rows of any group
        self._scored_step = NEVER  # the latest step with chunks, if decode rows waited for its scored prompts
        self._rows: tuple[SequenceState, ...] = ()  # of the latest decode step; their slots and epochs
        self._row_slots: tuple[int, ...] = ()
        self._row_epochs: tuple[int, ...] = ()
        self._rows_version = -1  # the decode_version that they were collected at
        self._decode_steps = 0
        self._last_width = 1  # of the latest decode step
        self.speculation = (
            None if config.speculation is None else SpeculationPolicy(config.speculation, config.limits.tree)
        )

    def plan(self) -> Planned | None:
        """The next step, or None if nothing can run."""
        self._draft.paused_now = 0
        if self._stalled:
            self.prefill.admit_extended()
        planned = self._in_turns() if self._mixed is None else self._together(self._mixed)
        if planned is None and self.ledger.wanted_copies():
            planned = self._draft.finish(StepKind.DECODE, (), (), width=1), ()
        if planned is not None and self.ledger.constrained:
            planned = self._draft.constrain(*planned), planned[1]
        return planned

    def _in_turns(self) -> Planned | None:
        planned = None
        if self._burst < self.config.prefill_burst or not self._decoding:
            planned = self._prefill_step(self.prefill.cut(self.limits.max_prefill_tokens))
            self._burst += 1
        if planned is None:
            planned = self._decode_step() if self._ready_rows() else None
            self._burst = 0
        if planned is None:  # the last rows just drained: their successors need not wait for the next step
            planned = self._prefill_step(self.prefill.cut(self.limits.max_prefill_tokens))
        return planned

    def _together(self, mixed: MixedSteps) -> Planned | None:
        """All decode rows, and chunks. Rows of a prompt's last chunk decode from the next step on."""
        rows_decode = self._ready_rows()
        prompts_wait = self.prefill.prefilling or (self._waiting and self.prefill.row_free)
        if not rows_decode:
            most = self._budget.prefill_tokens(self.room)
            return self._prefill_step(self.prefill.cut_shares(most, scored=None)) if prompts_wait else None
        if not prompts_wait:
            return self._decode_step()
        kv_tokens = sum([sequence.planned_tokens for sequence in self._rows])
        policy, rows = self.speculation, len(self._rows)
        room, fits = self._budget.step_room(rows, kv_tokens), self._budget.most_windows
        stride = self._stride(mixed, room - rows)
        step, scored_step = self.ledger.chain.step, self._scored_step
        if step % stride:
            return self._decode_step()
        width = self._width() if policy is None else policy.mixed_width(rows, room, fits)
        row_tokens = self.limits.row_tokens(width)
        waiting = self.prefill.waiting_tokens(mixed.long_prompt)
        tokens = self._budget.chunk_tokens(rows, kv_tokens, row_tokens, waiting, stride, self.room)
        rows_waited = scored_step == step - 1
        others_turn = stride > 1 and scored_step != NEVER  # there may have been steps without chunks since
        if not (rows_waited or others_turn) and (planned := self._scored_prompts(tokens)) is not None:
            return planned
        cut = self.prefill.cut_shares(tokens, scored=False, row_tokens=rows * row_tokens)
        self._scored_step = NEVER
        if others_turn and not (cut[1] or rows_waited):
            planned = self._scored_prompts(tokens)
            return self._decode_step() if planned is None else planned
        if policy is not None and cut[1]:
            policy.mixed(rows, room, fits)
        return self._mixed_step(width, cut)

    def _stride(self, mixed: MixedSteps, room: int) -> int:
        """Chunks come in every n-th step; returns n. ``room``: most prompt tokens that one step may take."""
        if mixed.stride == 1 or self.prefill.waiting_tokens(self.limits.max_model_len) > room:
            return 1
        return mixed.stride

    def _scored_prompts(self, tokens: int) -> Planned | None:
        """A step with chunks of scored prompts only; decode rows wait."""
        planned = self._prefill_step(self.prefill.cut_shares(tokens, scored=True))
        if planned is not None:
            self._scored_step = self.ledger.chain.step
        return planned

    @property
    def room_for_rows(self) -> int:
        """Tokens that a step may have because of the current decode rows; NO_BOUND without any.

        Ask after a plan: rows whose last chunk it has are among them.
        """
        rows = self._decoding.values()
        if self._mixed is None or not rows:
            return NO_BOUND
        return self._budget.step_room(len(rows), sum([sequence.planned_tokens for sequence in rows]))

    def why_void(self) -> str:
        """Why nothing could run. ``start``: all work there is has been planned, so the next step starts a new chain."""
        by_state = self.ledger.by_state
        if self._stalled or (self.ledger.windows and self.prefill.prefilling):
            return "no_blocks"
        if by_state[State.WAITING] or by_state[State.EVICTING]:
            return "context_full"
        if self._decoding:
            return "grammar"
        return "paused" if by_state[State.PAUSED] else "start"

    def _prefill_step(self, cut: Cut) -> Planned | None:
        if not cut[1]:
            return None
        rows = self._draft.with_forked(cut[0])
        return self._draft.finish(StepKind.PREFILL, (), (), prefill.PREFILL_WIDTH, cut[1], rows), tuple(rows)

    # ---- decode ----

    def _width(self) -> int:
        """W of the decode step being planned: a function of agreed events and landed results, as all plans are, and
        never above ``limits.width``, which blocks are reserved for. Call once per decode step.
        """
        if self.speculation is not None:
            return self.speculation.width(len(self._rows))
        widths = self.config.widths
        return widths[self._decode_steps % len(widths)]

    def _ready_rows(self) -> bool:
        """Update the decode rows: which join, which drain, which get blocks. False: there are none."""
        ledger, decoding = self.ledger, self._decoding
        for sequence in sorted(self._stalled.values(), key=lambda stalled: stalled.room_order):
            session = sequence.session
            if sequence.state is not State.STALLED or (session is not None and session.extends):
                continue  # evicted for one before it; or it is to prefill
            if not self.prefill.row_free or not reservation.reserve(ledger, sequence):
                break
            ledger.move(sequence, Trigger.GOT_ROOM)
            if session is not None and session.revive:
                session.revive = False
                ledger.update_slot(sequence, revive=True)
        if ledger.asleep_for <= 0:
            self._wake_due_rows()
        if decoding and (self._rows_version != ledger.decode_version or ledger.constrained):
            self._collect_rows()
        return bool(decoding and self._rows)

    def _decode_step(self) -> Planned:
        """A decode step of the rows that ``_ready_rows`` collected."""
        width = self._width()
        self._advance_rows(width)
        return self._row_plan(width), self._rows

    def _row_plan(self, width: int) -> StepPlan:
        """The plan of a step without prompts."""
        ledger, slots = self.ledger, self._row_slots
        if ledger.block_writes or ledger.slot_updates or ledger.copies:
            return self._draft.finish(StepKind.DECODE, slots, self._row_epochs, width)
        step = ledger.chain.step  # in most steps: all else that a plan carries comes with chunks
        ledger.digest.fold(step, StepKind.DECODE.name, (len(slots),))
        tree = self.limits.tree if width > 1 else 0
        return StepPlan(step, StepKind.DECODE, slots, self._row_epochs, width, tree=tree)

    def _mixed_step(self, width: int, cut: Cut) -> Planned:
        """The rows that ``_ready_rows`` collected, then ``cut``; a decode step if nothing was cut."""
        chunk_rows, chunks = cut
        if not chunks:
            return self._decode_step()
        self._advance_rows(width)
        rows = self._draft.with_forked(chunk_rows)
        plan = self._draft.finish(StepKind.MIXED, self._row_slots, self._row_epochs, width, chunks, rows)
        tokens = plan.packed_tokens
        self.ledger.counters.mixed_padded_tokens += self._budget.bucket(tokens) - tokens
        return plan, (*self._rows, *rows)

    def _advance_rows(self, width: int) -> None:
        ledger, step = self.ledger, self.ledger.chain.step
        ledger.asleep_for -= width
        if width == 1:
            for sequence in self._rows:
                sequence.planned_tokens += 1
                sequence.last_step = step
        else:
            for sequence in self._rows:
                sequence.planned_tokens += width
                sequence.uncertain_tokens += width - 1
                sequence.last_step = step
        if width != self._last_width:
            self._last_width = width
            ledger.digest.fold(step, "width", (width,))
        self._decode_steps += 1

    def _wake_due_rows(self) -> None:
        ledger, decoding = self.ledger, self._decoding
        waking = [s for s in decoding.values() if s.planned_tokens >= s.wake_at]
        for sequence in waking:
            if sequence.state is State.DECODE:  # it may just have been evicted
                self._wake(sequence)
        if waking:
            reservation.reserve_ahead(ledger, decoding.values())
        elif decoding:
            ledger.asleep_for = min([s.wake_at - s.planned_tokens for s in decoding.values()])

    def _wake(self, sequence: SequenceState) -> None:
        """A row at the end of its blocks or near its last token: drain it, grow it, or stall it."""
        if sequence.planned_tokens - sequence.uncertain_tokens >= sequence.max_length:
            self.ledger.move(sequence, Trigger.ALL_PLANNED)
        elif not reservation.reserve(self.ledger, sequence) and sequence.state is State.DECODE:
            self.ledger.counters.stalls += 1
            self.ledger.move(sequence, Trigger.OUT_OF_BLOCKS)

    def _collect_rows(self) -> None:
        """The tuples keep their identity until membership changes, which staging checks (StepPlan.slots)."""
        ledger = self.ledger
        rows = tuple(self._decoding.values())
        if ledger.constrained:
            landed_after = ledger.chain.landed_after
            rows = tuple([row for row in rows if not row.constrained or landed_after(row.last_step)])
            ledger.counters.grammar_waits += len(self._decoding) - len(rows)
            if rows == self._rows and self._rows_version == ledger.decode_version:
                return
        self._rows = rows
        self._row_slots = tuple([sequence.slot for sequence in self._rows])
        self._row_epochs = tuple([sequence.epoch for sequence in self._rows])
        self._rows_version = ledger.decode_version
        ledger.digest.fold(ledger.chain.step, "rows", self._row_slots + self._row_epochs)
