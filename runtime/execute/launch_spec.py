"""How a step is launched, decided once: a plan, and what data-parallel groups agreed on, become a LaunchSpec.

Knows: bucket sizes, which sampling variant serves which rows, which step runs which plan. Does not know: why a plan is
what it is (runtime/schedule), how groups agree (runtime/groups), how a step runs (step/). Touches no device.
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
MOST_PIECES = 16  # of all chunks of a step with split keys
MOST_SPLIT_TOKENS = 256  # of such a step, decode tokens included
LONG_PREFIX = 1024  # tokens before a chunk; from there on splitting was faster (docs/lab/measurements/attention.md)
EXCHANGE_DIVISORS = (16, 4, 1)  # of the token budget: rows of an all-to-all while a group prefills


@dataclass(frozen=True, slots=True)
class LaunchNeeds:
    """What one group's plan needs of a step. Groups that share experts launch the maximum of every field.

    ``decode_bucket``: rows of the decode graph, 0 for a group without a decode step; ``width``: tokens that a row of it
    brings to each all-to-all (W, or its whole draft tree), else 1. ``prefill_tokens``: of a packed step, decode tokens
    included; 0 without chunks.
    """

    decode_bucket: int = 0
    prefill_tokens: int = 0
    variant: SamplingVariant = GREEDY
    width: int = 1


class StepShape(NamedTuple):
    """What the device runs in one step. Steps of one shape take about equally long; graph keys are projections of it.

    ``label``: the step's name in timelines: its role, or "mixed" for decode requests with prefill chunks.
    ``rows``: of the graph and of the results; those past the plan's are padding. ``width``: W, maximum tokens that a
    row appends. ``tree``: tokens of a row's draft tree, 0 for a chain. ``tokens``: of the forward pass, padding
    included. ``variant``: the kind of sampling. ``exchange``: rows, a token each, that every data-parallel group brings
    to each expert all-to-all; 0 for one group. ``split_keys``: the captured packed step in which keys of a few short
    chunks after long prefixes are split between programs. ``proposing``: rows of the graph that proposes draft tokens
    for a mixed step; 0 where it has none.

    Keys: propose (proposing, variant) | forward (tokens, split_keys) | tail (rows, variant) | all three in one graph, a
    step of decode requests alone (rows, variant, exchange); in each W and tree, since each step has its own graphs.
    """

    label: str
    rows: int
    width: int = 1
    tree: int = 0
    tokens: int = 0
    variant: SamplingVariant = GREEDY
    exchange: int = 0
    split_keys: bool = False
    proposing: int = 0


class LaunchSpec(NamedTuple):
    """The launch of one step on this rank; made only by ``LaunchResolver.resolve``. ``role``: the step that runs it.

    ``kind``: the plan's; but a DP group without prefill runs a padded mixed step when another group prefills in a CUDA
    graph. ``captured``: tokens of the captured forward pass of a packed step, padding included; 0 for a step that is
    launched kernel by kernel, and for decode. ``shared_bucket``: rows of the decode graph that any group replays in
    this step, ``shared_width``: maximum tokens of its rows; 0 and 1 for one group, and where no group replays one.
    Groups may replay decode graphs of different widths: these exchange as often, and as many rows.
    """

    plan: StepPlan
    kind: StepKind
    role: str
    shape: StepShape
    captured: int = 0
    shared_bucket: int = 0
    shared_width: int = 1


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """Sizes for which graphs are captured, each ascending.

    ``decode``: rows of decode graphs, and of the tails of packed steps. ``prefill``: tokens of packed steps; empty if
    none is captured. ``split``: those of them that are captured with split keys as well. ``exchange``: rows of the
    groups' all-to-alls while one of them prefills; empty for one group.
    """

    decode: tuple[int, ...]
    prefill: tuple[int, ...] = ()
    split: tuple[int, ...] = ()
    exchange: tuple[int, ...] = ()


class Serving(Protocol):
    """A step's name, and the plans it runs."""

    @property
    def name(self) -> str: ...
    def serves(self, plan: StepPlan, kind: StepKind) -> bool: ...


class LaunchResolver:
    """One per executor. ``slots``: of the device tables, padding included. ``roles``: the first that serves a plan runs
    it. ``ranks``: of the tensor-parallel group, which share a row's vocabulary. ``warm``: variants captured at
    start-up; rows that need less than one of them run in it, so that no request waits for a capture. ``drafts``: as
    SamplingVariant.on_ranks.
    """

    def __init__(
        self,
        sizes: BucketSizes,
        slots: int,
        roles: Sequence[Serving],
        ranks: int = 1,
        warm: Sequence[SamplingVariant] = (),
        drafts: bool = False,
    ) -> None:
        self._sizes = sizes
        self._warm = sorted(warm, key=lambda variant: sum(astuple(variant)))  # by number of features
        self._roles = roles
        self._captured_for = ranks, drafts
        self._slot_variants = [GREEDY] * slots
        self._row_variant = GREEDY
        self._variant_of: tuple[int, ...] | None = None
        self._latest: LaunchSpec | None = None  # of a decode step without other groups

    def needs(self, plan: StepPlan | None) -> LaunchNeeds:
        """What ``plan`` needs; None needs nothing. To be called once a plan, in the order of steps: it keeps the
        variants of slots up to date."""
        if plan is None:
            return LaunchNeeds()
        variant = self._variant(plan)
        if plan.kind is StepKind.DECODE:
            bucket = _bucket(self._sizes.decode, len(plan.slots))
            return LaunchNeeds(decode_bucket=bucket, variant=variant, width=plan.row_tokens)
        return LaunchNeeds(prefill_tokens=_tokens(plan), variant=variant)

    def resolve(self, plan: StepPlan, agreed: LaunchNeeds | None = None) -> LaunchSpec:
        """The launch of ``plan``. ``agreed``: the maximum of all groups' needs; None for one group.

        A group without work passes a plan without rows. ValueError if no role serves the plan.
        """
        latest = self._latest
        if latest is not None and agreed is None and _is_like(plan, latest.plan):
            role = self._role(plan, plan.kind)
            if role == latest.role:
                return LaunchSpec(plan, plan.kind, role, latest.shape)
        spec = self._resolve(plan, agreed)
        self._latest = spec if agreed is None and plan.kind is StepKind.DECODE else None
        return spec

    def _resolve(self, plan: StepPlan, agreed: LaunchNeeds | None) -> LaunchSpec:
        needs, sizes = agreed or self.needs(plan), self._sizes
        together = 0 if agreed is None else self._captured_for_all(agreed)
        kind = StepKind.MIXED if together and plan.kind is StepKind.DECODE else plan.kind
        role, rows, captured = self._role(plan, kind), len(plan.slots), 0
        shared_bucket, shared_width, exchange = 0, 1, together
        if agreed is not None and not together:
            # A group without work replays the agreed decode graph, else the smallest one: no all-to-all is narrower.
            shared_bucket, shared_width = agreed.decode_bucket or sizes.decode[0], agreed.width
            exchange = shared_bucket * shared_width
            if agreed.prefill_tokens:
                exchange = _bucket(sizes.exchange, max(agreed.prefill_tokens, exchange))
        if kind is StepKind.DECODE:
            rows = shared_bucket or needs.decode_bucket
        elif (together or agreed is None) and not plan.scored_tokens:  # captured for all groups, or for none
            tokens = together or _tokens(plan)
            if sizes.prefill and tokens <= sizes.prefill[-1]:
                rows, captured = _bucket(sizes.decode, rows), _bucket(sizes.prefill, tokens)
        shape = StepShape(
            label="mixed" if kind is StepKind.MIXED else role,
            rows=rows,
            width=plan.width,
            tree=plan.tree,
            tokens=captured or max(plan.packed_tokens, rows if plan.chunks else rows * plan.row_tokens),
            variant=self._captured(needs.variant),
            exchange=exchange,
            split_keys=captured in sizes.split and worth_splitting(plan),
            proposing=_bucket(sizes.decode, plan.decode_rows) if kind is StepKind.MIXED and plan.width > 1 else 0,
        )
        return LaunchSpec(plan, kind, role, shape, captured, shared_bucket, shared_width)

    def _role(self, plan: StepPlan, kind: StepKind) -> str:
        for role in self._roles:
            if role.serves(plan, kind):
                return role.name
        known = ", ".join(role.name for role in self._roles)
        raise ValueError(f"step {plan.step}: no role serves {kind.name} of width {plan.width}; there are {known}")

    def _captured(self, variant: SamplingVariant) -> SamplingVariant:
        """The warm variant of the fewest features that serves rows of ``variant``; without one, that itself."""
        if variant in self._warm:
            return variant
        return next((warm for warm in self._warm if warm.covers(variant)), variant)

    def _captured_for_all(self, agreed: LaunchNeeds) -> int:
        """Tokens to which every group pads a captured packed step; 0 for any other step."""
        buckets = self._sizes.prefill
        wanted = max(agreed.prefill_tokens, agreed.decode_bucket * agreed.width)
        if not agreed.prefill_tokens or not buckets or wanted > buckets[-1]:
            return 0
        return _bucket(buckets, wanted)

    def _variant(self, plan: StepPlan) -> SamplingVariant:
        """The sampling variant that serves every row; computed again only when the rows changed."""
        for write in plan.slot_writes:
            self._slot_variants[write.slot] = SamplingVariant.covering([write.sampling]).on_ranks(*self._captured_for)
        if plan.slots is not self._variant_of:
            self._variant_of = plan.slots
            self._row_variant = GREEDY
            for slot in plan.slots:
                self._row_variant |= self._slot_variants[slot]
        return self._row_variant


def _is_like(plan: StepPlan, latest: StepPlan) -> bool:
    """Whether a decode step has the rows and width of the one before it, as most have."""
    if plan.slots is not latest.slots or plan.slot_writes:
        return False
    return plan.kind is latest.kind and plan.width == latest.width and plan.tree == latest.tree


def _tokens(plan: StepPlan) -> int:
    """Tokens for which a packed step is launched, at least one per row: forks bring none."""
    return max(plan.packed_tokens, len(plan.slots))


def worth_splitting(plan: StepPlan) -> bool:
    """Whether splitting keys is faster: all chunks together are short, and one follows a long prefix.

    A program of prefill attention computes a head and 128 tokens, and reads all keys of a chunk in order.
    """
    pieces = sum(-(-len(chunk.token_ids) // PIECE) for chunk in plan.chunks)
    return pieces <= MOST_PIECES and any(chunk.start >= LONG_PREFIX for chunk in plan.chunks)


def exchange_buckets(
    buckets: tuple[int, ...], max_prefill_tokens: int, decode_tokens: int = 0, width: int = 1
) -> tuple[int, ...]:
    """Rows of the all-to-alls while a group prefills, ascending. The last holds any packed step, with ``decode_tokens``
    besides its chunks, and draft windows or trees of ``width`` tokens a row in another group."""
    most = max(max_prefill_tokens + decode_tokens, buckets[-1] * width)
    return tuple(sorted({-(-most // divisor) for divisor in EXCHANGE_DIVISORS}))


def _bucket(buckets: tuple[int, ...], count: int) -> int:
    """The smallest bucket that holds ``count``."""
    return buckets[bisect_left(buckets, count)]
