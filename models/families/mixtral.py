"""Mixtral (Jiang et al. 2024): Llama with experts in every layer. w1 is gate, w3 is up, w2 is down.

Knows: the architecture's layers and its checkpoint names. Does not know: how a layer computes, or how a stack runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch import nn

from models.config import FamilyConfig, ModelConfig
from models.config_reader import ConfigReader
from models.families.llama import Llama
from models.layers.attention import Attention
from models.layers.context import ModelContext
from models.layers.decoder import Decoder, DecoderLayer
from models.layers.moe import SparseMLP
from models.layers.norm import RMSNorm
from models.layers.rope import cos_sin_cache
from models.layers.routed_experts import EXPERT_KEYS, RoutedExperts, softmax_experts
from parallel.layers.embedding import LMHead, VocabParallelEmbedding


def _experts(config: Mapping[str, Any]) -> RoutedExperts:
    read = ConfigReader(config)
    layers, size = tuple(range(read.size("num_hidden_layers"))), read.size("intermediate_size")
    return softmax_experts(config, layers, size, count="num_local_experts", per_token=2, renormalise=True)


class Mixtral(Decoder):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        eps=1e-5, theta=1e6, kv_heads=8, reads=EXPERT_KEYS, experts=_experts
    )
    checkpoint_names: ClassVar = {
        **Llama.checkpoint_names,
        "layers.{}.mlp.router": ("model.layers.{}.block_sparse_moe.gate", "model.layers.{}.mlp.gate"),
        "layers.{}.mlp.experts.{}.gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
        "layers.{}.mlp.experts.{}.up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
        "layers.{}.mlp.experts.{}.down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
        "layers.{}.mlp.experts": "model.layers.{}.mlp.experts",  # fused: gate_up_proj and down_proj
    }

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        hidden = config.hidden_size
        norm = partial(RMSNorm, eps=config.rms_norm_eps, context=context)
        self.cos_sin_LR = cos_sin_cache(config.rope, config.rotary_dim, config.max_length)
        self.embedding = VocabParallelEmbedding(config.vocab_size, hidden, context)
        self.layers = nn.ModuleList(
            DecoderLayer(
                Attention(config, context, self.cos_sin_LR, norm(hidden)),
                SparseMLP(config, context, norm(hidden), layer=number),
            )
            for number in range(config.layers)
        )
        self.final_norm = norm(hidden)
        self.lm_head = LMHead(config.vocab_size, hidden, context, self.embedding if config.tied_embeddings else None)
