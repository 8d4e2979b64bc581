"""Rows of ops over slot state in plain torch, and those that are compositions of others on every device.

Knows: which function computes what. Does not know: how (models/kernels/recurrent).
Shape letters as in models/ops/contract.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.inputs import StateRows
from models.kernels.interface import DeltaRule
from models.kernels.recurrent import reference
from models.kernels.recurrent.mamba2 import Mamba2Weights, gated_norm, scan
from models.ops.contract import Ops
from models.ops.table import Row, composed, plain


def conv_gated_delta(
    ops: Ops, projected_TX: Tensor, weight_CJ: Tensor, window_SJC: Tensor, rule: DeltaRule, state_SHVK: Tensor,
    rows: StateRows, positions_T: Tensor,
) -> Tensor:  # fmt: skip
    qkv_TC, z_TV, b_TH, a_TH = torch.split(projected_TX, list(rule.widths), 1)
    qkv_TC = ops.causal_conv(qkv_TC, weight_CJ, None, window_SJC, rows, positions_T)
    return ops.gated_delta(qkv_TC, z_TV, b_TH, a_TH, rule, state_SHVK, rows)


def mamba2(
    ops: Ops, projected_TZ: Tensor, weights: Mamba2Weights, window_SJC: Tensor, state_SHPM: Tensor, rows: StateRows,
    positions_T: Tensor,
) -> Tensor:  # fmt: skip
    z_TX, xbc_TC, dt_TH = weights.split(projected_TZ)
    xbc_TC = ops.causal_conv(xbc_TC, weights.conv_CJ, weights.conv_bias_C, window_SJC, rows, positions_T)
    return gated_norm(scan(xbc_TC, dt_TH, weights, state_SHPM, rows), z_TX, weights)


ROWS: tuple[Row, ...] = (
    plain("causal_conv", reference.causal_conv),
    plain("gated_delta", reference.gated_delta),
    composed("conv_gated_delta", conv_gated_delta),
    composed("mamba2", mamba2, invariant=False),
)
