"""The operations of a model in float64, one row at a time: what a step computes no longer depends on who shares it.

A product's last bits depend on how many rows it has, so two engines that batch differently differ in the last bits of
float32, and a test of them would have to say how much is too much. In float64 the difference is gone by the time
logits are rounded to float32, so any two engines can be compared bit for bit.

Knows: the contract of models/kernels/interface.py. Does not know: speed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.inputs import DecodeAttention
from models.kernels.interface import Rotation
from models.kernels.reference import ReferenceKernels


class ExactKernels(ReferenceKernels):
    """For activations and weights in float64."""

    name = "exact"

    def rms_norm(self, x_TN: Tensor, weight_N: Tensor, eps: float) -> Tensor:
        return x_TN * torch.rsqrt(x_TN.pow(2).mean(-1, keepdim=True) + eps) * weight_N

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        gate, up = gate_up_T2I.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rope_and_cache(self, qkv_TX: Tensor, heads: int, kv_layer: Tensor, rotation: Rotation) -> Tensor:
        kv_heads, head_dim = kv_layer.shape[3:]
        qkv_THD = qkv_TX.view(-1, heads + 2 * kv_heads, head_dim)
        q, k, v = torch.split(qkv_THD, [heads, kv_heads, kv_heads], dim=1)
        if rotation.q_norm_D is not None:
            q = self.rms_norm(q, rotation.q_norm_D, rotation.eps)
        if rotation.k_norm_D is not None:
            k = self.rms_norm(k, rotation.k_norm_D, rotation.eps)
        cos_sin_TR = rotation.cos_sin_LR[rotation.positions_T].double()
        keys, values = kv_layer.flatten(1, 2)
        keys.index_copy_(0, rotation.kv_slots_T, _rotate(k, cos_sin_TR))
        values.index_copy_(0, rotation.kv_slots_T, v)
        return _rotate(q, cos_sin_TR)

    def decode_attention(
        self,
        q_THD: Tensor,
        kv_layer: Tensor,
        inputs: DecodeAttention,
        scale: float,
        out_THD: Tensor | None = None,
    ) -> Tensor:
        if out_THD is not None:
            return super().decode_attention(q_THD, kv_layer, inputs, scale, out_THD)
        lengths = inputs.kv_lengths_B.tolist()
        q_BQHD = q_THD.view(-1, inputs.query_len, *q_THD.shape[1:])
        rows = zip(q_BQHD, inputs.page_table_BP, lengths, strict=True)
        return torch.cat([_attend(q_QHD, kv_layer, pages_P, length, scale) for q_QHD, pages_P, length in rows])

    def _prefill_row(self, q_QHD: Tensor, kv_layer: Tensor, pages_P: Tensor, length: int, scale: float) -> Tensor:
        return _attend(q_QHD, kv_layer, pages_P, length, scale)


def _rotate(x_TKD: Tensor, cos_sin_TR: Tensor) -> Tensor:
    cos, sin = cos_sin_TR.unsqueeze(1).chunk(2, dim=-1)
    first, second = x_TKD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _attend(q_QHD: Tensor, kv_layer: Tensor, pages_P: Tensor, length: int, scale: float) -> Tensor:
    """The last Q of one row's ``length`` tokens, each over itself and those before it."""
    size, new = kv_layer.shape[2], len(q_QHD)
    pages = pages_P[: -(-length // size)]
    keys_LKD, values_LKD = kv_layer[:, pages].flatten(1, 2)[:, :length]
    group = q_QHD.shape[1] // keys_LKD.shape[1]
    keys_LHD, values_LHD = (x.repeat_interleave(group, dim=1) for x in (keys_LKD, values_LKD))
    scores_HQL = torch.einsum("qhd,lhd->hql", q_QHD, keys_LHD) * scale
    later_QL = torch.ones(new, length, dtype=torch.bool).triu(length - new + 1)
    return torch.einsum("hql,lhd->qhd", scores_HQL.masked_fill(later_QL, float("-inf")).softmax(-1), values_LHD)
