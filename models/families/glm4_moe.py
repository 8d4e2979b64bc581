"""GLM-4.5, 4.6 and 4.7 (GLM team 2025): dense layers first, then experts with a sigmoid router and an ungated shared
one, half of each head rotated, norms of queries and keys where the config asks for them.

Knows: its config and its checkpoint names. Does not know: layers (llama.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from models.config import FamilyConfig
from models.config_reader import ConfigReader
from models.families.llama import Llama
from models.families.qwen3_moe import Qwen3Moe
from models.layers.decoder import MTPLayout
from models.layers.moe import shared_expert_names
from models.layers.rope import given_parameters
from models.layers.routed_experts import EXPERT_KEYS, RoutedExperts, sigmoid_experts


def half_rotated(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if config.get("partial_rotary_factor") or given_parameters(config).get("partial_rotary_factor"):
        return config
    return {**config, "partial_rotary_factor": 0.5}


def _experts(config: Mapping[str, Any]) -> RoutedExperts:
    read = ConfigReader(config)
    layers, size = read.size("num_hidden_layers"), read.size("moe_intermediate_size")
    dense = 0 if config.get("first_k_dense_replace") == 0 else read.size("first_k_dense_replace", 1)
    shared = 0 if config.get("n_shared_experts") == 0 else read.size("n_shared_experts", 1)
    return sigmoid_experts(config, tuple(range(dense, layers)), size, shared_size=shared * size)


def _more(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"qk_norms": ConfigReader(config).flag("use_qk_norm"), "output_bias": False}


class Glm4Moe(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        eps=1e-5,
        kv_heads=8,
        reads=f"{EXPERT_KEYS} first_k_dense_replace n_routed_experts partial_rotary_factor use_qk_norm",
        neutral={"scoring_func": (("sigmoid",), "another router"), "topk_method": (("noaux_tc",), "another router")},
        usual=half_rotated,
        experts=_experts,
        more=_more,
    )
    mtp_layout: ClassVar[MTPLayout | None] = "nextn"
    checkpoint_names: ClassVar = {
        **Qwen3Moe.checkpoint_names,
        **shared_expert_names("layers.{}.mlp", "model.layers.{}.mlp.shared_experts"),
    }
