"""Mixtral (Jiang et al. 2024): Llama with experts in every layer. w1 is gate, w3 is up, w2 is down.

Knows: the architecture's checkpoint names. Does not know: anything else.
"""

from __future__ import annotations

from typing import ClassVar

from models.config import ModelConfig
from models.families.llama import Llama
from models.layers.decoder import Decoder, Switches


class Mixtral(Decoder):
    checkpoint_names: ClassVar = {
        **Llama.checkpoint_names,
        "layers.{}.mlp.router": ("model.layers.{}.block_sparse_moe.gate", "model.layers.{}.mlp.gate"),
        "layers.{}.mlp.experts.{}.gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
        "layers.{}.mlp.experts.{}.up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
        "layers.{}.mlp.experts.{}.down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
        "layers.{}.mlp.experts": "model.layers.{}.mlp.experts",  # fused: gate_up_proj and down_proj
    }

    @staticmethod
    def switches(config: ModelConfig) -> Switches:
        return Switches()
