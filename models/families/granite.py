"""Granite 3 and 4 (IBM Granite team 2025): Llama with factors of embeddings, scores, what layers add, and logits; with
experts in GraniteMoe's names, and a shared expert; Mamba-2 in the place of most attention in Granite 4.

Knows: its configs and its checkpoint names. Does not know: layers (llama.py, mamba2.py).
Reference: GraniteForCausalLM, GraniteMoe..., GraniteMoeShared... and GraniteMoeHybridForCausalLM of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from models.block_pattern import MAMBA_KEYS, read_mamba2, require_unlimited
from models.config import MOST_LAYERS, FamilyConfig, ModelConfig, Specs
from models.config_reader import ConfigReader, refuse_others
from models.families.llama import Llama
from models.families.mixtral import Mixtral
from models.layers.context import ModelContext
from models.layers.mamba2 import Mamba2
from models.layers.mixer import Mixer
from models.layers.routed_experts import EXPERT_KEYS, RoutedExperts, softmax_experts

_MULTIPLIERS = "embedding_multiplier attention_multiplier residual_multiplier logits_scaling"
_MAMBA, _FULL = "linear_attention", "full_attention"
_KINDS = {"mamba": _MAMBA, "attention": _FULL, _MAMBA: _MAMBA, _FULL: _FULL}


def _factor(config: Mapping[str, Any], key: str) -> float:
    found = ConfigReader(config).number(key, 1.0)
    if found <= 0:
        raise ValueError(f"{key!r} must be a positive number, not {found!r}")
    return found


def _attention(config: Mapping[str, Any], specs: Specs) -> Specs:
    return tuple(replace(spec, scale=_factor(config, "attention_multiplier")) for spec in specs)


def _more(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "embedding_scale": _factor(config, "embedding_multiplier"),
        "residual_scale": _factor(config, "residual_multiplier"),
        "logits_scale": 1.0 / _factor(config, "logits_scaling"),
    }


def _experts(config: Mapping[str, Any]) -> RoutedExperts | None:
    read, key = ConfigReader(config), "shared_intermediate_size"
    if config.get("num_local_experts") == 0:
        return None
    layers, size = tuple(range(read.size("num_hidden_layers"))), read.size("intermediate_size")
    given = {"num_local_experts": 8, **config}
    found = softmax_experts(given, layers, size, count="num_local_experts", per_token=2, renormalise=True)
    return replace(found, shared_size=read.size(key) if config.get(key) else 0)


def _hybrid(config: Mapping[str, Any]) -> dict[str, Any]:
    """In the usual keys: the kinds of layers, sizes of Mamba-2 as Nemotron-H has them, an MLP of the shared size where
    there are no experts."""
    found: dict[str, Any] = {"shared_intermediate_size": 1024, **config}
    read = ConfigReader({"mamba_n_heads": 128, **config})
    refuse_others(config, {"position_embedding_type": (("nope", "rope"), "another kind of positions")})
    require_unlimited(config)
    layers = read.size("num_hidden_layers", most=MOST_LAYERS)
    kinds = config.get("layer_types") or config.get("layers_block_type") or [_MAMBA] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _KINDS for kind in kinds):
        raise ValueError(f"'layer_types' must name 'mamba' or 'attention' for each of {layers} layers, not {kinds!r}")
    heads, size = read.size("mamba_n_heads"), config.get("mamba_d_head")
    inner = read.size("mamba_expand", 2) * read.size("hidden_size")
    size = inner // heads if size in (None, "auto") else read.size("mamba_d_head")
    if heads * size != inner:
        raise ValueError(
            f"'mamba_n_heads' {heads} x 'mamba_d_head' {size} is not 'mamba_expand' x 'hidden_size' {inner}"
        )
    if config.get("num_local_experts") == 0:
        found["intermediate_size"] = found["shared_intermediate_size"]
    return found | {
        "layer_types": [_KINDS[kind] for kind in kinds],
        "mamba_num_heads": heads,
        "mamba_head_dim": size,
        "n_groups": read.size("mamba_n_groups", 1),
        "ssm_state_size": read.size("mamba_d_state", 256),
        "conv_kernel": read.size("mamba_d_conv", 4),
        "use_conv_bias": read.flag("mamba_conv_bias", default=True),
    }


def _rotated(config: Mapping[str, Any], specs: Specs) -> Specs:
    rope = 0 if config.get("position_embedding_type") == "rope" else None
    return tuple(replace(spec, rope=rope) for spec in _attention(config, specs))


def _more_of_hybrid(config: Mapping[str, Any]) -> dict[str, Any]:
    mamba = tuple(number for number, kind in enumerate(config["layer_types"]) if kind == _MAMBA)
    return {**_more(config), "mamba": read_mamba2(config, mamba) if mamba else None}


_SPARSE_NAMES: dict[str, Any] = {
    **Mixtral.checkpoint_names,
    "layers.{}.mlp.router": (
        "model.layers.{}.block_sparse_moe.router.layer",
        "model.layers.{}.block_sparse_moe.router",
    ),
    "layers.{}.mlp.experts.gate_up_proj": (
        "model.layers.{}.block_sparse_moe.input_linear.weight",
        "model.layers.{}.block_sparse_moe.experts.gate_up_proj",
    ),
    "layers.{}.mlp.experts.down_proj": (
        "model.layers.{}.block_sparse_moe.output_linear.weight",
        "model.layers.{}.block_sparse_moe.experts.down_proj",
    ),
    **{f"layers.{{}}.mlp.shared.gate_up.{one}": "model.layers.{}.shared_mlp.input_linear" for one in ("gate", "up")},
    "layers.{}.mlp.shared.down": "model.layers.{}.shared_mlp.output_linear",
}


class Granite(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(reads=_MULTIPLIERS, attention=_attention, more=_more)


class GraniteMoe(Llama):
    family_config: ClassVar[FamilyConfig] = replace(
        Granite.family_config, reads=f"{_MULTIPLIERS} {EXPERT_KEYS} shared_intermediate_size", experts=_experts
    )
    checkpoint_names: ClassVar = _SPARSE_NAMES


class GraniteHybrid(Llama):
    family_config: ClassVar[FamilyConfig] = replace(
        GraniteMoe.family_config,
        reads=f"{GraniteMoe.family_config.reads} {MAMBA_KEYS} layers_block_type mamba_n_heads mamba_n_groups "
        "mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_conv_bias position_embedding_type init_method",
        neutral={
            "mamba_proj_bias": ((False,), "biases of its Mamba-2 projections"),
            "normalization_function": (("rmsnorm",), "another norm"),
        },
        layer_types=(_MAMBA, _FULL),
        usual=_hybrid,
        attention=_rotated,
        more=_more_of_hybrid,
    )
    checkpoint_names: ClassVar = {
        **_SPARSE_NAMES,
        **{f"layers.{{}}.mlp.gate_up.{one}": "model.layers.{}.shared_mlp.input_linear" for one in ("gate", "up")},
        "layers.{}.mlp.down": "model.layers.{}.shared_mlp.output_linear",
        "layers.{}.mixer.in_proj": "model.layers.{}.mamba.in_proj",
        "layers.{}.mixer.conv": "model.layers.{}.mamba.conv1d",
        "layers.{}.mixer.ssm": "model.layers.{}.mamba",  # A_log, D and dt_bias
        "layers.{}.mixer.gated_norm": "model.layers.{}.mamba.norm",
        "layers.{}.mixer.out": "model.layers.{}.mamba.out_proj",
    }

    def _mixer(self, config: ModelConfig, context: ModelContext, number: int) -> Mixer[Any]:
        if config.mamba is not None and number in config.mamba.layers:
            return Mamba2(config, context, self._norm(config, context, config.hidden_size))
        return super()._mixer(config, context, number)
