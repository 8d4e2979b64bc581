"""Rows of ops over slot state on NVIDIA GPUs.

Knows: which kernel takes which kind of step: one token a row, windows, trees, prompts. Does not know: how one computes
(models/kernels/recurrent). ``ops`` has ``pdl`` and ``traits``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.inputs import StateRows, nodes_of_paths
from models.kernels.interface import DeltaRule
from models.kernels.recurrent import conv, delta_chunk, delta_step, delta_tree, gates, mamba2_tree, mamba2_triton
from models.kernels.recurrent.mamba2 import Mamba2Weights
from models.ops.rows_nvidia.dense import with_pdl
from models.ops.table import INVARIANT, Key, Row, Run

_MOST_STEPS = 16  # tokens of a row that go through the recurrence one by one; longer rows go in chunks
Scan = Callable[..., object]  # (ops, qkv, b, a, rule, state, rows, out, pdl)


class StateCall(NamedTuple):
    """``one_token``: every row has one, which updates its state. ``window``: a few tokens a row, some of which may
    update its state. ``supported``: sizes of Mamba-2."""

    one_token: bool
    window: bool
    tree: bool
    supported: bool = True


def _kind(tokens: Tensor, rows: StateRows, *supported: bool) -> StateCall:
    window = rows.frozen or rows.kept_B is not None
    one_token = delta_step.one_token_a_row(rows, len(tokens))
    return StateCall(one_token, window, rows.frozen and rows.tree is not None, *supported)


def _normed(scan: Scan) -> Callable[..., Run]:
    """gated_delta by ``scan``, which writes ``out``, then the gated norm."""

    def bind(ops: Any, call: StateCall | None = None) -> Run:
        pdl = ops.pdl

        def gated_delta(
            qkv_TC: Tensor, z_TV: Tensor, b_TH: Tensor, a_TH: Tensor, rule: DeltaRule, state: Tensor, rows: StateRows
        ) -> Tensor:
            z_TV, b_TH, a_TH = delta_step.aligned_gates(z_TV, b_TH, a_TH)
            out_TV = torch.empty(z_TV.shape, dtype=z_TV.dtype, device=z_TV.device)
            scan(ops, qkv_TC, b_TH, a_TH, rule, state, rows, out_TV, pdl)
            return out_TV if rows.replays else gates.gated_norm_(out_TV, z_TV, rule.norm_V, rule.eps, pdl)

        return gated_delta

    return bind


def _tree(ops: Any, *given: Any) -> None:
    delta_tree.delta_tree(*given)


def _window(ops: Any, qkv_TC: Tensor, *given: Any) -> None:
    delta_step.delta_steps(qkv_TC, *given, most=len(qkv_TC))


def _prompt(ops: Any, *given: Any) -> None:
    most = max(_MOST_STEPS, given[5].window)
    delta_step.delta_steps(*given, most=most)
    delta_chunk.delta_chunks(*given, most=most, shared_bytes=ops.traits.shared_bytes)


def _one_by_one(
    ops: Any, qkv_TC: Tensor, b_TH: Tensor, a_TH: Tensor, rule: DeltaRule, state: Tensor, rows: StateRows, *given: Any
) -> None:
    """However many tokens a row has: chunks would round by where a prompt was cut. A node of a tree is the last token
    of the path down to it."""
    rows, each = _by_paths(rows)
    delta_step.delta_steps(qkv_TC, b_TH, a_TH, rule, state, rows, *given, most=len(qkv_TC), each=each)


def _mamba_scan(ops: Any, call: StateCall) -> Run:
    return _behind_conv(ops, with_pdl(mamba2_tree.scan_tree if call.tree else mamba2_triton.scan)(ops))


def _mamba_one_by_one(ops: Any, call: StateCall) -> Run:
    pdl = ops.pdl

    def scan(projected_TZ: Tensor, xbc_TC: Tensor, weights: Mamba2Weights, state: Tensor, rows: StateRows) -> Tensor:
        rows, each = _by_paths(rows)
        return mamba2_triton.scan(projected_TZ, xbc_TC, weights, state, rows, pdl, one_by_one=0, each=each)

    return _behind_conv(ops, scan)


def _behind_conv(ops: Any, scan: Run) -> Run:
    def mamba2(
        projected_TZ: Tensor, weights: Mamba2Weights, window: Tensor, state: Tensor, rows: StateRows, places_T: Tensor
    ) -> Tensor:
        _, xbc_TC, _ = weights.split(projected_TZ)
        xbc_TC = ops.causal_conv(xbc_TC, weights.conv_CJ, weights.conv_bias_C, window, rows, places_T)
        out_TX: Tensor = scan(projected_TZ, xbc_TC, weights, state, rows)
        return out_TX

    return mamba2


def _by_paths(rows: StateRows) -> tuple[StateRows, int | None]:
    """Every node of trees as a row of N tokens, of which those on its path count, by their distance from the row's
    first one, and N; other rows as they are."""
    if rows.tree is None or not rows.frozen:
        return rows, None
    seen_BN = rows.tree.seen_BN
    count, nodes = seen_BN.shape
    path_BNN, length_BN = nodes_of_paths(seen_BN)
    node_N11 = torch.arange(nodes, device=seen_BN.device)[:, None]
    first_B11 = torch.arange(count, device=seen_BN.device)[:, None, None] * nodes
    path_BNN = first_B11 + path_BNN - (first_B11 + node_N11) * nodes
    return StateRows(
        rows.slots_B.repeat_interleave(nodes),
        frozen=True,
        kept_B=length_BN.reshape(-1),
        path_BW=path_BNN.reshape(count * nodes, nodes),
    ), nodes


def _unsupported(ops: Any, call: StateCall) -> str | None:
    return None if call.supported else "the kernels of Mamba-2 do not take states of this shape and dtype"


_SAME_BITS = frozenset((INVARIANT,))
ROWS = (
    Row("causal_conv", with_pdl(conv.causal_conv), _SAME_BITS),
    Row("gated_delta", _normed(_tree), refuses=lambda ops, call: None if call.tree else "no tree"),
    Row("gated_delta", _normed(_window), refuses=lambda ops, call: None if call.window else "no window"),
    Row("gated_delta", _normed(_prompt)),
    Row(
        "conv_gated_delta",
        with_pdl(delta_step.conv_delta_step),
        refuses=lambda ops, call: None if call.one_token else "several tokens a row",
    ),
    Row(
        "mamba2",
        with_pdl(mamba2_triton.step),
        refuses=lambda ops, call: _unsupported(ops, call) if call.one_token else "several tokens a row",
    ),
    Row("mamba2", _mamba_scan, refuses=_unsupported),
)
INVARIANT_ROWS = (
    Row("gated_delta", _normed(_one_by_one), _SAME_BITS),
    Row("mamba2", _mamba_one_by_one, _SAME_BITS, refuses=_unsupported),
)
KEYS = {
    "gated_delta": Key(lambda *given: _kind(given[0], given[-1])),
    "conv_gated_delta": Key(lambda *given: _kind(given[0], given[-2])),
    "mamba2": Key(lambda *given: _kind(given[0], given[-2], mamba2_triton.supports(given[1], given[3]))),
}
