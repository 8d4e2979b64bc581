"""What a config says of quantised matrices: every scheme, every ignore list, and what is refused, by key and value."""

from __future__ import annotations

import re
from typing import Any

import pytest

from models.quantization import FourBitScheme, Fp8Scheme, Quantization, read_quantization
from tests.models.quantised import schemes

LAYER = "model.layers.3."
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8"}


AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


def read(config: dict[str, Any]) -> Quantization:
    found = read_quantization({"quantization_config": config})
    assert found is not None
    return found


def compressed(**changes: Any) -> dict[str, Any]:
    """A group of compressed-tensors; ``changes`` go to its ``weights``, or above by the name of a key there."""
    config = {**schemes()["C"].config}
    group = dict(config["config_groups"]["group_0"])
    above = {key: changes.pop(key) for key in list(changes) if key in ("format", "targets", "ignore")}
    group["weights"] = {**group["weights"], **changes}
    if "targets" in above:
        group["targets"] = above.pop("targets")
    return {**config, "config_groups": {"group_0": group}, **above}


def int4(**changes: Any) -> dict[str, Any]:
    given = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, **changes}
    return compressed(format="pack-quantized", **given)


@pytest.mark.parametrize("letter", schemes())
def test_every_scheme_is_read(letter: str) -> None:
    scheme = schemes()[letter]
    found = read({**scheme.config, scheme.ignore: ["lm_head"]})
    matrix = found.scheme(f"{LAYER}mlp.up_proj")
    assert isinstance(matrix, Fp8Scheme)
    assert found.scheme("lm_head") is None
    rows, columns = scheme.grid
    assert matrix.granularity == ("block" if rows > 1 else "row" if rows else "tensor")
    assert matrix.block == ((rows, columns) if rows > 1 else None)
    assert matrix.activation_cap == (1200.0 if letter == "J" else None)


def test_a_checkpoint_without_the_key_is_not_quantised() -> None:
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None}, None) is None


def test_older_exports_of_modelopt_have_a_file_of_their_own_and_config_json_counts_first() -> None:
    exported = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.0*"]}}
    found = read_quantization({}, exported)
    assert found is not None
    assert found.method == "modelopt"
    assert found.scheme("model.layers.0.mlp.up_proj") is None
    assert found.scheme("model.layers.1.mlp.up_proj") is not None
    both = read_quantization({"quantization_config": FP8}, exported)
    assert both is not None
    assert both.method == "fp8"


CACHE_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}


def test_a_cache_alone_may_have_scales() -> None:
    for config in (
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": CACHE_SCHEME},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ):
        assert read_quantization({"quantization_config": config}) is None
    exported = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    assert read_quantization({}, exported) is None
    assert read(compressed() | {"kv_cache_scheme": CACHE_SCHEME}).scheme("mlp.up_proj") is not None


@pytest.mark.parametrize(
    ("entry", "module", "kept"),
    [
        ("mlp.gate", f"{LAYER}mlp.gate", True),
        ("mlp.gate", f"{LAYER}mlp.gate_proj", False),  # sglang#23467
        ("mlp.gate", f"{LAYER}mlp.gate_up_proj", False),
        ("linear_attn.in_proj_qkv", f"{LAYER}linear_attn.in_proj_qkv", True),  # vllm#44628: short names
        ("linear_attn.in_proj_qkv", f"{LAYER}linear_attn.in_proj_qkvz", False),
        ("model.layers.3", f"{LAYER}mlp.up_proj", True),
        ("model.layers.3", "model.layers.30.mlp.up_proj", False),
        ("lm_head", "lm_head", True),
    ],
)
def test_ignore_lists_match_whole_components(entry: str, module: str, kept: bool) -> None:
    for key in ("modules_to_not_convert", "ignored_layers"):
        found = read({**FP8, "fmt": "float8_e4m3fn", key: [entry]})  # as MiniMax-M2 says
        assert (found.scheme(module) is None) == kept
        assert found.kept_by(module) == (f"'{key}' entry {entry!r}" if kept else None)


@pytest.mark.parametrize(
    ("entry", "kept"),
    [
        ("re:.*mlp.gate$", True),
        ("re:.*gate_proj", False),
        ("re:mlp.gate", False),  # from the start of the name, as compressed-tensors matches
        (f"{LAYER}mlp.gate", True),
        ("mlp.gate", True),
        ("Linear", True),
    ],
)
def test_compressed_tensors_ignore_names_patterns_and_classes(entry: str, kept: bool) -> None:
    assert (read(compressed(ignore=[entry])).scheme(f"{LAYER}mlp.gate") is None) == kept


def test_targets_of_a_group_are_a_class_a_name_or_a_pattern() -> None:
    found = read(compressed(targets=["re:.*self_attn.*"]))
    assert found.scheme(f"{LAYER}self_attn.q_proj") is not None
    assert found.scheme(f"{LAYER}mlp.up_proj") is None


def test_layers_of_a_mixed_export_have_an_algorithm_each() -> None:
    layers = {f"{LAYER}mixer.in_proj": {"quant_algo": "FP8"}, "model.layers.4.*": {"quant_algo": "FP8_PB_WO"}}
    found = read({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    in_proj, up = found.scheme(f"{LAYER}mixer.in_proj"), found.scheme("model.layers.4.mixer.up_proj")
    assert isinstance(in_proj, Fp8Scheme)
    assert in_proj.granularity == "tensor"
    assert isinstance(up, Fp8Scheme)
    assert up.block == (128, 128)
    assert found.scheme("model.layers.5.mixer.in_proj") is None


@pytest.mark.parametrize(
    ("config", "layout", "group", "zeros", "ordered"),
    [
        (int4(), "pack-quantized", 128, False, False),
        (int4(group_size=32, symmetric=False, actorder="weight"), "pack-quantized", 32, True, False),
        (int4(actorder="group"), "pack-quantized", 128, False, True),
        (int4(strategy="channel", group_size=-1), "pack-quantized", 0, False, False),
        (AWQ, "awq", 128, True, False),
        (GPTQ, "gptq_v2", 128, False, False),  # symmetric: what is stored as zeros does not count
        ({**GPTQ, "sym": False}, "gptq", 128, True, False),
        ({**GPTQ, "sym": False, "checkpoint_format": "gptq_v2", "desc_act": True}, "gptq_v2", 128, True, True),
        ({**MODELOPT, "quant_algo": "NVFP4", "group_size": 16}, "NVFP4", 16, False, False),
        ({"quant_method": "mxfp4"}, "mxfp4", 32, False, False),
    ],
)
def test_four_bits_are_read(config: dict[str, Any], layout: str, group: int, zeros: bool, ordered: bool) -> None:
    scheme = read(config).scheme(f"{LAYER}mlp.up_proj")
    assert isinstance(scheme, FourBitScheme)
    assert (scheme.layout, scheme.group, scheme.zeros, scheme.ordered) == (layout, group, zeros, ordered)


def test_a_pattern_of_gptq_leaves_modules_as_they_are() -> None:
    found = read({**GPTQ, "dynamic": {"-:.*mlp.gate$": {}}})
    assert found.scheme(f"{LAYER}mlp.gate") is None
    assert found.kept_by(f"{LAYER}mlp.gate") == "'dynamic' entry '-:.*mlp.gate$'"
    assert found.scheme(f"{LAYER}mlp.gate_proj") is not None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "aqlm"}, "'quant_method' 'aqlm' is not supported; supported are fp8, compressed-tensors"),
        ({**FP8, "fmt": "e5m2"}, "'fmt' 'e5m2' is not supported"),
        ({**FP8, "activation_scheme": "rowwise"}, "'activation_scheme' 'rowwise'"),
        ({**FP8, "weight_block_size": [128]}, "'weight_block_size' must be two sizes"),
        ({**FP8, "weight_block_size": [100, 128]}, "'weight_block_size' must be two powers of two, not"),
        ({**FP8, "modules_to_not_convert": "lm_head"}, "'modules_to_not_convert' must be a list of names"),
        ({**MODELOPT, "quant_algo": "W4A8_AWQ"}, "'quant_algo' W4A8_AWQ is not supported; supported are FP8, "),
        ({**MODELOPT, "quant_algo": "NVFP4", "group_size": 32}, "'group_size' 32 is not supported; supported: 16"),
        (
            {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A16"}}},
            "entry 'a'",
        ),
        (compressed(num_bits=4, type="int"), "'config_groups.group_0.weights.num_bits' 4 is not supported"),
        (compressed(type="int"), "'config_groups.group_0.weights.type' 'int'"),
        (compressed(strategy="group"), "'config_groups.group_0.weights.strategy' 'group'"),
        (compressed(strategy="block"), "'config_groups.group_0.weights.block_structure' is missing"),
        (
            compressed(format="int-quantized"),
            "'format' 'int-quantized' is not supported; supported are float-quantized, ",
        ),
        (
            compressed(format="pack-quantized"),
            "'config_groups.group_0.weights.num_bits' 8 is not supported; supported: 4",
        ),
        (int4(group_size=100), "'config_groups.group_0.weights.group_size' 100 is not supported; supported: powers of"),
        (int4(strategy="tensor"), "'config_groups.group_0.weights.strategy' 'tensor'"),
        (int4(actorder="column"), "'config_groups.group_0.weights.actorder' 'column'"),
        ({**AWQ, "bits": 8}, "'bits' 8 is not supported; supported: 4"),
        ({**AWQ, "version": "gemv"}, "'version' 'gemv' is not supported; supported: 'gemm'"),
        ({**AWQ, "zero_point": False}, "'zero_point' False is not supported"),
        ({**AWQ, "group_size": None}, "'group_size' None is not supported; supported: powers of two, -1"),
        ({**GPTQ, "bits": 3}, "'bits' 3 is not supported"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "'checkpoint_format' 'marlin' is not supported"),
        ({**GPTQ, "dynamic": {"+:.*up_proj": {"bits": 8}}}, "'dynamic' entry '+:.*up_proj' is not supported"),
        (compressed(ignore=["re:("]), "'re:(' is not a regular expression"),
        ({**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparsity_config.format'"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 0}, "'activation_scale_ub' must be a positive number"),
        ({**MODELOPT, "kv_cache_quant_algo": "NVFP4"}, "'kv_cache_quant_algo' 'NVFP4' is not supported"),
        (
            {**compressed(), "kv_cache_scheme": {**CACHE_SCHEME, "type": "int"}},
            "'kv_cache_scheme.type' 'int' is not supported; supported: 'float'",
        ),
        ({**compressed(), "kv_cache_scheme": {"strategy": "token"}}, "'kv_cache_scheme.strategy' 'token'"),
        (["fp8"], "'quantization_config' must be an object"),
    ],
)
def test_what_is_not_supported_is_refused_by_key_and_value(config: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        read_quantization({"quantization_config": config})
