"""Runs through a real engine: what a trace says of them, and when a batch was not full."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.bench.load.engine_backend import run_batch
from launch.bench.load.figures import batch_figures, request_rows
from launch.bench.load.journal import DecodeStep
from launch.bench.load.steady import why_not_full
from launch.bench.session import StepTimings
from launch.bench.throughput import saturation
from launch.bench.workload import greedy, random_prompts
from launch.errors import BenchError
from runtime.execute.result_reader import StepTiming
from runtime.frontend.client import PromptRequest
from runtime.schedule.plan import StepOutput
from tests.runtime.engine.rig import VOCABULARY, rig


@pytest.mark.parametrize("depth", [0, 2])
def test_a_batch_that_fits_is_a_full_window(depth: int) -> None:
    prompts = random_prompts(4, 10, 9, VOCABULARY, seed=1)
    with rig(depth=depth, rows=4) as engine:
        journal = run_batch(engine, prompts)
    assert why_not_full(journal.decode_steps, 4, 8) is None
    assert [decode.rows for decode in journal.decode_steps] == [4] * 8
    assert [one.tokens for one in journal.requests] == [9] * 4
    moments = [moment for one in journal.requests for moment in one.moments]
    assert journal.started < min(moments)
    assert journal.ended == max(moments) == max(one.ended for one in journal.requests)


def test_decode_steps_between_chunks_of_prefill_are_not_full() -> None:
    prompts = random_prompts(4, 100, 9, VOCABULARY, seed=1)
    with rig(rows=4, max_prefill_tokens=16) as engine:  # 25 prefill steps, a decode step after every four
        journal = run_batch(engine, prompts)
    refused = why_not_full(journal.decode_steps, 4, 8)
    assert refused is not None
    assert "ran 1" in refused


def test_a_batch_that_is_larger_than_the_rows_has_no_rate() -> None:
    prompts = random_prompts(6, 10, 9, VOCABULARY, seed=1)
    with rig(rows=4) as engine:
        journal = run_batch(engine, prompts)
    refused = why_not_full(journal.decode_steps, 6, 8)
    assert refused is not None
    assert "the batch was not full" in refused
    assert "rows, step " in refused


def test_a_batch_that_does_not_fit_into_memory_has_no_rate() -> None:
    prompts = random_prompts(4, 10, 30, VOCABULARY, seed=1)
    with rig(rows=4, blocks=16, max_model_len=64) as engine:
        journal = run_batch(engine, prompts)
        assert engine.counters["evictions"] + engine.counters["stalls"] > 0
    assert why_not_full(journal.decode_steps, 4, 29) is not None


def test_a_window_of_the_wrong_length_is_named() -> None:
    prompts = random_prompts(2, 10, 9, VOCABULARY, seed=1)
    with rig(rows=4) as engine:
        journal = run_batch(engine, prompts)
    assert why_not_full(journal.decode_steps, 2, 7) == "the batch took 8 decode steps, not 7"


def test_a_request_that_ends_early_is_no_measurement() -> None:
    early = pytest.raises(BenchError, match="request 0 ended by length after 15 of 40 tokens")
    with rig(rows=4, max_model_len=32) as engine, early:
        run_batch(engine, [PromptRequest(range(3, 20), greedy(40))])


def test_a_rejected_request_is_no_measurement() -> None:
    prompts = random_prompts(3, 10, 9, VOCABULARY, seed=1)
    with rig(rows=4) as engine:
        engine.scheduler.ledger.config = replace(
            engine.scheduler.ledger.config, max_waiting=1
        )  # fewer than the client knows of
        with pytest.raises(BenchError, match="request 1 ended by rejected after 0 of 9 tokens: 1 requests are waiting"):
            run_batch(engine, prompts)


@pytest.mark.parametrize("most", [1, 3])
def test_never_more_than_max_concurrency_are_under_way(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(7, 6, 5, VOCABULARY, seed=2)
    live: list[int] = []
    with rig(rows=8) as engine:
        step = engine.step

        def watched() -> StepOutput:
            output = step()
            live.append(engine.scheduler.unfinished)
            return output

        monkeypatch.setattr(engine, "step", watched)
        journal = run_batch(engine, prompts, most=most)
    assert max(live) == most
    assert len(journal.good) == 7


def test_figures_are_those_of_the_landings() -> None:
    prompts = random_prompts(3, 6, 5, VOCABULARY, seed=2)
    with rig(rows=4) as engine:
        journal = run_batch(engine, prompts)
    figures, rows = batch_figures(journal, "tiny", 3), request_rows(journal)
    expected = {"completed": 3, "failed": 0, "total_input": 18, "total_output": 15, "max_concurrency": 3}
    assert expected | {"model_id": "tiny"} == {key: figures[key] for key in (*expected, "model_id")}
    assert figures["output_throughput"] == pytest.approx(15 / journal.seconds)
    assert figures["total_token_throughput"] == pytest.approx(33 / journal.seconds)
    for name in ("ttft", "tpot", "e2el"):
        values = sorted(row[f"{name}_ms"] for row in rows)
        assert figures[f"median_{name}_ms"] == pytest.approx(values[1])
        assert figures[f"mean_{name}_ms"] == pytest.approx(sum(values) / 3)
        assert dict(figures[f"percentiles_{name}_ms"])[99] == figures[f"p99_{name}_ms"] <= values[2] + 1e-6
    first = rows[0]
    assert first["e2el_ms"] == pytest.approx(first["ttft_ms"] + 4 * first["tpot_ms"])
    assert figures["mean_itl_ms"] == pytest.approx(figures["mean_tpot_ms"])


# ---- saturation ----


def test_the_saturated_part_counts_the_tokens_in_it() -> None:
    prompts = random_prompts(12, 6, 9, VOCABULARY, seed=2)
    with rig(rows=2) as engine:
        journal = run_batch(engine, prompts)
    found = saturation(journal, 2)
    assert found.refused is None
    begin = sorted(one.moments[0] for one in journal.requests)[1]
    end = sorted(one.ended for one in journal.requests)[10]
    tokens = sum(begin < at <= end for one in journal.requests for at in one.moments)
    assert 80 < tokens < 12 * 9
    assert found.tok_s == pytest.approx(tokens / (end - begin))


def test_too_few_requests_saturate_nothing() -> None:
    prompts = random_prompts(4, 6, 9, VOCABULARY, seed=2)
    with rig(rows=4) as engine:
        journal = run_batch(engine, prompts)
    assert saturation(journal, 4).refused == "4 requests never wait for one of 4 rows: type --num-prompts 16"


@pytest.mark.slow
def test_rows_that_memory_keeps_empty_saturate_nothing() -> None:
    prompts = random_prompts(12, 10, 30, VOCABULARY, seed=2)
    with rig(rows=4, blocks=10, max_model_len=64) as engine:
        journal = run_batch(engine, prompts)
    refused = saturation(journal, 4).refused
    assert refused is not None
    assert "rows in the median decode step" in refused or "before 4 of them ran together" in refused


# ---- the device's times ----


def test_a_device_window_is_made_of_ends_and_gaps() -> None:
    timings = StepTimings()
    for step, (began, ended) in enumerate([(0.0, 1.0), (1.5, 3.0), (3.25, 4.0), (9.0, 9.5)]):
        timings(StepTiming(step, began, ended, ended / 1e3, 1))
    window = timings.of([DecodeStep(step, 0.0, 1) for step in (0, 1, 2)])
    assert window is not None
    assert window.step_ms == pytest.approx(1.5)
    assert window.busy_ms == pytest.approx(1.0)
    assert window.idle_ms == pytest.approx(0.375)
    assert window.idle_fraction == pytest.approx(0.75 / 3.0)
    assert timings.of([DecodeStep(3, 0.0, 1)]) is None
    timings.clear()
    assert timings.whole is None
