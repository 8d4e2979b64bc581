"""Rows of the deterministic mode in plain torch, for CPUs: every token is computed alone.

Knows: how the reference is called so that no result depends on who shares a step. Does not know: speed. A prompt takes
a pass over the weights for each token.

A library picks another order of additions for another number of rows, and a vectorised loop treats its last elements in
another way. Where each token has separate calls, of shapes that its own position decides, over memory of the same
alignment, its bits are a function of what it is and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.inputs import DecodeAttention, StateRows, nodes_of_paths
from models.kernels import sigmoid_routing
from models.kernels.interface import PLAIN, AttentionKind, DeltaRule
from models.kernels.recurrent import reference as recurrent
from models.kernels.recurrent.mamba2 import Mamba2Weights, gated_norm, scan
from models.kernels.recurrent.ragged import token_rows
from models.kernels.sigmoid_routing import SigmoidRouting
from models.kv_group import bits_of
from models.ops.contract import Ops
from models.ops.rows_reference import attention, dense, experts
from models.ops.table import INVARIANT, Row, composed, plain
from parallel.layers.weight import Weight


def one_by_one(call: Callable[[Tensor], Tensor], x: Tensor, out: Tensor | None = None) -> Tensor:
    """``call`` of each row [1, ...] of x, copied to separate memory, where every row has the same alignment."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    for row in range(x.shape[0]):
        out[row : row + 1] = call(x[row : row + 1].clone(memory_format=torch.contiguous_format))
    return out


def rms_norm(x_TN: Tensor, weight_N: Tensor, eps: float, into: None = None) -> Tensor:
    """Row by row only where numbers are added: all else is one rounded operation for each of them."""
    squares_TN = x_TN.float().pow(2)
    mean_T1 = one_by_one(partial(torch.mean, dim=-1, keepdim=True), squares_TN, squares_TN[..., :1].clone())
    return dense.normed(x_TN, mean_T1, weight_N, eps)


def silu_mul(gate_up_T2I: Tensor, *, gelu: bool = False, into: None = None) -> Tensor:
    out_TI = gate_up_T2I.new_empty(gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2)
    return one_by_one(partial(dense.silu_mul, gelu=gelu), gate_up_T2I, out_TI)


def linear(ops: Ops, x_TN: Tensor, weight: Weight) -> Tensor:
    return one_by_one(lambda x_1N: dense.linear(ops, x_1N, weight), x_TN, x_TN.new_empty(len(x_TN), weight.outputs))


def router_logits(x_TN: Tensor, weight: Weight) -> Tensor:
    out_TE = torch.empty(len(x_TN), weight.outputs, dtype=torch.promote_types(x_TN.dtype, torch.float32))
    return one_by_one(lambda x_1N: dense.router_logits(x_1N, weight), x_TN, out_TE)


def gated_add(x_TN: Tensor, y_TN: Tensor, hidden_TN: Tensor, gate_N: Tensor) -> Tensor:
    of_row = ((part[t : t + 1].clone() for part in (x_TN, y_TN, hidden_TN)) for t in range(len(x_TN)))
    found = [dense.gated_add(x, y, hidden, gate_N) for x, y, hidden in of_row]
    return torch.cat(found) if found else x_TN


def decode_attention(
    q_THD: Tensor, kv_layer: Tensor, inputs: DecodeAttention, scale: float, out_THD: Tensor | None = None, *,
    into: None = None, kind: AttentionKind = PLAIN,
) -> Tensor:  # fmt: skip
    rows, new = inputs.kv_lengths_B.shape[0], inputs.query_len
    if out_THD is None:
        out_THD = torch.zeros_like(q_THD if inputs.starts_B is not None else q_THD[: rows * new])
    if inputs.tree_BQ is not None:
        return _attend_along_paths(q_THD, kv_layer, inputs, scale, out_THD, kind)
    lengths = inputs.kv_lengths_B.tolist()
    starts = range(0, rows * new, new) if inputs.starts_B is None else inputs.starts_B.tolist()
    counts = [new] * rows if inputs.queries_B is None else inputs.queries_B.tolist()
    for pages_P, start, count, length in zip(inputs.page_table_BP, starts, counts, lengths, strict=True):
        if length or not inputs.skip_empty:
            here = slice(start, start + count)
            seen = range(length - count + 1, length + 1) if inputs.causal else [length] * count
            out_THD[here] = _each_query(q_THD[here], kv_layer, pages_P, seen, scale, kind)
    return out_THD


def _attend_along_paths(
    q_THD: Tensor, kv_layer: Tensor, inputs: DecodeAttention, scale: float, out_THD: Tensor, kind: AttentionKind
) -> Tensor:
    """Each node as a decode step whose keys are those of its path, in separate pages."""
    assert inputs.tree_BQ is not None
    new, size = inputs.query_len, kv_layer.shape[2]
    path_BNN, length_BN = (x.tolist() for x in nodes_of_paths(inputs.tree_BQ))
    for row, length in enumerate(inputs.kv_lengths_B.tolist()):
        if not length and inputs.skip_empty:
            continue
        root = length - new
        for node in range(new):
            path = path_BNN[row][node][: length_BN[row][node]]
            place_L = torch.tensor([*range(root), *(root + number for number in path)])
            page_L = inputs.page_table_BP[row].long()[place_L // size]
            held = bits_of(kv_layer)[:, page_L, place_L % size].unsqueeze(2)  # a key a page
            own_2PSKD = held.view(kv_layer.dtype)
            pages_P, token = torch.arange(len(place_L)), row * new + node
            found = _prefill_row(q_THD[token : token + 1], own_2PSKD, pages_P, len(place_L), scale, kind)
            out_THD[token : token + 1] = found
    return out_THD


def _prefill_row(
    q_QHD: Tensor, kv_layer: Tensor, pages_P: Tensor, length: int, scale: float, kind: AttentionKind
) -> Tensor:
    return _each_query(q_QHD, kv_layer, pages_P, range(length - q_QHD.shape[0] + 1, length + 1), scale, kind)


def _each_query(
    q_QHD: Tensor, kv_layer: Tensor, pages_P: Tensor, seen_Q: Sequence[int], scale: float, kind: AttentionKind
) -> Tensor:
    """Each query by itself over as many keys as it sees: shapes are those of its decode step."""
    out_QHD = torch.zeros_like(q_QHD)
    size, kv_heads = kv_layer.shape[2:4]
    sinks_KG1 = None if kind.sinks_H is None else kind.sinks_H.view(kv_heads, -1, 1)
    for query, seen in enumerate(seen_Q):
        if seen < 1:
            continue  # of a row that is not live
        first = 0 if kind.window is None else max(0, seen - kind.window)
        pages, skipped = pages_P[first // size : -(-seen // size)].long(), first // size * size
        held = bits_of(kv_layer)[:, pages].flatten(1, 2)[:, first - skipped : seen - skipped]
        keys_KLD, values_KLD = held.transpose(1, 2).contiguous().view(kv_layer.dtype).float()
        q_KGD = q_QHD[query].reshape(kv_heads, -1, q_QHD.shape[2]).clone().float()
        scores_KGL = attention.soft_capped((q_KGD @ keys_KLD.transpose(1, 2)) * scale, kind)
        out_KGD = attention.weighted_values(scores_KGL, values_KLD, sinks_KG1)
        out_QHD[query] = out_KGD.reshape(q_QHD.shape[1:]).to(q_QHD.dtype)
    return out_QHD


def route_top_k(
    logits_TE: Tensor, choices: int, renormalise: bool, local_E: Tensor, real_T: Tensor, *counted: Any
) -> tuple[Tensor, Tensor]:
    """``counted``: load, shared experts and scales."""
    found = [
        experts.route_top_k(logits_TE[t : t + 1].clone(), choices, renormalise, local_E, real_T[t : t + 1], *counted)
        for t in range(logits_TE.shape[0])
    ]
    if not found:
        return experts.route_top_k(logits_TE, choices, renormalise, local_E, real_T, *counted)
    weights, local = zip(*found, strict=True)
    return torch.cat(weights), torch.cat(local)


def route_sigmoid(
    logits_TE: Tensor, bias_E: Tensor, routing: SigmoidRouting, local_E: Tensor, real_T: Tensor,
    load_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scores token by token; of what follows only the sum of a token's own weights is rounded."""
    scored = [
        sigmoid_routing.route_sigmoid(logits_TE[t : t + 1].clone(), bias_E, routing, local_E, real_T[t : t + 1], load_E)
        for t in range(len(logits_TE))
    ]
    if not scored:
        return sigmoid_routing.route_sigmoid(logits_TE, bias_E, routing, local_E, real_T, load_E)
    return torch.cat([weights for weights, _ in scored]), torch.cat([local for _, local in scored])


def expert_mlp(
    ops: Ops, x_TN: Tensor, gate_up: Weight, down: Weight, weights_TC: Tensor, local_TC: Tensor, *, all_experts: int,
    limit: float | None = None,
) -> Tensor:  # fmt: skip
    """A token's experts in the order of its choices."""
    out_TN = torch.zeros(x_TN.shape, dtype=torch.promote_types(x_TN.dtype, torch.float32), device=x_TN.device)
    for token, chosen in enumerate(local_TC.tolist()):
        x_1N = x_TN[token : token + 1].clone()
        for choice, expert in enumerate(chosen):
            if expert >= 0:
                term_1N = experts.one_expert(ops, x_1N, gate_up.matrix(expert), down.matrix(expert), limit)
                out_TN[token] += term_1N[0] * weights_TC[token, choice]
    return out_TN.to(x_TN.dtype)


def causal_conv(
    x_TC: Tensor, weight_CJ: Tensor, bias_C: Tensor | None, window_SJC: Tensor, rows: StateRows, positions_T: Tensor
) -> Tensor:
    """A sum of products in one order, each rounded by itself, and silu token by token."""
    return recurrent.causal_conv(x_TC, weight_CJ, bias_C, window_SJC, rows, positions_T, partial(one_by_one, F.silu))


def gated_delta(
    qkv_TC: Tensor, z_TV: Tensor, b_TH: Tensor, a_TH: Tensor, rule: DeltaRule, state_SHVK: Tensor, rows: StateRows
) -> Tensor:
    """Token by token, each a step of one row."""

    def step(t: int, one: StateRows) -> Tensor:
        qkv, z, b, a = (x[t : t + 1].clone() for x in (qkv_TC, z_TV, b_TH, a_TH))
        return recurrent.gated_delta(qkv, z, b, a, rule, state_SHVK, one)

    out_TX = torch.zeros(z_TV.shape, dtype=z_TV.dtype)
    _token_by_token(step, rows, state_SHVK, out_TX)
    return out_TX


def mamba2(
    ops: Ops, projected_TZ: Tensor, weights: Mamba2Weights, window_SJC: Tensor, state_SHPM: Tensor, rows: StateRows,
    positions_T: Tensor,
) -> Tensor:  # fmt: skip
    """Token by token, each a step of one row."""
    z_TX, xbc_TC, dt_TH = weights.split(projected_TZ)
    xbc_TC = ops.causal_conv(xbc_TC, weights.conv_CJ, weights.conv_bias_C, window_SJC, rows, positions_T)

    def step(t: int, one: StateRows) -> Tensor:
        z, xbc, dt = (x[t : t + 1].clone() for x in (z_TX, xbc_TC, dt_TH))
        return gated_norm(scan(xbc, dt, weights, state_SHPM, one), z, weights)

    out_TX = torch.zeros(z_TX.shape, dtype=z_TX.dtype)
    _token_by_token(step, rows, state_SHPM, out_TX)
    return out_TX


def _token_by_token(step: Callable[[int, StateRows], Tensor], rows: StateRows, state: Tensor, out_TX: Tensor) -> None:
    """``out_TX`` [t] = ``step`` (t, the row alone) for each token, a row after the other; what ``rows`` leaves of
    ``state`` [S, ...] afterwards. A node of a tree begins from the state after its parent."""
    where = token_rows(rows, len(out_TX))
    tree = rows.tree.parents_BN.tolist() if rows.tree is not None and rows.frozen else None
    written = rows.written_B.tolist()
    tokens = [where.token_B(number).tolist() for number in range(int(where.lengths_B.max()))]
    for row, (slot, count) in enumerate(zip(where.slots_B.tolist(), where.lengths_B.tolist(), strict=True)):
        one = StateRows(torch.tensor([slot]))
        before = state[slot].clone()
        after: list[Tensor] = []  # each node of a tree
        for number in range(count):
            t = tokens[number][row]
            if tree is not None and number:
                state[slot] = after[tree[row][number]]
            out_TX[t : t + 1] = step(t, one)
            if tree is not None:
                after.append(state[slot].clone())
        if rows.frozen or (slot and not written[row]):
            state[slot] = before


_DENSE = rms_norm, silu_mul, router_logits, gated_add, causal_conv, gated_delta
ROWS: tuple[Row, ...] = (
    *(plain(run.__name__, run, INVARIANT) for run in (*_DENSE, decode_attention, route_top_k, route_sigmoid)),
    composed("linear", linear),
    composed("expert_mlp", expert_mlp),
    composed("mamba2", mamba2),
    # Norms are sums over a head; the rotation has no sum, and its products and differences are rounded exactly.
    plain("rope_and_cache", partial(attention.rope_and_cache, rms_norm), INVARIANT),
    plain("prefill_attention", partial(attention.prefill_attention, prefill_row=_prefill_row), INVARIANT),
)
