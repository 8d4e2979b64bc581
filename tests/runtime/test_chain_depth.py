"""D and L follow from measured times by rules that can be read off, the same on every rank, and measuring leaves no
trace."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast
from unittest import mock

import pytest

from parallel.layers.experts import ExpertSplit
from runtime import chain_depth
from runtime.chain_depth import (
    DEEPEST,
    TurnTimes,
    agree_depth_and_horizon,
    smallest_depth,
    smallest_horizon,
    turn_times,
)
from runtime.config import EngineConfig
from runtime.execute.executor import Executor
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.result_reader import StepTiming
from runtime.observe.observer import StepObserver
from runtime.schedule.config import SchedulerConfig, StepLimits
from tests.runtime.engine.conftest import long
from tests.runtime.engine.group_rigs import Meeting, MetAgreement, MetExchange
from tests.runtime.engine.rig import rig, run
from tests.runtime.engine.test_depths import mixture, outcome
from tests.runtime.engine.test_experts import EXPERTS

GPU = EngineConfig(model="m", device="cuda", tensor_parallel=2)
LIMITS = StepLimits(rows=8, slots=16, block_size=16, max_model_len=64)
SCHEDULE = SchedulerConfig(LIMITS, blocks=100)
NOBODY = cast(Executor, None)


@pytest.mark.parametrize(
    ("host_ms", "step_ms", "depth"),
    [
        (0.0, 5.0, 1),  # one step is always queued
        (0.4, 4.5, 1),
        (1.0, 3.0, 1),
        (1.1, 3.0, 2),
        (0.31, 0.67, 2),
        (0.3, 0.4, 3),
        (9.0, 1.0, DEEPEST),
    ],
)
def test_the_depth_gives_the_host_three_times_what_it_needs(host_ms: float, step_ms: float, depth: int) -> None:
    assert smallest_depth([TurnTimes(1, host_ms, step_ms)]) == depth
    assert smallest_depth([TurnTimes(1, 0.1, 9.0), TurnTimes(256, host_ms, step_ms)]) == depth


@pytest.mark.parametrize(
    ("depth", "hop_ms", "horizon"),
    [
        (1, 0.01, 0),
        (1, 1.8, 0),  # twice 1.8 and the host's 0.4 are a step of 4 ms
        (1, 1.9, 1),
        (2, 1.9, 0),
        (1, 50.0, 25),
        (0, 0.01, 1),  # the serial engine has nothing queued
    ],
)
def test_the_horizon_hides_twice_a_record_s_way(depth: int, hop_ms: float, horizon: int) -> None:
    assert smallest_horizon([TurnTimes(1, 0.4, 4.0), TurnTimes(64, 0.4, 5.0)], depth, hop_ms) == horizon


def ranks(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, times: list[TurnTimes], others: list[TurnTimes], hop_s: float
) -> list[tuple[int, int]]:
    """What rank 0 and another one agree on, each with measurements of its own."""
    told: list[str] = []
    chosen: list[int] = []

    def agree_on_leader(choose: Callable[[float], int]) -> int:
        chosen.append(choose(hop_s))
        return chosen[0]

    def share(make: Callable[[], str]) -> str:
        if not told:
            told.append(make())
        return told[0]

    found = []
    for measured, agree in ((times, agree_on_leader), (others, lambda choose: chosen[0])):
        monkeypatch.setattr(chain_depth, "turn_times", lambda *_, measured=measured: measured)
        found.append(agree_depth_and_horizon(config, NOBODY, SCHEDULE, agree, share))
    return found


def test_every_rank_takes_the_times_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        found = ranks(monkeypatch, GPU, [TurnTimes(1, 0.4, 4.5)], [TurnTimes(1, 9.9, 4.5)], 10e-6)
    assert found == [(1, 0)] * 2
    said = [record.getMessage() for record in caplog.records]
    assert "chain depth: 1 is the least that gives the host 3 times what it needs of a step: 0.40 of 4.50 ms" in said[0]
    assert any("horizon: 0" in text and "0.010 ms" in text for text in said)


def test_options_overrule_both(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def not_asked(choose: Callable[[float], int]) -> int:
        raise AssertionError("every rank has its horizon from the handshake")

    monkeypatch.setattr(chain_depth, "turn_times", None)  # nothing is measured
    with caplog.at_level(logging.INFO):
        assert agree_depth_and_horizon(replace(GPU, chain_depth=7, horizon=3), NOBODY, SCHEDULE, not_asked, None) == (
            7,
            3,
        )
    assert "7, as asked for (--chain-depth)" in caplog.text
    assert (replace(GPU, chain_depth=7).step_limits(64, DEEPEST).depth, GPU.step_limits(64, DEEPEST).depth) == (
        7,
        DEEPEST,
    )
    assert ranks(monkeypatch, replace(GPU, chain_depth=0), [], [], 10e-6) == [(0, 1)] * 2


def test_a_given_depth_is_kept_and_the_horizon_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [TurnTimes(1, 0.4, 4.0)]
    assert ranks(monkeypatch, replace(GPU, chain_depth=3), times, times, 9e-3) == [(3, 2)] * 2


def test_on_a_cpu_nothing_is_timed() -> None:
    config = EngineConfig(model="m", device="cpu", tensor_parallel=2)
    assert agree_depth_and_horizon(config, NOBODY, SCHEDULE, lambda choose: choose(10e-6), None) == (2, 0)


@pytest.mark.parametrize("warm", ["greedy", "penalised", "constrained", *map(long, ("random", "filtered"))])
def test_turns_are_timed_and_nothing_of_them_is_left(warm: str) -> None:
    """The same tokens, and the same counts, as of an engine that was not measured."""
    timed: list[StepTiming] = []
    with rig(depth=2, rows=8) as engine:
        alone, counted = outcome(run(engine, mixture(5))), dict(engine.counters)
    with rig(depth=2, rows=8, observe=StepObserver(on_timing=timed.append)) as engine:
        config = EngineConfig(model="m", device="cpu", max_num_seqs=8, warm=(warm,))
        found = turn_times(config, engine.executor, engine.scheduler.config)
        assert [times.rows for times in found] == [1, 8]
        assert all(times.step_ms > 0.0 and times.host_ms >= 0.0 for times in found)
        assert timed == []
        assert outcome(run(engine, mixture(5))) == alone
        for name, count in counted.items():
            if not name.startswith(("late_captures", "graph_captures", "device_allocs")):
                assert engine.counters[name] == count, name
        assert len(timed) == engine.counters["steps"]


def test_rows_still_run_when_replays_are_timed_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else experts would have nothing to compute, or the same few for all rows, and a step would seem too short."""
    seen: list[tuple[list[int], int]] = []
    replay_ms = Executor.replay_ms

    def looked_at(executor: Executor, spec: LaunchSpec, replays: int) -> float:
        took = replay_ms(executor, spec, replays)
        slots, columns = list(spec.plan.slots), executor.staging._tables.columns
        seen.append((columns.finished[slots].tolist(), len(set(columns.last_token[slots].tolist()))))
        return took

    monkeypatch.setattr(Executor, "replay_ms", looked_at)
    with rig(depth=2, rows=8, shape=EXPERTS) as engine:
        turn_times(EngineConfig(model="m", device="cpu", max_num_seqs=8), engine.executor, engine.scheduler.config)
    assert [ended for ended, _ in seen] == [[0], [0] * 8]
    assert seen[1][1] > 1


def test_groups_are_timed_together() -> None:
    """Each runs the same turns, so their exchanges match, with other tokens, so that their experts do not; then they go
    on with requests of their own."""
    device, host = Meeting(2), Meeting(2)
    config = EngineConfig(model="m", device="cpu", max_num_seqs=8, data_parallel=2)

    def group(index: int) -> tuple[list[int], list[int], set[int]]:
        exchange = MetExchange(device, index)
        split = ExpertSplit(whole=True, exchange=exchange)
        with rig(shape=EXPERTS, experts=split, groups=MetAgreement(host, index)) as engine:
            executor = engine.executor
            prompts: set[int] = set()
            launch = executor.launch

            def noting(spec: LaunchSpec) -> None:
                prompts.update(token for chunk in spec.plan.chunks for token in chunk.token_ids)
                launch(spec)

            with mock.patch.object(executor, "launch", noting):
                rows = [each.rows for each in turn_times(config, executor, engine.scheduler.config)]
            return rows, exchange.rows, prompts

    with ThreadPoolExecutor(2) as threads:
        (rows, exchanges, prompts), (others, their_exchanges, their_prompts) = threads.map(group, range(2))
    assert rows == others == [1, 8]
    assert exchanges == their_exchanges
    assert (prompts, their_prompts) == (set(range(8)), {1, *range(8, 16)}), "of one row, and of eight"


@pytest.mark.parametrize(
    "schedule", [replace(SCHEDULE, blocks=1), replace(SCHEDULE, limits=replace(LIMITS, max_model_len=16))]
)
def test_where_no_request_fits_nothing_is_timed(schedule: SchedulerConfig) -> None:
    assert turn_times(GPU, NOBODY, schedule) == []
