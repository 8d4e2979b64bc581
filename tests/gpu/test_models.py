"""Models on GPUs in bfloat16 against the same models on the CPU in float32, for one GPU and for two with NCCL.

bfloat16 keeps 8 bits of each weight and activation; through three layers that moves the logits (of spread 1, at most 5)
by up to 0.1, on the CPU too. A wrong kernel, page or shard moves them by about 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.dummy import DummyTensor
from parallel.comm.collectives import SingleRank
from tests.gpu.models_on_gpu import CONFIGS, run

TOLERANCE = 0.2


@cache
def expected(name: str) -> tuple[Tensor, Tensor]:
    return run(name, "cpu", torch.float32, SingleRank())


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_one_gpu(name: str) -> None:
    tokens, logits = expected(name)
    found = run(name, "cuda:0", torch.bfloat16, SingleRank(), tokens)[1]
    torch.testing.assert_close(found, logits, atol=TOLERANCE, rtol=0)


@pytest.mark.gpu
def test_dummy_weights_are_the_same_on_cpu_and_gpu() -> None:
    piece = (slice(10, 900), slice(3, 300))
    on_gpu, on_cpu = (DummyTensor(0, "w", (1000, 333), 0.0, device)[piece].cpu() for device in ("cuda:0", "cpu"))
    assert torch.equal(on_gpu, on_cpu)


@pytest.mark.multigpu
def test_two_gpus(tmp_path: Path) -> None:
    save_file({f"{name}.tokens": expected(name)[0] for name in CONFIGS}, tmp_path / "expected.safetensors")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.models_on_gpu", str(tmp_path), str(rank), "2"],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"},
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    found = load_file(tmp_path / "gpu.safetensors")
    for name in CONFIGS:
        torch.testing.assert_close(found[f"{name}.logits"], expected(name)[1], atol=TOLERANCE, rtol=0)
