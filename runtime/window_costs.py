"""What a window costs against a plain decode step, from what this machine was measured to take for both.

Knows: which measurements the policy of runtime/schedule/speculation.py needs, and that all ranks use rank 0's.
Does not know: how a step is measured (runtime/execute/executor.py), how the table is used.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping

from runtime.config import EngineConfig
from runtime.execute.executor import Executor
from runtime.schedule.speculation import UNIT, Speculation

log = logging.getLogger(__name__)


def speculation(
    config: EngineConfig, executor: Executor, share: Callable[[Callable[[], str]], str] | None
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
    table = cost_table(executor.window_costs())
    told = json.dumps(table) if share is None else share(lambda: json.dumps(table))
    costs = tuple((int(rows), int(cost)) for rows, cost in json.loads(told))
    said = ", ".join(f"{cost / UNIT:.2f} for {rows} rows" for rows, cost in costs if rows & (rows - 1) == 0)
    log.info("speculation: a step of %d tokens a row takes so many plain steps' time: %s", width, said)
    return Speculation(width, None, costs, percent)


def cost_table(times_ms: Mapping[int, tuple[float, float]]) -> list[tuple[int, int]]:
    """(rows, thousandths of a plain step) from (window, plain step) milliseconds by rows."""
    return [(rows, round(UNIT * window / plain)) for rows, (window, plain) in sorted(times_ms.items())]
