"""The demo model through the engine: transformers' greedy tokens, exactly, at depth 0 and at the default depth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import build_engine
from runtime.config import EngineConfig
from runtime.schedule.request import Request, SamplingParams
from tests.runtime.engine.rig import run

DEMO = Path("models/demo")


@pytest.mark.slow
@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.long), 2])
def test_golden_outputs(depth: int) -> None:
    torch.set_num_threads(1)
    golden = json.loads((DEMO / "golden.json").read_text())["rows"][::2]  # all, drafted: test_demo_drafters.py
    config = EngineConfig(model=str(DEMO), device="cpu", max_num_seqs=16, max_model_len=640, chain_depth=depth)
    requests = []
    for i, row in enumerate(golden):
        most = len(row["token_ids"])
        sampling = SamplingParams(max_tokens=most, temperature=0.0, seed=i)
        requests.append(Request(i, tuple(row["prompt_token_ids"]), sampling, (0, 3)))
    with build_engine(
        config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu"
    ) as engine:
        finished = run(engine, requests)
    for i, row in enumerate(golden):
        assert list(finished[i].token_ids) == row["token_ids"], row["id"]
        assert finished[i].reason.label == row["finish_reason"], row["id"]
