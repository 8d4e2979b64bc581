"""Llama 2 and 3 (Touvron et al. 2023, Llama team 2024): the plain decoder; biases where the config asks for them.

Knows: the architecture's layers and its checkpoint names. Does not know: how a layer computes, or how a stack runs.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from torch import nn

from models.config import ModelConfig
from models.layers.attention import Attention
from models.layers.context import ModelContext
from models.layers.decoder import Decoder, DecoderLayer
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.layers.rope import cos_sin_cache
from parallel.layers.embedding import LMHead, VocabParallelEmbedding


class Llama(Decoder):
    checkpoint_names: ClassVar = {
        "embedding": "model.embed_tokens",
        "layers.{}.mixer.norm": "model.layers.{}.input_layernorm",
        "layers.{}.mixer.qkv.q": "model.layers.{}.self_attn.q_proj",
        "layers.{}.mixer.qkv.k": "model.layers.{}.self_attn.k_proj",
        "layers.{}.mixer.qkv.v": "model.layers.{}.self_attn.v_proj",
        "layers.{}.mixer.output": "model.layers.{}.self_attn.o_proj",
        "layers.{}.mlp.norm": "model.layers.{}.post_attention_layernorm",
        "layers.{}.mlp.gate_up.gate": "model.layers.{}.mlp.gate_proj",
        "layers.{}.mlp.gate_up.up": "model.layers.{}.mlp.up_proj",
        "layers.{}.mlp.down": "model.layers.{}.mlp.down_proj",
        "final_norm": "model.norm",
        "lm_head": "lm_head",
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
                    qkv_bias=bias,
                    output_bias=bias,
                    spec=config.attention_of(number),
                ),
                GatedMLP(config, context, norm(hidden), bias=config.mlp_bias),
            )
            for number in range(config.layers)
        )
        self.final_norm = norm(hidden)
        self.lm_head = LMHead(config.vocab_size, hidden, context, self.embedding if config.tied_embeddings else None)
