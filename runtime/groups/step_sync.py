"""What groups with separate requests must agree on before each step, so that their collectives fit together.

Knows: the few numbers of which the maximum is taken. Pure, but for the call that takes it. Does not know: who carries
that call (the control plane), what is launched for them (runtime/execute/launch_spec.py), experts, or requests.

The reasons are in docs/decisions/0003-data-parallel-attention.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Protocol

from runtime.execute.launch_spec import LaunchNeeds
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.groups.load_balancer import LoadBalancer
from runtime.schedule.budget import NO_BOUND


class StepAgreement(Protocol):
    """One a group; all groups make the same calls in the same order."""

    def agree_max(self, step: int, numbers: Sequence[int]) -> tuple[int, ...]:
        """The elementwise maximum over all groups of step ``step``'s numbers; each at least 0."""
        ...


class DpStepSync:
    """One group's view of all.

    ``load_balancer``: whose loads are agreed along with the rest; None where groups are not balanced.
    ``idle_steps`` counts those that it launched for the others' sake, without rows. ``room``: the least
    that any group gave to the latest ``join``.
    """

    def __init__(self, agreement: StepAgreement, load_balancer: LoadBalancer | None = None) -> None:
        self._agreement = agreement
        self._load_balancer = load_balancer
        self.idle_steps = 0
        self.room = NO_BOUND

    def join(self, step: int, needs: LaunchNeeds, room: int = NO_BOUND) -> LaunchNeeds | None:
        """What all groups together need of step ``step``, of which this one has ``needs``; None if no group has work.

        Groups without work launch it, too: their part of the exchanges is awaited. ``room``: tokens that the step
        after it may have for the sake of this group's decode rows, NO_BOUND at most.
        """
        variant_numbers = map(int, astuple(needs.variant))
        least = NO_BOUND - room  # its maximum is of the least room
        numbers: tuple[int, ...] = (needs.decode_bucket, needs.prefill_tokens, *variant_numbers, least, needs.width)
        ours = len(numbers)
        if self._load_balancer is not None:
            numbers += self._load_balancer.proposal
        agreed = self._agreement.agree_max(step, numbers)
        if self._load_balancer is not None:
            self._load_balancer.agreed(agreed[ours:])
        decode_bucket, prefill_tokens, *variant, least, width = agreed[:ours]
        self.room = NO_BOUND - least
        if not decode_bucket and not prefill_tokens:
            return None
        self.idle_steps += not (needs.decode_bucket or needs.prefill_tokens)
        return LaunchNeeds(decode_bucket, prefill_tokens, SamplingVariant.of(variant), width)
