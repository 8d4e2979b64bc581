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
from runtime.window_costs import window_times
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


@pytest.mark.parametrize("name", HOW)
def test_engines_are_measured_as_they_run(name: str) -> None:
    torch.set_num_threads(1)
    folder, keys = HOW[name]
    config = EngineConfig(
        model=str(folder), device="cpu", max_num_seqs=6, max_model_len=256, speculative_config=keys,
        decode_buckets=(1, 2, 4, 6),
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
                assert list(times) == [1, 2, 4, 6]
                assert all(min(pair) > 0 for pair in times.values())
            found = run(engine, requests)
            engine.stop()
            return found

    alone, behind = answers(False), answers(True)
    assert {i: each.token_ids for i, each in behind.items()} == {i: each.token_ids for i, each in alone.items()}
