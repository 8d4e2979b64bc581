"""Lockstride against transformers: tiny random float32 models of each family, every way a step can be cut.

For each tensor-parallel size one group of processes, or of threads, runs all models. Greedy tokens must be exact,
logits within 1e-4. Transformers is asked once per completion: its logits along (prompt + our tokens) must choose
exactly our tokens, which by induction over the tokens is its own greedy completion.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel.comm.collectives import SingleRank
from tests.models.parity_worker import NEW_TOKENS, SCENARIOS, run_models
from tests.runtime.engine.tensor_ranks import Meeting, MetCollectives
from tests.torchrun import torchrun

TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 7.0, 9.0],
    "original_max_position_embeddings": 3,
}
"""Vocabularies are odd, heads and intermediate sizes are what a group of 4 can split, head_dims are no powers of 2."""
COMMON = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
MAMBA = "linear_attention"
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "ssm_state_size": 10,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 2.5,
    "time_step_min": 1e-9,  # transformers' prefill keeps time steps above it, its decode does not
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-llama3": (
        "Llama",
        {"vocab_size": 203, "hidden_size": 40, "intermediate_size": 52, "num_key_value_heads": 2, "head_dim": 14}
        | {"rope_parameters": LLAMA3},
    ),
    "llama-yarn-biases": (
        "Llama",
        {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 36, "num_key_value_heads": 1, "head_dim": 6}
        | {"rope_parameters": YARN, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": (
        "Mistral",
        {"vocab_size": 83, "hidden_size": 32, "intermediate_size": 28, "num_key_value_heads": 2, "head_dim": 10}
        | {"rope_parameters": DEFAULT, "sliding_window": None},
    ),
    "mistral-window": (
        "Mistral",
        {"vocab_size": 79, "hidden_size": 24, "intermediate_size": 28, "num_key_value_heads": 2, "head_dim": 10}
        | {"rope_parameters": DEFAULT, "sliding_window": 6},
    ),
    "gemma3": (
        "Gemma3",
        {"vocab_size": 73, "hidden_size": 28, "intermediate_size": 20, "num_key_value_heads": 2, "head_dim": 10}
        | {"num_hidden_layers": 4, "sliding_window": 6, "query_pre_attn_scalar": 23}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": DEFAULT | {"rope_theta": 700.0}}},
    ),
    "qwen2-linear": (
        "Qwen2",
        {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 20, "num_key_value_heads": 2}
        | {"rope_parameters": LINEAR, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen2-tied": (
        "Qwen2",
        {"vocab_size": 5, "hidden_size": 24, "intermediate_size": 28, "num_key_value_heads": 4}
        | {"rope_parameters": DEFAULT, "tie_word_embeddings": True},
    ),
    "qwen3-tied": (
        "Qwen3",
        {"vocab_size": 151, "hidden_size": 28, "intermediate_size": 44, "num_key_value_heads": 1, "head_dim": 18}
        | {"rope_parameters": DEFAULT, "tie_word_embeddings": True},
    ),
    "qwen3-yarn-bias": (
        "Qwen3",
        {"vocab_size": 33, "hidden_size": 20, "intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 10}
        | {"rope_parameters": YARN, "attention_bias": True},
    ),
}
"""Experts: layers of both kinds, numbers of choices that are no powers of 2, and what a group of 4 can split."""
MODELS |= {
    "qwen3moe-mixed-layers": (
        "Qwen3Moe",
        {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 36, "num_key_value_heads": 2, "head_dim": 10}
        | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1], "rope_parameters": DEFAULT}
        | {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": False},
    ),
    "qwen3moe-fused": (
        "Qwen3Moe",
        {"vocab_size": 47, "hidden_size": 20, "intermediate_size": 1, "num_key_value_heads": 1, "head_dim": 6}
        | {"rope_parameters": DEFAULT, "tie_word_embeddings": True, "attention_bias": True}
        | {"num_experts": 8, "num_experts_per_tok": 5, "moe_intermediate_size": 12, "norm_topk_prob": True},
    ),
    "mixtral": (
        "Mixtral",
        {"vocab_size": 83, "hidden_size": 32, "intermediate_size": 28, "num_key_value_heads": 4}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": DEFAULT, "sliding_window": 5},
    ),
    "mixtral-fused": (
        "Mixtral",
        {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 20, "num_key_value_heads": 2}
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "rope_parameters": DEFAULT},
    ),
    "gptoss": (
        "GptOss",
        {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_key_value_heads": 2, "head_dim": 10}
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 6}
        | {"rope_parameters": YARN | {"truncate": False}, "swiglu_limit": 0.3},
    ),
    "nemotronh-dense": (
        "NemotronH",
        NEMOTRON
        | {"vocab_size": 71, "hidden_size": 28, "intermediate_size": 36, "num_key_value_heads": 1, "head_dim": 6}
        | {"layers_block_type": [MAMBA, "mlp", "full_attention", MAMBA], "n_groups": 2, "tie_word_embeddings": False},
    ),
    "nemotronh-moe": (
        "NemotronH",
        NEMOTRON
        | {"vocab_size": 53, "hidden_size": 20, "num_key_value_heads": 2, "head_dim": 10, "n_groups": 1}
        | {"layers_block_type": [MAMBA, "moe", "full_attention", MAMBA, "moe"], "use_conv_bias": False}
        | {"n_routed_experts": 16, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
    ),
    "nemotronh-fused": (
        "NemotronH",
        NEMOTRON
        | {"vocab_size": 41, "hidden_size": 24, "num_key_value_heads": 4, "head_dim": 4, "n_groups": 4}
        | {"layers_block_type": ["moe", MAMBA, "full_attention"], "n_routed_experts": 8, "num_experts_per_tok": 5}
        | {"norm_topk_prob": False, "conv_kernel": 2, "moe_shared_expert_intermediate_size": 24},  # as of two others
    ),
}
"""Gated delta nets: key heads that a group of 4 replicates, sizes that are no powers of 2, layers of both MLPs."""
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
QUARTER = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
MODELS |= {
    "qwen3next": (
        "Qwen3Next",
        DELTA
        | {"vocab_size": 59, "hidden_size": 24, "intermediate_size": 36, "num_key_value_heads": 2, "head_dim": 16}
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": True}
        | {"shared_expert_intermediate_size": 20, "mlp_only_layers": [1], "rope_parameters": QUARTER}
        | {"attention_bias": True},
    ),
    "qwen35-dense": (
        "Qwen3_5",
        DELTA
        | {"vocab_size": 71, "hidden_size": 28, "intermediate_size": 20, "num_key_value_heads": 1, "head_dim": 8}
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "tie_word_embeddings": True}
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3}
        | {"rope_parameters": QUARTER | {"mrope_section": [1, 0, 0], "mrope_interleaved": True}},
    ),
    "qwen35moe": (
        "Qwen3_5Moe",
        DELTA
        | {"vocab_size": 67, "hidden_size": 20, "num_key_value_heads": 2, "head_dim": 24}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        | {"shared_expert_intermediate_size": 16, "linear_num_key_heads": 1, "rope_parameters": QUARTER},
    ),
}
"""Other names, keys and options; a LongRoPE whose long factors serve every prompt."""
MODELS["qwen35moe-recurrent"] = (  # experts without attention: of a few layers the fourth would attend
    "Qwen3_5Moe",
    {key: value for key, value in (DELTA | MODELS["qwen35moe"][1]).items() if key != "layer_types"}
    | {"vocab_size": 37, "num_hidden_layers": 2, "linear_num_key_heads": 2},
)
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GROUPED = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1}
MODELS |= {
    "glm4moe": (
        "Glm4Moe",
        GROUPED
        | {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 28, "num_key_value_heads": 2, "head_dim": 12}
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_shared_experts": 2}
        | {"use_qk_norm": True, "attention_bias": True, "rope_parameters": HALF},
    ),
    "hyv3": (
        "HYV3",
        {"vocab_size": 59, "hidden_size": 20, "intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 10}
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "rope_parameters": DEFAULT}
        | {"mlp_layer_types": ["sparse", "dense"], "attention_bias": True},
    ),
    "minimaxm2": (
        "MiniMaxM2",
        {"vocab_size": 71, "hidden_size": 24, "intermediate_size": 20, "num_key_value_heads": 2, "head_dim": 12}
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": HALF,
        },
    ),
    "ministral3": (
        "Ministral3",
        {"vocab_size": 83, "hidden_size": 32, "intermediate_size": 28, "num_key_value_heads": 2, "head_dim": 10}
        | {
            "rope_parameters": YARN
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
            | {"original_max_position_embeddings": 5}
        },
    ),
    "mistral3-text": (
        "Mistral",
        {"vocab_size": 43, "hidden_size": 24, "intermediate_size": 20, "num_key_value_heads": 1, "head_dim": 8}
        | {"rope_parameters": DEFAULT, "sliding_window": None},
    ),
    "nemotronh-latent": (
        "NemotronH",
        NEMOTRON
        | {"vocab_size": 47, "hidden_size": 24, "num_key_value_heads": 2, "head_dim": 6, "n_groups": 2}
        | {"layers_block_type": ["moe", MAMBA, "full_attention", "moe"], "n_routed_experts": 8}
        | {"num_experts_per_tok": 3, "moe_latent_size": 16, "moe_shared_expert_intermediate_size": 24},
    ),
    "phi3": (
        "Phi3",
        {"vocab_size": 73, "hidden_size": 40, "intermediate_size": 36, "num_key_value_heads": 4, "pad_token_id": 0}
        | {"rope_parameters": DEFAULT, "sliding_window": 8},
    ),
    "phi4-longrope": (
        "Phi3",
        {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 28, "num_key_value_heads": 2, "pad_token_id": 0}
        | {"tie_word_embeddings": True, "original_max_position_embeddings": 3, "rope_parameters": LONG},
    ),
    "seedoss": (
        "SeedOss",
        {"vocab_size": 79, "hidden_size": 28, "intermediate_size": 36, "num_key_value_heads": 1, "head_dim": 10}
        | {"attention_out_bias": True, "rope_parameters": DEFAULT},
    ),
}
"""Rotated in pairs of neighbours; half of a head, and norms on both sides of a layer."""
NARROW = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 28, "head_dim": 12, "pad_token_id": 0}
MODELS |= {
    "ernie45": (
        "Ernie4_5",
        NARROW | {"num_key_value_heads": 1, "head_dim": 10, "use_bias": True, "rope_parameters": DEFAULT},
    ),
    "ernie45moe": (
        "Ernie4_5_Moe",
        {key: value for key, value in NARROW.items() if key != "head_dim"}
        | {"num_hidden_layers": 3, "num_key_value_heads": 2, "moe_num_experts": 8, "moe_k": 3}
        | {"moe_intermediate_size": 12, "moe_layer_start_index": 1, "rope_parameters": DEFAULT},
    ),
    "glm": ("Glm", NARROW | {"num_key_value_heads": 4, "attention_bias": False, "rope_parameters": HALF}),
    "glm4": ("Glm4", NARROW | {"num_key_value_heads": 2, "rope_parameters": HALF}),
}
"""Layers without rotation, with and without windows; norms behind layers alone and over all heads, two rotations."""
MODELS |= {
    "smollm3": (
        "SmolLM3",
        {"vocab_size": 71, "hidden_size": 24, "intermediate_size": 28, "num_key_value_heads": 2, "pad_token_id": 0}
        | {"num_hidden_layers": 5, "rope_parameters": DEFAULT, "use_sliding_window": True, "sliding_window": 6}
        | {"attention_bias": True, "mlp_bias": True},
    ),
    "olmo2": (
        "Olmo2",
        {"vocab_size": 61, "hidden_size": 40, "intermediate_size": 20, "num_key_value_heads": 4}
        | {"rope_parameters": DEFAULT, "tie_word_embeddings": True},
    ),
    "olmo3": (
        "Olmo3",
        {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 36, "num_key_value_heads": 2, "attention_bias": True}
        | {"num_hidden_layers": 5, "sliding_window": 6}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT | {"rope_theta": 700.0}}},
    ),
}
"""Four factors that are no powers of 2."""
FACTORS = {"embedding_multiplier": 12, "attention_multiplier": 0.3, "residual_multiplier": 0.22, "logits_scaling": 0.7}
GRANITE_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3}
MODELS |= {
    "granite": (
        "Granite",
        FACTORS
        | {"vocab_size": 73, "hidden_size": 24, "intermediate_size": 28, "num_key_value_heads": 2, "mlp_bias": True}
        | {"rope_parameters": DEFAULT, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "granitemoe": (
        "GraniteMoe",
        FACTORS
        | GRANITE_EXPERTS
        | {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 12, "num_key_value_heads": 4}
        | {"rope_parameters": DEFAULT},
    ),
    "granitemoeshared-fused": (
        "GraniteMoeShared",
        FACTORS
        | GRANITE_EXPERTS
        | {"vocab_size": 53, "hidden_size": 24, "intermediate_size": 20, "num_key_value_heads": 1}
        | {"shared_intermediate_size": 28, "rope_parameters": DEFAULT},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        FACTORS
        | GRANITE_EXPERTS
        | {"vocab_size": 59, "hidden_size": 24, "intermediate_size": 20, "num_key_value_heads": 2}
        | {"num_hidden_layers": 4, "layer_types": [MAMBA, "full_attention", MAMBA, MAMBA], "mamba_n_heads": 8}
        | {"shared_intermediate_size": 28, "mamba_d_state": 10},
    ),
    "granitemoehybrid-dense": (
        "GraniteMoeHybrid",
        FACTORS
        | {"vocab_size": 47, "hidden_size": 40, "num_key_value_heads": 4, "mamba_n_heads": 4, "mamba_d_state": 6}
        | {"num_hidden_layers": 3, "layer_types": ["full_attention", MAMBA, MAMBA], "mamba_n_groups": 2}
        | {"num_local_experts": 0, "shared_intermediate_size": 36, "mamba_d_conv": 3, "mamba_conv_bias": False}
        | {"position_embedding_type": "rope", "rope_parameters": DEFAULT},
    ),
}
"""Full layers with heads of another size and number, with keys for values in the first of the models. Scores have scale
1: each layer multiplies what rounding moves, so the other models have two.
"""
GEMMA4 = {
    "hidden_size_per_layer_input": 0,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 6,
    "final_logit_softcapping": 2.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 900.0, "partial_rotary_factor": 0.3},
        "sliding_attention": DEFAULT,
    },
}
MODELS |= {
    "gemma4": (
        "Gemma4",
        GEMMA4
        | {"vocab_size": 73, "hidden_size": 28, "intermediate_size": 20, "num_key_value_heads": 2, "head_dim": 10}
        | {"global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    ),
    "gemma4-values": (
        "Gemma4Unified",
        {key: value for key, value in GEMMA4.items() if key != "hidden_size_per_layer_input"}
        | {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 28, "num_key_value_heads": 4, "head_dim": 14}
        | {"global_head_dim": 20, "tie_word_embeddings": False, "final_logit_softcapping": None}
        | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma4-experts": (
        "Gemma4",
        GEMMA4
        | {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 20, "num_key_value_heads": 2, "head_dim": 10}
        | {"global_head_dim": 20, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3}
        | {"moe_intermediate_size": 12, "num_hidden_layers": 2}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
}
TEXT_CONFIGS = ("Qwen3_5", "Qwen3_5Moe", "Gemma3", "Gemma4", "Gemma4Unified")  # text parts of models for images
# Their config.json is rewritten in the older style.
AS_TRANSFORMERS_4 = ("llama-llama3", "qwen2-linear", "qwen3-tied", "qwen3moe-mixed-layers")
IN_SEVERAL_FILES = ("llama-llama3", "qwen3-yarn-bias", "qwen3moe-mixed-layers", "mixtral-fused")
# Saved as transformers 5 holds experts, [E, ...], and names blocks; the others one by one.
FUSED = ("qwen3moe-fused", "mixtral-fused", "nemotronh-fused", "granitemoeshared-fused")
# Two ranks in processes run these in `make test`: dense layers, experts, each recurrence. Four in threads run all.
IN_PROCESSES = ("llama-yarn-biases", "qwen3moe-mixed-layers", "qwen35moe", "nemotronh-moe")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A folder with every model saved by transformers, and the transformers models by name."""
    folder = tmp_path_factory.mktemp("parity")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    (folder / "prompts.json").write_text(json.dumps(_prompts()))
    models = {name: _save(folder / name, *spec) for name, spec in MODELS.items()}
    _rewrite_as_text_part(folder / "qwen35moe")
    _rewrite_as_mistral3(folder / "mistral3-text")
    for name in AS_TRANSFORMERS_4:
        _rewrite_as_transformers_4(folder / name / "config.json")
    yield folder, models
    torch.set_num_threads(threads)


def _prompts() -> list[list[int]]:
    """16 prompts of 1 to 23 tokens; every other one begins like the first, for more than two pages."""
    draw = random.Random(0)
    prompts = [[draw.randrange(1000) for _ in range(draw.randint(1, 23))] for _ in range(16)]
    prompts[0] = [draw.randrange(1000) for _ in range(21)]
    for number in range(2, 16, 2):
        prompts[number] = prompts[0][: 9 + number % 5] + prompts[number][:10]
    return prompts


def _save(folder: Path, family: str, settings: dict[str, Any]) -> Any:
    import transformers  # takes seconds, so not at collection

    torch.manual_seed(sum(folder.name.encode()))
    given = COMMON | settings
    if "layers_block_type" in given:
        del given["num_hidden_layers"]
    config = getattr(transformers, f"{family}{'Text' if family in TEXT_CONFIGS else ''}Config")(**given)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for name, tensor in model.state_dict().items():  # norms and biases too: their initial 1 and 0 would hide errors
        std = 0.7 if "conv1d" in name else 0.2  # values near 0 would be normed, which shows the rounding of both sides
        centred = hasattr(config, "linear_num_key_heads") and "linear_attn.norm" not in name
        torch.nn.init.normal_(tensor, mean=float("norm" in name and not centred), std=std)
    size = "20KB" if folder.name in IN_SEVERAL_FILES else "1GB"
    model.save_pretrained(folder, max_shard_size=size, save_original_format=folder.name not in FUSED)
    return model


def _rewrite_as_mistral3(folder: Path) -> None:
    """As published, and without 'tie_word_embeddings'."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["architectures"], config["tie_word_embeddings"]
    outer = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "vision_config": {"depth": 1},
        "spatial_merge_size": 2,
    }
    path.write_text(json.dumps(outer | {"text_config": config}))
    tensors = load_file(folder / "model.safetensors")
    others = {"vision_tower.patch_conv.weight": torch.ones(2), "multi_modal_projector.norm.weight": torch.ones(3)}
    save_file(
        {f"language_model.{name}": tensor for name, tensor in tensors.items()} | others, folder / "model.safetensors"
    )


def _rewrite_as_text_part(folder: Path) -> None:
    """Of a model that reads images, too, and predicts further tokens."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    (architecture,) = config.pop("architectures")
    names = [architecture.replace("ForCausalLM", "ForConditionalGeneration")]
    path.write_text(json.dumps({"architectures": names, "tie_word_embeddings": False, "text_config": config}))
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = {"model.visual.patch_embed.weight": torch.ones(2), "mtp.fc.weight": torch.ones(3)}
    save_file(renamed | others, folder / "model.safetensors")


def _rewrite_as_transformers_4(path: Path) -> None:
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    path.write_text(json.dumps(config))


def _check_all(
    folder: Path, models: dict[str, Any], size: int, count: int = len(SCENARIOS), *, every_split: bool = True
) -> None:
    prompts = json.loads((folder / "prompts.json").read_text())
    for name, model in models.items():
        splits = sorted(folder.glob(f"{name}.*.{size}.safetensors"))
        config = model.config  # that of Nemotron-H has experts whether blocks do or not
        sparse = getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0)
        if "nemotron" in name:
            sparse = "moe" in config.layer_types
        assert len(splits) == (3 if sparse and size > 1 and every_split else 1)
        scenarios = SCENARIOS[-count:]
        for split, scenario in product(splits, scenarios):
            results = load_file(split)
            assert len(results) == 2 * len(scenarios)
            tokens, logits = results[f"{scenario.label}.tokens"], results[f"{scenario.label}.logits"]
            assert tokens.shape == (scenario.prompts, NEW_TOKENS)
            for prompt, ours, our_logits in zip(prompts, tokens, logits, strict=False):
                expected = _transformers_logits(model, tuple(prompt), tuple(ours.tolist()))
                assert torch.equal(expected.argmax(-1), ours), (split.name, scenario)
                torch.testing.assert_close(our_logits, expected, atol=TOLERANCE, rtol=0)


@cache
@torch.inference_mode()
def _transformers_logits(model: Any, prompt: tuple[int, ...], completion: tuple[int, ...]) -> Tensor:
    """[NEW_TOKENS, V]: the logits from which each token of the completion is drawn."""
    sequence = [token % model.config.vocab_size for token in prompt] + list(completion)
    logits: Tensor = model(torch.tensor([sequence[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(len(SCENARIOS), marks=pytest.mark.long)])  # all: two ranks, below
def test_one_rank(count: int, saved: tuple[Path, dict[str, Any]]) -> None:
    folder, models = saved
    run_models(folder, SingleRank(), count)
    _check_all(folder, models, 1, count)


@pytest.mark.multiprocess
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_tensor_parallel(saved: tuple[Path, dict[str, Any]], size: int, tmp_path: Path) -> None:
    folder, models = saved
    some = {name: model for name, model in models.items() if name in IN_PROCESSES or size > 2}
    for name in (*some, "prompts.json"):
        (tmp_path / name).symlink_to(folder / name)
    ran = torchrun(size, "tests.models.parity_worker", str(tmp_path), str(len(SCENARIOS)))
    assert ran.returncode == 0, ran.said[-3000:]
    _check_all(tmp_path, some, size)


@pytest.mark.slow
def test_tensor_parallel_in_threads(saved: tuple[Path, dict[str, Any]]) -> None:
    """Four ranks, whose shares are smaller: four processes on two cores mostly wait for one another. The last scenario
    of the list; of experts one split a model, each of the three for some models of each kind."""
    folder, models = saved
    size, count = 4, 1
    meeting = Meeting(size)

    def live(rank: int) -> None:
        try:
            run_models(folder, MetCollectives(meeting, rank), count, every_split=False)
        except BaseException:
            meeting.barrier.abort()  # nobody shall wait for this rank
            raise

    with ThreadPoolExecutor(size) as threads:
        ranks = [threads.submit(live, rank) for rank in range(size)]
    for error in sorted(
        filter(None, (rank.exception() for rank in ranks)), key=lambda e: isinstance(e, BrokenBarrierError)
    ):
        raise error
    _check_all(folder, models, size, count, every_split=False)
