"""GatedDeltaShape: the linear-attention layers of Qwen3-Next and Qwen3.5, read from config.json.

Knows: how these families write their configs (text_config, layer_types), and which of their options are
not implemented. Does not know: the rest of the model (models/config.py), or how a layer computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.config_reader import ConfigReader, Neutral, refuse_others
from models.layers.rope import given_parameters

NEXT = "Qwen3NextForCausalLM"
_IN_TEXT_CONFIG = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
GATED_DELTA_FAMILIES = (NEXT, "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", *_IN_TEXT_CONFIG)
_MOST_LAYERS = 10_000
_HEAD_DIM, _ROTATED_SHARE = 256, 0.25  # where the config does not say; the share is of a head

_NEUTRAL: Neutral = {
    "attn_output_gate": ((True,), "attention without an output gate"),
    "mamba_ssm_dtype": (("float32",), "recurrent state of another dtype"),
    "linear_attn_output_gate": ((True,), "linear attention without an output gate"),
    "mlp_bias": ((False,), "biases of its MLPs"),
}


@dataclass(frozen=True, slots=True)
class GatedDeltaShape:
    """Sizes of gated delta nets (Yang et al. 2025), of the whole model: ``v_heads`` heads, each with a state of
    ``v_dim`` x ``k_dim``; one of ``k_heads`` keys and queries serves v_heads / k_heads of them. ``taps``: of the causal
    convolution over q, k and v. ``layers``: numbers of the layers that have one, ascending; the others attend.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    taps: int
    layers: tuple[int, ...]

    @property
    def keys(self) -> int:
        """Channels of k, and of q."""
        return self.k_heads * self.k_dim

    @property
    def values(self) -> int:
        """Channels of v, of the gate z, and of the output."""
        return self.v_heads * self.v_dim


def has_gated_delta(config: Mapping[str, Any]) -> bool:
    """Whether the architecture of a config.json is one of these families."""
    names = config.get("architectures")
    return isinstance(names, list) and len(names) == 1 and names[0] in GATED_DELTA_FAMILIES


def usual_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as models/config.py reads others: no text_config, no layer types. Raises ValueError."""
    found = dict(config)
    if config["architectures"][0] in _IN_TEXT_CONFIG:
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise ValueError(f"'text_config' must be an object, not {text!r}")
        for key in ("rope_parameters", "rope_scaling"):
            of_text = [text.get("rope_parameters"), text.get("rope_scaling")]
            if config.get(key) and config[key] not in of_text:
                raise ValueError(
                    f"{key!r} {config[key]!r} stands beside 'text_config', which says {of_text[0] or of_text[1]!r}; "
                    "put what you mean into its 'rope_parameters' and remove the outer one"
                )
        found = {**text, **{key: config[key] for key in ("architectures", "quantization_config") if key in config}}
        if config.get("tie_word_embeddings") is not None:
            found["tie_word_embeddings"] = config["tie_word_embeddings"]
        for key in ("dtype", "torch_dtype", "eos_token_id", "bos_token_id"):
            if found.get(key) is None and config.get(key) is not None:
                found[key] = config[key]
    refuse_others(found, _NEUTRAL)
    if found.setdefault("head_dim", _HEAD_DIM) is None:
        raise ValueError("the key 'head_dim' is missing")
    if found.get("partial_rotary_factor") is None and given_parameters(found).get("partial_rotary_factor") is None:
        found["partial_rotary_factor"] = _ROTATED_SHARE
    if found.get("num_experts") and found.get("intermediate_size") is None:
        found["intermediate_size"] = found.get("moe_intermediate_size")  # no layer is dense
    return found


def read_gated_delta(config: Mapping[str, Any]) -> GatedDeltaShape:
    """From the keys of ``usual_keys``. Raises ValueError naming the key."""
    read = ConfigReader(config)
    shape = GatedDeltaShape(
        k_heads=read.size("linear_num_key_heads"),
        v_heads=read.size("linear_num_value_heads"),
        k_dim=read.size("linear_key_head_dim"),
        v_dim=read.size("linear_value_head_dim"),
        taps=read.size("linear_conv_kernel_dim", 4),
        layers=_layers(config, read.size("num_hidden_layers", most=_MOST_LAYERS)),
    )
    if shape.v_heads % shape.k_heads:
        raise ValueError(
            f"linear_num_value_heads {shape.v_heads} is not a multiple of linear_num_key_heads {shape.k_heads}"
        )
    if shape.taps < 2:
        raise ValueError(f"'linear_conv_kernel_dim' must be at least 2, not {shape.taps}")
    return shape


def _layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Numbers of the linear ones: as 'layer_types' says, or all but every 'full_attention_interval'-th."""
    kinds = config.get("layer_types")
    if kinds is None:
        interval = ConfigReader(config).size("full_attention_interval", 4)
        return tuple(layer for layer in range(layers) if (layer + 1) % interval)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"'layer_types' must list the kinds of {layers} layers, not {kinds!r}")
    unknown = [kind for kind in kinds if kind not in ("linear_attention", "full_attention")]
    if unknown:
        raise ValueError(
            f"'layer_types' has {unknown[0]!r}; only 'linear_attention' and 'full_attention' are implemented"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
