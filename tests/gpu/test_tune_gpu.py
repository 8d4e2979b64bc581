"""`launch tune` on a GPU: a table of a few buckets in seconds, which an engine's kernels then take.

Run: python3 -m pytest -m gpu tests/gpu/test_tune_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launch.tune import command as tune
from launch.tune.options import TuneCommand
from models.kernels.matmul import choice_table
from models.kernels.matmul.choice_table import LinearShape

pytestmark = pytest.mark.gpu

MODEL = "qwen3-0.6b"
ROWS = (8, 24, 512)  # a whole search in layers, a bucket beside it, steps with prompts


def run(folder: Path, **more: object) -> tuple[int, str]:
    told: list[str] = []
    command = TuneCommand(MODEL, rows=ROWS, out=folder, compile_workers=4, **more)  # type: ignore[arg-type]
    return tune.run(command, {}, told.append), "\n".join(told)


def test_a_table_is_measured_kept_and_found(tmp_path: Path) -> None:
    code, told = run(tmp_path)
    assert code == 0, told
    assert "are left" not in told
    device = torch.device("cuda", 0)
    found = choice_table.load(choice_table.tuned_file(tmp_path, torch.cuda.get_device_name(device)))
    assert found.gpu is not None
    assert found.gpu.memory_rate > 1e11, "the driver tells clock and width of the memory"
    assert {LinearShape.from_key(key).rows for key in found.choices} == set(ROWS)
    assert len(found.choices) == 4 * len(ROWS) + 2

    from tests.models.kernels.nvidia_kernels import nvidia_kernels

    kernels = nvidia_kernels(device, prefill="triton")
    kernels.matmul.tune([], tmp_path)
    for key, choice in found.choices.items():
        assert kernels.matmul.choice(LinearShape.from_key(key)) == choice
    before = torch.cuda.memory_allocated()
    del kernels
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < before

    code, told = run(tmp_path)
    assert code == 0
    assert f"({4 * len(ROWS) + 3} of them measured before)" in told


def test_a_budget_is_kept(tmp_path: Path) -> None:
    code, told = run(tmp_path, budget_minutes=0.2)
    assert code == 0
    assert "out of budget" in told
