"""What sessions may hold: the limits on new and longer ones, and the copy that a fork starts with.

Knows: ``max_sessions``, the policies on their memory, how a slot with all that it holds is copied.
Does not know: turns and quotas (sessions.py), how a session comes to be evicted (reservation.py).
"""

from __future__ import annotations

from array import array
from dataclasses import replace

from runtime.schedule import reservation, windows
from runtime.schedule.ledger import Ledger
from runtime.schedule.plan import SlotCopy
from runtime.schedule.request import Request
from runtime.schedule.sequence import SequenceState
from runtime.schedule.states import State


def arrival_refusal(ledger: Ledger, request: Request, quantum: int, max_length: int) -> str | None:
    """Why ``request`` cannot be a session with a quota of ``quantum`` tokens; None if it can."""
    if quantum < 1 or request.sampling.n > 1:
        return f"a session has a quantum of 1 or more, and one answer; not {quantum}, and {request.sampling.n}"
    return refusal(ledger, max_length)


def refusal(ledger: Ledger, budget_length: int, existing: SequenceState | None = None) -> str | None:
    """Why no new session of so many tokens, or no longer budget of the session ``existing``, is possible.

    Closes the oldest parked session if the policy says so and that makes room.
    """
    config = ledger.config
    needed = ledger.limits.most_blocks(budget_length)
    if needed > config.blocks:
        size = ledger.limits.block_size
        return f"{budget_length} tokens need {needed} blocks of {size}, the pool has {config.blocks}"
    if existing is None and len(ledger.sessions) >= config.max_sessions:
        oldest = reservation.oldest_parked(ledger.by_state[State.PARKED].values())
        if config.session_policy != "close" or oldest is None:
            return f"there are {len(ledger.sessions)} sessions, max_sessions is {config.max_sessions}: close one"
        why = f"closed: {len(ledger.sessions)} sessions are open, and another one begins"
        reservation.close(ledger, oldest, why)
    if config.session_policy == "refuse":
        others = [other.session for other in ledger.sessions.values() if other is not existing and other.session]
        promised = sum(ledger.limits.most_blocks(session.budget_length) for session in others)
        if promised + needed > config.blocks:
            return (
                f"its {budget_length} tokens need {needed} blocks, and {promised} of {config.blocks} are promised "
                "to other sessions: close one"
            )
        for pool in ledger.windows:
            if (len(others) + 1) * pool.quota > pool.count:
                return (
                    f"it needs {pool.quota} blocks of the KV group of window {pool.window}, and as many are promised "
                    f"to each of {len(others)} other sessions, of {pool.count}: close one"
                )
    return None


def copy_of(ledger: Ledger, parent: SequenceState, request_id: int) -> SequenceState:
    """Another sequence with the tokens of ``parent``, WAITING; the caller parks it before the next plan."""
    copied = SequenceState(replace(parent.request, request_id=request_id), ledger.arrivals, parent.max_length)
    copied.tokens = array("i", parent.tokens)
    copied.planned_tokens, copied.score_at = copied.landed_tokens, len(parent.request.prompt_token_ids)
    ledger.queue_up(copied)
    return copied


def admit_copy(ledger: Ledger, parent: SequenceState, copied: SequenceState) -> bool:
    """Give ``copied``, which has the tokens of the parked ``parent``, a slot with all that the parent's holds.

    The next plan carries the copy, which comes before anything else of its step. So either may release everything at
    once, and the next owner writes later. False if the parent holds nothing or was closed for this one, or if no slot,
    or no block for the end of its KV, is free that no copy of the same step reads.
    """
    slots, pool = ledger.slots, ledger.pool
    written = parent.landed_tokens - 1  # the newest token has no KV yet
    full, rest = divmod(written, ledger.limits.block_size)
    if parent.state is not State.PARKED or not parent.slot:
        return False
    if not slots.free_count or (rest and not pool.free_count) or not windows.has_room(ledger, copied):
        return False
    slot, fresh, shared = slots.take(), pool.take(1 if rest else 0), parent.blocks[:full]
    in_windows = [group.take(len(fresh)) for group in ledger.windows]
    if _is_read(ledger, slot, fresh) or windows.is_read(ledger, in_windows):
        slots.give_back(slot)
        for group, taken in zip((pool, *ledger.windows), (fresh, *in_windows), strict=True):
            group.give_back(taken)
        return False
    copied.seated(slot, slots.epochs[slot])
    copied.prefill_begun = copied.resumes = True
    copied.prefilled = written
    pool.share(shared)
    copied.blocks = shared + fresh
    pairs = windows.copy(ledger, parent, copied, full, in_windows)
    copied.published_blocks, copied.prefix_id = parent.published_blocks, parent.prefix_id
    copied.publish_at, copied.state_at = parent.publish_at, parent.state_at
    copied.trusted, copied.borrowed, copied.private = parent.trusted, parent.borrowed, parent.private
    ledger.write_blocks(copied, 0)
    source, pair = parent.slot, (parent.blocks[full], copied.blocks[full]) if rest else None
    if parent.slot in ledger.copies:  # it is copied in the same step itself
        first, _ = ledger.copies[parent.slot]
        source = first.source
        pair = (first.copied[0], pair[1]) if pair and first.copied else pair
        pairs = tuple([(was, own) for (was, _), (_, own) in zip(first.in_windows, pairs, strict=False)]) or pairs
    ledger.copies[slot] = SlotCopy(source, slot, pair, pairs), copied
    ledger.counters.admissions += 1
    return True


def _is_read(ledger: Ledger, slot: int, blocks: list[int]) -> bool:
    """Whether a copy of the plan being made, whose source has ended meanwhile, reads any of these."""
    copies = [copy for copy, _ in ledger.copies.values()]
    return any(copy.source == slot or (copy.copied and copy.copied[0] in blocks) for copy in copies)
