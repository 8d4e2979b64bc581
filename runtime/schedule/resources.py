"""The books: which sequence is in which state, and what it holds. The lowest floor of the scheduler.

Knows: states, slots, blocks, fences, the queue; how a sequence arrives, ends, pauses, gives way and comes back.
Does not know: steps' rows (planner.py), results (scheduler.py).
"""

from __future__ import annotations

from runtime.schedule.blocks import ROOT, BlockPool
from runtime.schedule.chain import Chain, State, Trigger, advance
from runtime.schedule.config import SchedulerConfig
from runtime.schedule.counters import ScheduleCounters
from runtime.schedule.digest import RollingDigest
from runtime.schedule.fence import Fence
from runtime.schedule.plan import Finished
from runtime.schedule.queue import WaitingQueue
from runtime.schedule.request import FinishReason, Request
from runtime.schedule.sequence import SequenceState
from runtime.schedule.slots import SlotPool

NOBODY = (-1, -1)


class Books:
    """Every sequence that has not ended, by state and id, and the pools it holds from."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.step = 0  # the number the next plan will have
        self.pool = BlockPool(config.blocks, config.block_size)
        self.slots = SlotPool(config.slots)
        self.chain = Chain(config.depth)
        self.digest = RollingDigest()
        self.counters = ScheduleCounters()
        self._queue = WaitingQueue()
        self._in: dict[State, dict[int, SequenceState]] = {state: {} for state in State}
        self._sequences: dict[int, SequenceState] = {}
        self._evicting: Fence[SequenceState] = Fence()
        self._arrivals = 0
        self._refused = NOBODY  # or (request, pool.drops) of the last admission that did not fit
        self._rows_stale = True  # the decode rows are no longer those of the last decode step
        self._block_writes: list[tuple[int, int, int]] = []  # (slot, index, block) for the next step

    @property
    def unfinished(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._sequences)

    @property
    def waiting(self) -> int:
        return len(self._in[State.WAITING])

    # ---- arrival and end ----

    def _arrive(self, request: Request) -> tuple[Finished, ...]:
        prompt, sampling, config = request.prompt_token_ids, request.sampling, self.config
        self.digest.fold(self.step, "arrive", (request.request_id, len(prompt), request.priority, sampling.max_tokens))
        if request.request_id in self._sequences:
            return (_rejected(request, f"request id {request.request_id} is in use"),)
        if not prompt or sampling.max_tokens < 1:
            return (_rejected(request, "needs at least one prompt token and max_tokens >= 1"),)
        if len(prompt) >= config.max_model_len:
            return (_rejected(request, f"prompt has {len(prompt)} tokens, max_model_len is {config.max_model_len}"),)
        if self.waiting >= config.max_waiting:
            return (_rejected(request, f"{self.waiting} requests are waiting, max_waiting is {config.max_waiting}"),)
        max_length = min(len(prompt) + sampling.max_tokens, config.max_model_len)
        sequence = SequenceState(request, self._arrivals, max_length)
        if (needed := self._blocks_for(self._most_kv(sequence))) > config.blocks:
            return (
                _rejected(
                    request,
                    f"{len(prompt)} prompt + {max_length - len(prompt)} new tokens need {needed} blocks of "
                    f"{config.block_size}, the pool has {config.blocks}",
                ),
            )
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        self._in[State.WAITING][request.request_id] = sequence
        self._queue.push(sequence)
        return ()

    def _end(self, sequence: SequenceState, reason: FinishReason, detail: str = "") -> Finished:
        """End it now in the books; what it holds returns to the pools behind its fence."""
        if sequence.state is State.EVICTING:
            self.slots.end(sequence.slot)
        elif sequence.slot:
            self.slots.end(sequence.slot)
            self._release(sequence)
        self._move(sequence, Trigger.END)
        del self._in[State.ENDED][sequence.request.request_id]
        del self._sequences[sequence.request.request_id]
        self.digest.fold(self.step, "end", (sequence.request.request_id, int(reason), sequence.landed_tokens))
        return Finished(sequence.request.request_id, reason, sequence.generated, detail)

    def _release(self, sequence: SequenceState) -> None:
        """Give slot and blocks back, behind the fence of the last step that may touch them."""
        step = sequence.last_step
        self._block_writes = [write for write in self._block_writes if write[0] != sequence.slot]
        if self.chain.landed_after(step):
            self.pool.give_back(sequence.blocks)
            self.slots.give_back(sequence.slot)
        else:
            self.pool.retire_after(step, sequence.blocks)
            self.slots.retire_after(step, sequence.slot)
        sequence.blocks, sequence.given_up = [], sequence.blocks

    def _move(self, sequence: SequenceState, trigger: Trigger) -> None:
        before = sequence.state
        advance(sequence, trigger)
        del self._in[before][sequence.request.request_id]
        self._in[sequence.state][sequence.request.request_id] = sequence
        if before is State.DECODE or sequence.state is State.DECODE:
            self._rows_stale = True
        if sequence.state is State.PAUSED:
            self._refused = NOBODY  # what did not fit may fit now, in the paused one's place

    # ---- pause, resume, evict ----

    def _pause(self, sequence: SequenceState) -> None:
        sequence.paused = True
        if sequence.state in (State.WAITING, State.DECODE, State.STALLED):
            self._move(sequence, Trigger.PAUSE)

    def _resume(self, sequence: SequenceState) -> None:
        sequence.paused = False
        if sequence.state is not State.PAUSED:
            return
        if not sequence.slot:
            self._move(sequence, Trigger.RESUME_WAITING)
            self._queue.push(sequence)
        else:
            self._move(sequence, Trigger.RESUME)

    def _evict(self, sequence: SequenceState) -> None:
        """Take slot and blocks away; it queues again, to be recomputed, once its steps in flight have landed."""
        self.counters.evictions += 1
        self._move(sequence, Trigger.EVICT)
        self._release(sequence)
        if self.chain.landed_after(sequence.last_step):
            self._requeue(sequence)
        else:
            self._evicting.hold(sequence.last_step, sequence)

    def _requeue(self, sequence: SequenceState) -> None:
        self.slots.end(sequence.slot)
        sequence.slot = 0
        sequence.prefilled = sequence.settled_blocks = 0
        sequence.prefix_id = ROOT
        self._move(sequence, Trigger.FENCE_LANDED)
        if sequence.paused:
            self._move(sequence, Trigger.PAUSE)
        else:
            self._queue.push(sequence)

    def _victim(self) -> SequenceState:
        """Who gives up blocks: somebody paused if there is one, else the last in line."""
        holders = [s for s in self._in[State.PAUSED].values() if s.slot]
        for state in () if holders else (State.PREFILL, State.DECODE, State.STALLED):
            holders.extend(self._in[state].values())
        return max(holders, key=lambda sequence: sequence.order)

    # ---- reservation ----

    def _reserve(self, sequence: SequenceState) -> bool:
        """Blocks for landed + (D+1)*W tokens (law 4). False: not now; the sequence itself may have been evicted."""
        config = self.config
        reserve = min(sequence.landed_tokens + (config.depth + 1) * config.width, self._most_kv(sequence))
        wanted = self._blocks_for(reserve) - len(sequence.blocks)
        while wanted > self.pool.free_count:
            if self._in[State.DRAINING] or wanted <= self.pool.free_count + self.pool.soon_free:
                return False
            victim = self._victim()
            self._evict(victim)
            if victim is sequence:
                return False
        if wanted > 0:
            held = len(sequence.blocks)
            sequence.blocks += self.pool.take(wanted)
            self._block_writes.extend((sequence.slot, i, sequence.blocks[i]) for i in range(held, held + wanted))
        self._set_wake(sequence)
        return True

    def _set_wake(self, sequence: SequenceState) -> None:
        capacity = len(sequence.blocks) * self.config.block_size
        sequence.wake_at = min(capacity + 2 - self.config.width, sequence.max_length)

    def _most_kv(self, sequence: SequenceState) -> int:
        """KV entries a live row can ever write: its last token needs none, a row of W tokens starts before the end."""
        return sequence.max_length - 2 + self.config.width

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    # ---- accounting ----

    def check(self) -> None:
        """Raise AccountingError unless every block and slot is accounted for exactly once. For tests and debugging."""
        holders = [s for s in self._sequences.values() if s.slot and s.state is not State.EVICTING]
        self.slots.check([s.slot for s in holders])
        self.pool.check([block for s in holders for block in s.blocks])


def _rejected(request: Request, detail: str) -> Finished:
    return Finished(request.request_id, FinishReason.REJECTED, (), detail)
