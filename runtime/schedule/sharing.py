"""Sharing: which blocks of a prompt are there already, or will be in a moment, and need not be computed.

Knows: what is looked up and when, who writes a block that another prompt needs, how long that one waits for it.
Does not know: how blocks change hands (resources.py), the index itself (blocks.py), which rows make a step.

    plan(N)      a chunk of A is cut: its last full blocks are written by step N
                 B, whose next block is among them, waits: it gets no chunk in this plan
    after it     those blocks are published. Steps run in the order of their launch, so step N + 1 may read them
    plan(N + 1)  B finds them, and its chunk begins behind them

A block of known tokens (of a prompt, or of a sequence that is recomputed) is found so early because its contents are
known before the device has written them. A block with generated tokens is published when they have landed.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.schedule.blocks import BlockPool
from runtime.schedule.config import SchedulerConfig
from runtime.schedule.counters import ScheduleCounters
from runtime.schedule.sequence import NOT_WAITING, SequenceState

MOST_WAITS = 16  # steps for one block: a writer that gets no chunk for so long is not waited for

_Key = tuple[int, bytes]


class PrefixSharing:
    """One a scheduler; ``pool`` holds the index."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, counters: ScheduleCounters) -> None:
        self._config, self._block_size = config, config.limits.block_size
        self._counters = counters
        self._pool = pool
        self._cut_now: dict[_Key, int] = {}  # first blocks of chunks in the plan that is being made -> request ids
        self._begun: dict[_Key, int] = {}  # blocks of which a prompt's earlier chunk wrote a part -> its request id
        self._begun_by: dict[int, _Key] = {}  # the same the other way round

    def looks_up(self, sequence: SequenceState) -> bool:
        """Whether it may share at all. Scored prompts are computed whole: scores come from the last layer."""
        return self._config.prefix_caching and not sequence.scoring

    def hits(self, sequence: SequenceState) -> list[int]:
        """For a sequence that is about to be seated: the findable blocks of its beginning."""
        return self._lookup(sequence, 0) if self.looks_up(sequence) else []

    def found_since(self, sequence: SequenceState) -> list[int]:
        """For one in the middle of its prompt: findable blocks, from the one that its next token lies in.

        Empty where they hold nothing that it has not computed. It always computes its last known token.
        """
        if not self.looks_up(sequence):
            return []
        found = self._lookup(sequence, sequence.published_blocks)
        end = (sequence.published_blocks + len(found)) * self._block_size
        return found if end > sequence.prefilled else []

    def _lookup(self, sequence: SequenceState, first: int) -> list[int]:
        most = (sequence.landed_tokens - 1) // self._block_size
        return self._pool.lookup(sequence.tokens, most, first, sequence.prefix_id, trusted=sequence.alone)

    # ---- waiting for a writer ----

    def goes_on(self, sequence: SequenceState, step: int) -> bool:
        """Whether it may get a chunk in this step; not while another is writing its next block.

        If so, others wait for the block that the chunk begins in. It waits itself for one block in MOST_WAITS steps.
        """
        if self._is_written_for(sequence):
            if sequence.waits_since == NOT_WAITING:
                sequence.waits_since = step
                self._counters.prefix_waits += 1
            if step < sequence.waits_since + MOST_WAITS:
                return False
        sequence.waits_since = NOT_WAITING
        if self._config.prefix_caching and self._next_is_known(sequence):
            self._cut_now.setdefault(self._key(sequence), sequence.request.request_id)
        return True

    def _is_written_for(self, sequence: SequenceState) -> bool:
        size, index = self._block_size, sequence.published_blocks
        if sequence.alone or sequence.prefilled > index * size or not self.looks_up(sequence):
            return False
        if (index + 1) * size >= sequence.landed_tokens:  # it has to compute a token of this block itself
            return False
        key, request_id = self._key(sequence), sequence.request.request_id
        return self._cut_now.get(key, request_id) != request_id or self._begun.get(key, request_id) != request_id

    def planned(self, sequences: Iterable[SequenceState]) -> None:
        """The plan is made, and what these wrote with it is published: others wait for blocks that they began."""
        self._cut_now.clear()
        for sequence in sequences:
            self.left(sequence)
            partly = sequence.prefilled > sequence.published_blocks * self._block_size
            if self._config.prefix_caching and sequence.prefilling and partly and self._next_is_known(sequence):
                key = self._key(sequence)
                if self._begun.setdefault(key, sequence.request.request_id) == sequence.request.request_id:
                    self._begun_by[sequence.request.request_id] = key

    def left(self, sequence: SequenceState) -> None:
        """It writes no more of its prompt: nobody waits for it."""
        key = self._begun_by.pop(sequence.request.request_id, None)
        if key is not None:
            del self._begun[key]

    def _next_is_known(self, sequence: SequenceState) -> bool:
        """Whether all tokens of its first unpublished block are known, so that it is published once planned."""
        return (sequence.published_blocks + 1) * self._block_size <= sequence.landed_tokens

    def _key(self, sequence: SequenceState) -> _Key:
        """Of its first unpublished block."""
        return self._pool.key_of(sequence.tokens, sequence.published_blocks, sequence.prefix_id)
