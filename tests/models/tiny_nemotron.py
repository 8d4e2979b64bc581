"""A tiny Nemotron-H for engines with dummy weights: every kind of block, groups of heads, groups of experts.

Knows: the config. Does not know: who runs it.
"""

from __future__ import annotations

ARCHITECTURE = "NemotronHForCausalLM"
# What its config changes in that of tests/runtime/engine/rig.py.
NEMOTRON: dict[str, object] = {
    "architectures": [ARCHITECTURE],
    "model_type": "nemotron_h",
    "num_hidden_layers": 6,
    "hybrid_override_pattern": "ME*M-E",
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 10,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 48,  # as of two others
}
