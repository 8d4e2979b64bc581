"""Rotary position embedding (Su et al. 2021) and its context extensions: the cos | sin cache of a model.

Knows: the frequencies of each rope type and how a config.json spells them.
Does not know: how the rotation is applied (models/kernels).

The cache is float32 [L, R]: position p holds cos(p * f) in its first R/2 columns and sin(p * f) in the others, times
the type's attention factor. Rotation pairs dim i with dim i + R/2 (the NeoX halves).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_LARGEST = 2.0**40  # of any parameter: beyond it, angles say nothing
_BESIDE = ("rope_theta", "partial_rotary_factor")  # transformers 4 writes them next to rope_scaling, 5 inside
_LAYOUT_KEYS = {"rope_type", "type", *_BESIDE}
_ALIASES = {"mrope": "default", "su": "longrope"}  # positions of text are equal in all sections of mRoPE
# Key -> the values under which it changes nothing, where a type does not read it; None: whatever it is.
_IDLE: dict[str, tuple[object, ...] | None] = {
    "finetuned": None,  # the weights are, or not
    "mrope_section": None,
    "mrope_interleaved": None,
    "original_max_position_embeddings": None,  # transformers writes it with every type
    "factor": (1,),
    "attention_factor": (1,),
    "attn_factor": (1,),
    "extrapolation_factor": (1,),
    "apply_yarn_scaling": (True,),
}

log = logging.getLogger(__name__)


class Rope(Protocol):
    """One rope type with its parameters."""

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin."""
        ...

    def frequencies(self, rotary_dim: int) -> Tensor:
        """Radians a position, float32 [rotary_dim / 2], on the default device."""
        ...


def _base_frequencies(theta: float, rotary_dim: int) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim
    return 1.0 / (theta**exponents)


@dataclass(frozen=True, slots=True)
class DefaultRope:
    """f_i = theta^(-2i / R)."""

    theta: float
    attention_factor: float = 1.0

    def frequencies(self, rotary_dim: int) -> Tensor:
        return _base_frequencies(self.theta, rotary_dim)


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Position interpolation (Chen et al. 2023): every frequency divided by ``factor``."""

    theta: float
    factor: float
    attention_factor: float = 1.0

    def frequencies(self, rotary_dim: int) -> Tensor:
        return _base_frequencies(self.theta, rotary_dim) / self.factor


@dataclass(frozen=True, slots=True)
class ProportionalRope:
    """Gemma 4: the first ``share`` of pairs rotate, those of the other dims have frequency 0; divided by ``factor``."""

    theta: float
    share: float
    factor: float
    attention_factor: float = 1.0

    def frequencies(self, rotary_dim: int) -> Tensor:
        found = _base_frequencies(self.theta, rotary_dim) / self.factor
        found[int(self.share * rotary_dim // 2) :] = 0.0
        return found


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1: wavelengths beyond the original context are divided by ``factor``, short ones kept, a ramp between."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int
    attention_factor: float = 1.0

    def frequencies(self, rotary_dim: int) -> Tensor:
        f = _base_frequencies(self.theta, rotary_dim)
        turns = self.original_context * f / (2 * math.pi)  # full turns within the original context
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return (1 - keep) * f / self.factor + keep * f


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (Peng et al. 2023): slow dims interpolated, fast ones kept, a ramp between (in turns a context)."""

    theta: float
    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def frequencies(self, rotary_dim: int) -> Tensor:
        f = _base_frequencies(self.theta, rotary_dim)
        low, high = self._dim_of(self.beta_fast, rotary_dim), self._dim_of(self.beta_slow, rotary_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        width = high - low if high != low else 0.001
        interpolate = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        return f / self.factor * interpolate + f * (1 - interpolate)

    def _dim_of(self, turns: float, rotary_dim: int) -> float:
        """The (fractional) dim that makes ``turns`` full turns within the original context."""
        return rotary_dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (Ding et al. 2024): each frequency divided by a separate factor. ``short`` factors serve sequences
    within the ``original_context``, ``long`` ones others; one list serves a whole engine, by its longest sequence."""

    theta: float
    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    longest: int
    attention_factor: float

    def frequencies(self, rotary_dim: int) -> Tensor:
        factors = self.long if self.longest > self.original_context else self.short
        return _base_frequencies(self.theta, rotary_dim) / torch.tensor(factors)


def given_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says under ``rope_parameters`` (transformers 5) or ``rope_scaling`` (4), without nulls.

    Raises ValueError for what is no object, and where both keys are there and say different things.
    """
    new, old = (_without_nulls(config.get(key) or {}) for key in ("rope_parameters", "rope_scaling"))
    either = {**old, **new}
    beside = {key: either[key] for key in _BESIDE if key in either}
    if new and old and {**beside, **new} != {**beside, **old}:  # transformers takes rope_scaling, other readers do not
        raise ValueError(
            f"'rope_parameters' {config['rope_parameters']!r} and 'rope_scaling' {config['rope_scaling']!r} say "
            "different things; put what you mean into 'rope_parameters' and remove 'rope_scaling'"
        )
    return either


def nested_parameters(config: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """The object of 'rope_parameters' for each of ``kinds``; empty in transformers 4's form. Raises ValueError for what
    transformers 5 ignores in the config of a family with a rope for each kind of layer."""
    given = given_parameters(config)
    nested = {kind: given[kind] for kind in kinds if isinstance(given.get(kind), dict)}
    if config.get("rope_parameters") and not nested:
        raise ValueError(f"'rope_parameters' must have an object for {' and '.join(map(repr, kinds))}, not {given!r}")
    old = config.get("rope_scaling") or {}
    if old.get("rope_type") is None and (old.get("type") or "default") != "default":
        raise ValueError(f"'rope_scaling' must say 'rope_type', not 'type': {old!r}")
    return nested


def _without_nulls(given: object) -> dict[str, Any]:
    """With the type under ``rope_type``, where there is any key."""
    if not isinstance(given, dict):
        raise ValueError(f"rope parameters must be an object, not {given!r}")
    said = {key: value for key, value in given.items() if value is not None}
    kind = said.pop("type", "default")
    return {"rope_type": kind, **said} if given else {}


def rope_from_parameters(parameters: Mapping[str, Any], max_positions: int) -> Rope:
    """The rope of a config.json ``rope_parameters`` dict (or ``rope_scaling`` with ``rope_theta`` put in).

    ``max_positions`` stands in where ``original_max_position_embeddings`` is absent. Raises ValueError for an unknown
    type or key, for a key that is missing, and for values that no frequencies follow from.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    readers: dict[Any, Callable[[float, dict[str, Any], int], Rope]]
    readers = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
    readers["proportional"] = _proportional
    if not isinstance(kind, str) or kind not in readers:
        raise ValueError(f"rope type {kind!r} is not supported; supported types are {', '.join(sorted(readers))}")
    unused = {key: value for key, value in parameters.items() if key not in _LAYOUT_KEYS and value is not None}
    if kind == "proportional":  # whose share is none of the leading dims
        unused["partial_rotary_factor"] = parameters.get("partial_rotary_factor") or 1.0
    try:
        rope = readers[kind](_positive(dict(parameters), "rope_theta"), unused, max_positions)
    except KeyError as missing:
        raise ValueError(f"rope type {kind!r} needs the key {missing.args[0]!r}, which config.json lacks") from None
    idle = {key for key, value in unused.items() if key in _IDLE and _is_neutral(value, _IDLE[key])}
    if other := {key: unused[key] for key in sorted(unused.keys() - idle)}:
        said = ", ".join(f"{key!r} {value!r}" for key, value in other.items())
        raise ValueError(f"rope type {kind!r} has keys that are not understood: {said}")
    return rope


def _is_neutral(value: object, neutral: tuple[object, ...] | None) -> bool:
    return neutral is None or (value in neutral and isinstance(value, bool) == isinstance(neutral[0], bool))


def _positive(keys: dict[str, Any], key: str, default: float | None = None) -> float:
    """Take ``key`` out. KeyError where it is absent and has no default."""
    value = keys.pop(key) if default is None else keys.pop(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < _LARGEST:
        raise ValueError(f"{key!r} must be a positive number, not {value!r}")
    return float(value)


def _original_context(keys: dict[str, Any], max_positions: int) -> int:
    key = "original_max_position_embeddings"
    value = _positive(keys, key, max_positions)
    if value != int(value):
        raise ValueError(f"{key!r} must be a whole number, not {value!r}")
    return int(value)


def _default(theta: float, keys: dict[str, Any], max_positions: int) -> Rope:
    return DefaultRope(theta)


def _linear(theta: float, keys: dict[str, Any], max_positions: int) -> Rope:
    return LinearRope(theta, _positive(keys, "factor"))


def _proportional(theta: float, keys: dict[str, Any], max_positions: int) -> Rope:
    share = _positive(keys, "partial_rotary_factor")
    if share > 1:
        raise ValueError(f"'partial_rotary_factor' must lie in (0, 1], not {share!r}")
    return ProportionalRope(theta, share, _positive(keys, "factor", 1.0))


def _llama3(theta: float, keys: dict[str, Any], max_positions: int) -> Rope:
    rope = Llama3Rope(
        theta,
        factor=_positive(keys, "factor"),
        low_freq_factor=_positive(keys, "low_freq_factor"),
        high_freq_factor=_positive(keys, "high_freq_factor"),
        original_context=_original_context(keys, max_positions),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise ValueError(
            f"'high_freq_factor' is {rope.high_freq_factor:g}, but must be more than 'low_freq_factor', which is "
            f"{rope.low_freq_factor:g}"
        )
    return rope


def _yarn(theta: float, keys: dict[str, Any], max_positions: int) -> Rope:
    original = _original_context(keys, max_positions)
    factor = _positive(keys, "factor", max_positions / original)
    mscale, mscale_all = keys.pop("mscale", 0), keys.pop("mscale_all_dim", 0)
    attention_factor = keys.pop("attention_factor", None)
    if attention_factor is None:
        attention_factor = _yarn_temperature(factor, 1.0)
        if mscale and mscale_all:
            mscales = {"mscale": mscale, "mscale_all_dim": mscale_all}
            attention_factor = _yarn_temperature(factor, _positive(mscales, "mscale"))
            attention_factor /= _yarn_temperature(factor, _positive(mscales, "mscale_all_dim"))
    if (more := _positive(keys, "attn_factor", 1.0)) != 1.0:  # of YaRN's authors, who multiply by it
        attention_factor = _positive({"attention_factor": attention_factor}, "attention_factor") * more
        log.info("rope: 'attn_factor' %g makes the attention factor %g", more, attention_factor)
    if theta <= 1.0:
        raise ValueError(f"'rope_theta' is {theta:g}, but yarn needs more than 1")
    return YarnRope(
        theta, factor, original, _positive({"attention_factor": attention_factor}, "attention_factor"),
        beta_fast=_positive(keys, "beta_fast", 32.0), beta_slow=_positive(keys, "beta_slow", 1.0),
        truncate=bool(keys.pop("truncate", True)),
    )  # fmt: skip


def _longrope(theta: float, keys: dict[str, Any], max_positions: int) -> Rope:
    original = _original_context(keys, max_positions)
    factor = _positive(keys, "factor", max_positions / original)
    grown = 1.0 if factor <= 1 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    attention_factor = _positive(keys, "attention_factor", grown)
    short, long = (_factors(keys, key) for key in ("short_factor", "long_factor"))
    if len(short) != len(long):
        raise ValueError(f"'short_factor' has {len(short)} factors, but 'long_factor' has {len(long)}")
    return LongRope(theta, short, long, original, max_positions, attention_factor)


def _factors(keys: dict[str, Any], key: str) -> tuple[float, ...]:
    given = keys.pop(key)
    if not isinstance(given, list):
        raise ValueError(f"{key!r} must be a list of numbers, not {given!r}")
    return tuple(_positive({key: factor}, key) for factor in given)


def _yarn_temperature(factor: float, mscale: float) -> float:
    """sqrt(1 / t) of the paper's section 3.4."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def cos_sin_cache(rope: Rope, rotary_dim: int, length: int) -> Tensor:
    """The float32 cache [length, rotary_dim], cos | sin, on the default device."""
    if torch.get_default_device().type == "meta":  # arange there imports torch's whole compiler first: seconds
        return torch.empty(length, rotary_dim, dtype=torch.float32)
    angles = torch.arange(length, dtype=torch.float32).unsqueeze(1) * rope.frequencies(rotary_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=1) * rope.attention_factor


def rotary_tables(
    ropes: Sequence[Rope], dims: Sequence[int], length: int, *, unrotated: bool
) -> dict[int | None, Tensor]:
    """cos_sin_cache of each rope, for as many dims, by its index; under None, where asked for, that of layers without
    rotation."""
    pairs = enumerate(zip(ropes, dims, strict=True))
    tables: dict[int | None, Tensor] = {n: cos_sin_cache(rope, dim, length) for n, (rope, dim) in pairs}
    return {**tables, None: unrotated_cache(length)} if unrotated else tables


def unrotated_cache(max_length: int) -> Tensor:
    """As cos_sin_cache, of angles 0 for two dims: attention without positions, by kernels that always rotate.

    x * 1 - y * 0 is x in every bit, for finite y.
    """
    return torch.tensor([[1.0, 0.0]]).repeat(max_length, 1)
