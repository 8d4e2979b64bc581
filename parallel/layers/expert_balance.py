"""Balanced expert placement from the number of tokens that chose each expert: a pure function of counts.

Knows: the greedy balance. Does not know: where counts come from (models/expert_load.py), or weights (experts.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.layers.experts import held_experts


def balanced_order(tokens: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Expert ids, the first rank's first: equally many experts a rank, their tokens balanced greedily.

    ``tokens[e]`` chose expert e. Experts are assigned in order of falling load, each to the rank with the fewest tokens
    so far that still has room (longest processing time first, Graham 1969). Never worse than the order 0, 1, 2, ...,
    which it returns where it finds nothing better. Raises ValueError where the ranks do not divide the experts.
    """
    experts = len(tokens)
    in_order = tuple(range(experts))
    room = len(held_experts(experts, 0, ranks))
    held: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for expert in sorted(in_order, key=lambda expert: (-tokens[expert], expert)):
        rank = min((r for r in range(ranks) if len(held[r]) < room), key=lambda r: (sums[r], r))
        held[rank].append(expert)
        sums[rank] += tokens[expert]
    if max(sums) >= max(rank_tokens(tokens, in_order, ranks)):
        return in_order
    return tuple(expert for of_rank in held for expert in sorted(of_rank))


def rank_tokens(tokens: Sequence[int], order: Sequence[int], ranks: int) -> list[int]:
    """Tokens that chose each rank's experts, where ``order`` lists the first rank's experts first."""
    share = len(order) // ranks
    return [sum(tokens[expert] for expert in order[r * share : (r + 1) * share]) for r in range(ranks)]
