"""Reservation: how many KV blocks a request holds, and which one gives its blocks up when they run out.

Knows: lengths and widths of steps, when a row needs its next block, the order in which requests are evicted.
Does not know: which blocks are shared (prefix.py), rows of steps (planner.py), blocks themselves (blocks.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from runtime.schedule import windows
from runtime.schedule.ledger import Ledger
from runtime.schedule.plan import Evicted
from runtime.schedule.request import FinishReason
from runtime.schedule.sequence import SequenceState
from runtime.schedule.states import State

_TOGETHER = 32  # rows that are given a block in one step: some 50 us of the host's time


def blocks_for(ledger: Ledger, tokens: int) -> int:
    """How many blocks hold ``tokens`` KV entries."""
    return -(-tokens // ledger.limits.block_size)


def kv_to_hold(ledger: Ledger, sequence: SequenceState) -> int:
    """KV entries to hold blocks for: landed + (D+1)*W tokens (law 4), or all it can ever write, if fewer.

    W is the largest width of any step, not that of the step being planned: the D steps after it use the same blocks,
    and may be wider. With draft trees the last step writes more entries than W. An upper bound of both is
    ``max_model_len - 2 + limits.window`` entries.
    """
    return min(sequence.landed_tokens + ledger.limits.tokens_ahead, sequence.max_length - 2 + ledger.limits.window)


def blocks_to_hold(ledger: Ledger, sequence: SequenceState) -> int:
    """Blocks for its ``kv_to_hold``."""
    return blocks_for(ledger, kv_to_hold(ledger, sequence))


def reserve(ledger: Ledger, sequence: SequenceState) -> bool:
    """Take the rest of its ``blocks_to_hold``, evicting others if that helps.

    False: not now. The sequence itself may then have been evicted.
    """
    pool = ledger.pool
    wanted = blocks_to_hold(ledger, sequence) - len(sequence.blocks)
    latest = wake_at_latest(ledger, sequence)
    if latest < sequence.max_length and latest - early(ledger, sequence) <= sequence.planned_tokens < latest:
        wanted = max(1, wanted)
        if wanted > pool.free_count or not _windows_reach(ledger, sequence, wanted):  # it can run on what it has
            sequence.wake_at, ledger.asleep_for = latest, 0
            return True
    if wanted > 0 and not _windows_reach(ledger, sequence, wanted):
        return False
    while wanted > pool.free_count:
        if ledger.by_state[State.DRAINING] or wanted <= pool.free_count + pool.soon_free:
            return False
        victim = _victim(ledger)
        evict(ledger, victim)
        if victim is sequence:
            return False
    if wanted > 0:
        _take_blocks(ledger, sequence, wanted)
    set_wake(ledger, sequence)
    return True


def reserve_ahead(ledger: Ledger, decoding: Collection[SequenceState]) -> None:
    """Give a block to each row that needs one soon, while free ones are plenty.

    For a step that changes block tables anyway: later steps then change nothing, and copy nothing to the device. Soon
    is as many tokens as give blocks to about _TOGETHER rows of all lengths, half a block at most.
    """
    size, plenty = ledger.limits.block_size, len(decoding)
    soon = min(size // 2, _TOGETHER * size // max(1, plenty))
    for sequence in [s for s in decoding if s.planned_tokens + soon >= s.wake_at]:
        if ledger.pool.free_count <= plenty:
            return
        if wake_at_latest(ledger, sequence) < sequence.max_length and _windows_reach(ledger, sequence, 1):
            _take_blocks(ledger, sequence, 1)
            set_wake(ledger, sequence)


def _windows_reach(ledger: Ledger, sequence: SequenceState, wanted: int) -> bool:
    """Whether as many blocks more are there in groups with a window, too. Those that law 4 asks for are, unless chunks
    in flight hold their places: a session's end moved on before they landed."""
    return _chunks_take(sequence) or windows.can_reach(ledger, sequence, len(sequence.blocks) + wanted)


def _chunks_take(sequence: SequenceState) -> bool:
    """Whether it takes no blocks of windows together with the others: chunks to come take them."""
    return not sequence.windows or (sequence.session is not None and sequence.session.extends)


def _take_blocks(ledger: Ledger, sequence: SequenceState, wanted: int) -> None:
    held = len(sequence.blocks)
    sequence.blocks += ledger.pool.take(wanted)
    ledger.write_blocks(sequence, held)
    if not _chunks_take(sequence):
        windows.reach(ledger, sequence, len(sequence.blocks))


# ---- when a row needs a decision ----


def set_wake(ledger: Ledger, sequence: SequenceState) -> None:
    """Below ``wake_at`` planned tokens, a step of any width writes into blocks it holds, and cannot be its last.

    Rows of equal length would all need a block in the same step. So some are looked at earlier, by slot, and take a
    block then if one is free.
    """
    ledger.asleep_for = 0
    sequence.wake_at = wake_at_latest(ledger, sequence)
    if sequence.wake_at < sequence.max_length:
        sequence.wake_at -= early(ledger, sequence)


def wake_at_latest(ledger: Ledger, sequence: SequenceState) -> int:
    """Planned tokens at which it needs a block, or is at its end."""
    capacity = len(sequence.blocks) * ledger.limits.block_size
    return min(capacity + 2 - ledger.limits.window, sequence.max_length)


def early(ledger: Ledger, sequence: SequenceState) -> int:
    """In tokens: 0 to not quite half a block."""
    return sequence.slot % max(1, (ledger.limits.block_size - 4) // 2)


# ---- who gives way ----


def _victim(ledger: Ledger) -> SequenceState:
    """The sequence that gives up blocks: a parked or paused one if there is one, else the last in line."""
    idle = idle_holder(ledger)
    if idle is not None:
        return idle
    states = (State.PREFILL, State.DECODE, State.STALLED)
    holders = [sequence for state in states for sequence in ledger.by_state[state].values()]
    return max(holders, key=lambda sequence: sequence.order)


def idle_holder(ledger: Ledger) -> SequenceState | None:
    """A sequence that holds a slot and blocks and does not run: the session parked for longest, else the last in line
    of the paused requests."""
    if ledger.config.session_policy != "refuse":
        parked = oldest_parked(s for s in ledger.by_state[State.PARKED].values() if s.slot)
        if parked is not None:
            return parked
    paused = [sequence for sequence in ledger.by_state[State.PAUSED].values() if sequence.slot]
    return max(paused, key=lambda sequence: sequence.order, default=None)


def oldest_parked(parked: Iterable[SequenceState]) -> SequenceState | None:
    """The session of ``parked`` that was parked first."""
    return min(parked, key=lambda sequence: sequence.session.parked_at if sequence.session else 0, default=None)


def evict(ledger: Ledger, sequence: SequenceState, for_want_of: str = "full") -> None:
    """Take slot and blocks away; it queues again, to be recomputed, once its steps in flight have landed.
    ``for_want_of``: as in ScheduleCounters.evicted_for.

    With the policy "close" a parked session ends instead.
    """
    parked = sequence.state is State.PARKED
    if parked and ledger.config.session_policy == "close":
        close(ledger, sequence, "closed: memory is short, and it was parked for longest")
        return
    ledger.counters.evictions += 1
    ledger.counters.evicted_for[for_want_of] = ledger.counters.evicted_for.get(for_want_of, 0) + 1
    ledger.publish_landed(sequence)
    ledger.give_up(sequence)
    if parked:
        ledger.counters.session_evictions += 1
        ledger.news.append(Evicted(sequence.request.request_id, sequence.landed_tokens))


def close(ledger: Ledger, parked: SequenceState, why: str) -> None:
    """End a parked session for want of room."""
    ledger.counters.session_closes += 1
    ledger.news.append(ledger.end(parked, FinishReason.CANCELLED, why))
