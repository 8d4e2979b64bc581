"""GatedDeltaShape: the linear-attention layers of Qwen3-Next and Qwen3.5, read from config.json.

Knows: how these families write their configs, and which of their options are not implemented. Does not know: the
rest of the model (models/config.py), or how a layer computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from models.config_reader import ConfigReader, Neutral
from models.layers.rope import given_parameters

DELTA_KEYS: Final = """attn_output_gate full_attention_interval linear_attn_output_gate linear_conv_kernel_dim
    linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_ssm_dtype
    partial_rotary_factor"""
_MOST_LAYERS = 10_000
_ROTATED_SHARE = 0.25  # of a head, where the config does not say

DELTA_NEUTRAL: Neutral = {
    "attn_output_gate": ((True,), "attention without an output gate"),
    "mamba_ssm_dtype": (("float32",), "recurrent state of another dtype"),
    "output_gate_type": (("swish", "silu"), "another gate of its linear attention"),
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


def usual_delta_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the keys that models/config.py reads. Raises ValueError."""
    found = dict(config)
    if "head_dim" in found and found["head_dim"] is None:
        raise ValueError("the key 'head_dim' is missing")
    if found.get("partial_rotary_factor") is None and given_parameters(found).get("partial_rotary_factor") is None:
        found["partial_rotary_factor"] = _ROTATED_SHARE
    if found.get("num_experts") and found.get("intermediate_size") is None:
        found["intermediate_size"] = found.get("moe_intermediate_size")  # no layer is dense
    return found


def read_gated_delta(config: Mapping[str, Any]) -> GatedDeltaShape:
    """From the keys of ``usual_delta_keys``. Raises ValueError naming the key."""
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
