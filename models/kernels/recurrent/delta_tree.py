"""The gated delta rule over draft trees in Triton: every node's result, state left as it is.

Knows: the recurrence along the branches of a tree, in products of matrices. Does not know: what is kept of a tree,
which goes token by token along its path (delta_step.py); the convolution (conv.py), or the norm after it (gates.py).

No state after a node is ever made. With G_i the sum of log decays from the root down to node i, and sums over proper
ancestors j of it:

    d_i = beta_i (v_i - e^(G_i) S k_i - sum of e^(G_i - G_j) (k_i.k_j) d_j)         parents before children
    out_i = e^(G_i) S q_i + sum of e^(G_i - G_j) (q_i.k_j) d_j                      here also j = i

A program has a row, a head and a slice of V. It reads its part of the state once, whatever the shape of the tree.
Who is whose ancestor is a mask in registers. Where a chunk of a prompt multiplies by zero, a tree must not: a draft
whose values are not finite is the business of its descendants alone. So such a node's operands are zeroed first, and
its descendants' results are NaN.

decisions/0026 says what else there is, and what that would cost. ``pdl``: see models/kernels/dependent_launch.py.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.inputs import StateRows
from models.kernels.interface import DeltaRule
from models.kernels.recurrent.delta_step import L2_EPS, softplus
from models.kernels.recurrent.tree_paths import along_paths, seen_nodes, tree_tiles

_VALUES = 32  # of a head, a program


@triton.jit
def _tree_kernel(
    qkv_ptr, b_ptr, a_ptr, decay_log_ptr, decay_bias_ptr, state_ptr, slots_ptr, seen_ptr, out_ptr, qkv_stride,
    gate_stride, scale,
    NODES: tl.constexpr, HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr,  # of K, at once
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head, slice_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    k_heads: tl.constexpr = HV // GROUP
    i, vs = tl.arange(0, BLOCK_N), slice_v * BLOCK_V + tl.arange(0, BLOCK_V)
    inside, of_v = i < NODES, vs < V
    tokens = row.to(tl.int64) * NODES + i
    slot = tl.load(slots_ptr + row)
    decay_log = tl.load(decay_log_ptr + head).to(tl.float32)
    decay_bias = tl.load(decay_bias_ptr + head).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sees = seen_nodes(seen_ptr, row, NODES, BLOCK_N)

    # Of vectors as they come, which bfloat16 and TF32 hold exactly; their norms are known at the end.
    keys_keys = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    queries_keys = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    of_keys = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    of_queries = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    q_squares = tl.zeros((BLOCK_N,), tl.float32)
    k_squares = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, K, PIECE):
        ks = first + tl.arange(0, PIECE)
        there = inside[:, None] & (ks < K)[None, :]
        q_at = qkv_ptr + tokens[:, None] * qkv_stride + (head // GROUP) * K + ks[None, :]
        q = tl.load(q_at, mask=there, other=0.0).to(tl.float32)
        k = tl.load(q_at + k_heads * K, mask=there, other=0.0).to(tl.float32)
        held = state_ptr + (slot * HV + head) * (V * K) + vs[None, :] * K + ks[:, None]
        state = tl.load(held, mask=(ks < K)[:, None] & of_v[None, :], other=0.0)
        q_squares += tl.sum(q * q, 1)
        k_squares += tl.sum(k * k, 1)
        keys_keys += tl.dot(k, tl.trans(k), input_precision=PRECISION)
        queries_keys += tl.dot(q, tl.trans(k), input_precision=PRECISION)
        of_keys += tl.dot(k, state, input_precision=PRECISION)
        of_queries += tl.dot(q, state, input_precision=PRECISION)
    q_norm, k_norm = tl.rsqrt(q_squares + L2_EPS) * scale, tl.rsqrt(k_squares + L2_EPS)

    v_at = qkv_ptr + 2 * k_heads * K + head * V + tokens[:, None] * qkv_stride + vs[None, :]
    v = tl.load(v_at, mask=inside[:, None] & of_v[None, :], other=0.0).to(tl.float32)
    gate = tokens * gate_stride + head
    beta = tl.sigmoid(tl.load(b_ptr + gate, mask=inside, other=0.0).to(tl.float32))
    log = -tl.exp(decay_log) * softplus(tl.load(a_ptr + gate, mask=inside, other=0.0).to(tl.float32) + decay_bias)
    sound = k_squares + tl.sum(tl.abs(v), 1) + beta - log < float("inf")  # and no NaN
    lost = along_paths(sees, tl.where(sound, 0.0, 1.0)) > 0.0
    G = along_paths(sees, tl.where(sound, log, 0.0))
    sees = sees & sound[None, :]
    fade = tl.exp(tl.where(sees, G[:, None] - G[None, :], 0.0)) * k_norm[None, :]
    above = sees & sound[:, None] & (i[:, None] != i[None, :])
    A = tl.where(above, (beta * k_norm)[:, None] * keys_keys * fade, 0.0)
    d = beta[:, None] * (v - (tl.exp(G) * k_norm)[:, None] * of_keys)
    d = tl.where(sound[:, None], d, 0.0)
    for node in range(NODES - 1):
        of_node = tl.sum(tl.where(i[None, :] == node, A, 0.0), 1)  # its column: of its descendants
        settled = tl.sum(tl.where(i[:, None] == node, d, 0.0), 0)
        d -= of_node[:, None] * settled[None, :]
    scores = tl.where(sees, q_norm[:, None] * queries_keys * fade, 0.0)
    out = (tl.exp(G) * q_norm)[:, None] * of_queries + tl.dot(scores, d, input_precision=PRECISION)
    out = tl.where(lost[:, None], float("nan"), out)
    where = out_ptr + tokens[:, None] * (HV * V) + head * V + vs[None, :]
    tl.store(where, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & of_v[None, :])


def delta_tree(
    qkv_TC: Tensor, b_TH: Tensor, a_TH: Tensor, rule: DeltaRule, state_SHVK: Tensor, rows: StateRows, out_TV: Tensor,
    pdl: bool,
) -> Tensor:  # fmt: skip
    """S q of Ops.gated_delta for ``rows`` with a tree and ``frozen``, into ``out_TV``. ValueError for others."""
    if rows.tree is None or not rows.frozen:
        raise ValueError("only trees whose rows' state is frozen are verified")
    count, nodes = rows.tree.seen_BN.shape
    block, piece, precision, warps = tree_tiles(nodes, rule.k_dim, qkv_TC.dtype)
    block_v = max(16, min(_VALUES, triton.next_power_of_2(rule.v_dim)))
    _tree_kernel[(count, rule.v_heads, triton.cdiv(rule.v_dim, block_v))](
        qkv_TC, b_TH, a_TH, rule.decay_log_H, rule.decay_bias_H, state_SHVK, rows.slots_B, rows.tree.seen_BN, out_TV,
        qkv_TC.stride(0), a_TH.stride(0), rule.k_dim**-0.5,
        NODES=nodes, HV=rule.v_heads, GROUP=rule.v_heads // rule.k_heads, K=rule.k_dim, V=rule.v_dim, BLOCK_N=block,
        PIECE=piece, BLOCK_V=block_v, PRECISION=precision, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out_TV
