"""--warm: what was captured before the first request is not captured again while requests run."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel.comm.collectives import SingleRank
from parallel.control.interface import SingleRankControl
from runtime.build import WARM_VARIANTS, build_engine
from runtime.config import EngineConfig
from tests.runtime.engine.rig import request, run, tiny_folder
from tests.runtime.execute.sampling.sampling_fields import SamplingFields

SAMPLING: dict[str, SamplingFields] = {
    "greedy": {},
    "random": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_p": 0.9},
    "penalised": {"temperature": 0.8, "top_k": 5, "presence_penalty": 0.5},
}


def late_captures(folder: Path, warm: tuple[str, ...], kind: str) -> float:
    config = EngineConfig(
        model=str(folder), load_format="dummy", device="cpu", max_num_seqs=2, num_blocks=40, max_model_len=64, warm=warm
    )
    with build_engine(
        config, control=SingleRankControl(), collectives=SingleRank(), agree_min=int, device="cpu"
    ) as engine:
        sampling: SamplingFields = {"max_tokens": 4, **SAMPLING[kind]}
        run(engine, [request(0, (3, 4, 5), **sampling)])
        return engine.counters["graph_captures_after_warmup"]


@pytest.mark.parametrize("kind", WARM_VARIANTS)
def test_a_warm_kind_is_captured_before_the_first_request(kind: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    assert late_captures(folder, ("greedy", kind) if kind != "greedy" else ("greedy",), kind) == 0
    assert (late_captures(folder, ("greedy",), kind) > 0) == (kind != "greedy")
