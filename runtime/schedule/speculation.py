"""When a decode step is a window, and of how many tokens a row: by the rows that decode, and by what landed rounds
gained against what a round costs.

Knows: the rule, over numbers that every rank has alike: events, landed results, costs that rank 0 measured before the
first step. Does not know: clocks, proposers, what a window computes.

A window of W tokens a row takes longer than a step of one token, the more so the more rows there are; it pays where it
gains more tokens a row than it takes plain steps' time. Gains are those of the last few hundred landed rounds, whose
weight halves as new ones come. While windows do not pay, one step in ``PROBE_EVERY`` is a window all the same, so that
other texts are noticed.

Where there are narrower windows, too, a step has the width that gains the most tokens in a plain step's time. A round
tells about narrower ones what it tells about itself: of w tokens it would have gained its first w. Of wider ones it
tells nothing, so the widest is tried at the same intervals.

Rows that decode beside prompt chunks follow the same rule, as far as their windows take a share of the step's tokens at
most: what a window takes there, prompts do not get, and a draft tree takes all of its tokens. Costs are those of steps
without chunks, which hide less of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

PROBE_EVERY: Final = 64  # decode steps without a window, before one is tried
REMEMBERED_ROUNDS: Final = 512  # from so many on, what was gained counts half
UNIT: Final = 1000  # costs are in thousandths of a plain step

Costs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Speculation:
    """Windows of ``width`` tokens a row, 2 or more, in steps that only decode.

    ``most_rows``: with more rows no step is a window, and with as many or fewer each is; 0: none ever is. None: gains
    decide. ``costs``: (decode rows up to, thousandths of a plain step's time that a window takes), rows ascending from
    1 on; the first entry that covers a step's rows counts, and the last one where none does. Without any, every step is
    a window. ``mixed_percent``: of the tokens that a step with chunks may have, so many may be windows'; 0: rows beside
    chunks have one token each. ``narrower``: (W, costs) of windows with fewer tokens, W descending, which steps without
    chunks may have where gains decide; each with costs of its own, and ``costs``, too. Data, as MixedSteps is: rank 0
    measures and shares, the digest holds it. Raises ValueError.
    """

    width: int
    most_rows: int | None = None
    costs: Costs = ()
    mixed_percent: int = 0
    narrower: tuple[tuple[int, Costs], ...] = ()

    def __post_init__(self) -> None:
        if self.width < 2:
            raise ValueError(f"width is {self.width}, but a window has 2 tokens a row or more")
        if self.most_rows is not None and self.most_rows < 0:
            raise ValueError(f"most_rows is {self.most_rows}, but must be 0 or more")
        if not 0 <= self.mixed_percent <= 100:
            raise ValueError(f"mixed_percent is {self.mixed_percent}, but must be 0 to 100")
        for costs in (self.costs, *(costs for _, costs in self.narrower)):
            rows = [rows for rows, _ in costs]
            if any(low >= high for low, high in pairwise([0, *rows])) or any(cost < 0 for _, cost in costs):
                raise ValueError(f"costs is {costs}, but rows ascend from 1 on, and no cost is below 0")
        widths = [self.width, *(width for width, _ in self.narrower), 1]
        if any(wide <= narrow for wide, narrow in pairwise(widths)):
            raise ValueError(f"narrower has widths {widths[1:-1]}, but they descend from {self.width} to 2 at least")
        if self.narrower and (self.most_rows is not None or not self.costs or not all(c for _, c in self.narrower)):
            raise ValueError("narrower windows are chosen by costs: each width needs some, and most_rows is None")

    @property
    def numbers(self) -> tuple[int, ...]:
        """Everything above as the digest folds it."""
        most = -1 if self.most_rows is None else self.most_rows
        numbers = [self.width, most, *_flat(self.costs), self.mixed_percent]
        for width, costs in self.narrower:
            numbers += [width, *_flat(costs)]
        return tuple(numbers)


def cost_of(costs: Costs, rows: int) -> int:
    """Of a window of so many rows, in thousandths of a plain step: of the first entry that covers them, or of the last;
    0 where there is none."""
    return costs[min(bisect_left(costs, (rows, 0)), len(costs) - 1)][1] if costs else 0


def _flat(costs: Costs) -> list[int]:
    return [len(costs), *(number for entry in costs for number in entry)]


class SpeculationPolicy:
    """``width(rows)`` for every decode step that is planned, ``mixed`` for every one with chunks beside its rows,
    ``landed`` for every window that landed, in order. ``row_tokens``: that a row brings to a window, by default W."""

    def __init__(self, config: Speculation, row_tokens: int | None = None) -> None:
        self.config = config
        self.row_tokens = row_tokens or config.width
        self.off: dict[str, int] = {}  # steps of decode rows that were no windows: "batch", "gain", "mixed"
        self.narrowed: dict[int, int] = {}  # steps that were narrower windows, by their guesses
        # Rounds that are remembered, of those wide enough to gain 2, 3, ... W tokens, and how many did.
        self._tried = [0] * (config.width - 1)
        self._gained = [0] * (config.width - 1)
        self._since_widest = 0

    def width(self, rows: int) -> int:
        """W of a decode step of ``rows`` rows: the config's, a narrower one, or 1."""
        return self._counted(*self._choice(rows))

    def mixed_width(self, rows: int, tokens: int) -> int:
        """W of ``rows`` rows in a step that may have ``tokens`` with its chunks, if it gets any; nothing is counted."""
        return self._mixed_choice(rows, tokens)[0]

    def mixed(self, rows: int, tokens: int) -> None:
        """That step has chunks."""
        self._counted(*self._mixed_choice(rows, tokens))

    def landed(self, width: int, rounds: int, kept: Sequence[int]) -> None:
        """``rounds`` live rows had a window of ``width``; ``kept[i]`` of them kept more than i guesses. Ghosts and
        padding are no rounds."""
        if not self.config.costs:
            return
        tried, gained = self._tried, self._gained
        for place in range(width - 1):
            tried[place] += rounds
            gained[place] += kept[place]
            if tried[place] >= REMEMBERED_ROUNDS:
                tried[place], gained[place] = tried[place] // 2, gained[place] // 2

    def tokens(self, width: int) -> int:
        """That a row of a window of ``width`` is expected to gain, in thousandths; before any landed that could have
        gained so many, it is hoped that it would."""
        places = zip(self._tried[: width - 1], self._gained, strict=False)
        return UNIT + sum(UNIT * gained // tried if tried else UNIT for tried, gained in places)

    def _choice(self, rows: int) -> tuple[int, str]:
        """W of a step of so many rows, and why it is no window; empty where it is one."""
        config = self.config
        if config.most_rows is not None:
            return (config.width, "") if rows <= config.most_rows else (1, "batch")
        if not config.costs or self._since_widest >= PROBE_EVERY:
            return config.width, ""
        best, tokens, cost = 1, UNIT, UNIT
        for width, costs in ((config.width, config.costs), *config.narrower):
            its_tokens, its_cost = self.tokens(width), cost_of(costs, rows)
            if its_tokens * cost > tokens * its_cost:
                best, tokens, cost = width, its_tokens, its_cost
        return best, "gain" if best == 1 else ""

    def _mixed_choice(self, rows: int, tokens: int) -> tuple[int, str]:
        """The same beside chunks, where windows have the config's width or none."""
        if 100 * rows * self.row_tokens > self.config.mixed_percent * tokens:
            return 1, "mixed"
        width, why_not = self._choice(rows)
        return (width, why_not) if width == self.config.width else (1, why_not or "gain")

    def _counted(self, width: int, why_not: str) -> int:
        """W of the step."""
        if why_not:
            self.off[why_not] = self.off.get(why_not, 0) + 1
        if width == self.config.width:
            self._since_widest = 0
        elif not why_not or why_not == "gain":
            self._since_widest += 1
        if 1 < width < self.config.width:
            self.narrowed[width - 1] = self.narrowed.get(width - 1, 0) + 1
        return width
