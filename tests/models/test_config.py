"""config.json and generation_config.json in the spellings of transformers 4 and 5, and what is refused."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from models.config import ModelConfig, ModelConfigError, for_length
from models.drafters.draft_config import DFlashConfig, Eagle3Config, MTPConfig
from models.layers.rope import DefaultRope, LinearRope, Llama3Rope, ProportionalRope, YarnRope
from models.registry import config_from_dict, config_from_folder, model_class
from tests.models.drafters.tiny_drafters import dflash_config, eagle3_config, mtp_config
from tests.models.tiny_checkpoint import TINY
from tests.models.tiny_delta import FAMILIES
from tests.models.tiny_families import FAMILIES as OTHERS
from tests.models.tiny_nemotron import NEMOTRON

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 5,
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 16,
}
TWO_KINDS = ("full_attention", "sliding_attention")


def tiny(**changes: Any) -> ModelConfig:
    return config_from_dict({**TINY, **changes})


def test_both_transformers_styles_mean_the_same() -> None:
    new = {**TINY, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}, "dtype": "bfloat16"}
    old = {**TINY, "rope_scaling": LLAMA3, "rope_theta": 500000.0, "torch_dtype": "bfloat16"}
    del old["rope_parameters"], old["dtype"]
    config = config_from_dict(new)
    assert config == config_from_dict(old)
    assert config.rope == Llama3Rope(500000.0, 8.0, 1.0, 4.0, 8192)
    assert config.dtype == torch.bfloat16


DEFAULT = TINY["rope_parameters"]
OLD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
BESIDE_IMAGES: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {**TINY, "head_dim": 16, **FAMILIES["qwen3.5"]},
}


def test_both_spellings_of_rope_are_read_where_they_agree() -> None:
    yarn = {**OLD_YARN, "rope_type": "yarn", "rope_theta": 1e6, "beta_fast": None}
    del yarn["type"]
    assert tiny(rope_parameters=yarn, rope_scaling=OLD_YARN) == tiny(rope_parameters=yarn)
    assert tiny(rope_parameters=OLD_YARN, rope_scaling=yarn) == tiny(rope_parameters=yarn)
    outside = {**BESIDE_IMAGES, "rope_scaling": DEFAULT}
    assert config_from_dict(outside) == config_from_dict(BESIDE_IMAGES)


WEIGHTS = "model.safetensors"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("rope_parameters", "rope_scaling"),
    [(DEFAULT, OLD_YARN), (YARN, {"type": "default"}), (DEFAULT, {**DEFAULT, "rope_theta": 1e6})],
    ids=["yarn in the old", "yarn in the new", "theta"],
)
def test_two_spellings_of_rope_that_differ_are_refused(rope_parameters: Any, rope_scaling: Any) -> None:
    both = {"rope_parameters": rope_parameters, "rope_scaling": rope_scaling}
    in_text = {**BESIDE_IMAGES, "text_config": {**BESIDE_IMAGES["text_config"], **both}}
    for config in ({**TINY, **both}, in_text):
        with pytest.raises(ValueError, match=r"'rope_parameters' .* and 'rope_scaling' .* say different things"):
            config_from_dict(config)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rope_beside_the_text_config_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"'{key}' .*yarn.* stands beside 'text_config', which says .*default"):
        config_from_dict({**BESIDE_IMAGES, key: OLD_YARN})


@pytest.mark.parametrize(
    ("family", "eps", "theta"),
    [
        ({}, 1e-6, 1e4),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}, 1e-5, 1e6),
        ({**NEMOTRON, "attention_bias": False, "layer_norm_epsilon": None}, 1e-5, 1e4),
    ],
    ids=["qwen3", "mixtral", "nemotron-h"],
)
def test_absent_and_null_keys_take_transformers_defaults(family: dict[str, Any], eps: float, theta: float) -> None:
    config = {key: value for key, value in (TINY | family).items() if key not in ("rope_parameters", "dtype")}
    config |= {"rope_scaling": None, "head_dim": None, "num_key_value_heads": None, "tie_word_embeddings": None}
    read = config_from_dict(config)
    assert (read.rms_norm_eps, read.rope) == (eps, DefaultRope(theta))
    assert read.head_dim == read.rotary_dim == TINY["hidden_size"] // TINY["num_attention_heads"]
    assert read.kv_heads == read.heads == TINY["num_attention_heads"]
    assert read.dtype == torch.float32
    assert not read.tied_embeddings


@pytest.mark.parametrize(
    ("of_config", "of_generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (2, [5, 6, 7], (5, 6, 7)),
        (None, 0, (0,)),
        (None, None, ()),
    ],
)
def test_eos_ids_of_the_generation_config_win(
    tmp_path: Path, of_config: Any, of_generation: Any, expected: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "eos_token_id": of_config}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": of_generation}))
    assert config_from_folder(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("ids", ["<|im_end|>", [1, None], [[]], True, -1])
def test_a_bad_eos_id_of_the_generation_config_is_named_by_its_file(tmp_path: Path, ids: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ModelConfigError, match=r"/generation_config\.json: 'eos_token_id' must be .*, not") as caught:
        config_from_folder(tmp_path)
    assert repr(ids) in str(caught.value)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ({}, 128),  # Qwen3
        ({"architectures": ["LlamaForCausalLM"]}, 6),
        ({"architectures": ["Qwen2ForCausalLM"]}, 6),
        ({"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS}, 6),
        ({"architectures": ["MixtralForCausalLM"], **EXPERTS}, 6),
        ({**NEMOTRON, "attention_bias": False}, 128),
        *((FAMILIES[name], 256) for name in ("qwen3-next", "qwen3.5", "qwen3.5-moe")),
    ],
)
def test_an_absent_head_dim_is_the_familys_default(family: dict[str, Any], expected: int) -> None:
    """As in the config classes of transformers 5; those without one divide the hidden size by the heads."""
    config = {key: value for key, value in (TINY | family).items() if key != "head_dim"}
    assert config_from_dict(config).head_dim == expected
    assert config_from_dict(config | {"head_dim": 16}).head_dim == 16


@pytest.mark.parametrize("where", [{}, {"torch_dtype": None}, {"dtype": None, "text_config": {"dtype": None}}])
def test_a_config_without_dtype_takes_that_of_most_of_its_weights(tmp_path: Path, where: dict[str, Any]) -> None:
    config = {key: value for key, value in (TINY | where).items() if key != "dtype" or key in where}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert config_from_folder(tmp_path).dtype == torch.float32, "no weights"
    bias = {f"bias{n}": torch.zeros(1) for n in range(3)}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        save_file({**bias, "a": torch.zeros(3, 4, dtype=dtype), "ids": torch.zeros(99).int()}, tmp_path / WEIGHTS)
        assert config_from_folder(tmp_path).dtype == dtype
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    assert config_from_folder(tmp_path).dtype == torch.bfloat16, "what the config says counts"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / WEIGHTS).write_bytes(b"damaged")
    assert config_from_folder(tmp_path).dtype == torch.float32


def test_yarn_extends_the_context() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    config = tiny(rope_parameters=yarn, max_position_embeddings=40960)
    assert config.max_length == 131072
    assert isinstance(config.rope, YarnRope)
    assert config.rope.original_context == 32768
    assert tiny(rope_parameters=yarn, max_position_embeddings=200000).max_length == 200000


def test_longrope_takes_the_factors_of_its_longest_sequence() -> None:
    long = tiny(rope_parameters=LONG)
    plain = DefaultRope(1e4).frequencies(10)
    assert torch.equal(long.rope.frequencies(10), plain / torch.tensor(LONG["long_factor"]))
    assert torch.equal(for_length(long, 16).rope.frequencies(10), plain)
    assert long.rope.attention_factor == pytest.approx((1 + math.log(4) / math.log(16)) ** 0.5)
    assert for_length(long, 16).rope.attention_factor == long.rope.attention_factor
    assert tiny(rope_parameters={**LONG, "type": "su", "rope_type": None}) == long
    assert for_length(tiny(), 8) == tiny()


def test_rope_parameters_by_layer_type_are_read_where_one_rotation_serves_all() -> None:
    said = {"rope_type": "default", "rope_theta": 5e5}
    both = dict.fromkeys(TWO_KINDS, said)
    assert tiny(rope_parameters=both) == tiny(rope_parameters=said)
    other = both | {"sliding_attention": {"rope_theta": 1e4}}
    assert tiny(rope_parameters=other, layer_types=["full_attention"] * 2) == tiny(rope_parameters=said)


def test_partial_rotation() -> None:
    """Families whose whole heads transformers rotates, whatever this key says, refuse it."""
    glm = OTHERS["glm"] | {"partial_rotary_factor": 0.25}
    assert config_from_dict(TINY | glm | {"head_dim": 16}).rotary_dim == 4
    inside = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    for changes in ({"partial_rotary_factor": 0.5}, inside):
        with pytest.raises(ValueError, match=r"'partial_rotary_factor' is 0\.5, but this family rotates whole"):
            tiny(**changes)


def test_absent_rope_of_ministral_3_is_the_oracles() -> None:
    config = {key: value for key, value in TINY.items() if key != "rope_parameters"}
    read = config_from_dict(config | {"architectures": ["Ministral3ForCausalLM"]})
    assert (read.rope, read.query_scale) == (YarnRope(1e6, 16.0, 16384, 1.0), (0.1, 16384))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"vocab_size": "37"}, "'vocab_size' must be a positive integer, not '37'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be a positive integer, not 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 9}, "head_dim 9 rotates 9 dims"),
        ({"rms_norm_eps": "1e-6"}, "'rms_norm_eps' must be a number"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' must be true or false, not 1"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported; supported dtypes are bfloat16, float16, float32"),
        ({"architectures": None}, "'architectures' must name one architecture"),
        ({"architectures": ["A", "B"]}, "'architectures' must name one architecture"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'quant_method' 'hqq' is not supported"),
        ({"layer_types": ["full_attention"]}, "'layer_types' has 1 entries"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'layer_types' has 'linear_attention'"),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 63}, "'sliding_window' is 63"),
        ({"kv_lora_rank": 512}, "'kv_lora_rank' is 512, which asks for multi-head latent attention"),
        ({"rotary_dim": 4}, "'rotary_dim' is 4, but 10 dims of a head are rotated"),
        ({"key_multiplier": 0.5}, "'key_multiplier' is 0.5, which asks for scaled keys; only 1 is implemented"),
        ({"no_rope_layers": [1, 0]}, "'no_rope_layers' is [1, 0], which asks for layers without rotation"),
        ({"rotary_pct": 0.5}, "'rotary_pct' is 0.5, which asks for rotating a part of each head; only 1 is"),
        ({"use_qk_norm": False}, "'use_qk_norm' is False, which asks for no norms of queries and keys; only True is"),
        ({"architectures": ["LlamaForCausalLM"], "qk_layernorm": True}, "'qk_layernorm' is True, which asks for norms"),
        ({"swiglu_limit": 7.0}, "'swiglu_limit' is 7.0, which asks for clipped activations"),
        ({"is_causal": False}, "'is_causal' is false, but only causal attention is implemented"),
        ({"is_causal": 0}, "'is_causal' must be true or false, not 0"),
        (
            {"dual_chunk_attention_config": {"chunk_size": 48, "original_max_position_embeddings": 32}},
            "set 'max_position_embeddings' (64) to its 'original_max_position_embeddings' (32)",
        ),
        ({"dual_chunk_attention_config": 1}, "'dual_chunk_attention_config'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_parameters": LONG | {"long_factor": [1.0]}}, "'short_factor' has 5 factors, but 'long_factor' has 1"),
        ({"rope_parameters": LONG | {"long_factor": 2.0}}, "'long_factor' must be a list of numbers, not 2.0"),
        ({"rope_parameters": LONG, "head_dim": 8}, "'short_factor' has 5 factors, but 8 dims of a head are rotated"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "needs the key 'factor'"),
        ({"rope_parameters": {"rope_type": "default", "short_factor": [1]}}, "not understood: 'short_factor' [1]"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2}}, "not understood: 'factor' 2"),
        ({"rope_parameters": YARN | {"apply_yarn_scaling": False}}, "not understood: 'apply_yarn_scaling' False"),
        ({"rope_parameters": YARN | {"extrapolation_factor": 2.0}}, "not understood: 'extrapolation_factor' 2.0"),
        ({"rope_parameters": YARN | {"attn_factor": "1"}}, "'attn_factor' must be a positive number, not '1'"),
        ({"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0, which asks for soft-capped logits"),
        ({"residual_multiplier": 0.2}, "'residual_multiplier' is 0.2, which asks for scaled activations; only 1 is"),
        ({"rope_parameters": {kind: {"rope_theta": len(kind)} for kind in TWO_KINDS}}, "differ by layer type"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope type ['yarn'] is not supported"),
        ({"rope_parameters": [1]}, "rope parameters must be an object, not [1]"),
        ({"rope_parameters": {**LLAMA3, "rope_theta": [5]}}, "'rope_theta' must be a positive number, not [5]"),
        ({"rope_parameters": {**LLAMA3, "factor": "8"}}, "'factor' must be a positive number, not '8'"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "must be more than 'low_freq_factor', which is 1"),
        ({"rope_parameters": YARN | {"beta_fast": 0}}, "'beta_fast' must be a positive number, not 0"),
        ({"rope_parameters": YARN | {"original_max_position_embeddings": 0.5}}, "must be a whole number, not 0.5"),
        ({"rope_parameters": YARN | {"rope_theta": 1}}, "'rope_theta' is 1, but yarn needs more than 1"),
        ({"rope_parameters": YARN | {"factor": 1e9}}, "which is too many"),
        ({"partial_rotary_factor": 2.0}, "'partial_rotary_factor' must lie in (0, 1], not 2.0"),
        ({"layer_types": 2}, "'layer_types' must be a list, not 2"),
        ({"vocab_size": 2**31}, "'vocab_size' must be at most 2147483647, not 2147483648"),
        ({"num_hidden_layers": 10_001}, "'num_hidden_layers' must be at most 10000"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be a number, not nan"),
        ({"dtype": ["bfloat16"]}, "dtype ['bfloat16'] is not supported"),
        ({"eos_token_id": [-1]}, "'eos_token_id' must be a token id or a list of them"),
        ({"bos_token_id": 2**31}, "'bos_token_id' must be a token id or a list of them"),
    ],
)
def test_what_is_refused_is_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, **changes}))
    with pytest.raises(ModelConfigError) as caught:
        config_from_folder(tmp_path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("qwen3.5", {"attn_output_gate": False}, "'attn_output_gate' is False, which asks for attention without an"),
        ("qwen3.5", {"mamba_ssm_dtype": "bfloat16"}, "'mamba_ssm_dtype' is 'bfloat16', which asks for recurrent state"),
        (
            "qwen3-next",
            {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
            "'sliding_attention'",
        ),
        ("qwen3-next", {"layer_types": ["linear_attention"]}, "'layer_types' must list the kinds of 3 layers"),
        (
            "qwen3-next",
            {"linear_num_key_heads": 3},
            "linear_num_value_heads 4 is not a multiple of linear_num_key_heads 3",
        ),
        ("qwen3-next", {"linear_num_key_heads": None}, "the key 'linear_num_key_heads' is missing"),
        ("qwen3-next", {"linear_conv_kernel_dim": 1}, "'linear_conv_kernel_dim' must be at least 2, not 1"),
        ("qwen3-next", {"head_dim": None}, "the key 'head_dim' is missing"),
        ("qwen3-next", {"scoring_func": "sigmoid"}, "'scoring_func' is 'sigmoid'"),
        ("qwen3.5-moe", {"norm_topk_prob": False}, "'norm_topk_prob' is False, but this family always renormalises"),
        ("qwen3.5-moe", {"shared_expert_intermediate_size": None}, "'shared_expert_intermediate_size' is missing"),
        ("qwen3.5-moe", {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}, "'text_config' must be an object"),
    ],
)
def test_what_a_hybrid_asks_and_is_not_implemented_is_named(family: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        tiny(**({"head_dim": 16} | FAMILIES[family] | changes))


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("glm", {"scoring_func": "softmax"}, "'scoring_func' is 'softmax', which asks for another router"),
        ("smollm3", {"sliding_window": 0}, "'sliding_window' must be a positive integer, not 0"),
        ("hy3", {"expert_hidden_dim": 8}, "'expert_hidden_dim' is 8, which asks for experts of another size"),
        ("hy3", {"route_norm": False}, "'route_norm' is False, which asks for weights of experts"),
        ("hy3", {"first_k_dense_replace": 2}, "'first_k_dense_replace' is 2, which asks for other dense layers"),
        ("granite-4", {"normalization_function": "layernorm"}, "'normalization_function' is 'layernorm'"),
        ("phi", {"full_attn_mod": 2}, "'full_attn_mod' is 2, which asks for attention of another kind"),
        ("phi", {"lm_head_bias": True}, "'lm_head_bias' is True, which asks for a bias of its head"),
        ("olmo3", {"rope_parameters": DEFAULT}, "'rope_parameters' must have an object for 'sliding_attention' and"),
        ("olmo3", {"rope_parameters": None, "rope_theta": 1e4}, "'rope_theta' is 10000.0, which transformers 5 takes"),
        (
            "olmo3",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "'rope_scaling' must say 'rope_type', not 'type'",
        ),
        ("glm", {"n_group": 3}, "'n_group' is 3, but 8 experts do not make"),
        (
            "hy3",
            {"mlp_layer_types": ["sparse"]},
            "'mlp_layer_types' must name 'dense' or 'sparse' for each of",
        ),
        ("hy3", {"mlp_bias": True}, "'mlp_bias' is True, which asks for biases of its MLPs"),
        ("minimax", {"attn_type_list": [1, 0]}, "'attn_type_list' is [1, 0], but only 1, full attention, is supported"),
        ("minimax", {"shared_intermediate_size": 8}, "'shared_intermediate_size' is 8, which asks for a shared expert"),
        ("minimax", {"qk_norm_type": "per_head"}, "'qk_norm_type' is 'per_head'"),
        ("minimax", {"norm_topk_prob": False}, "'norm_topk_prob' is False, which asks for weights of experts"),
        ("minimax", {"routed_scaling_factor": 2.5}, "'routed_scaling_factor' is 2.5, which asks for scaling"),
        ("minimax", {"n_group": 2}, "'n_group' is 2, which asks for choosing experts"),
        ("minimax", {"num_expert_group": 2}, "'num_expert_group' is 2, a key that MiniMaxM2ForCausalLM is not known"),
        ("phi", {"rope_parameters": {"type": "su"}}, "rope type 'longrope' needs the key 'short_factor'"),
        ("seed", {"attention_out_bias": 1}, "'attention_out_bias' must be true or false, not 1"),
        ("ministral3", {"kv_lora_rank": 64}, "multi-head latent attention (MLA; use a model with grouped queries)"),
    ],
)
def test_what_a_family_asks_and_is_not_implemented_is_named(family: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        tiny(**OTHERS[family] | changes)


def test_the_text_part_of_mistral_3_is_read_by_its_kind() -> None:
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "vision_config": {"depth": 1}}
    inner = {key: value for key, value in (TINY | OTHERS["ministral3"]).items() if key != "architectures"}
    read = config_from_dict({**outer, "text_config": inner | {"model_type": "ministral3", "rms_norm_eps": None}})
    assert (read.query_scale, read.rms_norm_eps, read.max_length) == ((0.1, 16), 1e-6, 64)
    small = {**TINY, "model_type": "mistral", "attention_bias": False, "sliding_window": None}
    assert config_from_dict({**outer, "text_config": small}).query_scale is None
    with pytest.raises(ValueError, match="'model_type' of 'text_config' is 'mistral4', but only mistral and"):
        config_from_dict({**outer, "text_config": small | {"model_type": "mistral4"}})


def test_configs_of_qwen_3_6_and_3_8_open() -> None:
    """As published: the keys of Qwen3.5, and the type of a gate."""
    more = {"output_gate_type": "swish", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    more |= {"full_attention_interval": 3, "attn_output_gate": True, "mamba_ssm_dtype": "float32", "pad_token_id": 5}
    for kind in ("qwen3.5", "qwen3.5-moe"):
        text = {**TINY, "head_dim": 16, **FAMILIES[kind], **more}
        (name,) = text.pop("architectures")
        wrapped = {"architectures": [name.replace("ForCausalLM", "ForConditionalGeneration")], "text_config": text}
        read = config_from_dict(wrapped | {"image_token_id": 7, "vision_config": {"depth": 1}})
        assert read.delta is not None
        assert read.mtp_layers == 1
        with pytest.raises(ValueError, match="'output_gate_type' is 'sigmoid', which asks for another gate"):
            config_from_dict(wrapped | {"text_config": text | {"output_gate_type": "sigmoid"}})


def test_an_absent_tie_is_read_from_what_is_stored(tmp_path: Path) -> None:
    config = {key: value for key, value in TINY.items() if key != "tie_word_embeddings"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not config_from_folder(tmp_path).tied_embeddings, "no weights"
    for name, tied in (("model.embed_tokens.weight", True), ("lm_head.weight", False)):
        save_file({name: torch.zeros(2, 2)}, tmp_path / WEIGHTS)
        assert config_from_folder(tmp_path).tied_embeddings == tied


def test_a_hybrid_s_keys_mean_what_transformers_takes_them_for() -> None:
    family = {
        key: value for key, value in FAMILIES["qwen3.5"].items() if key not in ("layer_types", "partial_rotary_factor")
    }
    family |= {"num_hidden_layers": 8, "head_dim": 32}
    config = tiny(**family)
    assert config.delta is not None
    assert config.delta.layers == (0, 1, 2, 4, 5, 6)
    assert config.rotary_dim == 8, "a quarter, where nothing is said"
    every_third = tiny(**family, full_attention_interval=3)
    assert every_third.delta is not None
    assert every_third.delta.layers == (0, 1, 3, 4, 6, 7)
    text = {**TINY, **family, "dtype": "bfloat16", "eos_token_id": 5}
    beside_images = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": True,
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": {"depth": 2},
    }
    found = config_from_dict(beside_images)
    assert found.tied_embeddings
    assert found == replace(
        config_from_dict(text), architecture="Qwen3_5ForConditionalGeneration", tied_embeddings=True
    )


ODD_VALUES: list[Any] = [None, True, 0, -1, 3, 10**30, 0.5, 1e308, float("nan"), float("inf"), "", "8", [], [[]], [1]]
ODD_VALUES += [{}, {"a": 1}, {"rope_type": "yarn"}]


HYBRID: dict[str, Any] = TINY | {"head_dim": 16} | FAMILIES["qwen3.5-moe"]
HYBRID = {key: value for key, value in HYBRID.items() if key != "partial_rotary_factor"}
NEMOTRON_MTP: dict[str, Any] = TINY | NEMOTRON | {"attention_bias": False, "num_nextn_predict_layers": 1}
NEMOTRON_MTP["mtp_layers_block_type"] = ["attention", "moe"]
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "num_hidden_layers": 7,
    "hidden_size": 64,
    "intermediate_size": 96,
    "hidden_size_per_layer_input": 0,
}
FULL: dict[str, Any] = {"layer_types": ["full_attention"] * 2, "sliding_window": None, "is_causal": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        (
            config_from_dict,
            [
                TINY | {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
                TINY | {"rope_parameters": YARN, "rope_scaling": YARN},
                TINY | {"layer_types": ["full_attention"] * 2, "sliding_window": 3, "max_window_layers": 2},
            ],
        ),
        (config_from_dict, [HYBRID, {**BESIDE_IMAGES, "rope_scaling": None}]),
        (config_from_dict, [NEMOTRON_MTP]),
        (config_from_dict, [GEMMA4, *(TINY | OTHERS[name] for name in ("granite-4", "olmo3", "smollm3", "gemma4"))]),
        (DFlashConfig.from_dict, [dflash_config(**FULL)]),
        (MTPConfig.from_dict, [mtp_config()]),
        (Eagle3Config.from_dict, [eagle3_config(**FULL)]),
    ],
    ids=["attention", "hybrid", "nemotron-h", "others", "dflash", "mtp", "eagle3"],
)
def test_whatever_a_key_holds_it_is_understood_or_refused_by_name(
    kind: Callable[[dict[str, Any]], ModelConfig | DFlashConfig | MTPConfig | Eagle3Config], bases: list[dict[str, Any]]
) -> None:
    """1,000 configs with one or two odd values: nothing but ValueError, and frequencies that are numbers."""
    draw, understood = random.Random(0), 0
    for _ in range(1000):
        config = json.loads(json.dumps(draw.choice(bases)))
        for _ in range(draw.choice((1, 1, 2))):
            place = draw.choice(objects_in(config))
            place[draw.choice(list(place))] = deepcopy(draw.choice(ODD_VALUES))
        try:
            read = kind(config)
        except ValueError:
            continue
        understood += 1
        model = read if isinstance(read, ModelConfig) else read.model
        assert bool(model.rope.frequencies(model.rotary_dim).isfinite().all())
    assert 25 < understood < 500


def objects_in(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The object itself and those inside it, unless they are empty."""
    inner = [found for value in config.values() if isinstance(value, dict) for found in objects_in(value)]
    return [config, *inner] if config else []


def test_windows_of_mistral() -> None:
    """All layers slide, by 4096 where the key is absent, whatever other keys say; of Ministral by 'layer_types'."""
    mistral: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}
    absent = tiny(**mistral)
    assert [absent.attention_of(layer).window for layer in range(2)] == [4096, 4096]
    assert tiny(**mistral, sliding_window=9).attention_of(1).window == 9
    types = ["sliding_attention", "full_attention"]
    ignored = tiny(**mistral, sliding_window=9, layer_types=types, use_sliding_window=False)
    assert [ignored.attention_of(layer).window for layer in range(2)] == [9, 9]
    ministral = mistral | {"architectures": ["MinistralForCausalLM"]}
    mixed = tiny(**ministral, sliding_window=9, layer_types=types)
    assert [mixed.attention_of(layer).window for layer in range(2)] == [9, None]
    assert tiny(**mistral, sliding_window=8192).attention == ()
    with pytest.raises(ValueError, match="'layer_types' has 1 entries, but 'num_hidden_layers' is 2"):
        tiny(**ministral, layer_types=["full_attention"])
    with pytest.raises(ValueError, match="'sliding_window' must be"):
        tiny(**mistral, sliding_window=2.5)


def test_absent_keys_of_gpt_oss_are_the_oracles() -> None:
    sizes = {key: value for key, value in TINY.items() if key not in ("head_dim", "rope_parameters", "rms_norm_eps")}
    config = config_from_dict(sizes | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4})
    assert config.experts is not None
    assert (config.experts.per_token, config.experts.limit, config.experts.renormalise) == (4, 7.0, True)
    assert (config.head_dim, config.attention_bias, config.rms_norm_eps) == (64, True, 1e-5)
    assert config.rope == YarnRope(1.5e5, 32.0, 4096, 0.1 * math.log(32) + 1, truncate=False)
    assert [spec.window for spec in config.attention] == [128, None]
    assert all(spec.sinks for spec in config.attention)
    with pytest.raises(ValueError, match="'swiglu_alpha' is 2"):
        config_from_dict(sizes | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "swiglu_alpha": 2})


def test_gemma_3_beside_images_says_little() -> None:
    """As the published folders of 4B and larger ones do; the rest are the oracle's defaults."""
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "sliding_window": 1024}
    scaled = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "model_type": "gemma3_text"}
    config = config_from_dict({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text | scaled})
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert (config.max_length, config.tied_embeddings) == (131072, True)
    assert config.ropes == (LinearRope(1e6, 8.0), DefaultRope(1e4))
    assert [spec.window for spec in config.attention] == [*[1024] * 5, None, 1024]
    assert [spec.rope for spec in config.attention] == [1, 1, 1, 1, 1, 0, 1]
    assert {spec.scale for spec in config.attention} == {1 / 16}
    with pytest.raises(ValueError, match="'rope_parameters' must have an object for 'sliding_attention' and"):
        config_from_dict({"architectures": ["Gemma3ForCausalLM"], **text, "rope_parameters": {"rope_theta": 1e4}})
    for key, value in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        with pytest.raises(ValueError, match=f"{key!r} is {value}"):
            config_from_dict({"architectures": ["Gemma3ForCausalLM"], **text, key: value})


def test_windows_begin_where_transformers_has_them() -> None:
    """Qwen2 and Qwen3: from 'max_window_layers' on, or by 'layer_types'; Qwen3-MoE and Mixtral: in every layer."""

    def windows(**changes: Any) -> list[int | None]:
        config = tiny(num_hidden_layers=3, max_position_embeddings=8192, **changes)
        return [config.attention_of(layer).window for layer in range(3)]

    asked: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    types = {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    sparse = {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "moe_intermediate_size": 8}
    for dense in (["Qwen2ForCausalLM"], ["Qwen3ForCausalLM"]):
        assert windows(architectures=dense, **asked) == [None, 8, 8]
        assert windows(architectures=dense, **(asked | types)) == [8, None, None]
        assert windows(architectures=dense, **(asked | {"use_sliding_window": False})) == [None] * 3
        assert windows(architectures=dense, use_sliding_window=True, max_window_layers=0) == [4096] * 3
    assert windows(**sparse, **asked, **types) == [8] * 3
    assert windows(architectures=["MixtralForCausalLM"], **EXPERTS, sliding_window=8) == [8] * 3


def test_sliding_window_that_no_layer_uses_is_fine() -> None:
    """Qwen2 folders carry the keys although the window is off, or begins after the last layer."""
    tiny(use_sliding_window=False, sliding_window=4096, max_window_layers=1)
    tiny(use_sliding_window=True, sliding_window=4096, max_window_layers=2)
    tiny(layer_types=["full_attention"] * 2)
    tiny(use_sliding_window=True, sliding_window=64)
    tiny(architectures=["MistralForCausalLM"], sliding_window=None, max_position_embeddings=8192)
    mixtral = {"architectures": ["MixtralForCausalLM"], **EXPERTS}
    tiny(**mixtral, sliding_window=64)
    tiny(**mixtral, sliding_window=8, use_sliding_window=False)


def test_options_that_ask_for_what_is_done_anyway_are_fine() -> None:
    same = {
        "qk_norm": True,
        "rotary_dim": 10,
        "rotary_pct": 1.0,
        "rope_interleave": False,
        "lm_head_multiplier": 1,
        "alibi": False,
    }
    assert tiny(**same, hidden_activation="silu", kv_lora_rank=None, sliding_window=None) == tiny()


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ({}, "new_scaling", 2.0),
        ({}, "nested", {"deep": {"factor": 2}}),
        ({}, "num_experts", 8),  # of another family
        ({}, "mamba_num_heads", 8),
        ({}, "linear_num_key_heads", 8),
        ({}, "first_k_dense_replace", 1),
        ({}, "n_shared_experts", 1),
        ({}, "text_config", {"vocab_size": 5}),
        ({}, "quantization", {"bits": 4}),  # MLX
        ({}, "layer_norm_eps", 1e-3),
        ({"architectures": ["LlamaForCausalLM"]}, "use_sliding_window_cache", True),
        (HYBRID, "first_k_dense_replace", 1),
        (NEMOTRON_MTP, "attention_head_dim", 48),
        (NEMOTRON_MTP, "new_scaling", [1]),
    ],
)
def test_a_key_that_may_change_numbers_is_refused_by_name_and_value(family: Any, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{key!r} is {value!r}")):
        config_from_dict({**TINY, **family, key: value})


@pytest.mark.parametrize("value", [None, False, 0, [], {}, "", {"deep": {"factor": None}}])
def test_an_unknown_key_that_asks_for_nothing_is_fine(value: Any) -> None:
    assert tiny(new_scaling=value) == tiny()


def test_keys_that_change_nothing_are_fine() -> None:
    """Of transformers 4 and 5, of trainers, and of conversions."""
    idle = {
        "_name_or_path": "x",
        "_attn_implementation_autoset": True,
        "auto_map": {"AutoModel": "x.Y"},
        "do_sample": True,
        "finetuned": True,
        "id2label": {"0": "LABEL_0"},
        "initializer_range": 0.02,
        "max_length": 20,
        "pad_token_id": 3,
        "pretraining_tp": 1,
        "transformers.js_config": {"dtype": "q4"},
        "unsloth_version": "2025.1",
    }
    assert tiny(**idle) == tiny()


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        (
            OTHERS["hy3"],
            {"expert_hidden_dim": 16, "first_k_dense_replace": 1, "route_norm": True, "qk_norm": True}
            | {"moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True, "enable_lm_head_fp32": True}
            | {"eod_token_id": 3, "sep_token_id": 4, "output_router_logits": True},
        ),
        (OTHERS["phi"], {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),
        (OTHERS["granite-4"], {"normalization_function": "rmsnorm", "init_method": "mup"}),
        (NEMOTRON_MTP, {"norm_eps": 1e-3, "rms_norm_eps": 1e-3, "num_logits_to_keep": 1, "rope_theta": 1e5}),
        (OTHERS["glm"], {"first_k_dense_replace": 1, "attention_dropout": 0.0}),
        (OTHERS["olmo3"], {"rope_parameters": {**OTHERS["olmo3"]["rope_parameters"], "rope_type": "yarn"}}),
    ],
    ids=["hy3", "phi-4-mini", "granite-4", "nemotron-3-nano", "glm", "olmo-3"],
)
def test_keys_of_published_folders_that_transformers_does_not_read(family: Any, keys: dict[str, Any]) -> None:
    assert config_from_dict({**TINY, **family, **keys}) == config_from_dict({**TINY, **family})


def test_more_dense_layers_than_there_are() -> None:
    experts = tiny(**{**OTHERS["glm"], "first_k_dense_replace": 3}).experts
    assert experts is not None
    assert experts.layers == ()


@pytest.mark.slow
def test_configs_that_transformers_writes_for_each_family_open() -> None:
    import transformers  # takes seconds, so not at collection

    for name in (
        *("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "NemotronH"),
        *(
            "Mistral",
            "Ministral3",
            "Glm4Moe",
            "HYV3",
            "MiniMaxM2",
            "Phi3",
            "SeedOss",
            "Ernie4_5",
            "Ernie4_5_Moe",
            "Glm",
            "Glm4",
        ),
    ):
        text = "Text" if name.startswith("Qwen3_5") else ""
        config = getattr(transformers, f"{name}{text}Config")().to_dict()
        if name == "Glm4Moe":  # whose default head rotates an odd number of dims
            config["head_dim"] = 128
        read = config_from_dict({**config, "architectures": [f"{name}ForCausalLM"]})
        assert read.architecture == f"{name}ForCausalLM"


ABSENT = ("head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "sliding_window", "layer_types",
          "attention_bias", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "hidden_act",
          "partial_rotary_factor", "query_pre_attn_scalar", "first_k_dense_replace", "mlp_only_layers")  # fmt: skip


@pytest.mark.slow
def test_absent_keys_mean_what_transformers_takes_them_for() -> None:
    """Of each family, one key at a time: those that transformers gives a default, and no size that must be there."""
    import transformers

    for name in (
        *("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral", "Qwen3Next", "Qwen3_5Text", "Qwen3_5MoeText", "NemotronH"),
        *("Mistral", "Ministral3", "Glm4Moe", "HYV3", "MiniMaxM2", "Phi3", "SeedOss", "GptOss", "Gemma3Text"),
        *("Gemma4Text", "Gemma4UnifiedText", "SmolLM3", "Olmo2", "Olmo3", "Granite", "GraniteMoe", "GraniteMoeHybrid"),
        *("Ernie4_5", "Ernie4_5_Moe", "Glm", "Glm4"),
    ):
        kind = getattr(transformers, f"{name}Config")
        of_head = {"head_dim": 128} if name == "Glm4Moe" else {}  # whose default head rotates an odd number of dims
        of_head |= {"hidden_size_per_layer_input": 0} if name == "Gemma4Text" else {}  # 30 layers, numbered 00 to 29
        sizes = {"hidden_size": 1024, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 1000}
        given = {**kind(**sizes, **of_head).to_dict(), "architectures": [f"{name.removesuffix('Text')}ForCausalLM"]}
        for key in given.keys() & set(ABSENT) - of_head.keys():
            without = {other: value for other, value in given.items() if other != key}
            whole = {**kind(**without).to_dict(), "architectures": given["architectures"]}
            assert config_from_dict(without) == config_from_dict(whole), (name, key)


def test_configs_in_the_tree_open() -> None:
    for path in [*Path("models/shapes").glob("*/config.json"), Path("models/demo/config.json")]:
        config_from_folder(path.parent)


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "\x00"])
def test_malformed_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        config_from_folder(tmp_path)


def test_absent_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"holds no config\.json"):
        config_from_folder(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("model-Q4.gguf", "GGUF is not read: name the folder of the safetensors"),
        ("params.json", "Mistral's own format"),
    ],
)
def test_a_folder_of_another_format_says_what_to_type(tmp_path: Path, file: str, reason: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(ModelConfigError, match=reason):
        config_from_folder(tmp_path)


def test_an_unknown_architecture_names_the_nearest_and_the_keys_that_differ() -> None:
    asked = {**TINY, "architectures": ["Qwen3LongForCausalLM"], "kv_lora_rank": 512, "attention_sparsity": 0.5}
    reason = "the nearest by name, Qwen3ForCausalLM, differs in 'attention_sparsity' 0.5, 'kv_lora_rank' 512"
    with pytest.raises(ValueError, match=reason):
        config_from_dict(asked)


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'MambaForCausalLM' is not implemented; .* Llama.*, Qwen2.*, Qwen3"):
        model_class("MambaForCausalLM")


def test_gemma_4_has_the_oracles_defaults() -> None:
    """Heads of 256 dims in sliding layers, of 512 in every sixth and the last one."""
    config = config_from_dict(GEMMA4)
    kinds = [(spec.head_dim, spec.window, spec.rope, spec.scale) for spec in config.attention]
    sliding, full = (256, 512, 1, 1.0), (512, None, 0, 1.0)
    assert kinds == [*[sliding] * 5, full, full]
    assert {(spec.kv_heads, spec.value_norm, spec.values_are_keys) for spec in config.attention} == {(4, True, False)}
    assert (config.rotary_dim, config.tied_embeddings, config.logits_softcap) == (256, True, None)
    assert config.ropes == (ProportionalRope(1e6, 0.25, 1.0), DefaultRope(1e4))
    published = {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 2, "final_logit_softcapping": 30.0}
    text = {key: value for key, value in published.items() if key != "architectures"}
    wrapped = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text, "vision_config": {"depth": 1}}
    by_layer = {number: {"head_dim": 512, "num_key_value_heads": 2} for number in ("5", "6")}
    for config in (config_from_dict(published), config_from_dict(wrapped)):
        assert (config.attention_of(5).kv_heads, config.attention_of(4).kv_heads) == (2, 4)
        assert (config.attention_of(6).values_are_keys, config.logits_softcap) == (True, 30.0)
        assert config.attention == config_from_dict({**published, "per_layer_config": by_layer}).attention


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (GEMMA4 | {"hidden_size_per_layer_input": None}, "'hidden_size_per_layer_input' is 256, .* of E2B"),
        (GEMMA4 | {"num_kv_shared_layers": 2}, r"'num_kv_shared_layers' is 2, .*\(12B, 26B-A4B and 31B open\)"),
        (GEMMA4 | {"enable_moe_block": True}, "the key 'top_k_experts' is missing"),
        (GEMMA4 | {"use_bidirectional_attention": "all"}, "'use_bidirectional_attention' is 'all'"),
        (GEMMA4 | {"per_layer_config": {"5": {"head_dim": 512}}}, r"of all full layers \['5', '6'\]"),
        (GEMMA4 | {"per_layer_config": {n: {"scale": 2} for n in ("5", "6")}}, "only 'head_dim' and"),
        (GEMMA4 | {"num_global_key_value_heads": 3, "attention_k_eq_v": True}, "'num_global_key_value_heads' 3"),
        (GEMMA4 | {"rope_parameters": {"rope_type": "default"}}, "'rope_parameters' must have an object for"),
        (
            TINY | OTHERS["smollm3"] | {"no_rope_layers": [1, 0, 2, 1]},
            "'no_rope_layers' must list 0 or 1 for each",
        ),
        (TINY | OTHERS["granite"] | {"residual_multiplier": 0}, "'residual_multiplier' must be a positive number"),
        (TINY | OTHERS["granite-4"] | {"mamba_d_head": 5}, "'mamba_n_heads' 4 x 'mamba_d_head' 5 is not"),
        (TINY | OTHERS["granite-4"] | {"position_embedding_type": "alibi"}, "'position_embedding_type' is 'alibi'"),
        (TINY | OTHERS["granite-4"] | {"layer_types": ["mamba", "mlp"]}, "'layer_types' must name 'mamba' or"),
        (TINY | OTHERS["granite-4"] | {"time_step_limit": [0.0, 0.1]}, "'time_step_limit' is"),
    ],
    ids=str,
)
def test_what_todays_families_do_not_implement_is_refused_by_name(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        config_from_dict(given)
