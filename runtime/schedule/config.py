"""SchedulerConfig: every limit that a plan depends on, the same on every rank.

Knows: names and units. Does not know: where the numbers come from (runtime/config.py, runtime/build.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """All limits, the same on every rank. ``blocks`` are usable ones: the trash block is not counted.

    ``rows`` sequences prefill or decode at once. ``slots`` is larger (twice that is plenty), so that successors are
    seated while the last tokens of those before them are still in flight. ``depth`` is D, ``width`` W.
    ``max_prefill_tokens`` is the token budget of one prefill step, ``decode_buckets`` the ascending row counts that
    graphs exist for; the last is at least ``rows``.
    """

    rows: int
    slots: int
    blocks: int
    block_size: int
    max_model_len: int
    decode_buckets: tuple[int, ...]
    depth: int = 2
    width: int = 1
    max_prefill_tokens: int = 8192
    prefill_burst: int = 4
    prefix_caching: bool = True
    max_waiting: int = 100_000
