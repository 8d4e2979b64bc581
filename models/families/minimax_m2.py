"""MiniMax-M2 to M2.7 (MiniMax 2025): experts with a sigmoid router in every layer, norms of queries and keys over all
heads.

Knows: its config and its checkpoint names. Does not know: layers (llama.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from models.attention_spec import AttentionSpec
from models.config import FamilyConfig, ModelConfig
from models.config_reader import ConfigReader
from models.families.llama import Llama
from models.families.mixtral import Mixtral
from models.layers.context import ModelContext
from models.layers.qkv_edit import NormsOverHeads
from models.layers.rope import given_parameters
from models.layers.routed_experts import EXPERT_KEYS, RoutedExperts, sigmoid_experts
from parallel.layers.shard import HeadShard

_HEAD_DIM = 128


def _usual(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """'rotary_dim' says which part of a head is rotated; layers of type 0 would have linear attention."""
    if any(kind != 1 for kind in config.get("attn_type_list") or ()):
        raise ValueError(f"'attn_type_list' is {config['attn_type_list']!r}, but only 1, full attention, is supported")
    share = config.get("partial_rotary_factor") or given_parameters(config).get("partial_rotary_factor")
    if config.get("rotary_dim") is None or share is not None:
        return config
    read = ConfigReader(config)
    return {**config, "partial_rotary_factor": read.size("rotary_dim") / read.size("head_dim", _HEAD_DIM)}


def _experts(config: Mapping[str, Any]) -> RoutedExperts:
    read = ConfigReader(config)
    layers = tuple(range(read.size("num_hidden_layers")))
    return sigmoid_experts(config, layers, read.size("intermediate_size"), count="num_local_experts")


def _more(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_bias": False, "output_bias": False, "qk_norms": False}  # not of single heads


class MiniMaxM2(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        theta=5e6,
        head_dim=_HEAD_DIM,
        kv_heads=8,
        # Published weights hold no MTP modules.
        reads=f"{EXPERT_KEYS} attn_type_list max_model_len mlp_intermediate_size mtp_transformer_layers "
        "partial_rotary_factor "
        "num_mtp_modules shared_moe_mode use_mtp",
        neutral={
            "scoring_func": (("sigmoid",), "another router"),
            "use_routing_bias": ((True,), "a router without correction bias"),
            "qk_norm_type": (("per_layer",), "norms of single heads"),
            "shared_intermediate_size": ((0,), "a shared expert"),
            "norm_topk_prob": ((True,), "weights of experts that are not renormalised"),
            "routed_scaling_factor": ((1, 1.0), "scaling the sum of the experts"),
            **dict.fromkeys(("n_group", "topk_group"), ((0, 1), "choosing experts from the best groups only")),
            **dict.fromkeys(
                ("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"),
                ((1, 1.0), "scaled activations"),
            ),
        },
        qk_norms=True,
        usual=_usual,
        experts=_experts,
        more=_more,
    )
    checkpoint_names: ClassVar = {
        **Mixtral.checkpoint_names,
        "layers.{}.mixer.edit.q_norm": "model.layers.{}.self_attn.q_norm",
        "layers.{}.mixer.edit.k_norm": "model.layers.{}.self_attn.k_norm",
        "layers.{}.mlp.router.e_score_correction_bias": (
            "model.layers.{}.block_sparse_moe.e_score_correction_bias",
            "model.layers.{}.mlp.e_score_correction_bias",
        ),
    }

    def _edit(
        self, config: ModelConfig, context: ModelContext, heads: HeadShard, spec: AttentionSpec
    ) -> nn.Module | None:
        return NormsOverHeads(heads, config.head_dim, config.rms_norm_eps, context)
