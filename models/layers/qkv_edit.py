"""What some families do to queries and keys between their projection and the rotation.

Knows: norms over all heads of a layer, scales of queries by position. Does not know: norms of single heads, rotations
(models/kernels), or attention.
Shape letters as in models/layers/attention.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from models.layers.context import ModelContext
from parallel.layers.shard import HeadShard, Shard, ShardedModule, along_rows


class NormsOverHeads(ShardedModule):
    """RMSNorm of all of a token's queries at once, and of all its keys (MiniMax-M2). One all-reduce of two sums a
    token, to which replicated key heads add their part of the sum.
    """

    def __init__(self, heads: HeadShard, head_dim: int, eps: float, context: ModelContext) -> None:
        super().__init__()
        self.heads, self.head_dim, self.eps = heads, head_dim, eps
        self.collectives = context.collectives
        self.q_norm = context.parameter(heads.local_heads * head_dim)
        self.k_norm = context.parameter(heads.local_kv_heads * head_dim)

    def forward(self, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        heads, queries, keys = self.heads, len(self.q_norm), len(self.k_norm)
        wide_TX = qkv_TX[:, : queries + keys].to(torch.promote_types(qkv_TX.dtype, torch.float32))
        squares_TX = wide_TX.square()
        held = heads.kv_heads / (heads.local_kv_heads * heads.size)  # 1 / ranks that hold the same key head
        sums_T2 = torch.stack((squares_TX[:, :queries].sum(1), squares_TX[:, queries:].sum(1) * held), 1)
        if heads.size > 1:
            sums_T2 = self.collectives.all_reduce(sums_T2)
        q_T1 = torch.rsqrt(sums_T2[:, :1] / (heads.heads * self.head_dim) + self.eps)
        k_T1 = torch.rsqrt(sums_T2[:, 1:] / (heads.kv_heads * self.head_dim) + self.eps)
        qkv_TX[:, :queries] = (wide_TX[:, :queries] * q_T1).to(qkv_TX.dtype) * self.q_norm
        qkv_TX[:, queries : queries + keys] = (wide_TX[:, queries:] * k_T1).to(qkv_TX.dtype) * self.k_norm
        return qkv_TX

    def shards(self) -> dict[str, Shard]:
        heads, dim = self.heads, self.head_dim
        q = along_rows(self.q_norm, heads.heads * dim, heads.first_head * dim)
        k = along_rows(self.k_norm, heads.kv_heads * dim, heads.first_kv_head * dim)
        return {"q_norm.weight": replace(q, centre=1.0), "k_norm.weight": replace(k, centre=1.0)}


class QueryScale(nn.Module):
    """Queries times a factor of their position (Ministral 3): before the rotation, which is linear."""

    def __init__(self, factors_L: Tensor, queries: int) -> None:
        super().__init__()
        self.factors_L, self.queries = factors_L, queries

    def forward(self, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        qkv_TX[:, : self.queries] *= self.factors_L[positions_T].to(qkv_TX.dtype)[:, None]
        return qkv_TX


def position_factors(beta: float, original_context: int, length: int) -> Tensor:
    """1 + beta ln(1 + floor(p / original_context)) of each position p < length, float32, on the default device."""
    if torch.get_default_device().type == "meta":  # as in models/layers/rope.py
        return torch.empty(length, dtype=torch.float32)
    turns_L = torch.arange(length, dtype=torch.int64) // original_context
    return 1 + beta * torch.log1p(turns_L.to(torch.float32))
