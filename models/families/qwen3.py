"""Qwen3, dense (Qwen team 2025): Llama with an RMSNorm on every query and key head instead of biases.

Knows: how it differs from Llama: its config and its checkpoint names. Does not know: layers (llama.py).
"""

from __future__ import annotations

from typing import ClassVar

from models.config import FamilyConfig
from models.families.llama import Llama
from models.families.qwen2 import slides, with_layer_types
from models.layers.decoder import MTPLayout


class Qwen3(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        head_dim=128,
        kv_heads=32,
        window=4096,
        full_every=0,
        layer_types=("full_attention", "sliding_attention"),
        qk_norms=True,
        slides=slides,
        usual=with_layer_types,
    )
    mtp_layout: ClassVar[MTPLayout | None] = "nextn"
    checkpoint_names: ClassVar = {
        **Llama.checkpoint_names,
        "layers.{}.mixer.q_norm": "model.layers.{}.self_attn.q_norm",
        "layers.{}.mixer.k_norm": "model.layers.{}.self_attn.k_norm",
    }
