"""The demo model as a training-time module: Qwen3, in plain torch, on packed documents.

Knows: the architecture (transformers' Qwen3ForCausalLM, tensor names included) and how to run many documents of one
batch end to end without letting any see another. Shape letters: T tokens of the batch, E hidden size, H query heads,
K key/value heads, D head_dim, N documents.
Does not know: tokens' meaning, optimisers, inference engines (models/families/qwen3.py is the one that serves).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of config.json, under its key names."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 576
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0


@dataclass(frozen=True, slots=True)
class Packed:
    """Documents laid end to end. ``ids_T`` and ``positions_T`` int64 (positions restart with each document),
    ``targets_T`` int64 (-100 where nothing is to be predicted), ``starts_N1`` int32 cumulative lengths,
    ``lengths`` the same on the host.
    """

    ids_T: Tensor
    positions_T: Tensor
    targets_T: Tensor
    starts_N1: Tensor
    lengths: tuple[int, ...]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019), in the dtype of x."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotary_table(positions_T: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, D] float32, half-split (NeoX) layout as Hugging Face's Qwen3 uses it."""
    half = torch.arange(0, shape.head_dim, 2, device=positions_T.device, dtype=torch.float32) / shape.head_dim
    angles = positions_T.to(torch.float32)[:, None] * (shape.rope_theta**-half)[None, :]
    angles = torch.cat([angles, angles], dim=-1)[:, None, :]
    return angles.cos(), angles.sin()


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_THD.chunk(2, dim=-1)
    return (x_THD * cos + torch.cat([-second, first], dim=-1) * sin).to(x_THD.dtype)


def attend(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, batch: Packed) -> Tensor:
    """Causal attention inside each document. One variable-length kernel on a GPU, a loop over documents on a CPU."""
    if q_THD.is_cuda:
        from torch.nn.attention.varlen import varlen_attn  # absent from builds without flash attention

        longest = max(batch.lengths)
        starts = batch.starts_N1
        out = varlen_attn(q_THD, k_THD, v_THD, starts, starts, longest, longest, window_size=(-1, 0))
        assert isinstance(out, Tensor)  # a tuple only if asked for
        return out
    parts = zip(*(x.transpose(0, 1).split_with_sizes(batch.lengths, dim=1) for x in (q_THD, k_THD, v_THD)), strict=True)
    done = [F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in parts]
    return torch.cat(done, dim=1).transpose(0, 1)


class Attention(nn.Module):
    """Grouped-query attention with a norm on each head's query and key before the rotary embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, pairs = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, pairs, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, pairs, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, x_TE: Tensor, cos: Tensor, sin: Tensor, batch: Packed) -> Tensor:
        heads = (x_TE.shape[0], -1, self.shape.head_dim)
        q = rotate(self.q_norm(self.q_proj(x_TE).view(heads)), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x_TE).view(heads)), cos, sin)
        v = self.v_proj(x_TE).view(heads)
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        mixed = attend(q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1), batch)
        out: Tensor = self.o_proj(mixed.reshape(x_TE.shape[0], -1))
        return out


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x_TE: Tensor, cos: Tensor, sin: Tensor, batch: Packed) -> Tensor:
        x_TE = x_TE + self.self_attn(self.input_layernorm(x_TE), cos, sin, batch)
        out: Tensor = x_TE + self.mlp(self.post_attention_layernorm(x_TE))
        return out


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Qwen3(nn.Module):
    """Qwen3ForCausalLM with tied embeddings: ``state_dict()`` has exactly the names of its checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        residual_std = 0.02 / math.sqrt(2 * shape.num_hidden_layers)  # GPT-2's scaling of what adds to the stream
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(
                    parameter, std=residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
                )

    def hidden(self, batch: Packed, compute_dtype: torch.dtype) -> Tensor:
        """Final-norm output [T, E] in ``compute_dtype``, the dtype of the residual stream as it is when serving."""
        cos, sin = rotary_table(batch.positions_T, self.shape)
        x_TE: Tensor = self.model.embed_tokens(batch.ids_T).to(compute_dtype)
        for layer in self.model.layers:
            x_TE = layer(x_TE, cos, sin, batch)
        out: Tensor = self.model.norm(x_TE)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)

    def loss(self, batch: Packed, compute_dtype: torch.dtype) -> Tensor:
        """Mean cross entropy over the batch's targets, nats a token."""
        return F.cross_entropy(self.logits(self.hidden(batch, compute_dtype)).float(), batch.targets_T)
