"""The token budget of mixed steps: tables looked up as anybody would read them, and made of measured times."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from runtime.schedule.budget import (
    CALM_SLOWDOWN,
    LEAST_CHUNK,
    LONGEST,
    SLOWDOWN,
    TokenBudget,
    budget_table,
    calm_table,
)
from runtime.schedule.config import MixedSteps
from tests.runtime.schedule.configs import ROOMY
from tests.runtime.schedule.mixed_rules import covering

MANY = 1 << 20
CALM = 0  # nothing waits

# ---- at work ----


def test_without_tables_or_buckets_only_the_limit_of_a_step_counts() -> None:
    assert TokenBudget(MixedSteps(), 64).chunk_tokens(5, 100, 1, MANY) == 64


def test_the_first_entry_that_covers_a_step_counts_and_the_last_beyond() -> None:
    table = ((2, 100, 40), (2, 200, 30), (8, 100, 60), (8, 400, 50))
    budget = TokenBudget(MixedSteps(budgets=table), 1000)
    steps = {(1, 0): 40, (2, 100): 40, (2, 101): 30, (2, 999): 30, (3, 100): 60, (8, 101): 50, (9, 1): 60, (9, 999): 50}
    for (rows, kv_tokens), total in steps.items():
        assert budget.chunk_tokens(rows, kv_tokens, 1, MANY) == total - rows


def test_chunks_fill_a_bucket() -> None:
    budget = TokenBudget(MixedSteps((8, 16, 32), ((64, MANY, 31),)), 1000)
    assert [budget.chunk_tokens(rows, 0, 1, MANY) for rows in (1, 8, 15)] == [15, 8, 1]
    assert budget.chunk_tokens(16, 0, 1, MANY) == 16, "beyond the budget, but prompts advance in every step"
    assert budget.chunk_tokens(2, 0, 4, MANY) == 8, "a decode row has W tokens"


def test_no_step_has_more_prompt_tokens_than_a_prefill_step() -> None:
    assert TokenBudget(MixedSteps((8, 16, 32)), 10).chunk_tokens(3, 0, 1, MANY) == 5, "filled"
    assert TokenBudget(MixedSteps((8, 16, 32)), 10).chunk_tokens(8, 0, 1, MANY) == 8
    assert TokenBudget(MixedSteps((8, 16, 32)), 14).chunk_tokens(3, 0, 1, MANY) == 13


def test_few_that_wait_get_small_steps_and_many_as_large_ones_as_they_need() -> None:
    mixed = MixedSteps((8, 16, 32, 64, 128), ((64, MANY, 100),), ((4, 10), (64, 3)), drain_steps=4)
    budget = TokenBudget(mixed, 1000)
    waiting = {CALM: 16, 60: 16, 61: 32, 200: 64, 5000: 64}
    for tokens, total in waiting.items():
        assert budget.chunk_tokens(1, 0, 1, tokens) == total - 1, tokens
    assert budget.chunk_tokens(5, 0, 1, CALM) == 8 - 5
    assert budget.chunk_tokens(80, 0, 1, CALM) == 128 - 80, "as little as it can be"


def test_where_every_second_step_has_chunks_those_are_twice_as_large() -> None:
    mixed = MixedSteps((8, 16, 32, 64, 128), ((64, MANY, 100),), ((4, 10),), drain_steps=4, stride=2)
    budget = TokenBudget(mixed, 1000)
    assert [budget.chunk_tokens(1, 0, 1, CALM, stride) for stride in (1, 2)] == [15, 31]
    assert [budget.chunk_tokens(1, 0, 1, 120, stride) for stride in (1, 2)] == [31, 63]
    assert budget.chunk_tokens(1, 0, 1, 5000, 2) == 63, "never beyond the budget"


def test_any_tables_give_what_a_search_through_all_totals_gives() -> None:
    draw = random.Random(2)
    for _ in range(3000):
        rows, width, kv_tokens, waiting = (
            draw.randrange(1, 9),
            draw.choice((1, 1, 3)),
            draw.randrange(60),
            draw.randrange(99),
        )
        buckets = tuple(sorted({60, *draw.sample(range(1, 60), 5)})) if draw.random() < 0.6 else ()
        cells = sorted(draw.sample([(r, kv) for r in range(1, 9) for kv in (10, 30, 50)], draw.choice((0, 1, 9))))
        table = tuple((r, kv, draw.randrange(70)) for r, kv in cells)
        calm = tuple((r, draw.randrange(30)) for r in sorted(draw.sample(range(1, 9), draw.choice((0, 1, 3)))))
        limit = draw.choice((1, 10, 100))
        mixed = MixedSteps(buckets, table, calm, drain_steps=draw.choice((1, 4)))
        got = TokenBudget(mixed, limit).chunk_tokens(rows, kv_tokens, width, waiting)

        decoding = rows * width
        there_are = [total for total in (buckets or range(1, 300)) if total > decoding]
        allowed = decoding + limit
        if table:
            row = covering((r for r, _, _ in table), rows)
            totals = {kv: total for r, kv, total in table if r == row}
            allowed = min(allowed, totals[covering(totals, kv_tokens)])
        if calm:
            wanted = decoding + max(dict(calm)[covering(dict(calm), rows)], -(-waiting // mixed.drain_steps))
            allowed = min([allowed, *[total for total in (buckets or range(300)) if total >= wanted][:1]])
        fitting = [total for total in there_are if total <= allowed]
        assert got == min((fitting or there_are[:1])[-1] - decoding, limit)
        assert got >= 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"buckets": (8, 8)}, "ascending"),
        ({"buckets": (0, 8)}, "ascending"),
        ({"budgets": ((2, 5, 9), (2, 5, 10))}, "ascend"),
        ({"budgets": ((2, 5, 9), (1, 9, 10))}, "ascend"),
        ({"budgets": ((2, 5, -1),)}, "ascend"),
        ({"calm": ((2, 5), (2, 9))}, "ascend"),
        ({"drain_steps": 0}, "at least 1"),
        ({"long_prompt": 0}, "at least 1"),
        ({"stride": 0}, "at least 1"),
        ({"costly_prefix": -1}, "at least 1, the others 0"),
        ({"tile": -1}, "at least 1, the others 0"),
        ({"wave": -4}, "at least 1, the others 0"),
        ({"wave": 4}, "both of the last two or neither"),
        ({"tile": 128}, "both of the last two or neither"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MixedSteps(**fields)  # type: ignore[arg-type]


# ---- made of measured times ----

# A dense model: the weights' read hides the first 100 tokens; then each costs the same.
DENSE = [(tokens, 4.0 + 0.02 * max(0, tokens - 100)) for tokens in (8, 16, 32, 64, 100, 128, 256, 512, 1024, 2048)]
KV_MS = 0.0001
ROWS, KV = (1, 16, 64, 256), (1000, 20_000, 100_000)


def dense_ms(tokens: int) -> float:
    return 4.0 + 0.02 * max(0, tokens - 100)


def test_a_step_takes_no_longer_than_the_target() -> None:
    for rows, kv_tokens, total in budget_table(DENSE, KV_MS, ROWS, KV, target_ms=12.0):
        took = dense_ms(total) + kv_tokens * KV_MS
        if total > rows + LEAST_CHUNK:
            assert took == pytest.approx(12.0, abs=0.05)
        else:
            assert took > 12.0, "prompts advance, though the target cannot be met"


def test_a_larger_target_never_gives_fewer_tokens() -> None:
    tables = [budget_table(DENSE, KV_MS, ROWS, KV, target_ms=ms) for ms in (1.0, 5.0, 12.0, 30.0, 1e9)]
    for small, large in pairwise(tables):
        assert all(few[2] <= many[2] for few, many in zip(small, large, strict=True))
    assert {total for _, _, total in tables[-1]} == {2048}, "no more than were measured"


def test_without_a_target_a_step_is_some_times_as_long_as_one_without_prompts() -> None:
    for rows, kv_tokens, total in budget_table(DENSE, KV_MS, ROWS, KV):
        decode_ms = dense_ms(rows) + kv_tokens * KV_MS
        expected = max(LONGEST * 4.0, SLOWDOWN * decode_ms)
        assert dense_ms(total) + kv_tokens * KV_MS == pytest.approx(expected, abs=0.05)


def test_of_experts_some_hundred_tokens_show_what_every_step_costs() -> None:
    """32 tokens take 7 ms, since they read few experts; 256 and more take 16 and 0.026 each."""
    experts = [(32, 7.0), (128, 16.0), (256, 16 + 0.026 * 256), (1024, 16 + 0.026 * 1024), (8192, 16 + 0.026 * 8192)]
    each = experts[-1][1] / 8192
    fixed = 16 + 0.026 * 256 - each * 256
    assert 15 < fixed < 16
    (entry,) = budget_table(experts, 0.0, (1,), (1000,))
    assert 16 + 0.026 * entry[2] == pytest.approx(LONGEST * fixed, abs=0.05)
    smallest_counts = budget_table(experts, 0.0, (1,), (1000,), target_ms=LONGEST * experts[0][1])
    assert smallest_counts[0][2] < entry[2] / 2


def test_calm_steps_of_a_dense_model_keep_to_their_slowdown() -> None:
    for rows, chunk in calm_table(DENSE, ROWS):
        assert dense_ms(rows + chunk) == pytest.approx(CALM_SLOWDOWN * dense_ms(rows), abs=0.05)
    for rows, chunk in calm_table(DENSE, ROWS, 1.25):
        assert dense_ms(rows + chunk) == pytest.approx(1.25 * dense_ms(rows), abs=0.05)


def test_calm_steps_of_experts_are_large_where_their_tokens_cost_less() -> None:
    """Up to 128 tokens each further one reads more experts; beyond, it costs next to nothing until they multiply."""
    experts = [(8, 3.0), (32, 5.0), (128, 9.0), (512, 9.4), (1024, 11.0), (2048, 20.0)]
    calm = dict(calm_table(experts, (8, 32)))
    assert calm == {8: 1024 - 8 + 1024, 32: 1024 - 32 + 1024}


def test_a_dip_in_the_measured_times_promises_nothing() -> None:
    dip = [(8, 4.0), (64, 6.0), (128, 5.0), (256, 12.0)]
    flat = [(8, 4.0), (64, 6.0), (128, 6.0), (256, 12.0)]
    assert budget_table(dip, KV_MS, ROWS, KV, 7.0) == budget_table(flat, KV_MS, ROWS, KV, 7.0)
    assert calm_table(dip, ROWS) == calm_table(flat, ROWS)


def test_rows_beyond_the_measured_tokens_get_the_least_chunk() -> None:
    (entry,) = budget_table([(8, 4.0), (64, 6.0)], KV_MS, (100,), (1000,))
    assert entry == (100, 1000, 100 + LEAST_CHUNK)
    assert calm_table([(8, 4.0), (64, 6.0)], (100,)) == ((100, LEAST_CHUNK),)


def test_one_time_is_all_that_is_known_of_any_step() -> None:
    """One bucket is captured: --max-num-batched-tokens 16, or 32 beside as many rows."""
    assert budget_table([(64, 4.0)], 0.0, (1, 32), (1000,), 5.0) == ((1, 1000, 64), (32, 1000, 64))
    assert budget_table([(64, 4.0)], 0.0, (1,), (1000,), 3.0) == ((1, 1000, 1 + LEAST_CHUNK),)
    assert calm_table([(64, 4.0)], (1, 32)) == ((1, 63), (32, 32))


def test_the_largest_time_bounds_a_step() -> None:
    for times in (DENSE, [*DENSE, (12_000, 200.0)]):
        ((_, _, total),) = budget_table(times, 0.0, (1,), (1000,), 1e9)
        assert total == times[-1][0]


def test_tables_made_are_tables_that_work() -> None:
    mixed = MixedSteps((64, 128, 320), budget_table(DENSE, KV_MS, ROWS, KV), calm_table(DENSE, ROWS))
    assert TokenBudget(mixed, 8192).chunk_tokens(16, 500, 1, MANY) == 320 - 16
    assert ROOMY.mixed is None, "separate steps stay the default of a scheduler"
