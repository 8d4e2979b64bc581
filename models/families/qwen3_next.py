"""Qwen3-Next (Qwen team 2025): gated delta nets, gated attention in every fourth layer, experts and a shared expert.

Knows: the architecture's layers and its checkpoint names. Does not know: how a layer computes, or how a stack runs.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from torch import nn

from models.config import ModelConfig
from models.families.qwen3_moe import Qwen3Moe
from models.layers.attention import Attention
from models.layers.context import ModelContext
from models.layers.decoder import Decoder, DecoderLayer, MTPLayout
from models.layers.gated_delta import GatedDeltaNet
from models.layers.mlp import GatedMLP
from models.layers.moe import SparseMLP
from models.layers.norm import RMSNorm
from models.layers.rope import cos_sin_cache
from parallel.layers.embedding import LMHead, VocabParallelEmbedding


class Qwen3Next(Decoder):
    checkpoint_names: ClassVar[dict[str, Any]] = {
        **Qwen3Moe.checkpoint_names,
        "layers.{}.mixer.projection.qkvz": "model.layers.{}.linear_attn.in_proj_qkvz",
        "layers.{}.mixer.projection.ba": "model.layers.{}.linear_attn.in_proj_ba",
        "layers.{}.mixer.conv": "model.layers.{}.linear_attn.conv1d",
        "layers.{}.mixer.out_projection": "model.layers.{}.linear_attn.out_proj",
        "layers.{}.mixer.recurrence": "model.layers.{}.linear_attn",  # A_log and dt_bias
        "layers.{}.mixer.recurrence.norm": "model.layers.{}.linear_attn.norm",
        "layers.{}.mlp.shared.gate_up.gate": "model.layers.{}.mlp.shared_expert.gate_proj",
        "layers.{}.mlp.shared.gate_up.up": "model.layers.{}.mlp.shared_expert.up_proj",
        "layers.{}.mlp.shared.down": "model.layers.{}.mlp.shared_expert.down_proj",
        "layers.{}.mlp.shared.gate": "model.layers.{}.mlp.shared_expert_gate",
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
                config,
                context,
                self.cos_sin_LR,
                norm(hidden),
                q_norm=norm(config.head_dim),
                k_norm=norm(config.head_dim),
                qkv_bias=bias,
                output_bias=bias,
                output_gate=True,
            )
        sparse = config.has_experts(number)
        mlp = (
            SparseMLP(config, context, norm(hidden), layer=number)
            if sparse
            else GatedMLP(config, context, norm(hidden))
        )
        return DecoderLayer(mixer, mlp)
