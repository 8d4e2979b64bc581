"""Limits of all-reduces that `launch tune` measured reach every rank from rank 0's table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.ranks import start_engine
from launch.ranks.start_engine import measured_limits
from models.kernels.matmul import choice_table
from models.kernels.matmul.choice_table import ChoiceTable
from models.kernels.traits import H200
from parallel.comm.collectives import SingleRank
from parallel.comm.symmetric_all_reduce import SizeLimits
from runtime.config import EngineConfig

GPU = dataclasses.replace(H200, name="NVIDIA Of Tests")


class Follower(SingleRank):
    """Hears what rank 0 told, and makes nothing itself."""

    def __init__(self, told: str) -> None:
        self.told = told

    def broadcast_text(self, make: Callable[[], str]) -> str:
        return self.told


class Leader(SingleRank):
    """Notes what it tells."""

    told = ""

    def broadcast_text(self, make: Callable[[], str]) -> str:
        self.told = make()
        return self.told


@pytest.mark.parametrize(
    ("ranks", "expected"), [(2, SizeLimits(1 << 20, 0)), (4, SizeLimits(1 << 17, 1 << 22)), (8, None)]
)
def test_all_ranks_have_the_limits_of_rank_0s_table(
    ranks: int, expected: SizeLimits | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_engine, "traits_of", lambda device: GPU)
    table = ChoiceTable(all_reduce={2: SizeLimits(1 << 20, 0), 4: SizeLimits(1 << 17, 1 << 22)})
    choice_table.save(choice_table.tuned_file(tmp_path, GPU.name), table)
    given: dict[str, Any] = {"model": "m", "device": "cuda", "tensor_parallel": ranks}
    config = EngineConfig(**given, kernel_cache=str(tmp_path))
    leader, device = Leader(), torch.device("cuda", 0)
    assert measured_limits(config, device, leader) == expected
    elsewhere = EngineConfig(**given, kernel_cache=str(tmp_path / "not-there"))
    assert measured_limits(elsewhere, device, Follower(leader.told)) == expected
