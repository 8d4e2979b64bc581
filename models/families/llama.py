"""Llama 2 and 3 (Touvron et al. 2023, Llama team 2024): the plain decoder. Of other families also with biases, norms of
queries and keys, experts and scales, where their ModelConfig has them, and with norms in other places.

Knows: the architecture's layers and its checkpoint names. Does not know: how a layer computes, or how a stack runs.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from torch import nn

from models.attention_spec import AttentionSpec
from models.config import ModelConfig
from models.layers.attention import Attention
from models.layers.context import ModelContext
from models.layers.decoder import Decoder, DecoderLayer
from models.layers.mixer import Mixer
from models.layers.mlp import GatedMLP
from models.layers.moe import SparseMLP
from models.layers.norm import ResidualAdd, RMSNorm
from models.layers.rope import rotary_tables
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

    pre_norms: ClassVar[bool] = True  # of what a mixer or an MLP reads
    post_norms: ClassVar[bool] = False  # of what it adds
    zero_centred: ClassVar[bool] = False  # norms, in the checkpoint
    gelu: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        vocabulary, hidden = config.vocab_size, config.hidden_size
        specs = [config.attention_of(number) for number in range(config.layers)]
        unrotated = any(spec.rope is None for spec in specs)
        parts = {spec.rope: config.rotary_dim * spec.head_dim // config.head_dim for spec in specs}
        dims = [parts.get(number, config.rotary_dim) for number in range(len(config.ropes))]
        self.tables = rotary_tables(config.ropes, dims, config.max_length, unrotated=unrotated)
        self.cos_sin_LR = self.tables[0]
        self.embedding = VocabParallelEmbedding(vocabulary, hidden, context, self._embedding_scale(config, context))
        self.layers = nn.ModuleList(self._layer(config, context, number) for number in range(config.layers))
        self.final_norm = self._norm(config, context, hidden)
        shared = self.embedding if config.tied_embeddings else None
        scale, softcap = config.logits_scale, config.logits_softcap
        self.lm_head = LMHead(vocabulary, hidden, context, shared, scale=scale, softcap=softcap)

    def _embedding_scale(self, config: ModelConfig, context: ModelContext) -> float:
        return config.embedding_scale / config.residual_scale

    def _norm(self, config: ModelConfig, context: ModelContext, size: int) -> RMSNorm:
        """Of a residual stream divided by ``residual_scale``, which multiplies what layers add in the checkpoint."""
        eps = config.rms_norm_eps / config.residual_scale**2
        return RMSNorm(size, eps, context, zero_centred=self.zero_centred)

    def _layer(self, config: ModelConfig, context: ModelContext, number: int) -> DecoderLayer:
        post = partial(self._norm, config, context, config.hidden_size)
        return DecoderLayer(
            self._mixer(config, context, number),
            self._mlp(config, context, number),
            mixer_post=post() if self.post_norms else None,
            mlp_post=post() if self.post_norms else None,
        )

    def _before(self, config: ModelConfig, context: ModelContext) -> RMSNorm | ResidualAdd:
        """In front of a mixer or an MLP."""
        if self.pre_norms:
            return self._norm(config, context, config.hidden_size)
        return ResidualAdd(config.rms_norm_eps, context)

    def _mixer(self, config: ModelConfig, context: ModelContext, number: int) -> Mixer[Any]:
        spec = config.attention_of(number)
        q_norm, k_norm = (self._norm(config, context, spec.head_dim) if config.qk_norms else None for _ in range(2))
        return Attention(
            config, context, self.tables[spec.rope], self._before(config, context),
            q_norm=q_norm, k_norm=k_norm, qkv_bias=config.attention_bias, output_bias=config.output_bias, spec=spec,
            edit=self._edit(config, context, HeadShard(config.heads, spec.kv_heads, context.rank, context.size), spec),
        )  # fmt: skip

    def _edit(
        self, config: ModelConfig, context: ModelContext, heads: HeadShard, spec: AttentionSpec
    ) -> nn.Module | None:
        """Of queries and keys, before they are rotated."""
        return None

    def _mlp(self, config: ModelConfig, context: ModelContext, number: int) -> GatedMLP | SparseMLP:
        if config.has_experts(number):
            return SparseMLP(config, context, self._norm(config, context, config.hidden_size), layer=number)
        return GatedMLP(config, context, self._before(config, context), bias=config.mlp_bias, gelu=self.gelu)
