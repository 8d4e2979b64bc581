"""Quantization: which matrices of a checkpoint are stored as FP8 codes, and where their scales are, as its config says.

Knows: ``quantization_config`` of config.json and hf_quant_config.json as written by DeepSeek and Qwen ("fp8"),
compressed-tensors, NVIDIA's modelopt and fbgemm.
Does not know: files of weights (checkpoint.py holds each header against this), memory layouts, kernels.

Every scale multiplies, also ``weight_scale_inv``: weight = code * scale.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Granularity = Literal["tensor", "row", "block"]
Match = Callable[[str], bool]
# Keys of "fp8" and fbgemm under which modules stay as they are, the newer spelling first.
_UNCONVERTED = ("modules_to_not_convert", "ignored_layers")
_METHODS = "fp8, compressed-tensors (float-quantized), modelopt (FP8 algorithms) and fbgemm_fp8"
# quant_algo of modelopt -> (granularity, block)
ALGORITHMS: Mapping[str, tuple[Granularity, tuple[int, int] | None]] = {
    "FP8": ("tensor", None),
    "FP8_PER_CHANNEL_PER_TOKEN": ("row", None),
    "FP8_PB_WO": ("block", (128, 128)),
}
STRATEGIES: Mapping[str, Granularity] = {"tensor": "tensor", "channel": "row", "block": "block"}  # compressed-tensors
_FBGEMM_CAP = 1200.0  # activation_scale_ub where the config is silent, as in transformers' FbgemmFp8Config


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """How one matrix [N, K] of float8_e4m3fn codes is scaled.

    ``granularity``: one scale for the matrix, for each row, or for each ``block`` (rows, columns), whose grid
    [ceil(N / rows), ceil(K / columns)] rounds up. ``entry`` names what in the config decided it, for errors.
    ``activation_cap``: the largest magnitude of activations that are quantised; None without a limit (fbgemm's
    ``activation_scale_ub``).
    """

    granularity: Granularity
    block: tuple[int, int] | None
    entry: str
    activation_cap: float | None = None

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Scales of a matrix [rows, columns]: (1, 1), (rows, 1) or its blocks."""
        if self.block is None:
            return (rows if self.granularity == "row" else 1), 1
        return -(-rows // self.block[0]), -(-columns // self.block[1])


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a config says of each module, by the name that the checkpoint gives it (without ``.weight``).

    ``groups``: (whether a module belongs to it, its scheme), the first that matches counts. ``kept``: (whether it is
    left as it is, the entry that says so). ``at_load``: the checkpoint holds numbers, which become codes while they are
    loaded (fp8_at_load.py).
    """

    method: str
    groups: tuple[tuple[Match, Fp8Scheme], ...]
    kept: tuple[tuple[Match, str], ...]
    at_load: bool = False

    @property
    def label(self) -> str:
        """As vLLM names it: a ``quant_method``, or ``--quantization``'s value."""
        return "fp8" if self.at_load else self.method

    @property
    def text(self) -> str:
        """For logs: whose config, and what shares a scale."""
        said = dict.fromkeys("x".join(map(str, one.block)) if one.block else one.granularity for _, one in self.groups)
        return f"FP8 ({self.method}; a scale for each {' or '.join(said)})"

    def scheme(self, module: str) -> Fp8Scheme | None:
        """None where the config leaves ``module`` as it is."""
        if self.kept_by(module) is not None:
            return None
        return next((scheme for belongs, scheme in self.groups if belongs(module)), None)

    def kept_by(self, module: str) -> str | None:
        """The entry of the config that leaves ``module`` unquantised, if any."""
        return next((entry for keeps, entry in self.kept if keeps(module)), None)


def read_quantization(config: Mapping[str, Any], exported: Mapping[str, Any] | None = None) -> Quantization | None:
    """From the parsed config.json and, for modelopt's older exports, hf_quant_config.json; config.json counts first.

    None for a checkpoint whose matrices are not quantised, whether or not it says how keys and values are scaled
    (kv_scales.py). Raises ValueError, which names key and value, for a method, a format or a detail that is not
    supported.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if not found and exported:
        found = {"quant_method": "modelopt", **_object(exported, "quantization")}
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise ValueError(f"'quantization_config' must be an object, not {found!r}")
    if isinstance(nested := found.get("quantization"), Mapping):
        found = {**found, **nested}
    method = found.get("quant_method")
    if method not in READERS:
        raise ValueError(f"'quant_method' {method!r} is not supported; supported are {_METHODS}")
    cached = method in ("compressed-tensors", "modelopt") and _scales_cache(found)
    if cached and not found.get("config_groups") and not found.get("quant_algo"):
        return None
    return READERS[str(method)](found)


def _scales_cache(config: Mapping[str, Any]) -> bool:
    """Whether it says that keys and values have scales. Raises ValueError for scales of other codes than FP8."""
    _only(config, "kv_cache_quant_algo", ("FP8",))
    scheme = _object(config, "kv_cache_scheme")
    for key, legal in (("num_bits", 8), ("type", "float"), ("symmetric", True)):
        _only(scheme, key, (legal,), "kv_cache_scheme.")
    _only(scheme, "strategy", ("tensor", "attn_head"), "kv_cache_scheme.")
    return bool(scheme or config.get("kv_cache_quant_algo"))


def _read_fp8(config: Mapping[str, Any]) -> Quantization:
    _only(config, "fmt", ("e4m3",))
    _only(config, "activation_scheme", ("dynamic", "static"))
    _only(config, "scale_fmt", ("ue8m0", "float32"))
    block = _block(config.get("weight_block_size"), "weight_block_size")
    scheme = Fp8Scheme("block" if block else "tensor", block, f"'weight_block_size' {config.get('weight_block_size')}")
    return Quantization("fp8", ((_always, scheme),), _unconverted(config))


def _read_fbgemm(config: Mapping[str, Any]) -> Quantization:
    cap = config.get("activation_scale_ub", _FBGEMM_CAP)
    if not isinstance(cap, (int, float)) or isinstance(cap, bool) or not 0 < cap < float("inf"):
        raise ValueError(f"'activation_scale_ub' must be a positive number, not {cap!r}")
    scheme = Fp8Scheme("row", None, "'quant_method' fbgemm_fp8", float(cap))
    return Quantization("fbgemm_fp8", ((_always, scheme),), _unconverted(config))


def _read_modelopt(config: Mapping[str, Any]) -> Quantization:
    key = next((key for key in ("ignore", "exclude_modules") if config.get(key)), "ignore")
    kept = tuple((_wildcard(name), f"'{key}' entry {name!r}") for name in _names(config, key))
    algorithm = str(config.get("quant_algo")).upper()
    if algorithm != "MIXED_PRECISION":
        return Quantization("modelopt", ((_always, _modelopt_scheme(algorithm, "'quant_algo'")),), kept)
    layers = _object(config, "quantized_layers")
    groups = []
    for name in layers:
        entry = f"'quantized_layers' entry {name!r}, 'quant_algo'"
        groups.append((_wildcard(name), _modelopt_scheme(str(_object(layers, name).get("quant_algo")).upper(), entry)))
    return Quantization("modelopt", tuple(groups), kept)


def _modelopt_scheme(algorithm: str, entry: str) -> Fp8Scheme:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{entry} {algorithm} is not supported; supported are {', '.join(ALGORITHMS)}")
    granularity, block = ALGORITHMS[algorithm]
    return Fp8Scheme(granularity, block, f"{entry} {algorithm}")


def _read_compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    _only(config, "quantization_status", ("compressed", "frozen"))
    _only(_object(config, "sparsity_config"), "format", ("dense",), "sparsity_config.")
    groups: list[tuple[Match, Fp8Scheme]] = []
    named = _object(config, "config_groups")
    if not named:
        raise ValueError("'config_groups' of compressed-tensors is empty")
    for name in named:
        group, where = _object(named, name), f"config_groups.{name}."
        found = group.get("format") or config.get("format")
        if found not in ("float-quantized", "naive-quantized"):
            raise ValueError(f"compressed-tensors 'format' {found!r} is not supported; supported is 'float-quantized'")
        scheme = _compressed_scheme(_object(group, "weights"), where)
        groups += [(_target(target), scheme) for target in _names(group, "targets", where)]
    groups.sort(key=lambda group: group[0] is _always)  # a module's name counts before its class
    kept = tuple((_target(name), f"'ignore' entry {name!r}") for name in _names(config, "ignore"))
    return Quantization("compressed-tensors", tuple(groups), kept)


def _compressed_scheme(weights: Mapping[str, Any], where: str) -> Fp8Scheme:
    where += "weights."
    _only(weights, "num_bits", (8,), where)
    _only(weights, "type", ("float",), where)
    _only(weights, "symmetric", (True,), where)
    _only(weights, "dynamic", (False,), where)
    _only(weights, "strategy", tuple(STRATEGIES), where)
    strategy = weights.get("strategy") or "tensor"
    block = _block(weights.get("block_structure"), f"{where}block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise ValueError(f"'{where}block_structure' is missing; strategy 'block' needs it")
    return Fp8Scheme(STRATEGIES[strategy], block, f"'{where}strategy' {strategy!r}")


def _block(value: object, key: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ValueError(f"{key!r} must be two sizes, not {value!r}")
    if any(not isinstance(size, int) or isinstance(size, bool) or size < 1 or size & (size - 1) for size in value):
        raise ValueError(f"{key!r} must be two powers of two, not {value!r}")
    return value[0], value[1]


def _only(config: Mapping[str, Any], key: str, legal: Sequence[object], where: str = "") -> None:
    """Raises ValueError for a value that is not absent, null or in ``legal``."""
    value = config.get(key)
    if value is not None and value not in legal:
        raise ValueError(f"{where + key!r} {value!r} is not supported; supported: {', '.join(map(repr, legal))}")


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key!r} must be an object, not {value!r}")
    return value


def _names(config: Mapping[str, Any], key: str, where: str = "") -> list[str]:
    value = config.get(key)
    value = [] if value is None else value
    if not isinstance(value, list) or any(not isinstance(name, str) for name in value):
        raise ValueError(f"{where + key!r} must be a list of names, not {value!r}")
    return value


def _unconverted(config: Mapping[str, Any]) -> tuple[tuple[Match, str], ...]:
    key = next((key for key in _UNCONVERTED if config.get(key)), _UNCONVERTED[0])
    return tuple((_components(name), f"{key!r} entry {name!r}") for name in _names(config, key))


def _always(module: str) -> bool:
    return True


def _components(name: str) -> Match:
    """Whole dotted components, anywhere: ``mlp.gate`` means the router, but not ``mlp.gate_proj``."""
    return lambda module: f".{name}." in f".{module}."


def _wildcard(name: str) -> Match:
    """A shell pattern for the whole name of a module or of what it is part of."""
    pattern = re.compile(fnmatch.translate(name))
    components = _components(name)

    def matches(module: str) -> bool:
        return pattern.match(module) is not None or components(module)

    return matches


def _target(name: str) -> Match:
    """compressed-tensors: a class of modules (every matrix is a ``Linear``), ``re:`` and a pattern that the name starts
    with, or a name. Raises ValueError for a broken pattern."""
    if name == "Linear":
        return _always
    if not name.startswith("re:"):
        return _components(name)
    try:
        pattern = re.compile(name[3:])
    except re.error as error:
        raise ValueError(f"{name!r} is not a regular expression: {error}") from error
    return lambda module: pattern.match(module) is not None


READERS: Mapping[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": _read_modelopt,
    "fbgemm_fp8": _read_fbgemm,
}
