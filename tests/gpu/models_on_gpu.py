"""Tiny dummy models on one GPU, or on several with NCCL, along the tokens that the float32 CPU model chose.

Also one rank of that: ``python -m tests.gpu.models_on_gpu FOLDER RANK SIZE`` reads FOLDER/expected.safetensors and
writes FOLDER/gpu.safetensors.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.ops.select import select_kernels
from models.registry import config_from_dict
from models.weights import load_model
from parallel.comm.collectives import Collectives, GroupCollectives, SingleRank
from tests.models.kernels.paged_driver import PagedDriver

NEW_TOKENS, ROWS = 5, 7
_COMMON = {
    "vocab_size": 1001,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-128": {**_COMMON, "architectures": ["LlamaForCausalLM"], "head_dim": 128, "mlp_bias": True},
    "qwen2-32": {**_COMMON, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3-64": {**_COMMON, "architectures": ["Qwen3ForCausalLM"], "head_dim": 64},
    "qwen3moe-64": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 64,
        "num_experts": 6,
        "num_experts_per_tok": 6,  # all of them: in bfloat16 a close choice may fall differently, and then so do logits
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "qwen3next-128": {
        **_COMMON,
        **_DELTA,
        "architectures": ["Qwen3NextForCausalLM"],
        "head_dim": 128,
        "num_experts": 6,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "qwen3.5-256": {**_COMMON, **_DELTA, "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 256},
    "glm-128": {
        **_COMMON,
        "architectures": ["Glm4MoeForCausalLM"],
        "head_dim": 128,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 6,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 128,
    },
    "minimax-128": {
        **_COMMON,
        "architectures": ["MiniMaxM2ForCausalLM"],
        "head_dim": 128,
        "rotary_dim": 64,
        "num_local_experts": 6,
        "num_experts_per_tok": 6,
    },
    "ministral-128": {
        **_COMMON,
        "architectures": ["Ministral3ForCausalLM"],
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "smollm3-32": {**_COMMON, "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0, 1]},
    "olmo3-32": {**_COMMON, "architectures": ["Olmo3ForCausalLM"], "sliding_window": 24},
    "granite4-32": {
        **_COMMON,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 6,
        "num_experts_per_tok": 6,
        "shared_intermediate_size": 128,
        "mamba_n_heads": 8,
        "mamba_d_state": 64,
        "embedding_multiplier": 12,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.22,
        "logits_scaling": 6,
    },
    "gemma4-256-512": {
        **_COMMON,
        "architectures": ["Gemma4ForCausalLM"],
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    },
    "gemma4-experts-128": {
        **_COMMON,
        "architectures": ["Gemma4ForCausalLM"],
        "head_dim": 128,
        "global_head_dim": 128,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 24,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 6,
        "moe_intermediate_size": 128,
    },
    "glm4-128": {**_COMMON, "architectures": ["Glm4ForCausalLM"], "head_dim": 128},
    "ernie-128": {
        **_COMMON,
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "head_dim": 128,
        "moe_num_experts": 6,
        "moe_k": 6,
        "moe_intermediate_size": 128,
    },
    "phi-32": {**_COMMON, "architectures": ["Phi3ForCausalLM"]},
    "qwen3-80-mqa": {**_COMMON, "architectures": ["Qwen3ForCausalLM"], "head_dim": 80, "num_key_value_heads": 1},
}


def run(
    name: str, device: str, dtype: torch.dtype, collectives: Collectives, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens [ROWS, NEW_TOKENS] and logits [ROWS, NEW_TOKENS, V] (float32, on the CPU) of chunked, shared prompts."""
    config = config_from_dict(CONFIGS[name])
    kernels = select_kernels(device, dtype, config.head_dim)
    model = load_model(
        config, None, load_format="dummy", dtype=dtype, device=device, collectives=collectives, kernels=kernels
    )
    if name.startswith(
        "gemma4"
    ):  # its scores have scale 1, which weights near 1 would make so large that bfloat16 shows
        for part, weight in model.named_parameters():
            if part.endswith("q_norm.weight"):
                weight.mul_(len(weight) ** -0.5)
    draw = random.Random(name)
    prompts = [[draw.randrange(config.vocab_size) for _ in range(draw.randint(1, 90))] for _ in range(ROWS)]
    prompts[3] = prompts[0][:40] + prompts[3]
    driver = PagedDriver(model, pages=100, page_size=16, device=device)
    with torch.inference_mode():
        rows = driver.generate(
            prompts, NEW_TOKENS, chunk=33, share_prefixes=True, forced=None if forced is None else forced.tolist()
        )
    tokens = torch.tensor([row.tokens[-NEW_TOKENS:] for row in rows])
    return tokens, torch.stack([torch.stack(row.logits) for row in rows]).float().cpu()


def main(folder: Path, rank: int, size: int) -> None:
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        device_id=torch.device(device),
    )
    group = dist.group.WORLD
    collectives = SingleRank() if group is None else GroupCollectives(group)
    expected = load_file(folder / "expected.safetensors")
    results = {
        f"{name}.logits": run(name, device, torch.bfloat16, collectives, expected[f"{name}.tokens"])[1]
        for name in CONFIGS
    }
    if rank == 0:
        save_file(results, folder / "gpu.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
