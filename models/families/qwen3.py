"""Qwen3, dense (Qwen team 2025): Llama with an RMSNorm on every query and key head instead of biases.

Knows: the architecture's switches and its checkpoint names. Does not know: anything else.
"""

from __future__ import annotations

from typing import ClassVar

from models.config import ModelConfig
from models.families.llama import Llama
from models.layers.decoder import Decoder, Switches


class Qwen3(Decoder):
    checkpoint_names: ClassVar = {
        **Llama.checkpoint_names,
        "layers.{}.attention.q_norm": "model.layers.{}.self_attn.q_norm",
        "layers.{}.attention.k_norm": "model.layers.{}.self_attn.k_norm",
    }

    @staticmethod
    def switches(config: ModelConfig) -> Switches:
        return Switches(qkv_bias=config.attention_bias, output_bias=config.attention_bias, head_norm=True)
