"""The gated delta rule token by token in Triton, in two kernels.

Knows: the recurrence, and for steps of one token a row the convolution in front of it and the gated norm after it.
Does not know: long rows, which chunks serve (delta_chunk.py), or projections.

`_steps_kernel`: some tokens of a row; a program keeps a slice of a head's state in registers. `_conv_step_kernel`: one
token of every row, a whole head a program, because the norm is over a head. If every program has a multiprocessor, it
holds its state in registers, loaded before the wait. Otherwise the state streams through shared memory, several slices
ahead of the one that is computed.

The state is read from the pool by slot and written back once, whatever the number of tokens, so `_steps_kernel` gives a
token the same bits however its prompt was cut. `_conv_step_kernel` rounds by the number of rows: it is not
batch-invariant. Rows of slot 0 are unused: what they write there is not read.
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
from models.kernels.recurrent.conv import kept_token, row_bounds, silu

L2_EPS = tl.constexpr(1e-6)
_KEPT_BY_A_PROGRAM = 4096  # numbers of the state, 16 KiB
# Numbers of the state in a slice, and slices on their way; docs/lab/measurements/hybrid.md.
_STREAMED, _STAGES = 2048, 4
# Most dims of a state that a program holds whole, and most programs for which it does: an H200 has 132 multiprocessors.
_WHOLE_DIM, _FEW_PROGRAMS = 128, 128


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def log_decay(a_ptr, token, stride, decay_log, decay_bias):
    """-exp(A_log) softplus(a + dt_bias) in float32."""
    a = tl.load(a_ptr + token.to(tl.int64) * stride).to(tl.float32)
    return -tl.exp(decay_log) * softplus(a + decay_bias)


@triton.jit
def _before(weight_ptr, window_ptr, slot, position, channel, mask, C, TAPS: tl.constexpr):
    """The convolution at ``position`` without its newest input."""
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS - 1):
        weight = tl.load(weight_ptr + channel * TAPS + tap, mask=mask, other=0.0).to(tl.float32)
        held = (slot * TAPS + (position - (TAPS - 1 - tap) + TAPS) % TAPS) * C
        total += tl.load(window_ptr + held + channel, mask=mask, other=0.0).to(tl.float32) * weight
    return total


@triton.jit
def _convolved(before, newest, weight_ptr, channel, mask, TAPS: tl.constexpr):
    weight = tl.load(weight_ptr + channel * TAPS + TAPS - 1, mask=mask, other=0.0).to(tl.float32)
    return silu(before + newest.to(tl.float32) * weight).to(newest.dtype).to(tl.float32)


@triton.jit
def _conv_step_kernel(
    qkv_ptr, z_ptr, b_ptr, a_ptr, weight_ptr, window_ptr, decay_log_ptr, decay_bias_ptr, norm_ptr, state_ptr, slots_ptr,
    positions_ptr, out_ptr, qkv_stride, gate_stride, C, scale, eps,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICE: tl.constexpr,  # values of a head at once
    PARTS: tl.constexpr,  # slices of a head
    STAGES: tl.constexpr,  # slices that are on their way
    TAPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    token = row.to(tl.int64)
    k_head = head // GROUP
    k_heads: tl.constexpr = HV // GROUP
    ks, inner, parts = tl.arange(0, BLOCK_K), tl.arange(0, SLICE), tl.arange(0, PARTS)
    of_k = ks < K
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row).to(tl.int32)
    decay_log = tl.load(decay_log_ptr + head).to(tl.float32)
    decay_bias = tl.load(decay_bias_ptr + head).to(tl.float32)
    held = state_ptr + (slot * HV + head) * (V * K) + ks[None, :]
    all_v = parts[:, None] * SLICE + inner[None, :]
    norm = tl.load(norm_ptr + all_v, mask=all_v < V, other=0.0).to(tl.float32)
    q_at, k_at, v_at = k_head * K + ks, (k_heads + k_head) * K + ks, 2 * k_heads * K + head * V + all_v
    # The window is of an earlier step, so written before the predecessor began.
    q_before = _before(weight_ptr, window_ptr, slot, position, q_at, of_k, C, TAPS)
    k_before = _before(weight_ptr, window_ptr, slot, position, k_at, of_k, C, TAPS)
    v_before = _before(weight_ptr, window_ptr, slot, position, v_at, all_v < V, C, TAPS)
    there = (inner < V)[:, None] & of_k[None, :]
    if PARTS == 1:  # the state is of an earlier step, too
        state = tl.load(held + inner[:, None] * K, mask=there, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # All before the first store, behind which a load would wait for what is stored.
    qkv = qkv_ptr + token * qkv_stride
    new_q = tl.load(qkv + q_at, mask=of_k, other=0.0)
    new_k = tl.load(qkv + k_at, mask=of_k, other=0.0)
    new_v = tl.load(qkv + v_at, mask=all_v < V, other=0.0)
    z = tl.load(z_ptr + token * gate_stride + head * V + all_v, mask=all_v < V, other=0.0).to(tl.float32)
    beta = tl.sigmoid(tl.load(b_ptr + token * gate_stride + head).to(tl.float32))
    decay = tl.exp(log_decay(a_ptr + head, row, gate_stride, decay_log, decay_bias))
    q = _convolved(q_before, new_q, weight_ptr, q_at, of_k, TAPS)
    k = _convolved(k_before, new_k, weight_ptr, k_at, of_k, TAPS)
    values = _convolved(v_before, new_v, weight_ptr, v_at, all_v < V, TAPS)
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + L2_EPS) * scale)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)
    outs = tl.zeros((PARTS, SLICE), tl.float32)
    if PARTS == 1:
        state = state * decay
        read = tl.sum(state * q[None, :], 1)  # does not wait for the other sum
        missing = (tl.reshape(values, (SLICE,)) - tl.sum(state * k[None, :], 1)) * beta
        out = (read + missing * tl.sum(q * k, 0)).to(out_ptr.dtype.element_ty).to(tl.float32)
        outs = tl.reshape(out, (PARTS, SLICE))
        tl.store(held + inner[:, None] * K, state + missing[:, None] * k[None, :], mask=there)
    else:
        for part in tl.range(0, PARTS, num_stages=STAGES):
            here = part * SLICE + inner
            there = (here < V)[:, None] & of_k[None, :]
            state = tl.load(held + here[:, None] * K, mask=there, other=0.0) * decay
            this = parts[:, None] == part
            v = tl.sum(tl.where(this, values, 0.0), 0)
            missing = (v - tl.sum(state * k[None, :], 1)) * beta
            state = state + missing[:, None] * k[None, :]
            out = tl.sum(state * q[None, :], 1).to(out_ptr.dtype.element_ty).to(tl.float32)
            outs = tl.where(this, out[None, :], outs)
            tl.store(held + here[:, None] * K, state, mask=there)
    squares = tl.sum(tl.sum(outs * outs, 1), 0)
    normed = (outs * tl.rsqrt(squares / V + eps)).to(out_ptr.dtype.element_ty).to(tl.float32)
    where = out_ptr + token * (HV * V) + head * V + all_v
    tl.store(where, (normed * norm * silu(z)).to(out_ptr.dtype.element_ty), mask=all_v < V)
    newest = window_ptr + (slot * TAPS + position % TAPS) * C
    keeps = of_k & (head % GROUP == 0)  # one of the heads that share q and k
    tl.store(newest + q_at, new_q.to(window_ptr.dtype.element_ty), mask=keeps)
    tl.store(newest + k_at, new_k.to(window_ptr.dtype.element_ty), mask=keeps)
    tl.store(newest + v_at, new_v.to(window_ptr.dtype.element_ty), mask=all_v < V)


@triton.jit(do_not_specialize=["most"])
def _steps_kernel(
    qkv_ptr, b_ptr, a_ptr, decay_log_ptr, decay_bias_ptr, state_ptr, slots_ptr, writes_ptr, ends_ptr, kept_ptr,
    path_ptr,  # [rows, PATH], with PATH
    out_ptr, qkv_stride, gate_stride, scale, most,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICE: tl.constexpr,  # values of a head that a program has
    EACH: tl.constexpr, RAGGED: tl.constexpr,
    KEPT: tl.constexpr,  # only so many of a row's tokens count
    PATH: tl.constexpr,  # nodes of a path that they are; 0: the first tokens
    STORE: tl.constexpr,  # the state after them
    OUT: tl.constexpr,  # what q reads of it
    PDL: tl.constexpr,
):  # fmt: skip
    row, head, slice_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    k_head = head // GROUP
    k_heads: tl.constexpr = HV // GROUP
    ks = tl.arange(0, BLOCK_K)
    of_k = ks < K
    start, end = row_bounds(ends_ptr, kept_ptr, row, EACH, RAGGED, KEPT)
    mine = (end > start) & (end - start <= most)
    slot = tl.load(slots_ptr + row)
    decay_log = tl.load(decay_log_ptr + head).to(tl.float32)
    decay_bias = tl.load(decay_bias_ptr + head).to(tl.float32)
    vs = slice_v * SLICE + tl.arange(0, SLICE)
    held = state_ptr + (slot * HV + head) * (V * K) + ks[None, :]
    # Of an earlier step, so written before the predecessor began.
    state = tl.load(held + vs[:, None] * K, mask=(vs < V)[:, None] & of_k[None, :] & mine, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if mine:
        for step in range(end - start):
            token = kept_token(path_ptr, row, start, step, True, PATH).to(tl.int64)
            qkv = qkv_ptr + token * qkv_stride
            k = tl.load(qkv + (k_heads + k_head) * K + ks, mask=of_k, other=0.0).to(tl.float32)
            v = tl.load(qkv + 2 * k_heads * K + head * V + vs, mask=vs < V, other=0.0).to(tl.float32)
            k = k * tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)
            beta = tl.sigmoid(tl.load(b_ptr + token * gate_stride + head).to(tl.float32))
            state = state * tl.exp(log_decay(a_ptr + head, token, gate_stride, decay_log, decay_bias))
            missing = (v - tl.sum(state * k[None, :], 1)) * beta
            state = state + missing[:, None] * k[None, :]
            if OUT:
                q = tl.load(qkv + k_head * K + ks, mask=of_k, other=0.0).to(tl.float32)
                q = q * (tl.rsqrt(tl.sum(q * q, 0) + L2_EPS) * scale)
                out = tl.sum(state * q[None, :], 1)
                where = out_ptr + token * (HV * V) + head * V + vs
                tl.store(where, out.to(out_ptr.dtype.element_ty), mask=vs < V)
        if STORE:
            write = tl.load(writes_ptr + row)
            written = state_ptr + (write * HV + head) * (V * K) + ks[None, :]
            tl.store(written + vs[:, None] * K, state, mask=(vs < V)[:, None] & of_k[None, :] & (write != 0))


def one_token_a_row(rows: StateRows, tokens: int) -> bool:
    """Whether every row has one new token, which updates its state."""
    return rows.ends_B is None and tokens == len(rows.slots_B) and not rows.frozen and rows.kept_B is None


def conv_delta_step(
    projected_TX: Tensor, weight_CJ: Tensor, window_SJC: Tensor, rule: DeltaRule, state_SHVK: Tensor, rows: StateRows,
    positions_T: Tensor, pdl: bool,
) -> Tensor:  # fmt: skip
    """Ops.conv_gated_delta of a step of one token a row, in one launch."""
    if not one_token_a_row(rows, len(projected_TX)):
        raise ValueError(f"{len(projected_TX)} tokens of {len(rows.slots_B)} rows are not one token a row that is kept")
    qkv_TC, z_TV, b_TH, a_TH = torch.split(projected_TX, list(rule.widths), 1)
    out_TV = torch.empty(z_TV.shape, dtype=z_TV.dtype, device=z_TV.device)
    few = len(rows.slots_B) * rule.v_heads <= _FEW_PROGRAMS and max(rule.k_dim, rule.v_dim) <= _WHOLE_DIM
    slice_v, parts, warps = _slices(rule, _WHOLE_DIM**2 if few else _STREAMED)
    _conv_step_kernel[(len(rows.slots_B), rule.v_heads)](
        qkv_TC, z_TV, b_TH, a_TH, weight_CJ, window_SJC, rule.decay_log_H, rule.decay_bias_H, rule.norm_V, state_SHVK,
        rows.slots_B, positions_T, out_TV, qkv_TC.stride(0), z_TV.stride(0), qkv_TC.shape[1], rule.k_dim**-0.5,
        rule.eps,
        HV=rule.v_heads, GROUP=rule.v_heads // rule.k_heads, K=rule.k_dim, V=rule.v_dim,
        BLOCK_K=triton.next_power_of_2(rule.k_dim), SLICE=slice_v, PARTS=parts, STAGES=_STAGES, TAPS=weight_CJ.shape[1],
        PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out_TV


def delta_steps(
    qkv_TC: Tensor, b_TH: Tensor, a_TH: Tensor, rule: DeltaRule, state_SHVK: Tensor, rows: StateRows, out_TV: Tensor,
    pdl: bool, *, most: int, each: int | None = None,
) -> Tensor:  # fmt: skip
    """S q of Ops.gated_delta for rows of at most ``most`` tokens, into ``out_TV``; other rows are left alone.
    Where ``rows`` are a replay, states only.

    ``each``: row i's tokens, and its path, are counted from token i * each on, where rows overlap; T / B otherwise.
    """
    tokens, count = len(qkv_TC), len(rows.slots_B)
    ragged = rows.ends_B is not None
    slice_v, parts, warps = _slices(rule, _KEPT_BY_A_PROGRAM)
    _steps_kernel[(count, rule.v_heads, parts)](
        qkv_TC, b_TH, a_TH, rule.decay_log_H, rule.decay_bias_H, state_SHVK, rows.slots_B, rows.written_B,
        rows.ends_B if rows.ends_B is not None else rows.slots_B, rows.slots_B if rows.kept_B is None else rows.kept_B,
        rows.slots_B if rows.path_BW is None else rows.path_BW, out_TV, qkv_TC.stride(0), a_TH.stride(0),
        rule.k_dim**-0.5, most,
        HV=rule.v_heads, GROUP=rule.v_heads // rule.k_heads, K=rule.k_dim, V=rule.v_dim,
        BLOCK_K=triton.next_power_of_2(rule.k_dim), SLICE=slice_v, EACH=1 if ragged else each or tokens // count,
        RAGGED=ragged, KEPT=rows.kept_B is not None, PATH=0 if rows.path_BW is None else rows.path_BW.shape[1],
        STORE=not rows.frozen, OUT=not rows.replays, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out_TV


def _slices(rule: DeltaRule, cells: int) -> tuple[int, int, int]:
    """(values at once, slices of a head, warps): a slice has at most ``cells`` numbers of the state."""
    block_k, block_v = triton.next_power_of_2(rule.k_dim), triton.next_power_of_2(rule.v_dim)
    slice_v = max(1, min(block_v, cells // block_k))
    most = 4 if cells <= _KEPT_BY_A_PROGRAM else 16
    return slice_v, block_v // slice_v, max(1, min(most, slice_v * block_k // 512))


def _same_stride(*parts: Tensor) -> bool:
    return len({part.stride(0) for part in parts}) == 1


def aligned_gates(z_TV: Tensor, b_TH: Tensor, a_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three as columns of one tensor, as the projections make them; copied where they are not."""
    if _same_stride(z_TV, b_TH, a_TH):
        return z_TV, b_TH, a_TH
    gates_TX = torch.cat((z_TV, b_TH, a_TH), 1)
    z, b, a = torch.split(gates_TX, [z_TV.shape[1], b_TH.shape[1], a_TH.shape[1]], 1)
    return z, b, a
