"""Mamba-2 (Dao & Gu 2024, "Transformers are SSMs") in plain torch: what CPUs run, and what the GPU kernels are tested
against.

Knows: the recurrence as it is defined, token after token, over state in a slot's row. Does not know: the projections
around it (models/layers/mamba2.py), the convolution (reference.py), or speed: it takes a step in Python for each token
of the longest row.
Shape letters as in models/inputs.py, plus, of this rank: H heads, P channels of a head, X = H * P, G groups, M state
size, C = X + 2 * G * M channels of the convolution, J its taps, Z = X + C + H columns of the projection, S slots.

    z | xBC | dt = projected                                      X | C | H columns
    x | B | C    = causal_conv(xBC)                               X | G * M | G * M columns
    d            = softplus(dt + dt_bias)
    state        = exp(-exp(A_log) d) state + d x B^T             [P, M] of each head, in float32
    y            = state C + D x
    out          = rms_norm(y silu(z)) weight                     over each of ``norm_groups`` equal parts

No value of one row reaches another: what is masked is chosen, never multiplied by zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.inputs import StateRows
from models.kernels.recurrent.ragged import NodeStates, token_rows


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """One rank's part of a Mamba-2 mixer between its two projections.

    conv_CJ, conv_bias_C and norm_X have the dtype of activations; a_log_H, d_H and dt_bias_H are float32 (float64 where
    activations are). ``norm_groups``: equal parts of the channels that are normed; 0 where the norm is left to the
    caller, who needs other ranks for it.
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    conv_CJ: Tensor
    conv_bias_C: Tensor | None
    a_log_H: Tensor
    d_H: Tensor
    dt_bias_H: Tensor
    norm_X: Tensor
    eps: float
    norm_groups: int

    @property
    def inner(self) -> int:
        """X."""
        return self.heads * self.head_dim

    def split(self, projected_TZ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views z_TX, xbc_TC, dt_TH of the projection's columns."""
        z_TX, xbc_TC, dt_TH = torch.split(projected_TZ, [self.inner, self.conv_CJ.shape[0], self.heads], -1)
        return z_TX, xbc_TC, dt_TH


def scan(xbc_TC: Tensor, dt_TH: Tensor, weights: Mamba2Weights, bank_SHPM: Tensor, rows: StateRows) -> Tensor:
    """y [T, X] in the bank's dtype, of convolved inputs; every row's tokens update ``bank_SHPM``.

    Where rows have different numbers of tokens, the most that any has is read on the host: this is for CPUs, whose
    graphs are host code, and for what a GPU launches eagerly.
    """
    wide, tokens, states = bank_SHPM.dtype, len(xbc_TC), weights.groups * weights.state_size
    x_TX, b_TX, c_TX = torch.split(xbc_TC.to(wide), [weights.inner, states, states], -1)
    x_THP = x_TX.view(tokens, weights.heads, weights.head_dim)
    b_THM, c_THM = (_of_heads(part_TX, weights) for part_TX in (b_TX, c_TX))
    d_TH = F.softplus(dt_TH.to(wide) + weights.dt_bias_H)
    decay_TH = torch.exp(-torch.exp(weights.a_log_H) * d_TH)
    y_THP = x_THP.new_zeros(tokens + 1, weights.heads, weights.head_dim)  # the last for rows that have ended
    where = token_rows(rows, tokens)
    live_B111 = (rows.slots_B != 0)[:, None, None, None]
    state_BHPM = bank_SHPM[rows.slots_B].where(live_B111, 0)
    longest = where.most if rows.ends_B is None or not tokens else int(where.lengths_B.max())
    tree = NodeStates(rows, state_BHPM) if rows.tree is not None and rows.frozen else None
    for step in range(longest):
        active_B, token_B = step < where.lengths_B, where.token_B(step)
        if tree is not None:
            state_BHPM = tree.before(step)
        d_BH11, decay_BH11 = d_TH[token_B][:, :, None, None], decay_TH[token_B][:, :, None, None]
        x_BHP = x_THP[token_B]
        next_BHPM = decay_BH11 * state_BHPM + d_BH11 * x_BHP.unsqueeze(3) * b_THM[token_B].unsqueeze(2)
        read_BHP = (next_BHPM * c_THM[token_B].unsqueeze(2)).sum(3)
        y_BHP = read_BHP + weights.d_H[:, None] * x_BHP
        y_THP.index_copy_(0, token_B.where(active_B, tokens), y_BHP)
        state_BHPM = next_BHPM.where(active_B[:, None, None, None], state_BHPM)
        if tree is not None:
            tree.set(step, state_BHPM)
    if not rows.frozen:
        kept_B111 = (rows.written_B != 0)[:, None, None, None]
        bank_SHPM.index_copy_(0, rows.written_B, state_BHPM.where(kept_B111, bank_SHPM[rows.written_B]))
    return y_THP[:tokens].flatten(1)


def gated_norm(y_TX: Tensor, z_TX: Tensor, weights: Mamba2Weights) -> Tensor:
    """rms_norm(y silu(z)) weight over each of ``norm_groups`` parts, or y silu(z) without any, in z's dtype."""
    wide = torch.promote_types(z_TX.dtype, torch.float32)
    gated_TX = y_TX.to(wide) * F.silu(z_TX.to(wide))
    if not weights.norm_groups:
        return gated_TX.to(z_TX.dtype)
    parts_TGX = gated_TX.view(len(gated_TX), weights.norm_groups, -1)
    normed_TX = (parts_TGX * torch.rsqrt(parts_TGX.square().mean(-1, keepdim=True) + weights.eps)).flatten(1)
    return normed_TX.to(z_TX.dtype) * weights.norm_X


def _of_heads(part_TX: Tensor, weights: Mamba2Weights) -> Tensor:
    """B or C of each head, [T, H, M], of those of the groups."""
    part_TGM = part_TX.view(len(part_TX), weights.groups, weights.state_size)
    return part_TGM.repeat_interleave(weights.heads // weights.groups, 1, output_size=weights.heads)
