"""SchedulerConfig: every limit that a plan depends on, the same on every rank.

Knows: names and units. Does not know: where the numbers come from (runtime/config.py, runtime/build.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any


def _ascending(numbers: Sequence[Any]) -> bool:
    return all(low < high for low, high in pairwise(numbers))


@dataclass(frozen=True, slots=True)
class MixedSteps:
    """Steps that hold decode rows and prefill chunks together, and how many tokens they may have.

    A step's tokens are W for each decode row and those of its chunks. ``buckets``: totals of them, ascending, for which
    forward graphs exist; chunks are cut so that the total is one of them. Without any, nothing is rounded.
    ``budgets``: (decode rows up to, KV tokens of those rows up to, tokens of a mixed step at most), ascending; the
    first entry that covers a step's rows and KV tokens counts, and the last one of either where none does. Without any,
    chunks have ``max_prefill_tokens`` at most.
    ``calm``: (decode rows up to, tokens of all chunks), looked up in the same way. While few prompt tokens wait, a step
    takes no more than these; while many wait, of the budget, what fills a bucket with the ``drain_steps``-th part of
    them. Without any, a step takes all that the budget allows. budget.py makes both tables from measured times.
    ``long_prompt``: prompts of more tokens wait in a lane of their own, where shorter ones may pass them while one
    before them is prefilled, and count as so many tokens of those that wait. ``costly_prefix``: behind so many tokens
    of its own prompt a chunk's token counts as two of the budget, since its attention costs as much as its products
    (0: all count as one).

    The numbers are data: rank 0 measures and shares them, and the digest holds them, so ranks that differ are found
    out at the first step. Raises ValueError for numbers that do not ascend, or are not positive.
    """

    buckets: tuple[int, ...] = ()
    budgets: tuple[tuple[int, int, int], ...] = ()
    calm: tuple[tuple[int, int], ...] = ()
    drain_steps: int = 6
    long_prompt: int = 2048
    costly_prefix: int = 0

    def __post_init__(self) -> None:
        if self.buckets and (self.buckets[0] < 1 or not _ascending(self.buckets)):
            raise ValueError(f"buckets is {self.buckets}, but they are totals of tokens, ascending from 1 on")
        if not _ascending([entry[:2] for entry in self.budgets]) or any(min(entry) < 0 for entry in self.budgets):
            raise ValueError(f"budgets is {self.budgets}, but (rows, KV tokens) of its entries ascend from 0 on")
        if not _ascending([rows for rows, _ in self.calm]) or any(min(entry) < 0 for entry in self.calm):
            raise ValueError(f"calm is {self.calm}, but the rows of its entries ascend from 0 on")
        if self.drain_steps < 1 or self.long_prompt < 1 or self.costly_prefix < 0:
            raise ValueError(
                f"drain_steps is {self.drain_steps}, long_prompt {self.long_prompt} and costly_prefix "
                f"{self.costly_prefix}: numbers of steps and tokens, at least 1, 1 and 0"
            )

    @property
    def numbers(self) -> tuple[int, ...]:
        """Everything above as the digest folds it."""
        tables = (self.buckets, tuple(chain.from_iterable(self.budgets)), tuple(chain.from_iterable(self.calm)))
        lists = [number for table in tables for number in (len(table), *table)]
        return (*lists, self.drain_steps, self.long_prompt, self.costly_prefix)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """All limits, the same on every rank. ``blocks`` counts usable KV blocks, without the trash block.

    ``rows`` sequences prefill or decode at once. ``slots`` is larger (twice as many are plenty), so that a successor
    is seated while the last tokens of its predecessor are in flight. ``depth`` is the chain depth D. ``horizon``: L, by
    which events come early; no plan uses it, the digest holds it and D. ``widths`` are
    the widths W of decode steps in tokens a row, taken in turn: decode step n has ``widths[n % len(widths)]``.
    ``max_prefill_tokens`` is the most that the chunks of one step hold together. ``mixed``: prefill chunks run in the
    steps of the decode rows. None: in steps of their own, at most ``prefill_burst`` in a row while others decode.
    Raises ValueError for widths below 1, or none, and for mixed buckets that all decode rows would fill.
    """

    rows: int
    slots: int
    blocks: int
    block_size: int
    max_model_len: int
    depth: int = 2
    horizon: int = 0
    widths: tuple[int, ...] = (1,)
    max_prefill_tokens: int = 8192
    prefill_burst: int = 4
    prefix_caching: bool = True
    max_waiting: int = 100_000
    mixed: MixedSteps | None = None

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"widths is {self.widths}, but a decode step gives each row room for at least one token")
        if self.mixed is not None and self.mixed.buckets and self.mixed.buckets[-1] <= self.rows * self.max_width:
            raise ValueError(
                f"the largest bucket of a mixed step is {self.mixed.buckets[-1]} tokens: {self.rows} decode rows of "
                f"width {self.max_width} leave no room for a prompt"
            )

    @property
    def max_width(self) -> int:
        """The largest W of any step: what reservations count on, since widths may change from step to step."""
        return max(self.widths)
