"""ERNIE 4.5 (Baidu 2025), text models: Llama rotated in pairs of neighbours; all but the smallest with experts, whose
softmax router has a bias for the choice, and an ungated shared one.

Knows: its configs and its checkpoint names. Does not know: layers (llama.py).
Reference: Ernie4_5ForCausalLM and Ernie4_5_MoeForCausalLM of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from models.config import FamilyConfig
from models.config_reader import ConfigReader
from models.families.llama import Llama
from models.families.qwen3_moe import Qwen3Moe
from models.layers.moe import shared_expert_names
from models.layers.routed_experts import RoutedExperts, sigmoid_experts
from parallel.layers.shard import ScatteredShard, Shard

_BIAS = "moe_statics.e_score_correction_bias"  # [1, E]


def _more(config: Mapping[str, Any]) -> dict[str, Any]:
    biases = dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), ConfigReader(config).flag("use_bias"))
    return {"rope_interleaved": True, **biases}


def _usual(config: Mapping[str, Any]) -> dict[str, Any]:
    usual = {"num_experts": config.get("moe_num_experts") or 64, "num_experts_per_tok": config.get("moe_k") or 6}
    return {**usual, **{key: value for key, value in config.items() if value is not None}}


def _experts(config: Mapping[str, Any]) -> RoutedExperts:
    read, end = ConfigReader(config), config.get("moe_layer_end_index")
    layers, every = read.size("num_hidden_layers"), read.size("moe_layer_interval", 1)
    start = 0 if config.get("moe_layer_start_index") == 0 else read.size("moe_layer_start_index", 1)
    last = layers - 1 if end in (None, -1) else read.size("moe_layer_end_index")
    sparse = tuple(n for n in range(start, min(last + 1, layers)) if (n + 1) % every == 0)
    size = read.size("moe_intermediate_size", 1536)
    shared = 0 if config.get("moe_num_shared_experts") == 0 else read.size("moe_num_shared_experts", 2)
    found = sigmoid_experts(config, sparse, size, count="num_experts", shared_size=shared * size)
    return replace(found, scoring="corrected")


class Ernie45(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        eps=1e-5, theta=5e5, head_dim=128, kv_heads=2, tied=True, reads="use_bias", more=_more
    )


class Ernie45Moe(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        eps=1e-5,
        theta=5e5,
        kv_heads=4,
        tied=True,
        reads="moe_intermediate_size moe_k moe_num_experts moe_num_shared_experts moe_layer_start_index "
        "moe_layer_end_index moe_layer_interval num_experts num_experts_per_tok moe_capacity",
        neutral={
            "use_bias": ((False,), "biases"),
            "moe_norm_min": ((1e-12,), "another least sum of weights"),
            "moe_gate": (("topk", "top2_fused"), "another router"),
            "moe_gate_act": (("softmax",), "another router"),
            "moe_use_aux_free": ((True,), "a router without correction bias"),
        },
        usual=_usual,
        experts=_experts,
        more=_more,
    )
    checkpoint_names: ClassVar = {
        **Qwen3Moe.checkpoint_names,
        "layers.{}.mlp.router.e_score_correction_bias": (
            f"model.layers.{{}}.mlp.{_BIAS}",
            f"model.layers.{{}}.mlp.gate.{_BIAS}",
        ),
        **shared_expert_names("layers.{}.mlp", "model.layers.{}.mlp.shared_experts"),
    }

    def checkpoint_shards(self, stored: Container[str] = ()) -> dict[str, Shard | ScatteredShard]:
        found = super().checkpoint_shards(stored)
        for name, shard in found.items():
            if name.endswith(_BIAS):
                (bias,) = shard.pieces
                ranges = (slice(0, 1), *bias.ranges)
                found[name] = replace(bias, full_shape=(1, *bias.full_shape), ranges=ranges, target=bias.target[None])
        return found
