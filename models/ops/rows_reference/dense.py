"""Rows of dense ops in plain torch, and of those that are compositions of others on every device.

Knows: the arithmetic, in float32 inside whatever the dtype. Does not know: optimisations; activations are never
``Quantised``, but rounded as if they were, before a product.
Shape letters as in models/ops/contract.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.kernels.sigmoid_routing import wide_linear
from models.ops.contract import Ops
from models.ops.table import INVARIANT, composed, plain
from parallel.comm.peer_buffers import PeerBuffers
from parallel.layers.weight import Weight

MOST = 448.0  # the largest float8_e4m3fn
LEAST = 1e-10  # of magnitudes: zeros have a scale, too


def simulated(x_MK: Tensor, group: int, cap: float | None = None) -> Tensor:
    """x [M, K] as its codes mean it, in float32: what ``quantise`` loses. The last group may be shorter."""
    inner, x_MK = x_MK.shape[-1], x_MK.float()
    cut_MK = x_MK if cap is None else x_MK.clamp(-cap, cap)
    groups = F.pad(cut_MK, (0, -inner % group)).reshape(*x_MK.shape[:-1], -1, group)
    most = groups.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    codes = (groups * (MOST / most)).to(torch.float8_e4m3fn).float()
    return (codes * (most * (1.0 / MOST))).flatten(-2)[..., :inner]


def rms_norm(x_TN: Tensor, weight_N: Tensor, eps: float, into: None = None) -> Tensor:
    return normed(x_TN, x_TN.float().pow(2).mean(-1, keepdim=True), weight_N, eps)


def normed(x_TN: Tensor, mean_T1: Tensor, weight_N: Tensor, eps: float) -> Tensor:
    """``mean_T1``: of the squares of each row, float32."""
    scaled_TN = (x_TN.float() * torch.rsqrt(mean_T1 + eps)).to(x_TN.dtype)
    return (scaled_TN * weight_N).to(x_TN.dtype)  # the weight of a zero-centred norm is wider than x


def silu_mul(gate_up_T2I: Tensor, *, gelu: bool = False, into: None = None) -> Tensor:
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    wide = gate.float()
    return (F.gelu(wide, approximate="tanh") if gelu else F.silu(wide)).to(gate.dtype) * up


def relu2(x_TI: Tensor) -> Tensor:
    return x_TI.relu().square()


def linear(ops: Ops, x_TN: Tensor, weight: Weight) -> Tensor:
    if weight.parts:
        return torch.cat([linear(ops, x_TN, part) for part in weight.parts], -1)
    return F.linear(as_multiplied(ops, x_TN, weight), weight.plain(x_TN.dtype), weight.bias)


def as_multiplied(ops: Ops, x_TN: Tensor, weight: Weight) -> Tensor:
    """x, quantised and back where ``weight`` is FP8 and activations are, too."""
    if weight.format.block is None or weight.format.code is not None or ops.fp8_activations != "always":
        return x_TN
    return simulated(x_TN, weight.format.block[1] or weight.inner, weight.format.activation_cap).to(x_TN.dtype)


def router_logits(x_TN: Tensor, weight: Weight) -> Tensor:
    return wide_linear(x_TN, weight.data)


def vocab_rows(weight: Weight, ids_T: Tensor, first: int, held: int) -> Tensor:
    local_T = ids_T - first
    foreign_T = (local_T < 0) | (local_T >= held)
    return F.embedding(local_T.masked_fill(foreign_T, 0), weight.data).masked_fill(foreign_T.unsqueeze(-1), 0.0)


def sigmoid_mul(x_TX: Tensor, gate_TX: Tensor, *, into: None = None) -> Tensor:
    return (x_TX * gate_TX.to(torch.promote_types(gate_TX.dtype, torch.float32)).sigmoid()).to(x_TX.dtype)


def gated_add(x_TN: Tensor, y_TN: Tensor, hidden_TN: Tensor, gate_N: Tensor) -> Tensor:
    wide = torch.promote_types(x_TN.dtype, torch.float32)
    scale_T1 = (hidden_TN.to(wide) * gate_N.to(wide)).sum(1, keepdim=True).sigmoid()
    return (x_TN + scale_T1 * y_TN).to(x_TN.dtype)


# ---- compositions ----


def add_rms_norm(
    ops: Ops, x_TN: Tensor, residual_TN: Tensor, weight_N: Tensor, eps: float, into: None = None
) -> tuple[Tensor, Tensor]:
    residual_TN = x_TN + residual_TN
    return ops.rms_norm(residual_TN, weight_N, eps), residual_TN


def joined_norms(ops: Ops, x_TN: Tensor, x_norm_N: Tensor, y_TN: Tensor, y_norm_N: Tensor, eps: float) -> Tensor:
    return torch.cat((ops.rms_norm(x_TN, x_norm_N, eps), ops.rms_norm(y_TN, y_norm_N, eps)), 1)


def linear_push(ops: Ops, buffers: PeerBuffers, x_TN: Tensor, weight: Weight) -> tuple[Tensor, bool]:
    return ops.linear(x_TN, weight), False


def add_norm_linear(
    ops: Ops, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, weight: Weight
) -> tuple[Tensor, Tensor]:
    hidden_TN, residual_TN = _add_norm(ops, x_TN, residual_TN, norm_N, eps)
    return ops.linear(hidden_TN, weight), residual_TN


def add_norm_logits(
    ops: Ops, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, weight: Weight, *, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    hidden_TN, residual_TN = _add_norm(ops, x_TN, residual_TN, norm_N, eps)
    return hidden_TN, (ops.router_logits if wide else ops.linear)(hidden_TN, weight), residual_TN


def gate_up(ops: Ops, x_TN: Tensor, weight: Weight, into: None = None) -> Tensor:
    return ops.silu_mul(ops.linear(x_TN, weight), gelu=weight.gelu)


def add_norm_gate_up(
    ops: Ops, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, weight: Weight, into: None = None
) -> tuple[Tensor, Tensor]:
    hidden_TN, residual_TN = _add_norm(ops, x_TN, residual_TN, norm_N, eps)
    return ops.gate_up(hidden_TN, weight), residual_TN


def gate_up_down(ops: Ops, x_TN: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    return ops.linear(ops.gate_up(x_TN, gate_up), down)


def _add_norm(ops: Ops, x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if residual_TN is None:
        return ops.rms_norm(x_TN, norm_N, eps), x_TN
    return ops.add_rms_norm(x_TN, residual_TN, norm_N, eps)


_COMPOSED = (
    add_rms_norm, joined_norms, linear_push, add_norm_linear, add_norm_logits, gate_up, add_norm_gate_up, gate_up_down,
)  # fmt: skip
ROWS = (
    plain("rms_norm", rms_norm),
    plain("silu_mul", silu_mul),
    plain("relu2", relu2, INVARIANT),
    composed("linear", linear, invariant=False),
    plain("router_logits", router_logits),
    plain("vocab_rows", vocab_rows, INVARIANT),
    plain("sigmoid_mul", sigmoid_mul, INVARIANT),
    plain("gated_add", gated_add),
    *(composed(run.__name__, run) for run in _COMPOSED),
)
