"""gpt-oss (OpenAI 2025): attention with sinks, every other layer in a sliding window, and experts with biases.

Knows: its config, its defaults and its checkpoint names. Does not know: layers (llama.py, moe.py).
Reference: GptOssForCausalLM of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from models.config import FamilyConfig, Specs
from models.config_reader import ConfigReader
from models.families.llama import Llama
from models.layers.routed_experts import EXPERT_KEYS, RoutedExperts, softmax_experts

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def _usual(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With what the oracle takes for absent keys."""
    given = {"attention_bias": True, **config}
    ropes = any(config.get(key) for key in ("rope_parameters", "rope_scaling"))
    return given if ropes else {**given, "rope_scaling": YARN}


def _with_sinks(config: Mapping[str, Any], specs: Specs) -> Specs:
    return tuple(replace(spec, sinks=True) for spec in specs)


def _experts(config: Mapping[str, Any]) -> RoutedExperts:
    read = ConfigReader(config)
    if read.number("swiglu_alpha", 1.702) != 1.702:
        raise ValueError(f"'swiglu_alpha' is {config['swiglu_alpha']!r}, but only 1.702 is implemented")
    layers, size = tuple(range(read.size("num_hidden_layers"))), read.size("intermediate_size")
    found = softmax_experts(config, layers, size, count="num_local_experts", per_token=4, renormalise=True)
    return replace(found, limit=read.number("swiglu_limit", 7.0))


class GptOss(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        eps=1e-5,
        theta=1.5e5,
        head_dim=64,
        kv_heads=8,
        window=128,
        full_every=2,
        layer_types=("full_attention", "sliding_attention"),
        reads=f"{EXPERT_KEYS} swiglu_limit swiglu_alpha experts_per_token initial_context_length",
        usual=_usual,
        experts=_experts,
        attention=_with_sinks,
    )
    checkpoint_names: ClassVar = {
        **Llama.checkpoint_names,
        "layers.{}.mixer.sinks": "model.layers.{}.self_attn",  # sinks
        "layers.{}.mlp.router": "model.layers.{}.mlp.router",
        "layers.{}.mlp.experts": "model.layers.{}.mlp.experts",  # gate_up_proj, down_proj and their biases
    }
