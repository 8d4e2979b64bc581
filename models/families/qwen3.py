"""Qwen3, dense (Qwen team 2025): Llama with an RMSNorm on every query and key head instead of biases.

Knows: the architecture's layers and its checkpoint names. Does not know: how a layer computes, or how a stack runs.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from torch import nn

from models.config import FamilyConfig, ModelConfig
from models.families.llama import Llama
from models.families.qwen2 import slides
from models.layers.attention import Attention
from models.layers.context import ModelContext
from models.layers.decoder import Decoder, DecoderLayer, MTPLayout
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.layers.rope import cos_sin_cache
from parallel.layers.embedding import LMHead, VocabParallelEmbedding


class Qwen3(Decoder):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(head_dim=128, kv_heads=32, qk_norms=True, slides=slides)
    mtp_layout: ClassVar[MTPLayout | None] = "nextn"
    checkpoint_names: ClassVar = {
        **Llama.checkpoint_names,
        "layers.{}.mixer.q_norm": "model.layers.{}.self_attn.q_norm",
        "layers.{}.mixer.k_norm": "model.layers.{}.self_attn.k_norm",
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
                GatedMLP(config, context, norm(hidden)),
            )
            for _ in range(config.layers)
        )
        self.final_norm = norm(hidden)
        self.lm_head = LMHead(config.vocab_size, hidden, context, self.embedding if config.tied_embeddings else None)
