"""Qwen3-MoE (Qwen team 2025): Qwen3 with experts in most layers.

Knows: how it differs from Llama: its config and its checkpoint names. Does not know: layers (llama.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from models.config import FamilyConfig
from models.config_reader import ConfigReader
from models.families.qwen2 import slides
from models.families.qwen3 import Qwen3
from models.layers.routed_experts import EXPERT_KEYS, RoutedExperts, softmax_experts


def sparse_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Every 'decoder_sparse_step'-th, but those of 'mlp_only_layers'. Raises ValueError naming the key."""
    read = ConfigReader(config)
    layers = read.size("num_hidden_layers")
    step, dense = read.size("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in dense):
        raise ValueError(f"'mlp_only_layers' must list layer numbers from 0 to {layers - 1}, not {dense!r}")
    return tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)


def _experts(config: Mapping[str, Any]) -> RoutedExperts:
    read = ConfigReader(config)
    size, renormalise = read.size("moe_intermediate_size"), read.flag("norm_topk_prob")
    return softmax_experts(config, sparse_layers(config), size, renormalise=renormalise)


def _windows(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """In every layer, if any, whatever 'max_window_layers' and 'layer_types' say."""
    return {**config, "layer_types": None}


class Qwen3Moe(Qwen3):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        kv_heads=4,
        window=4096,
        full_every=0,
        reads=EXPERT_KEYS,
        qk_norms=True,
        slides=slides,
        usual=_windows,
        experts=_experts,
    )
    checkpoint_names: ClassVar = {
        **Qwen3.checkpoint_names,
        "layers.{}.mlp.router": "model.layers.{}.mlp.gate",
        "layers.{}.mlp.experts.{}.gate": "model.layers.{}.mlp.experts.{}.gate_proj",
        "layers.{}.mlp.experts.{}.up": "model.layers.{}.mlp.experts.{}.up_proj",
        "layers.{}.mlp.experts.{}.down": "model.layers.{}.mlp.experts.{}.down_proj",
        "layers.{}.mlp.experts": "model.layers.{}.mlp.experts",  # fused: gate_up_proj and down_proj
    }
