"""The ledger: every unfinished request by state, and the pools that it holds a slot and KV blocks from.

Knows: states, slots, blocks, fences, the queue, and what the next plan must report to the device. What a request gets
is in admission.py, reservation.py, prefix.py and session_rules.py: functions over the ledger.
Does not know: which rows make a step (planner.py), results of steps (scheduler.py).
"""

from __future__ import annotations

from itertools import chain

from runtime.schedule.blocks import BlockPool
from runtime.schedule.chain import Chain, advance
from runtime.schedule.config import SchedulerConfig
from runtime.schedule.counters import ScheduleCounters
from runtime.schedule.digest import RollingDigest
from runtime.schedule.fence import Fence
from runtime.schedule.plan import Finished, Notice, SlotCopy, SlotUpdate
from runtime.schedule.queue import WaitingQueue
from runtime.schedule.request import FinishReason
from runtime.schedule.sequence import SequenceState
from runtime.schedule.sharing import PrefixSharing
from runtime.schedule.slots import AccountingError, SlotPool
from runtime.schedule.snapshots import NO_SNAPSHOT, SnapshotPool
from runtime.schedule.states import State, Trigger
from runtime.schedule.tables import TablePlaces
from runtime.schedule.window_pool import WindowPool

LANES = 3  # classes of the waiting queue, with mixed steps
LONG_LANE, SCORED_LANE = 1, 2
_IN_LINE = (State.WAITING, State.JOINING)


class Ledger:
    """``sequences`` holds every unfinished request by id, ``by_state`` the same by state, in the order they entered it.

    ``pool`` holds the blocks of layers that attend to all tokens, ``windows`` those of each group with a window.
    ``chain`` holds the steps in flight, which fences wait for. ``digest`` and ``counters`` are the scheduler's: every
    part folds and counts its own decisions. ``decode_version`` changes whenever a request enters or leaves DECODE.
    ``sessions``: sessions by id. ``news``: session notifications, and sessions that were closed for lack of room, since
    the last drain. ``fenced``: the steps after whose landing something is released.
    ``evicted_sessions``: used up their token quota before their fence opened; not yet reported as parked.
    ``waiting_tokens``: known tokens of requests in WAITING, at most ``long_prompt`` each with mixed steps.
    ``asleep_for``: tokens that may be planned for every decode row before one of them reaches its ``wake_at``; 0 or
    less: not computed. The planner computes it; any row that comes or goes, or a new ``wake_at``, resets it.
    ``idled``: how often a request became PAUSED or PARKED. ``prompt_blocks``: blocks that prompts have published.
    ``constrained``: unfinished requests whose grammar the host reads; ``tables``: of those that the device reads.

    For the next plan: ``block_writes`` (slot, index, block) by (slot, index), ``slot_updates`` by slot, ``copies`` by
    slot with the sequence of the copy. For the plan being made: ``saving``, by request the snapshot that it writes.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config, self.limits = config, config.limits
        keeps = config.snapshots if config.prefix_caching else None
        self.snapshots = None if keeps is None else SnapshotPool(keeps.count)
        self.fenced: set[int] = set()
        self.pool = BlockPool(config.blocks, config.limits.block_size, self.snapshots, self.fenced)
        self.windows = [WindowPool(window, count, config.limits, self.fenced) for window, count in config.windows]
        self.slots = SlotPool(config.limits.slots, self.fenced)
        self.queue = WaitingQueue() if config.mixed is None else WaitingQueue(LANES, self._lane)
        self.chain = Chain(config.limits.depth)
        self.tables = TablePlaces(self.chain.landed_after)
        self.digest = RollingDigest()
        self.digest.fold(0, "depth", (config.limits.depth, config.horizon))
        if config.mixed is not None:
            self.digest.fold(0, "mixed", config.mixed.numbers)
        if config.max_sessions:
            self.digest.fold(0, "sessions", (config.max_sessions, *config.session_policy.encode()))
        if config.speculation is not None:
            self.digest.fold(0, "speculation", config.speculation.numbers)
        if keeps is not None:
            self.digest.fold(0, "snapshots", keeps.numbers)
        if config.windows:
            self.digest.fold(0, "windows", tuple(chain.from_iterable(config.windows)))
        self.counters = ScheduleCounters()
        self.sharing = PrefixSharing(config, self.pool, self.windows, self.counters)
        self.sequences: dict[int, SequenceState] = {}
        self.by_state: dict[State, dict[int, SequenceState]] = {state: {} for state in State}
        self.sessions: dict[int, SequenceState] = {}
        self.news: list[Notice | Finished] = []
        self.evicted_sessions: list[SequenceState] = []
        self.decode_version = self.waiting_tokens = self.asleep_for = 0
        self.arrivals = self.idled = self.prompt_blocks = self.constrained = 0
        self.block_writes: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.slot_updates: dict[int, SlotUpdate] = {}
        self.copies: dict[int, tuple[SlotCopy, SequenceState]] = {}
        self.saving: dict[int, int] = {}
        self._evicting: Fence[SequenceState] = Fence(self.fenced)
        self._requeued = 0  # waiting requests that held a slot before

    # ---- the queue ----

    def _lane(self, sequence: SequenceState) -> int:
        """Queue class: scored prompts and long ones wait apart, since others may pass them."""
        if sequence.scoring:
            return SCORED_LANE
        assert self.config.mixed is not None
        return LONG_LANE if sequence.landed_tokens > self.config.mixed.long_prompt else 0

    def _tokens_to_wait_for(self, sequence: SequenceState) -> int:
        """Does not change while it waits: only steps in flight could add tokens, and it has none."""
        if sequence.expects_fork:
            return 0
        mixed = self.config.mixed
        return sequence.landed_tokens if mixed is None else min(sequence.landed_tokens, mixed.long_prompt)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self.by_state[State.WAITING])

    @property
    def waiting_arrivals(self) -> int:
        """Requests that wait for their first slot; evicted ones do not count against ``max_waiting``."""
        return len(self.by_state[State.WAITING]) + len(self.by_state[State.JOINING]) - self._requeued

    def queue_up(self, sequence: SequenceState) -> None:
        """A new request joins the queue."""
        self.arrivals += 1
        self.sequences[sequence.request.request_id] = sequence
        self.constrained += sequence.constrained
        self.by_state[State.WAITING][sequence.request.request_id] = sequence
        self.waiting_tokens += self._tokens_to_wait_for(sequence)
        self.queue.push(sequence)

    # ---- states ----

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
            self.asleep_for = 0
        if before is State.JOINING:
            sequence.joins = None
        if before is State.PREFILL:
            self.sharing.left(sequence)
            if trigger is not Trigger.PROMPT_PLANNED:
                self.leave_out(sequence)
        if sequence.seated_before:
            self._requeued += (sequence.state in _IN_LINE) - (before in _IN_LINE)
        if sequence.state in (State.PAUSED, State.PARKED):
            self.idled += 1

    def joining(self, prompt: SequenceState) -> list[SequenceState]:
        """The answers that wait for the end of this prompt, in the order of the line."""
        return [answer for answer in prompt.answers if answer.joins is prompt]

    def leave_out(self, prompt: SequenceState) -> None:
        """Answers still joining return to their places in the queue and compute the rest themselves."""
        for answer in self.joining(prompt):
            answer.expects_fork = False
            self.move(answer, Trigger.LEFT_OUT)
            self.queue.push(answer)

    def pause(self, sequence: SequenceState) -> None:
        """Take it out of the plans. While its prompt is planned, or its steps drain, this takes effect afterwards.

        No effect on a session, which is paused by not being continued.
        """
        if sequence.paused or sequence.session is not None:
            return
        sequence.paused = True
        self.counters.pauses += 1
        if sequence.state in (State.WAITING, State.JOINING, State.DECODE, State.STALLED):
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

    def fall_short(self, sequence: SequenceState) -> None:
        """A draining sequence needs more steps after all: it waits to be a row again, or is paused."""
        self.move(sequence, Trigger.FELL_SHORT)
        if sequence.paused:
            self.move(sequence, Trigger.PAUSE)

    # ---- what a request gives back ----

    def end(self, sequence: SequenceState, reason: FinishReason, detail: str = "") -> Finished:
        """End it now; slot and blocks return to the pools when its fence has landed."""
        if sequence.state is State.EVICTING:
            self.end_slot(sequence)
        elif sequence.slot:
            if reason is not FinishReason.ERROR:
                self.publish_landed(sequence)
            self.slots.end(sequence.slot)
            self.release(sequence)
        self.move(sequence, Trigger.END)
        del self.by_state[State.ENDED][sequence.request.request_id]
        del self.sequences[sequence.request.request_id]
        self.constrained -= sequence.constrained
        self.sessions.pop(sequence.request.request_id, None)
        if sequence.answers:
            sequence.answers.remove(sequence)
        self.counters.finished[reason.label] += 1
        self.digest.fold(self.chain.step, "end", (sequence.request.request_id, int(reason), sequence.landed_tokens))
        rounds, accepted = sequence.rounds, sequence.accepted
        return Finished(sequence.request.request_id, reason, sequence.generated, detail, rounds, accepted)

    def give_up(self, sequence: SequenceState) -> None:
        """It loses slot and blocks, and queues again, to be recomputed, once its steps in flight have landed."""
        self.move(sequence, Trigger.EVICT)
        self.release(sequence)
        if self.chain.landed_after(sequence.last_step):
            self._requeue(sequence)
        else:
            self._evicting.hold(sequence.last_step, sequence)

    def release(self, sequence: SequenceState) -> None:
        """Return slot and blocks when the last step that may touch them has landed."""
        self.unpin(sequence)
        step = sequence.last_step
        if sequence.table is not None:
            self.tables.give_back(sequence.table, step)
            sequence.table = None
            self.constrained += 1
        if step != self.chain.step:  # else it is a row of the plan being made, and needs them
            for cell in [cell for cell in self.block_writes if cell[0] == sequence.slot]:
                del self.block_writes[cell]
            self.slot_updates.pop(sequence.slot, None)
        landed = self.chain.landed_after(step)
        if landed:
            self.pool.give_back(sequence.blocks)
            self.slots.give_back(sequence.slot)
        else:
            self.pool.retire_after(step, sequence.blocks)
            self.slots.retire_after(step, sequence.slot)
        sequence.blocks, sequence.given_up = [], sequence.blocks
        for pool, pages in zip(self.windows, sequence.windows, strict=True):
            if landed:
                pool.give_back(pages.blocks)
            else:
                pool.retire_after(step, pages.blocks)
            pages.promised, pages.blocks, pages.given_up = 0, [], pages.blocks
            pool.charge(pages)

    def end_slot(self, sequence: SequenceState) -> None:
        """Its rows in flight are ghosts from now on."""
        if not sequence.slot_ended:
            sequence.slot_ended = True
            self.slots.end(sequence.slot)

    def _requeue(self, sequence: SequenceState) -> None:
        self.end_slot(sequence)
        sequence.slot = sequence.prefilled = sequence.published_blocks = 0
        sequence.prefix_id = sequence.root
        sequence.private = sequence.borrowed = False
        self.move(sequence, Trigger.FENCE_LANDED)
        session = sequence.session
        if session is not None:
            session.revive = session.extends = False
            if session.over is not None:
                self.move(sequence, Trigger.PARK)
                if not session.parked_at:
                    self.evicted_sessions.append(sequence)
                return
            sequence.max_length = session.wanted_length
        if sequence.paused:
            self.move(sequence, Trigger.PAUSE)
        else:
            self.queue.push(sequence)

    def landed(self, step: int) -> None:
        """``step`` has landed, and its results were applied: open its fences. To be called if it is ``fenced``."""
        self.fenced.discard(step)
        for sequence in self._evicting.landed(step):
            if sequence.state is State.EVICTING:
                self._requeue(sequence)
        self.pool.landed(step)
        for pool in self.windows:
            pool.landed(step)
        self.slots.landed(step)

    def unpin(self, sequence: SequenceState) -> None:
        """It does not start from its snapshot any more, or the plan being made restores it."""
        if sequence.restores and self.snapshots is not None:
            self.snapshots.unpin(sequence.restores)
        sequence.restores = NO_SNAPSHOT

    # ---- what others find ----

    def publish(self, sequence: SequenceState, written: int) -> None:
        """Make its blocks findable that are full with the first ``written`` tokens."""
        size = self.limits.block_size
        if not self.config.prefix_caching or not sequence.blocks or sequence.private:
            return
        while written >= (sequence.published_blocks + 1) * size:
            index = sequence.published_blocks
            block = sequence.blocks[index]
            saved = NO_SNAPSHOT
            if self.saving and (index + 1) * size == sequence.prefilled:
                saved = self.saving.pop(sequence.request.request_id, NO_SNAPSHOT)
            sequence.prefix_id = self.pool.publish(block, sequence.prefix_id, sequence.tokens, index, snapshot=saved)
            for pool, pages in zip(self.windows, sequence.windows, strict=True):
                for page in pages.within(index, index + 1):
                    pool.enter(page, sequence.prefix_id)
            sequence.published_blocks += 1

    def publish_landed(self, sequence: SequenceState) -> None:
        """Publish blocks filled after its prompt, as far as its tokens have landed."""
        if sequence.trusted:
            begun = sequence.published_blocks
            self.publish(sequence, sequence.landed_tokens - 1)  # the KV of the newest token is not written yet
            self.pool.trust(sequence.blocks[begun : sequence.published_blocks])
            for pool, pages in zip(self.windows, sequence.windows, strict=True):
                pool.trust(pages.within(begun, sequence.published_blocks))

    # ---- for the next plan ----

    def write_blocks(self, sequence: SequenceState, first: int, end: int | None = None) -> None:
        """Queue device table writes of its blocks [first, end), by default of all from ``first`` on."""
        slot = sequence.slot
        for index, block in enumerate(sequence.blocks[first:end], first):
            self.block_writes[slot, index] = slot, index, block
        if sequence.windows:
            self.write_windows(sequence, first, end)

    def write_windows(self, sequence: SequenceState, first: int, end: int | None = None) -> None:
        """The same in the tables of groups with a window, which lie after that of all tokens: pages held of these."""
        slot = sequence.slot
        for group, pages in enumerate(sequence.windows, 1):
            begin = group * self.limits.max_blocks + max(first, pages.first)
            for index, block in enumerate(pages.within(first, pages.end if end is None else end), begin):
                self.block_writes[slot, index] = slot, index, block

    def update_slot(self, sequence: SequenceState, *, revive: bool) -> None:
        """Queue a device update of its end."""
        self.slot_updates[sequence.slot] = SlotUpdate(sequence.slot, sequence.max_length, revive)

    def drop_slot_update(self, sequence: SequenceState) -> None:
        """Its slot is written whole. The update of a quota that a stop id ended may be queued if no plan came since."""
        self.slot_updates.pop(sequence.slot, None)

    def wanted_copies(self) -> list[tuple[SlotCopy, SequenceState]]:
        """Slot copies of the plan being made: all but those of sequences that ended in the turn that made them."""
        return [(copy, s) for copy, s in self.copies.values() if self.slots.epochs[copy.slot] == s.epoch]

    def take_copies(self) -> list[tuple[SlotCopy, SequenceState]]:
        """Copies for the plan, with their sequences. Their slots are written whole, so updates are dropped."""
        taken = self.wanted_copies()
        self.copies.clear()
        for _, copied in taken:
            self.drop_slot_update(copied)
        return taken

    # ---- accounting ----

    def check(self) -> None:
        """Raise AccountingError unless every block, slot and planned token is accounted for exactly once.

        For tests and debugging.
        """
        holders = [s for s in self.sequences.values() if s.slot and s.state is not State.EVICTING]
        self.slots.check([s.slot for s in holders])
        self.pool.check([block for s in holders for block in s.blocks])
        for number, pool in enumerate(self.windows):
            held = [s.windows[number] for s in holders]
            pool.check([block for pages in held for block in pages.blocks])
            pool.check_charges(held)
        roots: dict[int, int] = {}
        for s in holders:
            if any(roots.setdefault(block, s.root) != s.root for block in s.blocks):
                raise AccountingError(f"request {s.request.request_id} shares a block with one of another cache_salt")
        if self.snapshots is not None:
            findable = [block for block in range(1, self.config.blocks + 1) if self.pool.findable(block)]
            self.snapshots.check([s.restores for s in self.sequences.values() if s.restores], findable)
        planned = {id_: [s.landed_tokens, 0] for id_, s in self.sequences.items()}
        for sequence, width in self.chain.tokens_in_flight():
            if self.sequences.get(sequence.request.request_id) is sequence and not sequence.slot_ended:
                counted = planned[sequence.request.request_id]
                counted[0] += width
                counted[1] += width - 1
        waiting = sum(map(self._tokens_to_wait_for, self.by_state[State.WAITING].values()))
        if waiting != self.waiting_tokens:
            raise AccountingError(f"waiting_tokens is {self.waiting_tokens}, counted {waiting}")
        rows = self.by_state[State.DECODE].values()
        if 0 < self.asleep_for > min((s.wake_at - s.planned_tokens for s in rows), default=self.asleep_for):
            raise AccountingError(f"asleep_for is {self.asleep_for}, but a row is to be looked at before that")
        for id_, sequence in self.sequences.items():
            if planned[id_] != [sequence.planned_tokens, sequence.uncertain_tokens]:
                raise AccountingError(
                    f"request {id_}: (planned, uncertain) tokens are {sequence.planned_tokens}, "
                    f"{sequence.uncertain_tokens}; counted by steps in flight {planned[id_]}"
                )
