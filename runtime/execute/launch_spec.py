"""How a step is launched, decided once: the plan, and what data-parallel groups agreed on, become a LaunchSpec.

Knows: the ladders of buckets, which sampling variant serves which rows, which role runs which plan.
Does not know: why a plan is what it is (runtime/schedule), who carries an agreement (runtime/groups), or how a role
runs (role.py). Nothing here touches the device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple, Protocol

from models.inputs import PIECE
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.schedule.plan import StepKind, StepPlan

GREEDY = SamplingVariant()
MOST_PIECES = 16  # of all chunks of a step whose keys are split
MOST_SPLIT_TOKENS = 256  # of such a step, those of rows that decode included
LONG_PREFIX = 1024  # tokens before a chunk; from there on splitting was faster (docs/lab/measurements/attention.md)
EXCHANGE_RUNGS = (16, 4, 1)  # rows of an exchange while some group prefills: the token budget divided by these


@dataclass(frozen=True, slots=True)
class LaunchNeeds:
    """What one group's plan needs of a step. Groups that share experts launch the maximum of every field.

    ``decode_bucket``: rows of the decode graph, 0 where the group has no step of decode rows alone; ``width``: tokens
    that a row of it brings to each exchange (W; of a draft tree, all of it), 1 elsewhere.
    ``prefill_tokens``: of a step with chunks, those of its decode rows included; 0 where it has no chunks.
    """

    decode_bucket: int = 0
    prefill_tokens: int = 0
    variant: SamplingVariant = GREEDY
    width: int = 1


class LaunchSpec(NamedTuple):
    """One step as this rank launches it; made only by ``LaunchResolver.resolve``.

    ``kind``: the plan's; but a group that only decodes, or has no work, launches MIXED where another one's chunks are
    in a captured step (below). ``role`` runs it. ``bucket``: rows that the role's graph and the step's results have;
    those past the plan's are padding. ``padded_tokens``: tokens that a captured step with chunks is filled up to; 0
    where such a step is launched kernel by kernel, and for decode. ``split_keys``: the captured step whose chunks are
    few, short and behind long prefixes, so that their keys are split between programs. ``exchange_rows``: rows, a token
    each, that every data-parallel group brings to each exchange of the step; 0 where there is one group.
    ``shared_bucket``: rows of the decode graph that any group replays in this step; 0 where there is one group, and
    where none replays any. ``shared_width``: the most tokens a row of such a graph brings. Groups may replay graphs of
    different widths: they exchange as often, and as many rows.
    ``guessing``: rows, of those that decode beside chunks, whose windows are proposed before the forward pass; 0 where
    there are none.

    Where several groups launch a step with chunks that is captured, all of them launch it, padded to the same tokens: a
    group that only decodes, or has no work, as a mixed step without a chunk.
    """

    plan: StepPlan
    kind: StepKind
    role: str
    bucket: int
    variant: SamplingVariant = GREEDY
    padded_tokens: int = 0
    exchange_rows: int = 0
    shared_bucket: int = 0
    split_keys: bool = False
    shared_width: int = 1
    guessing: int = 0

    @property
    def step(self) -> int:
        return self.plan.step

    @property
    def label(self) -> str:
        """The step's kind in timelines: its role, or "mixed" where rows decode beside chunks of prompts."""
        return "mixed" if self.kind is StepKind.MIXED else self.role

    @property
    def shape(self) -> tuple[object, ...]:
        """What steps have in common that take about equally long: the graph that they replay."""
        return self.label, self.width, self.bucket, self.tokens, self.exchange_rows, self.split_keys, self.variant

    @property
    def tokens(self) -> int:
        """That the device computes, padding included; those of a window's proposals are counted once."""
        rows = self.bucket if self.plan.chunks else self.bucket * self.plan.row_tokens
        return self.padded_tokens or max(self.plan.packed_tokens, rows)

    @property
    def width(self) -> int:
        """Tokens that a row may gain (W)."""
        return self.plan.width

    @property
    def logprobs(self) -> int | None:
        """Likely tokens reported beside each drawn one; None where no log-probabilities are computed."""
        return self.variant.top_logprobs if self.variant.logprobs else None


@dataclass(frozen=True, slots=True)
class Ladders:
    """Sizes for which steps are prepared, each ascending.

    ``decode``: rows of decode graphs, and of what draws tokens behind a captured step with chunks. ``prefill``: tokens
    of captured steps with chunks; empty where none is captured. ``split``: those of them that are captured with split
    keys, too.
    ``exchange``: rows of the groups' exchanges while one of them prefills; empty where there is one group.
    """

    decode: tuple[int, ...]
    prefill: tuple[int, ...] = ()
    split: tuple[int, ...] = ()
    exchange: tuple[int, ...] = ()


class Serving(Protocol):
    """Of a role: its name, and the steps it is for."""

    @property
    def name(self) -> str: ...
    def serves(self, plan: StepPlan, kind: StepKind) -> bool: ...


class LaunchResolver:
    """One an executor. ``slots``: of the device tables, padding included. ``roles``: the first that serves a plan.

    ``ranks``: of the tensor-parallel group, which share a row's vocabulary. ``warm``: variants that are captured
    at start-up; rows that need less than one of them run in it, so that nobody waits for a capture.
    """

    def __init__(
        self,
        ladders: Ladders,
        slots: int,
        roles: Sequence[Serving],
        ranks: int = 1,
        warm: Sequence[SamplingVariant] = (),
    ) -> None:
        self._ladders = ladders
        self._warm = sorted(warm, key=lambda variant: sum(astuple(variant)))  # by how many features are on
        self._roles = roles
        self._ranks = ranks
        self._slot_variants = [GREEDY] * slots
        self._row_variant = GREEDY
        self._variant_of: tuple[int, ...] | None = None
        self._latest: LaunchSpec | None = None  # of decode rows alone, with no other group

    def needs(self, plan: StepPlan | None) -> LaunchNeeds:
        """What ``plan`` needs; None needs nothing. To be asked once a plan, in the order of steps: it learns from its
        slot writes."""
        if plan is None:
            return LaunchNeeds()
        variant = self._variant(plan)
        if plan.kind is StepKind.DECODE:
            bucket = _rung(self._ladders.decode, len(plan.slots))
            return LaunchNeeds(decode_bucket=bucket, variant=variant, width=plan.row_tokens)
        return LaunchNeeds(prefill_tokens=_tokens(plan), variant=variant)

    def resolve(self, plan: StepPlan, agreed: LaunchNeeds | None = None) -> LaunchSpec:
        """The launch of ``plan``, whose ``needs`` were ``agreed`` with the other groups, where there are some.

        A group without work passes a plan without rows. ValueError where no role serves the plan.
        """
        latest = self._latest
        if latest is not None and agreed is None and _is_like(plan, latest.plan):
            return LaunchSpec(plan, plan.kind, self._role(plan, plan.kind), latest.bucket, latest.variant)
        spec = self._resolve(plan, agreed)
        self._latest = spec if agreed is None and plan.kind is StepKind.DECODE else None
        if spec.kind is not StepKind.MIXED or spec.width == 1:
            return spec
        return spec._replace(guessing=_rung(self._ladders.decode, plan.decode_rows))

    def _resolve(self, plan: StepPlan, agreed: LaunchNeeds | None) -> LaunchSpec:
        needs = agreed or self.needs(plan)
        variant = self._captured(needs.variant)
        tokens_of_all = 0 if agreed is None else self._captured_for_all(agreed)
        kind = StepKind.MIXED if tokens_of_all and plan.kind is StepKind.DECODE else plan.kind
        role = self._role(plan, kind)
        ladders, exchange_rows, shared_bucket = self._ladders, 0, 0
        if tokens_of_all:
            rows, scored = len(plan.slots), plan.scored_tokens > 0
            bucket, padded = (rows, 0) if scored else (_rung(ladders.decode, rows), tokens_of_all)
            split = padded in ladders.split and worth_splitting(plan)
            return LaunchSpec(plan, kind, role, bucket, variant, padded, exchange_rows=tokens_of_all, split_keys=split)
        if agreed is not None:
            # A group that neither decodes nor prefills replays the agreed decode graph, the smallest one if there is
            # none, so no exchange is narrower than that.
            shared_bucket = agreed.decode_bucket or ladders.decode[0]
            exchange_rows = shared_bucket * agreed.width
            if agreed.prefill_tokens:
                exchange_rows = _rung(ladders.exchange, max(agreed.prefill_tokens, exchange_rows))
        if kind is StepKind.DECODE:
            bucket = shared_bucket or needs.decode_bucket
            width = needs.width if agreed is not None else 1
            return LaunchSpec(plan, kind, role, bucket, variant, 0, exchange_rows, shared_bucket, shared_width=width)
        tokens, rows = _tokens(plan), len(plan.slots)
        if agreed is not None:  # a step that is not captured for all groups is for none: their exchanges are alike
            return LaunchSpec(
                plan, kind, role, rows, variant, 0, exchange_rows, shared_bucket, shared_width=needs.width
            )
        if not ladders.prefill or tokens > ladders.prefill[-1] or plan.scored_tokens:
            return LaunchSpec(plan, kind, role, rows, variant)
        padded = _rung(ladders.prefill, tokens)
        split = padded in ladders.split and worth_splitting(plan)
        return LaunchSpec(plan, kind, role, _rung(ladders.decode, rows), variant, padded, split_keys=split)

    def _role(self, plan: StepPlan, kind: StepKind) -> str:
        for role in self._roles:
            if role.serves(plan, kind):
                return role.name
        known = ", ".join(role.name for role in self._roles)
        raise ValueError(f"step {plan.step}: no role serves {kind.name} of width {plan.width}; there are {known}")

    def _captured(self, variant: SamplingVariant) -> SamplingVariant:
        """The warm variant of the fewest features that serves rows of ``variant``; it, where there is none."""
        if variant in self._warm:
            return variant
        return next((warm for warm in self._warm if warm.covers(variant)), variant)

    def _captured_for_all(self, agreed: LaunchNeeds) -> int:
        """Tokens to which every group's step is padded, of a captured step with chunks; 0 where it is none."""
        ladder = self._ladders.prefill
        wanted = max(agreed.prefill_tokens, agreed.decode_bucket * agreed.width)
        if not agreed.prefill_tokens or not ladder or wanted > ladder[-1]:
            return 0
        return _rung(ladder, wanted)

    def _variant(self, plan: StepPlan) -> SamplingVariant:
        """The sampling variant that serves every row; worked out again only when the rows changed."""
        for write in plan.slot_writes:
            self._slot_variants[write.slot] = SamplingVariant.covering([write.sampling]).on_ranks(self._ranks)
        if plan.slots is not self._variant_of:
            self._variant_of = plan.slots
            self._row_variant = GREEDY
            for slot in plan.slots:
                self._row_variant |= self._slot_variants[slot]
        return self._row_variant


def _is_like(plan: StepPlan, latest: StepPlan) -> bool:
    """Whether decode steps follow each other whose rows and width are the same: most do."""
    if plan.slots is not latest.slots or plan.slot_writes:
        return False
    return plan.kind is latest.kind and plan.width == latest.width and plan.tree == latest.tree


def _tokens(plan: StepPlan) -> int:
    """That a step with chunks is launched for: as many as rows at least. Those of forks have none of their own."""
    return max(plan.packed_tokens, len(plan.slots))


def worth_splitting(plan: StepPlan) -> bool:
    """Whether some chunk has so many keys before it, and all together are so short, that keys are split.

    Prefill attention has a program a head and 128 tokens, which reads all keys of a chunk one after the other.
    """
    pieces = sum(-(-len(chunk.token_ids) // PIECE) for chunk in plan.chunks)
    return pieces <= MOST_PIECES and any(chunk.start >= LONG_PREFIX for chunk in plan.chunks)


def exchange_ladder(
    buckets: tuple[int, ...], max_prefill_tokens: int, beside: int = 0, width: int = 1
) -> tuple[int, ...]:
    """Rows of the exchange in steps with chunks, ascending; the last holds any step, ``beside`` tokens of rows that
    decode beside its chunks included, and windows or trees of ``width`` tokens a row in another group."""
    most = max(max_prefill_tokens + beside, buckets[-1] * width)
    return tuple(sorted({-(-most // rung) for rung in EXCHANGE_RUNGS}))


def _rung(ladder: tuple[int, ...], count: int) -> int:
    """The lowest rung that holds ``count``."""
    return ladder[bisect_left(ladder, count)]
