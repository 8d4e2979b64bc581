"""Qwen3.5, dense and sparse, the part that reads and writes text (Qwen team 2026): Qwen3-Next with other tensors.

Knows: how its checkpoints name and cut tensors: those with a vision tower put the text part under language_model.
Does not know: layers (qwen3_next.py), or images.
"""

from __future__ import annotations

from typing import Any, ClassVar

from models.families.qwen3_next import Qwen3Next

_NAMES: dict[str, str] = {
    **Qwen3Next.checkpoint_names,
    "layers.{}.mixer.projection.qkv": "model.layers.{}.linear_attn.in_proj_qkv",
    "layers.{}.mixer.projection.z": "model.layers.{}.linear_attn.in_proj_z",
    "layers.{}.mixer.projection.b": "model.layers.{}.linear_attn.in_proj_b",
    "layers.{}.mixer.projection.a": "model.layers.{}.linear_attn.in_proj_a",
}


def _below_language_model(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


class Qwen35(Qwen3Next):
    checkpoint_names: ClassVar[dict[str, Any]] = {
        part: (name, _below_language_model(name)) for part, name in _NAMES.items()
    }
    unused_tensors: ClassVar[tuple[str, ...]] = ("mtp.", "model.visual.")
    interleaved: ClassVar[bool] = False
