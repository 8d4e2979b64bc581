"""The prefix of a request: which published blocks and snapshots it shares, and when its own can be found and trusted.

Knows: when blocks are shared, published, trusted and distrusted, when state is saved and restored.
Does not know: which block is found or waited for (sharing.py), the index (blocks.py), rows of steps (planner.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.schedule import reservation, windows
from runtime.schedule.blocks import BlockPool
from runtime.schedule.ledger import Ledger
from runtime.schedule.plan import StepPlan
from runtime.schedule.sequence import NOT_WAITING, SequenceState
from runtime.schedule.snapshots import NO_SNAPSHOT
from runtime.schedule.states import State


def share(ledger: Ledger, sequence: SequenceState, found: list[int]) -> None:
    """``found`` become its blocks after those it has published; the caller releases what it held in their place."""
    if not found:
        return
    sequence.borrowed = sequence.borrowed or bool(ledger.pool.untrusted(found))
    first, last = sequence.published_blocks, sequence.published_blocks + len(found)
    end = last * ledger.limits.block_size
    if sequence.windows:
        windows.share(ledger, sequence, found)
    sequence.prefix_id = ledger.pool.share(found)
    sequence.blocks[first:last] = found
    sequence.published_blocks = last
    if ledger.snapshots is not None:
        ledger.unpin(sequence)
        sequence.restores, sequence.state_at = ledger.snapshots.pin(found[-1]), end
    ledger.counters.prefix_hit_tokens += end - sequence.prefilled
    sequence.prefilled = end
    sequence.waits_since = NOT_WAITING


def look_again(ledger: Ledger, sequence: SequenceState) -> None:
    """During prefill: replace blocks that it was going to write by blocks published meanwhile."""
    found = ledger.sharing.found_since(sequence)
    if not found or not windows.can_share(ledger, sequence, found):
        return
    first = sequence.published_blocks
    own = sequence.blocks[first : first + len(found)]
    begun = int(sequence.prefilled > first * ledger.limits.block_size)  # steps in flight may write into its first
    share(ledger, sequence, found)
    ledger.pool.give_back(own[begun:])
    if ledger.chain.landed_after(sequence.last_step):
        ledger.pool.give_back(own[:begun])
    else:
        ledger.pool.retire_after(sequence.last_step, own[:begun])
    ledger.write_blocks(sequence, first, first + len(found))


def count_query(ledger: Ledger, sequence: SequenceState, tokens: int) -> None:
    """Count a lookup of so many of its tokens in the prefix index."""
    if ledger.sharing.looks_up(sequence):
        ledger.counters.prefix_query_tokens += tokens


# ---- recurrent state ----


def take_restored(ledger: Ledger, sequence: SequenceState) -> int:
    """The snapshot to restore before the chunk being cut, or NO_SNAPSHOT."""
    row = sequence.restores
    ledger.unpin(sequence)
    ledger.counters.snapshot_restores += row != NO_SNAPSHOT
    return row


def save(ledger: Ledger, sequence: SequenceState, end: int) -> int:
    """A snapshot row for its state after the chunk being cut, which ends at ``end``; NO_SNAPSHOT if none is due or
    all are about to be read.
    """
    if ledger.snapshots is None or not ledger.sharing.leaves_snapshot(sequence, end):
        return NO_SNAPSHOT
    row = ledger.snapshots.take()
    ledger.counters.snapshot_evictions = ledger.snapshots.evictions
    if row:
        ledger.saving[sequence.request.request_id] = row
        sequence.state_at = end
        ledger.counters.snapshot_saves += 1
    return row


# ---- what others find ----


def planned(ledger: Ledger, plan: StepPlan, rows: Sequence[SequenceState]) -> None:
    """``plan`` has chunks and is made: the blocks that they fill can be found from the next plan on (sharing.py)."""
    prompts = rows[plan.decode_rows : len(rows) - len(plan.forks)]
    entered = ledger.pool.entered
    for sequence in prompts:
        ledger.publish(sequence, sequence.prefilled)
    ledger.prompt_blocks += ledger.pool.entered - entered
    if ledger.snapshots is not None:
        for row in ledger.saving.values():  # of requests that have ended in the plan that has their chunks
            ledger.snapshots.give_back(row)
        ledger.saving.clear()
    for fork, answer in zip(plan.forks, rows[len(rows) - len(plan.forks) :], strict=True):
        prompt = prompts[fork.chunk]
        answer.published_blocks, answer.prefix_id = prompt.published_blocks, prompt.prefix_id
        answer.private = prompt.private
    ledger.sharing.planned(prompts)


def gained(ledger: Ledger, sequence: SequenceState) -> None:
    """A token of it has landed: publish blocks filled after its prompt, and trust all its blocks."""
    if sequence.blocks and not sequence.trusted:  # also without caching: answers to one prompt share its blocks
        sequence.trusted = True
        ledger.pool.trust(sequence.blocks)
        for pool, pages in zip(ledger.windows, sequence.windows, strict=True):
            pool.trust(pages.blocks)
    if not ledger.config.prefix_caching or not sequence.blocks or sequence.private:
        sequence.publish_at = sequence.max_length
        return
    ledger.publish_landed(sequence)
    block_ends_at = (sequence.published_blocks + 1) * ledger.limits.block_size
    sequence.publish_at = block_ends_at + reservation.early(ledger, sequence)


def reset(ledger: Ledger) -> None:
    """Empty the prefix index and its snapshots for good: what live sequences hold stays theirs."""
    ledger.digest.fold(ledger.chain.step, "reset", (ledger.pool.forget_all(),))
    for pool in ledger.windows:
        pool.forget_all()
    ledger.sharing.reset()
    for sequence in ledger.sequences.values():
        sequence.private = bool(sequence.blocks)
        sequence.known_blocks = sequence.known_last = sequence.stop_at = sequence.branch_at = 0


# ---- broken contents ----


def distrust(ledger: Ledger, broken: SequenceState, *, ghost: bool) -> None:
    """Its logits are not finite. Evicts its blocks and their descendants from the prefix index.

    Requests that share one of them untrusted, without a landed token, are recomputed. So is ``broken`` itself, if it
    lives and the fault may be in an untrusted block that it shares; otherwise it breaks again.
    """
    suspects = [pool.untrusted(blocks) for pool, blocks in _held(ledger, broken)]
    pages = [ledger.pool.prefix_id(block) for block in broken.blocks or broken.given_up if ledger.pool.findable(block)]
    for window in ledger.windows:  # also those of its prefix that its window has passed
        window.forget([block for block in map(window.find, pages) if block is not None])
    for pool, blocks in _held(ledger, broken):
        pool.forget(blocks)
    for other in list(ledger.sequences.values()):
        maybe = other is not broken and other.borrowed and not (other.trusted or other.slot_ended)
        held = zip(suspects, _held(ledger, other), strict=False)
        if maybe and not all(theirs.isdisjoint(blocks) for theirs, (_, blocks) in held):
            _compute_again(ledger, other)
    if not ghost and broken.borrowed and not broken.trusted:
        _compute_again(ledger, broken)


def _held(ledger: Ledger, sequence: SequenceState) -> list[tuple[BlockPool, list[int]]]:
    """The blocks of each group that it holds, or held last."""
    of_windows = zip(ledger.windows, sequence.windows, strict=False)  # it has none before its first slot
    held: list[tuple[BlockPool, list[int]]] = [(ledger.pool, sequence.blocks or sequence.given_up)]
    return held + [(pool, pages.blocks or pages.given_up) for pool, pages in of_windows]


def _compute_again(ledger: Ledger, sequence: SequenceState) -> None:
    """Evict it, drop its steps in flight, and share only trusted blocks the next time."""
    ledger.counters.distrusted += 1
    sequence.alone = True
    ledger.end_slot(sequence)
    sequence.planned_tokens, sequence.uncertain_tokens = sequence.landed_tokens, 0
    if sequence.state is not State.EVICTING:
        ledger.give_up(sequence)
