"""A launch is decided in one place: what a plan of each kind becomes, and that it is frozen."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from runtime.execute.launch_spec import GREEDY, BucketSizes, LaunchNeeds, LaunchResolver, LaunchSpec, StepShape
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.schedule.plan import Chunk, Fork, Scored, SlotWrite, StepKind, StepPlan
from runtime.schedule.request import SamplingParams
from tests.runtime.execute.plans import slot_write

LADDERS = BucketSizes(decode=(1, 2, 4, 8), prefill=(16, 32))


@dataclass(frozen=True)
class Serves:
    """A role, for plans of one kind and width."""

    name: str
    kind: StepKind
    width: int = 1

    def serves(self, plan: StepPlan, kind: StepKind) -> bool:
        return (kind, plan.width) == (self.kind, self.width)


def resolver(ladders: BucketSizes = LADDERS) -> LaunchResolver:
    roles = (Serves("wide", StepKind.DECODE, 4), Serves("decode", StepKind.DECODE), Serves("prefill", StepKind.PREFILL))
    return LaunchResolver(ladders, 25, roles)


def decode(rows: int, *, width: int = 1, writes: tuple[SlotWrite, ...] = ()) -> StepPlan:
    return StepPlan(1, StepKind.DECODE, tuple(range(1, rows + 1)), (0,) * rows, width, slot_writes=writes)


def prefill(tokens: int, *, scored: bool = False) -> StepPlan:
    chunk = Chunk(3, 0, (1,) * tokens, True, Scored(1, (1, 1), 0) if scored else None)
    return StepPlan(1, StepKind.PREFILL, (3,), (0,), 1, chunks=(chunk,))


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_decode_takes_the_least_bucket_that_holds_its_rows(rows: int, bucket: int) -> None:
    assert resolver().resolve(decode(rows)) == LaunchSpec(
        decode(rows), StepKind.DECODE, "decode", StepShape("decode", bucket, tokens=bucket)
    )


FILTERED = SamplingVariant(random=True, filters=True)
FULL = SamplingVariant(random=True, filters=True, penalties=True)
LIKELY = SamplingVariant(random=True, logprobs=True)


@pytest.mark.parametrize(
    ("needed", "warm", "found"),
    [
        (FILTERED, (FULL, FILTERED, GREEDY), FILTERED),
        (SamplingVariant(penalties=True), (GREEDY, FULL), FULL),
        (SamplingVariant(random=True, penalties=True), (FULL, FILTERED, GREEDY), FULL),
        (SamplingVariant(random=True), (FULL, GREEDY, FILTERED), FILTERED),
        (GREEDY, (FULL,), FULL),
        (FULL, (GREEDY, FILTERED), FULL),
        (LIKELY, (GREEDY, FULL), LIKELY),
        (FILTERED, (), FILTERED),
    ],
)
def test_rows_run_in_the_narrowest_warm_variant_that_serves_them(
    needed: SamplingVariant, warm: tuple[SamplingVariant, ...], found: SamplingVariant
) -> None:
    """Alone, and where another group asked for it; what no warm one serves is captured as it is."""
    roles = (Serves("decode", StepKind.DECODE), Serves("prefill", StepKind.PREFILL))
    one = LaunchResolver(BucketSizes((1, 8), (16,), exchange=(16, 64)), 25, roles, warm=warm)
    for plan in (decode(2), prefill(9), prefill(9, scored=True)):
        assert one.resolve(plan, LaunchNeeds(2, 0, needed)).shape.variant == found
    sampling = SamplingParams(
        temperature=float(needed.random),
        top_p=0.5 if needed.filters else 1.0,
        presence_penalty=float(needed.penalties),
        logprobs=0 if needed.logprobs else None,
    )
    assert one.resolve(decode(1, writes=(slot_write(1, sampling=sampling),))).shape.variant == found
    assert one.resolve(decode(1)).shape.variant == found


@pytest.mark.parametrize(("tokens", "padded"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 0)])
def test_prefill_is_filled_up_to_a_captured_number_of_tokens(tokens: int, padded: int) -> None:
    spec = resolver().resolve(prefill(tokens))
    assert (spec.role, spec.shape.rows, spec.captured) == ("prefill", 1, padded)


@pytest.mark.parametrize(
    ("tokens", "forks", "padded", "bucket"), [(3, 1, 4, 2), (3, 3, 4, 4), (3, 4, 16, 8), (5, 7, 16, 8)]
)
def test_a_step_has_no_more_rows_than_tokens(tokens: int, forks: int, padded: int, bucket: int) -> None:
    """Forks are rows without tokens; a captured step has a row a token at most."""
    ladders = BucketSizes(decode=(1, 2, 4, 8), prefill=(4, 16))
    chunk, slots = Chunk(3, 0, (1,) * tokens, True), (3, *range(4, 4 + forks))
    made = tuple(Fork(slot, 0) for slot in slots[1:])
    plan = StepPlan(1, StepKind.PREFILL, slots, (0,) * len(slots), 1, chunks=(chunk,), forks=made)
    spec = resolver(ladders).resolve(plan)
    assert (spec.shape.rows, spec.captured) == (bucket, padded)
    assert resolver(ladders).needs(plan).prefill_tokens == max(tokens, len(slots))


@pytest.mark.parametrize(
    ("chunks", "split"),
    [
        ([(1024, 3)], True),
        ([(1023, 3)], False),
        ([(1024, 17), (0, 5)], True),
        ([(5000, 1)] * 16, True),
        ([(5000, 1)] * 17, False),
        ([(5000, 15 * 16 + 1)], True),
        ([(5000, 16 * 16 - 3), (0, 1)], False),
    ],
)
def test_keys_of_few_short_chunks_behind_long_prefixes_are_split(chunks: list[tuple[int, int]], split: bool) -> None:
    ladders = BucketSizes(decode=(1, 64), prefill=(64, 256, 512), split=(64, 256))
    made = tuple(Chunk(3 + i, start, (1,) * tokens, True) for i, (start, tokens) in enumerate(chunks))
    slots = tuple(chunk.slot for chunk in made)
    plan = StepPlan(1, StepKind.PREFILL, slots, (0,) * len(slots), 1, chunks=made)
    assert resolver(ladders).resolve(plan).shape.split_keys is split
    assert not resolver(BucketSizes((1, 64), (64, 256, 512))).resolve(plan).shape.split_keys, "no such graphs"


def test_prefill_that_scores_its_prompt_or_has_no_graphs_is_launched_as_it_is() -> None:
    assert resolver().resolve(prefill(5, scored=True)).captured == 0
    assert resolver(BucketSizes((1,))).resolve(prefill(5)).captured == 0


def test_the_first_role_that_serves_a_plan_runs_it() -> None:
    spec = resolver().resolve(decode(3, width=4))
    assert (spec.role, spec.shape.rows, spec.shape.width) == ("wide", 4, 4)
    with pytest.raises(ValueError, match="step 1: no role serves DECODE of width 7; there are wide, decode, prefill"):
        resolver().resolve(decode(3, width=7))


def test_the_variant_covers_every_row_and_follows_the_slots() -> None:
    one = resolver()
    random = slot_write(1, sampling=SamplingParams(temperature=1.0, seed=0))
    likely = slot_write(2, sampling=SamplingParams(temperature=0.0, seed=0, logprobs=3))
    both = one.resolve(decode(2, writes=(random, likely)))
    assert both.shape.variant == SamplingVariant(random=True, logprobs=True, top_logprobs=5)
    assert one.resolve(decode(1)).shape.variant == SamplingVariant(random=True), "the other row is not in this step"
    assert one.resolve(decode(1, writes=(slot_write(1),))).shape.variant == GREEDY, "somebody else has the slot now"


def test_a_steady_batch_is_launched_as_before_until_its_rows_or_width_change() -> None:
    one, first = resolver(), decode(2, writes=(slot_write(1), slot_write(2)))
    before = one.resolve(first)
    steady = first._replace(step=2, slot_writes=())
    assert one.resolve(steady) == before._replace(plan=steady)
    other = decode(2, writes=(slot_write(2, sampling=SamplingParams(temperature=1.0, seed=0)),))
    assert other.slots is not first.slots, "as a scheduler has it for other rows"
    assert one.resolve(other).shape.variant == SamplingVariant(random=True)
    assert one.resolve(other._replace(slot_writes=())).shape.variant == SamplingVariant(random=True)
    assert one.resolve(other._replace(slot_writes=(), width=4)).role == "wide"


def test_roles_are_asked_of_each_step_of_a_steady_batch() -> None:
    class Odd(Serves):
        def serves(self, plan: StepPlan, kind: StepKind) -> bool:
            return plan.step % 2 == 1 and super().serves(plan, kind)

    roles = Odd("odd", StepKind.DECODE), Serves("decode", StepKind.DECODE)
    one, first = LaunchResolver(LADDERS, 25, roles), decode(2)
    assert [one.resolve(first._replace(step=step)).role for step in range(1, 5)] == ["odd", "decode"] * 2


def test_what_was_agreed_with_other_groups_widens_the_step() -> None:
    shared = resolver(BucketSizes((1, 2, 4, 8), exchange=(4, 16, 64)))
    agreed = LaunchNeeds(decode_bucket=4, prefill_tokens=10, variant=SamplingVariant(filters=True))
    spec = shared.resolve(decode(1), agreed)
    assert (spec.shape.rows, spec.shape.exchange, spec.shared_bucket, spec.shape.variant) == (4, 16, 4, agreed.variant)


@pytest.mark.parametrize("plan", [decode(2), decode(3, width=4), prefill(5), prefill(5, scored=True), prefill(33)])
def test_a_plan_is_launched_as_it_was_digested(plan: StepPlan) -> None:
    spec = resolver().resolve(plan)
    assert spec.plan is plan
    assert spec.kind is plan.kind


def test_a_spec_and_its_plan_stay_what_they_are() -> None:
    spec = resolver().resolve(decode(2))
    with pytest.raises(AttributeError):
        spec.captured = 8  # type: ignore[misc]
    with pytest.raises(AttributeError):
        spec.shape.rows = 8  # type: ignore[misc]
    with pytest.raises(AttributeError):
        spec.plan.width = 2  # type: ignore[misc]
