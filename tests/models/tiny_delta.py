"""Tiny configurations of models with gated delta nets: what their config.json has beside another one's keys.

Knows: one of each family. Does not know: sizes that all models have (hidden, heads, vocabulary).
"""

from __future__ import annotations

DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "partial_rotary_factor": 0.5,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3-next": DELTA | EXPERTS | {"architectures": ["Qwen3NextForCausalLM"], "tie_word_embeddings": False},
    "qwen3.5": DELTA | {"architectures": ["Qwen3_5ForCausalLM"], "linear_num_key_heads": 4},
    "qwen3.5-moe": DELTA
    | EXPERTS
    | {"architectures": ["Qwen3_5MoeForCausalLM"], "linear_conv_kernel_dim": 3}
    | {"shared_expert_intermediate_size": 32},  # as of two others
}
"""For kernels that want wide heads."""
ON_GPU: dict[str, object] = {
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "partial_rotary_factor": 0.25,
}
