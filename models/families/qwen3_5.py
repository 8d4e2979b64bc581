"""Qwen3.5, dense and sparse, the part that reads and writes text (Qwen team 2026): Qwen3-Next with other tensors.

Knows: how its checkpoints name and cut tensors: those with a vision tower put the text part under language_model.
Does not know: layers (qwen3_next.py), or images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from models.config import FamilyConfig, architecture_of
from models.config_reader import ConfigReader, text_part
from models.families.qwen3_next import NEXT_CONFIG, Qwen3Next, experts_with_a_shared_one
from models.layers.delta_config import usual_delta_keys
from models.layers.routed_experts import RoutedExperts

_NAMES: dict[str, str] = {
    **Qwen3Next.checkpoint_names,
    "layers.{}.mixer.projection.qkv": "model.layers.{}.linear_attn.in_proj_qkv",
    "layers.{}.mixer.projection.z": "model.layers.{}.linear_attn.in_proj_z",
    "layers.{}.mixer.projection.b": "model.layers.{}.linear_attn.in_proj_b",
    "layers.{}.mixer.projection.a": "model.layers.{}.linear_attn.in_proj_a",
}


def _below_language_model(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def _usual(config: Mapping[str, Any]) -> dict[str, Any]:
    name = architecture_of(config)
    text = text_part(config) if name.endswith("ForConditionalGeneration") else config
    return {"num_key_value_heads": 2 if "Moe" in name else 4, **usual_delta_keys(text)}


def _experts(config: Mapping[str, Any]) -> RoutedExperts | None:
    """Every layer is sparse, and weights are always renormalised."""
    if "Moe" not in architecture_of(config):
        return None
    if config.get("norm_topk_prob") is False:
        raise ValueError("'norm_topk_prob' is False, but this family always renormalises: only True is implemented")
    return experts_with_a_shared_one(config, tuple(range(ConfigReader(config).size("num_hidden_layers"))))


class Qwen35(Qwen3Next):
    family_config: ClassVar[FamilyConfig] = replace(NEXT_CONFIG, usual=_usual, experts=_experts)
    checkpoint_names: ClassVar[dict[str, Any]] = {
        part: (name, _below_language_model(name)) for part, name in _NAMES.items()
    }
    unused_tensors: ClassVar[tuple[str, ...]] = ("mtp.", "model.visual.")
    interleaved: ClassVar[bool] = False
