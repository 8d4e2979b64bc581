"""Rows of a steady decode batch: lands step after step of the same rows without looking at each of them.

Knows: how rows append one token each, and when the next of them fills a block. Does not know: windows, ghosts, ends: a
step that has one lands row by row (scheduler.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runtime.schedule.sequence import SequenceState


class SteadyRows:
    """``land`` for consecutive steps of ``rows``, all live and continuing; discarded after any other landing.

    ``gained`` is called for a row whose ``publish_at`` is passed, in the order of rows. Rows are checked only when that
    may be so: with 256 rows a check in each step, and finding each row's tokens, would be half of the landing.
    """

    def __init__(self, rows: tuple[SequenceState, ...], gained: Callable[[SequenceState], None]) -> None:
        self.rows = rows
        self._gained = gained
        self._appends = [sequence.tokens.append for sequence in rows]
        self._landings = 0
        self._due: dict[int, list[int]] = {}  # by landing, the rows to look at then
        for row in range(len(rows)):
            self._look_again(row)

    def land(self, tokens: Sequence[int]) -> None:
        """Append one token to each row."""
        for append, token in zip(self._appends, tokens, strict=True):
            append(token)
        self._landings += 1
        for row in sorted(self._due.pop(self._landings, ())):
            sequence = self.rows[row]
            if len(sequence.tokens) > sequence.publish_at:
                self._gained(sequence)
            self._look_again(row)

    def _look_again(self, row: int) -> None:
        sequence = self.rows[row]
        landings = max(1, sequence.publish_at + 1 - len(sequence.tokens))
        self._due.setdefault(self._landings + landings, []).append(row)
