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


def rotate(x_LHD: Tensor, positions_L: Tensor, theta: float) -> Tensor:
    half = x_LHD.shape[-1] // 2
    angles = positions_L[:, None].float() * theta ** (-torch.arange(half).float() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x_LHD[..., :half], x_LHD[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def keys_values(w: Weights, layer: str, x_LN: Tensor, positions_L: Tensor, config: Mapping[str, Any]) -> list[Tensor]:
    """Keys and values [L, K, D] of ``x``, which is normed as the layer wants it."""
    shape = (len(x_LN), config["num_key_value_heads"], config["head_dim"])
    k = (x_LN @ w[f"{layer}self_attn.k_proj.weight"].T).view(shape)
    k = norm(k, w[f"{layer}self_attn.k_norm.weight"], config["rms_norm_eps"])
    return [rotate(k, positions_L, config["rope_theta"]), (x_LN @ w[f"{layer}self_attn.v_proj.weight"].T).view(shape)]


def queries(w: Weights, layer: str, x_WN: Tensor, positions_W: Tensor, config: Mapping[str, Any]) -> Tensor:
    shape = (len(x_WN), config["num_attention_heads"], config["head_dim"])
    q = (x_WN @ w[f"{layer}self_attn.q_proj.weight"].T).view(shape)
    return rotate(
        norm(q, w[f"{layer}self_attn.q_norm.weight"], config["rms_norm_eps"]), positions_W, config["rope_theta"]
    )


def attend(q_WHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, seen_WL: Tensor) -> Tensor:
    """Head by head, query by query."""
    out = torch.zeros_like(q_WHD)
    group = q_WHD.shape[1] // k_LKD.shape[1]
    for i in range(q_WHD.shape[0]):
        seen = seen_WL[i].nonzero()[:, 0]
        for head in range(q_WHD.shape[1]):
            scores = k_LKD[seen, head // group] @ q_WHD[i, head] / math.sqrt(q_WHD.shape[2])
            out[i, head] = scores.softmax(0) @ v_LKD[seen, head // group]
    return out


def rest_of_layer(w: Weights, layer: str, x_WN: Tensor, mixed_WHD: Tensor, config: Mapping[str, Any]) -> Tensor:
    x = x_WN + mixed_WHD.flatten(1) @ w[f"{layer}self_attn.o_proj.weight"].T
    y = norm(x, w[f"{layer}post_attention_layernorm.weight"], config["rms_norm_eps"])
    gate, up = y @ w[f"{layer}mlp.gate_proj.weight"].T, y @ w[f"{layer}mlp.up_proj.weight"].T
    return x + (torch.nn.functional.silu(gate) * up) @ w[f"{layer}mlp.down_proj.weight"].T


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
        seen = torch.ones(block, context + block, dtype=torch.bool)
        for i in range(block):
            for j in range(context + block):
                away = context + i - j
                if (causal and away < 0) or (sliding and abs(away) >= config["sliding_window"]):
                    seen[i, j] = False
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
) -> list[int]:
    """``count`` greedy guesses of what follows ``tokens``, of which the target has computed all but the last:
    ``hidden`` are its final states of those. The layer's own state and its guesses take their place beyond."""
    guessed, states = list(tokens), list(hidden_LN)
    for _ in range(count):
        states.append(mtp_state(w, config, embedding, guessed, states))
        guessed.append(int((states[-1] @ head.T).argmax()))
    return guessed[len(tokens) :]


def mtp_state(
    w: Weights, config: Mapping[str, Any], embedding: Tensor, tokens: Sequence[int], states: Sequence[Tensor]
) -> Tensor:
    """The layer's normed output [N] behind ``tokens``, from the hidden states of all of them but the last."""
    eps, layer = config["rms_norm_eps"], "mtp.layers.0."
    both = [
        torch.cat(
            (
                norm(embedding[tokens[p + 1]], w["mtp.pre_fc_norm_embedding.weight"], eps),
                norm(state, w["mtp.pre_fc_norm_hidden.weight"], eps),
            )
        )
        for p, state in enumerate(states)
    ]
    x = torch.stack(both) @ w["mtp.fc.weight"].T
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
