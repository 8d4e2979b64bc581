"""Mixtral (Jiang et al. 2024): Llama with experts in every layer. w1 is gate, w3 is up, w2 is down.

Knows: how it differs from Llama: its config and its checkpoint names. Does not know: layers (llama.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from models.config import FamilyConfig
from models.config_reader import ConfigReader
from models.families.llama import Llama
from models.layers.routed_experts import EXPERT_KEYS, RoutedExperts, softmax_experts


def _experts(config: Mapping[str, Any]) -> RoutedExperts:
    read = ConfigReader(config)
    layers, size = tuple(range(read.size("num_hidden_layers"))), read.size("intermediate_size")
    return softmax_experts(config, layers, size, count="num_local_experts", per_token=2, renormalise=True)


class Mixtral(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        eps=1e-5, theta=1e6, kv_heads=8, full_every=0, reads=EXPERT_KEYS, experts=_experts
    )
    checkpoint_names: ClassVar = {
        **Llama.checkpoint_names,
        "layers.{}.mlp.router": ("model.layers.{}.block_sparse_moe.gate", "model.layers.{}.mlp.gate"),
        "layers.{}.mlp.experts.{}.gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
        "layers.{}.mlp.experts.{}.up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
        "layers.{}.mlp.experts.{}.down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
        "layers.{}.mlp.experts": "model.layers.{}.mlp.experts",  # fused: gate_up_proj and down_proj
    }
