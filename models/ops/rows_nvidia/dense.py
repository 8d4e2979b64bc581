"""Rows of dense ops on NVIDIA GPUs: norms, activations, vocabulary rows, matrix products.

Knows: how each kernel is called. Does not know: which product kernel is fastest (models/ops/tuned.py).
``ops`` has ``pdl`` (dependent launches), ``traits``, ``matmul`` (TunedProducts) or the workspaces of invariant
products: ``sums`` and ``counters``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.kernels import embedding
from models.kernels.matmul import codes, gemv, invariant, norm
from models.kernels.matmul.candidates import MOST_GEMV_ROWS
from models.kernels.recurrent import gates
from models.ops.table import INVARIANT, Key, Row, Run
from models.row_buckets import power_of_two_from
from parallel.comm.quantised import Quantised
from parallel.layers.weight import Weight

Bind = Callable[..., Run]
_ROUTER_CHUNK = 4096  # columns of a router's product at once


def _invariant(op: str, bind: Bind) -> Row:
    return Row(op, bind, frozenset((INVARIANT,)))


def _vocab_rows(ops: Any) -> Run:
    pdl = ops.pdl
    return lambda weight, ids_T, first, held: embedding.vocab_rows(weight.data, ids_T.contiguous(), first, held, pdl)


def _rms_norm(ops: Any) -> Run:
    pdl = ops.pdl
    return lambda x_TN, weight_N, eps, into=None: norm.rms_norm(x_TN.contiguous(), None, weight_N, eps, pdl, into)


def _add_rms_norm(ops: Any) -> Run:
    pdl = ops.pdl

    def add_rms_norm(
        x_TN: Tensor, residual_TN: Tensor, weight_N: Tensor, eps: float, into: Quantised | None = None
    ) -> tuple[Tensor, Tensor]:
        return norm.rms_norm(x_TN.contiguous(), residual_TN, weight_N, eps, pdl, into), residual_TN

    return add_rms_norm


def _joined_norms(ops: Any) -> Run:
    pdl = ops.pdl
    return lambda x_TN, x_norm_N, y_TN, y_norm_N, eps: norm.joined_norms(
        x_TN.contiguous(), x_norm_N, y_TN.contiguous(), y_norm_N, eps, pdl
    )


def with_pdl(kernel: Run) -> Bind:
    """Of a kernel that is called with the op's own arguments, and ``pdl``."""
    return lambda ops, call=None: partial(kernel, pdl=ops.pdl)


def _invariant_product(*, gate_up: bool) -> Bind:
    def bind(ops: Any) -> Run:
        sums, counters, shared_bytes, pdl = ops.sums, ops.counters, ops.traits.shared_bytes, ops.pdl

        def product(x_TN: Tensor, weight: Weight, into: None = None) -> Tensor:
            if weight.parts:
                found = torch.cat([product(x_TN, part) for part in weight.parts], -1)
                return norm.silu_mul(found, pdl, gelu=weight.gelu) if gate_up else found
            if weight.order is not None:  # of the columns of codes
                x_TN = x_TN.index_select(1, weight.order)
            given = x_TN, codes.decoded(weight, x_TN.dtype, pdl), weight.bias, sums, counters
            form = 2 if gate_up and weight.gelu else int(gate_up)
            return invariant.linear(*given, gate_up=form, shared_bytes=shared_bytes, pdl=pdl)

        return product

    return bind


def _wide_logits(ops: Any) -> Run:
    return lambda x_TN, weight: ops.linear(x_TN.float(), Weight.of(weight.data.float()))


def _few_logits(ops: Any, call: tuple[int, torch.dtype]) -> Run:
    """A program for each expert has all of its weights, or 4,096 of them, in registers before its predecessor ends."""
    pdl = ops.pdl

    def router_logits(x_TN: Tensor, weight: Weight) -> Tensor:
        return _logits(x_TN.contiguous(), weight, None, wide=True, pdl=pdl)[0]

    return router_logits


def _few_normed_logits(ops: Any, call: NormedLogits) -> Run:
    """The same, with the norm in each program."""
    pdl = ops.pdl

    def add_norm_logits(
        x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, weight: Weight, *, wide: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        x_TN, hidden_TN = x_TN.contiguous(), torch.empty(x_TN.shape, dtype=x_TN.dtype, device=x_TN.device)
        given = {"norm_K": norm_N, "eps": eps, "residual_MK": residual_TN, "hidden_MK": hidden_TN}
        logits_TE, residual_TN = _logits(x_TN, weight, weight.bias, wide=wide, pdl=pdl, **given)
        return hidden_TN, logits_TE, residual_TN

    return add_norm_logits


def _logits(x_TN: Tensor, weight: Weight, bias_E: Tensor | None, **given: Any) -> tuple[Tensor, Tensor]:
    chunk = min(_ROUTER_CHUNK, power_of_two_from(weight.inner))
    return gemv.gemv(x_TN, weight.data, bias_E, block_o=1, chunk=chunk, warps=8, **given)


class NormedLogits(NamedTuple):
    """``plain``: weights in the dtype of activations."""

    rows: int
    inner: int
    plain: bool


def _normed_logits(
    x_TN: Tensor, residual_TN: Tensor | None, norm_N: Tensor, eps: float, weight: Weight, *, wide: bool
) -> NormedLogits:
    return NormedLogits(min(len(x_TN), MOST_GEMV_ROWS + 1), weight.inner, weight.format.block is None)


def _many_normed(ops: Any, call: NormedLogits) -> str | None:
    if 0 < call.rows <= MOST_GEMV_ROWS and call.inner <= _ROUTER_CHUNK and call.plain:
        return None
    return f"more than {MOST_GEMV_ROWS} rows or {_ROUTER_CHUNK} columns, or weights that are codes"


ROWS = (
    _invariant("vocab_rows", _vocab_rows),
    _invariant("rms_norm", _rms_norm),
    _invariant("add_rms_norm", _add_rms_norm),
    Row("joined_norms", _joined_norms),
    _invariant("silu_mul", with_pdl(norm.silu_mul)),
    _invariant("relu2", with_pdl(norm.relu2)),
    _invariant("sigmoid_mul", with_pdl(gates.sigmoid_mul)),
    _invariant("gated_add", with_pdl(gates.gated_add)),
    *(
        Row(op, lambda ops, op=op: getattr(ops.matmul, op))
        for op in (
            *("linear", "linear_push", "add_norm_linear", "gate_up", "add_norm_gate_up", "gate_up_down"),
            "quantised_for",
        )
    ),
    Row("add_norm_logits", _few_normed_logits, refuses=_many_normed),
    Row(
        "router_logits",
        _few_logits,
        refuses=lambda ops, call: None if call[0] <= MOST_GEMV_ROWS else f"more than {MOST_GEMV_ROWS} rows",
    ),
    Row(
        "router_logits",
        lambda ops, call: lambda x_TN, weight: torch.mm(x_TN, weight.data.t(), out_dtype=torch.float32),
        refuses=lambda ops, call: "float32 already" if call[1] == torch.float32 else None,
    ),
)
# Of the deterministic mode, before the others.
INVARIANT_ROWS = (
    _invariant("linear", _invariant_product(gate_up=False)),
    _invariant("gate_up", _invariant_product(gate_up=True)),
    _invariant("router_logits", _wide_logits),
)
KEYS = {
    "router_logits": Key(lambda x_TN, weight: (min(len(x_TN), MOST_GEMV_ROWS + 1), x_TN.dtype)),
    "add_norm_logits": Key(_normed_logits),
}
