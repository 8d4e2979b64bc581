"""The cos | sin cache of every rope type against transformers, far beyond the original context."""

from __future__ import annotations

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
