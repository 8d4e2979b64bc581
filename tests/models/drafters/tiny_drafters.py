"""Small drafters with random weights, as folders, beside a small target.

Knows: the tensors of both kinds under their checkpoint names. Does not know: the loader.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "dtype": "float32",
}


def dflash_config(**changes: Any) -> dict[str, Any]:
    """Two layers that read layers 0 and 1 of a target of two."""
    config = {
        **SIZES,
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "num_target_layers": 2,
        "block_size": 8,
        "layer_types": ["full_attention", "full_attention"],
        "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 36},
    }
    return config | changes


def mtp_config(**changes: Any) -> dict[str, Any]:
    return {**SIZES, "architectures": ["MTPDraftModel"], "num_hidden_layers": 1, "num_target_layers": 2} | changes


def eagle3_config(**changes: Any) -> dict[str, Any]:
    """One layer that reads layers 0 and 1 of a target of two, with ids of its own."""
    config = {
        **SIZES,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 6,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True},
    }
    return config | changes


def eagle3_tensors(config: dict[str, Any], ids: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """With a head over ``ids`` (``draft_vocab_size`` of them) and the maps between them and the target's."""
    hidden, reads = config["hidden_size"], len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    layer = layer_shapes("midlayer.", config)
    for name in ("q_norm", "k_norm"):
        del layer[f"midlayer.self_attn.{name}"]
    for name in ("q_proj", "k_proj", "v_proj"):
        layer[f"midlayer.self_attn.{name}"] = (layer[f"midlayer.self_attn.{name}"][0], 2 * hidden)
    shapes = {"fc": (hidden, reads * hidden), "norm": (hidden,), "midlayer.hidden_norm": (hidden,), **layer}
    mask = torch.zeros(config["vocab_size"], dtype=torch.bool)
    mask[list(ids)] = True
    tensors = random_tensors({**shapes, "lm_head": (len(ids), hidden)}, seed)
    return tensors | {"d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": mask}


def own_mtp_config(target: dict[str, Any]) -> dict[str, Any]:
    """Of the MTP layer in the checkpoint of ``target``, a Qwen3-Next or Qwen3.5; its experts, if any, are the target's.

    The keys are those that serial oracles and tensors ask for.
    """
    return {"rms_norm_eps": 1e-6, **target, "attn_output_gate": True, "mtp_num_hidden_layers": 1}


def layer_shapes(layer: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, pairs = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    mlps = {f"{layer}mlp.": inner}
    router: dict[str, tuple[int, ...]] = {}
    if experts := config.get("num_experts"):
        mlps = {f"{layer}mlp.experts.{number}.": config["moe_intermediate_size"] for number in range(experts)}
        router = {f"{layer}mlp.gate": (experts, hidden)}
        if shared := config.get("shared_expert_intermediate_size"):
            mlps[f"{layer}mlp.shared_expert."] = shared
            router[f"{layer}mlp.shared_expert_gate"] = (1, hidden)
    return {
        f"{layer}input_layernorm": (hidden,),
        f"{layer}post_attention_layernorm": (hidden,),
        f"{layer}self_attn.q_proj": (queries, hidden),
        f"{layer}self_attn.k_proj": (pairs, hidden),
        f"{layer}self_attn.v_proj": (pairs, hidden),
        f"{layer}self_attn.o_proj": (hidden, queries),
        f"{layer}self_attn.q_norm": (dim,),
        f"{layer}self_attn.k_norm": (dim,),
        **router,
        **{
            f"{mlp}{name}": (hidden, width) if name == "down_proj" else (width, hidden)
            for mlp, width in mlps.items()
            for name in ("gate_proj", "up_proj", "down_proj")
        },
    }


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Norms near 1, matrices that keep the size of what they multiply."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}.weight": (
            1 + 0.3 * torch.randn(shape, generator=generator)
            if len(shape) == 1
            else torch.randn(shape, generator=generator) * 1.5 * shape[1] ** -0.5
        )
        for name, shape in shapes.items()
    }


def dflash_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    hidden = config["hidden_size"]
    reads = len(config["dflash_config"].get("target_layer_ids", [0] * config["num_hidden_layers"]))
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, reads * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    for number in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{number}.", config)
    return random_tensors(shapes, seed)


def mtp_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"mtp.fc": (hidden, 2 * hidden)}
    shapes |= {f"mtp.{name}": (hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes |= layer_shapes("mtp.layers.0.", config)
    if config.get("attn_output_gate"):
        rows, hidden = shapes["mtp.layers.0.self_attn.q_proj"]
        shapes["mtp.layers.0.self_attn.q_proj"] = (2 * rows, hidden)
    return random_tensors(shapes, seed)


def nextn_tensors(config: dict[str, Any], layer: int, seed: int = 0) -> dict[str, Tensor]:
    """Those of ``mtp_tensors`` under DeepSeek-V3's names, in layer ``layer`` of the target's checkpoint."""
    names = {
        "mtp.layers.0.": "",
        "mtp.fc.": "eh_proj.",
        "mtp.pre_fc_norm_embedding.": "enorm.",
        "mtp.pre_fc_norm_hidden.": "hnorm.",
        "mtp.norm.": "shared_head.norm.",
    }
    found = {}
    for name, tensor in mtp_tensors(config, seed).items():
        own = next(own for own in names if name.startswith(own))
        found[f"model.layers.{layer}.{names[own]}{name.removeprefix(own)}"] = tensor
    return found


def blocks_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Of a Nemotron-H target's own MTP layer, whose blocks ``mtp_hybrid_override_pattern`` names."""
    hidden, dim, pattern = config["hidden_size"], config["head_dim"], config["mtp_hybrid_override_pattern"]
    queries, pairs = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    first, last = "mtp.layers.0.", f"mtp.layers.{len(pattern) - 1}."
    shapes: dict[str, tuple[int, ...]] = {f"{first}{name}": (hidden,) for name in ("enorm", "hnorm", "norm")}
    shapes |= {f"{first}eh_proj": (hidden, 2 * hidden), f"{last}final_layernorm": (hidden,)}
    shapes |= {f"{first}mixer.{name}": (pairs, hidden) for name in ("k_proj", "v_proj")}
    shapes |= {f"{first}mixer.q_proj": (queries, hidden), f"{first}mixer.o_proj": (hidden, queries)}
    biases: dict[str, Tensor] = {}
    for number, kind in enumerate(pattern[1:], 1):
        block = f"mtp.layers.{number}."
        shapes[f"{block}norm"] = (hidden,)
        mlps = {f"{block}mixer.": config["intermediate_size"]}
        if kind == "E":
            experts = config["n_routed_experts"]
            mlps = {f"{block}mixer.experts.{e}.": config["moe_intermediate_size"] for e in range(experts)}
            mlps[f"{block}mixer.shared_experts."] = config["moe_shared_expert_intermediate_size"]
            shapes[f"{block}mixer.gate"] = (experts, hidden)
            biases[f"{block}mixer.gate.e_score_correction_bias"] = torch.linspace(-0.2, 0.3, experts)
        for mlp, inner in mlps.items():
            width = config.get("moe_latent_size", hidden) if ".experts." in mlp else hidden
            shapes |= {f"{mlp}up_proj": (inner, width), f"{mlp}down_proj": (width, inner)}
        if kind == "E" and (latent := config.get("moe_latent_size")):
            shapes |= {f"{block}mixer.fc1_latent_proj": (latent, hidden)}
            shapes |= {f"{block}mixer.fc2_latent_proj": (hidden, latent)}
    return random_tensors(shapes, seed) | biases


def less_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the weights of norms as zero-centred ones are stored."""
    return {name: tensor - 1.0 * (tensor.dim() == 1) for name, tensor in tensors.items()}


def fused_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts of one layer in two tensors, as transformers 5 writes them."""
    mlp = "mtp.layers.0.mlp.experts."
    found = {name: tensor for name, tensor in tensors.items() if not name.startswith(mlp)}
    count = sum(name.startswith(mlp) for name in tensors) // 3
    parts = {
        part: torch.stack([tensors[f"{mlp}{number}.{part}_proj.weight"] for number in range(count)])
        for part in ("gate", "up", "down")
    }
    found[f"{mlp}gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
    found[f"{mlp}down_proj"] = parts["down"]
    return found


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
