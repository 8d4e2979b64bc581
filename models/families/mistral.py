"""Mistral (Jiang et al. 2023), 7B from v0.2 on and what followed: Llama without sliding windows and biases.

Knows: that it differs from Llama in defaults alone. Does not know: how a layer computes.
"""

from __future__ import annotations

from typing import ClassVar

from models.config import FamilyConfig
from models.families.llama import Llama


class Mistral(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(kv_heads=8, window=4096)
