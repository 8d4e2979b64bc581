"""Qwen3-MoE (Qwen team 2025): Qwen3 with experts in most layers.

Knows: the architecture's switches and its checkpoint names. Does not know: anything else.
"""

from __future__ import annotations

from typing import ClassVar

from models.config import ModelConfig
from models.families.qwen3 import Qwen3
from models.layers.decoder import Decoder, Switches


class Qwen3Moe(Decoder):
    checkpoint_names: ClassVar = {
        **Qwen3.checkpoint_names,
        "layers.{}.mlp.router": "model.layers.{}.mlp.gate",
        "layers.{}.mlp.experts.{}.gate": "model.layers.{}.mlp.experts.{}.gate_proj",
        "layers.{}.mlp.experts.{}.up": "model.layers.{}.mlp.experts.{}.up_proj",
        "layers.{}.mlp.experts.{}.down": "model.layers.{}.mlp.experts.{}.down_proj",
        "layers.{}.mlp.experts": "model.layers.{}.mlp.experts",  # fused: gate_up_proj and down_proj
    }

    @staticmethod
    def switches(config: ModelConfig) -> Switches:
        return Switches(qkv_bias=config.attention_bias, output_bias=config.attention_bias, head_norm=True)
