"""Resources: every unfinished request by state, and the pools it holds slots and KV blocks from.

Knows: states, slots, blocks, fences, the queue; how a request arrives, is admitted, grows, pauses, is evicted, ends.
Does not know: which rows make a step (planner.py), results of steps (scheduler.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from runtime.schedule.blocks import BlockPool, root_of
from runtime.schedule.chain import Chain, advance
from runtime.schedule.config import SchedulerConfig
from runtime.schedule.counters import ScheduleCounters
from runtime.schedule.digest import RollingDigest
from runtime.schedule.fence import Fence
from runtime.schedule.plan import Evicted, Finished, Fork, Notice, SlotCopy, SlotUpdate, StepPlan
from runtime.schedule.queue import WaitingQueue
from runtime.schedule.request import FinishReason, Request
from runtime.schedule.sequence import NOT_WAITING, SequenceState, Session
from runtime.schedule.sharing import PrefixSharing
from runtime.schedule.slots import AccountingError, SlotPool
from runtime.schedule.snapshots import NO_SNAPSHOT, SnapshotPool
from runtime.schedule.states import State, Trigger

LANES = 3  # of the waiting queue, with mixed steps
LONG_LANE, SCORED_LANE = 1, 2
_TOGETHER = 32  # rows that are given a block in one step: some 50 us of the host's time
_IN_LINE = (State.WAITING, State.JOINING)


class Resources:
    """``sequences`` holds every unfinished request by id, ``by_state`` the same by state, in the order they entered it.

    ``chain`` holds the steps in flight, which fences wait for. ``digest`` and ``counters`` are the scheduler's: every
    part folds and counts its own decisions. ``decode_version`` changes whenever a request enters or leaves DECODE.
    ``sessions``: sessions by id. ``notices``, ``closed``: session notifications since the last drain.
    ``evicted_sessions``: used up their token quota before their fence opened; not yet reported as parked.
    ``waiting_tokens``: known tokens of requests in WAITING, at most ``long_prompt`` each with mixed steps.
    ``asleep_for``: tokens that may be planned for every decode row before one of them reaches its ``wake_at``; 0 or
    less: not computed. The planner computes it; any row that comes or goes, or a new ``wake_at``, resets it.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config, self.limits = config, config.limits
        keeps = config.snapshots if config.prefix_caching else None
        self.snapshots = None if keeps is None else SnapshotPool(keeps.count)
        self.pool = BlockPool(config.blocks, config.limits.block_size, self.snapshots)
        self.slots = SlotPool(config.limits.slots)
        self.queue = WaitingQueue() if config.mixed is None else WaitingQueue(LANES, self._lane)
        self.chain = Chain(config.limits.depth)
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
        self.counters = ScheduleCounters()
        self.sharing = PrefixSharing(config, self.pool, self.counters)
        self.sequences: dict[int, SequenceState] = {}
        self.by_state: dict[State, dict[int, SequenceState]] = {state: {} for state in State}
        self.sessions: dict[int, SequenceState] = {}
        self.notices: list[Notice] = []
        self.closed: list[Finished] = []
        self.evicted_sessions: list[SequenceState] = []
        self.decode_version = 0
        self.waiting_tokens = 0
        self.asleep_for = 0
        self._spread = max(1, (config.limits.block_size - 4) // 2)
        self._evicting: Fence[SequenceState] = Fence()
        self._arrivals = 0
        self._requeued = 0  # waiting requests that held a slot before
        self.idled = 0  # times that a request became PAUSED or PARKED
        self._prompt_blocks = 0  # that prompts have made findable so far
        # (slot, index) -> (slot, index, block), for the next step
        self._block_writes: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._slot_updates: dict[int, SlotUpdate] = {}  # by slot, for the next step
        self._copies: dict[int, tuple[SlotCopy, SequenceState]] = {}  # by slot, and whose it is; for the next step
        self._saving: dict[int, int] = {}  # by request, the snapshot that the plan being made writes

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

    # ---- arrival and end ----

    def arrive(self, request: Request, quantum: int = 0, *, keep: bool = False) -> tuple[Finished, ...]:
        """Queue a request. Returns the end of its answers if it is refused: it can never run, the queue is full."""
        prompt, sampling, config = request.prompt_token_ids, request.sampling, self.config
        most_tokens = self.limits.max_model_len
        shape = (request.request_id, sampling.n, len(prompt), request.priority, sampling.max_tokens)
        self.digest.fold(self.chain.step, "arrive", shape)
        if sampling.cache_salt:
            self.digest.fold(self.chain.step, "salt", (root_of(sampling.cache_salt),))
        if quantum:
            self.digest.fold(self.chain.step, "session", (quantum, keep))
        if in_use := [id_ for id_ in request.answer_ids if id_ in self.sequences]:
            return self._reject(request, f"request id {in_use[0]} is in use")
        if not prompt or sampling.max_tokens < 1:
            return self._reject(request, "needs at least one prompt token and max_tokens >= 1")
        if len(prompt) >= most_tokens:
            return self._reject(request, f"prompt has {len(prompt)} tokens, max_model_len is {most_tokens}")
        waiting = self.waiting_arrivals
        if waiting >= config.max_waiting:
            return self._reject(request, f"{waiting} requests are waiting, max_waiting is {config.max_waiting}")
        max_length = min(len(prompt) + sampling.max_tokens, most_tokens)
        if (needed := self.blocks_for(self._most_kv(max_length))) > config.blocks:
            return self._reject(
                request,
                f"{len(prompt)} prompt + {max_length - len(prompt)} new tokens need {needed} blocks of "
                f"{self.limits.block_size}, the pool has {config.blocks}",
            )
        if quantum and (why := self._session_arrival_refusal(request, quantum, max_length)) is not None:
            return self._reject(request, why)
        sequences = [
            SequenceState(answer, self._arrivals + i, max_length) for i, answer in enumerate(request.answers())
        ]
        if quantum:
            first = min(len(prompt) + quantum, max_length)
            sequences[0].session = Session(max_length, first, keep, sampling.min_tokens)
            sequences[0].max_length = first
            self.sessions[request.request_id] = sequences[0]
        for i, sequence in enumerate(sequences):
            if len(sequences) > 1:
                sequence.answers, sequence.expects_fork = sequences, i > 0
            self._queue_up(sequence)
        return ()

    def _session_arrival_refusal(self, request: Request, quantum: int, max_length: int) -> str | None:
        if quantum < 1 or request.sampling.n > 1:
            return f"a session has a quantum of 1 or more, and one answer; not {quantum}, and {request.sampling.n}"
        return self.session_refusal(max_length)

    def session_refusal(self, budget_length: int, beside: SequenceState | None = None) -> str | None:
        """Why no new session of so many tokens, or no longer budget of the existing session ``beside``, is possible.

        Closes the oldest parked session if the policy says so and that makes room.
        """
        config = self.config
        needed = self.blocks_for(self._most_kv(budget_length))
        if needed > config.blocks:
            size = self.limits.block_size
            return f"{budget_length} tokens need {needed} blocks of {size}, the pool has {config.blocks}"
        if beside is None and len(self.sessions) >= config.max_sessions:
            oldest = self._oldest_parked(self.by_state[State.PARKED].values())
            if config.session_policy != "close" or oldest is None:
                return f"there are {len(self.sessions)} sessions, max_sessions is {config.max_sessions}: close one"
            self._close(oldest, f"closed: {len(self.sessions)} sessions are open, and another one begins")
        if config.session_policy == "refuse":
            others = [other.session for other in self.sessions.values() if other is not beside and other.session]
            promised = sum(self.blocks_for(self._most_kv(session.budget_length)) for session in others)
            if promised + needed > config.blocks:
                return (
                    f"its {budget_length} tokens need {needed} blocks, and {promised} of {config.blocks} are promised "
                    "to other sessions: close one"
                )
        return None

    @staticmethod
    def _oldest_parked(parked: Iterable[SequenceState]) -> SequenceState | None:
        return min(parked, key=lambda sequence: sequence.session.parked_at if sequence.session else 0, default=None)

    def _close(self, parked: SequenceState, why: str) -> None:
        """End a parked session for want of room."""
        self.counters.session_closes += 1
        self.closed.append(self.end(parked, FinishReason.CANCELLED, why))

    def copy_of(self, parent: SequenceState, request_id: int) -> SequenceState:
        """Another sequence with the tokens of ``parent``, WAITING; the caller parks it before the next plan."""
        copied = SequenceState(replace(parent.request, request_id=request_id), self._arrivals, parent.max_length)
        copied.tokens = array("i", parent.tokens)
        copied.planned_tokens, copied.score_at = copied.landed_tokens, len(parent.request.prompt_token_ids)
        self._queue_up(copied)
        return copied

    def seat_copy(self, parent: SequenceState, copied: SequenceState) -> bool:
        """Give ``copied``, which has the tokens of the parked ``parent``, a slot with all that the parent's holds.

        The next plan carries the copy, which comes before anything else of its step. So either may release everything
        at once, and the next owner writes later. False if the parent holds nothing or was closed for this one, or if no
        slot, or no block for the end of its KV, is free that no copy of the same step reads.
        """
        written = parent.landed_tokens - 1  # the newest token has no KV yet
        full, rest = divmod(written, self.limits.block_size)
        if parent.state is not State.PARKED or not parent.slot:
            return False
        if not self.slots.free_count or (rest and not self.pool.free_count):
            return False
        slot, fresh, shared = self.slots.take(), self.pool.take(1 if rest else 0), parent.blocks[:full]
        if self._is_read(slot, fresh):
            self.slots.give_back(slot)
            self.pool.give_back(fresh)
            return False
        copied.seated(slot, self.slots.epochs[slot])
        copied.prefill_begun = copied.resumes = True
        copied.prefilled = written
        self.pool.share(shared)
        copied.blocks = shared + fresh
        copied.published_blocks, copied.prefix_id = parent.published_blocks, parent.prefix_id
        copied.publish_at, copied.state_at = parent.publish_at, parent.state_at
        copied.trusted, copied.borrowed, copied.private = parent.trusted, parent.borrowed, parent.private
        self._write_blocks(copied, 0)
        source, pair = parent.slot, (parent.blocks[full], copied.blocks[full]) if rest else None
        if parent.slot in self._copies:  # it is copied in the same step itself
            first, _ = self._copies[parent.slot]
            source = first.source
            pair = (first.copied[0], pair[1]) if pair and first.copied else pair
        self._copies[slot] = SlotCopy(source, slot, pair), copied
        self.counters.admissions += 1
        return True

    def _is_read(self, slot: int, blocks: list[int]) -> bool:
        """Whether a copy of the plan being made, whose source has ended meanwhile, reads any of these."""
        copies = [copy for copy, _ in self._copies.values()]
        return any(copy.source == slot or (copy.copied and copy.copied[0] in blocks) for copy in copies)

    @property
    def copies_wait(self) -> bool:
        """Whether the plan that is being made has slots to copy."""
        return bool(self._wanted_copies())

    def take_copies(self) -> list[tuple[SlotCopy, SequenceState]]:
        """Copies for the plan, with their sequences. Their slots are written whole, so updates are dropped."""
        taken = self._wanted_copies()
        self._copies.clear()
        for _, copied in taken:
            self.drop_slot_update(copied)
        return taken

    def _wanted_copies(self) -> list[tuple[SlotCopy, SequenceState]]:
        """All but those of sequences that ended in the turn that made them."""
        return [(copy, s) for copy, s in self._copies.values() if self.slots.epochs[copy.slot] == s.epoch]

    def _queue_up(self, sequence: SequenceState) -> None:
        self._arrivals += 1
        self.sequences[sequence.request.request_id] = sequence
        self.by_state[State.WAITING][sequence.request.request_id] = sequence
        self.waiting_tokens += self._tokens_to_wait_for(sequence)
        self.queue.push(sequence)

    @property
    def waiting_arrivals(self) -> int:
        """Requests that wait for their first slot; evicted ones do not count against ``max_waiting``."""
        return len(self.by_state[State.WAITING]) + len(self.by_state[State.JOINING]) - self._requeued

    def _reject(self, request: Request, detail: str) -> tuple[Finished, ...]:
        self.counters.finished[FinishReason.REJECTED.label] += request.sampling.n
        return tuple(Finished(answer_id, FinishReason.REJECTED, (), detail) for answer_id in request.answer_ids)

    def end(self, sequence: SequenceState, reason: FinishReason, detail: str = "") -> Finished:
        """End it now; slot and blocks return to the pools when its fence has landed."""
        if sequence.state is State.EVICTING:
            self._end_slot(sequence)
        elif sequence.slot:
            if reason is not FinishReason.ERROR:
                self._publish_landed(sequence)
            self.slots.end(sequence.slot)
            self._release(sequence)
        self.move(sequence, Trigger.END)
        del self.by_state[State.ENDED][sequence.request.request_id]
        del self.sequences[sequence.request.request_id]
        self.sessions.pop(sequence.request.request_id, None)
        if sequence.answers:
            sequence.answers.remove(sequence)
        self.counters.finished[reason.label] += 1
        self.digest.fold(self.chain.step, "end", (sequence.request.request_id, int(reason), sequence.landed_tokens))
        rounds, accepted = sequence.rounds, sequence.accepted
        return Finished(sequence.request.request_id, reason, sequence.generated, detail, rounds, accepted)

    def _release(self, sequence: SequenceState) -> None:
        """Return slot and blocks when the last step that may touch them has landed."""
        self._unpin(sequence)
        step = sequence.last_step
        if step != self.chain.step:  # else it is a row of the plan being made, and needs them
            for cell in [cell for cell in self._block_writes if cell[0] == sequence.slot]:
                del self._block_writes[cell]
            self._slot_updates.pop(sequence.slot, None)
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

    # ---- pause, resume, evict ----

    def pause(self, sequence: SequenceState) -> None:
        """Take it out of the plans. While its prompt is planned, or its steps drain, this takes effect afterwards.

        Not so with a session, which is paused by not being continued.
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

    def evict(self, sequence: SequenceState) -> None:
        """Take slot and blocks away; it queues again, to be recomputed, once its steps in flight have landed."""
        self.counters.evictions += 1
        parked = sequence.state is State.PARKED
        if parked and self.config.session_policy == "close":
            self.counters.evictions -= 1
            self._close(sequence, "closed: memory is short, and it was parked for longest")
            return
        self._publish_landed(sequence)
        self._give_up(sequence)
        if parked:
            self.counters.session_evictions += 1
            self.notices.append(Evicted(sequence.request.request_id, sequence.landed_tokens))

    def _give_up(self, sequence: SequenceState) -> None:
        self.move(sequence, Trigger.EVICT)
        self._release(sequence)
        if self.chain.landed_after(sequence.last_step):
            self._requeue(sequence)
        else:
            self._evicting.hold(sequence.last_step, sequence)

    def _end_slot(self, sequence: SequenceState) -> None:
        """Its rows in flight are ghosts from now on."""
        if not sequence.slot_ended:
            sequence.slot_ended = True
            self.slots.end(sequence.slot)

    def _requeue(self, sequence: SequenceState) -> None:
        self._end_slot(sequence)
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
        """Changes whenever an admission that did not fit may fit: a block came back, a prompt's block was published, or
        a request paused or parked, which may be evicted for it.
        """
        return self.pool.drops + self._prompt_blocks + self.idled

    def seat(self, sequence: SequenceState, hits: list[int], fresh: int) -> None:
        """Give a waiting sequence a slot, the cached blocks ``hits`` of its prefix, and ``fresh`` new ones.

        The caller has checked that a slot and the blocks are free (unreferenced ``hits`` count as free).
        """
        slot = self.slots.take()
        self.move(sequence, Trigger.ADMIT)
        sequence.seated(slot, self.slots.epochs[slot])
        self._share(sequence, hits)
        sequence.blocks += self.pool.take(fresh)
        self._write_blocks(sequence, 0)
        self.counters.admissions += 1
        self.count_query(sequence, sequence.landed_tokens)
        if sequence.answers and sequence.untouched:
            self._let_others_join(sequence)

    def count_query(self, sequence: SequenceState, tokens: int) -> None:
        """Count a lookup of so many of its tokens in the prefix index."""
        if self.sharing.looks_up(sequence):
            self.counters.prefix_query_tokens += tokens

    # ---- forks ----

    def _let_others_join(self, prompt: SequenceState) -> None:
        """The other answers leave the queue and wait for the end of this prompt: as many as there may be rows for."""
        waiting = (answer for answer in prompt.answers if answer.state is State.WAITING and answer.untouched)
        others = [answer for answer in waiting if not (answer.scoring or answer.alone)]
        for answer in others[: self.limits.rows - 1]:
            self.move(answer, Trigger.JOIN)
            answer.joins = prompt

    def joining(self, prompt: SequenceState) -> list[SequenceState]:
        """The answers that wait for the end of this prompt, in the order of the line."""
        return [answer for answer in prompt.answers if answer.joins is prompt]

    @property
    def kept_rows(self) -> int:
        """Rows reserved for joining answers, which are before the queue in line.

        None for answers to a long prompt, which shorter ones may pass.
        """
        joining, mixed = self.by_state[State.JOINING], self.config.mixed
        if mixed is None:
            return len(joining)
        return sum(answer.landed_tokens <= mixed.long_prompt for answer in joining.values())

    def blocks_to_fork(self, answer: SequenceState) -> int:
        """Unshared blocks that it starts with: it shares those that its prompt fills."""
        return self.blocks_for(self.reservation(answer)) - answer.landed_tokens // self.limits.block_size

    def fork(self, prompt: SequenceState, answer: SequenceState, chunk: int) -> Fork:
        """Admit ``answer`` at the last chunk of ``prompt``, chunk number ``chunk`` of the plan being made.

        The caller has checked that a slot and ``blocks_to_fork`` are free. Both have the same prompt; none of either's
        tokens is generated.
        """
        slot = self.slots.take()
        self.move(answer, Trigger.FORK)
        answer.seated(slot, self.slots.epochs[slot])
        answer.prefill_begun, answer.prefilled = True, answer.prefill_target
        full, rest = divmod(answer.landed_tokens, self.limits.block_size)
        fresh = self.blocks_to_fork(answer)
        shared = prompt.blocks[:full]
        self.pool.share(shared)
        answer.blocks = shared + self.pool.take(fresh)
        answer.borrowed = True  # no token has been sampled over the end of this prompt yet
        self._write_blocks(answer, 0)
        answer.planned_tokens = answer.landed_tokens + 1
        answer.last_step = self.chain.step
        self.set_wake(answer)
        self.counters.admissions += 1
        self.counters.forks += 1
        self.counters.forked_tokens += answer.landed_tokens
        return Fork(slot, chunk, (prompt.blocks[full], answer.blocks[full]) if rest else None)

    def leave_out(self, prompt: SequenceState) -> None:
        """Answers still joining go back to their places in the queue and compute the rest themselves."""
        for answer in self.joining(prompt):
            answer.expects_fork = False
            self.move(answer, Trigger.LEFT_OUT)
            self.queue.push(answer)

    def _share(self, sequence: SequenceState, found: list[int]) -> None:
        """``found`` become its blocks after those it has published; the caller releases what it held in their place."""
        if not found:
            return
        sequence.borrowed = sequence.borrowed or bool(self.pool.untrusted(found))
        first, last = sequence.published_blocks, sequence.published_blocks + len(found)
        sequence.prefix_id = self.pool.share(found)
        sequence.blocks[first:last] = found
        sequence.published_blocks = last
        if self.snapshots is not None:
            self._unpin(sequence)
            sequence.restores, sequence.state_at = self.snapshots.pin(found[-1]), last * self.limits.block_size
        self.counters.prefix_hit_tokens += last * self.limits.block_size - sequence.prefilled
        sequence.prefilled = last * self.limits.block_size
        sequence.waits_since = NOT_WAITING

    def look_again(self, sequence: SequenceState) -> None:
        """During prefill: replace blocks that it was going to write by blocks published meanwhile."""
        found = self.sharing.found_since(sequence)
        if not found:
            return
        first = sequence.published_blocks
        own = sequence.blocks[first : first + len(found)]
        begun = int(sequence.prefilled > first * self.limits.block_size)  # steps in flight may write into its first
        self._share(sequence, found)
        self.pool.give_back(own[begun:])
        if self.chain.landed_after(sequence.last_step):
            self.pool.give_back(own[:begun])
        else:
            self.pool.retire_after(sequence.last_step, own[:begun])
        self._write_blocks(sequence, first, first + len(found))

    # ---- recurrent state ----

    def _unpin(self, sequence: SequenceState) -> None:
        if sequence.restores and self.snapshots is not None:
            self.snapshots.unpin(sequence.restores)
        sequence.restores = NO_SNAPSHOT

    def take_restored(self, sequence: SequenceState) -> int:
        """The snapshot to restore before the chunk being cut, or NO_SNAPSHOT."""
        row = sequence.restores
        self._unpin(sequence)
        self.counters.snapshot_restores += row != NO_SNAPSHOT
        return row

    def save(self, sequence: SequenceState, end: int) -> int:
        """A snapshot row for its state after the chunk being cut, which ends at ``end``; NO_SNAPSHOT if none is due or
        all are about to be read.
        """
        if self.snapshots is None or not self.sharing.leaves_snapshot(sequence, end):
            return NO_SNAPSHOT
        row = self.snapshots.take()
        self.counters.snapshot_evictions = self.snapshots.evictions
        if row:
            self._saving[sequence.request.request_id] = row
            sequence.state_at = end
            self.counters.snapshot_saves += 1
        return row

    def _write_blocks(self, sequence: SequenceState, first: int, end: int | None = None) -> None:
        """Queue device table writes of its blocks [first, end), by default of all from ``first`` on."""
        slot = sequence.slot
        for index, block in enumerate(sequence.blocks[first:end], first):
            self._block_writes[slot, index] = slot, index, block

    def update_slot(self, sequence: SequenceState, *, revive: bool) -> None:
        """Queue a device update of its end."""
        self._slot_updates[sequence.slot] = SlotUpdate(sequence.slot, sequence.max_length, revive)

    def drop_slot_update(self, sequence: SequenceState) -> None:
        """Its slot is written whole. An update may still be queued, of a quota that a stop id ended, if no plan since
        could carry it."""
        self._slot_updates.pop(sequence.slot, None)

    def take_slot_updates(self) -> tuple[SlotUpdate, ...]:
        """For the plan to carry."""
        updates = tuple(self._slot_updates.values())
        self._slot_updates.clear()
        return updates

    def idle_holder(self) -> SequenceState | None:
        """A sequence that holds a slot and blocks and does not run: the session parked for longest, else the last in
        line of the paused requests."""
        if self.config.session_policy != "refuse":
            parked = self._oldest_parked(s for s in self.by_state[State.PARKED].values() if s.slot)
            if parked is not None:
                return parked
        paused = [sequence for sequence in self.by_state[State.PAUSED].values() if sequence.slot]
        return max(paused, key=lambda sequence: sequence.order, default=None)

    # ---- reservation ----

    def reservation(self, sequence: SequenceState) -> int:
        """KV entries to hold blocks for: landed + (D+1)*W tokens (law 4), or all it can ever write, if fewer.

        W is the largest width of any step, not that of the step being planned: the D steps after it use the same
        blocks, and may be wider. With draft trees the last step writes more entries than W. An upper bound of both is
        ``max_model_len - 2 + limits.window`` entries.
        """
        return min(sequence.landed_tokens + self.limits.tokens_ahead, self._most_kv(sequence.max_length))

    def reserve(self, sequence: SequenceState) -> bool:
        """Blocks for its ``reservation``, evicting others where that helps.

        False: not now. The sequence itself may then have been evicted.
        """
        wanted = self.blocks_for(self.reservation(sequence)) - len(sequence.blocks)
        latest = self._wake_at_latest(sequence)
        early = latest < sequence.max_length and latest - self._early(sequence) <= sequence.planned_tokens < latest
        if early:  # it may go on with what it has
            wanted = max(1, wanted)
            if wanted > self.pool.free_count:
                sequence.wake_at, self.asleep_for = latest, 0
                return True
        while wanted > self.pool.free_count:
            if self.by_state[State.DRAINING] or wanted <= self.pool.free_count + self.pool.soon_free:
                return False
            victim = self._victim()
            self.evict(victim)
            if victim is sequence:
                return False
        if wanted > 0:
            self._take_blocks(sequence, wanted)
        self.set_wake(sequence)
        return True

    def _take_blocks(self, sequence: SequenceState, wanted: int) -> None:
        held = len(sequence.blocks)
        sequence.blocks += self.pool.take(wanted)
        self._write_blocks(sequence, held)

    def reserve_ahead(self, decoding: Collection[SequenceState]) -> None:
        """Give a block to each row that needs one soon, while free ones are plenty.

        For a step that changes block tables anyway: later steps then change nothing, and copy nothing to the device.
        Soon is as many tokens as give blocks to about _TOGETHER rows of all lengths, half a block at most.
        """
        size, plenty = self.limits.block_size, len(decoding)
        soon = min(size // 2, _TOGETHER * size // max(1, plenty))
        for sequence in [s for s in decoding if s.planned_tokens + soon >= s.wake_at]:
            if self.pool.free_count <= plenty:
                return
            if self._wake_at_latest(sequence) < sequence.max_length:
                self._take_blocks(sequence, 1)
                self.set_wake(sequence)

    def _victim(self) -> SequenceState:
        """The sequence that gives up blocks: a parked or paused one if there is one, else the last in line."""
        idle = self.idle_holder()
        if idle is not None:
            return idle
        states = (State.PREFILL, State.DECODE, State.STALLED)
        holders = [sequence for state in states for sequence in self.by_state[state].values()]
        return max(holders, key=lambda sequence: sequence.order)

    def set_wake(self, sequence: SequenceState) -> None:
        """Below ``wake_at`` planned tokens, a step of any width writes into blocks it holds, and cannot be its last.

        Rows of equal length would all need a block in the same step. So some are looked at earlier, by
        slot, and take a block then if one is free.
        """
        self.asleep_for = 0
        sequence.wake_at = self._wake_at_latest(sequence)
        if sequence.wake_at < sequence.max_length:
            sequence.wake_at -= self._early(sequence)

    def _wake_at_latest(self, sequence: SequenceState) -> int:
        capacity = len(sequence.blocks) * self.limits.block_size
        return min(capacity + 2 - self.limits.window, sequence.max_length)

    def _early(self, sequence: SequenceState) -> int:
        """In tokens: 0 to not quite half a block."""
        return sequence.slot % self._spread

    def _most_kv(self, max_length: int) -> int:
        """KV entries that live rows can ever write. The newest token has none yet, so a live row starts at most at
        position max_length - 2, and writes a window from there: W entries, or those of a draft tree.
        """
        return max_length - 2 + self.limits.window

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold ``tokens`` KV entries."""
        return -(-tokens // self.limits.block_size)

    @property
    def tables_change(self) -> bool:
        """Whether the plan being made has block writes, slot updates or slot copies for the device."""
        return bool(self._block_writes or self._slot_updates or self._copies)

    def take_block_writes(self) -> tuple[tuple[int, int, int], ...]:
        """(slot, index, block) of every block handed out since the last call, for the plan to carry."""
        writes = tuple(self._block_writes.values())
        self._block_writes.clear()
        return writes

    # ---- the prefix index ----

    def planned(self, plan: StepPlan, rows: Sequence[SequenceState]) -> None:
        """``plan`` is made: the blocks that its chunks fill are findable from the next plan on (sharing.py)."""
        if not plan.chunks:
            return
        prompts = rows[plan.decode_rows : len(rows) - len(plan.forks)]
        entered = self.pool.entered
        for sequence in prompts:
            self.publish(sequence, sequence.prefilled)
        self._prompt_blocks += self.pool.entered - entered
        if self.snapshots is not None:
            for row in self._saving.values():  # their writers have left, in the plan that they have chunks in
                self.snapshots.give_back(row)
            self._saving.clear()
        for fork, answer in zip(plan.forks, rows[len(rows) - len(plan.forks) :], strict=True):
            prompt = prompts[fork.chunk]
            answer.published_blocks, answer.prefix_id = prompt.published_blocks, prompt.prefix_id
            answer.private = prompt.private
        self.sharing.planned(prompts)

    def gained(self, sequence: SequenceState) -> None:
        """A token of it has landed: publish blocks filled after its prompt, and trust all its blocks."""
        if sequence.blocks and not sequence.trusted:  # also without caching: answers to one prompt share its blocks
            sequence.trusted = True
            self.pool.trust(sequence.blocks)
        if not self.config.prefix_caching or not sequence.blocks or sequence.private:
            sequence.publish_at = sequence.max_length
            return
        self._publish_landed(sequence)
        sequence.publish_at = (sequence.published_blocks + 1) * self.limits.block_size + self._early(sequence)

    def _publish_landed(self, sequence: SequenceState) -> None:
        """Publish blocks filled after its prompt, as far as its tokens have landed."""
        if sequence.trusted:
            begun = sequence.published_blocks
            self.publish(sequence, sequence.landed_tokens - 1)  # the KV of the newest token is not written yet
            self.pool.trust(sequence.blocks[begun : sequence.published_blocks])

    def publish(self, sequence: SequenceState, written: int) -> None:
        """Make its blocks findable that are full with the first ``written`` tokens."""
        size = self.limits.block_size
        if not self.config.prefix_caching or not sequence.blocks or sequence.private:
            return
        while written >= (sequence.published_blocks + 1) * size:
            index = sequence.published_blocks
            block = sequence.blocks[index]
            saved = NO_SNAPSHOT
            if self._saving and (index + 1) * size == sequence.prefilled:
                saved = self._saving.pop(sequence.request.request_id, NO_SNAPSHOT)
            sequence.prefix_id = self.pool.publish(block, sequence.prefix_id, sequence.tokens, index, snapshot=saved)
            sequence.published_blocks += 1

    def reset_prefixes(self) -> None:
        """Empty the prefix index and its snapshots for good: what live sequences hold stays theirs."""
        self.digest.fold(self.chain.step, "reset", (self.pool.forget_all(),))
        self.sharing.reset()
        for sequence in self.sequences.values():
            sequence.private = bool(sequence.blocks)
            sequence.known_blocks = sequence.known_last = sequence.stop_at = sequence.branch_at = 0

    def distrust(self, broken: SequenceState, *, ghost: bool) -> None:
        """Its logits are not finite. Evicts its blocks and their descendants from the prefix index.

        Requests that share one of them untrusted, without a landed token, are recomputed. So is ``broken`` itself, if
        it lives and the fault may be in an untrusted block that it shares; otherwise it breaks again.
        """
        blocks = broken.blocks or broken.given_up
        suspects = self.pool.untrusted(blocks)
        self.pool.forget(blocks)
        for other in list(self.sequences.values()):
            maybe = other is not broken and other.borrowed and not (other.trusted or other.slot_ended)
            if maybe and not suspects.isdisjoint(other.blocks or other.given_up):
                self._compute_again(other)
        if not ghost and broken.borrowed and not broken.trusted:
            self._compute_again(broken)

    def _compute_again(self, sequence: SequenceState) -> None:
        """Evict it, drop its steps in flight, and share only trusted blocks the next time."""
        self.counters.distrusted += 1
        sequence.alone = True
        self._end_slot(sequence)
        sequence.planned_tokens, sequence.uncertain_tokens = sequence.landed_tokens, 0
        if sequence.state is not State.EVICTING:
            self._give_up(sequence)

    # ---- accounting ----

    def check(self) -> None:
        """Raise AccountingError unless every block, slot and planned token is accounted for exactly once.

        For tests and debugging.
        """
        holders = [s for s in self.sequences.values() if s.slot and s.state is not State.EVICTING]
        self.slots.check([s.slot for s in holders])
        self.pool.check([block for s in holders for block in s.blocks])
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
