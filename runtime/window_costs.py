"""Times of verification steps relative to plain decode steps, measured at start-up on this machine.

Knows: which measurements the policy of runtime/schedule/speculation.py needs, and that all ranks use rank 0's.
Does not know: how rows run before the first request (chain_depth.py), how the table is used.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from runtime.chain_depth import rows_that_fit, running_rows, sampling_of
from runtime.config import EngineConfig
from runtime.execute.executor import Executor
from runtime.schedule.config import SchedulerConfig
from runtime.schedule.speculation import UNIT, Costs, Speculation

log = logging.getLogger(__name__)

_TURNS = 2  # decode steps of each kind before it is timed
_REPLAYS = 3


def speculation(
    config: EngineConfig,
    executor: Executor,
    schedule: SchedulerConfig,
    share: Callable[[Callable[[], str]], str] | None,
) -> Speculation | None:
    """When steps of decode rows are windows; None without --speculative-config.

    With several ranks a collective call. ``share(make)`` returns on every rank what ``make()`` returned on rank 0. On a
    CPU nothing is measured: it shares its cores with the host. Then, and where disable_by_batch_size decides, no costs
    are known.
    """
    if config.speculation is None:
        return None
    width, most_rows = config.width, config.speculation.disable_by_batch_size
    percent = config.speculation.mixed_step_percent if executor.mixes_windows else 0
    if config.device == "cpu" or most_rows is not None:
        return Speculation(width, most_rows, mixed_percent=percent)
    narrower = config.narrower
    costs = {w: _costs(config, executor, schedule, share, w) for w in (width, *narrower)}
    if not costs[width]:  # no rows fit, of any width: every step is a window, as wide as can be
        return Speculation(width, mixed_percent=percent)
    return Speculation(width, None, costs[width], percent, tuple((w, costs[w]) for w in narrower))


def _costs(
    config: EngineConfig,
    executor: Executor,
    schedule: SchedulerConfig,
    share: Callable[[Callable[[], str]], str] | None,
    width: int,
) -> Costs:
    """Of windows of ``width``, as rank 0 measured them."""
    table = cost_table(window_times(config, executor, schedule, width), config.decode_buckets)
    told = json.dumps(table) if share is None else share(lambda: json.dumps(table))
    costs = tuple((int(rows), int(cost)) for rows, cost in json.loads(told))
    said = ", ".join(f"{cost / UNIT:.2f} for {rows} rows" for rows, cost in costs if rows & (rows - 1) == 0)
    log.info("speculation: a step of %d tokens a row takes so many plain steps' time: %s", width, said)
    return costs


def window_times(
    config: EngineConfig, executor: Executor, schedule: SchedulerConfig, window: int | None = None
) -> dict[int, tuple[float, float]]:
    """Milliseconds of the graph of a ``window`` of so many tokens a row (by default the config's) and of a plain decode
    step's, over so many rows that run; of the buckets that are powers of two, the smallest and the largest that fit.
    Empty where none does.

    With several ranks all of them call it together. Nothing of it stays.
    """
    tokens = 1 + (_TURNS + _REPLAYS + 1) * config.width
    most, grouped = rows_that_fit(schedule, tokens), config.data_parallel > 1
    fit = [rows for rows in config.decode_buckets if rows <= most]
    found: dict[int, tuple[float, float]] = {}
    with executor.rehearsing():
        for rows in fit:
            if rows & (rows - 1) and rows not in (fit[0], fit[-1]):
                continue
            took = []
            for width in (window or config.width, 1):
                of_width, sampling = replace(schedule, widths=(width,)), sampling_of(config, tokens)
                with running_rows(executor, of_width, sampling, rows, _TURNS, grouped=grouped) as running:
                    if running.latest is not None:
                        took.append(executor.replay_ms(running.latest, _REPLAYS))
            if len(took) == 2:
                found[rows] = took[0], took[1]
    return found


def cost_table(times_ms: Mapping[int, tuple[float, float]], buckets: Sequence[int]) -> list[tuple[int, int]]:
    """(rows, thousandths of a plain step) from (window, plain step) milliseconds by rows. ``buckets`` between two that
    were measured lie on the line between these."""
    measured = {rows: UNIT * window / plain for rows, (window, plain) in sorted(times_ms.items())}
    table = dict(measured)
    for low, high in pairwise(measured):
        for rows in buckets:
            if low < rows < high:
                table[rows] = measured[low] + (measured[high] - measured[low]) * (rows - low) / (high - low)
    return [(rows, round(cost)) for rows, cost in sorted(table.items())]
