"""How many tokens a mixed step may have: the table at work, and how it is made from measured times.

Knows: numbers of tokens, and times that somebody measured before the first step. Does not know: clocks, requests,
which prompts get the tokens (shares.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from runtime.schedule.config import MixedSteps


class TokenBudget:
    """Looks a step up in ``mixed``. ``most_chunk_tokens``: of all chunks of a step, whatever the table says."""

    def __init__(self, mixed: MixedSteps, most_chunk_tokens: int) -> None:
        self._buckets = mixed.buckets
        self._most_chunk_tokens = most_chunk_tokens
        self._rows: list[int] = []
        self._kv_tokens: list[list[int]] = []
        self._totals: list[list[int]] = []
        for rows, kv_tokens, total in mixed.budgets:
            if not self._rows or self._rows[-1] != rows:
                self._rows.append(rows)
                self._kv_tokens.append([])
                self._totals.append([])
            self._kv_tokens[-1].append(kv_tokens)
            self._totals[-1].append(total)

    def chunk_tokens(self, rows: int, kv_tokens: int, width: int) -> int:
        """Tokens for the chunks of a step with ``rows`` decode rows of ``width`` that hold ``kv_tokens`` at most.

        As many as fill the largest bucket within the budget. At least one, and at least up to the next bucket: prompts
        advance in every step, however little the budget is.
        """
        decoding = rows * width
        total = decoding + self._most_chunk_tokens
        if self._rows:
            near = min(bisect_left(self._rows, rows), len(self._rows) - 1)
            limits = self._kv_tokens[near]
            total = min(total, self._totals[near][min(bisect_left(limits, kv_tokens), len(limits) - 1)])
        return min(max(self.floor(total), self.bucket(decoding + 1)) - decoding, self._most_chunk_tokens)

    def floor(self, total: int) -> int:
        """The largest bucket of at most ``total`` tokens; 0 where there is none, ``total`` without buckets."""
        if not self._buckets:
            return total
        above = bisect_left(self._buckets, total + 1)
        return self._buckets[above - 1] if above else 0

    def bucket(self, total: int) -> int:
        """The smallest bucket that holds ``total`` tokens."""
        return self._buckets[bisect_left(self._buckets, total)] if self._buckets else total


SLOWDOWN = 2.0  # a step with prompts takes at most so many times as long as the decode step that it replaces
LEAST_CHUNK = 16  # tokens of prompts in a mixed step, where even fewer would miss the target


def budget_table(
    step_ms: Sequence[tuple[int, float]],
    kv_ms: float,
    rows: Sequence[int],
    kv_tokens: Sequence[int],
    target_ms: float | None = None,
) -> tuple[tuple[int, int, int], ...]:
    """MixedSteps.budgets from measured times: the most tokens whose step is not longer than the target.

    ``step_ms``: (total tokens, ms) of steps that read next to no KV, ascending. ``kv_ms``: of reading one token's KV.
    ``rows`` and ``kv_tokens``, ascending: the cells of the table, each for steps up to these. ``target_ms``: how long a
    step may take, so how long a decode row waits for its next token; None: ``SLOWDOWN`` times what the step takes
    without prompts.
    """
    slowest = 0.0
    rising = [(tokens, slowest := max(slowest, ms)) for tokens, ms in step_ms]  # a measured dip promises nothing
    table = []
    for row_limit in rows:
        decode_ms = next((ms for tokens, ms in rising if tokens >= row_limit), slowest)
        for kv_limit in kv_tokens:
            allowed = (SLOWDOWN * (decode_ms + kv_limit * kv_ms) if target_ms is None else target_ms) - kv_limit * kv_ms
            fits = [tokens for tokens, ms in rising if ms <= allowed]
            table.append((row_limit, kv_limit, max(row_limit + LEAST_CHUNK, *fits, 0)))
    return tuple(table)
