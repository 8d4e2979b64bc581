"""The planner: whose rows make the next step.

Knows: admission, chunks of prompts, decode rows, and what the device must be told of them.
Does not know: events, results, or how sequences give things back (resources.py).
"""

from __future__ import annotations

from bisect import bisect_left

from runtime.schedule.chain import State, Trigger
from runtime.schedule.config import SchedulerConfig
from runtime.schedule.plan import Chunk, SlotWrite, StepKind, StepPlan
from runtime.schedule.resources import Books
from runtime.schedule.sequence import SequenceState


class Planner(Books):
    """Books, and the two kinds of steps that can be made of them."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._chunk_rows: tuple[SequenceState, ...] = ()
        self._rows: tuple[SequenceState, ...] = ()
        self._row_slots: tuple[int, ...] = ()
        self._row_epochs: tuple[int, ...] = ()
        self._slot_writes: list[SlotWrite] = []

    # ---- prefill ----

    def _plan_prefill(self) -> StepPlan | None:
        budget = self.config.max_prefill_tokens
        rows: list[SequenceState] = []
        chunks: list[Chunk] = []
        for sequence in list(self._in[State.PREFILL].values()):
            if budget:
                budget -= self._cut_chunk(sequence, budget, rows, chunks)
        # A row of this step may be nobody's already: one that was to pause at its prompt's end gave its place up above.
        while budget and len(rows) < self.config.rows and (admitted := self._admit_next()) is not None:
            budget -= self._cut_chunk(admitted, budget, rows, chunks)
        if not chunks:
            return None
        self._chunk_rows = tuple(rows)
        return self._step_plan(
            StepKind.PREFILL,
            len(rows),
            tuple(chunk.slot for chunk in chunks),
            tuple(sequence.epoch for sequence in rows),
            tuple(chunks),
        )

    @property
    def _row_free(self) -> bool:
        return len(self._in[State.PREFILL]) + len(self._in[State.DECODE]) < self.config.rows

    def _admit_next(self) -> SequenceState | None:
        """Give the head of the queue a slot and its prompt's blocks, if it fits."""
        sequence = self._queue.head()
        if sequence is None or self._in[State.STALLED] or not self._row_free:
            return None
        if self._refused == (sequence.request.request_id, self.pool.drops):
            return None
        config, pool = self.config, self.pool
        reserve = min(sequence.landed_tokens + (config.depth + 1) * config.width, self._most_kv(sequence))
        hits: list[int] = []
        if config.prefix_caching and sequence.request.sampling.prompt_logprobs is None:
            hits = pool.lookup(sequence.tokens, (sequence.landed_tokens - 1) // config.block_size)
        fresh = self._blocks_for(reserve) - len(hits)
        spare = 0 if pool.free_count == config.blocks else 1 + config.blocks // 100  # room for the others to grow
        short = fresh + spare - (pool.free_count - pool.idle_among(hits))
        if not self.slots.free_count or short > 0:
            self._make_room(sequence, short)
            return None
        sequence.prefix_id = pool.share(hits)
        self._queue.pop()
        self._seat(sequence, hits, fresh)
        return sequence

    def _make_room(self, sequence: SequenceState, short: int) -> None:
        """The head is ``short`` blocks, or a slot, short. What is fenced is free soon, and running rows will end by
        themselves; a paused one may never, so it gives way.
        """
        soon = self.slots.free_count + self.slots.fenced_count > 0 and short <= self.pool.soon_free
        paused = [s for s in self._in[State.PAUSED].values() if s.slot]
        if paused and not soon:
            self._evict(max(paused, key=lambda holder: holder.order))
        else:
            self._refused = (sequence.request.request_id, self.pool.drops)

    def _seat(self, sequence: SequenceState, hits: list[int], fresh: int) -> None:
        request, size = sequence.request, self.config.block_size
        sequence.slot = slot = self.slots.take()
        sequence.epoch = self.slots.epochs[slot]
        sequence.blocks = hits + self.pool.take(fresh)
        sequence.prefilled = len(hits) * size
        sequence.prefill_target = sequence.landed_tokens
        sequence.settled_blocks = len(hits)
        sequence.settle_at = (len(hits) + 1) * size
        self._move(sequence, Trigger.ADMIT)
        self.counters.admissions += 1
        self.counters.prefix_hit_tokens += sequence.prefilled
        self._slot_writes.append(
            SlotWrite(
                slot=slot,
                epoch=sequence.epoch,
                request_id=request.request_id,
                length=sequence.prefilled,
                prompt_length=len(request.prompt_token_ids),
                min_length=len(request.prompt_token_ids) + request.sampling.min_tokens,
                max_length=sequence.max_length,
                token_ids=tuple(sequence.tokens),
                stop_token_ids=request.stop_token_ids,
                sampling=request.sampling,
            )
        )
        self._block_writes.extend((slot, index, block) for index, block in enumerate(sequence.blocks))

    def _cut_chunk(self, sequence: SequenceState, budget: int, rows: list[SequenceState], chunks: list[Chunk]) -> int:
        start = sequence.prefilled
        end = min(start + budget, sequence.prefill_target)
        last = end == sequence.prefill_target
        sequence.prefilled = end
        sequence.last_step = self.step
        rows.append(sequence)
        chunks.append(Chunk(sequence.slot, start, tuple(sequence.tokens[start:end]), last, sequence.take_scored(end)))
        if last:
            sequence.planned_tokens = sequence.landed_tokens + self.config.width
            self._set_wake(sequence)
            self._move(sequence, Trigger.PROMPT_PLANNED)
            if sequence.paused:
                self._move(sequence, Trigger.PAUSE)
        return end - start

    # ---- decode ----

    def _plan_decode(self) -> StepPlan | None:
        for sequence in sorted(self._in[State.STALLED].values(), key=lambda stalled: stalled.order):
            if sequence.state is not State.STALLED:  # it was the victim of one before it
                continue
            if not self._row_free or not self._reserve(sequence):
                break
            self._move(sequence, Trigger.GOT_ROOM)
        decoding = self._in[State.DECODE]
        for sequence in [s for s in decoding.values() if s.planned_tokens >= s.wake_at]:
            if sequence.state is State.DECODE:  # it may just have been somebody's victim
                self._wake(sequence)
        if not decoding:
            return None
        if self._rows_stale:
            self._rows = tuple(decoding.values())
            self._row_slots = tuple(s.slot for s in self._rows)
            self._row_epochs = tuple(s.epoch for s in self._rows)
            self._rows_stale = False
            self.digest.fold(self.step, "rows", self._row_slots + self._row_epochs)
        step, width = self.step, self.config.width
        for sequence in self._rows:
            sequence.planned_tokens += width
            sequence.last_step = step
        bucket = self.config.decode_buckets[bisect_left(self.config.decode_buckets, len(self._rows))]
        return self._step_plan(StepKind.DECODE, bucket, self._row_slots, self._row_epochs, ())

    def _wake(self, sequence: SequenceState) -> None:
        """A row at its reservation or near its end: drain it, grow it, or stall it."""
        in_flight = (sequence.planned_tokens - sequence.landed_tokens) // self.config.width
        if sequence.landed_tokens + in_flight >= sequence.max_length:  # every step in flight gives at least one token
            self._move(sequence, Trigger.ALL_PLANNED)
        elif not self._reserve(sequence) and sequence.state is State.DECODE:
            self.counters.stalls += 1
            self._move(sequence, Trigger.OUT_OF_BLOCKS)

    # ---- both ----

    def _step_plan(
        self,
        kind: StepKind,
        bucket: int,
        slots: tuple[int, ...],
        epochs: tuple[int, ...],
        chunks: tuple[Chunk, ...],
    ) -> StepPlan:
        plan = StepPlan(
            step=self.step,
            kind=kind,
            bucket=bucket,
            slots=slots,
            epochs=epochs,
            width=self.config.width,
            slot_writes=tuple(self._slot_writes),
            block_writes=tuple(self._block_writes),
            chunks=chunks,
        )
        self._slot_writes.clear()
        self._block_writes.clear()
        writes = [number for write in plan.block_writes for number in write]
        for write in plan.slot_writes:
            writes += (write.slot, write.epoch, write.request_id, write.length)
        for chunk in chunks:
            writes += (chunk.slot, chunk.start, len(chunk.token_ids))
        self.digest.fold(self.step, kind.name, (bucket, len(slots), *writes))
        return plan
