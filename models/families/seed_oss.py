"""Seed-OSS (ByteDance Seed team 2025): Llama with biases on queries, keys and values, and heads of any size.

Knows: its config. Does not know: layers and checkpoint names (llama.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from models.config import FamilyConfig
from models.config_reader import ConfigReader
from models.families.llama import Llama


def _biases(config: Mapping[str, Any]) -> dict[str, Any]:
    read = ConfigReader(config)
    return {
        "attention_bias": read.flag("attention_bias", default=True),
        "output_bias": read.flag("attention_out_bias"),
    }


class SeedOss(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        head_dim=128, kv_heads=8, reads="attention_out_bias residual_dropout", more=_biases
    )
