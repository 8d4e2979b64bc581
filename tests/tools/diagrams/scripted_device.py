"""A device for pictures: requests with given lengths, one of which may stop by itself. It computes counts, not tokens.

Knows: when each request has had its last token, which a real device finds in the logits and the host cannot foresee.
Does not know: time, the scheduler, or how it is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.schedule.plan import Admit, StepPlan, StepResult
from runtime.schedule.request import FinishReason, Request, SamplingParams


@dataclass(frozen=True)
class Part:
    """One request of a story: ``arrives`` in whatever unit the picture has; ``stops_after`` tokens, or by length."""

    name: str
    prompt: int
    max_tokens: int
    arrives: float = 0
    stops_after: int | None = None


@dataclass
class ScriptedDevice:
    """Plays ``parts``; their places in the list are their request ids. A row whose request has ended gives nothing."""

    parts: tuple[Part, ...]
    generated: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    _tenants: dict[int, int] = field(default_factory=dict)

    def arrival(self, request_id: int) -> Admit:
        part = self.parts[request_id]
        return Admit(Request(request_id, (0,) * part.prompt, SamplingParams(max_tokens=part.max_tokens)))

    def rows(self, plan: StepPlan) -> list[tuple[str, bool]]:
        """(name, whether it is a ghost by now) of each row; to be asked before the step runs."""
        self._seat(plan)
        ids = [self._tenants[slot] for slot in plan.slots]
        return [(self.parts[request_id].name, request_id in self.ended) for request_id in ids]

    def run(self, plan: StepPlan) -> StepResult:
        """What the step will have computed when it lands."""
        self._seat(plan)
        counts, finish = [], []
        for slot in plan.slots:
            request_id = self._tenants[slot]
            part, alive = self.parts[request_id], request_id not in self.ended
            self.generated[request_id] = now = self.generated.get(request_id, 0) + alive
            reason = FinishReason.NONE
            if alive and now == part.stops_after:
                reason = FinishReason.STOP
            elif alive and now == part.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not FinishReason.NONE:
                self.ended.add(request_id)
            counts.append(int(alive))
            finish.append(reason)
        return StepResult(plan.step, [0] * len(counts), counts, finish)

    def _seat(self, plan: StepPlan) -> None:
        self._tenants |= {write.slot: write.request_id for write in plan.slot_writes}
