"""Figures of runs made by hand: every sum can be checked in the head."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from launch.bench.load.figures import (
    detail_lists,
    engine_figures,
    is_good,
    lateness,
    load_figures,
    peaks,
    request_rows,
    run_header,
    timeline,
)
from launch.bench.load.journal import Journal, Sample, Served
from launch.bench.load.steady import Window, steady_window, steps_of


def served(began: float, moments: Sequence[float], prompt: int = 10, counts: Sequence[int] = ()) -> Served:
    one = Served(prompt, began, began, began + 0.001, list(moments), list(counts or [1] * len(moments)))
    one.ended, one.reason = (moments[-1] if moments else began + 1.0), "length"
    return one


def by_hand() -> Journal:
    """Four requests from second 50 to 54; the last one failed, without a token."""
    requests = [
        served(50.0, [50.1, 50.2, 50.3]),
        served(50.0, [50.5, 51.5], prompt=20),
        served(51.0, [51.2, 52.2, 54.0], counts=[1, 2, 2]),
        served(52.0, []),
    ]
    requests[3].error, requests[3].reason = "ended by rejected after 0 of 3 tokens: the queue is full", "rejected"
    samples = [
        Sample(50.0, 7, counts(0, 0, 0)),
        Sample(51.0, 17, counts(2, 8, 8)),
        Sample(52.5, 27, counts(3, 17, 18)),
        Sample(54.0, 47, counts(4, 36, 38)),
    ]
    before = {"chain_breaks{start}": 1, "chain_breaks{paused}": 2, "steps": 5}
    return Journal(50.0, 54.0, requests, samples, before, {**before, "chain_breaks{start}": 3})


def counts(prefill: int, decode: int, chained: int) -> dict[str, int]:
    steps = {"prefill_steps": prefill, "decode_steps": decode, "chained_steps": chained}
    return {**steps, "ghost_rows": prefill, "prefix_hit_tokens": 3 * prefill, "prefix_query_tokens": 8 * prefill}


def test_a_whole_run_has_vllm_s_figures() -> None:
    figures = load_figures(by_hand(), {})
    assert figures["duration"] == pytest.approx(4.0)
    assert (figures["completed"], figures["failed"]) == (3, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (40, 3 + 2 + 5)
    assert figures["request_throughput"] == pytest.approx(0.75)
    assert figures["output_throughput"] == pytest.approx(2.5)
    assert figures["total_token_throughput"] == pytest.approx(12.5)
    assert figures["request_goodput"] is None, "as vLLM writes it where no goal was set"
    assert figures["mean_ttft_ms"] == pytest.approx((100 + 500 + 200) / 3)
    assert figures["median_ttft_ms"] == pytest.approx(200)
    assert figures["median_tpot_ms"] == pytest.approx(700), "2.8 s for the four tokens after the first"
    assert figures["mean_itl_ms"] == pytest.approx((100 + 100 + 1000 + 1000 + 1800) / 5)
    assert figures["p99_e2el_ms"] == pytest.approx(2970), "between 1500 and 3000"
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{word}_{name}_ms" for word in ("mean", "median", "std", "p50", "p90", "p99")} <= figures.keys()


def test_good_requests_meet_every_goal() -> None:
    goals = {"ttft": 200.0, "tpot": 100.0}
    assert load_figures(by_hand(), goals)["request_goodput"] == pytest.approx(1 / 4)
    assert load_figures(by_hand(), {"ttft": 200.001})["request_goodput"] == pytest.approx(2 / 4)
    assert load_figures(by_hand(), {"e2el": 1500.001, "tpot": 1000.001})["request_goodput"] == pytest.approx(2 / 4)
    assert load_figures(by_hand(), {"e2el": 100.0})["request_goodput"] == 0
    exact = served(0.0, [0.25])
    assert is_good(exact, {"ttft": 250.0, "tpot": 0.0, "e2el": 250.0}), "a goal that is reached exactly; one token: 0"
    assert not is_good(exact, {"ttft": 249.999})


def test_a_window_counts_what_falls_into_it() -> None:
    figures = load_figures(by_hand(), {"ttft": 1e3}, Window(50.25, 52.25))
    assert figures["duration"] == pytest.approx(2.0)
    assert figures["completed"] == 2, "of them one had begun before"
    assert figures["total_output_tokens"] == 1 + 2 + 3
    assert figures["output_throughput"] == pytest.approx(3.0)
    assert figures["request_goodput"] == pytest.approx(1.0)
    assert figures["median_ttft_ms"] == pytest.approx(200), "of the only one that began in it"
    assert figures["mean_itl_ms"] == pytest.approx((100 + 1000 + 1000) / 3), "of gaps that end in it"
    nothing = load_figures(by_hand(), {}, Window(52.3, 52.4))
    assert (nothing["median_ttft_ms"], nothing["p99_itl_ms"], nothing["completed"]) == (None, None, 0)


def test_peaks_are_of_whole_seconds() -> None:
    assert peaks(by_hand()) == {"max_output_tokens_per_s": 4.0, "max_concurrent_requests": 2}
    assert peaks(Journal(0.0, 1.0, [])) == {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}


def test_what_the_engine_counted_is_a_difference() -> None:
    journal = by_hand()
    figures = engine_figures(journal, idle=0.25)
    assert (figures["steps"], figures["prefill_steps"], figures["decode_steps"]) == (40, 4, 36)
    assert figures["chained"] == pytest.approx(38 / 40)
    assert figures["chain_breaks"] == {"start": 2}
    assert figures["prefix_hit_share"] == pytest.approx(3 / 8)
    assert (figures["ghost_rows"], figures["device_idle"]) == (4, 0.25)
    inside = engine_figures(journal, None, Window(50.5, 52.0))
    assert (inside["steps"], inside["chained"]) == (10, pytest.approx(1.0)), "from the samples after either end"
    assert steps_of(journal) == range(7, 47)
    assert steps_of(journal, Window(50.5, 52.0)) == range(17, 27)
    journal = Journal(50.0, 54.0, journal.requests)
    assert (engine_figures(journal), steps_of(journal)) == ({}, range(0)), "nobody counted"


# ---- the steady window ----


def closed(count: int) -> Journal:
    """Two at a time, one second each."""
    requests = [served(float(number // 2), [number // 2 + 0.5, number // 2 + 1.0]) for number in range(count)]
    return Journal(0.0, count / 2, requests)


def test_a_closed_loop_is_steady_between_ramp_and_drain() -> None:
    assert steady_window(closed(12), rows=2, rate=float("inf")) == Window(1.0, 5.0)
    assert steady_window(closed(12), rows=2, rate=float("inf"), ramp=0, drain=0) == Window(0.0, 6.0)
    assert steady_window(closed(12), rows=2, rate=float("inf"), ramp=4) == Window(2.0, 5.0)


def test_paced_load_is_steady_until_its_last_request_begins() -> None:
    assert steady_window(closed(20), rows=2, rate=2.0) == Window(1.0, 9.0)
    assert steady_window(closed(20), rows=2, rate=2.0, ramp=4, drain=6) == Window(2.0, 7.0)
    held = closed(20)
    for one in held.requests:
        one.due = 0.0
    assert steady_window(held, rows=2, rate=2.0) == Window(1.0, 9.0), "places were what they waited for"


def test_a_run_that_is_all_ramp_and_drain_has_no_window() -> None:
    refused = steady_window(closed(4), rows=2, rate=float("inf"))
    assert refused == "2 requests of ramp and 2 of drain leave none of 4: type --num-prompts 16"
    assert isinstance(steady_window(closed(4), rows=2, rate=9.0, ramp=4), str)
    together = Journal(0.0, 9.0, [served(0.0, [9.0]) for _ in range(9)])
    refused = steady_window(together, rows=2, rate=9.0)
    assert isinstance(refused, str)
    assert "the last request began before 1 had ended" in refused


# ---- over time ----


def test_a_timeline_adds_up() -> None:
    rows = timeline(by_hand(), interval=0.5)
    assert [row["t_s"] for row in rows] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    assert [row["output_tokens"] for row in rows] == [3, 1, 1, 1, 2, 0, 0, 2], "the last moment is in the last row"
    assert rows[0]["output_throughput"] == pytest.approx(6.0)
    assert [row["arrived"] for row in rows] == [2, 0, 1, 0, 1, 0, 0, 0]
    assert [row["completed"] for row in rows] == [1, 0, 0, 1, 0, 0, 0, 1]
    assert [row["failed"] for row in rows] == [0, 0, 0, 0, 0, 0, 1, 0]
    assert [row["running"] for row in rows] == [0, 1, 2, 1, 1, 1, 1, 0]
    assert [row["waiting"] for row in rows] == [1, 0, 0, 0, 1, 1, 0, 0]
    assert sum(row["decode_steps"] for row in rows) == 36
    assert [row["prefill_steps"] for row in rows] == [0, 2, 0, 0, 1, 0, 0, 1]
    bare = timeline(Journal(50.0, 54.0, by_hand().requests))
    assert len(bare) == 40
    assert "decode_steps" not in bare[0]


# ---- files ----


def test_details_are_vllm_s_lists_and_our_rows() -> None:
    lists, rows = detail_lists(by_hand()), request_rows(by_hand())
    assert lists["input_lens"] == [10, 20, 10, 10]
    assert lists["output_lens"] == [3, 2, 5, 0]
    assert lists["ttfts"] == pytest.approx([0.1, 0.5, 0.2, 0.0])
    assert [len(gaps) for gaps in lists["itls"]] == [2, 1, 2, 0]
    assert lists["errors"][3].endswith("the queue is full")
    assert [row["output_tokens"] for row in rows] == [3, 2, 5, 0]
    assert rows[2] | {"due_ms": 1000.0, "began_ms": 1000.0, "sent_ms": 1001.0, "e2el_ms": 3000.0} == rows[2]
    assert (rows[3]["ttft_ms"], rows[3]["finish_reason"]) == (None, "rejected")
    assert lateness(by_hand().requests) == {name: pytest.approx(1.0) for name in ("median", "p99", "max")}


def test_a_header_is_plain_json_whatever_the_rate() -> None:
    header = run_header("m", 5, float("inf"), float("inf"), None)
    assert header | {"request_rate": "inf", "burstiness": "inf", "max_concurrency": None, "num_prompts": 5} == header
    assert json.loads(json.dumps(run_header("m", 5, 2.5, 1.0, 8), allow_nan=False))["request_rate"] == 2.5
