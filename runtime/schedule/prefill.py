"""Prefill: which requests are admitted to a step, and which prefill chunks it has.

Knows: rows, the queue's heads, how the tokens of a step are shared out, when a chunk leaves a snapshot or forks.
Does not know: decode rows and widths, which kind of step comes next (planner.py), what an admission takes
(admission.py).
"""

from __future__ import annotations

from runtime.schedule import admission, prefix, reservation, windows
from runtime.schedule.budget import TokenBudget
from runtime.schedule.config import MixedSteps
from runtime.schedule.ledger import Ledger
from runtime.schedule.plan import Chunk
from runtime.schedule.plan_draft import PlanDraft
from runtime.schedule.sequence import SequenceState
from runtime.schedule.shares import cost, gets_a_share, in_one_step, remaining, share_out, whole_waves
from runtime.schedule.states import State, Trigger

PREFILL_WIDTH = 1  # the last chunk of a prompt yields one token
MOST_TOLD_BLOCKS = 4096  # of prompts admitted in one step, or a little more: their tables cost the host some ms
NOT_REFUSED = (-1, -1)
_GROWING = (State.PREFILL, State.DECODE, State.STALLED, State.DRAINING)

Cut = tuple[list[SequenceState], list[Chunk]]  # chunks, and the sequences they are of


class Prefill:
    """Admits requests of ``ledger`` and cuts chunks of their prompts into ``draft``."""

    def __init__(self, ledger: Ledger, draft: PlanDraft, budget: TokenBudget) -> None:
        self.ledger, self.limits = ledger, ledger.limits
        self.prefilling = ledger.by_state[State.PREFILL]
        self._decoding = ledger.by_state[State.DECODE]
        self._stalled = ledger.by_state[State.STALLED]
        self._mixed = ledger.config.mixed
        self._draft = draft
        self._budget = budget
        self._refused = NOT_REFUSED  # (request, room_version) of the last admission that did not fit
        self._fits_from = (*NOT_REFUSED, 0)  # (request, idled, what it may fit from on) of the same one (_room_at_most)

    # ---- chunks ----

    def cut(self, budget: int) -> Cut:
        """The next chunks, of ``budget`` tokens together, in the order of admission: for steps without decode rows."""
        rows: list[SequenceState] = []
        chunks: list[Chunk] = []
        for sequence in list(self.prefilling.values()):
            if budget and self._proceeds(sequence):
                budget -= self._cut_chunk(sequence, budget, rows, chunks)
        while budget and (admitted := self._admit_next()) is not None:
            if self._proceeds(admitted):
                budget -= self._cut_chunk(admitted, budget, rows, chunks)
        return rows, chunks

    def cut_shares(self, tokens: int, *, scored: bool | None, row_tokens: int = 0) -> Cut:
        """The next chunks, of ``tokens`` together, of scored prompts, of the others, or (None) of all.

        With ``row_tokens`` of decode rows, whose wait the budget bounds, a token after a long prefix counts more than
        one. Tokens that then fill the bucket are free, unless they would start a wave of attention.
        """
        costly_prefix = self._mixed.costly_prefix if self._mixed is not None and row_tokens else 0
        ours = [s for s in self.prefilling.values() if scored is None or s.scoring is scored]
        prefills = [sequence for sequence in ours if self._proceeds(sequence)]
        self._admit_all_with_a_share(prefills, tokens, scored, costly_prefix)
        if costly_prefix:
            bought = sum(share_out(prefills, tokens, costly_prefix).values())
            tokens = min(tokens, self._budget.bucket(row_tokens + bought) - row_tokens)
        shares = share_out(prefills, tokens)
        if costly_prefix and self._mixed is not None and self._mixed.wave:
            shares = self._in_waves(self._mixed, shares, row_tokens)
        rows: list[SequenceState] = []
        chunks: list[Chunk] = []
        for sequence in prefills:
            if sequence in shares:
                self._cut_chunk(sequence, shares[sequence], rows, chunks)
        return rows, chunks

    def _in_waves(
        self, mixed: MixedSteps, shares: dict[SequenceState, int], row_tokens: int
    ) -> dict[SequenceState, int]:
        """``shares`` whose chunks after long prefixes fill waves of attention, in the nearer of two buckets.

        The lower bucket is taken only if the first in line keeps half of the step.
        """
        long = [sequence for sequence in shares if sequence.prefilled >= mixed.long_prefix]
        most = max(sum(shares.values()), self._budget.most_beside(row_tokens))
        shares = whole_waves(shares, long, mixed.tile, mixed.wave, most)
        total = row_tokens + sum(shares.values())
        beyond = total - self._budget.floor(total)
        last = next((sequence for sequence in reversed(shares) if sequence in long), None)
        if last is None or beyond >= min(shares[last], self._budget.bucket(total) - total):
            return shares
        first = min(shares, key=lambda sequence: sequence.order)
        if last is not first or 2 * shares[first] >= sum(shares.values()) + beyond:
            shares[last] -= beyond
        return shares

    def _proceeds(self, sequence: SequenceState) -> bool:
        """Whether a chunk of it may be cut: not while another prompt writes what it would compute (sharing.py)."""
        prefix.look_again(self.ledger, sequence)
        return self.ledger.sharing.goes_on(sequence, self.ledger.chain.step)

    def _cut_chunk(self, sequence: SequenceState, budget: int, rows: list[SequenceState], chunks: list[Chunk]) -> int:
        """Append the row of its next chunk; returns the chunk's tokens, at most ``budget``."""
        ledger, draft = self.ledger, self._draft
        start = sequence.prefilled
        end = start + min(budget, in_one_step(sequence))
        if sequence.windows:
            end = windows.chunk_end(ledger, sequence, end)
            if end <= start:  # its pages wait for chunks in flight
                return 0
            windows.cut(ledger, sequence, start, end)
        if not sequence.prefill_begun:
            draft.write_slot(sequence)
            ledger.drop_slot_update(sequence)
            ledger.counters.snapshot_missed_tokens += max(0, sequence.branch_at - sequence.prefilled)
        sequence.prefill_begun, sequence.resumes = True, False
        if sequence.restores:
            draft.restored.append((prefix.take_restored(ledger, sequence), sequence.slot))
        last = end == sequence.prefill_target
        sequence.prefilled = end
        if saved := prefix.save(ledger, sequence, end):
            draft.saved.append((sequence.slot, saved))
        sequence.last_step = ledger.chain.step
        rows.append(sequence)
        chunks.append(Chunk(sequence.slot, start, sequence.tokens[start:end], last, sequence.take_scored(end)))
        if last:
            sequence.planned_tokens = sequence.landed_tokens + PREFILL_WIDTH
            reservation.set_wake(ledger, sequence)
            ledger.move(sequence, Trigger.PROMPT_PLANNED)
            if sequence.paused:
                ledger.move(sequence, Trigger.PAUSE)
                draft.paused_now += 1
            if sequence.answers:
                self._fork_answers(sequence, len(chunks) - 1)
        return end - start

    def _fork_answers(self, prompt: SequenceState, chunk: int) -> None:
        """Rows of this step for the other answers to ``prompt``, whose last chunk, number ``chunk``, is cut."""
        ledger, draft = self.ledger, self._draft
        for answer in ledger.joining(prompt):
            blocks = admission.blocks_to_fork(ledger, answer) + self._spare_blocks
            room = ledger.slots.free_count and blocks <= ledger.pool.free_count and windows.has_room(ledger, answer)
            if self._stalled or not self.row_free or not room:
                break
            draft.forks.append(admission.fork(ledger, prompt, answer, chunk))
            draft.forked.append(answer)
            draft.write_slot(answer)
        ledger.leave_out(prompt)

    # ---- admission ----

    @property
    def _rows_taken(self) -> int:
        return len(self.prefilling) + len(self._decoding) + self._draft.paused_now

    @property
    def row_free(self) -> bool:
        return self._rows_taken < self.limits.rows

    @property
    def _row_to_give(self) -> bool:
        """Whether a row is free for a request in the queue."""
        return self._rows_taken + admission.kept_rows(self.ledger) < self.limits.rows

    def waiting_tokens(self, long_prompt: int) -> int:
        """Prompt tokens to prefill, of sequences with a row and, on average, of waiting ones that a row is free for.

        Long prompts count as ``long_prompt``: the number of waiting prompts matters more than the length of one.
        """
        admitted = sum(min(remaining(sequence), long_prompt) for sequence in self.prefilling.values())
        waiting, rows = self.ledger.waiting, self.limits.rows - len(self.prefilling) - len(self._decoding)
        return admitted + self.ledger.waiting_tokens * min(rows, waiting) // max(1, waiting)

    def _admit_all_with_a_share(
        self, prefills: list[SequenceState], tokens: int, scored: bool | None, costly_prefix: int
    ) -> None:
        """Admit waiting prompts and append them to ``prefills``, as long as tokens of this step are left for them.

        A prompt that would get tokens of the other kind's next step is passed only while there is room for both, so
        neither kind takes the other's room, and neither waits for all of the other.
        """
        wanted = sum(cost(sequence, in_one_step(sequence), costly_prefix) for sequence in prefills)
        others = [s for s in self.prefilling.values() if s.scoring is not scored]
        told_blocks = 0
        while self._row_to_give and not self._stalled and told_blocks < MOST_TOLD_BLOCKS:
            passed: SequenceState | None = None
            for candidate in self.ledger.queue.heads():
                ours = scored is None or candidate.scoring is scored
                if not ours:
                    passed = candidate if gets_a_share(candidate, others, tokens, costly_prefix) else None
                elif wanted < tokens or gets_a_share(candidate, prefills, tokens, costly_prefix):
                    break
            else:
                return
            if not self._has_room_beside(passed, candidate) or not self._admit(candidate):
                return
            told_blocks += len(candidate.blocks)
            if self._proceeds(candidate):
                prefills.append(candidate)
                wanted += in_one_step(candidate)

    def _admit_next(self) -> SequenceState | None:
        """Give the head of the queue a slot and its prompt's blocks, if it fits."""
        sequence = self.ledger.queue.head()
        if sequence is None or self._stalled or not self._row_to_give:
            return None
        return sequence if self._admit(sequence) else None

    def _admit(self, sequence: SequenceState) -> bool:
        """Give a head of the queue a slot and its prompt's blocks, if it fits."""
        ledger = self.ledger
        if self._refused == (sequence.request.request_id, admission.room_version(ledger)):
            return False
        same, fits_from = self._fits_from[:2], self._fits_from[2]
        if same == (sequence.request.request_id, ledger.idled) and self._room_at_most < fits_from:
            return False
        pool, slots = ledger.pool, ledger.slots
        hits = ledger.sharing.hits(sequence)
        fresh = reservation.blocks_to_hold(ledger, sequence) - len(hits)
        short = fresh + self._spare_blocks - (pool.free_count - pool.idle_among(hits))
        if not slots.free_count or short > 0 or not windows.has_room(ledger, sequence):
            self._defer(sequence, short)
            return False
        ledger.queue.pop(sequence)
        admission.admit(ledger, sequence, hits, fresh)
        return True

    def _has_room_beside(self, passed: SequenceState | None, candidate: SequenceState) -> bool:
        """Whether ``passed``, which is before ``candidate`` in the queue, fits as well."""
        if passed is None:
            return True
        ledger = self.ledger
        blocks = sum(reservation.blocks_to_hold(ledger, each) for each in (passed, candidate))
        rows = self._rows_taken + admission.kept_rows(ledger) + 2 <= self.limits.rows and ledger.slots.free_count >= 2
        room = windows.has_room(ledger, passed, candidate)
        return rows and room and blocks + self._spare_blocks <= ledger.pool.free_count

    @property
    def _room_at_most(self) -> int:
        """Grows by at least one for each block that a refused prompt gets nearer to fitting, so that a long cached
        prompt is not looked up for each block that comes back. Not used if more can change at once: a snapshot
        after its blocks is found, they become trusted, or an idle request can be evicted.
        """
        pool = self.ledger.pool
        return pool.drops + pool.entered - self._spare_blocks

    @property
    def _spare_blocks(self) -> int:
        """Blocks left to running rows, to grow; 0 without any."""
        by_state = self.ledger.by_state
        grows = any(by_state[state] for state in _GROWING)
        return 1 + self.ledger.config.blocks // 100 if grows else 0

    def _defer(self, sequence: SequenceState, short: int) -> None:
        """The head is ``short`` blocks, a slot, or room for its windows short. Fenced blocks are free soon, and running
        rows end by themselves; a paused request may never end, so it is evicted.
        """
        ledger = self.ledger
        ledger.counters.deferred_admissions += 1
        soon = ledger.slots.free_count + ledger.slots.fenced_count > 0 and short <= ledger.pool.soon_free
        soon = soon and windows.has_room(ledger, sequence, soon=True)
        idle = None if soon else reservation.idle_holder(ledger)
        if idle is not None:
            short_of = "full" if short > 0 else windows.short_of(ledger, sequence) or "slots"
            reservation.evict(ledger, idle, short_of)
            return
        self._refused = (sequence.request.request_id, admission.room_version(ledger))
        if ledger.config.snapshots is None and not sequence.alone and not ledger.windows:
            self._fits_from = (sequence.request.request_id, ledger.idled, self._room_at_most + short)

    # ---- extended sessions ----

    def admit_extended(self) -> None:
        """Start prefill of extended sessions that hold a slot, as many as there are rows and blocks for."""
        ledger = self.ledger
        for sequence in sorted(self._stalled.values(), key=lambda stalled: stalled.room_order):
            session = sequence.session
            if sequence.state is not State.STALLED or session is None or not session.extends:
                continue
            if not self.row_free or not reservation.reserve(ledger, sequence):
                break
            session.extends = False
            sequence.resumes, sequence.prefill_begun = True, False
            sequence.prefill_target, sequence.branch_at = sequence.landed_tokens, 0
            prefix.count_query(ledger, sequence, sequence.landed_tokens - sequence.prefilled)
            ledger.move(sequence, Trigger.GOT_ROOM_TO_EXTEND)
