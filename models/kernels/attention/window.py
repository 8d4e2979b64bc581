"""Attention of blocks that see only tokens near them, in torch: sliding-window layers of drafters.

Knows: which keys a block of tokens can reach, so that only those are read, however long its sequence is.
Does not know: other attention (models/ops/contract.py). Graph-safe on a GPU: shapes follow from host bounds.
Shape letters as in models/inputs.py; W tokens of a block, L keys that its tokens can reach.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.inputs import DecodeAttention
from models.kv_group import bits_of


def window_attention(q_THD: Tensor, kv_layer: Tensor, inputs: DecodeAttention, scale: float, window: int) -> Tensor:
    """See Ops.window_attention. In float32 inside, whatever the dtype."""
    rows, new, (heads, head_dim) = inputs.kv_lengths_B.shape[0], inputs.query_len, q_THD.shape[1:]
    device, page_size = q_THD.device, kv_layer.shape[2]
    reach = min(window + new - 1, inputs.max_kv_length)
    lengths_B1 = inputs.kv_lengths_B.to(torch.int64)[:, None]
    key_BL = lengths_B1 - reach + torch.arange(reach, device=device)  # positions; those before 0 are none
    real_BL = key_BL >= 0
    pages_BL = inputs.page_table_BP.to(torch.int64).gather(1, key_BL.clamp(min=0) // page_size)
    slots_BL = pages_BL * page_size + key_BL.clamp(min=0) % page_size
    keys_values = bits_of(kv_layer).flatten(1, 2)[:, slots_BL].view(kv_layer.dtype).float()  # [2, B, L, K, D]
    # Unwritten memory may be NaN, which a weight of 0 would not mask.
    keys_values = keys_values.where(real_BL[:, :, None, None], 0)
    away_BWL = lengths_B1[:, :, None] - new + torch.arange(new, device=device)[:, None] - key_BL[:, None]
    seen_BWL = real_BL[:, None] & (away_BWL < window) & (away_BWL >= (0 if inputs.causal else 1 - window))
    q_BHWD = q_THD.view(rows, new, heads, head_dim).transpose(1, 2).float()
    keys, values = (x.transpose(1, 2) for x in keys_values)
    out = F.scaled_dot_product_attention(
        q_BHWD, keys, values, attn_mask=seen_BWL[:, None], scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(rows * new, heads, head_dim).to(q_THD.dtype)
