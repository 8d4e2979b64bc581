"""A run over time: one row for each 100 ms.

Knows: what is counted in an interval. Does not know: how rows are drawn (launch/sweep/report/load_plot.py) or kept.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from launch.bench.load.figures import STEP_KINDS
from launch.bench.load.journal import Journal

INTERVAL_S = 0.1


def timeline(journal: Journal, interval: float = INTERVAL_S) -> list[dict[str, Any]]:
    """A row an interval, from the start of the run; ``t_s`` is the interval's beginning.

    ``arrived``, ``completed``, ``failed``, ``output_tokens`` count what fell into it; ``output_throughput`` is tokens a
    second. At its end ``running`` requests had a token and had not ended, and ``waiting`` ones had begun and had none.
    Of an engine of this process also its steps by kind and ``chained`` ones.
    """
    bins = max(1, math.ceil(journal.seconds / interval))
    edges = journal.started + interval * np.arange(bins + 1)
    edges[-1] = np.inf  # the last end is on it, or beyond it by rounding

    def binned(moments: list[float], weights: list[int] | None = None) -> np.ndarray[Any, Any]:
        places = np.clip(np.searchsorted(edges, np.asarray(moments), side="right") - 1, 0, bins - 1)
        return np.bincount(places, weights, minlength=bins).astype(np.int64)

    requests = journal.requests
    arrived, ended = binned([one.began for one in requests]), binned([one.ended for one in requests])
    failed = binned([one.ended for one in requests if one.failed])
    first = binned([one.moments[0] for one in requests if one.moments])
    unbegun = binned([one.ended for one in requests if not one.moments])
    tokens = binned(
        [moment for one in requests for moment in one.moments], [count for one in requests for count in one.counts]
    )
    running = np.cumsum(first) - np.cumsum(ended - unbegun)
    waiting = np.cumsum(arrived) - np.cumsum(first) - np.cumsum(unbegun)
    columns = {
        "arrived": arrived,
        "completed": ended - failed,
        "failed": failed,
        "output_tokens": tokens,
        "running": running,
        "waiting": waiting,
        **_steps(journal, edges),
    }
    return [
        {
            "t_s": round(number * interval, 6),
            "output_throughput": float(tokens[number] / interval),
            **{name: int(column[number]) for name, column in columns.items()},
        }
        for number in range(bins)
    ]


def _steps(journal: Journal, edges: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Steps in each interval, by the latest samples before its ends."""
    samples = journal.samples
    if len(samples) < 2:
        return {}
    latest = np.clip(np.searchsorted([sample.at for sample in samples], edges, side="right") - 1, 0, None)
    names = [kind for kind in STEP_KINDS if kind in samples[0].counts]
    counts = {name: np.asarray([sample.counts[name] for sample in samples]) for name in (*names, "chained_steps")}
    return {name: np.diff(column[latest]) for name, column in counts.items()}
