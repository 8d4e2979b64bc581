"""Llama 2 and 3 (Touvron et al. 2023, Llama team 2024): the plain decoder; biases where the config asks for them.

Knows: the architecture's switches and its checkpoint names. Does not know: anything else.
"""

from __future__ import annotations

from typing import ClassVar

from models.config import ModelConfig
from models.layers.decoder import Decoder, Switches


class Llama(Decoder):
    checkpoint_names: ClassVar = {
        "embedding": "model.embed_tokens",
        "layers.{}.attention.norm": "model.layers.{}.input_layernorm",
        "layers.{}.attention.qkv.q": "model.layers.{}.self_attn.q_proj",
        "layers.{}.attention.qkv.k": "model.layers.{}.self_attn.k_proj",
        "layers.{}.attention.qkv.v": "model.layers.{}.self_attn.v_proj",
        "layers.{}.attention.output": "model.layers.{}.self_attn.o_proj",
        "layers.{}.mlp.norm": "model.layers.{}.post_attention_layernorm",
        "layers.{}.mlp.gate_up.gate": "model.layers.{}.mlp.gate_proj",
        "layers.{}.mlp.gate_up.up": "model.layers.{}.mlp.up_proj",
        "layers.{}.mlp.down": "model.layers.{}.mlp.down_proj",
        "final_norm": "model.norm",
        "lm_head": "lm_head",
    }

    @staticmethod
    def switches(config: ModelConfig) -> Switches:
        return Switches(qkv_bias=config.attention_bias, output_bias=config.attention_bias, mlp_bias=config.mlp_bias)
