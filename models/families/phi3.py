"""Phi-3, Phi-4 and Phi-4-mini (Abdin et al. 2024): Llama with queries, keys and values stored in one matrix, and gate
and up in another.

Knows: its config and its checkpoint names. Does not know: layers (llama.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from models.config import FamilyConfig
from models.families.llama import Llama


def _usual(config: Mapping[str, Any]) -> dict[str, Any]:
    """'su' and 'yarn' are former names of longrope, whose 'original_max_position_embeddings' stands outside. A window
    is one of all layers, whatever 'layer_types' says."""
    found = {**config, "layer_types": None}
    for key in ("rope_scaling", "rope_parameters"):
        given = found.get(key)
        if isinstance(given, dict) and (given.get("rope_type") or given.get("type")) in ("su", "yarn"):
            found[key] = {**given, "rope_type": "longrope", "type": None}
    found.setdefault("original_max_position_embeddings", 4096)
    return found


class Phi3(Llama):
    family_config: ClassVar[FamilyConfig] = FamilyConfig(
        eps=1e-5,
        full_every=0,
        reads="partial_rotary_factor",
        neutral={
            "full_attn_mod": ((1,), "attention of another kind in some layers"),
            "interpolate_factor": ((1,), "interpolated positions"),
            "lm_head_bias": ((False,), "a bias of its head"),
        },
        usual=_usual,
    )
    checkpoint_names: ClassVar = {
        **Llama.checkpoint_names,
        **{f"layers.{{}}.mixer.qkv.{part}": "model.layers.{}.self_attn.qkv_proj" for part in "qkv"},
        **{f"layers.{{}}.mlp.gate_up.{part}": "model.layers.{}.mlp.gate_up_proj" for part in ("gate", "up")},
    }
