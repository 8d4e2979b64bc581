"""The experts of a sparse layer for very few tokens: each pair streams its expert's weights, without lists.

Knows: the arithmetic of grouped.py. Does not know: for how many tokens it is faster (tiles.py).

With a handful of pairs, every pair reads its expert's weights for itself: no lists, two launches. The second sums a
token's experts in the order of its choices, without atomics, as grouped.py does: the same bits every run.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.experts.tiles import largest_power
from models.kernels.matmul.codes import as_float, readable
from models.kernels.matmul.epilogue import gelu_mul
from models.kernels.traits import H200
from models.row_buckets import power_of_two_from
from parallel.layers.weight import Weight

_WHOLE_COLUMNS, _DOWN_NUMBERS = 1024, 4096  # of down: columns that a program takes at once, numbers of a tile then


@triton.jit
def expert_scales(scales_ptr, expert, rows, K: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr):
    """Address of the first scale of an expert's matrix [rows, K]."""
    first = scales_ptr
    if SCALE_ROWS > 0:
        first += expert.to(tl.int64) * ((rows + SCALE_ROWS - 1) // SCALE_ROWS * tl.cdiv(K, SCALE_COLUMNS))
    return first


@triton.jit
def clamped_swiglu(gate, up, limit):
    """As rows_reference/experts.py."""
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return (up + 1.0) * gate * tl.sigmoid(1.702 * gate)


@triton.jit
def _inside(chunk: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr):
    """Which columns of a chunk are some of K's: all, but of a shorter last chunk."""
    cols = tl.arange(0, CHUNK)
    return cols < K - chunk * CHUNK if (chunk + 1) * CHUNK > K else tl.full((CHUNK,), True, tl.int1)


@triton.jit
def _tile(weights, chunk: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, there=True):
    """A chunk of the weights at ``weights`` [rows, CHUNK]; zeros unless ``there``, a scalar."""
    mask = _inside(chunk, K, CHUNK)[None, :] & there
    return tl.load(weights + chunk * CHUNK, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def activated(gate, up, limit, GATED: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr):
    """clamped_swiglu, GELU-mul, SiLU-mul, or relu2 of ``up``."""
    if CLAMPED:
        result = clamped_swiglu(gate, up, limit)
    elif GELU:
        result = gelu_mul(gate, up)
    elif GATED:
        result = gate * tl.sigmoid(gate) * up
    else:
        result = tl.maximum(up, 0.0)
        result = result * result
    return result


@triton.jit
def _sums(
    x, w, rows, scales,
    chunk: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, VECTOR: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of one chunk of K: products of x [1, CHUNK] and the weights w of ``rows``, summed by VECTOR, scaled."""
    found = tl.sum(tl.reshape(x * as_float(w), (w.shape[0], CHUNK // VECTOR, VECTOR)), 2)
    if SCALE_ROWS > 0:
        columns = (chunk * CHUNK + tl.arange(0, CHUNK // VECTOR) * VECTOR) // SCALE_COLUMNS
        found *= tl.load(scales + (rows // SCALE_ROWS * tl.cdiv(K, SCALE_COLUMNS))[:, None] + columns[None, :])
    return found


@triton.jit
def _streamed_gate_up_kernel(
    x_ptr, weight_ptr,
    scales_ptr,  # float32 [G, grid], one a block of SCALE_ROWS x SCALE_COLUMNS weights
    bias_ptr,  # [G, rows of the weight], with BIAS
    limit,  # with CLAMPED
    chosen_ptr,
    hidden_ptr,  # [T * C, I]
    inner,  # I
    K: tl.constexpr, CHOICES: tl.constexpr, BLOCK_I: tl.constexpr, CHUNK: tl.constexpr,
    SCALE_ROWS: tl.constexpr,  # 0: weights have no scales
    SCALE_COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,  # neighbouring products that a thread sums at once, of one scale
    GATED: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    pair = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(chosen_ptr + pair)
    if expert >= 0:
        cols = tl.arange(0, CHUNK)
        matrices: tl.constexpr = 2 if GATED else 1
        ups = weight_ptr + (expert.to(tl.int64) * matrices * inner + outs)[:, None] * K + cols[None, :]
        x_row = x_ptr + (pair // CHOICES).to(tl.int64) * K + cols
        gate = tl.zeros((BLOCK_I, CHUNK // VECTOR), tl.float32)
        up = tl.zeros((BLOCK_I, CHUNK // VECTOR), tl.float32)
        scales = expert_scales(scales_ptr, expert, matrices * inner, K, SCALE_ROWS, SCALE_COLUMNS)
        for chunk in tl.static_range((K + CHUNK - 1) // CHUNK):
            x = tl.load(x_row + chunk * CHUNK, mask=_inside(chunk, K, CHUNK), other=0.0).to(tl.float32)[None, :]
            if GATED:
                w = _tile(ups, chunk, K, CHUNK)
                gate += _sums(x, w, outs, scales, chunk, K, CHUNK, VECTOR, SCALE_ROWS, SCALE_COLUMNS)
            w = _tile(ups + (matrices - 1) * inner * K, chunk, K, CHUNK)
            up_rows = (matrices - 1) * inner + outs
            up += _sums(x, w, up_rows, scales, chunk, K, CHUNK, VECTOR, SCALE_ROWS, SCALE_COLUMNS)
        gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
        if BIAS:
            bias = bias_ptr + expert.to(tl.int64) * matrices * inner + outs
            if GATED:
                gate_sum += tl.load(bias).to(tl.float32)
            up_sum += tl.load(bias + (matrices - 1) * inner).to(tl.float32)
        result = activated(gate_sum, up_sum, limit, GATED, CLAMPED, GELU)
        tl.store(hidden_ptr + pair.to(tl.int64) * inner + outs, result.to(hidden_ptr.dtype.element_ty))


@triton.jit
def _streamed_down_kernel(
    hidden_ptr,  # [T * C, K]
    weight_ptr,  # [G, N, K]
    scales_ptr,  # as in _streamed_gate_up_kernel
    bias_ptr,
    routed_share_ptr,  # [T, C], written before the launch right before: shares and chosen experts
    routed_ptr, out_ptr, N,
    K: tl.constexpr, CHOICES: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, VECTOR: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1)
    cols = tl.arange(0, CHUNK)
    chunks: tl.constexpr = (K + CHUNK - 1) // CHUNK
    # Masks and no branches: a choice's weights are on their way while the one before it is summed.
    expert = tl.load(routed_ptr + token * CHOICES)
    weights = weight_ptr + (expert.to(tl.int64) * N + outs)[:, None] * K + cols[None, :]
    w_next = _tile(weights, 0, K, CHUNK, expert >= 0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK_N,), tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        here, there = expert, expert >= 0
        share = tl.load(routed_share_ptr + pair, mask=there, other=0.0)
        scales = expert_scales(scales_ptr, tl.maximum(here, 0), N, K, SCALE_ROWS, SCALE_COLUMNS)
        acc = tl.zeros((BLOCK_N, CHUNK // VECTOR), tl.float32)
        for chunk in tl.static_range(chunks):
            w = w_next
            if chunk + 1 < chunks:
                w_next = _tile(weights, chunk + 1, K, CHUNK, there)
            elif choice + 1 < CHOICES:
                expert = tl.load(routed_ptr + pair + 1)
                weights = weight_ptr + (expert.to(tl.int64) * N + outs)[:, None] * K + cols[None, :]
                w_next = _tile(weights, 0, K, CHUNK, expert >= 0)
            h_ptr = hidden_ptr + pair.to(tl.int64) * K + chunk * CHUNK + cols
            h = tl.load(h_ptr, mask=_inside(chunk, K, CHUNK) & there, other=0.0).to(tl.float32)[None, :]
            acc += _sums(h, w, outs, scales, chunk, K, CHUNK, VECTOR, SCALE_ROWS, SCALE_COLUMNS)
        term = tl.sum(acc, 1)
        if BIAS:
            term += tl.load(bias_ptr + here.to(tl.int64) * N + outs, mask=there, other=0.0).to(tl.float32)
        total += term * share
    tl.store(out_ptr + token.to(tl.int64) * N + outs, total.to(out_ptr.dtype.element_ty))


def scale_sizes(weight: Weight) -> dict[str, int]:
    """The kernels' constants for a matrix's scales. A vector of neighbouring products has one scale."""
    if weight.format.block is None:
        return {"SCALE_ROWS": 0, "SCALE_COLUMNS": 0, "VECTOR": 1}
    rows, columns = weight.format.block
    columns = columns or weight.inner
    vector = next(size for size in (8, 4, 2, 1) if columns % size == 0 and largest_power(weight.inner) % size == 0)
    return {"SCALE_ROWS": rows, "SCALE_COLUMNS": columns, "VECTOR": vector}


def _chunk(weight: Weight, most: int) -> int:
    """Columns that a program takes at once: many short chunks would each wait for memory. With scales, whole chunks."""
    whole = min(largest_power(weight.inner), most)
    if weight.format.block is not None or whole >= most // 2:
        return whole
    return min(most, power_of_two_from(weight.inner))


def full_programs(multiprocessors: int) -> int:
    """Below so many programs of a pair, or of all tokens, smaller blocks were faster on an H200: nearly four for each
    of its multiprocessors, in powers of two as weights mostly are.
    """
    return 1 << ((4 * multiprocessors).bit_length() - 1)


def expert_mlp(
    x_TN: Tensor, gate_up: Weight, down: Weight, weights_TC: Tensor, local_TC: Tensor, pdl: bool, *,
    multiprocessors: int = H200.multiprocessors, limit: float | None = None,
) -> Tensor:  # fmt: skip
    """See the contract (models/ops)."""
    _, hidden, inner = down.data.shape
    tokens, choices = local_TC.shape
    if tokens == 0:
        return torch.empty_like(x_TN)
    hidden_PI = x_TN.new_empty(tokens * choices, inner)
    full = full_programs(multiprocessors)
    block_i = min(largest_power(inner), 4 if inner // 4 >= full else 2)
    _streamed_gate_up_kernel[(inner // block_i, tokens * choices)](
        x_TN, readable(gate_up.data), local_TC if gate_up.scale is None else gate_up.scale,
        local_TC if gate_up.bias is None else gate_up.bias, limit or 0.0, local_TC, hidden_PI, inner,
        K=hidden, CHOICES=choices, BLOCK_I=block_i, CHUNK=_chunk(gate_up, 1024),
        **scale_sizes(gate_up),
        GATED=gate_up.outputs > inner, CLAMPED=limit is not None, GELU=gate_up.gelu, BIAS=gate_up.bias is not None,
        PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    out_TN = torch.empty_like(x_TN)
    block_n, chunk, warps = _down_tile(down, tokens, full)
    _streamed_down_kernel[(hidden // block_n, tokens)](
        hidden_PI, readable(down.data), local_TC if down.scale is None else down.scale,
        local_TC if down.bias is None else down.bias, weights_TC, local_TC, out_TN, hidden,
        K=inner, CHOICES=choices, BLOCK_N=block_n, CHUNK=chunk,
        **scale_sizes(down),
        BIAS=down.bias is not None, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out_TN


def _down_tile(down: Weight, tokens: int, full: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of down: all columns of narrow experts at once, so that a program waits for memory once a
    choice."""
    narrow = power_of_two_from(down.inner)
    if down.format.block is None and narrow <= _WHOLE_COLUMNS:
        return min(largest_power(down.outputs), max(1, _DOWN_NUMBERS // narrow)), narrow, 8
    return min(largest_power(down.outputs), 8 if tokens * down.outputs // 8 >= full else 4), _chunk(down, 256), 4
