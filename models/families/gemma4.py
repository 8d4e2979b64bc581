"""Gemma 4 (Gemma team 2026), the dense models' part that reads and writes text: Gemma 3 with heads of another size in
full layers, which may have keys alone, norms of values, a scalar a layer and soft-capped logits.

Knows: its checkpoint names, and the defaults of a config that says little. Does not know: layers (llama.py), images,
audio, experts, the embeddings and shared caches of E2B and E4B.
Reference: Gemma4ForCausalLM of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from models.attention_spec import AttentionSpec
from models.config import MOST_LAYERS, FamilyConfig, ModelConfig, Specs, architecture_of
from models.config_reader import ConfigReader, text_part
from models.families.gemma3 import NAMES, Gemma3, spellings
from models.layers.context import ModelContext
from models.layers.decoder import DecoderLayer, LayerScalar
from models.layers.qkv_edit import ValueNorm
from models.layers.rope import rope_from_parameters
from parallel.layers.shard import HeadShard

_SLIDING, _FULL = "sliding_attention", "full_attention"
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        _FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}


def _usual(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the oracle's defaults, the kind of each layer, the rope of full layers where others have theirs and that of
    sliding layers under '_sliding_rope', and sizes of full layers in two keys."""
    if architecture_of(config).endswith("ForConditionalGeneration"):
        config = text_part(config)
    given = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    layers = ConfigReader(given).size("num_hidden_layers", most=MOST_LAYERS)
    kinds = given.setdefault("layer_types", [_FULL if (n + 1) % 6 == 0 else _SLIDING for n in range(layers)])
    if isinstance(kinds, list) and kinds:
        given["layer_types"] = [*kinds[:-1], _FULL]  # as the oracle, whatever it says
    ropes = given["rope_parameters"]
    if not isinstance(ropes, dict) or not all(isinstance(ropes.get(kind), dict) for kind in (_SLIDING, _FULL)):
        raise ValueError(f"'rope_parameters' must have an object for {_SLIDING!r} and {_FULL!r}, not {ropes!r}")
    given["rope_parameters"], given["_sliding_rope"] = ropes[_FULL], {"rope_theta": 1e4, **ropes[_SLIDING]}
    return {**given, **_sizes_of_full_layers(given)}


def _sizes_of_full_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers writes 'per_layer_config', by the layer's number; published folders have the two keys."""
    said = config.get("per_layer_config")
    if said is None:
        own = {} if config.get("attention_k_eq_v") else {"num_global_key_value_heads": None}
        return {"global_head_dim": config.get("global_head_dim", 512), **own}
    numbers = [str(n) for n, kind in enumerate(config["layer_types"]) if kind == _FULL]
    if isinstance(said, dict):  # "05" of thirty layers
        said = {str(int(n)) if n.isdecimal() else n: sizes for n, sizes in said.items()}
    if not isinstance(said, dict) or sorted(said) != sorted(numbers) or any(said[n] != said[numbers[0]] for n in said):
        raise ValueError(f"'per_layer_config' must say the same of all full layers {numbers}, and no others: {said!r}")
    sizes = said[numbers[0]]
    if not isinstance(sizes, dict) or sizes.keys() - {"head_dim", "num_key_value_heads"}:
        raise ValueError(f"'per_layer_config' has {sizes!r}; only 'head_dim' and 'num_key_value_heads' are implemented")
    return {
        "global_head_dim": sizes.get("head_dim", config.get("head_dim", 256)),
        "num_global_key_value_heads": sizes.get("num_key_value_heads"),
    }


def _attention(config: Mapping[str, Any], specs: Specs) -> Specs:
    read = ConfigReader(config)
    heads, dim = read.size("num_attention_heads"), read.size("global_head_dim")
    kv_heads = read.size("num_global_key_value_heads", specs[0].kv_heads)
    if heads % kv_heads or dim % 2:
        raise ValueError(
            f"'num_attention_heads' {heads} is no multiple of 'num_global_key_value_heads' {kv_heads}, or "
            f"'global_head_dim' {dim} is odd"
        )
    keys_alone = read.flag("attention_k_eq_v")
    kinds = zip(specs, config["layer_types"], strict=True)
    return tuple(
        replace(spec, scale=1.0, value_norm=True, kv_heads=kv_heads, head_dim=dim, values_are_keys=keys_alone)
        if kind == _FULL
        else replace(spec, scale=1.0, value_norm=True, rope=1)
        for spec, kind in kinds
    )


def _more(config: Mapping[str, Any]) -> dict[str, Any]:
    local = rope_from_parameters(config["_sliding_rope"], config["max_position_embeddings"])
    softcap = ConfigReader(config).number("final_logit_softcapping", 0.0)
    if softcap < 0:
        raise ValueError(f"'final_logit_softcapping' must be a positive number, not {softcap!r}")
    return {"more_ropes": (local,), "logits_softcap": softcap or None}


class Gemma4(Gemma3):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        theta=1e6,
        head_dim=256,
        kv_heads=4,
        window=512,
        tied=True,
        full_every=6,
        qk_norms=True,
        layer_types=(_FULL, _SLIDING),
        reads=f"{' '.join(_DEFAULTS)} attention_k_eq_v final_logit_softcapping global_head_dim per_layer_config "
        "num_global_key_value_heads use_double_wide_mlp vocab_size_per_layer_input",
        neutral={
            "hidden_activation": (("gelu_pytorch_tanh",), "another activation"),
            "hidden_size_per_layer_input": ((0,), "embeddings of each layer, as of E2B and E4B"),
            "num_kv_shared_layers": ((0,), "layers that read the KV cache of another one, as of E2B and E4B"),
            "enable_moe_block": ((False,), "experts next to the MLP, as of 26B-A4B"),
            "use_bidirectional_attention": (("vision",), "attention to later tokens"),
        },
        usual=_usual,
        attention=_attention,
        more=_more,
    )
    unused_tensors: ClassVar[tuple[str, ...]] = tuple(
        f"{prefix}{part}."
        for prefix in ("", "model.")
        for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")
    )
    checkpoint_names: ClassVar = {
        part: spellings(name) for part, name in {**NAMES, "layers.{}.scalar": "model.layers.{}"}.items()
    }
    zero_centred: ClassVar[bool] = False

    def _layer(self, config: ModelConfig, context: ModelContext, number: int) -> DecoderLayer:
        layer = super()._layer(config, context, number)
        layer.scalar = LayerScalar(context)
        return layer

    def _edit(
        self, config: ModelConfig, context: ModelContext, heads: HeadShard, spec: AttentionSpec
    ) -> nn.Module | None:
        return ValueNorm(heads, spec.head_dim, config.rms_norm_eps, from_keys=spec.values_are_keys)
