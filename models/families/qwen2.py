"""Qwen2 and Qwen2.5 (Qwen team 2024): Llama with biases on the query, key and value projections.

Knows: the architecture's switches and its checkpoint names. Does not know: anything else.
"""

from __future__ import annotations

from typing import ClassVar

from models.config import ModelConfig
from models.families.llama import Llama
from models.layers.decoder import Decoder, Switches


class Qwen2(Decoder):
    checkpoint_names: ClassVar = Llama.checkpoint_names

    @staticmethod
    def switches(config: ModelConfig) -> Switches:
        return Switches(qkv_bias=True)
