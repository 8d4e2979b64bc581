"""The planner: which rows make the next step.

Knows: admission, prefill chunks, decode rows, widths of steps, and what the plan must report to the device.
Does not know: events, results, or how requests get and return what they hold (resources.py).

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
    (scored or not), pass it. No request passes one that is due and does not fit.
  * The last chunk of a prompt forks the other answers to it, as many as there are rows, slots and blocks for. Rows are
    kept for them from the prompt's admission on, unless it is a long one. Answers left out queue again.
  * A row that needs a block when none is free waits for blocks that are fenced or whose owner is draining; only when
    those could not be enough does a parked session give up its blocks, or else the last in line (recompute).
  * A resumed session (sessions.py) is stalled until there is a row and room, so it comes before the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from runtime.schedule.budget import NO_BOUND, TokenBudget
from runtime.schedule.config import MixedSteps, SchedulerConfig
from runtime.schedule.plan import Chunk, Fork, SlotWrite, StepKind, StepPlan
from runtime.schedule.resources import Resources
from runtime.schedule.sequence import SequenceState
from runtime.schedule.shares import cost, gets_a_share, in_one_step, remaining, share_out, whole_waves
from runtime.schedule.speculation import SpeculationPolicy
from runtime.schedule.states import State, Trigger

NEVER = -2  # no step's number, nor that of the one before a step
PREFILL_WIDTH = 1  # the last chunk of a prompt yields one token
MOST_TOLD_BLOCKS = 4096  # of prompts admitted in one step, or a little more: their tables cost the host some ms
NOBODY = (-1, -1)
_GROWING = (State.PREFILL, State.DECODE, State.STALLED, State.DRAINING)

# A plan and the sequences of its rows.
Planned = tuple[StepPlan, tuple[SequenceState, ...]]

# Chunks, and the sequences they are of.
Cut = tuple[list[SequenceState], list[Chunk]]


class Planner:
    """Makes plans out of ``resources``. It launches nothing: the caller puts the plan into the chain."""

    def __init__(self, config: SchedulerConfig, resources: Resources) -> None:
        self.config, self.limits = config, config.limits
        self.resources = resources
        self._prefilling = resources.by_state[State.PREFILL]
        self._decoding = resources.by_state[State.DECODE]
        self._stalled = resources.by_state[State.STALLED]
        self._burst = 0  # prefill steps in a row
        self._mixed = config.mixed
        self._budget = TokenBudget(config.mixed or MixedSteps(), config.limits.max_prefill_tokens)
        self.room = NO_BOUND  # tokens that the next step may have because of decode rows of any group
        self._scored_step = NEVER  # the latest step with chunks, if decode rows waited for its scored prompts
        self._refused = NOBODY  # (request, room_version) of the last admission that did not fit
        self._fits_from = (*NOBODY, 0)  # (request, idled, what it may fit from on) of the same one (_room_at_most)
        self._slot_writes: list[SlotWrite] = []
        self._restored: list[tuple[int, int]] = []  # of the plan that is being made, as those that follow
        self._saved: list[tuple[int, int]] = []
        self._forks: list[Fork] = []  # of the plan that is being made, and the sequences that they are of
        self._forked: list[SequenceState] = []
        self._paused_now = 0  # rows of the plan that is being made whose requests are paused already
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
        """The next step, or None where nothing can run."""
        self._paused_now = 0
        if self._stalled:
            self._seat_extended()
        planned = self._in_turns() if self._mixed is None else self._together(self._mixed)
        if planned is None and self.resources.copies_wait:
            planned = self._step_plan(StepKind.DECODE, (), (), width=1), ()
        return planned

    def _in_turns(self) -> Planned | None:
        planned = None
        if self._burst < self.config.prefill_burst or not self._decoding:
            planned = self._prefill()
            self._burst += 1
        if planned is None:
            planned = self._decode()
            self._burst = 0
        if planned is None:  # the last rows just drained: their successors need not wait for the next step
            planned = self._prefill()
        return planned

    def _together(self, mixed: MixedSteps) -> Planned | None:
        """All decode rows, and chunks. Rows of a prompt's last chunk decode from the next step on."""
        rows_decode = self._ready_rows()
        prompts_wait = self._prefilling or (self.resources.waiting and self._row_free)
        if not rows_decode:
            most = self._budget.prefill_tokens(self.room)
            return self._prefill_step(self._cut_shares(most, scored=None)) if prompts_wait else None
        if not prompts_wait:
            return self._decode_step()
        kv_tokens = sum([sequence.planned_tokens for sequence in self._rows])
        policy, rows = self.speculation, len(self._rows)
        room, fits = self._budget.step_room(rows, kv_tokens), self._budget.most_windows
        stride = self._stride(mixed, room - rows)
        step, scored_step = self.resources.chain.step, self._scored_step
        if step % stride:
            return self._decode_step()
        width = self._width() if policy is None else policy.mixed_width(rows, room, fits)
        row_tokens = self.limits.row_tokens(width)
        waiting = self._waiting_tokens(mixed.long_prompt)
        tokens = self._budget.chunk_tokens(rows, kv_tokens, row_tokens, waiting, stride, self.room)
        rows_waited = scored_step == step - 1
        others_turn = stride > 1 and scored_step != NEVER  # there may have been steps without chunks since
        if not (rows_waited or others_turn) and (planned := self._scored_prompts(tokens)) is not None:
            return planned
        cut = self._cut_shares(tokens, scored=False, beside=rows * row_tokens)
        self._scored_step = NEVER
        if others_turn and not (cut[1] or rows_waited):
            planned = self._scored_prompts(tokens)
            return self._decode_step() if planned is None else planned
        if policy is not None and cut[1]:
            policy.mixed(rows, room, fits)
        return self._mixed_step(width, cut)

    def _stride(self, mixed: MixedSteps, room: int) -> int:
        """One of so many steps has chunks; ``room``: tokens that a step may take of all that wait."""
        if mixed.stride == 1 or self._waiting_tokens(self.limits.max_model_len) > room:
            return 1
        return mixed.stride

    def _scored_prompts(self, tokens: int) -> Planned | None:
        """A step with chunks of scored prompts only; decode rows wait."""
        planned = self._prefill_step(self._cut_shares(tokens, scored=True))
        if planned is not None:
            self._scored_step = self.resources.chain.step
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
        by_state = self.resources.by_state
        if self._stalled:
            return "no_blocks"
        if by_state[State.WAITING] or by_state[State.EVICTING]:
            return "context_full"
        return "paused" if by_state[State.PAUSED] else "start"

    # ---- prefill ----

    def _prefill(self) -> Planned | None:
        budget = self.limits.max_prefill_tokens
        rows: list[SequenceState] = []
        chunks: list[Chunk] = []
        for sequence in list(self._prefilling.values()):
            if budget and self._goes_on(sequence):
                budget -= self._cut_chunk(sequence, budget, rows, chunks)
        while budget and (admitted := self._admit_next()) is not None:
            if self._goes_on(admitted):
                budget -= self._cut_chunk(admitted, budget, rows, chunks)
        return self._prefill_step((rows, chunks))

    def _prefill_step(self, cut: Cut) -> Planned | None:
        rows, chunks = cut
        if not chunks:
            return None
        rows = self._with_forked(rows)
        return self._step_plan(StepKind.PREFILL, (), (), PREFILL_WIDTH, chunks, rows), tuple(rows)

    def _cut_shares(self, tokens: int, *, scored: bool | None, beside: int = 0) -> Cut:
        """The next chunks, of ``tokens`` together, of scored prompts, of the others, or (None) of all.

        With ``beside`` tokens of decode rows, whose wait the budget bounds, a token after a long prefix counts more
        than one. Tokens that then fill the bucket are free, unless they would start a wave of attention.
        """
        costly_prefix = self._mixed.costly_prefix if self._mixed is not None and beside else 0
        ours = [s for s in self._prefilling.values() if scored is None or s.scoring is scored]
        prefills = [sequence for sequence in ours if self._goes_on(sequence)]
        self._seat_whoever_gets_a_share(prefills, tokens, scored, costly_prefix)
        if costly_prefix:
            bought = sum(share_out(prefills, tokens, costly_prefix).values())
            tokens = min(tokens, self._budget.bucket(beside + bought) - beside)
        shares = share_out(prefills, tokens)
        if costly_prefix and self._mixed is not None and self._mixed.wave:
            shares = self._in_waves(self._mixed, shares, beside)
        rows: list[SequenceState] = []
        chunks: list[Chunk] = []
        for sequence in prefills:
            if sequence in shares:
                self._cut_chunk(sequence, shares[sequence], rows, chunks)
        return rows, chunks

    def _in_waves(self, mixed: MixedSteps, shares: dict[SequenceState, int], beside: int) -> dict[SequenceState, int]:
        """``shares`` whose chunks after long prefixes fill waves of attention, in the nearer of two buckets."""
        long = [sequence for sequence in shares if sequence.prefilled >= mixed.long_prefix]
        most = max(sum(shares.values()), self._budget.most_beside(beside))
        shares = whole_waves(shares, long, mixed.tile, mixed.wave, most)
        total = beside + sum(shares.values())
        beyond = total - self._budget.floor(total)
        last = next((sequence for sequence in reversed(shares) if sequence in long), None)
        if last is not None and beyond < min(shares[last], self._budget.bucket(total) - total):
            shares[last] -= beyond
        return shares

    def _seat_whoever_gets_a_share(
        self, prefills: list[SequenceState], tokens: int, scored: bool | None, costly_prefix: int
    ) -> None:
        """Admit waiting prompts and append them to ``prefills``, as long as tokens of this step are left for them.

        It ends at a prompt that would get tokens of the other kind's next step, so neither kind takes the other's room.
        """
        wanted = sum(cost(sequence, in_one_step(sequence), costly_prefix) for sequence in prefills)
        others = [s for s in self._prefilling.values() if s.scoring is not scored]
        told_blocks = 0
        while self._row_to_give and not self._stalled and told_blocks < MOST_TOLD_BLOCKS:
            for candidate in self.resources.queue.heads():
                ours = scored is None or candidate.scoring is scored
                if (ours and wanted < tokens) or gets_a_share(
                    candidate, prefills if ours else others, tokens, costly_prefix
                ):
                    break
            else:
                return
            if not ours or not self._admit(candidate):
                return
            told_blocks += len(candidate.blocks)
            if self._goes_on(candidate):
                prefills.append(candidate)
                wanted += in_one_step(candidate)

    def _waiting_tokens(self, long_prompt: int) -> int:
        """Prompt tokens to prefill, of sequences with a row and, on average, of waiting ones that a row is free for.

        Long prompts count as ``long_prompt``: the number of waiting prompts matters more than the length of one.
        """
        seated = sum(min(remaining(sequence), long_prompt) for sequence in self._prefilling.values())
        waiting, rows = self.resources.waiting, self.limits.rows - len(self._prefilling) - len(self._decoding)
        return seated + self.resources.waiting_tokens * min(rows, waiting) // max(1, waiting)

    @property
    def _rows_taken(self) -> int:
        return len(self._prefilling) + len(self._decoding) + self._paused_now

    @property
    def _row_free(self) -> bool:
        return self._rows_taken < self.limits.rows

    @property
    def _row_to_give(self) -> bool:
        """Whether a row is free for a request in the queue."""
        return self._rows_taken + self.resources.kept_rows < self.limits.rows

    def _admit_next(self) -> SequenceState | None:
        """Give the head of the queue a slot and its prompt's blocks, if it fits."""
        sequence = self.resources.queue.head()
        if sequence is None or self._stalled or not self._row_to_give:
            return None
        return sequence if self._admit(sequence) else None

    def _admit(self, sequence: SequenceState) -> bool:
        """Give a head of the queue a slot and its prompt's blocks, if it fits."""
        resources = self.resources
        if self._refused == (sequence.request.request_id, resources.room_version):
            return False
        same, fits_from = self._fits_from[:2], self._fits_from[2]
        if same == (sequence.request.request_id, resources.idled) and self._room_at_most < fits_from:
            return False
        pool, slots = resources.pool, resources.slots
        hits = resources.sharing.hits(sequence)
        fresh = resources.blocks_for(resources.reservation(sequence)) - len(hits)
        short = fresh + self._spare_blocks - (pool.free_count - pool.idle_among(hits))
        if not slots.free_count or short > 0:
            self._defer(sequence, short)
            return False
        resources.queue.pop(sequence)
        resources.seat(sequence, hits, fresh)
        return True

    @property
    def _room_at_most(self) -> int:
        """Grows by at least one for each block that a refused prompt gets nearer to fitting, so that a long cached
        prompt is not looked up for each block that comes back. Not used where more can change at once: a snapshot
        after its blocks is found, they become trusted, or an idle request can be evicted.
        """
        pool = self.resources.pool
        return pool.drops + pool.entered - self._spare_blocks

    @property
    def _spare_blocks(self) -> int:
        """Blocks left to running rows, to grow; 0 without any."""
        by_state = self.resources.by_state
        grows = any(by_state[state] for state in _GROWING)
        return 1 + self.config.blocks // 100 if grows else 0

    def _defer(self, sequence: SequenceState, short: int) -> None:
        """The head is ``short`` blocks, or a slot, short. Fenced blocks are free soon, and running rows end by
        themselves; a paused request may never end, so it is evicted.
        """
        resources = self.resources
        resources.counters.deferred_admissions += 1
        soon = resources.slots.free_count + resources.slots.fenced_count > 0 and short <= resources.pool.soon_free
        idle = None if soon else resources.idle_holder()
        if idle is not None:
            resources.evict(idle)
        else:
            self._refused = (sequence.request.request_id, resources.room_version)
            if self.config.snapshots is None and not sequence.alone:
                self._fits_from = (sequence.request.request_id, resources.idled, self._room_at_most + short)

    def _goes_on(self, sequence: SequenceState) -> bool:
        """Whether a chunk of it may be cut: not while another prompt writes what it would compute (sharing.py)."""
        resources = self.resources
        resources.look_again(sequence)
        return resources.sharing.goes_on(sequence, resources.chain.step)

    def _cut_chunk(self, sequence: SequenceState, budget: int, rows: list[SequenceState], chunks: list[Chunk]) -> int:
        """Append the row of its next chunk; returns the chunk's tokens, at most ``budget``."""
        resources = self.resources
        if not sequence.prefill_begun:
            self._slot_writes.append(_slot_write(sequence))
            resources.drop_slot_update(sequence)
            resources.counters.snapshot_missed_tokens += max(0, sequence.branch_at - sequence.prefilled)
        sequence.prefill_begun, sequence.resumes = True, False
        if sequence.restores:
            self._restored.append((resources.take_restored(sequence), sequence.slot))
        start = sequence.prefilled
        end = start + min(budget, in_one_step(sequence))
        last = end == sequence.prefill_target
        sequence.prefilled = end
        if saved := resources.save(sequence, end):
            self._saved.append((sequence.slot, saved))
        sequence.last_step = resources.chain.step
        rows.append(sequence)
        chunks.append(Chunk(sequence.slot, start, sequence.tokens[start:end], last, sequence.take_scored(end)))
        if last:
            sequence.planned_tokens = sequence.landed_tokens + PREFILL_WIDTH
            resources.set_wake(sequence)
            resources.move(sequence, Trigger.PROMPT_PLANNED)
            if sequence.paused:
                resources.move(sequence, Trigger.PAUSE)
                self._paused_now += 1
            if sequence.answers:
                self._fork_answers(sequence, len(chunks) - 1)
        return end - start

    def _fork_answers(self, prompt: SequenceState, chunk: int) -> None:
        """Rows of this step for the other answers to ``prompt``, whose last chunk, number ``chunk``, is cut."""
        resources = self.resources
        for answer in resources.joining(prompt):
            blocks = resources.blocks_to_fork(answer) + self._spare_blocks
            room = resources.slots.free_count and blocks <= resources.pool.free_count
            if self._stalled or not self._row_free or not room:
                break
            self._forks.append(resources.fork(prompt, answer, chunk))
            self._forked.append(answer)
            self._slot_writes.append(_slot_write(answer))
        resources.leave_out(prompt)

    def _with_forked(self, rows: list[SequenceState]) -> list[SequenceState]:
        """All rows after the decode rows: ``rows``, which have chunks, and those of forks."""
        forked, self._forked = self._forked, []
        return rows + forked

    # ---- extended sessions ----

    def _seat_extended(self) -> None:
        """Start prefill of extended sessions that hold a slot, as many as there are rows and blocks for."""
        resources = self.resources
        for sequence in sorted(self._stalled.values(), key=lambda stalled: stalled.room_order):
            session = sequence.session
            if sequence.state is not State.STALLED or session is None or not session.extends:
                continue
            if not self._row_free or not resources.reserve(sequence):
                break
            session.extends = False
            sequence.resumes, sequence.prefill_begun = True, False
            sequence.prefill_target, sequence.branch_at = sequence.landed_tokens, 0
            resources.count_query(sequence, sequence.landed_tokens - sequence.prefilled)
            resources.move(sequence, Trigger.GOT_ROOM_TO_EXTEND)

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
        resources, decoding = self.resources, self._decoding
        for sequence in sorted(self._stalled.values(), key=lambda stalled: stalled.room_order):
            session = sequence.session
            if sequence.state is not State.STALLED or (session is not None and session.extends):
                continue  # evicted for one before it; or it is to prefill
            if not self._row_free or not resources.reserve(sequence):
                break
            resources.move(sequence, Trigger.GOT_ROOM)
            if session is not None and session.revive:
                session.revive = False
                resources.update_slot(sequence, revive=True)
        if resources.asleep_for <= 0:
            self._wake_whoever_is_due()
        if decoding and self._rows_version != resources.decode_version:
            self._collect_rows()
        return bool(decoding)

    def _decode(self) -> Planned | None:
        return self._decode_step() if self._ready_rows() else None

    def _decode_step(self) -> Planned:
        """A decode step of the rows that ``_ready_rows`` collected."""
        width = self._width()
        self._advance_rows(width)
        return self._step_plan(StepKind.DECODE, self._row_slots, self._row_epochs, width), self._rows

    def _mixed_step(self, width: int, cut: Cut) -> Planned:
        """The rows that ``_ready_rows`` collected, then ``cut``; a decode step if nothing was cut."""
        chunk_rows, chunks = cut
        if not chunks:
            return self._decode_step()
        self._advance_rows(width)
        behind = self._with_forked(chunk_rows)
        plan = self._step_plan(StepKind.MIXED, self._row_slots, self._row_epochs, width, chunks, behind)
        tokens = plan.packed_tokens
        self.resources.counters.mixed_padded_tokens += self._budget.bucket(tokens) - tokens
        return plan, (*self._rows, *behind)

    def _advance_rows(self, width: int) -> None:
        resources, step = self.resources, self.resources.chain.step
        resources.asleep_for -= width
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
            resources.digest.fold(step, "width", (width,))
        self._decode_steps += 1

    def _wake_whoever_is_due(self) -> None:
        resources, decoding = self.resources, self._decoding
        waking = [s for s in decoding.values() if s.planned_tokens >= s.wake_at]
        for sequence in waking:
            if sequence.state is State.DECODE:  # it may just have been evicted
                self._wake(sequence)
        if waking:
            resources.reserve_ahead(decoding.values())
        elif decoding:
            resources.asleep_for = min([s.wake_at - s.planned_tokens for s in decoding.values()])

    def _wake(self, sequence: SequenceState) -> None:
        """A row at the end of its blocks or near its last token: drain it, grow it, or stall it."""
        if sequence.planned_tokens - sequence.uncertain_tokens >= sequence.max_length:
            self.resources.move(sequence, Trigger.ALL_PLANNED)
        elif not self.resources.reserve(sequence) and sequence.state is State.DECODE:
            self.resources.counters.stalls += 1
            self.resources.move(sequence, Trigger.OUT_OF_BLOCKS)

    def _collect_rows(self) -> None:
        """The tuples keep their identity until membership changes, which staging checks (StepPlan.slots)."""
        resources = self.resources
        self._rows = tuple(self._decoding.values())
        self._row_slots = tuple([sequence.slot for sequence in self._rows])
        self._row_epochs = tuple([sequence.epoch for sequence in self._rows])
        self._rows_version = resources.decode_version
        resources.digest.fold(resources.chain.step, "rows", self._row_slots + self._row_epochs)

    # ---- both ----

    def _step_plan(
        self,
        kind: StepKind,
        slots: tuple[int, ...],
        epochs: tuple[int, ...],
        width: int,
        chunks: Sequence[Chunk] = (),
        behind: Sequence[SequenceState] = (),
    ) -> StepPlan:
        """``slots`` and ``epochs``: of the decode rows. ``behind``: the sequences of the others."""
        step = self.resources.chain.step
        tree = self.limits.tree if width > 1 else 0
        if not (chunks or self.resources.tables_change):  # most steps; all else that a plan carries comes with chunks
            self.resources.digest.fold(step, kind.name, (len(slots),))
            return StepPlan(step, kind, slots, epochs, width, tree=tree)
        forks = tuple(self._forks)
        self._forks.clear()
        if behind:
            slots += tuple([sequence.slot for sequence in behind])
            epochs += tuple([sequence.epoch for sequence in behind])
        copies = self.resources.take_copies()
        written = {write.slot for write in self._slot_writes}
        for copy, sequence in copies:
            if copy.slot not in written:
                self._slot_writes.append(_slot_write(sequence))
            sequence.resumes = False
        plan = StepPlan(
            step=step,
            kind=kind,
            slots=slots,
            epochs=epochs,
            width=width,
            slot_writes=tuple(self._slot_writes),
            block_writes=self.resources.take_block_writes(),
            chunks=tuple(chunks),
            forks=forks,
            slot_updates=self.resources.take_slot_updates(),
            restored=tuple(self._restored),
            saved=tuple(self._saved),
            copies=tuple([copy for copy, _ in copies]),
            tree=tree,
        )
        self._slot_writes.clear()
        self._restored.clear()
        self._saved.clear()
        writes = list(chain.from_iterable(plan.block_writes))
        for write in plan.slot_writes:
            writes += (write.slot, write.epoch, write.request_id, write.length)
        for chunk in chunks:
            writes += (chunk.slot, chunk.start, len(chunk.token_ids))
        for update in plan.slot_updates:
            writes += (update.slot, update.max_length, update.revive)
        for fork in forks:
            writes += (fork.slot, fork.chunk, *(fork.copied or ()))
        for pair in (*plan.restored, *plan.saved):
            writes += pair
        for copy in plan.copies:
            writes += (copy.source, copy.slot, *(copy.copied or ()))
        self.resources.digest.fold(step, kind.name, (len(slots), *writes))
        return plan


def _slot_write(sequence: SequenceState) -> SlotWrite:
    request = sequence.request
    prompt_length = len(request.prompt_token_ids)
    return SlotWrite(
        slot=sequence.slot,
        epoch=sequence.epoch,
        request_id=request.request_id,
        length=sequence.prefilled,
        prompt_length=prompt_length,
        min_length=prompt_length + request.sampling.min_tokens,
        max_length=sequence.max_length,
        token_ids=sequence.tokens[:],
        stop_token_ids=request.stop_token_ids,
        sampling=request.sampling,
        resumes=sequence.resumes,
    )
