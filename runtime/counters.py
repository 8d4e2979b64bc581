"""Everything that an engine counts, by name.

Knows: where each part keeps its counters. Does not know: who reads them.
"""

from __future__ import annotations

from runtime.execute.executor import Executor
from runtime.groups.request_router import RequestRouter
from runtime.plan_late import PlanLateCounters
from runtime.schedule.scheduler import Scheduler


def engine_counters(
    scheduler: Scheduler, executor: Executor, router: RequestRouter | None, late: PlanLateCounters
) -> dict[str, int | float]:
    """Counted so far; a labelled counter is ``name{label}``. What the scheduler counts is explained in
    schedule/counters.py.

    Where there are several groups, the counters are of this rank's group, but ``group_requests{g}`` and, on rank 0,
    ``group_idle_steps{g}``: steps that group g launched for the others' sake, without a row of its own.
    """
    schedule, staging, results = scheduler.counters, executor.staging.counters, executor.results.counters
    counted: dict[str, int | float] = {
        "steps": schedule.prefill_steps + schedule.decode_steps + schedule.mixed_steps,
        "prefill_steps": schedule.prefill_steps,
        "decode_steps": schedule.decode_steps,
        "mixed_steps": schedule.mixed_steps,
        "mixed_prompt_tokens": schedule.mixed_prompt_tokens,
        "mixed_padded_tokens": schedule.mixed_padded_tokens,
        "void_steps": schedule.void_steps,
        "chained_steps": schedule.chained_steps,
        "ghost_rows": schedule.ghost_rows,
        "wasted_tokens": schedule.wasted_tokens,
        "admissions": schedule.admissions,
        "deferred_admissions": schedule.deferred_admissions,
        "cancels": schedule.cancels,
        "pauses": schedule.pauses,
        "resumes": schedule.resumes,
        "evictions": schedule.evictions,
        "stalls": schedule.stalls,
        "fenced_blocks": schedule.fenced_blocks,
        "prefill_tokens": schedule.prefill_tokens,
        "prefix_query_tokens": schedule.prefix_query_tokens,
        "prefix_hit_tokens": schedule.prefix_hit_tokens,
        "prefix_waits": schedule.prefix_waits,
        "forks": schedule.forks,
        "forked_tokens": schedule.forked_tokens,
        "snapshot_saves": schedule.snapshot_saves,
        "snapshot_restores": schedule.snapshot_restores,
        "snapshot_evictions": schedule.snapshot_evictions,
        "snapshot_missed_tokens": schedule.snapshot_missed_tokens,
        "distrusted": schedule.distrusted,
        "session_parks": schedule.session_parks,
        "session_continues": schedule.session_continues,
        "session_extends": schedule.session_extends,
        "session_forks": schedule.session_forks,
        "session_forks_without_copy": schedule.session_forks_without_copy,
        "session_refusals": schedule.session_refusals,
        "session_evictions": schedule.session_evictions,
        "session_closes": schedule.session_closes,
        "spec_num_drafts": schedule.spec_num_drafts,
        "spec_num_draft_tokens": schedule.spec_num_draft_tokens,
        "spec_num_accepted_tokens": schedule.spec_num_accepted_tokens,
        "plan_late_waits": late.plan_late_waits,
        "plan_late_us": late.plan_late_us,
        "plan_late_misses": late.plan_late_misses,
        "plan_late_idle_us": late.plan_late_idle_us,
        "host_to_device_bytes": staging.host_to_device_bytes,
        "host_to_device_copies": staging.copies,
        "device_to_host_bytes": results.device_to_host_bytes,
        "graph_captures_after_warmup": executor.device.captures - executor.captures_at_warmup,
        "device_allocs_after_warmup": executor.device.allocations() - executor.allocations_at_warmup,
    }
    counted |= {f"finished{{{reason}}}": count for reason, count in schedule.finished.items()}
    counted |= {f"late_captures{{{variant}}}": count for variant, count in executor.late_captures.items()}
    counted |= {f"fallbacks{{{name}}}": count for name, count in executor.fallbacks.counts.items()}
    counted |= {f"chain_breaks{{{reason}}}": count for reason, count in schedule.chain_breaks.items()}
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
