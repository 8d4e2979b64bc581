"""The gated delta rule of long rows in Triton, 64 tokens at a time, 32 in float32 (Yang et al. 2024; 2025).

Knows: the chunked form, and how a program finds its chunk from the rows' ends on the device, so that launches can be
captured: grids follow from the number of tokens and rows of a step, never from lengths. Does not know: short rows
(delta_step.py), the convolution, or the norm after it (gates.py).

With G_i the sum of log decays up to token i of a chunk, q and k of norm 1:

    prepare   a chunk and head    T = (1 + strictly_lower(k_i.k_j e^(G_i - G_j) beta_j))^-1
              a program           P = lower(q_i.k_j e^(G_i - G_j) beta_j)
    scan      a row, head and     d = T (v - e^G k S^T);  out = e^G q S^T + P d
              slice of V          S <- e^(G_last) S + d^T (e^(G_last - G) beta k)
              a program, chunk by chunk

Only what depends on S is left to the scan, and its loads run ahead of it. q and k come into its products as they are:
their norms are in T and P, and in the factors e^G.. of a token. So is beta, which leaves T's diagonal 1: rounded, it
would err alike in all tokens that are alike. The scan computes d and out transposed, [V, tokens]. So what follows from
S goes from one product into the next in registers, where wgmma takes its left operand from, and shared memory has only
what was loaded.

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
from models.kernels.traits import H200

_CHUNK, _CHUNK_FLOAT32 = 64, 32  # wider operands would not leave products of 64 tokens enough registers
_PIECE = tl.constexpr(16)  # tokens whose triangle is inverted row by row

# Launch parameters of 16 bits an element, and of float32, whose products have no tensor cores.
PREPARE_WARPS, PREPARE_WARPS_FLOAT32 = 4, 8
SCAN_V, SCAN_V_FLOAT32 = 64, 16  # values of a program: 64 are the rows of a product of one group of four warps
SCAN_WARPS, SCAN_WARPS_FLOAT32 = 4, 8
SCAN_STAGES, SCAN_STAGES_FLOAT32 = 3, 1  # chunks in shared memory, at 56 KiB each where K and V are 128
_SHARED = 200 << 10  # bytes, of all of these


@triton.jit
def _rows(base_ptr, tokens, inside, stride, dims, of_dim):
    """Rows of a head [CHUNK, BLOCK] as they are; zeros where not ``inside``."""
    at = base_ptr + tokens.to(tl.int64)[:, None] * stride + dims[None, :]
    return tl.load(at, mask=inside[:, None] & of_dim[None, :], other=0.0)


@triton.jit
def _inverse_norms(x):
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + L2_EPS)


@triton.jit
def _product(x, y, WIDE: tl.constexpr):
    """x y of float32 within about 2^-21; where not ``WIDE`` as sums of two numbers of float16: no entry is large."""
    if WIDE:
        return tl.dot(x, y, input_precision="tf32x3")
    x_high, y_high = x.to(tl.float16), y.to(tl.float16)
    x_low, y_low = (x - x_high.to(tl.float32)).to(tl.float16), (y - y_high.to(tl.float32)).to(tl.float16)
    return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))


@triton.jit(do_not_specialize=["rows", "most"])
def _prepare_kernel(
    qkv_ptr, b_ptr, a_ptr, decay_log_ptr, decay_bias_ptr, ends_ptr,
    pairs_ptr,  # [tokens, HV, P of C | T of C]
    pieces_ptr,  # pairs as float32
    factors_ptr,  # [tokens, HV, e^G of k S^T, negative | of q S^T | e^(G_last - G) beta of k | e^G_last]
    qkv_stride, gate_stride, scale, most, rows,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, C: tl.constexpr, EACH: tl.constexpr,
    RAGGED: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
        i, ks = tl.arange(0, C), tl.arange(0, BLOCK_K)
        tokens = start + i
        inside = tokens < end
        operand = qkv_ptr.dtype.element_ty
        gate = tokens.to(tl.int64) * gate_stride + head
        a = tl.load(a_ptr + gate, mask=inside, other=0.0).to(tl.float32)
        beta = tl.sigmoid(tl.load(b_ptr + gate, mask=inside, other=0.0).to(tl.float32))
        G = tl.cumsum(tl.where(inside, -tl.exp(decay_log) * softplus(a + decay_bias), 0.0), 0)
        last = tl.min(G, 0)  # G falls, and stays after the last token
        q = _rows(qkv_ptr + (head // GROUP) * K, tokens, inside, qkv_stride, ks, ks < K)
        k = _rows(qkv_ptr + (k_heads + head // GROUP) * K, tokens, inside, qkv_stride, ks, ks < K)
        on_q, on_k = _inverse_norms(q) * scale, _inverse_norms(k)
        at_head = tokens.to(tl.int64) * HV + head
        factors = factors_ptr + at_head * 4
        of_key = on_k * beta
        tl.store(factors, -tl.exp(G) * on_k, mask=inside)
        tl.store(factors + 1, tl.exp(G) * on_q, mask=inside)
        tl.store(factors + 2, tl.exp(last - G) * of_key, mask=inside)
        tl.store(factors + 3, tl.exp(last + tl.zeros_like(G)), mask=inside)

        lower = i[:, None] >= i[None, :]
        decay = tl.where(lower, tl.exp(tl.where(lower, G[:, None] - G[None, :], 0.0)) * of_key[None, :], 0.0)
        turned = tl.trans(k)
        pairs = pairs_ptr + at_head[:, None] * (2 * C) + i[None, :]
        scores = tl.dot(q, turned, input_precision=PRECISION) * decay * on_q[:, None]
        tl.store(pairs, scores.to(operand), mask=inside[:, None])
        A = tl.dot(k, turned, input_precision=PRECISION) * decay * on_k[:, None]
        A = tl.where(i[:, None] > i[None, :], A, 0.0)

        # (1 + A)^-1: of the pieces on the diagonal row by row, all at once; then of the whole, for with D of these and
        # M = D (A - its diagonal pieces) it is (1 + M)^-1 D = (1 + M^2) (1 - M) D, where M^4 = 0. The pieces go through
        # memory, where T will be: a thread has all rows of a column.
        width: tl.constexpr = 2 * C * operand.primitive_bitwidth // 32
        piece = i // _PIECE
        same = piece[:, None] == piece[None, :]
        own = pieces_ptr + at_head[:, None] * width + (width // 2 + i % _PIECE)[None, :]
        tl.store(own, A, mask=same & inside[:, None])
        tl.debug_barrier()
        heads, r = start + tl.arange(0, C // _PIECE) * _PIECE, tl.arange(0, _PIECE)
        column: tl.constexpr = width // 2
        inverted = ()
        for row in tl.static_range(16):
            # Rows after the last token are garbage, of which nothing is kept.
            line = pieces_ptr + (tl.minimum(heads + row, end - 1).to(tl.int64) * HV + head) * width + column
            found = -tl.load(line[:, None] + r[None, :])
            for before in tl.static_range(row):
                found -= tl.load(line + before)[:, None] * inverted[before]
            inverted += (found,)  # type: ignore[assignment]
        tl.debug_barrier()
        for row in tl.static_range(16):
            line = pieces_ptr + ((heads + row).to(tl.int64) * HV + head) * width + column
            tl.store(line[:, None] + r[None, :], inverted[row], mask=(heads + row < end)[:, None])
        tl.debug_barrier()
        D = tl.load(own, mask=same & inside[:, None], other=0.0)
        D = tl.where(i[:, None] == i[None, :], 1.0, D)
        wide: tl.constexpr = operand == tl.float32
        M = _product(D, tl.where(same, 0.0, A), wide)
        T = D - _product(M, D, wide)
        T += _product(_product(M, M, wide), T, wide)
        tl.debug_barrier()
        tl.store(pairs + C, T.to(operand), mask=inside[:, None])


@triton.jit(do_not_specialize=["rows", "most"])
def _scan_kernel(
    qkv_ptr, state_ptr, slots_ptr, ends_ptr, pairs_ptr, factors_ptr, out_ptr, most, rows,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, C: tl.constexpr,
    STRIDE: tl.constexpr,  # of qkv
    EACH: tl.constexpr, RAGGED: tl.constexpr, BLOCK_B: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
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
        q_ptr = qkv_ptr + (head // GROUP) * K
        k_ptr = q_ptr + k_heads * K
        v_ptr = qkv_ptr + 2 * k_heads * K + head * V
        of_two = i[:, None] * (HV * 4) + tl.arange(0, 2)[None, :]
        of_qkv_k, of_qkv_v = i[:, None] * STRIDE + ks[None, :], i[:, None] * STRIDE + vs[None, :]
        of_pairs = i[:, None] * (HV * 2 * C) + i[None, :]
        for first in tl.range(start, end, C, num_stages=STAGES):
            inside = i < end - first
            at, at_head = tl.cast(first, tl.int64) * STRIDE, tl.cast(first, tl.int64) * HV + head
            there_k, there_v = inside[:, None] & of_k[None, :], inside[:, None] & of_v[None, :]
            q = tl.load(q_ptr + at + of_qkv_k, mask=there_k, other=0.0)
            k = tl.load(k_ptr + at + of_qkv_k, mask=there_k, other=0.0)
            v = tl.load(v_ptr + at + of_qkv_v, mask=there_v, other=0.0)
            P = tl.load(pairs_ptr + at_head * (2 * C) + of_pairs, mask=inside[:, None], other=0.0)
            T = tl.load(pairs_ptr + at_head * (2 * C) + C + of_pairs, mask=inside[:, None], other=0.0)
            # By twos: 64 numbers alone would be loaded once for every thread that has a column of a product.
            of_reads = tl.load(factors_ptr + at_head * 4 + of_two, mask=inside[:, None], other=0.0)
            of_keys = tl.load(factors_ptr + at_head * 4 + 2 + of_two, mask=inside[:, None], other=0.0)
            kept = tl.load(factors_ptr + at_head * 4 + 3)

            on_read, on_query = tl.split(of_reads)
            on_key, _ = tl.split(of_keys)
            rounded = S.to(operand)
            out = tl.dot(rounded, tl.trans(q), input_precision=PRECISION) * on_query[None, :]
            read = tl.dot(rounded, tl.trans(k), input_precision=PRECISION) * on_read[None, :]
            d = tl.dot(tl.trans(v), tl.trans(T), input_precision=PRECISION)
            d = tl.dot(read.to(operand), tl.trans(T), d, input_precision=PRECISION)
            carried = (d * on_key[None, :]).to(operand)
            out = tl.dot(d.to(operand), tl.trans(P), out, input_precision=PRECISION)
            S = tl.dot(carried, k, S * kept, input_precision=PRECISION)
            found = tl.trans(out.to(out_ptr.dtype.element_ty))
            tl.store(out_ptr + at_head * V + i[:, None] * (HV * V) + vs[None, :], found, mask=there_v)
        tl.store(held, S, mask=of_v[:, None] & of_k[None, :])


def none_is_long(tokens: int, rows: StateRows, most: int) -> bool:
    """Whether no row of a step of ``tokens`` tokens can have more than ``most``, as far as the host knows."""
    longest = tokens if rows.ends_B is not None else tokens // len(rows.slots_B)
    return longest <= most


def scan_stages(block_k: int, block_v: int, dtype: torch.dtype, shared_bytes: int = H200.shared_bytes) -> int:
    """Pipeline stages of a scan by programs of ``block_v`` values that fit a program's ``shared_bytes``."""
    wide = dtype == torch.float32
    chunk, stages = (_CHUNK_FLOAT32, SCAN_STAGES_FLOAT32) if wide else (_CHUNK, SCAN_STAGES)
    operands = chunk * (2 * block_k + block_v + 2 * chunk) * dtype.itemsize
    factors = 4 * (4 * chunk + 4)  # float32: four a token, and the last token's
    state = block_v * block_k * dtype.itemsize  # what changes its layout between two products is no larger
    # wgmma reads a chunk while the next ones are loaded; without, the last stage's chunk is in registers.
    return max(1, min(stages, _SHARED // operands, 1 + (shared_bytes - state) // (operands + factors)))


def delta_chunks(
    qkv_TC: Tensor, b_TH: Tensor, a_TH: Tensor, rule: DeltaRule, state_SHVK: Tensor, rows: StateRows, out_TV: Tensor,
    pdl: bool, *, most: int, shared_bytes: int = H200.shared_bytes,
) -> Tensor:  # fmt: skip
    """S q of Ops.gated_delta for rows of more than ``most`` tokens, into ``out_TV``; other rows are left alone.

    None of these is undecided (``StateRows.writes_B``). ``shared_bytes``: the most shared memory of a program
    (DeviceTraits).
    """
    tokens, count, device = len(qkv_TC), len(rows.slots_B), qkv_TC.device
    ragged = rows.ends_B is not None
    each = 1 if ragged else tokens // count
    ends_B = rows.ends_B if rows.ends_B is not None else rows.slots_B
    long_rows = min(count, tokens // (most + 1))
    if none_is_long(tokens, rows, most):
        return out_TV
    heads, dtype, wide = rule.v_heads, qkv_TC.dtype, qkv_TC.dtype == torch.float32
    chunk = _CHUNK_FLOAT32 if wide else _CHUNK
    pairs = torch.empty(tokens, heads, 2 * chunk, dtype=dtype, device=device)
    factors = torch.empty(tokens, heads, 4, dtype=torch.float32, device=device)
    block_k, block_v = (max(16, triton.next_power_of_2(dim)) for dim in (rule.k_dim, rule.v_dim))
    shape = {
        "HV": heads,
        "GROUP": heads // rule.k_heads,
        "K": rule.k_dim,
        "BLOCK_K": block_k,
        "C": chunk,
        "EACH": each,
        "RAGGED": ragged,
        "BLOCK_B": triton.next_power_of_2(count),
        "PRECISION": "ieee" if wide else "tf32",
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    chunks = tokens // chunk + long_rows
    _prepare_kernel[(chunks, heads)](
        qkv_TC, b_TH, a_TH, rule.decay_log_H, rule.decay_bias_H, ends_B, pairs, pairs.view(torch.float32), factors,
        qkv_TC.stride(0), a_TH.stride(0), rule.k_dim**-0.5, most, count,
        num_warps=PREPARE_WARPS_FLOAT32 if wide else PREPARE_WARPS, num_stages=1,
        **shape,
    )  # fmt: skip
    block_v = min(block_v, SCAN_V_FLOAT32 if wide else SCAN_V)
    _scan_kernel[(triton.cdiv(rule.v_dim, block_v), heads, long_rows)](
        qkv_TC, state_SHVK, rows.slots_B, ends_B, pairs, factors, out_TV, most, count,
        V=rule.v_dim, BLOCK_V=block_v, STRIDE=qkv_TC.stride(0),
        STAGES=scan_stages(block_k, block_v, dtype, shared_bytes), num_warps=SCAN_WARPS_FLOAT32 if wide else SCAN_WARPS,
        **shape,
    )  # fmt: skip
    return out_TV
