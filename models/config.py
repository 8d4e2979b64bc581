"""ModelConfig: the shape of a model, read once from config.json and frozen; FamilyConfig: what a family adds to that.

Knows: how transformers 4 and 5 spell each fact, and which options of a checkpoint Lockstride does not implement.
Does not know: any family (models/families), folders (models/registry.py), tensor parallelism, sampling defaults.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from models.attention_spec import AttentionSpec
from models.block_pattern import BlockKind, Mamba2Shape
from models.config_reader import ConfigReader, Neutral, refuse_others, unlisted
from models.layers.delta_config import GatedDeltaShape
from models.layers.rope import LongRope, ProportionalRope, Rope, YarnRope, given_parameters, rope_from_parameters
from models.layers.routed_experts import RoutedExperts
from models.quantization import Quantization, read_quantization

Specs = tuple[AttentionSpec, ...]
MOST_LAYERS = 10_000
INTERLEAVED = ("rope_interleave", "rope_interleaved")
MTP_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
# Options of other families that change what a model computes.
_MLA = "multi-head latent attention (MLA; use a model with grouped queries)"
_NEUTRAL: Neutral = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), ((), "soft-capped logits")),
    **dict.fromkeys(("logits_soft_cap", "router_logit_softcapping"), ((), "soft-capped logits")),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar"), ((), "another scale of attention")),
    **dict.fromkeys(("attention_scale", "attn_scale"), ((), "another scale of attention")),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "scale_emb"), ((1,), "scaled activations")),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), ((1,), "scaled activations")),
    **dict.fromkeys(("mlp_multipliers", "ssm_multipliers", "scale_depth"), ((), "scaled activations")),
    **dict.fromkeys(("logit_scale", "logits_scaling"), ((1,), "scaled logits")),
    **dict.fromkeys(("lm_head_multiplier", "output_multiplier"), ((1,), "scaled logits")),
    "key_multiplier": ((1,), "scaled keys"),
    **dict.fromkeys(("rotary_pct", "rotary_percent", "rope_percent"), ((1,), "rotating a part of each head")),
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval"), ((), "layers without rotation")),
    **dict.fromkeys(
        ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"),
        ((), _MLA),
    ),
    **dict.fromkeys(("use_parallel_residual", "parallel_attn"), ((False,), "attention and MLP side by side")),
    "rope_local_base_freq": ((), "another rotation in some layers"),
    **dict.fromkeys(("alibi", "use_alibi"), ((False,), "positions by ALiBi")),
    "clip_qkv": ((), "clipped queries, keys and values"),
    "swiglu_limit": ((), "clipped activations"),
    "hidden_activation": (("silu",), "another activation"),
    "use_rope": ((True,), "layers without rotation"),
    "attention_chunk_size": ((), "attention in chunks"),
    "attn_temperature_tuning": ((False,), "a temperature by position"),
}
_QK_NORMS = ("use_qk_norm", "qk_norm", "qk_layernorm")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class ModelConfigError(ValueError):
    """A model folder whose configuration is absent, malformed, or asks for something that is not implemented."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Facts of a decoder-only transformer. Sizes are those of the whole model, not of one rank.

    ``dtype`` is what the checkpoint was saved in: by the config or, where that is silent, as most of it is stored;
    float32 without a checkpoint. ``max_length`` is the longest sequence (prompt and completion) its
    positions cover. ``rotary_dim`` leading dims of each head are rotated; ``rope_interleaved``: in the checkpoint pairs
    of them are (2i, 2i + 1). ``attention_bias``: of queries, keys and values; ``output_bias``: of the projection after
    attention; ``qk_norms``: heads of queries and keys are normed.
    ``query_scale``: (beta, original context) of a scale of queries by position; None for none.
    ``experts`` describes the layers that have
    experts, which do not use ``intermediate_size``; None where no layer has. ``delta`` describes the layers that are
    gated delta nets; None where all attend. ``blocks``: the kind of each layer where layers have one mixer or one MLP
    each, nothing is rotated then; empty where all have both. ``mamba``: of those that are Mamba-2.
    ``mtp_layers``: layers of multi-token prediction that the config names, which are not among ``layers``;
    ``mtp_own_embeddings``: they have an embedding of their own; ``mtp_blocks``: the kind of each of such a layer's
    blocks, where ``blocks`` is. ``quantization``: which matrices the checkpoint stores as codes; None for none.
    ``attention``: of each layer; empty where all are alike and plain. ``more_ropes``: of layers with another rotation.
    ``embedding_scale``, ``residual_scale``, ``logits_scale`` multiply embeddings, what each layer adds, and logits;
    ``logits_softcap``: as AttentionSpec.softcap, of logits.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rms_norm_eps: float
    max_length: int
    rope: Rope
    dtype: torch.dtype
    rope_interleaved: bool = False
    tied_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    qk_norms: bool = False
    mlp_bias: bool = False
    query_scale: tuple[float, int] | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    experts: RoutedExperts | None = None
    delta: GatedDeltaShape | None = None
    blocks: tuple[BlockKind, ...] = ()
    mamba: Mamba2Shape | None = None
    mtp_layers: int = 0
    mtp_own_embeddings: bool = False
    mtp_blocks: tuple[BlockKind, ...] = ()
    quantization: Quantization | None = None
    attention: tuple[AttentionSpec, ...] = ()
    more_ropes: tuple[Rope, ...] = ()
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float | None = None

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """By the index that AttentionSpec.rope is."""
        return self.rope, *self.more_ropes

    def attention_of(self, layer: int) -> AttentionSpec:
        """How that layer attends, if it does."""
        plain = AttentionSpec(self.kv_heads, self.head_dim, self.head_dim**-0.5)
        return self.attention[layer] if self.attention else plain

    def has_experts(self, layer: int) -> bool:
        """Whether that layer's MLP is sparse."""
        return self.experts is not None and layer in self.experts.layers


def _by_windows(config: Mapping[str, Any], specs: Specs) -> Specs:
    return specs


def _as_it_is(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config


def _no_experts(config: Mapping[str, Any]) -> RoutedExperts | None:
    return None


def _nothing_more(config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyConfig:
    """How a family's config.json is read where it differs from Llama's. Functions raise ValueError naming the key.

    Where the key is absent, as in transformers: ``eps``; ``theta``; ``head_dim``, None: hidden_size / heads;
    ``kv_heads``, None: one a head (a null always means None); ``window``, None: no sliding window; ``tied``;
    ``layer_types``: every ``full_every``th layer is full, 0: none is. Without ``full_every`` windows are refused.
    ``reads``: names of further keys, separated by spaces, also of those that others must have neutral. ``neutral``:
    further options that it must have neutral. ``qk_norms``: queries and keys are normed. ``layer_types``: the kinds
    that it implements. ``slides``: whether the window that the config names applies; None: always, but a family that
    has none ignores one that 'use_sliding_window' switches off.
    ``attention``: how layers attend, given what they are with windows alone.
    ``usual``: the config in the usual keys; all others see its result. ``experts``: its sparse layers; None: has none.
    ``more``: fields of ModelConfig that the family reads itself.
    """

    eps: float = 1e-6
    theta: float = 1e4
    head_dim: int | None = None
    kv_heads: int | None = None
    window: int | None = None
    tied: bool = False
    reads: str = ""
    neutral: Neutral = field(default_factory=dict)
    qk_norms: bool = False
    layer_types: tuple[str, ...] = ("full_attention",)
    full_every: int | None = None
    slides: Callable[[Mapping[str, Any]], bool] | None = None
    attention: Callable[[Mapping[str, Any], Specs], Specs] = _by_windows
    usual: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _as_it_is
    experts: Callable[[Mapping[str, Any]], RoutedExperts | None] = _no_experts
    more: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing_more


def model_config(
    config: Mapping[str, Any],
    family: FamilyConfig,
    eos_token_ids: tuple[int, ...] = (),
    exported: Mapping[str, Any] | None = None,
    of_drafter: bool = False,
) -> ModelConfig:
    """From the parsed content of config.json. ``eos_token_ids``: of generation_config.json; they win. ``exported``:
    the content of hf_quant_config.json. ``of_drafter``: unknown keys are legal. Raises ValueError."""
    config = family.usual(config)
    architecture = architecture_of(config)
    _refuse_unimplemented(config, family)
    if not of_drafter:
        _refuse_unknown(config, family)
    read = ConfigReader(config)
    heads, kv_heads, head_dim = _heads(read, family)
    max_positions = read.size("max_position_embeddings")
    rope_parameters = _rope_parameters(config, family.theta)
    rope = rope_from_parameters(rope_parameters, max_positions)
    max_length = _max_length(rope, max_positions)
    attention = _attention(config, family, AttentionSpec(kv_heads, head_dim, head_dim**-0.5), max_length)
    bos = token_ids(config, "bos_token_id")
    experts = family.experts(config)
    if experts is not None and experts.per_token > experts.count:
        raise ValueError(f"'num_experts_per_tok' is {experts.per_token}, but a layer has only {experts.count} experts")
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": read.size("vocab_size"),
        "hidden_size": read.size("hidden_size"),
        "intermediate_size": read.size("intermediate_size"),
        "layers": read.size("num_hidden_layers", most=MOST_LAYERS),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotary_dim": _rotary_dim(config, family, rope, rope_parameters, head_dim),
        "rms_norm_eps": read.number("rms_norm_eps", family.eps),
        "max_length": max_length,
        "rope": rope,
        "rope_interleaved": any(map(read.flag, INTERLEAVED)),
        "dtype": _dtype(config),
        "tied_embeddings": read.flag("tie_word_embeddings", family.tied),
        "attention_bias": read.flag("attention_bias"),
        "output_bias": read.flag("attention_bias"),
        "qk_norms": family.qk_norms,
        "mlp_bias": read.flag("mlp_bias"),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": eos_token_ids or token_ids(config, "eos_token_id"),
        "experts": experts,
        "mtp_layers": mtp_layers(config),
        "mtp_own_embeddings": read.flag("mtp_use_dedicated_embeddings"),
        "quantization": read_quantization(config, exported),
        "attention": attention,
    }
    return ModelConfig(**fields | family.more(config))


def for_length(config: ModelConfig, longest: int) -> ModelConfig:
    """For sequences of at most ``longest`` tokens, by which LongRoPE chooses its factors."""
    if not isinstance(config.rope, LongRope):
        return config
    return replace(config, rope=replace(config.rope, longest=longest))


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelConfigError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def architecture_of(config: Mapping[str, Any]) -> str:
    """The one name in 'architectures'. Raises ValueError."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ValueError(f"'architectures' must name one architecture, not {names!r}")
    return names[0]


def unknown_keys(config: Mapping[str, Any], family: FamilyConfig) -> list[str]:
    """Keys that may change what a model computes: set, neither read nor idle."""
    return unlisted(config, {*_NEUTRAL, *_QK_NORMS, *family.neutral, *family.reads.split()})


def differing_keys(config: Mapping[str, Any], family: FamilyConfig) -> list[str]:
    """Unknown keys, and options that ask for what the family does not implement."""
    neutral = {**_NEUTRAL, **family.neutral}
    asked = [key for key in config if key in neutral and config[key] and config[key] not in neutral[key][0]]
    return [*unknown_keys(config, family), *(key for key in asked if key not in family.reads.split())]


def _refuse_unknown(config: Mapping[str, Any], family: FamilyConfig) -> None:
    for key in unknown_keys(config, family):
        raise ValueError(
            f"{key!r} is {config[key]!r}, a key that {architecture_of(config)} is not known to have; remove it from "
            "config.json if it does not change what the model computes"
        )


def _heads(read: ConfigReader, family: FamilyConfig) -> tuple[int, int, int]:
    """(heads, key/value heads, head_dim)"""
    heads, hidden_size = read.size("num_attention_heads"), read.size("hidden_size")
    of_head = family.head_dim if "head_dim" not in read.config else None
    of_group = family.kv_heads if "num_key_value_heads" not in read.config else None
    head_dim = read.size("head_dim", of_head or hidden_size // heads)
    kv_heads = read.size("num_key_value_heads", of_group or heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return heads, kv_heads, head_dim


def _refuse_unimplemented(config: Mapping[str, Any], family: FamilyConfig) -> None:
    normed = family.qk_norms
    norms = dict.fromkeys(_QK_NORMS, ((normed,), f"{'no ' * normed}norms of queries and keys"))
    reads = family.reads.split()
    refuse_others(config, {key: value for key, value in {**_NEUTRAL, **norms}.items() if key not in reads})
    refuse_others(config, family.neutral)
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported; only 'silu' is")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ValueError(f"'layer_types' must be a list, not {layer_types!r}")
    if config.get("is_causal") is not None and not ConfigReader(config).flag("is_causal"):
        raise ValueError("'is_causal' is false, but only causal attention is implemented")
    if dual := config.get("dual_chunk_attention_config"):
        original = dual.get("original_max_position_embeddings") if isinstance(dual, dict) else None
        raise ValueError(
            "dual chunk attention ('dual_chunk_attention_config') is not implemented; remove the key, and set "
            f"'max_position_embeddings' ({config.get('max_position_embeddings')!r}) to its "
            f"'original_max_position_embeddings' ({original!r})"
        )
    if other := [kind for kind in layer_types if kind not in family.layer_types]:
        what = "but sliding-window attention is not supported; " if other[0] == "sliding_attention" else ""
        raise ValueError(f"'layer_types' has {other[0]!r}, {what}only {' and '.join(map(repr, family.layer_types))} is")


def _attention(config: Mapping[str, Any], family: FamilyConfig, plain: AttentionSpec, max_length: int) -> Specs:
    """Of each layer; nothing where all are ``plain``. A window of ``max_length`` changes nothing."""
    layers = ConfigReader(config).size("num_hidden_layers", most=MOST_LAYERS)
    window = config.get("sliding_window", family.window)
    read = ConfigReader({**config, "sliding_window": window})
    off = family.full_every is None and config.get("use_sliding_window") is False
    off = not family.slides(config) if family.slides else off
    off = off or window is None or (family.full_every is None and not window)
    if off or read.number("sliding_window", 0) >= max_length:
        window = None
    elif family.full_every is None:
        raise ValueError(f"'sliding_window' is {window!r}, but sliding-window attention is not supported")
    else:
        window = read.size("sliding_window")
    every = family.full_every
    usual = ["full_attention" if every and not (n + 1) % every else "sliding_attention" for n in range(layers)]
    types = config.get("layer_types") or usual
    if family.full_every is None:
        types = ["full_attention"] * layers
    if len(types) != layers:
        raise ValueError(f"'layer_types' has {len(types)} entries, but 'num_hidden_layers' is {layers}")
    specs = tuple(replace(plain, window=window if kind == "sliding_attention" else None) for kind in types)
    specs = family.attention(config, specs)
    return specs if any(spec != plain for spec in specs) else ()


def _rope_parameters(config: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """transformers 5 writes everything in rope_parameters; transformers 4 rope_theta beside rope_scaling."""
    parameters = given_parameters(config)
    if nested := {kind: value for kind, value in parameters.items() if isinstance(value, dict)}:
        used = set(config.get("layer_types") or nested)
        said = [value for kind, value in nested.items() if kind in used]
        if not said or any(one != said[0] for one in said):
            raise ValueError(f"rope parameters that differ by layer type are not supported: {nested!r}")
        parameters = given_parameters({"rope_parameters": said[0]})
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = config.get("rope_theta") or default_theta
    if config.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if config.get("original_max_position_embeddings") is not None:
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return parameters


def _rotary_dim(
    config: Mapping[str, Any], family: FamilyConfig, rope: Rope, rope_parameters: Mapping[str, Any], head_dim: int
) -> int:
    partial = not isinstance(rope, ProportionalRope)
    share = ConfigReader(rope_parameters if partial else {}).number("partial_rotary_factor", 1.0)
    if not 0.0 < share <= 1.0:
        raise ValueError(f"'partial_rotary_factor' must lie in (0, 1], not {share!r}")
    if share != 1 and "partial_rotary_factor" not in family.reads.split():  # transformers rotates whole heads
        raise ValueError(f"'partial_rotary_factor' is {share!r}, but this family rotates whole heads; remove the key")
    rotary_dim = int(head_dim * share)
    if isinstance(rope, LongRope) and 2 * len(rope.short) != rotary_dim:
        raise ValueError(
            f"'short_factor' has {len(rope.short)} factors, but {rotary_dim} dims of a head are rotated: one for two"
        )
    if rotary_dim % 2 or not rotary_dim:
        raise ValueError(f"the rotated part of a head must be even, but head_dim {head_dim} rotates {rotary_dim} dims")
    if config.get("rotary_dim") not in (None, rotary_dim):
        raise ValueError(
            f"'rotary_dim' is {config['rotary_dim']!r}, but {rotary_dim} dims of a head are rotated; "
            "'partial_rotary_factor' says another share"
        )
    return rotary_dim


def mtp_layers(config: Mapping[str, Any]) -> int:
    """Qwen3.5 and DeepSeek-V3 have different keys for it; 0 where there is neither."""
    key = next((key for key in MTP_KEYS if config.get(key) is not None), None)
    if key is None or config[key] == 0:
        return 0
    return ConfigReader(config).size(key, most=MOST_LAYERS)


def _max_length(rope: Rope, max_positions: int) -> int:
    """YaRN checkpoints often keep the original context in max_position_embeddings; the factor says the real one."""
    if isinstance(rope, YarnRope):
        extended = int(rope.original_context * rope.factor)
        if extended >= 2**31:
            raise ValueError(f"yarn extends {rope.original_context} positions to {extended}, which is too many")
        return max(max_positions, extended)
    return max_positions


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; supported dtypes are {', '.join(DTYPES)}")
    return DTYPES[name]


def token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A token id, a list of them, or nothing."""
    value = config.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31 for token in ids):
        raise ValueError(f"{key!r} must be a token id or a list of them, integers from 0 to 2**31 - 1, not {value!r}")
    return tuple(ids)
