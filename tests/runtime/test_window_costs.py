"""What windows cost is measured over rows that run, with the drafters that ship and over recurrent state, and leaves no
trace: answers afterwards are those of an engine that was not measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import build_engine
from runtime.config import EngineConfig
from runtime.schedule.plan import Finished
from runtime.schedule.request import Request, SamplingParams
from runtime.schedule.speculation import SpeculationPolicy
from runtime.window_costs import speculation, window_times
from tests.runtime.engine.rig import run

DEMO = Path("models/demo")
HOW: dict[str, tuple[Path, dict[str, Any]]] = {
    "mtp": (DEMO, {"method": "mtp", "model": str(DEMO / "mtp"), "num_speculative_tokens": 3}),
    "dflash tree": (
        DEMO,
        {"method": "dflash", "model": str(DEMO / "dflash"), "num_speculative_tokens": 7, "tree_size": 16},
    ),
    "drawn": (
        DEMO,
        {
            "method": "mtp",
            "model": str(DEMO / "mtp"),
            "num_speculative_tokens": 2,
            "draft_sample_method": "probabilistic",
        },
    ),
    "hybrid": (DEMO / "hybrid", {"method": "mtp", "num_speculative_tokens": 3}),
    "hybrid tree": (DEMO / "hybrid", {"method": "mtp", "num_speculative_tokens": 3, "tree_size": 8}),
}


FEWER: dict[str, tuple[Path, dict[str, Any]]] = {
    "dflash": (DEMO, {"method": "dflash", "model": str(DEMO / "dflash"), "num_speculative_tokens": 7}),
    "hybrid": (DEMO / "hybrid", {"method": "mtp", "num_speculative_tokens": 7}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dflash", pytest.param("hybrid", marks=pytest.mark.long)])
def test_each_width_has_costs_and_graphs_of_its_own(name: str) -> None:
    """Measured as on a GPU. Then a policy that wants another width in each step gives the answers of the widest."""
    torch.set_num_threads(1)
    folder, keys = FEWER[name]
    config = EngineConfig(
        model=str(folder), device="cpu", max_num_seqs=4, max_model_len=256, decode_buckets=(2, 4),
        speculative_config=keys | {"fewer_speculative_tokens": [3, 1]},
    )  # fmt: skip
    requests = [
        Request(i, tuple(range(5 + i, 25 + i)), SamplingParams(max_tokens=30, temperature=0.0, seed=i), ())
        for i in range(3)
    ]
    with build_engine(
        config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu"
    ) as engine:
        assert engine.scheduler.planner.speculation is not None
        assert engine.scheduler.planner.speculation.config.narrower == (), "nothing is measured on a CPU"
        schedule = replace(engine.scheduler.config, speculation=None)
        rule = speculation(replace(config, device="cuda"), engine.executor, schedule, None)
        assert rule is not None
        assert (rule.width, [width for width, _ in rule.narrower]) == (8, [4, 2])
        for costs in (rule.costs, *(costs for _, costs in rule.narrower)):
            assert [rows for rows, _ in costs] == [2, 4]
            assert min(cost for _, cost in costs) > 0
        alone = run(engine, requests)
        policy = engine.scheduler.planner.speculation = SpeculationPolicy(rule)
        widths = iter([2, 4, 8, 1, 4, 2] * 100)
        policy.width = lambda rows: next(widths)  # type: ignore[method-assign]
        again = run(engine, [replace(one, request_id=10 + one.request_id) for one in requests])
        assert engine.counters["graph_captures_after_warmup"] == 0
        engine.stop()
    assert {i - 10: each.token_ids for i, each in again.items()} == {i: each.token_ids for i, each in alone.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "hybrid tree" else pytest.mark.long) for name in HOW]
)
def test_engines_are_measured_as_they_run(name: str) -> None:
    torch.set_num_threads(1)
    folder, keys = HOW[name]
    config = EngineConfig(
        model=str(folder), device="cpu", max_num_seqs=6, max_model_len=256, speculative_config=keys,
        decode_buckets=(2, 5, 6),
    )  # fmt: skip
    random = name == "drawn"

    def answers(measured: bool) -> dict[int, Finished]:
        requests = [
            Request(
                i, tuple(range(5 + i, 25 + i)), SamplingParams(max_tokens=20, temperature=float(random), seed=i), ()
            )
            for i in range(5)
        ]
        with build_engine(
            config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu"
        ) as engine:
            if measured:
                schedule = replace(engine.scheduler.config, speculation=None)
                times = window_times(config, engine.executor, schedule)
                assert list(times) == [2, 6], "the largest, and those that are powers of two"
                assert all(min(pair) > 0 for pair in times.values())
            found = run(engine, requests)
            engine.stop()
            return found

    alone, behind = answers(False), answers(True)
    assert {i: each.token_ids for i, each in behind.items()} == {i: each.token_ids for i, each in alone.items()}
