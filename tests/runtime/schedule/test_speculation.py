"""When a decode step is a window: the borders of every threshold, and what a scheduler with the policy plans."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from runtime.schedule.budget import TokenBudget
from runtime.schedule.config import MixedSteps
from runtime.schedule.plan import Admit, StepKind, StepPlan, StepResult
from runtime.schedule.request import FinishReason, Request, SamplingParams
from runtime.schedule.scheduler import Scheduler
from runtime.schedule.speculation import PROBE_EVERY, REMEMBERED_ROUNDS, UNIT, Speculation, SpeculationPolicy, cost_of
from tests.runtime.schedule.configs import config_with
from tests.runtime.schedule.driver import prompt_of


@pytest.mark.parametrize("most", [0, 1, 7, 8])
def test_the_border_is_the_last_batch_that_speculates(most: int) -> None:
    policy = SpeculationPolicy(Speculation(4, most_rows=most))
    assert [policy.width(rows) for rows in range(1, 10)] == [4 if rows <= most else 1 for rows in range(1, 10)]
    assert policy.off == {"batch": 9 - most}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"width": 1}, "width is 1"),
        ({"width": 4, "most_rows": -1}, "most_rows is -1"),
        ({"width": 4, "mixed_percent": -1}, "mixed_percent is -1"),
        ({"width": 4, "mixed_percent": 101}, "mixed_percent is 101"),
        ({"width": 4, "costs": ((0, 1000),)}, "rows ascend from 1 on"),
        ({"width": 4, "costs": ((2, 1000), (2, 1100))}, "rows ascend"),
        ({"width": 4, "costs": ((2, -1),)}, "no cost is below 0"),
        ({"width": 4, "costs": ((2, 9),), "narrower": ((2, ((2, -1),)),)}, "no cost is below 0"),
        ({"width": 4, "costs": ((2, 9),), "narrower": ((4, ((2, 9),)),)}, r"widths \[4\], but they descend from 4"),
        ({"width": 4, "costs": ((2, 9),), "narrower": ((1, ((2, 9),)),)}, "to 2 at least"),
        ({"width": 8, "costs": ((2, 9),), "narrower": ((2, ((2, 9),)), (4, ((2, 9),)))}, "they descend"),
        ({"width": 4, "narrower": ((2, ((2, 9),)),)}, "each width needs some"),
        ({"width": 4, "costs": ((2, 9),), "narrower": ((2, ()),)}, "each width needs some"),
        ({"width": 4, "costs": ((2, 9),), "most_rows": 3, "narrower": ((2, ((2, 9),)),)}, "most_rows is None"),
    ],
)
def test_values_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Speculation(**given)


def test_costs_are_those_of_the_first_entry_that_covers_the_rows() -> None:
    config = Speculation(4, costs=((1, 1100), (4, 1500), (8, 3000)))
    assert [cost_of(config.costs, rows) for rows in (1, 2, 4, 5, 8, 9)] == [1100, 1500, 1500, 3000, 3000, 3000]
    assert cost_of(Speculation(4).costs, 3) == 0
    assert config.numbers == (4, -1, 3, 1, 1100, 4, 1500, 8, 3000, 0)
    assert Speculation(4, most_rows=0, mixed_percent=25).numbers == (4, 0, 0, 25)
    narrower = Speculation(4, costs=((1, 1100),), mixed_percent=30, narrower=((2, ((1, 1050), (8, 1400))),))
    assert narrower.numbers == (4, -1, 1, 1, 1100, 30, 2, 2, 1, 1050, 8, 1400)


@pytest.mark.parametrize(
    ("cost", "kept", "pays"), [(1000, 0, False), (1000, 1, True), (1100, 1, False), (1099, 1, True)]
)
def test_a_window_pays_where_it_gains_more_than_its_time(cost: int, kept: int, pays: bool) -> None:
    """Ten rounds, of which so many kept a guess: eleven tokens are worth ten plain steps' time, ten are not."""
    policy = SpeculationPolicy(Speculation(4, costs=((8, cost),)))
    assert policy.width(3) == 4, "before anything landed, it is hoped so"
    policy.landed(4, 10, [kept, 0, 0])
    assert policy.width(3) == (4 if pays else 1)


def narrow_policy(kept: list[int], rounds: int = 100) -> SpeculationPolicy:
    """Windows of 8, 4 and 2: dearer with more rows. ``kept`` of so many rounds of 8."""
    policy = SpeculationPolicy(
        Speculation(
            8,
            costs=((1, 1200), (8, 1500), (32, 3000), (64, 9000)),
            narrower=((4, ((1, 1150), (8, 1300), (32, 1600), (64, 3300))), (2, ((1, 1100), (32, 1300), (64, 1900)))),
        )
    )
    policy.landed(8, rounds, kept)
    return policy


def test_the_width_is_the_one_that_gains_the_most_in_a_steps_time() -> None:
    good = narrow_policy([95, 90, 80, 70, 60, 50, 40])  # 5.85 tokens of 8, 3.65 of 4, 1.95 of 2
    assert [good.tokens(width) for width in (8, 4, 2)] == [5850, 3650, 1950]
    assert [good.width(rows) for rows in (1, 2, 9, 33)] == [8, 8, 4, 4 if 3650 * 1900 > 1950 * 3300 else 2]
    assert good.narrowed == {3: 2}
    assert good.off == {}
    poor = narrow_policy([20, 2, 0, 0, 0, 0, 0])
    assert [poor.width(rows) for rows in (1, 2, 9, 33)] == [2, 1, 1, 1]
    assert poor.off == {"gain": 3}
    assert poor.narrowed == {1: 1}
    equal = narrow_policy([50, 50, 50, 50, 50, 50, 50])
    assert equal.tokens(8) * 1300 > equal.tokens(4) * 1500
    assert equal.width(8) == 8


def test_the_next_wider_window_is_tried_while_narrower_ones_say_nothing_of_it() -> None:
    """Beside the choice of 4 it is 8; of 2 it is 4, not 8; where nothing pays it is the narrowest."""
    policy = narrow_policy([95, 90, 90, 0, 0, 0, 0])
    assert [policy.width(9) for _ in range(2 * (PROBE_EVERY + 1))] == 2 * [*[4] * PROBE_EVERY, 8]
    assert policy.narrowed == {3: 2 * PROBE_EVERY}
    for _ in range(2 * REMEMBERED_ROUNDS // 8):
        policy.landed(4, 8, [8, 8, 8])
    assert policy.tokens(8) < policy.tokens(4) + 10, "of its own guesses nothing is known but the old"
    for _ in range(4 * REMEMBERED_ROUNDS // 8):
        policy.landed(8, 8, [8] * 7)
    assert policy.width(9) == 8, "8,000 against 4,000 tokens, 3,000 against 1,600 of time"
    two = narrow_policy([60, 0, 0, 0, 0, 0, 0])
    assert [two.width(9) for _ in range(2 * (PROBE_EVERY + 1))] == 2 * [*[2] * PROBE_EVERY, 4]
    off = narrow_policy([0, 0, 0, 0, 0, 0, 0])
    assert [off.width(9) for _ in range(2 * (PROBE_EVERY + 1))] == 2 * [*[1] * PROBE_EVERY, 2]
    assert (off.off, off.narrowed) == ({"gain": 2 * PROBE_EVERY}, {1: 2})


def test_a_width_beyond_the_next_is_tried_where_the_next_could_not_pay() -> None:
    """Of 4 tokens 3.7 are kept; 8 could be 7.3 of 2,100, 16 are up to 14.5 of 2,200: more than 3.7 of 1,000."""
    policy = SpeculationPolicy(
        Speculation(16, costs=((8, 2200),), narrower=((8, ((8, 2100),)), (4, ((8, 1000),)))),
    )
    policy.landed(16, 10, [0] * 15)
    policy.landed(4, 90, [90, 90, 90])
    assert [policy.width(2) for _ in range(PROBE_EVERY + 1)] == [*[4] * PROBE_EVERY, 16]
    policy.landed(16, 500, [500] * 15)
    assert policy.width(2) == 16


def test_what_a_probe_just_showed_bounds_the_wider_ones() -> None:
    """By the choice of 4 alone 16 might be 3.7 + 12 * 0.9 of 4,000; but of 8 no more than 4.6 were kept."""
    policy = SpeculationPolicy(
        Speculation(16, costs=((8, 4000),), narrower=((8, ((8, 1900),)), (4, ((8, 1000),)))),
    )
    policy.landed(4, 100, [90, 90, 90])
    policy.landed(8, 100, [90, 90, 90, 60, 20, 10, 0])
    policy.landed(16, 10, [0] * 15)
    widths = [policy.width(2) for _ in range(3 * (PROBE_EVERY + 1))]
    assert widths == 3 * [*[4] * PROBE_EVERY, 8]


def test_places_that_few_rounds_reach_are_forgotten_beside_the_others() -> None:
    """A round of 2 in each turn, and of 8 in one of 65: what texts before these kept of 8 fades as fast."""
    policy = narrow_policy([0] * 7, rounds=500)
    assert [policy.tokens(width) for width in (2, 8)] == [1000, 1000]
    for _ in range(30):
        policy.landed(2, 64, [64])
        policy.landed(8, 1, [1] * 7)
    assert policy.tokens(2) > 1980
    assert policy.tokens(8) > 3000, "some 30 of 94 rounds that are remembered kept all"
    narrow = narrow_policy([100] * 7)
    for _ in range(100):
        narrow.landed(2, 64, [64])
    assert narrow.tokens(8) == 8000, "what nobody saw since is remembered, by 32 rounds at least"


def two_widths(cost: int, narrow_cost: int, **more: Any) -> Speculation:
    return Speculation(4, costs=((8, cost),), narrower=((2, ((8, narrow_cost),)),), **more)


@pytest.mark.parametrize(("cost", "tried"), [(1999, True), (2000, False), (9000, False)])
def test_a_wider_window_that_could_not_pay_is_not_tried(cost: int, tried: bool) -> None:
    """Of 2 tokens 1.5 are kept, of 4 at most half a token more at each place: 2.5 of 2,000 are 1.5 of 1,200."""
    policy = SpeculationPolicy(two_widths(cost, 1200))
    policy.landed(4, 10, [5, 0, 0])
    widths = [policy.width(3) for _ in range(PROBE_EVERY + 1)]
    assert widths == [*[2] * PROBE_EVERY, 4 if tried else 2]


@pytest.mark.parametrize(("narrow_cost", "tried"), [(1999, True), (2000, False)])
def test_without_windows_the_narrowest_is_tried_where_all_of_it_would_pay(narrow_cost: int, tried: bool) -> None:
    """Whatever was kept of the last ones, and whatever the widest costs."""
    policy = SpeculationPolicy(two_widths(2000, narrow_cost))
    policy.landed(4, 10, [0, 0, 0])
    widths = [policy.width(3) for _ in range(PROBE_EVERY + 1)]
    assert widths == [*[1] * PROBE_EVERY, 2 if tried else 1]


def test_one_width_alone_is_tried_whatever_it_costs() -> None:
    policy = SpeculationPolicy(Speculation(4, costs=((8, 9000),)))
    assert [policy.width(3) for _ in range(PROBE_EVERY + 1)] == [*[1] * PROBE_EVERY, 4]


def test_the_first_steps_are_as_wide_as_costs_allow() -> None:
    hopeful = narrow_policy([0] * 7, rounds=0)
    assert [hopeful.width(rows) for rows in (1, 8, 32, 64)] == [8, 8, 8, 4]
    assert [hopeful.tokens(width) for width in (8, 4, 2)] == [8000, 4000, 2000]


def test_a_place_is_hoped_to_be_kept_no_more_often_than_the_one_before() -> None:
    """What nobody tried, as often; and what was kept often long ago, no more often than what is before it now."""
    policy = narrow_policy([0] * 7, rounds=0)
    policy.landed(4, 100, [80, 50, 40])
    assert [policy.tokens(width) for width in (2, 4, 8)] == [1800, 2700, 2700 + 4 * 400]
    policy.landed(8, 100, [60, 60, 60, 60, 60, 30, 10])
    assert [policy.tokens(width) for width in (2, 4, 8)] == [1700, 2750, 2750 + 500 + 500 + 300 + 100]


def test_a_step_as_wide_or_wider_begins_the_count_anew() -> None:
    policy = narrow_policy([95, 90, 90, 10, 10, 10, 10])
    assert {policy.width(9) for _ in range(PROBE_EVERY - 1)} == {4}
    assert policy.width(1) == 8, "for one row alone it pays"
    assert {policy.width(9) for _ in range(PROBE_EVERY)} == {4}
    assert policy.width(9) == 8
    policy = narrow_policy([50, 10, 10, 10, 10, 10, 10])
    assert {policy.width(9) for _ in range(PROBE_EVERY - 1)} == {2}
    assert policy.width(1) == 8, "wider than the 4 that would be tried"
    assert {policy.width(9) for _ in range(PROBE_EVERY)} == {2}
    assert policy.width(9) == 4
    two = narrow_policy([60, 0, 0, 0, 0, 0, 0])
    assert [two.width(9) for _ in range(PROBE_EVERY)] == [2] * PROBE_EVERY
    two.landed(8, 300, [300, 300, 300, 0, 0, 0, 0])
    assert two.width(9) == 8, "4 is the choice, and nothing as wide as 8 came in so many steps"
    assert two.width(9) == 4


def test_beside_chunks_a_step_has_the_width_that_pays_of_those_that_fit() -> None:
    policy = SpeculationPolicy(
        Speculation(4, costs=((1, 1100), (8, 2800)), mixed_percent=40, narrower=((2, ((4, 1100), (8, 1900))),))
    )
    assert [policy.mixed_width(rows, 10) for rows in (1, 2, 3)] == [4, 2, 1], "4, 4 and 6 of 4 tokens"
    assert [policy.mixed_width(2, tokens) for tokens in (20, 19, 10, 9)] == [2, 2, 2, 1], "not 4: 2 give more for less"
    assert [policy.mixed_width(1, 100, most) for most in (4, 3, 2, 1)] == [4, 2, 2, 1]
    policy.landed(4, 10, [9, 8, 1])
    assert [policy.width(rows) for rows in (1, 2)] == [4, 2]
    assert [policy.mixed_width(rows, 100) for rows in (1, 2, 5)] == [4, 2, 1]
    for rows, tokens in ((1, 100), (2, 100), (5, 100), (3, 10)):
        policy.mixed(rows, tokens)
    assert policy.off == {"gain": 1, "mixed": 1}, "some fit and none pays; none fits"
    assert policy.narrowed == {1: 2}


def test_a_wider_window_is_tried_beside_chunks_where_it_fits() -> None:
    """Steps in which it does not are not counted as steps without it."""
    policy = SpeculationPolicy(two_widths(1800, 1100, mixed_percent=100))
    policy.landed(4, 10, [5, 0, 0])
    for _ in range(2 * PROBE_EVERY):
        assert policy.mixed_width(3, 11) == 2, "of 4 tokens there would be 12"
        policy.mixed(3, 11)
    widths = []
    for step in range(2 * (PROBE_EVERY + 1)):
        if step % 2:
            widths.append(policy.width(3))
        else:
            widths.append(policy.mixed_width(3, 12))
            policy.mixed(3, 12)
    assert widths == 2 * [*[2] * PROBE_EVERY, 4]
    for _ in range(PROBE_EVERY):
        policy.width(3)
    assert policy.mixed_width(3, 11) == 2, "it is due, and does not fit"
    policy.mixed(3, 11)
    assert policy.mixed_width(3, 12) == 4


@pytest.mark.parametrize("seed", range(20))
def test_a_step_with_chunks_is_counted_as_what_it_was_told_to_be(seed: int) -> None:
    draw = random.Random(seed)
    policy = narrow_policy([90, 80, 50, 40, 10, 5, 0])
    policy = SpeculationPolicy(replace(policy.config, mixed_percent=50))
    told: Counter[int] = Counter()
    for _ in range(300):
        rows, tokens, most = draw.randrange(1, 40), draw.randrange(1, 400), draw.choice((None, 60, 150))
        if draw.random() < 0.7:
            width = policy.mixed_width(rows, tokens, most)
            assert policy.mixed_width(rows, tokens, most) == width, "asking changes nothing"
            policy.mixed(rows, tokens, most)
        else:
            width = policy.width(rows)
        told[width] += 1
        if width > 1:
            kept = sorted((draw.randrange(rows + 1) for _ in range(width - 1)), reverse=True)
            policy.landed(width, rows, kept)
    assert policy.narrowed == {width - 1: told[width] for width in (2, 4) if told[width]}
    assert sum(policy.off.values()) == told[1]


def test_it_is_tried_again_and_what_was_gained_long_ago_is_forgotten() -> None:
    policy = SpeculationPolicy(Speculation(4, costs=((8, 2 * UNIT),)))
    policy.landed(4, 1, [0, 0, 0])
    widths = [policy.width(2) for _ in range(2 * (PROBE_EVERY + 1))]
    assert widths == 2 * [*[1] * PROBE_EVERY, 4]
    assert policy.off == {"gain": 2 * PROBE_EVERY}
    policy.landed(4, REMEMBERED_ROUNDS, [0, 0, 0])  # nothing was kept, again and again
    rounds = 0
    while policy.width(2) == 1:
        policy.landed(4, 8, [8, 8, 8])
        rounds += 8
    assert rounds <= REMEMBERED_ROUNDS, "a text that repeats itself is believed sooner than it has gone on for"


def plans_of(
    policy: Speculation, requests: int, steps: int, mixed: MixedSteps | None = None
) -> tuple[Scheduler, list[StepPlan]]:
    """Every row gains one token a step; a chunk's last row its first."""
    config = config_with(depth=2, widths=(policy.width,), max_prefill_tokens=8)
    scheduler = Scheduler(replace(config, speculation=policy, mixed=mixed or MixedSteps()))
    found: list[StepPlan] = []
    flying: list[StepPlan | None] = []
    for step in range(steps):
        if step < requests:
            scheduler.submit(Admit(Request(step, prompt_of(6, step), SamplingParams(max_tokens=30))))
        flying.append(scheduler.plan())
        found += [plan for plan in flying[-1:] if plan is not None]
        if len(flying) > 2:
            plan = flying.pop(0)
            number = scheduler.step - len(flying) - 1
            if plan is None:
                scheduler.land(number, None)
                continue
            rows = len(plan.slots)
            tokens = [7] * (rows * plan.width)
            counts = [int(plan.draws(row)) for row in range(rows)]
            scheduler.land(number, StepResult(number, tokens, counts, [FinishReason.NONE] * rows))
    return scheduler, found


def test_steps_with_chunks_have_one_token_a_row() -> None:
    scheduler, plans = plans_of(Speculation(4), requests=5, steps=20)
    mixed = [plan for plan in plans if plan.kind is StepKind.MIXED]
    assert mixed
    assert {plan.width for plan in mixed} == {1}
    assert {plan.width for plan in plans if plan.kind is StepKind.DECODE} == {4}
    assert scheduler.planner.speculation is not None
    assert scheduler.planner.speculation.off == {"mixed": len(mixed)}
    drafts = scheduler.counters.spec_num_drafts
    assert 0 < drafts <= sum(len(plan.slots) for plan in plans if plan.kind is StepKind.DECODE)


def test_rows_beside_chunks_have_windows_as_far_as_these_take_their_share() -> None:
    """Of 8 tokens of prompts and one a row: one row of 4 among 9 tokens, two among 10; three are too many for 11."""
    scheduler, plans = plans_of(Speculation(4, mixed_percent=100), requests=5, steps=20)
    mixed = [plan for plan in plans if plan.kind is StepKind.MIXED]
    found = {(plan.decode_rows, plan.width) for plan in mixed}
    assert {(1, 4), (2, 4)} <= found
    assert {width for rows, width in found if rows > 2} == {1}
    assert scheduler.planner.speculation is not None
    assert scheduler.planner.speculation.off == {"mixed": sum(plan.width == 1 for plan in mixed)}


@pytest.mark.parametrize(("percent", "widths"), [(0, [1, 1, 1]), (39, [1, 1, 1]), (40, [4, 1, 1]), (100, [4, 4, 1])])
def test_the_border_of_the_share_is_the_last_token_of_it(percent: int, widths: list[int]) -> None:
    """Ten tokens, of which one row has 4, two have 8 and three 12."""
    policy = SpeculationPolicy(Speculation(4, mixed_percent=percent))
    assert [policy.mixed_width(rows, 10) for rows in (1, 2, 3)] == widths
    assert not policy.off, "asking counts nothing"
    for rows in (1, 2, 3):
        policy.mixed(rows, 10)
    assert policy.off == ({"mixed": widths.count(1)} if 1 in widths else {})
    trees = SpeculationPolicy(Speculation(4, mixed_percent=percent), tree=8)
    assert [trees.mixed_width(rows, 20) for rows in (1, 2, 3)] == widths, "of a tree all tokens count"


def test_beside_chunks_windows_pay_by_the_same_rule() -> None:
    few = SpeculationPolicy(Speculation(4, most_rows=1, mixed_percent=100))
    assert [few.mixed_width(rows, 100) for rows in (1, 2)] == [4, 1]
    few.mixed(2, 100)
    assert few.off == {"batch": 1}
    policy = SpeculationPolicy(Speculation(4, costs=((8, 2 * UNIT),), mixed_percent=100))
    policy.landed(4, 1, [0, 0, 0])
    widths = []
    for _ in range(2 * (PROBE_EVERY + 1)):
        widths.append(policy.mixed_width(2, 100))
        policy.mixed(2, 100)
    assert widths == 2 * [*[1] * PROBE_EVERY, 4], "tried again as often as without chunks"
    assert policy.off == {"gain": 2 * PROBE_EVERY}


def test_rows_beside_chunks_have_narrower_windows_where_wider_ones_do_not_fit() -> None:
    """Of 8 tokens of prompts and one a row: two rows of 4 among 10, three of 2 among 11, where 4 each were 12."""
    policy = Speculation(4, costs=((8, 10),), mixed_percent=100, narrower=((2, ((8, 10),)),))
    scheduler, plans = plans_of(policy, requests=5, steps=20)
    found = {(plan.decode_rows, plan.width) for plan in plans if plan.kind is StepKind.MIXED}
    assert found >= {(1, 4), (2, 4), (3, 2)}
    assert {width for _, width in found} == {4, 2}
    assert scheduler.planner.speculation is not None
    assert scheduler.planner.speculation.off == {}
    narrow = [plan for plan in plans if plan.kind is StepKind.MIXED and plan.width == 2]
    assert {plan.packed_tokens for plan in narrow if plan.decode_rows == 3} == {3 * 2 + 6}, "and a prompt"
    _, plans = plans_of(policy, 5, 20, MixedSteps(buckets=(6, 7)))
    assert {(plan.decode_rows, plan.width) for plan in plans if plan.kind is StepKind.MIXED} >= {(1, 4), (2, 2), (3, 2)}


def test_a_window_that_would_fill_the_largest_step_leaves_room_for_a_prompt() -> None:
    budget = TokenBudget(MixedSteps(buckets=(4, 8, 12), budgets=((2, 0, 6), (2, 99, 7), (8, 0, 40))), 100)
    assert [budget.step_room(rows, 0) for rows in (1, 2, 3)] == [6, 6, 40]
    assert budget.step_room(2, 50) == 7
    assert budget.most_windows == 11
    assert TokenBudget(MixedSteps(), 100).step_room(30, 0) == 130
    assert TokenBudget(MixedSteps(), 100).most_windows is None
    policy = SpeculationPolicy(Speculation(4, mixed_percent=100))
    assert [policy.mixed_width(rows, 40, budget.most_windows) for rows in (1, 2, 3)] == [4, 4, 1]
    _, plans = plans_of(Speculation(4, mixed_percent=100), 5, 20, MixedSteps(buckets=(6, 7)))
    assert {(plan.decode_rows, plan.width) for plan in plans if plan.kind is StepKind.MIXED} >= {(1, 4), (2, 1)}


def test_ranks_with_other_policies_are_found_out() -> None:
    narrower = two_widths(1000, 1000), two_widths(1000, 1001), two_widths(1000, 1000, mixed_percent=1)
    policies = Speculation(4), Speculation(4, 3), Speculation(3), Speculation(4, mixed_percent=1), *narrower
    assert len({plans_of(policy, 1, 1)[0].digest.value for policy in policies}) == len(policies)


def digest_of_a_window(count: int) -> int:
    """Of a scheduler that lands the same four tokens, of which the row keeps ``count``."""
    scheduler = Scheduler(replace(config_with(depth=0, widths=(4,)), speculation=Speculation(4)))
    scheduler.submit(Admit(Request(0, prompt_of(6), SamplingParams(max_tokens=30))))
    for tokens, kept in ([5], 1), ([7, 8, 9, 10], count):
        plan = scheduler.plan()
        assert plan is not None
        assert plan.width == len(tokens)
        scheduler.land(plan.step, StepResult(plan.step, tokens, [kept], [FinishReason.NONE]))
    assert len(scheduler.ledger.sequences[0].tokens) == 6 + 1 + count
    return scheduler.digest.value


def test_ranks_that_keep_more_or_less_of_the_same_window_are_found_out() -> None:
    assert len({digest_of_a_window(count) for count in (1, 2, 3, 4)}) == 4
    assert digest_of_a_window(2) == digest_of_a_window(2)
