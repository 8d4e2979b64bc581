"""Rows of routers and experts in plain torch.

Knows: the arithmetic, in float32 inside whatever the dtype. Does not know: optimisations.
Shape letters as in models/ops/contract.py.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from models.kernels.sigmoid_routing import route_sigmoid
from models.ops.contract import Ops
from models.ops.rows_reference.dense import linear, relu2, silu_mul
from models.ops.table import Row, plain
from parallel.layers.weight import Weight


def route_top_k(
    logits_TE: Tensor, choices: int, renormalise: bool, local_E: Tensor, real_T: Tensor, load_E: Tensor | None = None,
    shared: int = 0, scale_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide_TE, count = logits_TE.to(_wide(logits_TE)), len(local_E) - shared
    scores_TE = wide_TE[:, :count].softmax(-1)
    ordered_TE, experts_TE = scores_TE.sort(stable=True, dim=-1, descending=True)
    weights_TC, experts_TC = ordered_TE[:, :choices], experts_TE[:, :choices]
    if renormalise:
        weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True)
    if scale_E is not None:
        weights_TC = weights_TC * scale_E[experts_TC]
    if load_E is not None:
        load_E.scatter_add_(0, experts_TC.flatten(), real_T.to(load_E.dtype).repeat_interleave(choices))
    if shared:
        everyone_TS = torch.arange(count, count + shared, device=logits_TE.device).expand(len(logits_TE), -1)
        experts_TC = torch.cat((experts_TC, everyone_TS), 1)
        weights_TC = torch.cat((weights_TC, wide_TE[:, count, None].sigmoid().expand(-1, shared)), 1)
    return weights_TC, torch.where(real_T[:, None], local_E[experts_TC], -1)


def expert_mlp(
    ops: Ops, x_TN: Tensor, gate_up: Weight, down: Weight, weights_TC: Tensor, local_TC: Tensor, *, all_experts: int,
    limit: float | None = None,
) -> Tensor:  # fmt: skip
    """Every expert computes every token, and unrouted terms are masked: shapes do not depend on the routing."""
    out_TN = torch.zeros(x_TN.shape, dtype=_wide(x_TN), device=x_TN.device)
    for g in range(down.data.shape[0]):
        chosen_TC = local_TC == g
        weight_T1 = weights_TC.where(chosen_TC, 0).sum(-1, keepdim=True)
        term_TN = one_expert(ops, x_TN, gate_up.matrix(g), down.matrix(g), limit) * weight_T1
        out_TN += term_TN.where(chosen_TC.any(-1, keepdim=True), 0)
    return out_TN.to(x_TN.dtype)


def one_expert(ops: Ops, x_TN: Tensor, gate_up: Weight, down: Weight, limit: float | None = None) -> Tensor:
    """[T, N], of all tokens."""
    up_TX = linear(ops, x_TN, gate_up)
    if limit is not None:
        return linear(ops, clamped_swiglu(up_TX, limit), down)
    inner_TI = silu_mul(up_TX, gelu=gate_up.gelu) if gate_up.outputs > down.inner else relu2(up_TX)
    return linear(ops, inner_TI, down)


def clamped_swiglu(gate_up_T2I: Tensor, limit: float) -> Tensor:
    """(up + 1) g sigmoid(1.702 g) with g = min(gate, limit) and up within +-limit (gpt-oss)."""
    gate, up = gate_up_T2I.to(_wide(gate_up_T2I)).chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * (1.702 * gate).sigmoid()).to(gate_up_T2I.dtype)


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of sums and scores: float32, or float64 where x is."""
    return torch.promote_types(x.dtype, torch.float32)


ROWS: tuple[Row, ...] = (
    plain("route_top_k", route_top_k),
    plain("route_sigmoid", route_sigmoid),
    Row("expert_mlp", lambda ops: partial(expert_mlp, ops), fallback="torch_experts"),
)
