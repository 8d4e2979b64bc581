"""Runs through a real engine: what a trace says of them, when a window is not full, and the bare replay."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch.bench.anatomy import TurnClock
from launch.bench.replay import replay_ms, replay_plan, replay_spec, warm_up_steps
from launch.bench.results import request_rows, vllm_figures
from launch.bench.session import Lengths, StepTimings
from launch.bench.throughput import saturation
from launch.bench.trace import BenchError, DecodeStep, check_complete, run_requests, why_not_full
from launch.bench.workload import greedy, random_prompts
from runtime.execute.result_reader import StepTiming
from runtime.frontend.client import EngineClient, PromptRequest
from runtime.schedule.plan import StepKind
from tests.runtime.engine.lives import Launches, Life
from tests.runtime.engine.rig import VOCABULARY, rig


@pytest.mark.parametrize("depth", [0, 2])
def test_a_batch_that_fits_is_a_full_window(depth: int) -> None:
    prompts = random_prompts(4, 10, 9, VOCABULARY, seed=1)
    with rig(depth=depth, rows=4) as engine:
        trace = run_requests(EngineClient(engine, text=False), prompts)
    check_complete(trace)
    assert why_not_full(trace, 4, 8) is None
    assert [decode.rows for decode in trace.decode_steps] == [4] * 8
    assert [times.tokens for times in trace.requests.values()] == [9] * 4
    assert len(trace.ends) == 4
    moments = [moment for times in trace.requests.values() for moment, _ in times.landings]
    assert trace.started < min(moments)
    assert trace.ended == max(moments)


def test_decode_steps_between_chunks_of_prefill_are_not_full() -> None:
    prompts = random_prompts(4, 100, 9, VOCABULARY, seed=1)
    with rig(rows=4, max_prefill_tokens=16) as engine:  # 25 prefill steps, a decode step after every four
        trace = run_requests(EngineClient(engine, text=False), prompts)
    refused = why_not_full(trace, 4, 8)
    assert refused is not None
    assert "ran 1" in refused


def test_a_batch_that_is_larger_than_the_rows_has_no_rate() -> None:
    prompts = random_prompts(6, 10, 9, VOCABULARY, seed=1)
    with rig(rows=4) as engine:
        trace = run_requests(EngineClient(engine, text=False), prompts)
    refused = why_not_full(trace, 6, 8)
    assert refused is not None
    assert "the batch was not full" in refused
    assert "rows, step " in refused


def test_a_batch_that_does_not_fit_into_memory_has_no_rate() -> None:
    prompts = random_prompts(4, 10, 30, VOCABULARY, seed=1)
    with rig(rows=4, blocks=16, max_model_len=64) as engine:
        trace = run_requests(EngineClient(engine, text=False), prompts)
        assert engine.counters["evictions"] + engine.counters["stalls"] > 0
    assert why_not_full(trace, 4, 29) is not None


def test_a_window_of_the_wrong_length_is_named() -> None:
    prompts = random_prompts(2, 10, 9, VOCABULARY, seed=1)
    with rig(rows=4) as engine:
        trace = run_requests(EngineClient(engine, text=False), prompts)
    assert why_not_full(trace, 2, 7) == "the batch took 8 decode steps, not 7"


def test_a_request_that_ends_early_is_no_measurement() -> None:
    with rig(rows=4, max_model_len=32) as engine:
        trace = run_requests(EngineClient(engine, text=False), [PromptRequest(range(3, 20), greedy(40))])
    with pytest.raises(BenchError, match="request 0 ended by length after 15 of 40 tokens"):
        check_complete(trace)


def test_a_rejected_request_is_no_measurement() -> None:
    prompts = random_prompts(3, 10, 9, VOCABULARY, seed=1)
    with rig(rows=4) as engine:
        engine.scheduler.resources.config = replace(
            engine.scheduler.resources.config, max_waiting=1
        )  # fewer than the client knows of
        trace = run_requests(EngineClient(engine, text=False), prompts)
    with pytest.raises(BenchError, match="request 1 ended by rejected after 0 of 9 tokens: 1 requests are waiting"):
        check_complete(trace)


@pytest.mark.parametrize("most", [1, 3])
def test_never_more_than_max_concurrency_are_under_way(most: int) -> None:
    prompts = random_prompts(7, 6, 5, VOCABULARY, seed=2)
    live: list[int] = []
    with rig(rows=8) as engine:
        trace = run_requests(
            EngineClient(engine, text=False, concurrency=most),
            prompts,
            after_turn=lambda output: live.append(engine.scheduler.unfinished),
        )
    assert max(live) == most
    assert len(trace.finished) == 7


def test_figures_are_those_of_the_landings() -> None:
    prompts = random_prompts(3, 6, 5, VOCABULARY, seed=2)
    with rig(rows=4) as engine:
        trace = run_requests(EngineClient(engine, text=False), prompts)
    figures, rows = vllm_figures(trace, "tiny", 3), request_rows(trace)
    expected = {"completed": 3, "failed": 0, "total_input": 18, "total_output": 15, "max_concurrency": 3}
    assert expected | {"model_id": "tiny"} == {key: figures[key] for key in (*expected, "model_id")}
    assert figures["output_throughput"] == pytest.approx(15 / trace.seconds)
    assert figures["total_token_throughput"] == pytest.approx(33 / trace.seconds)
    for name in ("ttft", "tpot", "e2el"):
        values = sorted(row[f"{name}_ms"] for row in rows)
        assert figures[f"median_{name}_ms"] == pytest.approx(values[1])
        assert figures[f"mean_{name}_ms"] == pytest.approx(sum(values) / 3)
        assert dict(figures[f"percentiles_{name}_ms"])[99] == figures[f"p99_{name}_ms"] <= values[2]
    first = rows[0]
    assert first["e2el_ms"] == pytest.approx(first["ttft_ms"] + 4 * first["tpot_ms"])
    assert figures["mean_itl_ms"] == pytest.approx(figures["mean_tpot_ms"])


# ---- saturation ----


def test_the_saturated_part_counts_the_tokens_in_it() -> None:
    prompts = random_prompts(12, 6, 9, VOCABULARY, seed=2)
    with rig(rows=2) as engine:
        trace = run_requests(EngineClient(engine, text=False), prompts)
    found = saturation(trace, 2)
    assert found.refused is None
    begin = sorted(times.landings[0][0] for times in trace.requests.values())[1]
    end = trace.ends[10]
    tokens = sum(begin < at <= end for times in trace.requests.values() for at, _ in times.landings)
    assert 80 < tokens < 12 * 9
    assert found.tok_s == pytest.approx(tokens / (end - begin))


def test_too_few_requests_saturate_nothing() -> None:
    prompts = random_prompts(4, 6, 9, VOCABULARY, seed=2)
    with rig(rows=4) as engine:
        trace = run_requests(EngineClient(engine, text=False), prompts)
    assert saturation(trace, 4).refused == "4 requests never wait for one of 4 rows: type --num-prompts 16"


def test_rows_that_memory_keeps_empty_saturate_nothing() -> None:
    prompts = random_prompts(12, 10, 30, VOCABULARY, seed=2)
    with rig(rows=4, blocks=10, max_model_len=64) as engine:
        trace = run_requests(EngineClient(engine, text=False), prompts)
    refused = saturation(trace, 4).refused
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


# ---- anatomy ----


@pytest.mark.parametrize("depth", [0, 2])
def test_the_turns_of_steady_steps_have_all_phases(depth: int) -> None:
    prompts = random_prompts(3, 10, 21, VOCABULARY, seed=1)
    with rig(depth=depth, rows=4) as engine:
        clock = TurnClock(engine)
        trace = run_requests(EngineClient(engine, text=False), prompts, after_turn=clock.end_turn)
        copied, copies = sum(turn.copied_bytes for turn in clock.turns), sum(turn.copies for turn in clock.turns)
        assert copied == engine.counters["host_to_device_bytes"]
        assert copies == engine.counters["host_to_device_copies"]
    turns = clock.of(trace.decode_steps)
    assert len(turns) == 20 - depth, "the last ones launch nothing"
    for turn in turns:
        assert turn.spent.keys() == {"turn", "exchange", "plan", "launch", "wait", "land"}
        assert turn.spent["turn"] >= sum(turn.spent[phase] for phase in turn.spent if phase != "turn")
    assert any(not turn.copies for turn in turns), "a steady step copies nothing"


def test_a_replay_is_a_live_decode_of_the_steady_lengths() -> None:
    lengths = Lengths(10, 21)
    with rig(rows=4) as engine:
        assert replay_ms(engine, lengths, 3, repeats=1) > 0
        engine.executor.device.synchronize()
        columns = engine.executor.tables.columns
        assert columns.length[1:4].tolist() == [31] * 3, "every replay gave every row a token"
        assert columns.finished[:5].tolist() == [columns.finished[0].item(), 0, 0, 0, columns.finished[4].item()]
        blocks = engine.executor.tables.block_table_SP[1:4, :4].flatten().tolist()
        assert blocks == list(range(1, 13))


def test_a_replay_is_launched_as_the_engine_launches_such_rows() -> None:
    life = Life()
    with rig(rows=4, buckets=(1, 2, 4), observe=Launches(life)) as engine:
        run_requests(EngineClient(engine, text=False), random_prompts(2, 10, 21, VOCABULARY, seed=1))
        live = next(spec for spec in life.specs if len(spec.plan.slots) == 2 and spec.kind is StepKind.DECODE)
        found = replay_spec(engine, replay_plan(engine, Lengths(10, 21), 2))
        assert found == live._replace(plan=found.plan)
        assert found.bucket == 2, "not the largest"


def test_a_replay_in_groups_exchanges_what_all_of_them_bring() -> None:
    """Each has two of three rows: without the exchange of the others, another graph would be timed."""
    with rig(rows=4, buckets=(1, 2, 4)) as engine:
        config = replace(engine.config, data_parallel=2, expert_parallel=True)
        grouped = cast(Any, SimpleNamespace(config=config, executor=engine.executor))
        plan = replay_plan(grouped, Lengths(10, 21), 3)
        found = replay_spec(grouped, plan)
    assert (len(plan.slots), found.bucket, found.exchange_rows, found.shared_bucket) == (2, 2, 2, 2)


def test_a_replay_that_does_not_fit_is_refused() -> None:
    with (
        rig(rows=4, blocks=16, max_model_len=96) as engine,
        pytest.raises(BenchError, match="needs 24 KV blocks, the pool has 16"),
    ):
        replay_plan(engine, Lengths(40, 24), 3)


@pytest.mark.parametrize(("steps", "left_out"), [(256, 16), (64, 16), (20, 5), (3, 0)])
def test_a_warm_up_never_leaves_out_most_of_a_run(steps: int, left_out: int) -> None:
    assert warm_up_steps(steps) == left_out
