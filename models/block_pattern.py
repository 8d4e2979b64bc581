"""Blocks of one mixer each, as Nemotron-H stacks them (Blakeman et al. 2025): which kind each is, and Mamba-2's sizes.

Knows: both spellings of the pattern in config.json, the options of the family that are not implemented, and how its
other keys read for models/config.py. Does not know: experts (models/layers/routed_experts.py), or how a block computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from models.config_reader import ConfigReader, Neutral, refuse_others

BlockKind = Literal["mamba", "attention", "mlp", "moe"]

MAMBA_KEYS: Final = "conv_kernel mamba_head_dim mamba_num_heads n_groups ssm_state_size time_step_limit use_conv_bias"
BLOCK_KEYS: Final = f"""{MAMBA_KEYS} attention_head_dim hybrid_override_pattern layer_norm_epsilon layers_block_type
    mamba_hidden_act mamba_proj_bias mamba_ssm_cache_dtype mlp_hidden_act moe_latent_size
    moe_shared_expert_intermediate_size mtp_hybrid_override_pattern mtp_layers_block_type n_routed_experts norm_eps
    residual_in_fp32 use_bias"""

_LETTERS: dict[str, BlockKind] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_WORDS: dict[str, BlockKind] = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
HEAD_DIM = 128  # where config.json does not say
_MOST_BLOCKS = 10_000
_NO_BOUND = 1e6  # of a time step

BLOCK_NEUTRAL: Neutral = {
    "mlp_hidden_act": (("relu2",), "another activation of its MLPs than squared ReLU"),
    "mamba_hidden_act": (("silu",), "another activation of its convolutions than SiLU"),
    "mamba_ssm_cache_dtype": (("float32",), "recurrent state of another dtype"),
    "residual_in_fp32": ((False,), "residuals of another dtype than activations"),
    "attention_bias": ((False,), "biases of its attention"),
    "mlp_bias": ((False,), "biases of its MLPs"),
    "use_bias": ((False,), "biases of its Mamba-2 projections"),
    "mamba_proj_bias": ((False,), "biases of its Mamba-2 projections"),
}


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """Sizes of a Mamba-2 mixer (Dao & Gu 2024), of the whole model: ``heads`` of ``head_dim`` channels, each with a
    state of ``head_dim`` x ``state_size``; B and C are shared by the heads of one of ``groups``; ``taps`` of the causal
    convolution in front, with a bias where ``conv_bias``. ``layers``: numbers of the layers that are such mixers.
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int
    conv_bias: bool
    layers: tuple[int, ...]

    @property
    def inner(self) -> int:
        """Channels of x, of the gate, and of the output."""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Those of x, B and C."""
        return self.inner + 2 * self.groups * self.state_size


def block_kinds(config: Mapping[str, Any]) -> tuple[BlockKind, ...]:
    """Of each block, from ``layers_block_type`` or ``hybrid_override_pattern``. Raises ValueError naming the key."""
    words = config.get("layers_block_type") or config.get("layer_types")
    key = "layers_block_type" if words else "hybrid_override_pattern"
    given = words or config.get("hybrid_override_pattern")
    if not given:
        raise ValueError(
            "the key 'hybrid_override_pattern' is missing (or 'layers_block_type'): the kind of each block"
        )
    if not isinstance(given, list if words else str):
        raise ValueError(f"{key!r} must be a {'list' if words else 'string'}, not {given!r}")
    if len(given) > _MOST_BLOCKS:
        raise ValueError(f"{key!r} lists {len(given)} blocks; at most {_MOST_BLOCKS} are supported")
    known: Mapping[str, BlockKind] = _WORDS if words else _LETTERS
    for number, kind in enumerate(given):
        if not isinstance(kind, str) or kind not in known:
            raise ValueError(f"{key!r} says {kind!r} of block {number}; known kinds are {', '.join(map(repr, known))}")
    kinds = tuple(known[kind] for kind in given)
    layers = config.get("num_hidden_layers")
    if layers is not None and layers != len(kinds):
        raise ValueError(f"'num_hidden_layers' is {layers!r}, but {key!r} lists {len(kinds)} blocks")
    if "moe" in kinds and not {"attention", "mamba"} & set(kinds):
        raise ValueError(f"{key!r} has experts but neither attention nor Mamba-2; such models are not supported")
    return kinds


def mtp_kinds(config: Mapping[str, Any]) -> tuple[BlockKind, ...]:
    """Of each block of the MTP layer, from ``mtp_layers_block_type`` or ``mtp_hybrid_override_pattern``; by default
    attention, then experts. Raises ValueError naming the key."""
    words, letters = config.get("mtp_layers_block_type"), config.get("mtp_hybrid_override_pattern")
    key = "mtp_layers_block_type" if words else "mtp_hybrid_override_pattern"
    given = words or letters or "*E"
    known: Mapping[str, BlockKind] = _WORDS if words else _LETTERS
    if not isinstance(given, list if words else str) or any(
        not isinstance(kind, str) or kind not in known for kind in given
    ):
        raise ValueError(f"{key!r} is {given!r}; known kinds are {', '.join(map(repr, known))}")
    return tuple(known[kind] for kind in given)


def read_mamba2(config: Mapping[str, Any], layers: tuple[int, ...]) -> Mamba2Shape:
    """Of those layers. Raises ValueError naming the key."""
    read = ConfigReader(config)
    heads, groups = read.size("mamba_num_heads"), read.size("n_groups", 8)
    if heads % groups:
        raise ValueError(f"'mamba_num_heads' {heads} is not a multiple of 'n_groups' {groups}")
    return Mamba2Shape(
        heads=heads,
        head_dim=read.size("mamba_head_dim"),
        groups=groups,
        state_size=read.size("ssm_state_size"),
        taps=read.size("conv_kernel", 4, most=64),
        conv_bias=True if config.get("use_conv_bias") is None else read.flag("use_conv_bias"),
        layers=layers,
    )


def usual_block_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the keys that models/config.py reads; blocks take the place of layer types.

    Raises ValueError for what the family can ask for and is not implemented.
    """
    require_unlimited(config)
    kinds = block_kinds(config)
    changed = {key: value for key, value in config.items() if key not in ("layer_types", "hybrid_override_pattern")}
    changed["layers_block_type"] = list(kinds)
    changed["num_hidden_layers"] = len(kinds)
    changed.setdefault("head_dim", config.get("attention_head_dim") or HEAD_DIM)
    refuse_others(config, {"attention_head_dim": ((changed["head_dim"],), "another 'head_dim' of its attention")})
    eps = config.get("layer_norm_epsilon")  # transformers reads neither 'norm_eps' nor 'rms_norm_eps'
    changed["rms_norm_eps"] = 1e-5 if eps is None else eps
    if "mlp" not in kinds:
        changed["intermediate_size"] = config.get("intermediate_size") or 1  # of no block
    for key in ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"):
        changed.pop(key, None)  # checkpoints carry them, but nothing is rotated
    return changed


def require_unlimited(config: Mapping[str, Any]) -> None:
    """Raises ValueError where time steps have bounds."""
    limit = config.get("time_step_limit")
    if limit is not None and not _unlimited(limit):
        raise ValueError(f"'time_step_limit' is {limit!r}, but only [0.0, Infinity] is implemented")


def _unlimited(limit: object) -> bool:
    """[0, infinity], as JSON has it and as transformers 5 writes it, or a bound that no softplus reaches."""
    if not isinstance(limit, list) or len(limit) != 2:
        return False
    low, high = limit
    if isinstance(high, (int, float)) and not isinstance(high, bool):
        return bool(low == 0.0) and high >= _NO_BOUND
    return bool(low == 0.0) and high == {"__float__": "Infinity"}
