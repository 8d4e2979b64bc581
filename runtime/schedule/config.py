"""StepLimits: what bounds every step, for plans and for device tables alike; SchedulerConfig: what else a plan needs.

Knows: names, units and legal values. Does not know: where the numbers come from (runtime/config.py, runtime/build.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Final, Literal, get_args

from runtime.schedule.speculation import Speculation

# Smallest and largest legal value of each limit; None is "no upper limit". The command line checks against the same.
LIMIT_RANGES: Final[dict[str, tuple[int, int | None]]] = {
    "rows": (1, 65_535),
    "block_size": (1, 1024),
    "max_model_len": (2, None),
    "depth": (0, 64),
    "width": (1, 256),
    "max_prefill_tokens": (1, None),
    "tree": (0, 33),
}


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step and a sequence hold at most: plans keep to it, and device memory is sized for it.

    The scheduler and the executor of a rank hold the same value, and so do all ranks; but the executor's ``depth`` is
    the deepest that may be chosen, where the chain depth is measured once graphs are there. ``rows`` sequences prefill
    or decode at once. ``slots`` is larger (twice as many are plenty), so that a successor is admitted while the last
    tokens of its predecessor are in flight. ``block_size`` is tokens a KV block. ``max_model_len``: tokens of a prompt
    and its answer together. ``depth`` is the chain depth D. ``width`` is the largest W of any step. ``tree``: tokens of
    a draft tree, root included, of which a row may append up to W; 0 for chains.
    ``max_prefill_tokens`` is the most that the chunks of one step hold together. Raises ValueError for a value outside
    LIMIT_RANGES, and for fewer slots than rows.
    """

    rows: int
    slots: int
    block_size: int
    max_model_len: int
    depth: int = 2
    width: int = 1
    max_prefill_tokens: int = 8192
    tree: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in LIMIT_RANGES.items():
            value = getattr(self, name)
            if value < low or (high is not None and value > high):
                raise ValueError(f"{name} is {value}, but must be {low} to {'any number' if high is None else high}")
        if self.slots < self.rows:
            raise ValueError(f"slots is {self.slots}, but each of {self.rows} rows needs one")
        if self.tree and self.tree < self.width:
            raise ValueError(f"tree is {self.tree}, but a path of {self.width} tokens, the width, has to fit in")

    @property
    def max_blocks(self) -> int:
        """Blocks that one sequence may hold: its last step writes a draft window after the last token but one."""
        return -(-(self.max_model_len + self.window) // self.block_size)

    def most_blocks(self, max_length: int) -> int:
        """Blocks that a request of ``max_length`` tokens can ever need.

        The newest token has no KV yet, so a live row starts at most at position max_length - 2, and writes a window
        from there: W entries, or those of a draft tree.
        """
        return -(-(max_length - 2 + self.window) // self.block_size)

    def window_blocks(self, window: int) -> int:
        """Blocks that a decode row holds at most of layers that see the last ``window`` keys: those before its newest
        token, what is reserved ahead, half a block taken early, and one for where pages begin.
        """
        most = window - 1 + self.tokens_ahead + self.block_size // 2
        return min(self.max_blocks, -(-most // self.block_size) + 1)

    @property
    def window(self) -> int:
        """KV entries that a row writes in its widest step: a tree's tokens, or W."""
        return self.tree or self.width

    def row_tokens(self, width: int) -> int:
        """Tokens of a decode row in a step of ``width``: so many, or a whole draft tree."""
        return self.window if width > 1 and self.tree else width

    @property
    def tokens_ahead(self) -> int:
        """KV entries that steps in flight together may write after those landed: what is reserved before a row runs.
        W for each step but the last, which writes its whole window.
        """
        return self.depth * self.width + self.window


def _ascending(numbers: Sequence[Any]) -> bool:
    return all(low < high for low, high in pairwise(numbers))


@dataclass(frozen=True, slots=True)
class MixedSteps:
    """Steps that hold decode rows and prefill chunks together, and how many tokens they may have.

    A step's tokens are W for each decode row, or its draft tree's, and those of its chunks. ``buckets``: totals of
    them, ascending, for which forward graphs exist; chunks are cut so that the total is one of them. Without any,
    nothing is rounded.
    ``budgets``: (decode rows up to, KV tokens of those rows up to, tokens of a mixed step at most), ascending; the
    first entry that covers a step's rows and KV tokens counts, and the last one of either where none does. Without any,
    chunks have ``max_prefill_tokens`` at most.
    ``calm``: (decode rows up to, tokens of all chunks), looked up in the same way. While few prompt tokens wait, a step
    takes no more than these; while many wait, of the budget, what fills a bucket with the ``drain_steps``-th part of
    them. Without any, a step takes all that the budget allows. budget.py makes both tables from measured times.
    ``long_prompt``: longer prompts (in tokens) wait in a separate queue class, where shorter ones may pass them while
    an earlier one prefills, and count as so many waiting tokens. ``costly_prefix``: prefix length at which a chunk's
    token counts as two of the budget, since its attention costs as much as its GEMMs (0: all count as one). ``tile``:
    tokens of a chunk that attention processes at once; ``wave``: such tiles of all chunks that run at the same time.
    Chunks after long prefixes are cut to fill whole waves (shares.py; 0: they are not).
    ``stride``: while so few prompt tokens wait that one step may take them all, chunks join decode rows only in steps
    whose number it divides, with ``stride`` times as many tokens. Groups that share experts pad their steps to the
    longest one's; so chunks of all groups come together, and cost one long step instead of two.

    The numbers are data: rank 0 measures and shares them, and the digest holds them, so ranks that differ are found
    out at the first step. Raises ValueError for numbers that do not ascend, or are not positive.
    """

    buckets: tuple[int, ...] = ()
    budgets: tuple[tuple[int, int, int], ...] = ()
    calm: tuple[tuple[int, int], ...] = ()
    drain_steps: int = 6
    long_prompt: int = 2048
    costly_prefix: int = 0
    tile: int = 0
    wave: int = 0
    stride: int = 1

    def __post_init__(self) -> None:
        if self.buckets and (self.buckets[0] < 1 or not _ascending(self.buckets)):
            raise ValueError(f"buckets is {self.buckets}, but they are totals of tokens, ascending from 1 on")
        if not _ascending([entry[:2] for entry in self.budgets]) or any(min(entry) < 0 for entry in self.budgets):
            raise ValueError(f"budgets is {self.budgets}, but (rows, KV tokens) of its entries ascend from 0 on")
        if not _ascending([rows for rows, _ in self.calm]) or any(min(entry) < 0 for entry in self.calm):
            raise ValueError(f"calm is {self.calm}, but the rows of its entries ascend from 0 on")
        if (
            self.drain_steps < 1
            or self.long_prompt < 1
            or self.stride < 1
            or min(self.costly_prefix, self.tile, self.wave) < 0
            or ((self.tile == 0) is not (self.wave == 0))
        ):
            raise ValueError(
                f"drain_steps is {self.drain_steps}, long_prompt {self.long_prompt}, stride {self.stride}, "
                f"costly_prefix {self.costly_prefix}, tile {self.tile} and wave {self.wave}: numbers of steps, tokens "
                "and tiles, the first three at least 1, the others 0, and both of the last two or neither"
            )

    @property
    def numbers(self) -> tuple[int, ...]:
        """Everything above as the digest folds it."""
        tables = (self.buckets, tuple(chain.from_iterable(self.budgets)), tuple(chain.from_iterable(self.calm)))
        lists = [number for table in tables for number in (len(table), *table)]
        return (*lists, self.drain_steps, self.long_prompt, self.costly_prefix, self.tile, self.wave, self.stride)

    @property
    def long_prefix(self) -> int:
        """Prefix length from which a chunk's attention takes a third of its time or more: filling waves pays."""
        return max(1, self.costly_prefix // 2)


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """Snapshots of recurrent state, of a model that keeps some: without one, the KV of a prefix cannot be continued.

    ``count``: snapshots there is memory for. ``interval``: a prompt's chunk ends at every so many blocks, to leave one
    there (0: nowhere but at the last full block, and where the KV that others left ends). ``worth``: tokens that a
    snapshot must lie after the one before it, since each costs its prompt a step. Raises ValueError for others.
    """

    count: int
    interval: int = 0
    worth: int = 256

    def __post_init__(self) -> None:
        if self.count < 1 or self.interval < 0 or self.worth < 1:
            raise ValueError(
                f"count is {self.count}, interval {self.interval} and worth {self.worth}: numbers of snapshots, blocks "
                "and tokens, at least 1, 0 and 1"
            )

    @property
    def numbers(self) -> tuple[int, ...]:
        """Everything above as the digest folds it."""
        return self.count, self.interval, self.worth


# What parked sessions do when memory is short: they are recomputed later, the oldest is closed, or nothing new begins
# that could make it so.
SessionPolicy = Literal["evict", "close", "refuse"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What plans depend on besides events and results, the same on every rank.

    ``blocks`` counts usable KV blocks, without the trash block, of layers that attend to all tokens. ``windows``: (W,
    blocks) of each group of layers that attend to the last W keys only (windows.py). ``widths`` are the widths W of
    decode steps in tokens a row, used in turn: decode step n has ``widths[n % len(widths)]``; without any, all have
    ``limits.width``. ``horizon``: L, by which events come early; no plan uses it, the digest holds it and D. ``mixed``:
    prefill chunks run in the steps of the decode rows. None: in separate steps, at most ``prefill_burst`` in a row
    while others decode. ``max_waiting``: requests that may queue. ``speculation``: decode and mixed steps have its
    width or 1, as speculation.py decides; ``widths`` count for nothing then. ``max_sessions``: sessions there may be,
    from their first token to their close; each may hold a slot all that time, so there are as many slots beyond
    ``rows``. ``session_policy``: what becomes of those that are parked when memory is short. ``snapshots``: of a model
    that keeps recurrent state; it needs them for prefix caching, and others have none.
    Raises ValueError for widths outside 1 to ``limits.width``, for mixed buckets that all decode rows would fill, for
    too few slots, for a group that cannot hold one window, and for another policy.
    """

    limits: StepLimits
    blocks: int
    widths: tuple[int, ...] = ()
    horizon: int = 0
    prefill_burst: int = 4
    prefix_caching: bool = True
    max_waiting: int = 100_000
    mixed: MixedSteps | None = None
    speculation: Speculation | None = None
    max_sessions: int = 0
    session_policy: SessionPolicy = "evict"
    snapshots: SnapshotPolicy | None = None
    windows: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        rows, width = self.limits.rows, self.limits.width
        if self.speculation is not None and self.speculation.width > width:
            raise ValueError(f"windows have {self.speculation.width} tokens a row, but the limits' width is {width}")
        if not 0 <= self.max_sessions <= self.limits.slots - rows:
            raise ValueError(
                f"max_sessions is {self.max_sessions}, but {self.limits.slots} slots for {rows} rows leave room for 0 "
                f"to {self.limits.slots - rows}"
            )
        if self.session_policy not in get_args(SessionPolicy):
            raise ValueError(
                f"session_policy is {self.session_policy!r}, but must be one of {', '.join(get_args(SessionPolicy))}"
            )
        for window, blocks in self.windows:
            if window < 1 or blocks < self.limits.window_blocks(window):
                raise ValueError(
                    f"the KV group of window {window} has {blocks} blocks, but windows are 1 or more, and a request "
                    f"may hold {self.limits.window_blocks(max(1, window))} blocks of it"
                )
        if not self.widths:
            object.__setattr__(self, "widths", (width,))
        if min(self.widths) < 1 or max(self.widths) > width:
            raise ValueError(
                f"widths is {self.widths}, but a decode step gives each row room for 1 to {width} tokens, the limits' "
                "width"
            )
        width = width if self.speculation is None else 1
        if self.mixed is not None and self.mixed.buckets and self.mixed.buckets[-1] <= rows * width:
            raise ValueError(
                f"the largest bucket of a mixed step is {self.mixed.buckets[-1]} tokens: {rows} decode rows of "
                f"width {width} leave no room for a prompt"
            )
