"""The cos | sin cache of every rope type against transformers, far beyond the original context."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from models.layers.rope import cos_sin_cache, rope_from_parameters

LENGTH = 4096
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "original_max_position_embeddings": 128, "low_freq_factor": 1.0}


@pytest.mark.parametrize("head_dim", [6, 64, 100])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        {**LLAMA3, "factor": 8.0, "high_freq_factor": 4.0},
        {**LLAMA3, "factor": 32.0, "high_freq_factor": 2.0},
        YARN,
        {**YARN, "truncate": False},
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
        {**YARN, "attention_factor": 0.75},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
        {**YARN, "factor": 1.0},
    ],
    ids=str,
)
def test_cache_is_that_of_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    from transformers import LlamaConfig  # takes seconds, so not at collection
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {**parameters, "rope_theta": 50000.0}
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=LENGTH, rope_parameters=dict(parameters)
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(LENGTH)[None])
    half = head_dim // 2
    cache = cos_sin_cache(rope_from_parameters(parameters, LENGTH), head_dim, LENGTH)
    assert cache.dtype == torch.float32
    # The angle of position 4095 is rounded to 2^-12, however it is computed.
    torch.testing.assert_close(cache[:, :half], cos[0, :, :half], atol=1e-3, rtol=0)
    torch.testing.assert_close(cache[:, half:], sin[0, :, :half], atol=1e-3, rtol=0)


def test_original_context_defaults_to_the_models() -> None:
    explicit = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 512}
    implicit = {key: value for key, value in explicit.items() if key != "original_max_position_embeddings"}
    assert rope_from_parameters(explicit, 9) == rope_from_parameters(implicit, 512)


def test_old_name_of_the_type_key() -> None:
    parameters = {"rope_theta": 1e4, "factor": 2.0}
    old, new = {"type": "linear", **parameters}, {"rope_type": "linear", **parameters}
    assert rope_from_parameters(old, 64) == rope_from_parameters(new, 64)


@pytest.mark.parametrize("theirs", [{}, {"attention_factor": 0.5}, {"mscale": 0.7, "mscale_all_dim": 1.3}])
def test_attn_factor_multiplies(theirs: dict[str, float], caplog: pytest.LogCaptureFixture) -> None:
    """As in YaRN's own code and in vLLM; some published checkpoints have it."""
    usual = {**YARN, "rope_theta": 1e4, **theirs}
    with caplog.at_level(logging.INFO):
        found = rope_from_parameters({**usual, "attn_factor": 0.878}, 64)
    assert found.attention_factor == pytest.approx(0.878 * rope_from_parameters(usual, 64).attention_factor)
    assert "'attn_factor' 0.878" in caplog.text


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize(
    "idle",
    [
        {"finetuned": True},
        {"mrope_section": [16, 24, 24], "mrope_interleaved": False},
        {"attn_factor": 1.0, "extrapolation_factor": 1, "apply_yarn_scaling": True},
        {"original_max_position_embeddings": 128},
        {"beta_fast": None, "short_factor": None},
    ],
    ids=str,
)
def test_keys_that_change_nothing_are_accepted(kind: str, idle: dict[str, Any]) -> None:
    usual = {**LLAMA3, "factor": 8.0, "high_freq_factor": 4.0} if kind == "llama3" else {"factor": 2.0}
    usual = {**(usual if kind != "default" else {}), "rope_type": kind, "rope_theta": 1e4}
    assert rope_from_parameters({**usual, **idle}, 128) == rope_from_parameters(usual, 128)


def test_names_of_plain_rotation() -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    for other in (
        {"type": "mrope"},
        {"rope_type": "mrope"},
        {"rope_type": "default", "type": "mrope"},
        {"factor": 1.0},
    ):
        assert rope_from_parameters({"rope_theta": 1e4, **other}, 128) == rope_from_parameters(plain, 128)
