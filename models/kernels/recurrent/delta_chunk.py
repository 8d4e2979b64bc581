"""The gated delta rule of long rows in Triton, 64 tokens at a time, 32 in float32 (Yang et al. 2024; 2025).

Knows: the chunked form, and how a program finds its chunk from the rows' ends on the device, so that launches can be
captured: grids follow from the number of tokens and rows of a step, never from lengths. Does not know: short rows
(delta_step.py), the convolution, or the norm behind (gates.py).

With G_i the sum of log decays up to token i of a chunk, and T = (1 + strictly_lower(beta_i k_i.k_j e^(G_i - G_j)))^-1:

    prepare   a chunk and head a program    u = T (beta v),  w = T (beta e^G k)
    scan      a row, head and slice of V    d = u - w S^T;  out = e^G q S^T + lower(q_i.k_j e^(G_i - G_j)) d;
              a program, chunk by chunk     S <- e^(G_last) S + d^T (e^(G_last - G) k)

``pdl``: see models/kernels/dependent_launch.py.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.inputs import StateRows
from models.kernels.interface import DeltaRule
from models.kernels.recurrent.conv import row_bounds
from models.kernels.recurrent.delta_step import L2_EPS, softplus

_CHUNK, _CHUNK_FLOAT32 = 64, 32  # wider operands would not leave products of 64 tokens enough registers
_PIECE = tl.constexpr(16)  # tokens whose triangle is inverted row by row


@triton.jit
def _normed_rows(base_ptr, tokens, inside, stride, dims, of_dim):
    """Rows of a head [CHUNK, BLOCK], l2-normed in float32; zeros where not ``inside``."""
    x = tl.load(
        base_ptr + tokens.to(tl.int64)[:, None] * stride + dims[None, :],
        mask=inside[:, None] & of_dim[None, :],
        other=0.0,
    )
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + L2_EPS)[:, None]


@triton.jit
def _decays(a_ptr, tokens, inside, stride, decay_log, decay_bias):
    """G: the running sum of log decays over a chunk [CHUNK]; constant behind the last token."""
    a = tl.load(a_ptr + tokens.to(tl.int64) * stride, mask=inside, other=0.0).to(tl.float32)
    log = -tl.exp(decay_log) * softplus(a + decay_bias)
    return tl.cumsum(tl.where(inside, log, 0.0), 0)


@triton.jit(do_not_specialize=["rows", "most"])
def _prepare_kernel(
    qkv_ptr,
    b_ptr,
    a_ptr,
    decay_log_ptr,
    decay_bias_ptr,
    ends_ptr,
    triangle_ptr,
    u_ptr,
    w_ptr,
    qkv_stride,
    gate_stride,
    most,
    rows,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    EACH: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    number, head = tl.program_id(0), tl.program_id(1)
    k_heads: tl.constexpr = HV // GROUP
    ids = tl.arange(0, BLOCK_B)
    if RAGGED:
        ends = tl.load(ends_ptr + ids, mask=ids < rows, other=0).to(tl.int32)
        starts = tl.load(ends_ptr + ids - 1, mask=(ids > 0) & (ids < rows), other=0).to(tl.int32)
    else:
        starts = tl.where(ids < rows, ids * EACH, 0)
        ends = tl.where(ids < rows, starts + EACH, 0)
    lengths = ends - starts
    chunks = tl.where(lengths > most, (lengths + C - 1) // C, 0)
    behind = tl.cumsum(chunks, 0)
    here = (behind > number) & (behind - chunks <= number)
    start = tl.sum(tl.where(here, starts + (number - behind + chunks) * C, 0), 0)
    end = tl.sum(tl.where(here, ends, 0), 0)
    decay_log = tl.load(decay_log_ptr + head).to(tl.float32)
    decay_bias = tl.load(decay_bias_ptr + head).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if end > start:
        i = tl.arange(0, C)
        tokens = start + i
        inside = tokens < end
        ks, vs = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
        operand = qkv_ptr.dtype.element_ty
        k = _normed_rows(qkv_ptr + (k_heads + head // GROUP) * K, tokens, inside, qkv_stride, ks, ks < K)
        gate = tokens.to(tl.int64) * gate_stride + head
        beta = tl.sigmoid(tl.load(b_ptr + gate, mask=inside, other=0.0).to(tl.float32))
        G = _decays(a_ptr + head, tokens, inside, gate_stride, decay_log, decay_bias)
        rounded = k.to(operand)
        products = tl.dot(rounded, tl.trans(rounded), input_precision=PRECISION)
        lower = (i[:, None] > i[None, :]) & inside[:, None]
        decay = tl.exp(tl.where(lower, G[:, None] - G[None, :], 0.0))
        A = tl.where(lower, beta[:, None] * products * decay, 0.0)

        # (1 + A)^-1: of the pieces on the diagonal row by row, all at once; then of the whole, for with D of these and
        # M = D (A - its diagonal pieces) it is (1 + M)^-1 D, where M^4 = 0.
        scratch = triangle_ptr + (tokens.to(tl.int64) * HV + head) * C
        tl.store(scratch[:, None] + i[None, :], A, mask=inside[:, None])
        tl.debug_barrier()
        piece, r = tl.arange(0, C // _PIECE), tl.arange(0, _PIECE)
        at = start + piece[:, None] * _PIECE + r[None, :]
        diagonal = triangle_ptr + (at.to(tl.int64) * HV + head)[:, :, None] * C
        diagonal = diagonal + piece[:, None, None] * _PIECE + r[None, None, :]
        known = (at < end)[:, :, None]
        P = tl.load(diagonal, mask=known, other=0.0)
        D = -P
        for step in tl.static_range(1, 16):
            picked = (r == step)[None, :, None]
            coefficients = tl.sum(tl.where(picked, P, 0.0), 1)
            update = -coefficients - tl.sum(coefficients[:, :, None] * D, 1)
            D = tl.where(picked, update[:, None, :], D)
        tl.debug_barrier()
        tl.store(diagonal, D, mask=known)
        tl.debug_barrier()
        same = (i[:, None] // _PIECE) == (i[None, :] // _PIECE)
        inverse = tl.load(scratch[:, None] + i[None, :], mask=same & inside[:, None], other=0.0)
        one = (i[:, None] == i[None, :]).to(tl.float32)
        inverse = inverse + one
        M = tl.dot(inverse, tl.where(same, 0.0, A), input_precision="tf32x3")
        M2 = tl.dot(M, M, input_precision="tf32x3")
        T = tl.dot(one - M, one + M2, input_precision="tf32x3")
        T = tl.dot(T, inverse, input_precision="tf32x3").to(operand)

        # Keys once more: held until here, they would not leave the products above enough registers.
        k = _normed_rows(qkv_ptr + (k_heads + head // GROUP) * K, tokens, inside, qkv_stride, ks, ks < K)
        v_at = 2 * k_heads * K + head * V + vs
        there_v = inside[:, None] & (vs < V)[None, :]
        v = tl.load(qkv_ptr + tokens.to(tl.int64)[:, None] * qkv_stride + v_at[None, :], mask=there_v, other=0.0)
        u = tl.dot(T, (v.to(tl.float32) * beta[:, None]).to(operand), input_precision=PRECISION)
        w = tl.dot(T, (k * (beta * tl.exp(G))[:, None]).to(operand), input_precision=PRECISION)
        at_head = tokens.to(tl.int64) * HV + head
        tl.store(u_ptr + at_head[:, None] * V + vs[None, :], u.to(operand), mask=there_v)
        tl.store(w_ptr + at_head[:, None] * K + ks[None, :], w.to(operand), mask=inside[:, None] & (ks < K)[None, :])


@triton.jit(do_not_specialize=["rows", "most"])
def _scan_kernel(
    qkv_ptr,
    a_ptr,
    decay_log_ptr,
    decay_bias_ptr,
    state_ptr,
    slots_ptr,
    ends_ptr,
    u_ptr,
    w_ptr,
    out_ptr,
    qkv_stride,
    gate_stride,
    scale,
    most,
    rows,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    EACH: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    number, head, slice_v = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    ids = tl.arange(0, BLOCK_B)
    if RAGGED:
        ends = tl.load(ends_ptr + ids, mask=ids < rows, other=0).to(tl.int32)
        starts = tl.load(ends_ptr + ids - 1, mask=(ids > 0) & (ids < rows), other=0).to(tl.int32)
        long = ((ends - starts) > most) & (ids < rows)
    else:
        long = (ids < rows) & (most < EACH)
    behind = tl.cumsum(long.to(tl.int32), 0)
    here = long & (behind == number + 1)
    row = tl.sum(tl.where(here, ids, 0), 0)
    some = tl.sum(here.to(tl.int32), 0) > 0
    decay_log = tl.load(decay_log_ptr + head).to(tl.float32)
    decay_bias = tl.load(decay_bias_ptr + head).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if some:
        start, end = row_bounds(ends_ptr, ends_ptr, row, EACH, RAGGED, False)
        i, ks = tl.arange(0, C), tl.arange(0, BLOCK_K)
        vs = slice_v * BLOCK_V + tl.arange(0, BLOCK_V)
        of_k, of_v = ks < K, vs < V
        operand = qkv_ptr.dtype.element_ty
        slot = tl.load(slots_ptr + row)
        held = state_ptr + (slot * HV + head) * (V * K) + vs[:, None] * K + ks[None, :]
        S = tl.load(held, mask=of_v[:, None] & of_k[None, :], other=0.0)
        k_heads: tl.constexpr = HV // GROUP
        for first in range(start, end, C):
            tokens = first + i
            inside = tokens < end
            q = _normed_rows(qkv_ptr + (head // GROUP) * K, tokens, inside, qkv_stride, ks, of_k) * scale
            k = _normed_rows(qkv_ptr + (k_heads + head // GROUP) * K, tokens, inside, qkv_stride, ks, of_k)
            G = _decays(a_ptr + head, tokens, inside, gate_stride, decay_log, decay_bias)
            last = tl.min(G, 0)  # G falls, and stays behind the last token
            at_head = tokens.to(tl.int64) * HV + head
            there_k, there_v = inside[:, None] & of_k[None, :], inside[:, None] & of_v[None, :]
            w = tl.load(w_ptr + at_head[:, None] * K + ks[None, :], mask=there_k, other=0.0)
            u = tl.load(u_ptr + at_head[:, None] * V + vs[None, :], mask=there_v, other=0.0).to(tl.float32)
            rounded = tl.trans(S.to(operand))
            d = u - tl.dot(w, rounded, input_precision=PRECISION)
            d_rounded = d.to(operand)
            out = tl.dot((q * tl.exp(G)[:, None]).to(operand), rounded, input_precision=PRECISION)
            scores = tl.dot(q.to(operand), tl.trans(k.to(operand)), input_precision=PRECISION)
            lower = i[:, None] >= i[None, :]
            scores = tl.where(lower, scores * tl.exp(tl.where(lower, G[:, None] - G[None, :], 0.0)), 0.0)
            out += tl.dot(scores.to(operand), d_rounded, input_precision=PRECISION)
            tl.store(out_ptr + at_head[:, None] * V + vs[None, :], out.to(out_ptr.dtype.element_ty), mask=there_v)
            carried = (k * tl.exp(last - G)[:, None]).to(operand)
            S = S * tl.exp(last) + tl.dot(tl.trans(d_rounded), carried, input_precision=PRECISION)
        tl.store(held, S, mask=of_v[:, None] & of_k[None, :])


def none_is_long(tokens: int, rows: StateRows, most: int) -> bool:
    """Whether no row of a step of ``tokens`` tokens can have more than ``most``, as far as the host knows."""
    longest = tokens if rows.ends_B is not None else tokens // len(rows.slots_B)
    return longest <= most


def delta_chunks(
    qkv_TC: Tensor,
    b_TH: Tensor,
    a_TH: Tensor,
    rule: DeltaRule,
    state_SHVK: Tensor,
    rows: StateRows,
    out_TV: Tensor,
    pdl: bool,
    *,
    most: int,
) -> Tensor:
    """S q of Kernels.gated_delta for rows of more than ``most`` tokens, into ``out_TV``; other rows are left alone.

    None of these is undecided (``StateRows.writes_B``).
    """
    tokens, count, device = len(qkv_TC), len(rows.slots_B), qkv_TC.device
    ragged = rows.ends_B is not None
    each = 1 if ragged else tokens // count
    ends_B = rows.ends_B if rows.ends_B is not None else rows.slots_B
    long_rows = min(count, tokens // (most + 1))
    if none_is_long(tokens, rows, most):
        return out_TV
    heads, dtype = rule.v_heads, qkv_TC.dtype
    chunk = _CHUNK_FLOAT32 if dtype == torch.float32 else _CHUNK
    triangles = torch.empty(tokens, heads, chunk, dtype=torch.float32, device=device)
    u = torch.empty(tokens, heads, rule.v_dim, dtype=dtype, device=device)
    w = torch.empty(tokens, heads, rule.k_dim, dtype=dtype, device=device)
    block_k, block_v = (max(16, triton.next_power_of_2(dim)) for dim in (rule.k_dim, rule.v_dim))
    precision = "ieee" if dtype == torch.float32 else "tf32"
    shape = {
        "HV": heads,
        "GROUP": heads // rule.k_heads,
        "K": rule.k_dim,
        "V": rule.v_dim,
        "BLOCK_K": block_k,
        "C": chunk,
        "EACH": each,
        "RAGGED": ragged,
        "BLOCK_B": triton.next_power_of_2(count),
        "PRECISION": precision,
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    chunks = tokens // chunk + long_rows
    _prepare_kernel[(chunks, heads)](
        qkv_TC,
        b_TH,
        a_TH,
        rule.decay_log_H,
        rule.decay_bias_H,
        ends_B,
        triangles,
        u,
        w,
        qkv_TC.stride(0),
        a_TH.stride(0),
        most,
        count,
        BLOCK_V=block_v,
        num_warps=8,
        num_stages=1,
        **shape,
    )
    block_v = min(block_v, 32)
    _scan_kernel[(triton.cdiv(rule.v_dim, block_v), heads, long_rows)](
        qkv_TC,
        a_TH,
        rule.decay_log_H,
        rule.decay_bias_H,
        state_SHVK,
        rows.slots_B,
        ends_B,
        u,
        w,
        out_TV,
        qkv_TC.stride(0),
        a_TH.stride(0),
        rule.k_dim**-0.5,
        most,
        count,
        BLOCK_V=block_v,
        num_warps=8,
        num_stages=1,
        **shape,
    )
    return out_TV
