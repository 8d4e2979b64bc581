"""Mistral (Jiang et al. 2023): Llama without biases; in 7B v0.1 every layer has a sliding window.

Knows: that it differs from Llama in defaults, and in windows. Does not know: how a layer computes.
"""

from __future__ import annotations

from typing import ClassVar

from models.config import FamilyConfig
from models.families.llama import Llama


class Mistral(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        kv_heads=8, window=4096, full_every=0, layer_types=("full_attention", "sliding_attention")
    )
