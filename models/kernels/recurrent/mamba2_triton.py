"""Mamba-2 over slot state in Triton: one launch for a token a row, a chunked scan for rows of any length, the norm.

Knows: the arithmetic of mamba2.py over banks that slots index, in float32. Does not know: the convolution of many
tokens (Ops.causal_conv), projections, or which rows there are: slots, lengths and positions are read on the device.
Shape letters as in mamba2.py, Q tokens of a chunk.

One token: a program has some channels of one head. It convolves its x and its group's B and C itself, advances its part
of the state and gates the result. The window is a ring by position, so a step writes a tap that no program
reads in it: the programs of the first head of a group write that of B and C.

Many tokens (the chunked form of the paper's section 6): within a chunk of Q tokens a masked matrix of scores C B^T, and
between chunks the state, which stays in registers while a program walks along a row:

    y_i = sum over j <= i of (C_i . B_j) e^(a_i - a_j) d_j x_j + e^(a_i) C_i S + D x_i     a: running sum of -e^A_log d
    S  <- e^(a_Q) S + sum over j of e^(a_Q - a_j) d_j x_j B_j^T

A row of very few tokens, as one that decodes in a mixed step, is taken token by token instead; so is every row in
float32, which has no tensor cores here. Rows of slot 0 do nothing: their part of the
result stays as it is. Tokens past a row's end are left out when they are loaded, never multiplied by zero.
``pdl``: see dependent_launch.py; state, window, slots and positions are older than the launch right before.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.inputs import StateRows
from models.kernels.recurrent.conv import kept_token, row_bounds
from models.kernels.recurrent.mamba2 import Mamba2Weights

# Batch-invariant: the scan with ``one_by_one`` of 0: a row by itself, token by token
_CHANNELS, _WARPS = 32, 1  # of a step's programs: one warp moves a state 15% faster than four that wait for one another
_CHUNK = 32  # tokens; with 64 the registers spill
_ONE_BY_ONE = 3  # tokens of a row


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _before(window_row_ptr, weight_ptr, channels, mask, position, C: tl.constexpr, J: tl.constexpr):
    """The taps of the inputs before the new one, float32."""
    acc = tl.zeros(channels.shape, tl.float32)
    for back in tl.static_range(1, J):
        tap = (position + (J - back)) % J
        held = tl.load(window_row_ptr + tap * C + channels, mask=mask, other=0.0).to(tl.float32)
        acc += held * tl.load(weight_ptr + channels * J + (J - 1 - back), mask=mask, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _convolved(acc, new, weight_ptr, bias_ptr, channels, mask, J: tl.constexpr, BIAS: tl.constexpr, dtype):
    """silu of the whole sum, rounded as the convolution of many tokens stores it."""
    acc += new.to(tl.float32) * tl.load(weight_ptr + channels * J + J - 1, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        acc += tl.load(bias_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    return _silu(acc).to(dtype).to(tl.float32)


@triton.jit
def _mamba2_step_kernel(
    projected_ptr,  # [B, Z]
    weight_ptr,  # [C, J]
    bias_ptr,  # [C], with BIAS
    a_log_ptr, d_ptr, dt_bias_ptr,
    window_ptr,  # [S, J, C]
    state_ptr,  # [S, H, P, M]
    slots_ptr, positions_ptr,
    out_ptr,  # [B, X]
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, J: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    X: tl.constexpr = H * P
    C: tl.constexpr = X + 2 * G * M
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slot, position = tl.load(slots_ptr + row), tl.load(positions_ptr + row)
    window_row = window_ptr + slot * (J * C)
    dims, cols = part * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_M)
    own, in_state = dims < P, cols < M
    group = head // (H // G)
    xs, bs, cs = head * P + dims, X + group * M + cols, X + G * M + group * M + cols
    where = state_ptr + slot * (H * P * M) + head * (P * M) + dims[:, None] * M + cols[None, :]
    there = own[:, None] & in_state[None, :] & (slot != 0)
    state = tl.load(where, mask=there, other=0.0)
    x = _before(window_row, weight_ptr, xs, own, position, C, J)
    b = _before(window_row, weight_ptr, bs, in_state, position, C, J)
    c = _before(window_row, weight_ptr, cs, in_state, position, C, J)
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    new = projected_ptr + row * (X + C + H)
    dtype = projected_ptr.dtype.element_ty
    new_x = tl.load(new + X + xs, mask=own, other=0.0)
    new_b = tl.load(new + X + bs, mask=in_state, other=0.0)
    new_c = tl.load(new + X + cs, mask=in_state, other=0.0)
    delta = softplus(tl.load(new + X + C + head).to(tl.float32) + tl.load(dt_bias_ptr + head).to(tl.float32))
    x = _convolved(x, new_x, weight_ptr, bias_ptr, xs, own, J, BIAS, dtype)
    b = _convolved(b, new_b, weight_ptr, bias_ptr, bs, in_state, J, BIAS, dtype)
    c = _convolved(c, new_c, weight_ptr, bias_ptr, cs, in_state, J, BIAS, dtype)
    state = tl.exp(rate * delta) * state + (delta * x)[:, None] * b[None, :]
    tl.store(where, state, mask=there)
    y = tl.sum(state * c[None, :], 1) + tl.load(d_ptr + head).to(tl.float32) * x
    y *= _silu(tl.load(new + xs, mask=own, other=0.0).to(tl.float32))
    tl.store(out_ptr + row * X + xs, y.to(out_ptr.dtype.element_ty), mask=own)
    newest = window_row + (position % J) * C
    live = slot != 0
    tl.store(newest + xs, new_x, mask=own & live)
    if (head % (H // G) == 0) & (part == 0):
        tl.store(newest + bs, new_b, mask=in_state & live)
        tl.store(newest + cs, new_c, mask=in_state & live)


@triton.jit(do_not_specialize=["rows"])  # steps of any number of rows run the same code
def _mamba2_scan_kernel(
    projected_ptr,  # [T, Z]
    xbc_ptr,  # [T, C], convolved
    a_log_ptr, d_ptr, dt_bias_ptr,
    state_ptr,  # [S, H, P, M]
    slots_ptr, writes_ptr, ends_ptr, kept_ptr,
    path_ptr,  # [rows, PATH], with PATH
    out_ptr,  # [T, X]
    rows,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ONE_BY_ONE: tl.constexpr,  # rows of up to so many tokens; 0: all rows
    EACH: tl.constexpr, RAGGED: tl.constexpr, KEPT: tl.constexpr,
    PATH: tl.constexpr,  # nodes of a path that are kept; 0: the first tokens
    FROZEN: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    X: tl.constexpr = H * P
    C: tl.constexpr = X + 2 * G * M
    Z: tl.constexpr = X + C + H
    head, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + row)
    start, end = row_bounds(ends_ptr, kept_ptr, row, EACH, RAGGED, KEPT)
    count, start = end - start, start.to(tl.int64)
    dims, cols, here = part * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_Q)
    own, in_state = dims < P, cols < M
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if (slot != 0) & (count > 0):
        group = head // (H // G)
        xs, bs, cs = head * P + dims, X + group * M + cols, X + G * M + group * M + cols
        where = state_ptr + slot * (H * P * M) + head * (P * M) + dims[:, None] * M + cols[None, :]
        there = own[:, None] & in_state[None, :]
        state = tl.load(where, mask=there, other=0.0)
        rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        skip = tl.load(d_ptr + head).to(tl.float32)
        bias = tl.load(dt_bias_ptr + head).to(tl.float32)
        singly = count
        if ONE_BY_ONE:
            singly = tl.where(count <= ONE_BY_ONE, count, 0)
        for number in range(singly):
            token = kept_token(path_ptr, row, start, number, True, PATH)
            x = tl.load(xbc_ptr + token * C + xs, mask=own, other=0.0).to(tl.float32)
            b = tl.load(xbc_ptr + token * C + bs, mask=in_state, other=0.0).to(tl.float32)
            c = tl.load(xbc_ptr + token * C + cs, mask=in_state, other=0.0).to(tl.float32)
            delta = softplus(tl.load(projected_ptr + token * Z + X + C + head).to(tl.float32) + bias)
            state = tl.exp(rate * delta) * state + (delta * x)[:, None] * b[None, :]
            y = tl.sum(state * c[None, :], 1) + skip * x
            y *= _silu(tl.load(projected_ptr + token * Z + xs, mask=own, other=0.0).to(tl.float32))
            tl.store(out_ptr + token * X + xs, y.to(out_ptr.dtype.element_ty), mask=own)
        if ONE_BY_ONE:
            for first in range(singly, count, BLOCK_Q):
                left = first + here < count
                token = start + first + here
                of_x, of_m = left[:, None] & own[None, :], left[:, None] & in_state[None, :]
                x = tl.load(xbc_ptr + token[:, None] * C + xs[None, :], mask=of_x, other=0.0)
                b = tl.load(xbc_ptr + token[:, None] * C + bs[None, :], mask=of_m, other=0.0)
                c = tl.load(xbc_ptr + token[:, None] * C + cs[None, :], mask=of_m, other=0.0)
                delta = tl.load(projected_ptr + token * Z + X + C + head, mask=left, other=0.0).to(tl.float32) + bias
                delta = tl.where(left, softplus(delta), 0.0)
                summed = tl.cumsum(rate * delta, 0)  # of a row's tokens; it stays as it is past them
                total = tl.sum(rate * delta, 0)
                scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
                earlier = here[:, None] >= here[None, :]
                fade = tl.exp(tl.where(earlier, summed[:, None] - summed[None, :], float("-inf")))
                wide = x.to(tl.float32)
                y = tl.dot(scores * fade * delta[None, :], wide, input_precision=PRECISION)
                y += tl.exp(summed)[:, None] * tl.dot(c.to(tl.float32), tl.trans(state), input_precision=PRECISION)
                y += skip * wide
                y *= _silu(
                    tl.load(projected_ptr + token[:, None] * Z + xs[None, :], mask=of_x, other=0.0).to(tl.float32)
                )
                tl.store(out_ptr + token[:, None] * X + xs[None, :], y.to(out_ptr.dtype.element_ty), mask=of_x)
                weighed = wide * (delta * tl.exp(total - summed))[:, None]
                added = tl.dot(tl.trans(weighed), b.to(tl.float32), input_precision=PRECISION)
                state = tl.exp(total) * state + added
        if not FROZEN:
            written = tl.load(writes_ptr + row)
            where = state_ptr + written * (H * P * M) + head * (P * M) + dims[:, None] * M + cols[None, :]
            tl.store(where, state, mask=there & (written != 0))


@triton.jit
def _group_norm_kernel(
    gated_ptr,  # [T, X] float32
    weight_ptr,
    out_ptr,  # [T, X]
    eps,
    WIDTH: tl.constexpr,  # of a part
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    weight = tl.load(weight_ptr + part * WIDTH + cols, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    where = (row * tl.num_programs(1) + part) * WIDTH + cols
    x = tl.load(gated_ptr + where, mask=mask, other=0.0)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + where, (normed.to(dtype) * weight.to(dtype)).to(dtype), mask=mask)


def supports(weights: Mamba2Weights, state_SHPM: Tensor) -> bool:
    """Whether the kernels take these: float32 state that a program can hold."""
    return (
        state_SHPM.dtype == torch.float32
        and weights.state_size <= 256
        and weights.inner // max(1, weights.norm_groups) <= 16384
    )


def step(
    projected_BZ: Tensor, weights: Mamba2Weights, window_SJC: Tensor, state_SHPM: Tensor, rows: StateRows,
    positions_B: Tensor, pdl: bool, block_p: int = _CHANNELS, warps: int = _WARPS,
) -> Tensor:  # fmt: skip
    """Ops.mamba2 where every row has one token. ``block_p``: channels of a head that a program has."""
    count, heads, dim = len(projected_BZ), weights.heads, weights.head_dim
    block_p = min(block_p, triton.next_power_of_2(dim))
    gated_BX = gated_memory(projected_BZ, weights)
    if count == 0:
        return gated_BX
    bias = weights.conv_bias_C
    _mamba2_step_kernel[(count, heads, triton.cdiv(dim, block_p))](
        projected_BZ, weights.conv_CJ, weights.conv_CJ if bias is None else bias, weights.a_log_H, weights.d_H,
        weights.dt_bias_H, window_SJC, state_SHPM, rows.slots_B, positions_B, gated_BX,
        H=heads, P=dim, G=weights.groups, M=weights.state_size, J=weights.conv_CJ.shape[1], BIAS=bias is not None,
        BLOCK_P=block_p, BLOCK_M=triton.next_power_of_2(weights.state_size), PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return normed(gated_BX, weights, projected_BZ.dtype, pdl)


def scan(
    projected_TZ: Tensor, xbc_TC: Tensor, weights: Mamba2Weights, state_SHPM: Tensor, rows: StateRows, pdl: bool,
    block_p: int = 32, chunk: int = _CHUNK, warps: int = 4, one_by_one: int | None = None, each: int | None = None,
) -> Tensor:  # fmt: skip
    """Ops.mamba2 after its convolution, whose result is ``xbc_TC``, for rows of any length.

    ``one_by_one``: rows of up to so many tokens are not taken by chunks; 0: none is. By default no window is, whose
    tokens are few and shall be those of single steps. ``each``: row i's tokens, and its path, are counted from token
    i * each on, where rows overlap; T / B otherwise.
    """
    slots_B, ends_B, kept_B = rows.slots_B, rows.ends_B, rows.kept_B
    window = rows.frozen or kept_B is not None
    if one_by_one is None:
        one_by_one = 0 if projected_TZ.dtype == torch.float32 or window else max(_ONE_BY_ONE, rows.window)
    heads, dim = weights.heads, weights.head_dim
    gated_TX = gated_memory(projected_TZ, weights)
    if len(projected_TZ) == 0:
        return gated_TX
    block_p = max(16, min(block_p, triton.next_power_of_2(dim)))
    _mamba2_scan_kernel[(heads, triton.cdiv(dim, block_p), len(slots_B))](
        projected_TZ, xbc_TC, weights.a_log_H, weights.d_H, weights.dt_bias_H, state_SHPM, slots_B, rows.written_B,
        slots_B if ends_B is None else ends_B, slots_B if kept_B is None else kept_B,
        slots_B if rows.path_BW is None else rows.path_BW, gated_TX, len(slots_B),
        H=heads, P=dim, G=weights.groups, M=weights.state_size, BLOCK_Q=chunk, BLOCK_P=block_p,
        BLOCK_M=max(16, triton.next_power_of_2(weights.state_size)), ONE_BY_ONE=one_by_one,
        EACH=1 if ends_B is not None else each or len(projected_TZ) // len(slots_B), RAGGED=ends_B is not None,
        KEPT=kept_B is not None, PATH=0 if rows.path_BW is None else rows.path_BW.shape[1], FROZEN=rows.frozen,
        PRECISION="ieee" if projected_TZ.dtype == torch.float32 else "tf32", PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    if rows.replays:
        return gated_TX
    return normed(gated_TX, weights, projected_TZ.dtype, pdl)


def gated_memory(projected_TZ: Tensor, weights: Mamba2Weights) -> Tensor:
    """Memory for y silu(z): float32 where it is normed here."""
    dtype = torch.float32 if weights.norm_groups else projected_TZ.dtype
    return torch.empty(len(projected_TZ), weights.inner, dtype=dtype, device=projected_TZ.device)


def normed(gated_TX: Tensor, weights: Mamba2Weights, dtype: torch.dtype, pdl: bool) -> Tensor:
    if not weights.norm_groups:
        return gated_TX
    out_TX = torch.empty_like(gated_TX, dtype=dtype)
    width = weights.inner // weights.norm_groups
    block = triton.next_power_of_2(width)
    _group_norm_kernel[(len(gated_TX), weights.norm_groups)](
        gated_TX, weights.norm_X, out_TX, weights.eps,
        WIDTH=width, BLOCK=block, PDL=pdl, num_warps=max(1, min(8, block // 128)), launch_pdl=pdl,
    )  # fmt: skip
    return out_TX
