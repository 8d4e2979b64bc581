"""Qwen2 and Qwen2.5 (Qwen team 2024): Llama with biases on the query, key and value projections.

Knows: how it differs from Llama: its config and its checkpoint names. Does not know: layers (llama.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from models.config import FamilyConfig
from models.config_reader import ConfigReader
from models.families.llama import Llama


def slides(config: Mapping[str, Any]) -> bool:
    """Whether a layer has a window: those from 'max_window_layers' on, unless 'layer_types' says something else."""
    read = ConfigReader(config)
    some = read.number("max_window_layers", 0) < read.number("num_hidden_layers", 0)
    return bool(config.get("use_sliding_window")) and some and not config.get("layer_types")


def _biases(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_bias": True, "output_bias": False}


class Qwen2(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(kv_heads=32, slides=slides, more=_biases)
