"""Gemma 3 (Gemma team 2025), the part that reads and writes text: sandwich norms, five sliding layers to a full one.

Knows: its checkpoint names, and the defaults of a config that says little. Does not know: layers (llama.py), images.
Reference: Gemma3ForCausalLM of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from models.config import FamilyConfig, ModelConfig, Specs, architecture_of
from models.config_reader import ConfigReader, text_part
from models.families.llama import Llama
from models.layers.context import ModelContext
from models.layers.rope import nested_parameters, rope_from_parameters

_SLIDING, _FULL = "sliding_attention", "full_attention"
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6,
}


def _usual(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the oracle's defaults, the kind of each layer, and the rope of full layers where others have theirs; that of
    sliding layers under '_sliding_rope'."""
    if architecture_of(config).endswith("ForConditionalGeneration"):
        config = text_part(config)
    given = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    read = ConfigReader(given)
    layers, every = read.size("num_hidden_layers"), read.size("sliding_window_pattern")
    given.setdefault("layer_types", [_SLIDING if (n + 1) % every else _FULL for n in range(layers)])
    nested = nested_parameters(given, (_SLIDING, _FULL))
    local = {"rope_type": "default", "rope_theta": read.number("rope_local_base_freq", 1e4)}
    given["_sliding_rope"] = {**local, **nested.get(_SLIDING, {})}
    if nested:
        given["rope_parameters"] = nested.get(_FULL, {"rope_type": "default"})
        given.pop("rope_scaling", None)
    return given


def _attention(config: Mapping[str, Any], specs: Specs) -> Specs:
    """Each kind of layer has its own rope; scores have a separate scale."""
    scale = ConfigReader(config).number("query_pre_attn_scalar", 256) ** -0.5
    kinds = zip(specs, config["layer_types"], strict=True)
    return tuple(replace(spec, scale=scale, rope=int(kind == _SLIDING)) for spec, kind in kinds)


def _more(config: Mapping[str, Any]) -> dict[str, Any]:
    local = rope_from_parameters(config["_sliding_rope"], config["max_position_embeddings"])
    return {"more_ropes": (local,)}


def spellings(name: str) -> tuple[str, ...]:
    """Alone, and as the text part of a model for images, of transformers 5 and 4."""
    inner = name.removeprefix("model.")
    both = f"model.language_model.{inner}" if inner != name else name
    return name, both, f"language_model.{name}"


NAMES: dict[str, str] = {
    **Llama.checkpoint_names,
    "layers.{}.mixer.q_norm": "model.layers.{}.self_attn.q_norm",
    "layers.{}.mixer.k_norm": "model.layers.{}.self_attn.k_norm",
    "layers.{}.mixer_post": "model.layers.{}.post_attention_layernorm",
    "layers.{}.mlp.norm": "model.layers.{}.pre_feedforward_layernorm",
    "layers.{}.mlp_post": "model.layers.{}.post_feedforward_layernorm",
}


class Gemma3(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        theta=1e6,
        head_dim=256,
        kv_heads=4,
        window=4096,
        tied=True,
        full_every=6,
        qk_norms=True,
        layer_types=(_FULL, _SLIDING),
        neutral={"hidden_activation": (("gelu_pytorch_tanh",), "another activation")},
        reads=f"{' '.join(_DEFAULTS)} cache_implementation",
        usual=_usual,
        attention=_attention,
        more=_more,
    )
    unused_tensors: ClassVar[tuple[str, ...]] = (
        *("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    )
    checkpoint_names: ClassVar = {part: spellings(name) for part, name in NAMES.items()}

    post_norms: ClassVar[bool] = True
    zero_centred: ClassVar[bool] = True
    gelu: ClassVar[bool] = True

    def _embedding_scale(self, config: ModelConfig, context: ModelContext) -> float:
        return float(torch.tensor(config.hidden_size**0.5, dtype=context.dtype, device="cpu"))
