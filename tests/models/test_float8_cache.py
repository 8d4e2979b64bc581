"""A float8 KV cache without an engine: what is stored, and which scales a checkpoint gives it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.checkpoint import WeightsError
from models.fp8_load import quantised_at_load
from models.kernels.interface import Rotation
from models.kernels.traits import H200
from models.kv_group import FP8
from models.layers.attention import Attention
from models.registry import config_from_folder
from models.weights import load_model
from parallel.comm.collectives import SingleRank
from runtime.config import ConfigError, EngineConfig
from runtime.model_checks import kv_dtype
from tests.models.kernels.paged_driver import PagedDriver
from tests.models.kv_layers import empty_kv_layer
from tests.models.test_fp8 import MODELS, change, write_both
from tests.models.tiny_checkpoint import RankOf
from tests.plant import reference_kernels

KERNELS = reference_kernels()


def stored(qkv_TX: Tensor, factors_2K: Tensor | None = None) -> Tensor:
    """Keys and values [2, T, 2, 16] of packed qkv without norms and rotation, as a float8 cache holds them."""
    tokens = len(qkv_TX)
    kv = empty_kv_layer(1 + tokens, 1, 2, 16, FP8, "cpu")
    angles = torch.cat((torch.ones(1, 8), torch.zeros(1, 8)), 1)
    at = torch.zeros(tokens, dtype=torch.int64)
    KERNELS.rope_and_cache(
        qkv_TX, 2, kv, Rotation(None, None, 1e-6, angles, at, at + torch.arange(1, tokens + 1), factors_2K)
    )
    return kv[:, 1:, 0].float()


def test_codes_are_rounded_to_nearest_and_saturate() -> None:
    qkv = torch.randn(5, 96) * 3
    qkv[0, 32], qkv[0, 64], qkv[1, 64], qkv[2, 64] = 1e4, -1e4, math.nan, 449.0
    keys, values = stored(qkv)
    assert (keys[0, 0, 0], values[0, 0, 0], values[2, 0, 0]) == (448, -448, 448)
    assert values[1, 0, 0].isnan(), "NaN must not become a number: broken logits are told by it"
    expected = qkv[:, 32:].view(5, 2, 2, 16).transpose(0, 1).clamp(-448, 448).to(FP8).float()
    assert torch.equal(torch.stack((keys, values)).nan_to_num(), expected.nan_to_num())


def test_each_head_has_its_scale() -> None:
    qkv, scales = torch.randn(4, 96), torch.tensor([[0.5, 2.0], [4.0, 0.25]])
    found = stored(qkv, scales.reciprocal())
    expected = (qkv[:, 32:].view(4, 2, 2, 16).transpose(0, 1) / scales[:, None, :, None]).to(FP8).float()
    assert torch.equal(found, expected)


# ---- scales of a checkpoint ----

ATTENTION = "model.layers.0.self_attn."
SPELLINGS: dict[str, dict[str, float]] = {
    "modelopt": {"k_proj.k_scale": 0.5, "v_proj.v_scale": 2.0},
    "compressed-tensors": {"k_scale": 0.5, "v_scale": 2.0},
    "older compressed-tensors": {"k_proj.output_scale": 0.5, "v_proj.output_scale": 2.0},
    "AutoFP8": {"kv_scale": 0.5},
}


def attention_of(
    folder: Path, rank: int = 0, size: int = 1, dtype: torch.dtype | None = FP8, option: str | None = None
) -> Attention:
    """The first layer's."""
    model = load_model(
        quantised_at_load(config_from_folder(folder), option),
        folder,
        dtype=torch.float32,
        kv_dtype=dtype,
        collectives=SingleRank() if size == 1 else RankOf(rank, size),
        kernels=KERNELS,
    )
    mixer = model.layers[0].mixer
    assert isinstance(mixer, Attention)
    return mixer


@pytest.mark.parametrize(
    ("model", "producer"), [*(("qwen3", producer) for producer in SPELLINGS), ("qwen3-moe", "modelopt")]
)
def test_every_producers_names_are_known(model: str, producer: str, tmp_path: Path) -> None:
    """Of a sparse model, too (vllm#25047)."""
    coded, _ = write_both(tmp_path, MODELS[model], "D")
    change(coded, {ATTENTION + name: torch.tensor([scale]) for name, scale in SPELLINGS[producer].items()})
    layer = attention_of(coded)
    assert layer.kv_factors_2K is not None
    assert layer.kv_factors_2K[0].tolist() == [2.0] * layer.kv_heads
    assert layer.kv_factors_2K[1].tolist() == [2.0 if producer == "AutoFP8" else 0.5] * layer.kv_heads
    assert attention_of(coded, dtype=None).kv_factors_2K is None, "unused where the cache is as wide as activations"


@pytest.mark.parametrize("option", [None, "fp8"])
@pytest.mark.parametrize("producer", SPELLINGS)
def test_a_checkpoint_of_numbers_may_have_scales_of_a_cache(producer: str, option: str | None, tmp_path: Path) -> None:
    """With a config that says so of the cache alone, or without one; also where numbers become codes at load."""
    _, plain = write_both(tmp_path, MODELS["qwen3"], "D")
    said = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    for config in (None, said):
        change(plain, {ATTENTION + name: torch.tensor([scale]) for name, scale in SPELLINGS[producer].items()}, config)
        layer = attention_of(plain, option=option)
        assert layer.kv_factors_2K is not None
        assert layer.kv_factors_2K[0].tolist() == [2.0] * layer.kv_heads
        assert (layer.qkv.weight.scale is not None) == (option == "fp8")
        assert attention_of(plain, dtype=None, option=option).kv_factors_2K is None
    change(plain, {f"{ATTENTION}k_scale": torch.tensor([math.nan])})
    with pytest.raises(WeightsError, match="k_scale' holds a number that is not finite and positive"):
        attention_of(plain, option=option)


def test_scales_of_heads_follow_the_global_head(tmp_path: Path) -> None:
    """Also where two ranks have the same head."""
    coded, _ = write_both(tmp_path, MODELS["qwen3"], "D")
    heads = config_from_folder(coded).kv_heads
    scales = torch.arange(1, heads + 1) * 2.0
    change(coded, {f"{ATTENTION}k_scale": scales.view(heads, 1, 1)})
    whole = attention_of(coded)
    assert whole.kv_factors_2K is not None
    assert torch.equal(whole.kv_factors_2K[0], scales.reciprocal())
    for rank in range(2):
        half = attention_of(coded, rank, 2)
        first = half.qkv.heads.first_kv_head
        assert half.kv_factors_2K is not None
        assert torch.equal(half.kv_factors_2K[0], scales[first : first + half.kv_heads].reciprocal())
    change(coded, {f"{ATTENTION}k_scale": torch.ones(heads + 1)})
    with pytest.raises(WeightsError, match=re.escape(f"k_scale' holds {heads + 1} scales, but there are {heads}")):
        attention_of(coded)


def test_without_scales_or_with_ones_nothing_is_multiplied(tmp_path: Path) -> None:
    coded, _ = write_both(tmp_path, MODELS["qwen3"], "D")
    assert attention_of(coded).kv_factors_2K is None
    change(coded, {f"{ATTENTION}k_scale": torch.tensor([1.0])})
    assert attention_of(coded).kv_factors_2K is None


@pytest.mark.slow
def test_powers_of_two_as_scales_change_no_answer(tmp_path: Path) -> None:
    """Codes are exact in steps of powers of two, so only their range moves: the same keys and values are meant."""
    coded, _ = write_both(tmp_path, MODELS["qwen3"], "D")
    answers = []
    for scales in ({}, {"k_scale": 0.5, "v_scale": 4.0}, {"k_scale": 2.0, "v_scale": 0.25}):
        change(coded, {ATTENTION + name: torch.tensor([scale]) for name, scale in scales.items()})
        config = config_from_folder(coded)
        model = load_model(config, coded, dtype=torch.float32, kv_dtype=FP8, collectives=SingleRank(), kernels=KERNELS)
        driver = PagedDriver(model, pages=12)
        answers.append(torch.cat([row for one in driver.generate([[3, 4, 5, 6, 7]], 6) for row in one.logits]))
    assert all(torch.allclose(one, answers[0], atol=2e-2) for one in answers[1:])


# ---- what a device has no kernels for ----


@pytest.mark.parametrize(
    ("wanted", "dtype", "changes", "words"),
    [
        ("fp8", torch.float32, {}, "--kv-cache-dtype fp8 on GPUs needs another --dtype"),
        ("bfloat16", torch.float16, {}, "--kv-cache-dtype bfloat16 on GPUs needs"),
        ("fp8_e4m3", torch.bfloat16, {"capability": (8, 6)}, "needs compute capability 8.9"),
        ("fp8", torch.bfloat16, {"prefill_attention": "flashinfer"}, "type --prefill-attention triton"),
    ],
)
def test_what_a_gpu_has_no_kernels_for_is_refused(
    wanted: Any, dtype: torch.dtype, changes: dict[str, Any], words: str
) -> None:
    traits = replace(H200, capability=changes.pop("capability", (9, 0)))
    config = EngineConfig(model="m", device="cuda", kv_cache_dtype=wanted, **changes)
    with pytest.raises(ConfigError, match=re.escape(words)):
        kv_dtype(config, dtype, traits)
    assert kv_dtype(replace(config, device="cpu"), dtype, None) in (FP8, torch.bfloat16)
    assert kv_dtype(EngineConfig(model="m", kv_cache_dtype="auto"), dtype, traits) == dtype
