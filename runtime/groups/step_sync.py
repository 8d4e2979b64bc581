"""What groups with requests of their own must agree on before each step, so that their collectives fit together.

Knows: the few numbers of which the maximum is taken, and the plan that a group launches for them. Pure, but for the
call that takes the maximum. Does not know: who carries that call (the control plane), experts, or requests.

The reasons are in docs/decisions/0003-data-parallel-attention.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Protocol

from runtime.execute.sampling.inputs import SamplingVariant
from runtime.groups.load_balancer import LoadBalancer
from runtime.schedule.plan import StepKind, StepPlan

RUNGS = (16, 4, 1)  # of the exchange's rows in steps with a prefill: the token budget divided by these


class StepAgreement(Protocol):
    """One a group; all groups make the same calls in the same order."""

    def agree_max(self, step: int, numbers: Sequence[int]) -> tuple[int, ...]:
        """The elementwise maximum over all groups of step ``step``'s numbers; each at least 0."""
        ...


@dataclass(frozen=True, slots=True)
class Launch:
    """A step as it is launched: possibly wider than the group's own plan, or without a single row of its own.

    ``decode_bucket``: of the graph that groups replay in this step unless they prefill. Every group captures it when it
    is met for the first time, the prefilling ones too: a capture rehearses the step, and its exchanges need all groups.
    """

    plan: StepPlan
    features: SamplingVariant
    decode_bucket: int


class DpStepSync:
    """One group's view of all. ``buckets`` and ``max_prefill_tokens`` as in SchedulerConfig, the same in every group.

    ``assignment``: whose loads are agreed along with the rest; None where each group has requests of its own making.
    ``idle_steps`` counts those that it launched for the others' sake, without a row of its own.
    """

    def __init__(
        self,
        agreement: StepAgreement,
        buckets: tuple[int, ...],
        max_prefill_tokens: int,
        assignment: LoadBalancer | None = None,
    ) -> None:
        self._agreement = agreement
        self._assignment = assignment
        self._buckets = buckets
        self._exchanges = exchange_ladder(buckets, max_prefill_tokens)
        self.idle_steps = 0

    def join(self, step: int, plan: StepPlan | None, features: SamplingVariant, width: int) -> Launch | None:
        """What to launch as step ``step``, for which this group planned ``plan``. None where no group has work."""
        bucket = plan.bucket if plan is not None and plan.kind is StepKind.DECODE else 0
        prefill = sum(len(chunk.token_ids) for chunk in plan.chunks) if plan is not None else 0
        numbers: tuple[int, ...] = (bucket, prefill, *map(int, astuple(features)))
        ours = len(numbers)
        if self._assignment is not None:
            numbers += self._assignment.proposal
        agreed = self._agreement.agree_max(step, numbers)
        if self._assignment is not None:
            self._assignment.agreed(agreed[ours:])
        most_bucket, most_prefill, *most_features = agreed[:ours]
        if not most_bucket and not most_prefill:
            return None
        shared = _features_of(most_features)
        agreed_bucket = most_bucket or self._buckets[0]
        rows = agreed_bucket  # an idle group's graph has that many, though nobody may decode
        if most_prefill:
            rows = next(x for x in self._exchanges if x >= max(most_prefill, agreed_bucket))
        if plan is None:
            self.idle_steps += 1
            plan = StepPlan(step, StepKind.DECODE, agreed_bucket, (), (), width)
        elif plan.kind is StepKind.DECODE:
            plan = replace(plan, bucket=agreed_bucket)
        return Launch(replace(plan, exchange_rows=rows), shared, agreed_bucket)


def exchange_ladder(buckets: tuple[int, ...], max_prefill_tokens: int) -> tuple[int, ...]:
    """Rows of the exchange in steps with a prefill, ascending; the last holds any prefill and any decode step."""
    most = max(max_prefill_tokens, buckets[-1])
    return tuple(sorted({-(-most // rung) for rung in RUNGS}))


def _features_of(numbers: Sequence[int]) -> SamplingVariant:
    """The variant that covers every group's, from the maxima of ``astuple``."""
    random, filters, penalties, min_tokens, logprobs, top_logprobs = numbers
    return SamplingVariant(bool(random), bool(filters), bool(penalties), bool(min_tokens), bool(logprobs), top_logprobs)
