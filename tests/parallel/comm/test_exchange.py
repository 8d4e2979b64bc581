"""Groups that share experts: exchanges over gloo, and both groups' answers as one rank alone computes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.group_size import require_legal_size
from models.registry import config_from_dict
from parallel.comm.collectives import SingleRank
from parallel.comm.symmetric_exchange import TokenExchange, all_gather_packed
from parallel.layers.experts import ExpertSplit
from tests.parallel.comm.exchange_worker import CONFIG, answers
from tests.torchrun import torchrun


class Twice(TokenExchange):
    """An exchange with another group that brings the same."""

    index, groups = 1, 2

    def all_gather(self, x_XN: Tensor) -> Tensor:
        return torch.cat([x_XN, x_XN])

    def reduce_scatter(self, x_YN: Tensor) -> Tensor:
        return x_YN.chunk(2)[1] * 2


def test_tensors_of_several_types_travel_together() -> None:
    parts = (
        torch.randn(3, 5).bfloat16(),
        torch.randn(3, 2),
        torch.arange(6, dtype=torch.int32).view(3, 2),
        torch.randn(3, 2, 2).double(),
    )
    for found, part in zip(all_gather_packed(parts, Twice()), parts, strict=True):
        assert found.dtype == part.dtype
        assert torch.equal(found, torch.cat([part, part]))


def test_groups_that_cannot_share_are_refused() -> None:
    config = config_from_dict(CONFIG)
    require_legal_size(config, 2, whole_experts=True, groups=4)
    with pytest.raises(ValueError, match=r"8 experts .* over 3 groups of 2 ranks; .* out of \[1, 2, 4, 8\]"):
        require_legal_size(config, 2, whole_experts=True, groups=3)
    with pytest.raises(ValueError, match="type --expert-parallel"):
        ExpertSplit(exchange=Twice())


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["gloo", "memory"])
def test_two_groups_of_two_ranks(way: str, tmp_path: Path) -> None:
    if way == "memory":
        pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    ran = torchrun(4, "tests.parallel.comm.exchange_worker", str(tmp_path), way, TRITON_INTERPRET="1")
    assert ran.returncode == 0, ran.said[-3000:]
    for group in range(2):
        found, expected = (
            load_file(tmp_path / f"group.{group}.safetensors"),
            answers(group, SingleRank(), ExpertSplit()),
        )
        assert torch.equal(found["tokens"], expected["tokens"])
        torch.testing.assert_close(found["logits"], expected["logits"], atol=1e-5, rtol=0)
