"""Everything that an engine counts, by name.

Knows: where each part keeps its counters. Does not know: readers of them.
"""

from __future__ import annotations

from dataclasses import asdict, fields

from parallel.comm.quantised import SEPARATE
from runtime.execute.executor import Executor
from runtime.groups.request_router import RequestRouter
from runtime.plan_late import PlanLateCounters
from runtime.schedule.counters import ScheduleCounters
from runtime.schedule.scheduler import Scheduler

_SCHEDULED = [field.name for field in fields(ScheduleCounters) if field.type == "int"]


def engine_counters(
    scheduler: Scheduler, executor: Executor, router: RequestRouter | None, late: PlanLateCounters
) -> dict[str, int | float]:
    """Counts since the start; a labelled counter is ``name{label}``. See schedule/counters.py for the scheduler's.

    With several groups the counters are of this rank's group, except ``group_requests{g}`` and, on rank 0,
    ``group_idle_steps{g}``: steps that group g launched without rows, because others had some.
    """
    schedule, staging, results = scheduler.counters, executor.staging.counters, executor.results.counters
    counted: dict[str, int | float] = {
        "steps": schedule.prefill_steps + schedule.decode_steps + schedule.mixed_steps,
        **{name: getattr(schedule, name) for name in _SCHEDULED},
        "fenced_blocks": scheduler.pool.soon_free,
        **asdict(late),
        **({} if executor.grammars is None else asdict(executor.grammars.counters)),
        "host_to_device_bytes": staging.host_to_device_bytes,
        "host_to_device_copies": staging.copies,
        "device_to_host_bytes": results.device_to_host_bytes,
        "quantising_launches": SEPARATE.count - executor.quantising_at_warmup,
        "graph_captures_after_warmup": executor.device.captures - executor.captures_at_warmup,
        "device_allocs_after_warmup": executor.device.allocations() - executor.allocations_at_warmup,
    }
    counted |= {f"finished{{{reason}}}": count for reason, count in schedule.finished.items()}
    counted |= {f"late_captures{{{variant}}}": count for variant, count in executor.late_captures.items()}
    counted |= {f"fallbacks{{{name}}}": count for name, count in executor.fallbacks.counts.items()}
    counted |= {f"chain_breaks{{{reason}}}": count for reason, count in schedule.chain_breaks.items()}
    counted |= {f"evicted_for{{{group}}}": count for group, count in schedule.evicted_for.items()}
    for pool in scheduler.ledger.windows:
        counted[f"window_blocks{{{pool.window}}}"] = pool.count
        counted[f"window_blocks_used{{{pool.window}}}"] = pool.count - pool.free_count
    kept, compared = schedule.spec_accepted_per_position, schedule.spec_compared_per_position
    counted |= {f"spec_accepted_per_position{{{position}}}": count for position, count in enumerate(kept)}
    counted |= {f"spec_compared_per_position{{{position}}}": count for position, count in enumerate(compared)}
    if (policy := scheduler.planner.speculation) is not None:
        counted |= {f"speculation_off{{{why}}}": count for why, count in policy.off.items()}
        counted |= {f"speculation_narrowed{{{k}}}": count for k, count in policy.narrowed.items()}
    if router is not None:
        counted |= {f"group_requests{{{g}}}": count for g, count in enumerate(router.assignment.requests)}
        counted |= {f"group_idle_steps{{{g}}}": count for g, count in enumerate(router.idle_steps)}
    return counted
