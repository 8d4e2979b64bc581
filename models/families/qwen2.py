"""Qwen2 and Qwen2.5 (Qwen team 2024): Llama with biases on the query, key and value projections.

Knows: how it differs from Llama: its config and its checkpoint names. Does not know: layers (llama.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from models.config import MOST_LAYERS, FamilyConfig
from models.config_reader import ConfigReader
from models.families.llama import Llama


def slides(config: Mapping[str, Any]) -> bool:
    """Whether 'sliding_window' means anything."""
    return bool(config.get("use_sliding_window"))


def with_layer_types(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Layers from 'max_window_layers' on have the window, unless 'layer_types' says something else."""
    if config.get("layer_types") or not slides(config):
        return config
    read = ConfigReader(config)
    layers, full = read.size("num_hidden_layers", most=MOST_LAYERS), read.number("max_window_layers", 28)
    return {**config, "layer_types": ["full_attention" if n < full else "sliding_attention" for n in range(layers)]}


def _biases(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_bias": True, "output_bias": False}


class Qwen2(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        kv_heads=32,
        window=4096,
        full_every=0,
        layer_types=("full_attention", "sliding_attention"),
        slides=slides,
        usual=with_layer_types,
        more=_biases,
    )
