"""How many tokens a mixed step may have: the table at work, and how it is made from measured times.

Knows: numbers of tokens, and times that somebody measured before the first step. Does not know: clocks, requests,
which prompts get the tokens (shares.py).
"""

from __future__ import annotations

from bisect import bisect_left

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
