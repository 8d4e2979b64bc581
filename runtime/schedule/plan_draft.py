"""The plan being made: what a step reports to the device in addition to its decode rows, and what the digest has of it.

Knows: slot writes, forks, snapshots, block writes and copies, and their order. Does not know: who is in the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeVar

from runtime.schedule.ledger import Ledger
from runtime.schedule.plan import Chunk, Constrained, Fork, SlotWrite, StepKind, StepPlan
from runtime.schedule.sequence import SequenceState

T = TypeVar("T")


class PlanDraft:
    """What has come together for the next ``finish``.

    ``restored``, ``saved``: (snapshot, slot) and (slot, snapshot). ``forks`` and ``forked``: forks of prompts whose
    last chunk is cut, and their sequences. ``paused_now``: rows whose requests are paused already.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.slot_writes: list[SlotWrite] = []
        self.restored: list[tuple[int, int]] = []
        self.saved: list[tuple[int, int]] = []
        self.forks: list[Fork] = []
        self.forked: list[SequenceState] = []
        self.paused_now = 0
        self._ledger = ledger

    def write_slot(self, sequence: SequenceState) -> None:
        """The device learns all about the request in its slot."""
        self.slot_writes.append(_slot_write(sequence))

    def with_forked(self, rows: list[SequenceState]) -> list[SequenceState]:
        """All rows after the decode rows: ``rows``, which have chunks, and those of forks."""
        forked, self.forked = self.forked, []
        return rows + forked

    def finish(
        self,
        kind: StepKind,
        slots: tuple[int, ...],
        epochs: tuple[int, ...],
        width: int,
        chunks: Sequence[Chunk] = (),
        prefills: Sequence[SequenceState] = (),
    ) -> StepPlan:
        """The plan. ``slots``, ``epochs``: of its decode rows. ``prefills``: the sequences of its other rows."""
        ledger = self._ledger
        forks = tuple(self.forks)
        self.forks.clear()
        if prefills:
            slots += tuple([sequence.slot for sequence in prefills])
            epochs += tuple([sequence.epoch for sequence in prefills])
        copies = ledger.take_copies()
        written = {write.slot for write in self.slot_writes}
        for copy, sequence in copies:
            if copy.slot not in written:
                self.write_slot(sequence)
            sequence.resumes = False
        plan = StepPlan(
            step=ledger.chain.step,
            kind=kind,
            slots=slots,
            epochs=epochs,
            width=width,
            slot_writes=tuple(self.slot_writes),
            block_writes=_taken(ledger.block_writes),
            chunks=tuple(chunks),
            forks=forks,
            slot_updates=_taken(ledger.slot_updates),
            restored=tuple(self.restored),
            saved=tuple(self.saved),
            copies=tuple([copy for copy, _ in copies]),
            tree=ledger.limits.tree if width > 1 else 0,
        )
        self.slot_writes.clear()
        self.restored.clear()
        self.saved.clear()
        ledger.digest.fold(plan.step, kind.name, (len(slots), *_numbers(plan)))
        return plan

    def constrain(self, plan: StepPlan, rows: Sequence[SequenceState]) -> StepPlan:
        """``plan``, with what its ``rows`` that have a grammar gained."""
        constrained = []
        for row, sequence in enumerate(rows):
            if sequence.constrained and plan.draws(row):
                most = plan.width if row < plan.decode_rows else 1
                constrained.append(self._constrained(sequence, most))
                sequence.matched = sequence.landed_tokens
        numbers = tuple(chain.from_iterable((row.slot, len(row.token_ids)) for row in constrained))
        self._ledger.digest.fold(plan.step, "constrained", numbers)
        return plan._replace(constrained=tuple(constrained))

    def _constrained(self, sequence: SequenceState, most: int) -> Constrained:
        """The row goes on by a table if there is one, and stop ids need not wait for ``min_tokens``."""
        ledger, request = self._ledger, sequence.request
        answer = sequence.tokens[len(request.prompt_token_ids) :]
        if ledger.tables.places and len(answer) >= request.sampling.min_tokens:
            sequence.table_key = sequence.table_key or request.table_key
            sequence.table = ledger.tables.take(sequence.table_key)
        if sequence.table is None:
            return Constrained(sequence.slot, sequence.tokens[sequence.matched :], most)
        ledger.constrained -= 1
        ledger.decode_version += 1
        ledger.counters.grammar_tabled += 1
        ledger.digest.fold(ledger.chain.step, "tabled", (sequence.slot, sequence.table.number, len(answer)))
        return Constrained(sequence.slot, answer, most, sequence.table.number, sequence.table.key)


def _taken(queued: dict[Any, T]) -> tuple[T, ...]:
    taken = tuple(queued.values())
    queued.clear()
    return taken


def _numbers(plan: StepPlan) -> list[int]:
    """What a plan reports to the device, for the digest."""
    numbers = list(chain.from_iterable(plan.block_writes))
    for write in plan.slot_writes:
        numbers += (write.slot, write.epoch, write.request_id, write.length)
    for chunk in plan.chunks:
        numbers += (chunk.slot, chunk.start, len(chunk.token_ids))
    for update in plan.slot_updates:
        numbers += (update.slot, update.max_length, update.revive)
    for fork in plan.forks:
        numbers += (fork.slot, fork.chunk, *(fork.copied or ()), *chain.from_iterable(fork.in_windows))
    for pair in (*plan.restored, *plan.saved):
        numbers += pair
    for copy in plan.copies:
        numbers += (copy.source, copy.slot, *(copy.copied or ()), *chain.from_iterable(copy.in_windows))
    return numbers


def _slot_write(sequence: SequenceState) -> SlotWrite:
    request = sequence.request
    prompt_length = len(request.prompt_token_ids)
    return SlotWrite(
        slot=sequence.slot,
        epoch=sequence.epoch,
        request_id=request.request_id,
        length=sequence.prefilled,
        prompt_length=prompt_length,
        min_length=prompt_length + (0 if sequence.constrained else request.sampling.min_tokens),
        max_length=sequence.max_length,
        token_ids=sequence.tokens[:],
        stop_token_ids=request.stop_token_ids,
        sampling=request.sampling,
        resumes=sequence.resumes,
    )
