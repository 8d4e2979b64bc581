"""Experts of gpt-oss stored as MXFP4 codes: on every rank what transformers makes of them, whatever cuts a block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.checkpoint import WeightsError
from models.layers.decoder import Decoder
from models.registry import config_from_folder
from models.weights import load_model
from parallel.comm.collectives import SingleRank
from parallel.layers.experts import ExpertSplit
from parallel.layers.mxfp4 import Mxfp4Target
from tests.models.tiny_checkpoint import TINY, RankOf, build
from tests.plant import reference_kernels

MODEL: dict[str, Any] = TINY | {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def load(folder: Path, rank: int = 0, size: int = 1, *, whole: bool = False) -> Decoder:
    collectives = SingleRank() if size == 1 else RankOf(rank, size)
    split, kernels = ExpertSplit(whole=whole), reference_kernels()
    return load_model(config_from_folder(folder), folder, collectives=collectives, kernels=kernels, experts=split)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(codes, the same as numbers)"""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    codes, numbers = (tmp_path_factory.mktemp(name) for name in ("codes", "numbers"))
    (numbers / "config.json").write_text(json.dumps(MODEL))
    (codes / "config.json").write_text(json.dumps(MODEL | MXFP4))
    shards = build(config_from_folder(numbers), device="meta").checkpoint_shards()
    tensors = {name: torch.randn(shard.full_shape) for name, shard in shards.items()}
    coded: dict[str, Tensor] = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outputs = coded.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inner // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 130, (experts, outputs, inner // 32), dtype=torch.uint8)
        coded |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(coded, codes / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, numbers / "model.safetensors")
    return codes, numbers


@pytest.mark.slow
@pytest.mark.parametrize(("size", "whole"), [(1, False), (2, False), (4, False), (2, True)])
def test_every_rank_has_the_numbers_that_transformers_makes(folders: tuple[Path, Path], size: int, whole: bool) -> None:
    """Four ranks have 16 features each of an expert: half of a block of down's columns."""
    for rank in range(size):
        made, meant = (dict(load(folder, rank, size, whole=whole).named_parameters()) for folder in folders)
        assert made.keys() == meant.keys()
        for name, parameter in meant.items():
            assert torch.equal(made[name], parameter), (rank, name)


def test_codes_and_scales_come_in_either_order() -> None:
    codes = torch.tensor([[[[0x10, 0xF7, *[0] * 14]]]], dtype=torch.uint8)
    for scales_first in (False, True):
        into = Mxfp4Target(torch.zeros(1, 1, 4))
        if scales_first:
            into.take_scales(torch.tensor([[[129]]], dtype=torch.uint8))
        into.take_codes(codes)
        if not scales_first:
            into.take_scales(torch.tensor([[[129]]], dtype=torch.uint8))
        assert into.target.tolist() == [[[0.0, 2.0, 24.0, -24.0]]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (torch.full((4, 128, 2), 255, dtype=torch.uint8), "is 255, which stands for no number"),
        (torch.ones(4, 128, 2), "is F32, but MXFP4 codes and scales are U8"),
    ],
)
def test_scales_that_are_none_are_refused(
    folders: tuple[Path, Path], tmp_path: Path, changed: Tensor, said: str
) -> None:
    from safetensors.torch import load_file

    tensors = load_file(folders[0] / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    save_file(tensors | {name: changed}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders[0] / "config.json").read_text())
    with pytest.raises(WeightsError, match=f"gate_up_proj_scales.*{said}"):
        load(tmp_path)
