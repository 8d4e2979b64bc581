"""Both drafters for one sequence at a time, in float32, from checkpoint tensors by their names: no cache, no pages.

Knows: the papers' mathematics, written as plainly as possible. Does not know: any code that it is compared with.
Shape letters: L tokens of context, W of a block, N hidden size, H query heads, K key/value heads, D head_dim, F width
of the features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x_LHD: Tensor, positions_L: Tensor, config: Mapping[str, Any]) -> Tensor:
    """The leading part of every head."""
    rotated, theta = int(x_LHD.shape[-1] * config.get("partial_rotary_factor", 1.0)), config["rope_theta"]
    x_LHD, rest = x_LHD[..., :rotated], x_LHD[..., rotated:]
    half = rotated // 2
    angles = positions_L[:, None].float() * theta ** (-torch.arange(half).float() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x_LHD[..., :half], x_LHD[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def keys_values(w: Weights, layer: str, x_LN: Tensor, positions_L: Tensor, config: Mapping[str, Any]) -> list[Tensor]:
    """Keys and values [L, K, D] of ``x``, which is normed as the layer wants it."""
    shape = (len(x_LN), config["num_key_value_heads"], config["head_dim"])
    k = (x_LN @ w[f"{layer}self_attn.k_proj.weight"].T).view(shape)
    k = norm(k, w[f"{layer}self_attn.k_norm.weight"], config["rms_norm_eps"])
    return [rotate(k, positions_L, config), (x_LN @ w[f"{layer}self_attn.v_proj.weight"].T).view(shape)]


def queries(w: Weights, layer: str, x_WN: Tensor, positions_W: Tensor, config: Mapping[str, Any]) -> Tensor:
    shape = (len(x_WN), config["num_attention_heads"], config["head_dim"])
    q = (x_WN @ w[f"{layer}self_attn.q_proj.weight"].T).view(shape)
    return rotate(norm(q, w[f"{layer}self_attn.q_norm.weight"], config["rms_norm_eps"]), positions_W, config)


def attend(q_WHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, seen_WL: Tensor) -> Tensor:
    """Each query over the places that it sees."""
    group = q_WHD.shape[1] // k_LKD.shape[1]
    k_HLD, v_HLD = (one.repeat_interleave(group, 1).transpose(0, 1) for one in (k_LKD, v_LKD))
    scores_HWL = q_WHD.transpose(0, 1) @ k_HLD.mT / math.sqrt(q_WHD.shape[2])
    return (scores_HWL.masked_fill(~seen_WL, -math.inf).softmax(-1) @ v_HLD).transpose(0, 1)


def rest_of_layer(w: Weights, layer: str, x_WN: Tensor, mixed_WHD: Tensor, config: Mapping[str, Any]) -> Tensor:
    x = x_WN + mixed_WHD.flatten(1) @ w[f"{layer}self_attn.o_proj.weight"].T
    y = norm(x, w[f"{layer}post_attention_layernorm.weight"], config["rms_norm_eps"])
    if "num_experts" in config:
        return x + torch.stack([sparse_mlp(w, f"{layer}mlp.", y_N, config) for y_N in y])
    return x + mlp(w, f"{layer}mlp.", y)


def mlp(w: Weights, name: str, y: Tensor) -> Tensor:
    gate, up = y @ w[f"{name}gate_proj.weight"].T, y @ w[f"{name}up_proj.weight"].T
    return (torch.nn.functional.silu(gate) * up) @ w[f"{name}down_proj.weight"].T


def sparse_mlp(w: Weights, name: str, y_N: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Of one token: the likeliest experts, weighted to a sum of 1, and a shared one behind a gate of its own."""
    scores, experts = (w[f"{name}gate.weight"] @ y_N).softmax(0).topk(config["num_experts_per_tok"])
    out_N = torch.zeros_like(y_N)
    if f"{name}shared_expert_gate.weight" in w:
        out_N = torch.sigmoid(w[f"{name}shared_expert_gate.weight"][0] @ y_N) * mlp(w, f"{name}shared_expert.", y_N)
    for score, expert in zip(scores / scores.sum(), experts.tolist(), strict=True):
        out_N = out_N + score * mlp(w, f"{name}experts.{expert}.", y_N)
    return out_N


def dflash_block(w: Weights, config: Mapping[str, Any], features_LF: Tensor, embedded_WN: Tensor) -> Tensor:
    """Normed hidden states [W, N] of a block behind L tokens with such features."""
    context, block = len(features_LF), len(embedded_WN)
    eps, positions = config["rms_norm_eps"], torch.arange(context + block)
    fused_LN = norm(features_LF @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = embedded_WN
    for number in range(config["num_hidden_layers"]):
        layer = f"layers.{number}."
        y = norm(x, w[f"{layer}input_layernorm.weight"], eps)
        k, v = (
            torch.cat(pair)
            for pair in zip(
                keys_values(w, layer, fused_LN, positions[:context], config),
                keys_values(w, layer, y, positions[context:], config),
                strict=True,
            )
        )
        sliding = config["layer_types"][number] == "sliding_attention"
        causal = config.get("is_causal", sliding)
        away = positions[context:, None] - positions
        seen = torch.ones_like(away, dtype=torch.bool)
        if causal:
            seen &= away >= 0
        if sliding:
            seen &= away.abs() < config["sliding_window"]
        mixed = attend(queries(w, layer, y, positions[context:], config), k, v, seen)
        x = rest_of_layer(w, layer, x, mixed, config)
    return norm(x, w["norm.weight"], eps)


def mtp_guesses(
    w: Weights,
    config: Mapping[str, Any],
    embedding: Tensor,
    head: Tensor,
    tokens: Sequence[int],
    hidden_LN: Tensor,
    count: int,
    ids: Sequence[int] | None = None,
) -> list[int]:
    """``count`` greedy guesses, among ``ids``, of what follows ``tokens``, of which the target has computed all but the
    last: ``hidden`` are its final states of those. The layer's own state and its guesses take their place beyond."""
    guessed, states = list(tokens), list(hidden_LN)
    state = blocks_state if "mtp_hybrid_override_pattern" in config else mtp_state
    for _ in range(count):
        states.append(state(w, config, embedding, guessed, states))
        guessed.append(likeliest(states[-1], head, ids))
    return guessed[len(tokens) :]


def likeliest(state_N: Tensor, head: Tensor, ids: Sequence[int] | None = None) -> int:
    """Of all ids, or of some."""
    scores = (head @ state_N).tolist()
    return max(range(len(scores)) if ids is None else sorted(ids), key=lambda id_: scores[id_])


def mtp_state(
    w: Weights, config: Mapping[str, Any], embedding: Tensor, tokens: Sequence[int], states: Sequence[Tensor]
) -> Tensor:
    """The layer's normed output [N] behind ``tokens``, from the hidden states of all of them but the last."""
    eps, layer = config["rms_norm_eps"], "mtp.layers.0."
    next_LN = norm(embedding[list(tokens[1:])], w["mtp.pre_fc_norm_embedding.weight"], eps)
    hidden_LN = norm(torch.stack(list(states)), w["mtp.pre_fc_norm_hidden.weight"], eps)
    x = torch.cat((next_LN, hidden_LN), -1) @ w["mtp.fc.weight"].T
    positions = torch.arange(len(x))
    y = norm(x, w[f"{layer}input_layernorm.weight"], eps)
    k, v = keys_values(w, layer, y, positions, config)
    seen = torch.ones(1, len(x), dtype=torch.bool)
    gate = None
    if config.get("attn_output_gate"):  # of each head: the rows of its query, then those of its gate
        packed = w[f"{layer}self_attn.q_proj.weight"]
        both_HDN = packed.view(-1, 2, config["head_dim"], packed.shape[1])
        w = {**w, f"{layer}self_attn.q_proj.weight": both_HDN[:, 0].flatten(0, 1)}
        gate = torch.sigmoid(y[-1] @ both_HDN[:, 1].flatten(0, 1).T).view(1, -1, config["head_dim"])
    mixed = attend(queries(w, layer, y[-1:], positions[-1:], config), k, v, seen)
    mixed = mixed if gate is None else mixed * gate
    return norm(rest_of_layer(w, layer, x[-1:], mixed, config), w["mtp.norm.weight"], eps)[0]


def blocks_state(
    w: Weights, config: Mapping[str, Any], embedding: Tensor, tokens: Sequence[int], states: Sequence[Tensor]
) -> Tensor:
    """As ``mtp_state``, of a Nemotron-H layer: attention without positions, then blocks of experts or one MLP each."""
    eps, first, pattern = config["layer_norm_epsilon"], "mtp.layers.0.", config["mtp_hybrid_override_pattern"]
    pairs = [
        torch.cat(
            (
                norm(embedding[tokens[p + 1]], w[f"{first}enorm.weight"], eps),
                norm(state, w[f"{first}hnorm.weight"], eps),
            )
        )
        for p, state in enumerate(states)
    ]
    x_LN = torch.stack(pairs) @ w[f"{first}eh_proj.weight"].T
    y_LN = norm(x_LN, w[f"{first}norm.weight"], eps)
    q, k, v = (
        (y_LN @ w[f"{first}mixer.{name}_proj.weight"].T).view(len(x_LN), -1, config["head_dim"]) for name in "qkv"
    )
    mixed = attend(q[-1:], k, v, torch.ones(1, len(x_LN), dtype=torch.bool))[0].flatten()
    x_N = x_LN[-1] + w[f"{first}mixer.o_proj.weight"] @ mixed
    for number, kind in enumerate(pattern[1:], 1):
        block = f"mtp.layers.{number}."
        y_N = norm(x_N, w[f"{block}norm.weight"], eps)
        x_N = x_N + (sigmoid_experts if kind == "E" else relu2_mlp)(w, f"{block}mixer.", y_N, config)
    return norm(x_N, w[f"mtp.layers.{len(pattern) - 1}.final_layernorm.weight"], eps)


def relu2_mlp(w: Weights, name: str, y_N: Tensor, config: Mapping[str, Any]) -> Tensor:
    return w[f"{name}down_proj.weight"] @ (w[f"{name}up_proj.weight"] @ y_N).clamp(min=0).square()


def sigmoid_experts(w: Weights, name: str, y_N: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Of one token: a bias counts for the choice alone, which is among the groups whose best two sum to most."""
    scores = torch.sigmoid(w[f"{name}gate.weight"] @ y_N)
    choice = (scores + w[f"{name}gate.e_score_correction_bias"]).tolist()
    size = len(choice) // config["n_group"]
    groups = [list(range(first, first + size)) for first in range(0, len(choice), size)]
    groups.sort(key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[:2]))
    allowed = [e for group in groups[: config["topk_group"]] for e in group]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: config["num_experts_per_tok"]]
    total = scores[chosen].sum()
    shared_N, identity = relu2_mlp(w, f"{name}shared_experts.", y_N, config), torch.eye(len(y_N), dtype=y_N.dtype)
    read = w.get(f"{name}fc1_latent_proj.weight", identity) @ y_N
    out = torch.zeros_like(read)
    for expert in chosen:
        share = scores[expert] / total * config["routed_scaling_factor"]
        out = out + share * relu2_mlp(w, f"{name}experts.{expert}.", read, config)
    return shared_N + w.get(f"{name}fc2_latent_proj.weight", identity) @ out


def eagle3_guesses(
    w: Weights,
    config: Mapping[str, Any],
    embedding: Tensor,
    tokens: Sequence[int],
    features_LF: Tensor,
    count: int,
) -> list[int]:
    """``count`` greedy guesses of what follows ``tokens``, with the target's features of all of them but the last."""
    eps, layer = config["rms_norm_eps"], "midlayer."
    embedding = w.get("embed_tokens.weight", embedding)
    guessed, states = list(tokens), list(features_LF @ w["fc.weight"].T)
    for _ in range(count):
        normed = norm(torch.stack(states), w[f"{layer}hidden_norm.weight"], eps)
        before = norm(embedding[guessed[1:]], w[f"{layer}input_layernorm.weight"], eps)
        pairs = torch.cat((before, normed), -1)
        q_LHD, k_LKD, v_LKD = (
            (pairs @ w[f"{layer}self_attn.{name}_proj.weight"].T).view(len(pairs), -1, config["head_dim"])
            for name in "qkv"
        )
        positions = torch.arange(len(pairs))
        q_LHD, k_LKD = rotate(q_LHD, positions, config), rotate(k_LKD, positions, config)
        mixed = attend(q_LHD[-1:], k_LKD, v_LKD, torch.ones(1, len(pairs), dtype=torch.bool))
        stream = normed[-1] if config.get("norm_before_residual") else states[-1]
        states.append(rest_of_layer(w, layer, stream[None], mixed, config)[0])
        draft_id = likeliest(norm(states[-1], w["norm.weight"], eps), w["lm_head.weight"])
        guessed.append(draft_id + int(w["d2t"][draft_id]) if "d2t" in w else draft_id)
    return guessed[len(tokens) :]
