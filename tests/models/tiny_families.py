"""Tiny configurations of families that differ from Qwen3 in names, keys and options: what their config.json changes in
that of tests/models/tiny_checkpoint.py.

Knows: one of each family. Does not know: who runs it.
"""

from __future__ import annotations

from typing import Any

_PLAIN: dict[str, Any] = {"attention_bias": False, "intermediate_size": 48}
_SPARSE: dict[str, Any] = _PLAIN | {"num_experts_per_tok": 3, "moe_intermediate_size": 16}
_FACTORS = {"embedding_multiplier": 12, "attention_multiplier": 0.3, "residual_multiplier": 0.22, "logits_scaling": 6}
_GEMMA4: dict[str, Any] = _PLAIN | {
    "architectures": ["Gemma4ForCausalLM"],
    "sliding_window": 6,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "global_head_dim": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm": _SPARSE
    | {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "attention_bias": True, "use_qk_norm": True}
    | {"partial_rotary_factor": 0.4, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 1},
    "ernie": _PLAIN | {"architectures": ["Ernie4_5ForCausalLM"], "use_bias": True, "head_dim": 16},
    "ernie-moe": _PLAIN
    | {"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 16}
    | {"head_dim": 16},
    "glm-4-2024": _PLAIN | {"architectures": ["GlmForCausalLM"], "head_dim": 16},
    "glm-4": _PLAIN | {"architectures": ["Glm4ForCausalLM"], "attention_bias": True, "head_dim": 16},
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
    "smollm3": _PLAIN
    | {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4, "use_sliding_window": True}
    | {"sliding_window": 6},
    "olmo2": _PLAIN | {"architectures": ["Olmo2ForCausalLM"]},
    "olmo3": _PLAIN
    | {"architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 4, "sliding_window": 6}
    | {"rope_parameters": {kind: {"rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}},
    "granite": _PLAIN | _FACTORS | {"architectures": ["GraniteForCausalLM"]},
    "granite-moe": _PLAIN
    | _FACTORS
    | {"architectures": ["GraniteMoeSharedForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 3}
    | {"shared_intermediate_size": 32},
    "granite-4": _PLAIN
    | _FACTORS
    | {"architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 3}
    | {"shared_intermediate_size": 32, "layer_types": ["mamba", "attention"], "mamba_n_heads": 4}
    | {"mamba_d_state": 10},
    "gemma4": _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0},
    "gemma4-experts": _GEMMA4
    | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 16},
    "phi": _PLAIN | {"architectures": ["Phi3ForCausalLM"]},
    "seed": _PLAIN | {"architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_out_bias": True},
}
