"""When a decode step is a window: by the rows that decode, and by what landed rounds gained against what a round costs.

Knows: the rule, over numbers that every rank has alike: events, landed results, costs that rank 0 measured before the
first step. Does not know: clocks, proposers, what a window computes.

A window of W tokens a row takes longer than a step of one token, the more so the more rows there are; it pays where it
gains more tokens a row than it takes plain steps' time. Gains are those of the last few hundred landed rounds, whose
weight halves as new ones come. While windows do not pay, one step in ``PROBE_EVERY`` is a window all the same, so that
other texts are noticed.

Rows that decode beside prompt chunks follow the same rule, as far as their windows take a share of the step's tokens at
most: what a window takes there, prompts do not get, and a draft tree takes all of its tokens. Costs are those of steps
without chunks, which hide less of it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

PROBE_EVERY: Final = 64  # decode steps without a window, before one is tried
REMEMBERED_ROUNDS: Final = 512  # from so many on, what was gained counts half
UNIT: Final = 1000  # costs are in thousandths of a plain step


@dataclass(frozen=True, slots=True)
class Speculation:
    """Windows of ``width`` tokens a row, 2 or more, in steps that only decode.

    ``most_rows``: with more rows no step is a window, and with as many or fewer each is; 0: none ever is. None: gains
    decide. ``costs``: (decode rows up to, thousandths of a plain step's time that a window takes), rows ascending from
    1 on; the first entry that covers a step's rows counts, and the last one where none does. Without any, every step is
    a window. ``mixed_percent``: of the tokens that a step with chunks may have, so many may be windows'; 0: rows beside
    chunks have one token each. Data, as MixedSteps is: rank 0 measures and shares, the digest holds it. Raises
    ValueError.
    """

    width: int
    most_rows: int | None = None
    costs: tuple[tuple[int, int], ...] = ()
    mixed_percent: int = 0

    def __post_init__(self) -> None:
        if self.width < 2:
            raise ValueError(f"width is {self.width}, but a window has 2 tokens a row or more")
        if self.most_rows is not None and self.most_rows < 0:
            raise ValueError(f"most_rows is {self.most_rows}, but must be 0 or more")
        if not 0 <= self.mixed_percent <= 100:
            raise ValueError(f"mixed_percent is {self.mixed_percent}, but must be 0 to 100")
        rows = [rows for rows, _ in self.costs]
        if any(low >= high for low, high in pairwise([0, *rows])) or any(cost < 0 for _, cost in self.costs):
            raise ValueError(f"costs is {self.costs}, but rows ascend from 1 on, and no cost is below 0")

    @property
    def numbers(self) -> tuple[int, ...]:
        """Everything above as the digest folds it."""
        most = -1 if self.most_rows is None else self.most_rows
        costs = tuple(number for entry in self.costs for number in entry)
        return (self.width, most, len(self.costs), *costs, self.mixed_percent)

    def cost(self, rows: int) -> int:
        """Of a window of so many rows, in thousandths of a plain step; 0 where nothing is known."""
        if not self.costs:
            return 0
        return self.costs[min(bisect_left(self.costs, (rows, 0)), len(self.costs) - 1)][1]


class SpeculationPolicy:
    """``width(rows)`` for every decode step that is planned, ``mixed`` for every one with chunks beside its rows,
    ``landed`` for every window that landed, in order. ``row_tokens``: that a row brings to a window, by default W."""

    def __init__(self, config: Speculation, row_tokens: int | None = None) -> None:
        self.config = config
        self.row_tokens = row_tokens or config.width
        self.off: dict[str, int] = {}  # steps of decode rows that were no windows: "batch", "gain", "mixed"
        self._rounds = 0  # remembered, and the tokens that they gained
        self._tokens = 0
        self._since_window = 0

    def width(self, rows: int) -> int:
        """W of a decode step of ``rows`` rows: the config's, or 1."""
        return self._counted(self._why_not(rows))

    def mixed_width(self, rows: int, tokens: int) -> int:
        """W of ``rows`` rows in a step that may have ``tokens`` with its chunks, if it gets any; nothing is counted."""
        return 1 if self._why_not_mixed(rows, tokens) else self.config.width

    def mixed(self, rows: int, tokens: int) -> None:
        """That step has chunks."""
        self._counted(self._why_not_mixed(rows, tokens))

    def landed(self, rounds: int, tokens: int) -> None:
        """``rounds`` live rows of a window gained ``tokens`` together. Ghosts and padding are no rounds."""
        self._rounds += rounds
        self._tokens += tokens
        if self._rounds >= REMEMBERED_ROUNDS:
            self._rounds, self._tokens = self._rounds // 2, self._tokens // 2

    def _pays(self, rows: int) -> bool:
        """Whether a round gains more plain steps than it takes the time of; before any landed, it is hoped so."""
        return not self._rounds or self._tokens * UNIT > self._rounds * self.config.cost(rows)

    def _why_not(self, rows: int) -> str:
        """Why a step of so many rows is no window; empty where it is one."""
        most = self.config.most_rows
        if most is not None:
            return "" if rows <= most else "batch"
        return "" if self._pays(rows) or self._since_window >= PROBE_EVERY else "gain"

    def _why_not_mixed(self, rows: int, tokens: int) -> str:
        fits = 100 * rows * self.row_tokens <= self.config.mixed_percent * tokens
        return self._why_not(rows) if fits else "mixed"

    def _counted(self, why_not: str) -> int:
        """W of the step."""
        if not why_not:
            self._since_window = 0
            return self.config.width
        if why_not == "gain":
            self._since_window += 1
        self.off[why_not] = self.off.get(why_not, 0) + 1
        return 1
