"""The causal convolution over slot state in Triton: any number of tokens a row, lengths read on the device.

Knows: the ring by position in which a slot keeps its latest inputs. Does not know: what follows the convolution.

Two launches: all tokens, then the windows. A window cannot be written while other programs read it. In a replay of
chains a program has a row whole, so there one launch does both; with one token a row the input of position p replaces
the one that no tap reaches any more (delta_step.py makes use of it).
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

# Batch-invariant: a token and its taps, always in the same order
_TOKENS, _CHANNELS = 16, 128  # of a program
_MOST_WHOLE = 16  # tokens of a row that one program takes


@triton.jit
def row_bounds(ends_ptr, kept_ptr, row, EACH: tl.constexpr, RAGGED: tl.constexpr, KEPT: tl.constexpr):
    """(first token, one past the last token) of a row; of those that are kept only where KEPT."""
    if RAGGED:
        start = tl.load(ends_ptr + row - 1, mask=row > 0, other=0).to(tl.int32)
        end = tl.load(ends_ptr + row).to(tl.int32)
    else:
        start = row * EACH
        end = start + EACH
    if KEPT:
        end = tl.minimum(end, start + tl.load(kept_ptr + row).to(tl.int32))
    return start, end


@triton.jit
def kept_token(path_ptr, row, start, number, some, PATH: tl.constexpr):
    """The token of that number of those that a row keeps: along a path of at most PATH nodes, or from ``start`` on
    where PATH is 0. Any token where not ``some``."""
    if PATH:
        number = tl.load(path_ptr + row.to(tl.int64) * PATH + number, mask=some, other=0).to(tl.int32)
    return start + number


@triton.jit
def _ancestor(parents_ptr, token, start, there, BACK: tl.constexpr):
    """(token, there): that of the node BACK above each, and whether there is one, in trees that begin at ``start``."""
    node = token - start
    for _ in tl.static_range(BACK):
        there = there & (node > 0)
        node = tl.load(parents_ptr + start + node, mask=there, other=0).to(tl.int32)
    return start + node, there


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit(do_not_specialize=["tokens", "rows"])
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, window_ptr, slots_ptr, ends_ptr, positions_ptr,
    parents_ptr,  # [rows, EACH], with TREE
    kept_ptr,  # with WHOLE: so many of a row's tokens go to its window
    out_ptr, x_stride, C, tokens, rows,
    TAPS: tl.constexpr, EACH: tl.constexpr, RAGGED: tl.constexpr, TREE: tl.constexpr,
    WHOLE: tl.constexpr,  # a program has a row of EACH tokens, and writes its window; neither RAGGED nor TREE
    BIAS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    of_c = channel < C
    inner = tl.arange(0, BLOCK_T)
    token = tl.program_id(0) * (EACH if WHOLE else BLOCK_T) + inner
    if RAGGED:
        row_ids = tl.arange(0, BLOCK_B)
        ends = tl.load(ends_ptr + row_ids, mask=row_ids < rows, other=2147483647).to(tl.int32)
        over = ends[None, :] <= token[:, None]
        row = tl.sum(over.to(tl.int32), 1)
        start = tl.max(tl.where(over, ends[None, :], 0), 1)
    else:
        row = token // EACH
        start = row * EACH
    there = (token < tokens) & (row < rows)
    if WHOLE:
        there = there & (inner < EACH)
    slot = tl.load(slots_ptr + row, mask=there, other=0)
    position = tl.load(positions_ptr + token, mask=there, other=0).to(tl.int32)
    offset = token - start
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        if TREE:
            before, new = _ancestor(parents_ptr, token, start, there, TAPS - 1 - tap)
            old = there & (new == 0)
        else:
            before = token - back
            new = there & (offset >= back)
            old = there & (offset < back)
        source = x_ptr + before.to(tl.int64)[:, None] * x_stride + channel[None, :]
        x = tl.load(source, mask=new[:, None] & of_c[None, :], other=0.0).to(tl.float32)
        held = slot * TAPS + (position - back + TAPS) % TAPS
        kept = tl.load(window_ptr + held[:, None] * C + channel[None, :], mask=old[:, None] & of_c[None, :], other=0.0)
        weight = tl.load(weight_ptr + channel * TAPS + tap, mask=of_c, other=0.0).to(tl.float32)
        total += tl.where(new[:, None], x, kept.to(tl.float32)) * weight[None, :]
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=of_c, other=0.0).to(tl.float32)[None, :]
    where = token.to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(out_ptr + where, silu(total).to(out_ptr.dtype.element_ty), mask=there[:, None] & of_c[None, :])
    if WHOLE:
        count = tl.load(kept_ptr + tl.program_id(0)).to(tl.int32)
        newest = there & (offset < count) & (offset >= count - TAPS)
        tl.debug_barrier()  # every thread has read the window before one writes to it
        held = slot * TAPS + position % TAPS
        x = x.to(window_ptr.dtype.element_ty)  # the last tap's: the token itself
        tl.store(window_ptr + held[:, None] * C + channel[None, :], x, mask=newest[:, None] & of_c[None, :])


@triton.jit
def _window_kernel(
    x_ptr, window_ptr, slots_ptr, ends_ptr, kept_ptr,
    path_ptr,  # [rows, PATH], with PATH
    positions_ptr, x_stride, C,
    TAPS: tl.constexpr, EACH: tl.constexpr, RAGGED: tl.constexpr, KEPT: tl.constexpr, PATH: tl.constexpr,
    BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    start, end = row_bounds(ends_ptr, kept_ptr, row, EACH, RAGGED, KEPT)
    slot = tl.load(slots_ptr + row)
    some = end > start
    newest = kept_token(path_ptr, row, start, end - start - 1, some, PATH)
    last = tl.load(positions_ptr + newest, mask=some, other=0).to(tl.int32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for back in tl.static_range(TAPS):
        there = (channel < C) & (end - start > back)
        token = kept_token(path_ptr, row, start, end - start - 1 - back, end - start > back, PATH)
        x = tl.load(x_ptr + token.to(tl.int64) * x_stride + channel, mask=there, other=0.0)
        held = slot * TAPS + (last - back + TAPS) % TAPS
        tl.store(window_ptr + held * C + channel, x.to(window_ptr.dtype.element_ty), mask=there)


def causal_conv(
    x_TC: Tensor, weight_CJ: Tensor, bias_C: Tensor | None, window_SJC: Tensor, rows: StateRows, positions_T: Tensor,
    pdl: bool,
) -> Tensor:  # fmt: skip
    """See models/ops/contract.py."""
    tokens, channels = x_TC.shape
    taps, count = weight_CJ.shape[1], len(rows.slots_B)
    ragged, each = rows.ends_B is not None, 1 if rows.ends_B is not None else tokens // count
    ends_B = rows.ends_B if rows.ends_B is not None else rows.slots_B
    out_TC = torch.empty(tokens, channels, dtype=x_TC.dtype, device=x_TC.device)
    if tokens == 0:
        return out_TC
    block_c = min(_CHANNELS, triton.next_power_of_2(channels))
    whole = rows.replays and not ragged and rows.tree is None and each <= _MOST_WHOLE
    block_t = triton.next_power_of_2(each) if whole else _TOKENS
    _conv_kernel[(count if whole else triton.cdiv(tokens, block_t), triton.cdiv(channels, block_c))](
        x_TC, weight_CJ, weight_CJ if bias_C is None else bias_C, window_SJC, rows.slots_B, ends_B, positions_T,
        rows.slots_B if rows.tree is None else rows.tree.parents_BN,
        rows.slots_B if rows.kept_B is None else rows.kept_B, out_TC, x_TC.stride(0), channels, tokens, count,
        TAPS=taps, EACH=each, RAGGED=ragged, TREE=rows.tree is not None, WHOLE=whole, BIAS=bias_C is not None,
        BLOCK_B=triton.next_power_of_2(count), BLOCK_T=block_t, BLOCK_C=block_c, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    if rows.frozen or whole:
        return out_TC
    wide_c = min(1024, triton.next_power_of_2(channels))
    _window_kernel[(count, triton.cdiv(channels, wide_c))](
        x_TC, window_SJC, rows.written_B, ends_B, rows.slots_B if rows.kept_B is None else rows.kept_B,
        rows.slots_B if rows.path_BW is None else rows.path_BW, positions_T, x_TC.stride(0), channels,
        TAPS=taps, EACH=each, RAGGED=ragged, KEPT=rows.kept_B is not None,
        PATH=0 if rows.path_BW is None else rows.path_BW.shape[1], BLOCK_C=wide_c, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out_TC
