"""Which prompts get the prefill tokens of a step.

Knows: places in line, and how much of each prompt is left. Does not know: budgets of steps (budget.py), slots, blocks.

The rule: the prompt that is first in line gets half of the tokens, or less if it needs less. The rest goes, within one
priority, to the shortest remaining prompts first. So, among equals,
  * a long prompt that is first in line advances by half a step's tokens in every step, whatever arrives later;
  * a short prompt gets its tokens of the other half, however long and however many the prompts before it are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runtime.schedule.sequence import SequenceState


def share_out(prefills: Sequence[SequenceState], tokens: int, costly_prefix: int = 0) -> dict[SequenceState, int]:
    """Tokens of the next chunk of each of ``prefills`` that gets any, ``tokens`` together.

    The first in line gets at least one. ``costly_prefix``: prefix length at which a token counts as two.
    """
    if not prefills or tokens < 1:
        return {}
    first = min(prefills, key=lambda sequence: sequence.order)
    shares = {first: max(1, _affordable(first, -(-tokens // 2), costly_prefix))}
    left = tokens - cost(first, shares[first], costly_prefix)
    for sequence in sorted(prefills, key=lambda sequence: _turn(sequence, shares.get(sequence, 0))):
        had = shares.get(sequence, 0)
        more = _affordable(sequence, left, costly_prefix, had)
        if more:
            shares[sequence] = had + more
            left -= cost(sequence, more, costly_prefix)
        if had + more < in_one_step(sequence):
            break
    return shares


def whole_waves(
    shares: dict[SequenceState, int], long: Sequence[SequenceState], tile: int, wave: int, tokens: int
) -> dict[SequenceState, int]:
    """``shares`` in which the chunks of ``long`` fill whole waves of attention, as far as their prompts allow.

    Attention processes ``tile`` tokens of a chunk at a time and ``wave`` such tiles at once. A wave takes the same time
    however few tiles it has, so a last wave that is not full is dropped, or filled if three quarters of it are there.
    Chunks that do not make a wave together stay as they are. Tokens go in line order, first to what each had, in whole
    tiles, then beyond; all shares together have at most ``tokens``.
    """
    had = sum(shares[sequence] for sequence in long)
    tiles = (4 * had + tile * wave) // (4 * tile * wave) * wave
    if not tiles:
        return shares
    in_line = sorted(long, key=lambda sequence: sequence.order)
    cut = shares | dict.fromkeys(in_line, 0)
    left = tokens - sum(cut.values())
    for whole_prompts in (False, True):
        for sequence in in_line:
            most = in_one_step(sequence)
            wanted = most if whole_prompts else min(most, -(-shares[sequence] // tile) * tile)
            more = min(wanted - cut[sequence], tiles * tile, left)
            cut[sequence] += more
            left -= more
            tiles -= -(-more // tile)
    return {sequence: share for sequence, share in cut.items() if share}


def gets_a_share(
    candidate: SequenceState, prefills: Iterable[SequenceState], tokens: int, costly_prefix: int = 0
) -> bool:
    """Whether ``candidate``, which holds no blocks yet, would get tokens of a step shared with ``prefills``."""
    first = min(prefills, key=lambda sequence: sequence.order, default=None)
    if first is None or candidate.order < first.order:
        return tokens > 0
    guaranteed = max(1, _affordable(first, -(-tokens // 2), costly_prefix))
    left = tokens - cost(first, guaranteed, costly_prefix)
    turn = _turn_of(candidate, candidate.landed_tokens)
    for sequence in prefills:
        had = guaranteed if sequence is first else 0
        if _turn(sequence, had) < turn:
            left -= cost(sequence, in_one_step(sequence) - had, costly_prefix)
    return left > 0


def remaining(sequence: SequenceState) -> int:
    """Prompt tokens of an admitted sequence that are not planned yet."""
    return sequence.prefill_target - sequence.prefilled


def in_one_step(sequence: SequenceState) -> int:
    """How many of them one step may compute: a chunk ends where a snapshot is to be saved (sharing.py)."""
    return (sequence.stop_at or sequence.prefill_target) - sequence.prefilled


def cost(sequence: SequenceState, tokens: int, costly_prefix: int) -> int:
    """Budget cost of its next ``tokens``, rounded up."""
    if not costly_prefix:
        return tokens
    return -(-tokens * (costly_prefix + sequence.prefilled) // costly_prefix)


def _turn(sequence: SequenceState, had: int) -> tuple[int, int, int]:
    return _turn_of(sequence, remaining(sequence) - had)


def _turn_of(sequence: SequenceState, wanted: int) -> tuple[int, int, int]:
    priority, arrival = sequence.order
    return priority, wanted, arrival


def _affordable(sequence: SequenceState, tokens: int, costly_prefix: int, had: int = 0) -> int:
    """How many of its tokens, in addition to those it ``had``, cost ``tokens`` at most."""
    if costly_prefix:
        tokens = tokens * costly_prefix // (costly_prefix + sequence.prefilled)
    return max(0, min(tokens, in_one_step(sequence) - had))
