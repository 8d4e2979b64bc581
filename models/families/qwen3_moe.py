"""Qwen3-MoE (Qwen team 2025): Qwen3 with experts in most layers.

Knows: the architecture's layers and its checkpoint names. Does not know: how a layer computes, or how a stack runs.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.families.qwen3 import Qwen3
from models.layers.attention import Attention
from models.layers.context import ModelContext
from models.layers.decoder import Decoder, DecoderLayer, MTPLayout
from models.layers.mlp import GatedMLP
from models.layers.moe import SparseMLP
from models.layers.norm import RMSNorm
from models.layers.rope import cos_sin_cache
from parallel.layers.embedding import LMHead, VocabParallelEmbedding


class Qwen3Moe(Decoder):
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
