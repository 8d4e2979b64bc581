"""Sharing: which blocks of a prompt are cached already, or about to be written, and need not be computed.

Knows: what is looked up and when, who writes a block that another prompt needs, how long that one waits for it.
Does not know: how blocks change hands (prefix.py), the index itself (blocks.py), which rows make a step.

    plan(N)      a chunk of A is cut: its last full blocks are written by step N
                 B, whose next block is among them, waits: it gets no chunk in this plan
    after it     those blocks are published. Steps run in the order of their launch, so step N + 1 may read them
    plan(N + 1)  B finds them, and its chunk starts after them

A block of known tokens (of a prompt, or of a sequence that is recomputed) is published so early because its contents
are known before the device has written them. A block with generated tokens is published when they have landed.

Models with recurrent state can use a prefix only where its state was saved, too. So chunks end where a snapshot is to
be saved, and blocks are shared up to the last one that has a snapshot:

    at the last full block       of a prompt: for equal prompts, and for the next turn of a conversation
    at every ``interval`` blocks    of a long prompt
    at a branch                  at the end of the blocks that others have published, if these have no snapshot: what
                                 two prompts have in common, a third one may have, too

Each costs its prompt a step, so it must lie ``worth`` tokens after the one before. Others wait for it as for a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from runtime.schedule.blocks import BlockPool
from runtime.schedule.config import SchedulerConfig, SnapshotPolicy
from runtime.schedule.counters import ScheduleCounters
from runtime.schedule.sequence import NOT_WAITING, SequenceState
from runtime.schedule.window_pool import WindowPool

MOST_WAITS = 16  # steps for one block: a writer that gets no chunk for so long is not waited for

_Key = tuple[int, bytes]


class _Writer(NamedTuple):
    """A request that will write what others need; a smaller ``priority`` is served first."""

    request_id: int
    priority: int

    @classmethod
    def of(cls, sequence: SequenceState) -> _Writer:
        return cls(sequence.request.request_id, sequence.request.priority)

    def is_worth_waiting_for(self, own: _Writer) -> bool:
        """False for a writer of lower priority than the waiting request: it may get no tokens for long."""
        return self.request_id != own.request_id and self.priority <= own.priority


class PrefixSharing:
    """One a scheduler; ``pool`` holds the index, ``windows`` the blocks of groups with a window."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, windows: Sequence[WindowPool], counters: ScheduleCounters
    ) -> None:
        self._config, self._block_size = config, config.limits.block_size
        self._counters = counters
        self._pool, self._windows = pool, windows
        self._cut_now: dict[_Key, _Writer] = {}  # first blocks of chunks in the plan that is being made
        self._begun: dict[_Key, _Writer] = {}  # blocks of which a prompt's earlier chunk wrote a part
        self._begun_by: dict[int, _Key] = {}  # the same the other way round
        self._snapshots = config.snapshots if config.prefix_caching else None
        self._branches: dict[int, _Writer] = {}  # findable block -> the request that will save a snapshot after it
        self._branch_of: dict[int, int] = {}  # the same the other way round

    def looks_up(self, sequence: SequenceState) -> bool:
        """Whether it may share. Scored prompts are computed whole: scores come from the last layer."""
        return self._config.prefix_caching and not (sequence.scoring or sequence.private)

    def hits(self, sequence: SequenceState) -> list[int]:
        """For a sequence that is about to be admitted: the findable blocks of its prefix."""
        return self._granted(sequence, self._lookup(sequence, 0)) if self.looks_up(sequence) else []

    def _granted(self, sequence: SequenceState, found: list[int]) -> list[int]:
        """The longest prefix of ``found`` that ends with a snapshot, if the model keeps state, and whose last pages are
        still there in each group with a window."""
        while True:
            length = len(found)
            found = self._with_state(found)
            for pool in self._windows:
                ids = [self._pool.prefix_id(block) for block in found]
                del found[pool.granted(ids, trusted=sequence.alone) :]
            if len(found) == length:
                return found

    def _with_state(self, found: list[int]) -> list[int]:
        """The prefix of ``found`` that ends with a snapshot, for models with recurrent state."""
        if self._snapshots is None:
            return found
        while found and not self._pool.has_snapshot(found[-1]):
            found.pop()
        return found

    def found_since(self, sequence: SequenceState) -> list[int]:
        """For one in the middle of its prompt: findable blocks, from the one that its next token lies in.

        Empty where they hold nothing that it has not computed. It always computes its last known token.
        """
        if not self.looks_up(sequence):
            return []
        found = self._lookup(sequence, sequence.published_blocks)
        if self._snapshots is not None:
            self._note_known(sequence, found)
        found = self._granted(sequence, found)
        end = (sequence.published_blocks + len(found)) * self._block_size
        return found if end > sequence.prefilled else []

    def _note_known(self, sequence: SequenceState, found: list[int]) -> None:
        known = sequence.published_blocks + len(found)
        if known > sequence.known_blocks:
            sequence.waits_since = NOT_WAITING  # who writes its blocks gets on
        sequence.known_blocks, sequence.known_last = known, found[-1] if found else 0
        sequence.known_id = self._pool.prefix_id(found[-1]) if found else sequence.prefix_id

    def _lookup(self, sequence: SequenceState, first: int) -> list[int]:
        most = (sequence.landed_tokens - 1) // self._block_size
        return self._pool.lookup(sequence.tokens, most, first, sequence.prefix_id, trusted=sequence.alone)

    # ---- waiting for a writer ----

    def goes_on(self, sequence: SequenceState, step: int) -> bool:
        """Whether it may get a chunk in this step; not while another is writing its next block.

        If so, others wait for the block that the chunk begins in. It waits itself for one block in MOST_WAITS steps.
        """
        if self._is_written_for(sequence) or self._snapshot_is_made_for(sequence):
            if sequence.waits_since == NOT_WAITING:
                sequence.waits_since = step
                self._counters.prefix_waits += 1
            if step < sequence.waits_since + MOST_WAITS:
                return False
        sequence.waits_since = NOT_WAITING
        if self._config.prefix_caching and self._next_is_known(sequence):
            key, own = self._key(sequence), _Writer.of(sequence)
            if own.priority < self._cut_now.setdefault(key, own).priority:
                self._cut_now[key] = own
        if self._snapshots is not None:
            self._choose_stop(sequence, self._snapshots)
        return True

    def _is_written_for(self, sequence: SequenceState) -> bool:
        size, index, prefix_id = self._block_size, sequence.published_blocks, sequence.prefix_id
        if self._snapshots is not None and sequence.known_blocks > index:
            index, prefix_id = sequence.known_blocks, sequence.known_id
        if sequence.alone or sequence.prefilled > index * size or not self.looks_up(sequence):
            return False
        if (index + 1) * size >= sequence.landed_tokens:  # it has to compute a token of this block itself
            return False
        if self._snapshots is not None and self._last_full(sequence) < sequence.state_at + self._snapshots.worth:
            return False
        key, own = self._pool.key_of(sequence.tokens, index, prefix_id), _Writer.of(sequence)
        writers = self._cut_now.get(key, own), self._begun.get(key, own)
        return any(writer.is_worth_waiting_for(own) for writer in writers)

    # ---- where chunks end ----

    def _snapshot_is_made_for(self, sequence: SequenceState) -> bool:
        """Whether another request will save a snapshot at the end of the blocks that it could share."""
        if self._snapshots is None or sequence.alone or sequence.prefill_begun or not sequence.known_last:
            return False
        own = _Writer.of(sequence)
        return self._branches.get(sequence.known_last, own).is_worth_waiting_for(own)

    def _last_full(self, sequence: SequenceState) -> int:
        """Tokens of the blocks that another request with the same tokens could share."""
        return (sequence.prefill_target - 1) // self._block_size * self._block_size

    def _choose_stop(self, sequence: SequenceState, policy: SnapshotPolicy) -> None:
        """Set the next position at which it saves a snapshot, if there is one before its end."""
        sequence.stop_at = 0
        if sequence.scoring or sequence.private:
            return
        begun, least = sequence.prefilled, sequence.state_at + policy.worth
        last = self._last_full(sequence)
        if not sequence.prefill_begun:
            known = sequence.known_blocks * self._block_size
            sequence.branch_at = known if known > begun else 0
        places = [last]
        if sequence.branch_at > begun and sequence.branch_at >= least:
            places.append(sequence.branch_at)
            self._announce(sequence)
        if policy.interval:
            every = policy.interval * self._block_size
            place = max(begun // every + 1, -(-least // every)) * every
            if place + policy.worth <= last:
                places.append(place)
        sequence.stop_at = min((place for place in places if place > begun and place >= least), default=0)

    def _announce(self, sequence: SequenceState) -> None:
        """Requests that know exactly the same blocks wait for the snapshot after them."""
        own = _Writer.of(sequence)
        if not sequence.prefill_begun and self._branches.setdefault(sequence.known_last, own) == own:
            self._branch_of[own.request_id] = sequence.known_last

    def leaves_snapshot(self, sequence: SequenceState, end: int) -> bool:
        """Whether to save its state after a chunk that ends at ``end``."""
        policy = self._snapshots
        if policy is None or sequence.scoring or sequence.private or end % self._block_size:
            return False
        return end == sequence.stop_at or (end == sequence.prefill_target and end >= sequence.state_at + policy.worth)

    def planned(self, sequences: Iterable[SequenceState]) -> None:
        """The plan is made, and what these wrote with it is published: others wait for blocks that they began."""
        self._cut_now.clear()
        for sequence in sequences:
            self._left_writing(sequence)
            if sequence.prefilled >= sequence.branch_at or not sequence.prefilling:
                self._left_branch(sequence)
            partly = sequence.prefilled > sequence.published_blocks * self._block_size
            if self._config.prefix_caching and sequence.prefilling and partly and self._next_is_known(sequence):
                key, own = self._key(sequence), _Writer.of(sequence)
                if self._begun.setdefault(key, own) == own:
                    self._begun_by[own.request_id] = key

    def reset(self) -> None:
        """The index is empty: no request waits for what others have begun."""
        for kept in (self._begun, self._begun_by, self._branches, self._branch_of):
            kept.clear()

    def left(self, sequence: SequenceState) -> None:
        """It writes no more of its prompt: no request waits for it."""
        self._left_writing(sequence)
        self._left_branch(sequence)

    def _left_branch(self, sequence: SequenceState) -> None:
        block = self._branch_of.pop(sequence.request.request_id, None)
        if block is not None:
            del self._branches[block]

    def _left_writing(self, sequence: SequenceState) -> None:
        key = self._begun_by.pop(sequence.request.request_id, None)
        if key is not None:
            del self._begun[key]

    def _next_is_known(self, sequence: SequenceState) -> bool:
        """Whether all tokens of its first unpublished block are known, so that it is published once planned."""
        return not sequence.private and (sequence.published_blocks + 1) * self._block_size <= sequence.landed_tokens

    def _key(self, sequence: SequenceState) -> _Key:
        """Of its first unpublished block."""
        return self._pool.key_of(sequence.tokens, sequence.published_blocks, sequence.prefix_id)
