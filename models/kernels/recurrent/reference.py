"""Convolution windows and recurrences in plain torch, token by token: what the Triton kernels are tested against.

Knows: the arithmetic, in float32 (float64 where activations are). Does not know: speed.
Shape letters as in models/inputs.py; S slots, C channels, J taps of a convolution.

Rows that are not live share the null slot, whose contents mean nothing. They may be NaN: it is
left out by selection, never by a product with zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from models.inputs import StateRows
from models.kernels.interface import DeltaRule
from models.kernels.recurrent.ragged import NodeStates, token_rows

L2_EPS = 1e-6  # of the norms of queries and keys, whatever that of the other norms


def causal_conv(
    x_TC: Tensor, weight_CJ: Tensor, bias_C: Tensor | None, window_SJC: Tensor, rows: StateRows, positions_T: Tensor,
    silu: Callable[[Tensor], Tensor] = F.silu,
) -> Tensor:  # fmt: skip
    """See Ops.causal_conv. If that holds of ``silu``, no bit of a token's result depends on who shares the step."""
    where, taps = token_rows(rows, len(x_TC)), weight_CJ.shape[1]
    wide = torch.promote_types(x_TC.dtype, torch.float32)
    slot_T = where.slots_B[where.row_T]
    sum_TC = torch.zeros(x_TC.shape, dtype=wide, device=x_TC.device)
    for back in reversed(range(taps)):  # the oldest input first
        held_TC = window_SJC[slot_T, (positions_T - back) % taps]
        token_T, new_T = where.before(back)
        x_back_TC = torch.where(new_T.unsqueeze(1), x_TC[token_T], held_TC).to(wide)
        sum_TC = sum_TC + x_back_TC * weight_CJ[:, taps - 1 - back].to(wide)
    if bias_C is not None:
        sum_TC = sum_TC + bias_C.to(wide)
    if rows.frozen:
        return silu(sum_TC).to(x_TC.dtype)
    last_B = where.token_B(where.lengths_B - 1)
    for back in range(taps):
        there_B1 = (where.lengths_B > back).unsqueeze(1)
        tap_B = (positions_T[last_B] - back) % taps
        old_BC = window_SJC[rows.written_B, tap_B]
        newer_BC = x_TC[where.token_B(where.lengths_B - 1 - back)]
        window_SJC[rows.written_B, tap_B] = torch.where(there_B1, newer_BC, old_BC)
    return silu(sum_TC).to(x_TC.dtype)


def gated_delta(
    qkv_TC: Tensor, z_TV: Tensor, b_TH: Tensor, a_TH: Tensor, rule: DeltaRule, state_SHVK: Tensor, rows: StateRows
) -> Tensor:
    """See Ops.gated_delta. Reads lengths on the host where the device is a CPU."""
    tokens, wide = len(qkv_TC), state_SHVK.dtype
    where, device = token_rows(rows, len(qkv_TC)), qkv_TC.device
    q_THK, k_THK, v_THV = _heads(qkv_TC.to(wide), rule)
    beta_TH1 = b_TH.to(wide).sigmoid().unsqueeze(2)
    decay_TH11 = (-rule.decay_log_H.to(wide).exp() * F.softplus(a_TH.to(wide) + rule.decay_bias_H.to(wide))).exp()
    decay_TH11 = decay_TH11[:, :, None, None]
    most = int(where.lengths_B.max()) if device.type == "cpu" else where.most
    out_THV = torch.full((tokens + 1, *v_THV.shape[1:]), float("nan"), dtype=wide, device=device)  # one to drop
    now_BHVK = state_SHVK[where.slots_B]
    tree = NodeStates(rows, now_BHVK) if rows.tree is not None and rows.frozen else None
    for step in range(most):
        there_B, token_B = step < where.lengths_B, where.token_B(step)
        if tree is not None:
            now_BHVK = tree.before(step)
        q_BH1K, k_BH1K = q_THK[token_B].unsqueeze(2), k_THK[token_B].unsqueeze(2)
        next_BHVK = now_BHVK * decay_TH11[token_B]
        missing_BHV = (v_THV[token_B] - (next_BHVK * k_BH1K).sum(3)) * beta_TH1[token_B]
        next_BHVK = next_BHVK + missing_BHV.unsqueeze(3) * k_BH1K
        out_THV[torch.where(there_B, token_B, tokens)] = (next_BHVK * q_BH1K).sum(3)
        now_BHVK = torch.where(there_B[:, None, None, None], next_BHVK, now_BHVK)
        if tree is not None:
            tree.set(step, now_BHVK)
    if not rows.frozen:
        state_SHVK[rows.written_B] = now_BHVK
    return _normed_and_gated(out_THV[:tokens].to(qkv_TC.dtype), z_TV, rule)


def _heads(qkv_TC: Tensor, rule: DeltaRule) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [T, v_heads, k_dim], each key head repeated for its value heads, and v [T, v_heads, v_dim]."""
    keys = rule.k_heads * rule.k_dim
    q_TX, k_TX, v_TX = torch.split(qkv_TC, [keys, keys, rule.v_heads * rule.v_dim], 1)
    q_THK, k_THK = (
        (x * torch.rsqrt((x * x).sum(2, keepdim=True) + L2_EPS)).repeat_interleave(rule.v_heads // rule.k_heads, 1)
        for x in (part.reshape(-1, rule.k_heads, rule.k_dim) for part in (q_TX, k_TX))
    )
    return q_THK * rule.k_dim**-0.5, k_THK, v_TX.reshape(-1, rule.v_heads, rule.v_dim)


def _normed_and_gated(x_THV: Tensor, z_TX: Tensor, rule: DeltaRule) -> Tensor:
    wide = torch.promote_types(x_THV.dtype, torch.float32)
    x = x_THV.to(wide)
    normed = (x * torch.rsqrt(x.pow(2).mean(2, keepdim=True) + rule.eps)).to(x_THV.dtype) * rule.norm_V
    return (normed.to(wide) * F.silu(z_TX.to(wide)).view(x.shape)).to(x_THV.dtype).flatten(1)
