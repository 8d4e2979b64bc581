"""Tiny configurations of families that differ from Qwen3 in names, keys and options: what their config.json changes in
that of tests/models/tiny_checkpoint.py.

Knows: one of each family. Does not know: who runs it.
"""

from __future__ import annotations

from typing import Any

_PLAIN: dict[str, Any] = {"attention_bias": False, "intermediate_size": 48}
_SPARSE: dict[str, Any] = _PLAIN | {"num_experts_per_tok": 3, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm": _SPARSE
    | {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "attention_bias": True, "use_qk_norm": True}
    | {"partial_rotary_factor": 0.4, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 1},
    "hy3": _SPARSE | {"architectures": ["HYV3ForCausalLM"], "num_experts": 8},
    "minimax": _PLAIN
    | {"architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 4}
    | {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True},
    "ministral3": _PLAIN
    | {"architectures": ["Ministral3ForCausalLM"]}
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "phi": _PLAIN | {"architectures": ["Phi3ForCausalLM"]},
    "seed": _PLAIN | {"architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_out_bias": True},
}
