"""Small checkpoints written without transformers, for tests of the loader.

Knows: the config of one tiny model and how its full tensors become safetensors files. Does not know: the loader.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.config import ModelConfig
from models.dummy import DummyTensor
from models.layers.context import ModelContext
from models.layers.decoder import Decoder
from models.registry import model_class
from parallel.comm.collectives import Collectives, SingleRank
from tests.plant import reference_kernels

TINY: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "attention_bias": True,
    "dtype": "float32",
}


class RankOf(Collectives):
    """The rank and size of a group whose other ranks are not there: enough to build a shard, not to run it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def all_gather(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def build(config: ModelConfig, rank: int = 0, size: int = 1, device: str = "cpu") -> Decoder:
    """One rank's uninitialised share of a model."""
    collectives = SingleRank() if size == 1 else RankOf(rank, size)
    with torch.device(device):
        return model_class(config.architecture)(config, ModelContext(collectives, reference_kernels(), torch.float32))


def full_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """The whole checkpoint, float32."""
    return {
        name: DummyTensor(seed, name, shard.full_shape, shard.pieces[0].centre, "cpu")[
            tuple(slice(0, n) for n in shard.full_shape)
        ]
        for name, shard in build(config, device="meta").checkpoint_shards().items()
    }


def write(
    folder: Path, tensors: dict[str, Tensor], files: int = 1, config: dict[str, Any] | None = None
) -> dict[str, str]:
    """Write config.json and the tensors, over several files with an index if ``files`` > 1; returns the weight_map."""
    (folder / "config.json").write_text(json.dumps(config or TINY))
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return dict.fromkeys(tensors, "model.safetensors")
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number::files]}
        save_file(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
