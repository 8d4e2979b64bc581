"""Qwen3-MoE (Qwen team 2025): Qwen3 with experts in most layers.

Knows: the architecture's layers and its checkpoint names. Does not know: how a layer computes, or how a stack runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch import nn

from models.config import FamilyConfig, ModelConfig
from models.config_reader import ConfigReader
from models.families.qwen3 import Qwen3
from models.layers.attention import Attention
from models.layers.context import ModelContext
from models.layers.decoder import Decoder, DecoderLayer, MTPLayout
from models.layers.mlp import GatedMLP
from models.layers.moe import SparseMLP
from models.layers.norm import RMSNorm
from models.layers.rope import cos_sin_cache
from models.layers.routed_experts import EXPERT_KEYS, RoutedExperts, softmax_experts
from parallel.layers.embedding import LMHead, VocabParallelEmbedding


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


def slides(config: Mapping[str, Any]) -> bool:
    """Whatever 'max_window_layers' and 'layer_types' say."""
    return bool(config.get("use_sliding_window"))


class Qwen3Moe(Decoder):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        kv_heads=4, reads=EXPERT_KEYS, qk_norms=True, slides=slides, experts=_experts
    )
    mtp_layout: ClassVar[MTPLayout | None] = "nextn"
    checkpoint_names: ClassVar = {
        **Qwen3.checkpoint_names,
        "layers.{}.mlp.router": "model.layers.{}.mlp.gate",
        "layers.{}.mlp.experts.{}.gate": "model.layers.{}.mlp.experts.{}.gate_proj",
        "layers.{}.mlp.experts.{}.up": "model.layers.{}.mlp.experts.{}.up_proj",
        "layers.{}.mlp.experts.{}.down": "model.layers.{}.mlp.experts.{}.down_proj",
        "layers.{}.mlp.experts": "model.layers.{}.mlp.experts",  # fused: gate_up_proj and down_proj
    }

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        hidden, bias = config.hidden_size, config.attention_bias
        norm = partial(RMSNorm, eps=config.rms_norm_eps, context=context)
        self.cos_sin_LR = cos_sin_cache(config.rope, config.rotary_dim, config.max_length)
        self.embedding = VocabParallelEmbedding(config.vocab_size, hidden, context)
        self.layers = nn.ModuleList(
            DecoderLayer(
                Attention(
                    config,
                    context,
                    self.cos_sin_LR,
                    norm(hidden),
                    q_norm=norm(config.head_dim),
                    k_norm=norm(config.head_dim),
                    qkv_bias=bias,
                    output_bias=bias,
                ),
                SparseMLP(config, context, norm(hidden), layer=number)
                if config.has_experts(number)
                else GatedMLP(config, context, norm(hidden)),
            )
            for number in range(config.layers)
        )
        self.final_norm = norm(hidden)
        self.lm_head = LMHead(config.vocab_size, hidden, context, self.embedding if config.tied_embeddings else None)
