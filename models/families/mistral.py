"""Mistral (Jiang et al. 2023), 7B, in v0.1 with a sliding window in every layer, and what followed: Nemo, Small,
Devstral, Magistral; Ministral 3, which scales queries by position. Of models that read images, too, the text part.

Knows: its config and its checkpoint names. Does not know: layers (llama.py), or images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from models.attention_spec import AttentionSpec
from models.config import FamilyConfig, ModelConfig, architecture_of
from models.config_reader import ConfigReader, text_part
from models.families.llama import Llama
from models.layers.context import ModelContext
from models.layers.qkv_edit import QueryScale, position_factors
from parallel.layers.shard import HeadShard

_BETA = "llama_4_scaling_beta"
_TEXT = ("mistral", "ministral3")
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}  # of Ministral 3


def _usual(config: Mapping[str, Any]) -> dict[str, Any]:
    """Ministral 3 writes the scale of its queries among the parameters of the rotation, and its whole context, too.
    Of 'layer_types' transformers reads only Ministral's."""
    found = dict(config)
    if architecture_of(config).endswith("ForConditionalGeneration"):
        found = text_part(config)
        if found.get("model_type", "mistral") not in _TEXT:
            raise ValueError(
                f"'model_type' of 'text_config' is {found['model_type']!r}, but only {' and '.join(_TEXT)} are known"
            )
    if "Ministral3" in architecture_of(config) or found.get("model_type") == "ministral3":
        found = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "head_dim": 128, "sliding_window": None, **found}
        if not (found.get("rope_parameters") or found.get("rope_scaling")):
            found["rope_parameters"] = _YARN
    if architecture_of(config) != "MinistralForCausalLM":
        found["layer_types"] = None
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(given := found.get(key), dict):
            found[key] = {name: value for name, value in given.items() if name != "max_position_embeddings"}
            found[_BETA] = found[key].pop(_BETA, found.get(_BETA))
            if found[_BETA] is not None:
                found["original_max_position_embeddings"] = given.get("original_max_position_embeddings")
    return found


def _more(config: Mapping[str, Any]) -> dict[str, Any]:
    read = ConfigReader(config)
    if config.get(_BETA) is None:
        return {}
    return {"query_scale": (read.number(_BETA, 0.0), read.size("original_max_position_embeddings"))}


def _spellings(name: str) -> tuple[str, ...]:
    """By itself, and with a vision tower: as published, and as transformers 5 holds it."""
    inner = name.removeprefix("model.")
    return name, f"language_model.{name}", name if inner == name else f"model.language_model.{inner}"


class Mistral(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        kv_heads=8,
        window=4096,
        full_every=0,
        layer_types=("full_attention", "sliding_attention"),
        reads=_BETA,
        usual=_usual,
        more=_more,
    )
    checkpoint_names: ClassVar = {part: _spellings(str(name)) for part, name in Llama.checkpoint_names.items()}
    unused_tensors: ClassVar[tuple[str, ...]] = tuple(
        f"{prefix}{part}." for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
    )

    def _edit(
        self, config: ModelConfig, context: ModelContext, heads: HeadShard, spec: AttentionSpec
    ) -> nn.Module | None:
        if config.query_scale is None:
            return None
        if not hasattr(self, "factors_L"):
            self.factors_L = position_factors(*config.query_scale, config.max_length)
        return QueryScale(self.factors_L, heads.local_heads * config.head_dim)
