"""Llama 2 and 3 (Touvron et al. 2023, Llama team 2024): the plain decoder. Of other families also with biases, norms of
queries and keys, and experts, where their ModelConfig has them.

Knows: the architecture's layers and its checkpoint names. Does not know: how a layer computes, or how a stack runs.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from torch import nn

from models.config import ModelConfig
from models.layers.attention import Attention
from models.layers.context import ModelContext
from models.layers.decoder import Decoder, DecoderLayer
from models.layers.mlp import GatedMLP
from models.layers.moe import SparseMLP
from models.layers.norm import RMSNorm
from models.layers.rope import cos_sin_cache
from parallel.layers.embedding import LMHead, VocabParallelEmbedding
from parallel.layers.shard import HeadShard


class Llama(Decoder):
    checkpoint_names: ClassVar[dict[str, Any]] = {
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
        self.cos_sin_LR = cos_sin_cache(config.rope, config.rotary_dim, config.max_length)
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, context)
        self.layers = nn.ModuleList(
            DecoderLayer(self._attention(config, context, number), self._mlp(config, context, number))
            for number in range(config.layers)
        )
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)
        shared = self.embedding if config.tied_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, context, shared)

    def _attention(self, config: ModelConfig, context: ModelContext, number: int) -> Attention:
        norm = partial(RMSNorm, eps=config.rms_norm_eps, context=context)
        q_norm, k_norm = (norm(config.head_dim) if config.qk_norms else None for _ in range(2))
        return Attention(
            config,
            context,
            self.cos_sin_LR,
            norm(config.hidden_size),
            q_norm=q_norm,
            k_norm=k_norm,
            qkv_bias=config.attention_bias,
            output_bias=config.output_bias,
            spec=config.attention_of(number),
            edit=self._edit(config, context, HeadShard(config.heads, config.kv_heads, context.rank, context.size)),
        )

    def _edit(self, config: ModelConfig, context: ModelContext, heads: HeadShard) -> nn.Module | None:
        """Of queries and keys, before they are rotated."""
        return None

    def _mlp(self, config: ModelConfig, context: ModelContext, number: int) -> GatedMLP | SparseMLP:
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)
        if config.has_experts(number):
            return SparseMLP(config, context, norm, layer=number)
        return GatedMLP(config, context, norm, bias=config.mlp_bias)
