"""What the scheduler counts: how long the chain was, why it broke, and what was wasted.

Knows: counts. Does not know: time, or the device's own counters (runtime/observe).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.schedule.plan import StepKind

if TYPE_CHECKING:
    from runtime.schedule.chain import Chain
    from runtime.schedule.plan import StepPlan


@dataclass(slots=True)
class ScheduleCounters:
    """``chained_steps``: steps planned while an earlier one was in flight. ``chain_breaks``: the others, by reason:
    ``serial`` (chain depth 0), ``start`` (first step, or everything before had ended), ``no_blocks`` and
    ``context_full`` (void steps came between: rows, or the queue, waited for memory), ``paused`` (all were paused).
    ``latest_break``: why the latest step was not chained, or was void; None when it was chained.
    """

    prefill_steps: int = 0
    decode_steps: int = 0
    void_steps: int = 0
    chained_steps: int = 0
    chain_breaks: dict[str, int] = field(default_factory=dict)
    ghost_rows: int = 0
    wasted_tokens: int = 0
    admissions: int = 0
    evictions: int = 0
    stalls: int = 0
    prefix_hit_tokens: int = 0
    fenced_blocks: int = 0
    latest_break: str | None = None
    _why_void: str = "start"

    def planned(self, plan: StepPlan | None, chain: Chain, why_void: str) -> None:
        """Count one planned step, before it joins the chain."""
        if plan is None:
            self.void_steps += 1
            self._why_void = self.latest_break = why_void
            return
        if plan.kind is StepKind.DECODE:
            self.decode_steps += 1
        else:
            self.prefill_steps += 1
        if chain.real:
            self.chained_steps += 1
            self.latest_break = None
        else:
            self.latest_break = reason = "serial" if chain.depth == 0 else self._why_void
            self.chain_breaks[reason] = self.chain_breaks.get(reason, 0) + 1
