"""The scheduler: which rows run in which step, and what that means for slots and blocks.

Knows: the three verbs, prefill against decode, and what a landed result changes; planner.py makes the steps and
resources.py keeps what everybody holds. Does not know: devices, time, other ranks.
It is a pure state machine: the same events and results in the same order give the same plans on every rank (law 1).

Policy, in one place:
  * A step is a prefill step or a decode step. While rows are decoding, at most ``prefill_burst`` prefill steps run in
    a row, so that neither side starves.
  * Admission is in order of (priority, arrival) and stops at the first that does not fit. It never takes a block from
    somebody who runs, and waits while anybody is stalled.
  * A row that needs a block when none is free waits for blocks that are fenced or whose owner is draining; only when
    that could not be enough does the last in line give up its blocks and queue again (recompute).
"""

from __future__ import annotations

from runtime.schedule.chain import Flight, State
from runtime.schedule.config import SchedulerConfig
from runtime.schedule.plan import (
    Admit,
    Cancel,
    Chunk,
    Event,
    Finished,
    Pause,
    StepKind,
    StepOutput,
    StepPlan,
    StepResult,
)
from runtime.schedule.planner import Planner
from runtime.schedule.request import FinishReason
from runtime.schedule.sequence import SequenceState

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler(Planner):
    """``submit(event)``, ``plan()``, ``land(step, result)``; see chain.py for the rules they keep."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._burst = 0  # prefill steps in a row

    @property
    def quiescent(self) -> bool:
        """Nothing real in flight: if plan() just returned None too, only an event can change anything."""
        return self.chain.real == 0

    def submit(self, event: Event) -> tuple[Finished, ...]:
        """Apply one agreed event; returns the requests that it ended at once."""
        if isinstance(event, Admit):
            return self._arrive(event.request)
        sequence = self._sequences.get(event.request_id)
        self.digest.fold(self.step, type(event).__name__, (event.request_id, sequence is not None))
        if sequence is None:
            return ()
        if isinstance(event, Cancel):
            return (self._end(sequence, event.reason),)
        if isinstance(event, Pause):
            self._pause(sequence)
        else:
            self._resume(sequence)
        return ()

    def plan(self) -> StepPlan | None:
        """The next step, or None for a void one (its number is used up and it is landed like the others)."""
        plan = None
        if self._burst < self.config.prefill_burst or not self._in[State.DECODE]:
            plan = self._plan_prefill()
            self._burst += 1
        if plan is None:
            plan = self._plan_decode()
            self._burst = 0
        if plan is None:  # the last rows just drained: their successors need not wait for the next step
            plan = self._plan_prefill()
        rows = () if plan is None else (self._rows if plan.kind is StepKind.DECODE else self._chunk_rows)
        self.counters.planned(plan, self.chain, self._why_void() if plan is None else "")
        self.chain.launch(Flight(self.step, plan, rows, self.slots.version))
        self.step += 1
        return plan

    def land(self, step: int, result: StepResult | None) -> StepOutput:
        """Settle the oldest step in flight. ``result`` is None exactly for a void step."""
        flight = self.chain.land(step)
        output = StepOutput(step)
        if flight.plan is not None and result is not None:
            output = self._settle(flight, flight.plan, result)
        for sequence in self._evicting.landed(step):
            if sequence.state is State.EVICTING:
                self._requeue(sequence)
        self.pool.landed(step)
        self.slots.landed(step)
        self.counters.fenced_blocks = self.pool.soon_free
        return output

    def _why_void(self) -> str:
        """Why nothing could run. ``start``: all work there is has been planned, so the next step starts a new chain."""
        if self._in[State.STALLED]:
            return "no_blocks"
        if self._in[State.WAITING] or self._in[State.EVICTING]:
            return "context_full"
        return "paused" if self._in[State.PAUSED] else "start"

    # ---- landing ----

    def _settle(self, flight: Flight, plan: StepPlan, result: StepResult) -> StepOutput:
        """Give each live row its tokens, end those that are done, and drop the ghosts."""
        self.digest.fold(flight.step, "land", (*result.tokens, *result.finish))
        rows: list[SequenceState | None] = list(flight.rows)
        if flight.slot_version != self.slots.version:
            self._drop_ghosts(rows, plan, result)
        width, tokens, counts = plan.width, result.tokens, result.counts
        done = []
        for i, (sequence, count, code) in enumerate(zip(rows, counts, result.finish, strict=True)):
            if sequence is None:
                continue
            if count == 1:
                sequence.tokens.append(tokens[i * width])
            elif count:
                sequence.tokens.extend(tokens[i * width : i * width + count])
            if width > 1 and (count or code):
                sequence.planned_tokens += count - width
            if code:
                done.append(self._end_as_told(sequence, FinishReason(code)))
            elif len(sequence.tokens) > sequence.settle_at:
                self._settle_blocks(sequence, plan.chunks[i] if plan.chunks else None)
        return StepOutput(
            step=flight.step,
            request_ids=[-1 if s is None else s.request.request_id for s in rows],
            tokens=tokens,
            counts=counts,
            width=width,
            finished=tuple(done),
            logprobs=result.logprobs,
            prompt_logprobs=result.prompt_logprobs,
        )

    def _end_as_told(self, sequence: SequenceState, reason: FinishReason) -> Finished:
        """The device ended it. Where its logits broke, nobody else shall find what it leaves behind."""
        if reason is not FinishReason.ERROR:
            return self._end(sequence, reason)
        self.pool.forget(sequence.blocks or sequence.given_up)
        known, prompt = sequence.landed_tokens, len(sequence.request.prompt_token_ids)
        detail = f"the logits after {known} tokens ({prompt} of them prompt) are not finite: no token can be drawn"
        return self._end(sequence, reason, detail)

    def _drop_ghosts(self, rows: list[SequenceState | None], plan: StepPlan, result: StepResult) -> None:
        """A ghost whose logits broke still says something: about blocks that others could find."""
        for i, (slot, epoch) in enumerate(zip(plan.slots, plan.epochs, strict=True)):
            if self._is_ghost(slot, epoch):
                ended, rows[i] = rows[i], None
                if ended is not None and result.finish[i] == FinishReason.ERROR:
                    self.pool.forget(ended.given_up)
                self.counters.ghost_rows += 1
                self.counters.wasted_tokens += result.counts[i]

    def _is_ghost(self, slot: int, epoch: int) -> bool:
        return self.slots.epochs[slot] != epoch

    def _settle_blocks(self, sequence: SequenceState, chunk: Chunk | None) -> None:
        """Make blocks that are full, and whose writing step has landed, findable."""
        size = self.config.block_size
        if not self.config.prefix_caching or not sequence.blocks:
            sequence.settle_at = sequence.max_length
            return
        written = sequence.landed_tokens - 1  # the KV of the newest token is not written yet
        if chunk is not None and not chunk.last:
            written = chunk.start + len(chunk.token_ids)
        while written >= sequence.settle_at:
            index = sequence.settled_blocks
            contents = tuple(sequence.tokens[index * size : (index + 1) * size])
            sequence.prefix_id = self.pool.settle(sequence.blocks[index], sequence.prefix_id, contents)
            sequence.settled_blocks += 1
            sequence.settle_at += size
