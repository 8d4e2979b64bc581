"""Qwen3-Next (Qwen team 2025): gated delta nets, gated attention in every fourth layer, experts and a shared expert.

Knows: the architecture's layers and its checkpoint names. Does not know: how a layer computes, or how a stack runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch import nn

from models.config import FamilyConfig, ModelConfig
from models.config_reader import ConfigReader
from models.families.qwen2 import slides
from models.families.qwen3_moe import Qwen3Moe, sparse_layers
from models.layers.attention import Attention
from models.layers.context import ModelContext
from models.layers.decoder import Decoder, DecoderLayer, MTPLayout
from models.layers.delta_config import DELTA_KEYS, DELTA_NEUTRAL, read_gated_delta, usual_delta_keys
from models.layers.gated_delta import GatedDeltaNet
from models.layers.mlp import GatedMLP
from models.layers.moe import SparseMLP, shared_expert_names
from models.layers.norm import RMSNorm
from models.layers.rope import cos_sin_cache
from models.layers.routed_experts import EXPERT_KEYS, RoutedExperts, softmax_experts
from parallel.layers.embedding import LMHead, VocabParallelEmbedding


def experts_with_a_shared_one(config: Mapping[str, Any], layers: tuple[int, ...]) -> RoutedExperts:
    """Qwen3-MoE's keys, and that of a shared expert, where 0 means none. Raises ValueError naming the key."""
    read, key = ConfigReader(config), "shared_expert_intermediate_size"
    return softmax_experts(
        config,
        layers,
        read.size("moe_intermediate_size"),
        renormalise=read.flag("norm_topk_prob", default=True),
        shared_size=0 if config.get(key) == 0 else read.size(key),
    )


def _experts(config: Mapping[str, Any]) -> RoutedExperts:
    return experts_with_a_shared_one(config, sparse_layers(config))


def delta_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"delta": read_gated_delta(config)}


NEXT_CONFIG = FamilyConfig(
    head_dim=256,
    kv_heads=2,
    reads=f"{EXPERT_KEYS} {DELTA_KEYS}",
    neutral=DELTA_NEUTRAL,
    qk_norms=True,
    layer_types=("linear_attention", "full_attention"),
    slides=slides,
    usual=usual_delta_keys,
    experts=_experts,
    more=delta_shape,
)


class Qwen3Next(Decoder):
    family_config: ClassVar[FamilyConfig] = NEXT_CONFIG
    checkpoint_names: ClassVar[dict[str, Any]] = {
        **Qwen3Moe.checkpoint_names,
        "layers.{}.mixer.projection.qkvz": "model.layers.{}.linear_attn.in_proj_qkvz",
        "layers.{}.mixer.projection.ba": "model.layers.{}.linear_attn.in_proj_ba",
        "layers.{}.mixer.conv": "model.layers.{}.linear_attn.conv1d",
        "layers.{}.mixer.out_projection": "model.layers.{}.linear_attn.out_proj",
        "layers.{}.mixer.recurrence": "model.layers.{}.linear_attn",  # A_log and dt_bias
        "layers.{}.mixer.recurrence.norm": "model.layers.{}.linear_attn.norm",
        **shared_expert_names(
            "layers.{}.mlp", "model.layers.{}.mlp.shared_expert", "model.layers.{}.mlp.shared_expert_gate"
        ),
    }
    unused_tensors: ClassVar[tuple[str, ...]] = ("mtp.",)
    mtp_layout: ClassVar[MTPLayout | None] = "mtp"
    interleaved: ClassVar[bool] = True  # as the checkpoint has the input projections of a delta net

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        hidden = config.hidden_size
        self.cos_sin_LR = cos_sin_cache(config.rope, config.rotary_dim, config.max_length)
        self.embedding = VocabParallelEmbedding(config.vocab_size, hidden, context)
        self.layers = nn.ModuleList(self._layer(config, context, number) for number in range(config.layers))
        self.final_norm = RMSNorm(hidden, config.rms_norm_eps, context, zero_centred=True)
        self.lm_head = LMHead(config.vocab_size, hidden, context, self.embedding if config.tied_embeddings else None)

    def _layer(self, config: ModelConfig, context: ModelContext, number: int) -> DecoderLayer:
        hidden, bias = config.hidden_size, config.attention_bias
        norm = partial(RMSNorm, eps=config.rms_norm_eps, context=context, zero_centred=True)
        mixer: GatedDeltaNet | Attention
        if config.delta is not None and number in config.delta.layers:
            mixer = GatedDeltaNet(config, context, norm(hidden), interleaved=self.interleaved)
        else:
            mixer = Attention(
                config, context, self.cos_sin_LR, norm(hidden),
                q_norm=norm(config.head_dim), k_norm=norm(config.head_dim), qkv_bias=bias, output_bias=bias,
                output_gate=True,
            )  # fmt: skip
        sparse = config.has_experts(number)
        mlp = (
            SparseMLP(config, context, norm(hidden), layer=number)
            if sparse
            else GatedMLP(config, context, norm(hidden))
        )
        return DecoderLayer(mixer, mlp)
