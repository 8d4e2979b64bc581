"""Sliding windows: what a request holds of layers that see the last W keys, page by page as its window moves on.

Knows: when a page is before every query in flight, how far a chunk may go, what hits and forks share of a window.
Does not know: pages of layers that see all tokens (reservation.py, prefix.py), rows of steps (planner.py).

    pages of 4 tokens, W = 6; 17 tokens have landed, the query at position 16 sees keys 11 to 16

    0 . . .  4 . . .  8 . . .  12. . .  16. . .  20. . .
    given back        held: seen        held: steps in flight write here

Pages are given back when their request next needs one: by landed tokens only, so draft tokens that are rejected, and
chunks in flight, hold theirs. A request is promised the blocks of its window and of what a decode row reserves, all
its life; so a decode row waits for no other request's page of a window. Prefill chunks take more while there is room.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.schedule.ledger import Ledger
from runtime.schedule.sequence import SequenceState
from runtime.schedule.window_pool import WindowPages, WindowPool


def promise(ledger: Ledger, pool: WindowPool, sequence: SequenceState) -> int:
    """Blocks for its window wherever it is, or for all its tokens, if those are fewer. Sessions may get longer."""
    return pool.quota if sequence.session else min(pool.quota, ledger.limits.most_blocks(sequence.max_length))


def has_room(ledger: Ledger, *sequences: SequenceState, soon: bool = False) -> bool:
    """Whether all of these can be promised their blocks now, or ``soon``, when all fences have opened."""
    return all(
        sum(promise(ledger, pool, sequence) for sequence in sequences) <= (pool.room_soon if soon else pool.room)
        for pool in ledger.windows
    )


def short_of(ledger: Ledger, sequence: SequenceState) -> str | None:
    """The name of a group that cannot promise it its blocks."""
    short = (pool for pool in ledger.windows if promise(ledger, pool, sequence) > pool.room)
    return next((f"window_{pool.window}" for pool in short), None)


def seat(ledger: Ledger, sequence: SequenceState) -> None:
    """It holds a slot from now on: promise it its blocks. The caller has checked ``has_room``."""
    sequence.windows = tuple([WindowPages(promise(ledger, pool, sequence)) for pool in ledger.windows])
    for pool, pages in zip(ledger.windows, sequence.windows, strict=True):
        pool.charge(pages)


# ---- a window moves on ----


def _oldest_query(ledger: Ledger, sequence: SequenceState) -> int:
    """The first position that steps in flight or to come compute."""
    while sequence.chunks and ledger.chain.landed_after(sequence.chunks[0][0]):
        sequence.chunks = sequence.chunks[1:]
    if sequence.chunks:
        return sequence.chunks[0][1]
    session = sequence.session
    to_prefill = sequence.prefilling or (session is not None and session.extends)
    return sequence.prefilled if to_prefill else sequence.landed_tokens - 1


def give_back(ledger: Ledger, sequence: SequenceState) -> None:
    """Give back the pages that no step in flight, or to come, reads."""
    ledger.publish_landed(sequence)
    oldest = _oldest_query(ledger, sequence)
    for pool, pages in zip(ledger.windows, sequence.windows, strict=True):
        first = max(pages.first, pool.first_page(oldest))
        pool.pass_by(pages.within(pages.first, first))
        pages.first, pages.blocks = first, pages.within(first, pages.end)
        pool.charge(pages)


def can_reach(ledger: Ledger, sequence: SequenceState, end: int) -> bool:
    """Whether it can hold its pages up to ``end``. Gives back what it can."""
    give_back(ledger, sequence)
    return all(end <= _end(pool, pages) for pool, pages in zip(ledger.windows, sequence.windows, strict=True))


def _end(pool: WindowPool, pages: WindowPages) -> int:
    """How far its pages can go."""
    return pages.first + pages.charged + pool.room


def reach(ledger: Ledger, sequence: SequenceState, end: int) -> None:
    """Take its pages up to ``end``; the caller has checked ``can_reach``."""
    held = [pages.end for pages in sequence.windows]
    for pool, pages in zip(ledger.windows, sequence.windows, strict=True):
        pages.blocks += pool.take(max(0, end - pages.end))
        pool.charge(pages)
    ledger.write_windows(sequence, min(held))


def chunk_end(ledger: Ledger, sequence: SequenceState, end: int) -> int:
    """Where a chunk to ``end`` ends at most. The last one needs room for the steps that follow it in flight."""
    give_back(ledger, sequence)
    pages = min(_end(pool, pages) for pool, pages in zip(ledger.windows, sequence.windows, strict=True))
    if pages >= len(sequence.blocks):
        return end
    return min(end, pages * ledger.limits.block_size, sequence.prefill_target - 1)


def cut(ledger: Ledger, sequence: SequenceState, start: int, end: int) -> None:
    """Its chunk [start, end) is in the plan being made: take the pages that it writes."""
    last = end == sequence.prefill_target
    reach(ledger, sequence, len(sequence.blocks) if last else -(-end // ledger.limits.block_size))
    sequence.chunks += ((ledger.chain.step, start),)


# ---- what others hold ----


def can_share(ledger: Ledger, sequence: SequenceState, found: Sequence[int]) -> bool:
    """Whether a hit of ``found``, the blocks after those it published, leaves room for all promises: what it held until
    now may wait for a fence."""
    in_flight = not ledger.chain.landed_after(sequence.last_step)
    first, last = sequence.published_blocks, sequence.published_blocks + len(found)
    for pool, pages in zip(ledger.windows, sequence.windows, strict=True):
        low = max(0, last - pool.tail)
        kept = len(pages.within(low, first))
        held, gone = kept + last - max(low, first), len(pages.blocks) - kept
        if max(pages.promised, held) + gone * in_flight - pages.charged > pool.room:
            return False
    return True


def share(ledger: Ledger, sequence: SequenceState, found: Sequence[int]) -> None:
    """Its next token comes after ``found``: hold the pages of its window there, and nothing before them."""
    first, last = sequence.published_blocks, sequence.published_blocks + len(found)
    for pool, pages in zip(ledger.windows, sequence.windows, strict=True):
        low = max(0, last - pool.tail)
        ids = [ledger.pool.prefix_id(block) for block in found[max(0, low - first) :]]
        shared = [block for block in map(pool.find, ids) if block is not None]
        kept = pages.within(low, first)
        gone = pages.within(0, low) + pages.within(max(low, first), pages.end)
        sequence.borrowed = sequence.borrowed or bool(pool.untrusted(shared))
        pool.share(shared)
        if ledger.chain.landed_after(sequence.last_step):
            pool.give_back(gone)
        else:
            pool.retire_after(sequence.last_step, gone)
        pages.first, pages.blocks = low, kept + shared
        pool.charge(pages)


def is_read(ledger: Ledger, blocks: Sequence[Sequence[int]]) -> bool:
    """Whether a copy of the plan being made reads any of ``blocks``, a list a group."""
    copies = [copy.in_windows for copy, _ in ledger.copies.values() if copy.in_windows]
    return any(pair[0] in own for pairs in copies for pair, own in zip(pairs, blocks, strict=True))


def copy(
    ledger: Ledger, source: SequenceState, target: SequenceState, full: int, fresh: Sequence[list[int]]
) -> tuple[tuple[int, int], ...]:
    """``target`` shares the full pages, up to ``full``, of its window with ``source`` and gets ``fresh`` blocks, a list
    a group. Returns (block, its own) of page ``full``, of each group."""
    seat(ledger, target)
    pairs = []
    for pool, theirs, own, taken in zip(ledger.windows, source.windows, target.windows, fresh, strict=True):
        own.first = pool.first_page(target.landed_tokens - 1)
        shared = theirs.within(own.first, full)
        pool.share(shared)
        own.blocks = shared + taken
        pool.charge(own)
        pairs += [(theirs.blocks[full - theirs.first], block) for block in taken[:1]]
    return tuple(pairs)
