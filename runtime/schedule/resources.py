"""Resources: every unfinished request by state, and the pools it holds slots and KV blocks from.

Knows: states, slots, blocks, fences, the queue; how a request arrives, is seated, grows, pauses, is evicted, ends.
Does not know: which rows make a step (planner.py), results of steps (scheduler.py).
"""

from __future__ import annotations

from runtime.schedule.blocks import ROOT, BlockPool
from runtime.schedule.chain import Chain, advance
from runtime.schedule.config import SchedulerConfig
from runtime.schedule.counters import ScheduleCounters
from runtime.schedule.digest import RollingDigest
from runtime.schedule.fence import Fence
from runtime.schedule.plan import Finished
from runtime.schedule.queue import WaitingQueue
from runtime.schedule.request import FinishReason, Request
from runtime.schedule.sequence import SequenceState
from runtime.schedule.slots import AccountingError, SlotPool
from runtime.schedule.states import State, Trigger

LANES = 3  # of the waiting queue, with mixed steps
LONG_LANE, SCORED_LANE = 1, 2


class Resources:
    """``sequences`` holds every unfinished request by id, ``by_state`` the same by state, in the order they entered it.

    ``chain`` holds the steps in flight, which fences wait for. ``digest`` and ``counters`` are the scheduler's: every
    part folds and counts its own decisions. ``decode_version`` changes whenever a request enters or leaves DECODE.
    ``waiting_tokens``: known tokens of those in WAITING, at most ``long_prompt`` each where there are mixed steps.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.blocks, config.block_size)
        self.slots = SlotPool(config.slots)
        self.queue = WaitingQueue() if config.mixed is None else WaitingQueue(LANES, self._lane)
        self.chain = Chain(config.depth)
        self.digest = RollingDigest()
        if config.mixed is not None:
            self.digest.fold(0, "mixed", config.mixed.numbers)
        self.counters = ScheduleCounters()
        self.sequences: dict[int, SequenceState] = {}
        self.by_state: dict[State, dict[int, SequenceState]] = {state: {} for state in State}
        self.decode_version = 0
        self.waiting_tokens = 0
        self._max_width = config.max_width
        self._evicting: Fence[SequenceState] = Fence()
        self._arrivals = 0
        self._paused = 0  # times that a request became PAUSED
        self._block_writes: list[tuple[int, int, int]] = []  # (slot, index, block) for the next step

    def _lane(self, sequence: SequenceState) -> int:
        """Those who may be passed by others wait apart: scored prompts, and long ones."""
        if sequence.scoring:
            return SCORED_LANE
        assert self.config.mixed is not None
        return LONG_LANE if sequence.landed_tokens > self.config.mixed.long_prompt else 0

    def _tokens_to_wait_for(self, sequence: SequenceState) -> int:
        """Does not change while it waits: only steps in flight could add tokens, and it has none."""
        mixed = self.config.mixed
        return sequence.landed_tokens if mixed is None else min(sequence.landed_tokens, mixed.long_prompt)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self.by_state[State.WAITING])

    # ---- arrival and end ----

    def arrive(self, request: Request) -> tuple[Finished, ...]:
        """Queue a request. Returns its end where it is refused: it can never run, or the queue is full."""
        prompt, sampling, config = request.prompt_token_ids, request.sampling, self.config
        shape = (request.request_id, len(prompt), request.priority, sampling.max_tokens)
        self.digest.fold(self.chain.step, "arrive", shape)
        if request.request_id in self.sequences:
            return self._reject(request, f"request id {request.request_id} is in use")
        if not prompt or sampling.max_tokens < 1:
            return self._reject(request, "needs at least one prompt token and max_tokens >= 1")
        if len(prompt) >= config.max_model_len:
            return self._reject(request, f"prompt has {len(prompt)} tokens, max_model_len is {config.max_model_len}")
        if self.waiting >= config.max_waiting:
            return self._reject(request, f"{self.waiting} requests are waiting, max_waiting is {config.max_waiting}")
        max_length = min(len(prompt) + sampling.max_tokens, config.max_model_len)
        sequence = SequenceState(request, self._arrivals, max_length)
        if (needed := self.blocks_for(self._most_kv(sequence))) > config.blocks:
            return self._reject(
                request,
                f"{len(prompt)} prompt + {max_length - len(prompt)} new tokens need {needed} blocks of "
                f"{config.block_size}, the pool has {config.blocks}",
            )
        self._arrivals += 1
        self.sequences[request.request_id] = sequence
        self.by_state[State.WAITING][request.request_id] = sequence
        self.waiting_tokens += self._tokens_to_wait_for(sequence)
        self.queue.push(sequence)
        return ()

    def _reject(self, request: Request, detail: str) -> tuple[Finished, ...]:
        self.counters.finished[FinishReason.REJECTED.label] += 1
        return (Finished(request.request_id, FinishReason.REJECTED, (), detail),)

    def end(self, sequence: SequenceState, reason: FinishReason, detail: str = "") -> Finished:
        """End it now; slot and blocks return to the pools behind its fence."""
        if sequence.state is State.EVICTING:
            self.slots.end(sequence.slot)
        elif sequence.slot:
            self.slots.end(sequence.slot)
            self._release(sequence)
        self.move(sequence, Trigger.END)
        del self.by_state[State.ENDED][sequence.request.request_id]
        del self.sequences[sequence.request.request_id]
        self.counters.finished[reason.label] += 1
        self.digest.fold(self.chain.step, "end", (sequence.request.request_id, int(reason), sequence.landed_tokens))
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

    def move(self, sequence: SequenceState, trigger: Trigger) -> None:
        """Along the transition table. Raises IllegalTransition."""
        before = sequence.state
        advance(sequence, trigger)
        del self.by_state[before][sequence.request.request_id]
        self.by_state[sequence.state][sequence.request.request_id] = sequence
        if before is State.WAITING:
            self.waiting_tokens -= self._tokens_to_wait_for(sequence)
        elif sequence.state is State.WAITING:
            self.waiting_tokens += self._tokens_to_wait_for(sequence)
        if before is State.DECODE or sequence.state is State.DECODE:
            self.decode_version += 1
        if sequence.state is State.PAUSED:
            self._paused += 1

    # ---- pause, resume, evict ----

    def pause(self, sequence: SequenceState) -> None:
        """Take it out of the plans. While its prompt is planned, or its steps drain, this takes effect afterwards."""
        if sequence.paused:
            return
        sequence.paused = True
        self.counters.pauses += 1
        if sequence.state in (State.WAITING, State.DECODE, State.STALLED):
            self.move(sequence, Trigger.PAUSE)

    def resume(self, sequence: SequenceState) -> None:
        """Undo ``pause``: it queues again, or becomes a row again as soon as there is room."""
        if not sequence.paused:
            return
        sequence.paused = False
        self.counters.resumes += 1
        if sequence.state is not State.PAUSED:
            return
        if not sequence.slot:
            self.move(sequence, Trigger.RESUME_WAITING)
            self.queue.push(sequence)
        else:
            self.move(sequence, Trigger.RESUME)

    def evict(self, sequence: SequenceState) -> None:
        """Take slot and blocks away; it queues again, to be recomputed, once its steps in flight have landed."""
        self.counters.evictions += 1
        self.move(sequence, Trigger.EVICT)
        self._release(sequence)
        if self.chain.landed_after(sequence.last_step):
            self._requeue(sequence)
        else:
            self._evicting.hold(sequence.last_step, sequence)

    def _requeue(self, sequence: SequenceState) -> None:
        self.slots.end(sequence.slot)
        sequence.slot = 0
        sequence.prefilled = sequence.published_blocks = 0
        sequence.prefix_id = ROOT
        self.move(sequence, Trigger.FENCE_LANDED)
        if sequence.paused:
            self.move(sequence, Trigger.PAUSE)
        else:
            self.queue.push(sequence)

    def fall_short(self, sequence: SequenceState) -> None:
        """A draining sequence needs more steps after all: back to those who wait to be rows, or to the paused."""
        self.move(sequence, Trigger.FELL_SHORT)
        if sequence.paused:
            self.move(sequence, Trigger.PAUSE)

    def landed(self, step: int) -> None:
        """``step`` has landed, and its results were applied: open its fences."""
        for sequence in self._evicting.landed(step):
            if sequence.state is State.EVICTING:
                self._requeue(sequence)
        self.pool.landed(step)
        self.slots.landed(step)
        self.counters.fenced_blocks = self.pool.soon_free

    # ---- admission ----

    @property
    def room_version(self) -> int:
        """Changes whenever an admission that did not fit may fit: a block came back, or somebody paused, who may be
        evicted for it.
        """
        return self.pool.drops + self._paused

    def seat(self, sequence: SequenceState, hits: list[int], fresh: int) -> None:
        """Give a waiting sequence a slot, the cached blocks ``hits`` of its prefix, and ``fresh`` new ones.

        The caller has checked that a slot and the blocks are free (``hits`` count as free while nobody refers to them).
        """
        size = self.config.block_size
        sequence.prefix_id = self.pool.share(hits)
        sequence.slot = slot = self.slots.take()
        sequence.epoch = self.slots.epochs[slot]
        sequence.blocks = hits + self.pool.take(fresh)
        sequence.prefilled = len(hits) * size
        sequence.prefill_target = sequence.landed_tokens
        sequence.published_blocks = len(hits)
        sequence.publish_at = (len(hits) + 1) * size
        self._block_writes.extend((slot, index, block) for index, block in enumerate(sequence.blocks))
        self.move(sequence, Trigger.ADMIT)
        self.counters.admissions += 1
        self.counters.prefix_hit_tokens += sequence.prefilled

    def paused_holders(self) -> list[SequenceState]:
        """Those who are paused and hold a slot and blocks."""
        return [sequence for sequence in self.by_state[State.PAUSED].values() if sequence.slot]

    # ---- reservation ----

    def reservation(self, sequence: SequenceState) -> int:
        """KV entries to hold blocks for: landed + (D+1)*W tokens (law 4), or all it can ever write, if fewer.

        W is the largest width of any step, not that of the step being planned: the D steps behind it run over the same
        blocks, and may be wider. An upper bound of both is ``max_model_len - 2 + W`` entries.
        """
        ahead = (self.config.depth + 1) * self._max_width
        return min(sequence.landed_tokens + ahead, self._most_kv(sequence))

    def reserve(self, sequence: SequenceState) -> bool:
        """Blocks for its ``reservation``, evicting others where that helps.

        False: not now. The sequence itself may then have been evicted.
        """
        wanted = self.blocks_for(self.reservation(sequence)) - len(sequence.blocks)
        while wanted > self.pool.free_count:
            if self.by_state[State.DRAINING] or wanted <= self.pool.free_count + self.pool.soon_free:
                return False
            victim = self._victim()
            self.evict(victim)
            if victim is sequence:
                return False
        if wanted > 0:
            held = len(sequence.blocks)
            sequence.blocks += self.pool.take(wanted)
            self._block_writes.extend((sequence.slot, i, sequence.blocks[i]) for i in range(held, held + wanted))
        self.set_wake(sequence)
        return True

    def _victim(self) -> SequenceState:
        """Who gives up blocks: somebody paused if there is one, else the last in line."""
        holders = self.paused_holders()
        for state in () if holders else (State.PREFILL, State.DECODE, State.STALLED):
            holders.extend(self.by_state[state].values())
        return max(holders, key=lambda sequence: sequence.order)

    def set_wake(self, sequence: SequenceState) -> None:
        """Below ``wake_at`` planned tokens, a step of any width writes into blocks it holds, and cannot be its last."""
        capacity = len(sequence.blocks) * self.config.block_size
        sequence.wake_at = min(capacity + 2 - self._max_width, sequence.max_length)

    def _most_kv(self, sequence: SequenceState) -> int:
        """KV entries that live rows can ever write. The newest token has none yet, so a live row of width W starts at
        most at position max_length - 2, and writes W entries from there.
        """
        return sequence.max_length - 2 + self._max_width

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold ``tokens`` KV entries."""
        return -(-tokens // self.config.block_size)

    def take_block_writes(self) -> tuple[tuple[int, int, int], ...]:
        """(slot, index, block) of every block handed out since the last call, for the plan to carry."""
        writes = tuple(self._block_writes)
        self._block_writes.clear()
        return writes

    # ---- the prefix index ----

    def publish(self, sequence: SequenceState, written: int) -> None:
        """Make its blocks findable that are full with the first ``written`` tokens, whose KV has landed."""
        size = self.config.block_size
        if not self.config.prefix_caching or not sequence.blocks:
            sequence.publish_at = sequence.max_length
            return
        while written >= sequence.publish_at:
            index = sequence.published_blocks
            contents = tuple(sequence.tokens[index * size : (index + 1) * size])
            sequence.prefix_id = self.pool.publish(sequence.blocks[index], sequence.prefix_id, contents)
            sequence.published_blocks += 1
            sequence.publish_at += size

    # ---- accounting ----

    def check(self) -> None:
        """Raise AccountingError unless every block, slot and planned token is accounted for exactly once.

        For tests and debugging.
        """
        holders = [s for s in self.sequences.values() if s.slot and s.state is not State.EVICTING]
        self.slots.check([s.slot for s in holders])
        self.pool.check([block for s in holders for block in s.blocks])
        planned = {id_: [s.landed_tokens, 0] for id_, s in self.sequences.items()}
        for sequence, width in self.chain.tokens_in_flight():
            if self.sequences.get(sequence.request.request_id) is sequence:
                counted = planned[sequence.request.request_id]
                counted[0] += width
                counted[1] += width - 1
        waiting = sum(map(self._tokens_to_wait_for, self.by_state[State.WAITING].values()))
        if waiting != self.waiting_tokens:
            raise AccountingError(f"waiting_tokens is {self.waiting_tokens}, counted {waiting}")
        for id_, sequence in self.sequences.items():
            if planned[id_] != [sequence.planned_tokens, sequence.uncertain_tokens]:
                raise AccountingError(
                    f"request {id_}: (planned, uncertain) tokens are {sequence.planned_tokens}, "
                    f"{sequence.uncertain_tokens}; counted by steps in flight {planned[id_]}"
                )
