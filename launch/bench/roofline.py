"""The floor of a decode step: the time its bytes and its arithmetic need on a device, and nothing else.

Knows: how many weights and KV bytes a shape reads a step, and how they divide over ranks. Does not know: engines,
kernels, communication (all-reduce is not counted), or how fast anything really is.

Every weight is read once a step, the embedding left out and the language-model head in. Each group of GEMMs takes the
larger of its byte time and its arithmetic time. Attention reads the KV of every row at the average length. Layers with
state in slots read and write that of every row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

from models.block_pattern import block_kinds, has_blocks, read_mamba2
from models.layers.delta_config import has_gated_delta, read_gated_delta, usual_keys


@dataclass(frozen=True, slots=True)
class Shape:
    """Values of a whole model. ``dense``: weights that every token meets; ``expert``: those of one expert, over all
    layers; ``kv_heads`` and ``kv_per_head``: heads, and values one token leaves in one of them, over all layers.
    ``state_bytes``: what a row's recurrent state takes (float32), ``window_values``: values of its convolutions that a
    step reads or writes; both over all layers."""

    dense: int
    expert: int
    experts: int
    experts_per_token: int
    kv_heads: int
    kv_per_head: int
    state_bytes: int = 0
    window_values: int = 0

    @classmethod
    def from_folder(cls, folder: Path) -> Shape:
        """Of a model folder's config.json."""
        return cls.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Shape:
        """Keys as transformers writes them; those of Qwen3-MoE where there are experts, of Qwen3-Next and Qwen3.5 where
        there are gated delta nets; or those of Nemotron-H."""
        if has_blocks(config):
            return _of_blocks(config)
        delta = None
        if has_gated_delta(config):
            config = usual_keys(config)
            delta = read_gated_delta(config)
        hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        experts = config.get("num_experts") or 0
        attending = layers - (0 if delta is None else len(delta.layers))
        queries = 2 * heads if delta is None else 3 * heads  # and outputs; with gates where there are delta nets
        mixers = attending * hidden * head_dim * (queries + 2 * kv_heads)
        if delta is not None:
            mixers += len(delta.layers) * hidden * (2 * delta.keys + 3 * delta.values + 2 * delta.v_heads)
        shared = config.get("shared_expert_intermediate_size") or 0 if experts else 0
        feed_forward = experts * hidden + 3 * hidden * shared if experts else 3 * hidden * config["intermediate_size"]
        return cls(
            dense=mixers + layers * feed_forward + config["vocab_size"] * hidden,
            expert=3 * layers * hidden * config["moe_intermediate_size"] if experts else 0,
            experts=experts,
            experts_per_token=config["num_experts_per_tok"] if experts else 0,
            kv_heads=kv_heads,
            kv_per_head=2 * attending * head_dim,
            state_bytes=0 if delta is None else 4 * len(delta.layers) * delta.values * delta.k_dim,
            window_values=0 if delta is None else len(delta.layers) * (2 * delta.keys + delta.values) * delta.taps,
        )


def _of_blocks(config: Mapping[str, Any]) -> Shape:
    kinds, mamba = block_kinds(config), read_mamba2(config)
    mamba_layers, attention_layers, sparse = (kinds.count(kind) for kind in ("mamba", "attention", "moe"))
    hidden, kv_heads, head_dim = config["hidden_size"], config["num_key_value_heads"], config["head_dim"]
    experts = config.get("n_routed_experts") or 0 if sparse else 0
    of_mamba = hidden * (2 * mamba.inner + mamba.conv_channels + mamba.heads)  # in: z, xBC, dt; out
    of_attention = hidden * head_dim * (2 * config["num_attention_heads"] + 2 * kv_heads)
    of_sparse = experts * hidden + 2 * hidden * config.get("moe_shared_expert_intermediate_size", 0)
    of_mlp = 2 * hidden * config["intermediate_size"]
    return Shape(
        dense=mamba_layers * of_mamba
        + attention_layers * of_attention
        + sparse * of_sparse
        + kinds.count("mlp") * of_mlp
        + config["vocab_size"] * hidden,
        expert=2 * sparse * hidden * config["moe_intermediate_size"] if experts else 0,
        experts=experts,
        experts_per_token=config["num_experts_per_tok"] if experts else 0,
        kv_heads=kv_heads,
        kv_per_head=2 * attention_layers * head_dim,
        state_bytes=4 * mamba_layers * mamba.inner * mamba.state_size,
        window_values=mamba_layers * mamba.taps * mamba.conv_channels,
    )


@dataclass(frozen=True, slots=True)
class Floor:
    """Of one decode step on one rank."""

    weight_bytes: float
    kv_bytes: float
    seconds: float
    state_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.state_bytes


def decode_floor(
    shape: Shape,
    *,
    batch: int,
    length: float,
    ranks: int,
    value_bytes: int,
    bytes_per_s: float,
    flop_per_s: float,
    groups: int = 1,
) -> Floor:
    """``length``: average tokens of KV a row. ``ranks`` share the experts whole, and each of ``groups`` of them every
    other weight matrix, for rows of its own: the fullest group counts."""
    rows, tensor = -(-batch // groups), ranks // groups
    gemms = [(shape.dense / tensor, 2 * shape.dense * rows / tensor)]
    if shape.experts:
        active = _experts_of_the_fullest_rank(shape, batch, ranks)
        gemms.append((shape.expert * active, 2 * shape.expert * shape.experts_per_token * batch / ranks))
    weight_bytes = value_bytes * sum(values for values, _ in gemms)
    kv_heads = max(1.0, shape.kv_heads / tensor)
    kv_bytes = value_bytes * rows * length * kv_heads * shape.kv_per_head
    state_bytes = rows * (2 * shape.state_bytes + value_bytes * shape.window_values) / tensor
    seconds = sum(max(value_bytes * values / bytes_per_s, flop / flop_per_s) for values, flop in gemms)
    return Floor(weight_bytes, kv_bytes, seconds + (kv_bytes + state_bytes) / bytes_per_s, state_bytes)


def _experts_of_the_fullest_rank(shape: Shape, batch: int, ranks: int) -> float:
    """Experts that at least one of ``batch`` tokens asks for, on the rank with most of them, expected under uniform
    routing: the largest of ``ranks`` binomial counts."""
    here = shape.experts // ranks
    asked = 1 - (1 - shape.experts_per_token / shape.experts) ** batch
    at_most = expected = 0.0
    for count in range(here):
        at_most += comb(here, count) * asked**count * (1 - asked) ** (here - count)
        expected += 1 - at_most**ranks
    return expected
