"""SmolLM3 (Hugging Face 2025): Llama without rotation in every fourth layer.

Knows: its config. Does not know: layers and checkpoint names (llama.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from models.config import MOST_LAYERS, FamilyConfig, Specs
from models.config_reader import ConfigReader
from models.families.llama import Llama
from models.families.qwen2 import slides


def _usual(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the oracle's defaults: which layers rotate (1) or not (0), and that the latter have a window, if any."""
    read = ConfigReader(config)
    layers, every = read.size("num_hidden_layers", most=MOST_LAYERS), read.size("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers")
    if rotated is None:
        rotated = [int((n + 1) % every != 0) for n in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or any(one not in (0, 1) for one in rotated):
        raise ValueError(f"'no_rope_layers' must list 0 or 1 for each of {layers} layers, not {rotated!r}")
    slides = read.flag("use_sliding_window")
    kinds = ["full_attention" if on or not slides else "sliding_attention" for on in rotated[:layers]]
    found = {key: value for key, value in config.items() if value is not None}
    return {"layer_types": kinds, **found, "no_rope_layers": rotated[:layers], "use_sliding_window": slides}


def _without_rope(config: Mapping[str, Any], specs: Specs) -> Specs:
    pairs = zip(specs, config["no_rope_layers"], strict=True)
    return tuple(spec if rotates else replace(spec, rope=None) for spec, rotates in pairs)


class SmolLM3(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        theta=2e6,
        kv_heads=4,
        tied=True,
        full_every=0,
        layer_types=("full_attention", "sliding_attention"),
        reads="no_rope_layers no_rope_layer_interval",
        slides=slides,
        usual=_usual,
        attention=_without_rope,
    )
