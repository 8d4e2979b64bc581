"""The simulator of schedules: its clock and its loads, and what it says of mixed steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.schedule.config import MixedSteps
from runtime.schedule.plan import Chunk, StepKind, StepPlan
from tests.runtime.schedule.configs import config_with
from tests.runtime.schedule.simulate import (
    HEADER,
    QWEN3_8B_H200,
    ROOMY,
    Arrival,
    Figures,
    StepCosts,
    asked,
    at,
    config_of,
    mixed_lengths,
    simulate,
    with_table,
    with_windows,
)

COSTS = StepCosts(step_ms=((1, 4.0), (101, 5.0), (201, 7.0)), kv_ms=0.001, attention_ms=0.0001)


def test_times_are_interpolated_and_go_on_beyond_the_last() -> None:
    assert [COSTS.forward(tokens) for tokens in (1, 51, 101, 151, 201, 301)] == pytest.approx([4, 4.5, 5, 6, 7, 9])


def test_a_step_costs_its_bucket_its_kv_and_the_attention_of_its_chunks() -> None:
    chunk = Chunk(3, start=40, token_ids=(1,) * 20, last=True)
    mixed = StepPlan(0, StepKind.MIXED, (1, 2, 3), (0, 0, 0), 1, chunks=(chunk,))
    assert COSTS.step(mixed, 500, (16, 51)) == pytest.approx(4.5 + 0.5 + 0.0001 * 20 * (40 + 10))
    decode = StepPlan(0, StepKind.DECODE, (1,), (0,), 1)
    assert COSTS.step(decode, 500, (16, 51)) == pytest.approx(4.0 + 0.5)


def test_one_request_takes_its_steps_one_after_the_other() -> None:
    flat = StepCosts(((1, 2.0), (1000, 2.0)), 0.0, 0.0)
    figures = simulate(ROOMY, flat, [Arrival(prompt=10, output=5, at_ms=30.0)], None, host_ms=0.0)
    assert figures.tokens == 5
    assert figures.ttft_ms == {0: 2.0}
    assert figures.itl_ms == [2.0] * 4
    assert figures.ms == 30 + 5 * 2


def test_windows_give_several_tokens_a_step_and_cost_their_guesses() -> None:
    """Every guess is kept: after the prompt's step two of four tokens each, and one of what is left."""
    costs = StepCosts(((1, 2.0), (1000, 2.0)), 0.0, 0.0, draft_ms=0.5)
    config = with_windows(ROOMY, costs, 4, 0)
    figures = simulate(config, costs, [Arrival(prompt=10, output=10)], None, host_ms=0.0, rates=(1.0, 1.0, 1.0))
    assert figures.tokens == 10
    assert figures.itl_ms == [2.5] * 3


def test_windows_beside_chunks_shorten_answers_under_load() -> None:
    """The load of docs/lab/measurements/speculation.md, shorter: the same answers in less time."""
    load = mixed_lengths(60, seed=6)
    times = []
    for percent in (0, 25):
        config = with_windows(with_table(QWEN3_8B_H200), QWEN3_8B_H200, 4, percent)
        figures = simulate(config, QWEN3_8B_H200, load, 16, rates=(0.75, 0.5, 0.33))
        assert figures.tokens == sum(one.output for one in load)
        times.append(figures.ms)
    assert times[1] < 0.99 * times[0]


def test_fewer_guesses_for_many_rows_shorten_a_load() -> None:
    """15, 7 or 3 by what pays, against any number alone: 40 requests at once, whose last ones run by themselves."""
    load = mixed_lengths(40, seed=6)
    rates = [0.8**place for place in range(1, 16)]

    def took(guesses: int, *fewer: int) -> float:
        config = with_windows(with_table(QWEN3_8B_H200), QWEN3_8B_H200, guesses + 1, 25, fewer)
        figures = simulate(config, QWEN3_8B_H200, load, 40, rates=rates[:guesses])
        assert figures.tokens == sum(one.output for one in load)
        return figures.ms

    assert took(15, 7, 3) < 0.97 * min(took(15), took(8), took(7), took(3))


def test_a_line_tells_the_median_and_the_99th_of_both_times() -> None:
    """Of a hundred times, 1 to 100 ms, each percentile is another one; those of a first token are ten times as long."""
    figures = simulate(ROOMY, COSTS, [Arrival(prompt=10, output=2)], None)
    figures.itl_ms = [float(ms) for ms in range(100, 0, -1)]
    figures.ttft_ms = {i: 10.0 * ms for i, ms in enumerate(figures.itl_ms)}
    columns = HEADER.replace("ITL p50", "ITL_p50").replace("TTFT p50", "TTFT_p50").split()[1:]
    told = list(zip(columns, figures.line().split(), strict=True))
    assert told[1:6] == [
        ("ITL_p50", "51.00"),
        ("p99", "100.00"),
        ("max", "100.0"),
        ("TTFT_p50", "510.0"),
        ("p99", "1000.0"),
    ]


@pytest.mark.parametrize(
    ("count", "percent", "expected"), [(0, 99, 0.0), (1, 99, 0.0), (100, 0, 0.0), (100, 99, 99.0), (1000, 99, 990.0)]
)
def test_percentiles(count: int, percent: int, expected: float) -> None:
    """Of 0, 1, 2, ...: so many hundredths of them are less."""
    assert at([float(i) for i in range(count)], percent) == expected


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_an_arrival_waits_for_the_steps_in_flight(depth: int) -> None:
    """One that comes while step N runs is planned behind N + D."""
    flat = StepCosts(((1, 2.0), (1000, 2.0)), 0.0, 0.0)
    arrivals = [Arrival(10, 50), Arrival(10, 5, at_ms=21.0)]
    figures = simulate(config_with(ROOMY, depth=depth), flat, arrivals, None, host_ms=0.0)
    assert figures.ttft_ms[1] == 1.0 + depth * 2 + 2


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    flat = StepCosts(((1, 2.0), (1000, 2.0)), 0.0, 0.0)
    figures = simulate(ROOMY, flat, [Arrival(10, 10)] * 7, 3, host_ms=0.0)
    assert figures.tokens == 70
    assert figures.scheduler.counters.finished["length"] == 7
    assert [figures.ttft_ms[i] for i in range(3)] == [2.0] * 3


def test_the_mixed_load_has_the_lengths_of_its_seed() -> None:
    lengths = [(each.prompt, each.output) for each in mixed_lengths(6, seed=5)]
    assert lengths == [(497, 46), (79, 119), (359, 455), (54, 208), (175, 75), (103, 109)]


def compared(load: list[Arrival], concurrency: int | None) -> tuple[Figures, Figures]:
    mixed = with_table(QWEN3_8B_H200)
    return simulate(ROOMY, QWEN3_8B_H200, load, concurrency), simulate(mixed, QWEN3_8B_H200, load, concurrency)


def test_mixed_steps_shorten_the_wait_for_a_token_and_cost_no_throughput() -> None:
    separate, mixed = compared(mixed_lengths(192, seed=6), 64)
    assert mixed.tokens == separate.tokens
    assert mixed.tokens_per_s > 1.04 * separate.tokens_per_s
    assert at(sorted(mixed.itl_ms), 99) < at(sorted(separate.itl_ms), 99) / 2
    assert max(mixed.itl_ms) < max(separate.itl_ms) / 5


def test_long_prompts_hardly_hold_up_a_chat() -> None:
    """A prompt of 32,000 tokens takes a second alone: nobody who decodes waits that long, or a tenth of it."""
    chat = [replace(each, at_ms=60.0 * i) for i, each in enumerate(mixed_lengths(60, seed=7))]
    separate, mixed = compared([*chat, Arrival(32_000, 50, at_ms=1000.0)], None)
    assert max(separate.itl_ms) > 1000
    assert max(mixed.itl_ms) < 40
    short = [mixed.ttft_ms[i] for i in range(60) if chat[i].prompt <= 200]
    assert max(short) < 100, "nor for a first token"
    assert mixed.ttft_ms[60] < 3 * separate.ttft_ms[60]


def test_the_same_load_gives_the_same_figures() -> None:
    load = mixed_lengths(40, seed=1)
    first, second = (simulate(with_table(QWEN3_8B_H200), QWEN3_8B_H200, load, 8) for _ in range(2))
    assert (first.ms, first.itl_ms, first.ttft_ms) == (second.ms, second.itl_ms, second.ttft_ms)
    assert first.scheduler.digest.value == second.scheduler.digest.value


def test_a_latency_target_bounds_every_step_that_prompts_make_longer() -> None:
    config = with_table(QWEN3_8B_H200, target_ms=10.0)
    figures = simulate(config, QWEN3_8B_H200, mixed_lengths(100, seed=6), 16)
    assert max(figures.itl_ms) < 10.5
    assert isinstance(config.mixed, MixedSteps)


def chunk_tokens(*options: str, concurrency: int | None = 16) -> float:
    """Prompt tokens of a mixed step, on average, over a short load."""
    figures = simulate(config_of(asked(options)), QWEN3_8B_H200, mixed_lengths(40, seed=6), concurrency)
    counters = figures.scheduler.counters
    return counters.mixed_prompt_tokens / counters.mixed_steps


def test_the_option_calm_makes_chunks_longer_or_shorter() -> None:
    calm = [chunk_tokens("--calm", factor) for factor in ("1.25", "1.5", "2.0")]
    assert calm[0] < 0.9 * calm[1] < 0.9 * 0.9 * calm[2]
    assert calm[1] == chunk_tokens(), "the default"


def test_the_option_drain_steps_makes_chunks_longer_or_shorter() -> None:
    """All come at once, so that many wait."""
    drained = [chunk_tokens("--drain-steps", steps, concurrency=None) for steps in ("1", "2", "6")]
    assert drained[0] > 1.2 * drained[1] > 1.2 * 1.2 * drained[2]
    assert drained[2] == chunk_tokens(concurrency=None), "the default"


def test_options_go_where_they_belong() -> None:
    options = ("--depth", "1", "--drain-steps", "3", "--ragged")
    config = config_of(asked(options))
    assert config.mixed is not None
    assert (config.limits.depth, config.mixed.drain_steps, config.mixed.wave) == (1, 3, 0)
    assert config_of(asked(["--separate"])).mixed is None
