"""Chooses W, the tokens per row, of each decode and mixed step: 1, or a verification step of a configured width.

Knows: the rule, over numbers that every rank has alike: events, landed results, costs that rank 0 measured before the
first step. Does not know: clocks, drafters, what a verification step computes.

A verification step of W tokens a row takes longer than a plain step, the more so the more rows there are. It pays if
the tokens that a row appends exceed its cost in plain steps. Expected tokens come from the last few hundred landed
verification steps, per position; the weight of old ones halves as new ones come. Of several widths the one with the
most tokens per time is chosen.

A step of w tokens also shows what narrower ones would have appended: its first tokens. About wider ones it only shows
that no position is accepted more often than the one before it. So a wider width is tried now and then, in case texts
have changed: from 1 the narrowest, from any other the narrowest that could pay. Rules of such a probe:

  * It comes when the last ``PROBE_EVERY`` steps that could have had that width had less. Any step of that width, or of
    a wider one, restarts the count, in mixed steps too.
  * A width that could not pay at all is skipped: W tokens are at most what the chosen w appends, plus, for each of the
    W - w further positions, the acceptance of position w. If a width between the two was used in the last
    ``PROBE_EVERY`` steps, its tokens and last position count instead. If the choice is 1 no acceptance is known, and
    the most is W tokens. A single width is tried whatever it costs.
  * Positions that were never tried count as accepted as often as the one before them, the first one always. So the
    first steps are as wide as costs allow.

In mixed steps the same rule applies to the widths whose draft windows take at most their part of the step's tokens,
probes included: windows take tokens from prompts, and a draft tree takes all of its tokens. A step that a width does
not fit is not counted as one that could have had it. Costs are those of steps without chunks, which hide less of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

PROBE_EVERY: Final = 64  # decode and mixed steps that could have had a width, before it is tried
REMEMBERED_ROUNDS: Final = 512  # from so many on, old acceptance counts half
LEAST_REMEMBERED: Final = 64  # steps of a position that only wider windows show are not forgotten below these
UNIT: Final = 1000  # costs are in thousandths of a plain step

Costs = tuple[tuple[int, int], ...]
Widths = tuple[tuple[int, Costs], ...]  # (W, its costs), W descending


@dataclass(frozen=True, slots=True)
class Speculation:
    """Verification steps of ``width`` tokens a row, 2 or more.

    ``most_rows``: steps with more rows do not speculate, all others do; 0: none does. None: expected tokens decide.
    ``costs``: (decode rows up to, thousandths of a plain step's time), rows ascending from 1 on; the first entry that
    covers a step's rows counts, else the last one. Empty: every step speculates. ``mixed_percent``: most of a mixed
    step's tokens that draft windows may take; 0: decode rows have one token each there. ``narrower``: (W, costs) of
    smaller widths, W descending, for steps where expected tokens decide; needs ``costs``. Data, as MixedSteps is: rank
    0 measures and shares, the digest holds it. Raises ValueError.
    """

    width: int
    most_rows: int | None = None
    costs: Costs = ()
    mixed_percent: int = 0
    narrower: Widths = ()

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
    """Cost for so many rows in thousandths of a plain step: of the first entry that covers them, else of the last; 0
    without entries."""
    return costs[min(bisect_left(costs, (rows, 0)), len(costs) - 1)][1] if costs else 0


def _flat(costs: Costs) -> list[int]:
    return [len(costs), *(number for entry in costs for number in entry)]


class SpeculationPolicy:
    """Call ``width(rows)`` for every planned decode step, ``mixed`` for every mixed step, and ``landed`` for every
    verification step that landed, in order. ``tree``: tokens of a row's draft tree; 0: W."""

    def __init__(self, config: Speculation, tree: int = 0) -> None:
        self.config = config
        self.off: dict[str, int] = {}  # steps of decode rows without speculation: "batch", "gain", "mixed"
        self.narrowed: dict[int, int] = {}  # narrower verification steps, by draft tokens a row
        self._tree = tree
        self._widths: Widths = ((config.width, config.costs), *config.narrower)
        # Remembered drafts that could append 2, 3, ... W tokens, and how many did.
        self._tried = [0] * (config.width - 1)
        self._gained = [0] * (config.width - 1)
        self._expected_of: list[tuple[int, int]] = []  # of 1, 2, ... W tokens; computed on demand
        # By W: steps that could have had it since the last one that had as much.
        self._since = {width: 0 for width, _ in self._widths}

    def width(self, rows: int) -> int:
        """W of a decode step of ``rows`` rows: the config's, a narrower one, or 1."""
        return self._counted(rows, self._widths)

    def mixed_width(self, rows: int, tokens: int, most: int | None = None) -> int:
        """W of ``rows`` rows in a mixed step of at most ``tokens``, should it get chunks; nothing is counted.
        ``most``: limit for the tokens of draft windows, besides ``mixed_percent``; None: no limit."""
        return self._choice(rows, self._fitting(rows, tokens, most))[0]

    def mixed(self, rows: int, tokens: int, most: int | None = None) -> None:
        """Count that step, which got chunks. Call before anything lands or is counted, so that W stays as above."""
        self._counted(rows, self._fitting(rows, tokens, most))

    def landed(self, width: int, rounds: int, kept: Sequence[int]) -> None:
        """``rounds`` live rows verified ``width`` tokens; ``kept[i]`` of them accepted more than i draft tokens. Ghosts
        and padding do not count."""
        if not self.config.costs:
            return
        self._expected_of.clear()
        tried, gained = self._tried, self._gained
        for place in range(width - 1):
            tried[place] += rounds
            gained[place] += kept[place]
        if tried[0] < REMEMBERED_ROUNDS:
            return
        for place, remembered in enumerate(tried):
            if not place or remembered >= LEAST_REMEMBERED:
                tried[place], gained[place] = remembered // 2, gained[place] // 2

    def tokens(self, width: int) -> int:
        """Expected tokens of a row in a step of ``width``, in thousandths."""
        return self._expected(width)[0]

    def _expected(self, width: int) -> tuple[int, int]:
        """These tokens, and the probability of the last of them, in thousandths.

        No position is accepted more often than the one before it: this bounds old figures of wider steps, and is the
        estimate for positions that were never tried.
        """
        expected = self._expected_of
        if not expected:  # something landed since
            tokens = share = UNIT
            expected.append((tokens, share))
            for tried, gained in zip(self._tried, self._gained, strict=True):
                if tried and (kept := UNIT * gained // tried) < share:
                    share = kept
                tokens += share
                expected.append((tokens, share))
        return expected[width - 1]

    def _fitting(self, rows: int, tokens: int, most: int | None) -> Widths:
        """Widths whose draft windows take at most ``mixed_percent`` of ``tokens``."""

        def fits(width: int) -> bool:
            taken = rows * (self._tree or width)
            return 100 * taken <= self.config.mixed_percent * tokens and (most is None or taken <= most)

        return tuple(entry for entry in self._widths if fits(entry[0]))

    def _choice(self, rows: int, widths: Widths) -> tuple[int, str]:
        """W of a step of so many rows, of ``widths`` or 1, and why it does not speculate; empty if it does."""
        config = self.config
        if not widths:
            return 1, "mixed"
        if config.most_rows is not None:
            return (config.width, "") if rows <= config.most_rows else (1, "batch")
        if not config.costs:
            return config.width, ""
        best, tokens, cost = 1, UNIT, UNIT
        for width, costs in widths:
            its_tokens, its_cost = self.tokens(width), cost_of(costs, rows)
            if its_tokens * cost > tokens * its_cost:
                best, tokens, cost = width, its_tokens, its_cost
        wider = [entry for entry in reversed(widths) if entry[0] > best]
        for width, costs in wider[:1] if best == 1 else wider:
            if self._since[width] >= PROBE_EVERY and self._could_pay(best, cost, width, cost_of(costs, rows)):
                return width, ""
        return best, "gain" if best == 1 else ""

    def _could_pay(self, width: int, cost: int, wider: int, wider_cost: int) -> bool:
        """Whether ``wider`` could append enough tokens to beat ``width``, the best by what is known."""
        if not self.config.narrower:
            return True
        tokens = self.tokens(width)
        shown = max([w for w, since in self._since.items() if width < w < wider and since < PROBE_EVERY], default=width)
        known, share = self._expected(shown)
        most = known + (wider - shown) * share  # of 1 it is UNIT: nothing is known
        return most * cost > tokens * wider_cost

    def _counted(self, rows: int, widths: Widths) -> int:
        """W of the step, which may have ``widths``."""
        chosen, why_not = self._choice(rows, widths)
        if why_not:
            self.off[why_not] = self.off.get(why_not, 0) + 1
        for width in self._since:
            if width <= chosen:
                self._since[width] = 0
        for width, _ in widths:
            if width > chosen:
                self._since[width] += 1
        if 1 < chosen < self.config.width:
            self.narrowed[chosen - 1] = self.narrowed.get(chosen - 1, 0) + 1
        return chosen
