"""The comparison with FlashInfer's experts, without a GPU or FlashInfer: what it is given, and how turns are taken."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")

from models.kernels.reference import ReferenceKernels
from tests.bench import expert_timing
from tests.bench import flashinfer_experts as bench_flashinfer_experts
from tests.bench.expert_timing import LAYERS, ROUNDS
from tests.bench.flashinfer_experts import compare
from tests.bench.measure import PARTS, Part
from tests.gpu.expert_cases import Layer

SMALL = Layer(32, 16, 6, 3, 4, torch.bfloat16, "cpu")  # every token asks at least one of the three that are here


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A layer takes 100 us in ours and 110 in theirs, 1% more with every replay before; whose turn it was."""
    taken: list[str] = []

    def replay_for(graph: Any, seconds: float) -> float:
        name = graph.args[0].__name__
        taken.append(name)
        return {"ours": 100.0, "theirs": 110.0}[name] * (1 + 0.01 * (len(taken) - 1)) * LAYERS

    monkeypatch.setattr(expert_timing, "captured", lambda run: run)
    monkeypatch.setattr(expert_timing, "replay_for", replay_for)
    return taken


def test_what_drifts_hits_both_alike(turns: list[str]) -> None:
    def ours(number: int) -> Tensor:
        return torch.ones(2)

    def theirs(number: int) -> Tensor:
        return torch.ones(2)

    found = compare(8, ours, theirs)
    assert turns == ["ours", "theirs", "theirs", "ours"] * (ROUNDS // 2)
    assert len(found["ours"]["rounds"]) == len(found["flashinfer"]["rounds"]) == ROUNDS
    other = found["flashinfer"]
    assert other["ratio"] == pytest.approx(1.1, abs=1e-3)
    assert other["ratio"] == pytest.approx(other["us"] / found["ours"]["us"])
    assert 1.08 < other["least"] < 1.1 < other["most"] < 1.12


def test_results_that_differ_are_not_timed(turns: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"8 rows: FlashInfer's result differs from ours by 1\.000 of its norm"):
        compare(8, lambda number: torch.ones(2), lambda number: torch.full((2,), 2.0))
    assert turns == []


@pytest.mark.parametrize("part", [part for part in PARTS if "flashinfer_experts" in part.command], ids=lambda p: p.name)
def test_a_part_gives_both_the_same_experts(
    part: Part, turns: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    modes: list[bool] = []
    for name, module in {"fused_moe": MOE(), "autotuner": Tuner(modes)}.items():
        monkeypatch.setitem(sys.modules, f"flashinfer.{name}", module)
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    for name, stand_in in {"build": lambda: None, "share_of": lambda *_: SMALL, "NvidiaKernels": reference}.items():
        monkeypatch.setattr(bench_flashinfer_experts, name, stand_in)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(sys, "argv", ["bench", *shlex.split(part.command.format(out=tmp_path))[2:]])
    bench_flashinfer_experts.main()
    shape = "mixtral-8x7b" if part.name == "mixtral-flashinfer" else "30b-a3b"
    found = json.loads((tmp_path / "results" / f"flashinfer-experts-{shape}.json").read_text())
    assert found["shape"] == shape
    assert [one["rows"] for one in found["rows"]] == [1, 8, 32, 128, 256, 2048, 8192]
    assert all(one["flashinfer"]["ratio"] == pytest.approx(1.1, rel=1e-2) for one in found["rows"])
    assert len(turns) == 2 * ROUNDS * 7
    assert modes == [True, False] * 7, "chosen once for each size, before it is timed"
    assert (tmp_path / "results" / f"flashinfer-tactics-{shape}.json").exists()


def reference(device: torch.device) -> ReferenceKernels:
    return ReferenceKernels()


class MOE(ModuleType):
    """flashinfer.fused_moe: up rows before gate rows, experts numbered over all ranks, this is rank ep_rank."""

    def __init__(self) -> None:
        super().__init__("flashinfer.fused_moe")

    def cutlass_fused_moe(
        self, x: Tensor, ids: Tensor, scores: Tensor, up_gate: Tensor, down: Tensor, **options: Any
    ) -> list[Tensor]:
        assert (options["ep_size"], options["ep_rank"]) == (SMALL.experts // SMALL.held, 0)
        up, gate = up_gate.chunk(2, 1)
        local = torch.where(ids < SMALL.held, ids, -1)
        given = (x, torch.cat((gate, up), 1), down, scores, local)
        return [ReferenceKernels().expert_mlp(*given, all_experts=SMALL.experts)]


class Tuner(ModuleType):
    """flashinfer.autotuner: remembers in which mode it was entered."""

    def __init__(self, modes: list[bool]) -> None:
        super().__init__("flashinfer.autotuner")
        self._modes, self.AutoTuner = modes, self

    @contextmanager
    def autotune(self, tune_mode: bool, *, tuning_buckets: tuple[int, ...]) -> Iterator[None]:
        self._modes.append(tune_mode)
        yield

    def get(self) -> Tuner:
        return self

    def save_configs(self, path: str) -> None:
        Path(path).write_text("{}")
