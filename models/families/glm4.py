"""GLM-4 (GLM team 2024, 2025), dense: half of each head rotated in pairs of neighbours, gate and up in one matrix; the
models of 2025 also norm what attention and MLP add.

Knows: its config and its checkpoint names. Does not know: layers (llama.py).
Reference: GlmForCausalLM and Glm4ForCausalLM of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from models.config import FamilyConfig
from models.config_reader import ConfigReader
from models.families.glm4_moe import half_rotated
from models.families.llama import Llama


def _more(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = ConfigReader(config).flag("attention_bias", default=True)
    return {"rope_interleaved": True, "attention_bias": bias, "output_bias": False}


class Glm(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        eps=1.5625e-7, head_dim=128, kv_heads=2, reads="partial_rotary_factor", usual=half_rotated, more=_more
    )
    checkpoint_names: ClassVar = {
        **Llama.checkpoint_names,
        **{f"layers.{{}}.mlp.gate_up.{part}": "model.layers.{}.mlp.gate_up_proj" for part in ("gate", "up")},
    }


class Glm4(Glm):
    post_norms: ClassVar[bool] = True
    checkpoint_names: ClassVar = {
        **Glm.checkpoint_names,
        "layers.{}.mixer_post": "model.layers.{}.post_self_attn_layernorm",
        "layers.{}.mlp_post": "model.layers.{}.post_mlp_layernorm",
    }
