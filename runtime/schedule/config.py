"""SchedulerConfig: every limit that a plan depends on, the same on every rank.

Knows: names and units. Does not know: where the numbers come from (runtime/config.py, runtime/build.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """All limits, the same on every rank. ``blocks`` counts usable KV blocks, without the trash block.

    ``rows`` sequences prefill or decode at once. ``slots`` is larger (twice as many are plenty), so that a successor
    is seated while the last tokens of its predecessor are in flight. ``depth`` is the chain depth D. ``widths`` are
    the widths W of decode steps in tokens a row, taken in turn: decode step n has ``widths[n % len(widths)]``.
    ``max_prefill_tokens`` is the token budget of one prefill step. Raises ValueError for widths below 1, or none.
    """

    rows: int
    slots: int
    blocks: int
    block_size: int
    max_model_len: int
    depth: int = 2
    widths: tuple[int, ...] = (1,)
    max_prefill_tokens: int = 8192
    prefill_burst: int = 4
    prefix_caching: bool = True
    max_waiting: int = 100_000

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"widths is {self.widths}, but a decode step gives each row room for at least one token")

    @property
    def max_width(self) -> int:
        """The largest W of any step: what reservations count on, since widths may change from step to step."""
        return max(self.widths)
