"""When a decode step is a window, and of how many tokens a row: by the rows that decode, and by what landed rounds
gained against what a round costs.

Knows: the rule, over numbers that every rank has alike: events, landed results, costs that rank 0 measured before the
first step. Does not know: clocks, proposers, what a window computes.

A window of W tokens a row takes longer than a step of one token, the more so the more rows there are; it pays where it
gains more tokens a row than it takes plain steps' time. Gains are those of the last few hundred landed rounds, whose
weight halves as new ones come, of all places together. Where there are narrower windows, too, a step has the width that
gains the most tokens in a plain step's time.

A round tells about narrower windows what it tells about itself: of w tokens it would have gained its first w. Of wider
ones it tells only that no place is kept more often than the one before it. So a wider width is tried now and then, that
other texts are noticed: from 1 the narrowest there is, from any other the narrowest that could pay. That is a probe:

  * It comes where the last ``PROBE_EVERY`` steps that could have had that width had less. Any step of that width, or of
    a wider one, begins the count anew, beside chunks as without.
  * A width is passed over that could not pay at all: a window of W gains at most what the step's choice of w does,
    and for each of the W - w places more the share of the last of w. Where a width between the two was tried in the
    last ``PROBE_EVERY`` steps, its tokens and its last place count instead. Where the choice is 1 no share is known,
    and the most is W tokens. One width alone is tried whatever it costs.
  * Places that were never tried are hoped to be kept as often as the one before them, the first one always. So the
    first steps are as wide as costs allow.

Rows that decode beside prompt chunks follow the same rule, among the widths whose windows take a share of the step's
tokens at most, probes included: what windows take there, prompts do not get, and a draft tree takes all of its tokens.
A width that does not fit is not counted as one that the step could have had. Costs are those of steps without chunks,
which hide less of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

PROBE_EVERY: Final = 64  # steps of rows that decode, chunks or not, that could have had a width, before it is tried
REMEMBERED_ROUNDS: Final = 512  # from so many on, what was gained counts half
LEAST_REMEMBERED: Final = 64  # rounds of a place that wider windows alone show are not forgotten below these
UNIT: Final = 1000  # costs are in thousandths of a plain step

Costs = tuple[tuple[int, int], ...]
Widths = tuple[tuple[int, Costs], ...]  # W and what it costs, W descending


@dataclass(frozen=True, slots=True)
class Speculation:
    """Windows of ``width`` tokens a row, 2 or more.

    ``most_rows``: with more rows no step is a window, and with as many or fewer each is; 0: none ever is. None: gains
    decide. ``costs``: (decode rows up to, thousandths of a plain step's time that a window takes), rows ascending from
    1 on; the first entry that covers a step's rows counts, and the last one where none does. Without any, every step is
    a window. ``mixed_percent``: of the tokens that a step with chunks may have, so many may be windows'; 0: rows beside
    chunks have one token each. ``narrower``: (W, costs) of windows with fewer tokens, W descending, which steps may
    have where gains decide; each with costs of its own, and ``costs``, too. Data, as MixedSteps is: rank 0 measures and
    shares, the digest holds it. Raises ValueError.
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
    """Of a window of so many rows, in thousandths of a plain step: of the first entry that covers them, or of the last;
    0 where there is none."""
    return costs[min(bisect_left(costs, (rows, 0)), len(costs) - 1)][1] if costs else 0


def _flat(costs: Costs) -> list[int]:
    return [len(costs), *(number for entry in costs for number in entry)]


class SpeculationPolicy:
    """``width(rows)`` for every decode step that is planned, ``mixed`` for every one with chunks beside its rows,
    ``landed`` for every window that landed, in order. ``tree``: tokens that a row brings to a window, where these are
    draft trees; a chain brings W."""

    def __init__(self, config: Speculation, tree: int = 0) -> None:
        self.config = config
        self.off: dict[str, int] = {}  # steps of decode rows that were no windows: "batch", "gain", "mixed"
        self.narrowed: dict[int, int] = {}  # steps that were narrower windows, by their guesses
        self._tree = tree
        self._widths: Widths = ((config.width, config.costs), *config.narrower)
        # Rounds that are remembered, of those wide enough to gain 2, 3, ... W tokens, and how many did.
        self._tried = [0] * (config.width - 1)
        self._gained = [0] * (config.width - 1)
        self._expected_of: list[tuple[int, int]] = []  # of 1, 2, ... W tokens; empty until it is asked for
        # By W: steps that could have had it since the last one that had as much.
        self._since = {width: 0 for width, _ in self._widths}

    def width(self, rows: int) -> int:
        """W of a decode step of ``rows`` rows: the config's, a narrower one, or 1."""
        return self._counted(rows, self._widths)

    def mixed_width(self, rows: int, tokens: int, most: int | None = None) -> int:
        """W of ``rows`` rows in a step that may have ``tokens`` with its chunks, if it gets any; nothing is counted.
        ``most``: tokens that windows may have whatever their share is; None: as many as there are."""
        return self._choice(rows, self._fitting(rows, tokens, most))[0]

    def mixed(self, rows: int, tokens: int, most: int | None = None) -> None:
        """That step has chunks. To be told before anything lands or is counted, so that its W is the one above."""
        self._counted(rows, self._fitting(rows, tokens, most))

    def landed(self, width: int, rounds: int, kept: Sequence[int]) -> None:
        """``rounds`` live rows had a window of ``width``; ``kept[i]`` of them kept more than i guesses. Ghosts and
        padding are no rounds."""
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
        """That a row of a window of ``width`` is expected to gain, in thousandths."""
        return self._expected(width)[0]

    def _expected(self, width: int) -> tuple[int, int]:
        """These tokens, and the share of rounds that gain the last of them.

        No place is kept more often than the one before it: what wider windows showed long ago may say so, and of places
        that none showed this is what is hoped.
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
        """Those whose windows take their share of ``tokens`` at most."""

        def fits(width: int) -> bool:
            taken = rows * (self._tree or width)
            return 100 * taken <= self.config.mixed_percent * tokens and (most is None or taken <= most)

        return tuple(entry for entry in self._widths if fits(entry[0]))

    def _choice(self, rows: int, widths: Widths) -> tuple[int, str]:
        """W of a step of so many rows, of ``widths`` or 1, and why it is no window; empty where it is one."""
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
        """Whether so much of ``wider`` may be kept that it gives more than ``width``, the best by what is known."""
        if not self.config.narrower:
            return True
        tokens = self.tokens(width)
        shown = max([w for w, since in self._since.items() if width < w < wider and since < PROBE_EVERY], default=width)
        known, share = self._expected(shown)
        most = known + (wider - shown) * share  # of 1 the share is UNIT: nothing is known
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
