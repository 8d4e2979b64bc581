"""Quantization: which matrices of a checkpoint are stored as codes of eight or four bits, as its config says.

Knows: ``quantization_config`` of config.json and hf_quant_config.json as written by DeepSeek and Qwen ("fp8"),
compressed-tensors, NVIDIA's modelopt, fbgemm, AutoAWQ, GPTQ and gpt-oss ("mxfp4").
Does not know: files of weights (checkpoint.py holds each header against this), memory layouts, kernels.

Every scale of FP8 multiplies, also ``weight_scale_inv``: weight = code * scale.
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
# quant_algo of modelopt -> (granularity, block)
ALGORITHMS: Mapping[str, tuple[Granularity, tuple[int, int] | None]] = {
    "FP8": ("tensor", None),
    "FP8_PER_CHANNEL_PER_TOKEN": ("row", None),
    "FP8_PB_WO": ("block", (128, 128)),
}
STRATEGIES: Mapping[str, Granularity] = {"tensor": "tensor", "channel": "row", "block": "block"}  # compressed-tensors
# Of four bits: a compressed-tensors format, an algorithm of modelopt or a method -> columns that share a scale; None:
# as the config says.
FOUR_BITS: Mapping[str, int | None] = {
    "pack-quantized": None,
    "nvfp4-pack-quantized": 16,
    "mxfp4-pack-quantized": 32,
    "NVFP4": 16,
    "awq": None,
    "gptq": None,
    "mxfp4": 32,
}
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
class FourBitScheme:
    """How one matrix [N, K] of four-bit codes is stored. ``layout``: as four_bit.py names it. ``group``: columns that
    share a scale; 0: a whole row. ``zeros``: each group has a zero. ``ordered``: groups may be of columns in an order
    of their own. ``entry`` as above."""

    layout: str
    group: int
    entry: str
    zeros: bool = False
    ordered: bool = False


Scheme = Fp8Scheme | FourBitScheme


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a config says of each module, by the name that the checkpoint gives it (without ``.weight``).

    ``groups``: (whether a module belongs to it, its scheme), the first that matches counts. ``kept``: (whether it is
    left as it is, the entry that says so). ``at_load``: the checkpoint holds numbers, which become codes while they are
    loaded (fp8_load.py).
    """

    method: str
    groups: tuple[tuple[Match, Scheme], ...]
    kept: tuple[tuple[Match, str], ...]
    at_load: bool = False

    @property
    def label(self) -> str:
        """As vLLM names it: a ``quant_method``, or ``--quantization``'s value."""
        return "fp8" if self.at_load else self.method

    @property
    def text(self) -> str:
        """For logs: whose config, and what shares a scale."""
        said = dict.fromkeys(_scaled(one) for _, one in self.groups)
        kinds = dict.fromkeys("FP8" if isinstance(one, Fp8Scheme) else "four bits" for _, one in self.groups)
        return f"{' and '.join(kinds)} ({self.method}; a scale for each {' or '.join(said)})"

    @property
    def fp8(self) -> bool:
        """Whether a matrix may be FP8."""
        return any(isinstance(one, Fp8Scheme) for _, one in self.groups)

    @property
    def four_bits(self) -> bool:
        """Whether a matrix may be of four bits."""
        return any(isinstance(one, FourBitScheme) for _, one in self.groups)

    def __contains__(self, tensor: object) -> bool:
        """Whether a checkpoint may have a tensor of this name, where producers differ in names."""
        return self.method == "mxfp4" and str(tensor).endswith("_blocks")

    def scheme(self, module: str) -> Scheme | None:
        """None where the config leaves ``module`` as it is."""
        if self.kept_by(module) is not None:
            return None
        return next((scheme for belongs, scheme in self.groups if belongs(module)), None)

    def kept_by(self, module: str) -> str | None:
        """The entry of the config that leaves ``module`` unquantised, if any."""
        return next((entry for keeps, entry in self.kept if keeps(module)), None)


def _scaled(scheme: Scheme) -> str:
    if isinstance(scheme, FourBitScheme):
        return f"{scheme.group} columns" if scheme.group else "row"
    return "x".join(map(str, scheme.block)) if scheme.block else scheme.granularity


def read_quantization(config: Mapping[str, Any], exported: Mapping[str, Any] | None = None) -> Quantization | None:
    """From the parsed config.json and, for modelopt's older exports, hf_quant_config.json; config.json counts first.

    None for a checkpoint whose matrices are not quantised, whether or not it says how keys and values are scaled
    (weights.py). Raises ValueError, which names key and value, for a method, a format or a detail that is not
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
        raise ValueError(f"'quant_method' {method!r} is not supported; supported are {', '.join(READERS)}")
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
    _only(config, "fmt", ("e4m3", "float8_e4m3fn"))
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
        return Quantization("modelopt", ((_always, _modelopt_scheme(config, "'quant_algo'")),), kept)
    layers = _object(config, "quantized_layers")
    groups: list[tuple[Match, Scheme]] = []
    for name in layers:
        entry = f"'quantized_layers' entry {name!r}, 'quant_algo'"
        groups.append((_wildcard(name), _modelopt_scheme(_object(layers, name), entry)))
    return Quantization("modelopt", tuple(groups), kept)


def _modelopt_scheme(config: Mapping[str, Any], entry: str) -> Scheme:
    algorithm = str(config.get("quant_algo")).upper()
    if algorithm == "NVFP4":
        return FourBitScheme("NVFP4", _group_size(config, "NVFP4"), f"{entry} {algorithm}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{entry} {algorithm} is not supported; supported are {', '.join(ALGORITHMS)}, NVFP4")
    granularity, block = ALGORITHMS[algorithm]
    return Fp8Scheme(granularity, block, f"{entry} {algorithm}")


def _group_size(config: Mapping[str, Any], layout: str, where: str = "") -> int:
    """Columns that share a scale, as 'group_size' says; 0 for whole rows (-1)."""
    size, fixed = config.get("group_size"), FOUR_BITS[layout]
    if size is None and fixed is not None:
        return fixed
    legal = (
        isinstance(size, int) and not isinstance(size, bool) and (size == -1 or (size >= 2 and not size & (size - 1)))
    )
    if not legal or (fixed is not None and size != fixed):
        raise ValueError(f"'{where}group_size' {size!r} is not supported; supported: {fixed or 'powers of two, -1'}")
    return max(0, int(size or 0))


def _read_awq(config: Mapping[str, Any]) -> Quantization:
    for key, legal in (("bits", 4), ("zero_point", True)):
        _only(config, key, (legal,))
    _only(config, "version", ("gemm", "GEMM"))
    size = _group_size(config, "awq")
    return Quantization(
        "awq", ((_always, FourBitScheme("awq", size, "'quant_method' awq", True)),), _unconverted(config)
    )


def _read_gptq(config: Mapping[str, Any]) -> Quantization:
    _only(config, "bits", (4,))
    _only(config, "checkpoint_format", ("gptq", "gptq_v2"))
    symmetric = config.get("sym", True)
    if not isinstance(symmetric, bool):
        raise ValueError(f"'sym' must be true or false, not {symmetric!r}")
    plain_zeros = symmetric or config.get("checkpoint_format") == "gptq_v2"
    ordered = bool(config.get("desc_act"))
    entry = f"'quant_method' gptq, 'desc_act' {str(ordered).lower()}, 'sym' {str(symmetric).lower()}"
    layout = "gptq_v2" if plain_zeros else "gptq"
    scheme = FourBitScheme(layout, _group_size(config, "gptq"), entry, not symmetric, ordered)
    kept = list[tuple[Match, str]]()
    for pattern in _object(config, "dynamic"):
        if not pattern.startswith("-:"):
            raise ValueError(f"'dynamic' entry {pattern!r} is not supported; supported are those that begin with '-:'")
        kept.append((_target(f"re:{pattern[2:]}"), f"'dynamic' entry {pattern!r}"))
    return Quantization("gptq", ((_always, scheme),), (*kept, *_unconverted(config)))


def _read_mxfp4(config: Mapping[str, Any]) -> Quantization:
    scheme = FourBitScheme("mxfp4", _group_size({}, "mxfp4"), "'quant_method' mxfp4")
    return Quantization("mxfp4", ((_always, scheme),), _unconverted(config))


def _read_compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    _only(config, "quantization_status", ("compressed", "frozen"))
    _only(_object(config, "sparsity_config"), "format", ("dense",), "sparsity_config.")
    groups: list[tuple[Match, Scheme]] = []
    named = _object(config, "config_groups")
    if not named:
        raise ValueError("'config_groups' of compressed-tensors is empty")
    for name in named:
        group, where = _object(named, name), f"config_groups.{name}."
        found = group.get("format") or config.get("format")
        weights = _object(group, "weights")
        if found not in ("float-quantized", "naive-quantized", *_COMPRESSED_FOUR_BITS):
            legal = ", ".join(("float-quantized", *_COMPRESSED_FOUR_BITS))
            raise ValueError(f"compressed-tensors 'format' {found!r} is not supported; supported are {legal}")
        four_bits = found in _COMPRESSED_FOUR_BITS
        scheme = _compressed_four_bits(str(found), weights, where) if four_bits else _compressed_scheme(weights, where)
        groups += [(_target(target), scheme) for target in _names(group, "targets", where)]
    groups.sort(key=lambda group: group[0] is _always)  # a module's name counts before its class
    kept = tuple((_target(name), f"'ignore' entry {name!r}") for name in _names(config, "ignore"))
    return Quantization("compressed-tensors", tuple(groups), kept)


def _compressed_scheme(weights: Mapping[str, Any], where: str) -> Scheme:
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


_COMPRESSED_FOUR_BITS = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")


def _compressed_four_bits(layout: str, weights: Mapping[str, Any], where: str) -> Scheme:
    where += "weights."
    integers = layout == "pack-quantized"
    strategies = ("group", "channel") if integers else ("group", "tensor_group")
    legal = {
        "num_bits": (4,),
        "type": ("int",) if integers else ("float",),
        "symmetric": (True, False) if integers else (True,),
        "dynamic": (False,),
        "strategy": strategies,
        "actorder": ("weight", "static", "group", "dynamic", True, False) if integers else (False,),
    }
    for key, values in legal.items():
        _only(weights, key, values, where)
    strategy, order = weights.get("strategy") or strategies[0], weights.get("actorder")
    size = 0 if strategy == "channel" else _group_size(weights, layout, where)
    entry = f"'{where}strategy' {strategy!r}" + (f", 'actorder' {order!r}" if order else "")
    ordered = order in ("group", "dynamic", True)
    return FourBitScheme(layout, size, entry, integers and weights.get("symmetric") is False, ordered)


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
    "awq": _read_awq,
    "gptq": _read_gptq,
    "mxfp4": _read_mxfp4,
}
