"""HY3 (Tencent Hunyuan team 2026): norms of queries and keys, a dense layer first, then experts with a sigmoid router
and an ungated shared one.

Knows: its config and its checkpoint names. Does not know: layers (llama.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from models.config import FamilyConfig
from models.config_reader import ConfigReader, refuse_others
from models.families.llama import Llama
from models.families.qwen3_moe import Qwen3Moe
from models.layers.decoder import MTPLayout
from models.layers.moe import shared_expert_names
from models.layers.routed_experts import EXPERT_KEYS, RoutedExperts, sigmoid_experts

_KINDS = ("dense", "sparse")


def _usual(config: Mapping[str, Any]) -> Mapping[str, Any]:
    size = config.get("moe_intermediate_size")
    refuse_others(config, {"expert_hidden_dim": ((size,), "experts of another size than 'moe_intermediate_size'")})
    return {key: value for key, value in config.items() if key != "expert_hidden_dim"}


def _experts(config: Mapping[str, Any]) -> RoutedExperts:
    read, kinds = ConfigReader(config), config.get("mlp_layer_types")
    layers, size = read.size("num_hidden_layers"), read.size("moe_intermediate_size")
    kinds = kinds or ["dense"] + ["sparse"] * (layers - 1)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _KINDS for kind in kinds):
        raise ValueError(f"'mlp_layer_types' must name 'dense' or 'sparse' for each of {layers} layers, not {kinds!r}")
    sparse = tuple(number for number, kind in enumerate(kinds) if kind == "sparse")
    shared = 0 if config.get("num_shared_experts") == 0 else read.size("num_shared_experts", 1)
    scaled = {**config, "routed_scaling_factor": read.number("router_scaling_factor", 2.826)}
    return sigmoid_experts(scaled, sparse, size, count="num_experts", shared_size=shared * size)


class HYV3(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        eps=1e-5,
        theta=11158840.0,
        head_dim=128,
        kv_heads=8,
        # The sum of the routed experts and the shared one is made in the dtype of activations, or in float32.
        reads=f"{EXPERT_KEYS} enable_attention_fp32_softmax enable_lm_head_fp32 enable_moe_fp32_combine eod_token_id "
        "mlp_layer_types router_scaling_factor use_grouped_mm",
        neutral={
            "mlp_bias": ((False,), "biases of its MLPs"),
            "first_k_dense_replace": ((1,), "other dense layers, which 'mlp_layer_types' names"),
            "moe_router_use_sigmoid": ((True,), "another router"),
            "moe_router_enable_expert_bias": ((True,), "a router without correction bias"),
            "route_norm": ((True,), "weights of experts that are not renormalised"),
        },
        usual=_usual,
        qk_norms=True,
        experts=_experts,
    )
    mtp_layout: ClassVar[MTPLayout | None] = "nextn"
    checkpoint_names: ClassVar = {
        **Qwen3Moe.checkpoint_names,
        "layers.{}.mlp.router": ("model.layers.{}.mlp.router.gate", "model.layers.{}.mlp.gate"),
        "layers.{}.mlp.router.e_score_correction_bias": (
            "model.layers.{}.mlp.expert_bias",
            "model.layers.{}.mlp.e_score_correction_bias",
        ),
        **{
            part: (name, name.replace("shared_mlp", "shared_experts"))
            for part, name in shared_expert_names("layers.{}.mlp", "model.layers.{}.mlp.shared_mlp").items()
        },
    }
