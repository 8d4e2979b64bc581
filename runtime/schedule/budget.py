"""How many tokens a mixed step may have: the tables at work, and how they are made from measured times.

Knows: numbers of tokens, and times that were measured before the first step. Does not know: clocks, requests,
which prompts get the tokens (shares.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from runtime.schedule.config import MixedSteps

# ---- at work ----

NO_BOUND = 1 << 40  # tokens of a step for which no decode row waits


class TokenBudget:
    """Looks a step up in ``mixed``. ``most_chunk_tokens``: limit for all chunks of a step."""

    def __init__(self, mixed: MixedSteps, most_chunk_tokens: int) -> None:
        self._buckets = mixed.buckets
        self._most_chunk_tokens = most_chunk_tokens
        self._drain_steps = mixed.drain_steps
        self._calm_rows = [rows for rows, _ in mixed.calm]
        self._calm_tokens = [tokens for _, tokens in mixed.calm]
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

    def chunk_tokens(
        self, rows: int, kv_tokens: int, row_tokens: int, waiting_tokens: int, stride: int = 1, room: int = NO_BOUND
    ) -> int:
        """Tokens for the chunks of a step with ``rows`` decode rows of ``row_tokens`` and at most ``kv_tokens`` of KV.

        As many as fill the largest bucket within the budget, which is at most ``room``. If ``waiting_tokens`` of
        prompts are few, as many as fill the smallest bucket that holds enough of them, ``stride`` times as many as
        if every step had chunks. At least one, and at least up to the next bucket: prompts advance in each such
        step, however small the budget is.
        """
        decoding = rows * row_tokens
        total = min(self._most_total(decoding, rows, kv_tokens), room)
        if self._calm_rows:
            calm = self._calm_tokens[_entry(self._calm_rows, rows)]
            enough = decoding + stride * max(calm, -(-waiting_tokens // self._drain_steps))
            total = min(total, self.bucket(enough) or total)
        return min(max(self.floor(total), self.bucket(decoding + 1)) - decoding, self._most_chunk_tokens)

    def prefill_tokens(self, room: int) -> int:
        """Tokens for the chunks of a step without decode rows, for which rows of other groups may have to wait."""
        least = self._buckets[0] if self._buckets else 1
        return min(self._most_chunk_tokens, max(self.floor(room), least))

    def most_beside(self, decoding: int) -> int:
        """Most chunk tokens of a step with ``decoding`` other tokens, whatever its time."""
        room = self._buckets[-1] - decoding if self._buckets else self._most_chunk_tokens
        return min(room, self._most_chunk_tokens)

    def step_room(self, rows: int, kv_tokens: int) -> int:
        """Tokens of a mixed step with ``rows`` decode rows; draft windows may use a part of them."""
        return self._most_total(rows, rows, kv_tokens)

    @property
    def most_windows(self) -> int | None:
        """Most tokens of draft windows in a mixed step that leave the largest bucket room for a prompt; None without
        buckets."""
        return self._buckets[-1] - 1 if self._buckets else None

    def _most_total(self, decoding: int, rows: int, kv_tokens: int) -> int:
        total = decoding + self._most_chunk_tokens
        if self._rows:
            near = _entry(self._rows, rows)
            total = min(total, self._totals[near][_entry(self._kv_tokens[near], kv_tokens)])
        return total

    def floor(self, total: int) -> int:
        """The largest bucket of at most ``total`` tokens; 0 where there is none, ``total`` without buckets."""
        if not self._buckets:
            return total
        above = bisect_left(self._buckets, total + 1)
        return self._buckets[above - 1] if above else 0

    def bucket(self, total: int) -> int:
        """The smallest bucket that holds ``total`` tokens; 0 where there is none, ``total`` without buckets."""
        if not self._buckets:
            return total
        at = bisect_left(self._buckets, total)
        return self._buckets[at] if at < len(self._buckets) else 0


def _entry(limits: Sequence[int], number: int) -> int:
    """Index of the first limit that covers ``number``, or of the last."""
    return min(bisect_left(limits, number), len(limits) - 1)


# ---- made ----

LONGEST = 7.0  # a mixed step takes at most so many times the fixed cost of a step (reads of weights above all)
SLOWDOWN = 2.0  # or, if that is more, so many times as long as the decode step that it replaces
CALM_SLOWDOWN = 1.5  # the same, while few prompt tokens wait
CHEAPER = 0.8  # larger chunks are worth it while few wait, if a token of them costs at most so much of one of these
LEAST_CHUNK = 16  # tokens of prompts in a mixed step, where even fewer would miss the target

# (total tokens, ms) of forward passes, ascending in both
Times = Sequence[tuple[int, float]]


def budget_table(
    step_ms: Times, kv_ms: float, rows: Sequence[int], kv_tokens: Sequence[int], target_ms: float | None = None
) -> tuple[tuple[int, int, int], ...]:
    """MixedSteps.budgets from measured times: the most tokens whose step is not longer than the target.

    ``step_ms``: (total tokens, ms) of steps that read next to no KV, one of them at least, tokens ascending; between
    them times are interpolated, beyond them there are no tokens. ``kv_ms``: of reading one token's KV. ``rows`` and
    ``kv_tokens``, ascending: the cells of the table, each for steps up to these. ``target_ms``: how long a step may
    take, so how long a decode row waits for its next token; None: ``LONGEST`` and ``SLOWDOWN``.
    """
    times = _rising(step_ms)
    fixed_ms = _fixed_ms(times)
    table = []
    for row_limit in rows:
        decode_ms = _ms_of(times, row_limit)
        for kv_limit in kv_tokens:
            read_ms = kv_limit * kv_ms
            longest_ms = max(LONGEST * fixed_ms, SLOWDOWN * (decode_ms + read_ms))
            total = _tokens_within(times, (longest_ms if target_ms is None else target_ms) - read_ms)
            table.append((row_limit, kv_limit, max(total, row_limit + LEAST_CHUNK)))
    return tuple(table)


def calm_table(step_ms: Times, rows: Sequence[int], slowdown: float = CALM_SLOWDOWN) -> tuple[tuple[int, int], ...]:
    """MixedSteps.calm from the same times: chunk tokens of a step that takes ``slowdown`` times its decode step.

    Or more, if larger chunks cost clearly less per token: a dense model's tokens are cheapest while reads of weights
    hide them, so small chunks with few decode rows cost least; those of a mixture of experts are cheapest in large
    steps, which share the reads of each expert.
    """
    times = _rising(step_ms)
    table = []
    for row_limit in rows:
        decode_ms = _ms_of(times, row_limit)
        chunk = max(_tokens_within(times, slowdown * decode_ms) - row_limit, LEAST_CHUNK)
        cost_ms = (_ms_of(times, row_limit + chunk) - decode_ms) / chunk
        more = [tokens - row_limit for tokens, ms in times if ms - decode_ms < CHEAPER * cost_ms * (tokens - row_limit)]
        table.append((row_limit, max(chunk, *more, 0)))
    return tuple(table)


def _fixed_ms(times: Times) -> float:
    """Fixed cost of a step in ms: the smallest step's time, or more if a larger step exceeds the price of its tokens in
    the largest. For a mixture of experts that is more: few tokens read few experts, some hundred read all.
    """
    most, most_ms = times[-1]
    return max(times[0][1], *(ms - tokens * most_ms / most for tokens, ms in times))


def _rising(step_ms: Times) -> list[tuple[int, float]]:
    """The same, without dips: more tokens never take less time."""
    slowest = 0.0
    return [(tokens, slowest := max(slowest, ms)) for tokens, ms in step_ms]


def _ms_of(times: Times, tokens: int) -> float:
    """Of so many tokens; the first time for fewer than were measured, the last slope beyond, where there is one."""
    if tokens <= times[0][0] or len(times) == 1:
        return times[0][1]
    pairs = list(pairwise(times))
    (low, low_ms), (high, high_ms) = next((pair for pair in pairs if tokens <= pair[1][0]), pairs[-1])
    return low_ms + (high_ms - low_ms) * (tokens - low) / (high - low)


def _tokens_within(times: Times, ms: float) -> int:
    """The most tokens that take ``ms`` at most, as many as were measured at most; 0 where none do."""
    most = times[0][0] if times[0][1] <= ms else 0
    for (low, low_ms), (high, high_ms) in pairwise(times):
        if high_ms <= ms:
            most = high
        elif low_ms <= ms:
            most = low + int((high - low) * (ms - low_ms) / (high_ms - low_ms))
    return most
