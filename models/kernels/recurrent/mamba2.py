"""Mamba-2 (Dao & Gu 2024, "Transformers are SSMs") in plain torch: what CPUs run, and what the GPU kernels are tested
against.

Knows: the recurrence as it is defined, token after token, over state in a slot's row. Does not know: the projections
around it (models/layers/mamba2.py), or speed: it takes one step in Python for each token of the longest row.
Shape letters as in models/inputs.py, plus, of this rank: H heads, P channels of a head, X = H * P, G groups, N state
size, C = X + 2 * G * N channels of the convolution, W its taps, Z = X + C + H columns of the projection, S slots.

    z | xBC | dt = projected                                      X | C | H columns
    x | B | C    = silu(conv(xBC) + bias)                         causal, depthwise; X | G * N | G * N
    d            = softplus(dt + dt_bias)
    state        = exp(-exp(A_log) d) state + d x B^T             [P, N] of each head, in float32
    y            = state C + D x
    out          = rms_norm(y silu(z)) weight                     over each of ``norm_groups`` equal parts

Rows of the null slot read and write no state, and nobody's values reach another row: what is masked is chosen, never
multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.inputs import StateRows

CONV, SSM = "conv", "ssm"  # names of the banks: [S, C, W - 1], the latest inputs of the convolution; [S, H, P, N]


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """One rank's part of a Mamba-2 mixer between its two projections.

    ``conv_CW``, ``conv_bias_C``, ``norm_X`` have the dtype of activations, A_log, D and dt_bias are float32 (float64
    where activations are). ``norm_groups``: equal parts of the channels that are normed; 0 where the norm is left to
    the caller, who needs other ranks for it.
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    conv_CW: Tensor
    conv_bias_C: Tensor | None
    a_log_H: Tensor
    d_H: Tensor
    dt_bias_H: Tensor
    norm_X: Tensor
    eps: float
    norm_groups: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim


def mamba2(projected_TZ: Tensor, weights: Mamba2Weights, banks: Mapping[str, Tensor], rows: StateRows) -> Tensor:
    """See the Kernels protocol."""
    inner, states = weights.inner, weights.groups * weights.state_size
    z_TX, xbc_TC, dt_TH = projected_TZ.split((inner, weights.conv_CW.shape[0], weights.heads), dim=-1)
    xbc_TC = causal_conv(xbc_TC, weights.conv_CW, weights.conv_bias_C, banks[CONV], rows)
    x_TX, b_TX, c_TX = xbc_TC.split((inner, states, states), dim=-1)
    y_THP = scan(
        x_TX.unflatten(1, (weights.heads, weights.head_dim)),
        dt_TH,
        b_TX.unflatten(1, (weights.groups, weights.state_size)),
        c_TX.unflatten(1, (weights.groups, weights.state_size)),
        weights,
        banks[SSM],
        rows,
    )
    return gated_norm(y_THP.flatten(1), z_TX, weights)


def gated_norm(y_TX: Tensor, z_TX: Tensor, weights: Mamba2Weights) -> Tensor:
    """rms_norm(y silu(z)) weight over each of ``norm_groups`` parts, or y silu(z) where there are none, in z's dtype."""
    wide = torch.promote_types(z_TX.dtype, torch.float32)
    gated_TX = y_TX.to(wide) * F.silu(z_TX.to(wide))
    if not weights.norm_groups:
        return gated_TX.to(z_TX.dtype)
    parts_TGX = gated_TX.unflatten(1, (weights.norm_groups, -1))
    normed_TGX = parts_TGX * torch.rsqrt(parts_TGX.square().mean(-1, keepdim=True) + weights.eps)
    return normed_TGX.flatten(1).to(z_TX.dtype) * weights.norm_X


def scan(
    x_THP: Tensor, dt_TH: Tensor, b_TGN: Tensor, c_TGN: Tensor, weights: Mamba2Weights, bank_SHPN: Tensor, rows: StateRows
) -> Tensor:
    """y [T, H, P] in the bank's dtype; ``bank_SHPN`` takes in every row's tokens. Tokens of no row get zeros."""
    wide, heads = bank_SHPN.dtype, weights.heads // weights.groups
    x_THP = x_THP.to(wide)
    b_THN, c_THN = (part.to(wide).repeat_interleave(heads, 1, output_size=weights.heads) for part in (b_TGN, c_TGN))
    d_TH = F.softplus(dt_TH.to(wide) + weights.dt_bias_H)
    decay_TH = torch.exp(-torch.exp(weights.a_log_H) * d_TH)
    tokens = len(x_THP)
    y_THP = x_THP.new_zeros(tokens + 1, *x_THP.shape[1:])  # the last for rows that have ended
    live_B111 = (rows.slots_B != 0)[:, None, None, None]
    state_BHPN = bank_SHPN[rows.slots_B].where(live_B111, 0)
    starts_B, counts_B, longest = extents(rows, tokens)
    for step in range(longest):
        active_B = step < counts_B
        token_B = (starts_B + step).where(active_B, 0)
        d_BH11, decay_BH11 = d_TH[token_B][:, :, None, None], decay_TH[token_B][:, :, None, None]
        added_BHPN = d_BH11 * x_THP[token_B].unsqueeze(3) * b_THN[token_B].unsqueeze(2)
        next_BHPN = decay_BH11 * state_BHPN + added_BHPN
        y_BHP = (next_BHPN * c_THN[token_B].unsqueeze(2)).sum(3) + weights.d_H[:, None] * x_THP[token_B]
        y_THP.index_copy_(0, token_B.where(active_B, tokens), y_BHP)
        state_BHPN = next_BHPN.where(active_B[:, None, None, None], state_BHPN)
    bank_SHPN.index_copy_(0, rows.slots_B, state_BHPN.where(live_B111, bank_SHPN[rows.slots_B]))
    return y_THP[:tokens]


def causal_conv(
    x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, bank_SCK: Tensor, rows: StateRows
) -> Tensor:
    """silu(the sum over taps w of weight[:, w] x[t - W + 1 + w], plus bias), [T, C] in x's dtype.

    Inputs before a row's tokens are those of its slot, K = W - 1 of them, the oldest first; they are replaced by the
    latest of both. Tokens of no row get anything.
    """
    taps, tokens, wide = weight_CW.shape[1], len(x_TC), torch.promote_types(x_TC.dtype, torch.float32)
    starts_B, counts_B, _ = extents(rows, tokens)
    live_B11 = (rows.slots_B != 0)[:, None, None]
    window_BCK = bank_SCK[rows.slots_B].where(live_B11, 0)
    token_T = torch.arange(tokens, device=x_TC.device)
    row_T = torch.searchsorted(starts_B + counts_B, token_T, right=True).clamp(max=len(starts_B) - 1)
    offset_T = token_T - starts_B[row_T]
    out_TC = torch.zeros_like(x_TC, dtype=wide)
    for tap in range(taps):
        at_T = offset_T + tap  # in the window and the row's tokens, one behind the other
        before_TC = window_BCK[row_T, :, at_T.clamp(max=taps - 2)] if taps > 1 else x_TC
        here_TC = x_TC[(token_T - (taps - 1) + tap).clamp(min=0)]
        out_TC += torch.where((at_T < taps - 1)[:, None], before_TC, here_TC).to(wide) * weight_CW[:, tap].to(wide)
    if bias_C is not None:
        out_TC += bias_C.to(wide)
    at_BK = counts_B[:, None] + torch.arange(taps - 1, device=x_TC.device)
    old_BCK = window_BCK.gather(2, at_BK.clamp(max=taps - 2)[:, None].expand_as(window_BCK))
    new_BCK = x_TC[(starts_B[:, None] + at_BK - (taps - 1)).clamp(0, tokens - 1)].transpose(1, 2)
    latest_BCK = torch.where((at_BK < taps - 1)[:, None], old_BCK, new_BCK.to(window_BCK.dtype))
    bank_SCK.index_copy_(0, rows.slots_B, latest_BCK.where(live_B11, bank_SCK[rows.slots_B]))
    return F.silu(out_TC).to(x_TC.dtype)


def extents(rows: StateRows, tokens: int) -> tuple[Tensor, Tensor, int]:
    """Of each row: its first token and how many it has, int64; and the most that any has.

    Where rows differ, the last number is read on the host: for CPUs, whose graphs are host code, and for what a GPU
    launches eagerly.
    """
    if rows.ends_B is None:
        count = tokens // len(rows.slots_B)
        counts_B = torch.full_like(rows.slots_B, count)
        return torch.arange(len(rows.slots_B), device=counts_B.device) * count, counts_B, count
    starts_B = torch.cat((rows.ends_B.new_zeros(1), rows.ends_B[:-1]))
    counts_B = rows.ends_B - starts_B
    return starts_B, counts_B, int(counts_B.max()) if tokens else 0
