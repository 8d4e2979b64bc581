"""Mamba-2 over draft trees in Triton: every node's result, state left as it is.

Knows: the recurrence of mamba2.py along the branches of a tree, in products of matrices. Does not know: what is kept of
a tree, which goes token by token along its path (mamba2_triton.py), or the convolution (conv.py).
Shape letters as in mamba2.py.

The chunked form of mamba2_triton.py with a mask: with a_i the sum of -e^A_log d from the root down to node i,

    y_i = sum over ancestors j and j = i of (C_i . B_j) e^(a_i - a_j) d_j x_j  + e^(a_i) C_i S + D x_i

A program has a row, a head and some of its channels. Rows of slot 0 do nothing.
``pdl``: see models/kernels/dependent_launch.py.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.inputs import StateRows
from models.kernels.recurrent.conv import silu
from models.kernels.recurrent.mamba2 import Mamba2Weights
from models.kernels.recurrent.mamba2_triton import gated_memory, normed, softplus
from models.kernels.recurrent.tree_paths import along_paths, seen_nodes, tree_tiles

_CHANNELS = 32  # of a head, a program


@triton.jit
def _mamba2_tree_kernel(
    projected_ptr,  # [T, Z]
    xbc_ptr,  # [T, C], convolved
    a_log_ptr, d_ptr, dt_bias_ptr,
    state_ptr,  # [S, H, P, M]
    slots_ptr, seen_ptr,
    out_ptr,  # [T, X]
    NODES: tl.constexpr, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PIECE: tl.constexpr,  # of M, at once
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    X: tl.constexpr = H * P
    C: tl.constexpr = X + 2 * G * M
    Z: tl.constexpr = X + C + H
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + row)
    i, dims = tl.arange(0, BLOCK_N), part * BLOCK_P + tl.arange(0, BLOCK_P)
    inside, own = i < NODES, dims < P
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if slot != 0:
        group = head // (H // G)
        token = row.to(tl.int64) * NODES + i
        xs = head * P + dims
        sees = seen_nodes(seen_ptr, row, NODES, BLOCK_N)
        scores = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
        y = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
        sizes = tl.zeros((BLOCK_N,), tl.float32)
        for first in range(0, M, PIECE):
            cols = first + tl.arange(0, PIECE)
            there = inside[:, None] & (cols < M)[None, :]
            b_at = xbc_ptr + token[:, None] * C + X + group * M + cols[None, :]
            b = tl.load(b_at, mask=there, other=0.0).to(tl.float32)
            c = tl.load(b_at + G * M, mask=there, other=0.0).to(tl.float32)
            held = state_ptr + slot * (H * P * M) + head * (P * M) + dims[None, :] * M + cols[:, None]
            state = tl.load(held, mask=(cols < M)[:, None] & own[None, :], other=0.0)
            sizes += tl.sum(tl.abs(b) + tl.abs(c), 1)
            scores += tl.dot(c, tl.trans(b), input_precision=PRECISION)
            y += tl.dot(c, state, input_precision=PRECISION)
        of_x = inside[:, None] & own[None, :]
        x = tl.load(xbc_ptr + token[:, None] * C + xs[None, :], mask=of_x, other=0.0).to(tl.float32)
        delta = tl.load(projected_ptr + token * Z + X + C + head, mask=inside, other=0.0).to(tl.float32)
        delta = softplus(delta + tl.load(dt_bias_ptr + head).to(tl.float32))
        sound = sizes + tl.sum(tl.abs(x), 1) + delta < float("inf")  # and no NaN
        lost = along_paths(sees, tl.where(sound, 0.0, 1.0)) > 0.0
        x, delta = tl.where(sound[:, None], x, 0.0), tl.where(sound, delta, 0.0)
        rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        summed = along_paths(sees, rate * delta)
        sees = sees & sound[None, :]
        fade = tl.exp(tl.where(sees, summed[:, None] - summed[None, :], 0.0))
        scores = tl.where(sees, scores * fade * delta[None, :], 0.0)
        y = tl.exp(summed)[:, None] * y + tl.dot(scores, x, input_precision=PRECISION)
        y += tl.load(d_ptr + head).to(tl.float32) * x
        y *= silu(tl.load(projected_ptr + token[:, None] * Z + xs[None, :], mask=of_x, other=0.0).to(tl.float32))
        y = tl.where(lost[:, None], float("nan"), y)
        tl.store(out_ptr + token[:, None] * X + xs[None, :], y.to(out_ptr.dtype.element_ty), mask=of_x)


def scan_tree(
    projected_TZ: Tensor, xbc_TC: Tensor, weights: Mamba2Weights, state_SHPM: Tensor, rows: StateRows, pdl: bool
) -> Tensor:
    """Ops.mamba2 after its convolution, whose result is ``xbc_TC``, for ``rows`` with a tree and ``frozen``.

    ValueError for others.
    """
    if rows.tree is None or not rows.frozen:
        raise ValueError("only trees whose rows' state is frozen are verified")
    count, nodes = rows.tree.seen_BN.shape
    heads, dim = weights.heads, weights.head_dim
    block, piece, precision, warps = tree_tiles(nodes, weights.state_size, projected_TZ.dtype)
    block_p = max(16, min(_CHANNELS, triton.next_power_of_2(dim)))
    gated_TX = gated_memory(projected_TZ, weights)
    _mamba2_tree_kernel[(count, heads, triton.cdiv(dim, block_p))](
        projected_TZ, xbc_TC, weights.a_log_H, weights.d_H, weights.dt_bias_H, state_SHPM, rows.slots_B,
        rows.tree.seen_BN, gated_TX,
        NODES=nodes, H=heads, P=dim, G=weights.groups, M=weights.state_size, BLOCK_N=block, BLOCK_P=block_p,
        PIECE=piece, PRECISION=precision, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return normed(gated_TX, weights, projected_TZ.dtype, pdl)
