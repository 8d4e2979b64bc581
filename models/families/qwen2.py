"""Qwen2 and Qwen2.5 (Qwen team 2024): Llama with biases on the query, key and value projections.

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
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.layers.rope import cos_sin_cache
from parallel.layers.embedding import LMHead, VocabParallelEmbedding


def slides(config: Mapping[str, Any]) -> bool:
    """Whether a layer has a window: those from 'max_window_layers' on, unless 'layer_types' says something else."""
    read = ConfigReader(config)
    some = read.number("max_window_layers", 0) < read.number("num_hidden_layers", 0)
    return bool(config.get("use_sliding_window")) and some and not config.get("layer_types")


class Qwen2(Decoder):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(kv_heads=32, slides=slides)
    checkpoint_names: ClassVar = Llama.checkpoint_names

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        hidden = config.hidden_size
        norm = partial(RMSNorm, eps=config.rms_norm_eps, context=context)
        self.cos_sin_LR = cos_sin_cache(config.rope, config.rotary_dim, config.max_length)
        self.embedding = VocabParallelEmbedding(config.vocab_size, hidden, context)
        self.layers = nn.ModuleList(
            DecoderLayer(
                Attention(config, context, self.cos_sin_LR, norm(hidden), qkv_bias=True),
                GatedMLP(config, context, norm(hidden)),
            )
            for _ in range(config.layers)
        )
        self.final_norm = norm(hidden)
        self.lm_head = LMHead(config.vocab_size, hidden, context, self.embedding if config.tied_embeddings else None)
