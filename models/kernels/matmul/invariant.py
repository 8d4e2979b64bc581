"""x @ W^T whose sums do not depend on how many rows x has: one order of additions a weight, for every M.

Knows: the product W [O, K] times x^T [K, M] in tiles, with SiLU-mul and bias behind, for the deterministic mode
(docs/determinism.md). Does not know: the fastest product of a shape (models/ops/tuned.py), or what else the mode takes.

Weights are the tall operand of every product and tokens the narrow one, as in skinny.py, so a tile of any number of
tokens takes the same instruction, 16 columns at a time. K is cut into segments, as many as the *weight's* shape says
(``segments_of``). A segment is one accumulator over its columns in ascending order; segments are added in ascending
order, beginning with zero. Few tokens: a segment is a program, and the last program of a tile (found by a counter) adds
them up. Many tokens: one program takes all segments in turn. Either way every output element is the same chain of
additions. Which tile of tokens an element is in, and where, changes who computes it and nothing else.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.dependent_launch import prefetch_to_l2
from models.kernels.matmul.epilogue import gated_mul
from models.kernels.traits import H200, fitting_steps

COUNTERS = 8192  # tiles that a launch may have where segments are programs
_TILE_ROWS = 64  # weight rows of a tile where segments are programs
_WAVE = 132  # programs, on every GPU: how a sum is cut, and so its bits, must not depend on its multiprocessors
_ENOUGH = 3 * _WAVE  # programs that read a weight at full rate
_MOST_SEGMENTS = 8
_LEAST_STEPS = 4  # of 128 columns in a segment
_STEP = 128  # columns; a segment is a multiple
_TOGETHER = 8  # tiles of tokens that use a tile of weights one right after the other


@dataclass(frozen=True, slots=True)
class Tile:
    """``tokens`` and ``weights``: rows of x and of W in a tile; ``columns`` of a step; pipeline stages; warps."""

    tokens: int
    weights: int
    columns: int
    stages: int
    warps: int


def segments_of(weight_rows: int, inner: int) -> int:
    """Into how many segments the columns of a weight are cut: enough programs to read it at full rate.

    A function of the weight's shape alone, or the order of a sum would depend on who shares the step.
    """
    tiles, steps = -(-weight_rows // _TILE_ROWS), inner // _STEP
    if inner % _STEP:
        return 1
    fitting = (n for n in range(1, _MOST_SEGMENTS + 1) if steps % n == 0 and steps // n >= _LEAST_STEPS)
    return max((n for n in fitting if tiles * n <= _ENOUGH), default=1)


def tile_for(tokens: int, segments: int, dtype: torch.dtype, shared_bytes: int = H200.shared_bytes) -> Tile:
    """The tile of a launch that fits a program's ``shared_bytes`` (DeviceTraits). Its choice changes no sum
    (tests/gpu/test_deterministic_gpu.py)."""
    tile = _fast_tile(tokens, segments, dtype)
    columns, stages = fitting_steps(
        tile.columns, tile.stages,
        rows=tile.tokens + tile.weights, element_bytes=dtype.itemsize, shared_bytes=shared_bytes,
    )  # fmt: skip
    return replace(tile, columns=columns, stages=stages)


def _fast_tile(tokens: int, segments: int, dtype: torch.dtype) -> Tile:
    """What was fast on an H200."""
    if dtype == torch.float32:  # no tensor cores: the operands of tl.dot stay in registers
        return Tile(16 if tokens <= 16 else 32, 64, 32, 3, 4)
    if tokens <= 64:
        return Tile(16 if tokens <= 16 else 32 if tokens <= 32 else 64, _TILE_ROWS, 128, 3, 4)
    if tokens <= 128:  # two programs a multiprocessor
        return Tile(128, 128, 64, 3, 8)
    if segments > 1:  # two accumulators of 256 rows would spill
        return Tile(128, 128, 128, 3, 8)
    return Tile(128, 256, 64, 4, 8)


@triton.jit
def _segment(
    weights,  # [BLOCK_O, BLOCK_K] pointers to the tile's first columns
    inputs,  # [BLOCK_M, BLOCK_K]
    row_mask, begin,
    K: tl.constexpr, LENGTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sum over columns [begin, begin + LENGTH), [BLOCK_O, BLOCK_M]: one accumulator in ascending order."""
    whole: tl.constexpr = LENGTH % BLOCK_K == 0
    cols = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
    for start in tl.range(begin, begin + LENGTH, BLOCK_K, num_stages=STAGES):
        if whole:
            w = tl.load(weights + start)
            x = tl.load(inputs + start, mask=row_mask, other=0.0)
        else:
            there = (start + cols < K)[None, :]
            w = tl.load(weights + start, mask=there, other=0.0)
            x = tl.load(inputs + start, mask=row_mask & there, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["M"])  # any number of rows runs the code of its tile
def _invariant_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    partial_ptr,  # float32 [SEGMENTS, tiles, BLOCK_O, BLOCK_M], where APART
    counter_ptr, M, outputs,
    K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,  # weight rows a tile; the output has half as many columns when GATE_UP
    BLOCK_K: tl.constexpr, SEGMENTS: tl.constexpr,
    APART: tl.constexpr,  # each segment is a program
    TOGETHER: tl.constexpr, STAGES: tl.constexpr, GATE_UP: tl.constexpr, BIAS: tl.constexpr,
    PREFETCH: tl.constexpr,  # columns of the tile's weights to prefetch to L2
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = BLOCK_O // 2 if GATE_UP else BLOCK_O
    length: tl.constexpr = (K + SEGMENTS - 1) // SEGMENTS
    tiles = (outputs + width - 1) // width
    blocks = (M + BLOCK_M - 1) // BLOCK_M
    # TOGETHER tiles of tokens use a tile of weights one after the other: all but the first find it in L2.
    number = tl.program_id(0)
    first_block = number // (TOGETHER * tiles) * TOGETHER
    near = tl.minimum(blocks - first_block, TOGETHER)
    within = number - first_block * tiles
    block, tile = first_block + within % near, within // near
    tile_rows = tl.arange(0, BLOCK_O)
    if GATE_UP:  # tile rows 2j and 2j+1 are gate row j and up row j
        out_of_row = tile * width + tile_rows // 2
        weight_rows = tl.minimum(out_of_row, outputs - 1) + (tile_rows % 2) * outputs
    else:
        weight_rows = tl.minimum(tile * width + tile_rows, outputs - 1)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_K)
    weights = weight_ptr + weight_rows.to(tl.int64)[:, None] * K + cols[None, :]
    inputs = x_ptr + rows.to(tl.int64)[:, None] * K + cols[None, :]
    row_mask = (rows < M)[:, None]
    segment = 0
    if APART:
        segment = tl.program_id(1)
    if PDL:
        if PREFETCH > 0:
            lines = segment * length + tl.arange(0, PREFETCH // 64) * 64  # 64 16-bit elements: one 128-byte line
            prefetch_to_l2(weight_ptr + weight_rows.to(tl.int64)[:, None] * K + lines[None, :])
        gdc_wait()
        gdc_launch_dependents()
    if APART or SEGMENTS == 1:
        total = _segment(
            weights, inputs, row_mask, segment * length, K, length, BLOCK_M, BLOCK_O, BLOCK_K, STAGES, PRECISION
        )
    else:
        total = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
        for part in tl.range(0, SEGMENTS, num_stages=1, disable_licm=True):
            total += _segment(
                weights, inputs, row_mask, part * length, K, length, BLOCK_M, BLOCK_O, BLOCK_K, STAGES, PRECISION
            )

    last = True
    if APART:
        parts = tl.num_programs(0)
        place = tile_rows[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        area: tl.constexpr = BLOCK_O * BLOCK_M
        tl.store(partial_ptr + (segment * parts + number).to(tl.int64) * area + place, total)
        tl.debug_barrier()  # all threads have stored their sums before one counts them
        last = tl.atomic_add(counter_ptr + number, 1, sem="acq_rel", scope="gpu") == SEGMENTS - 1
        if last:
            total = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
            for other in tl.static_range(SEGMENTS):
                where = (other * parts + number).to(tl.int64) * area + place
                total += tl.load(partial_ptr + where, cache_modifier=".cg")
            tl.store(counter_ptr + number, 0)
    if last:
        outs = tile * width + tl.arange(0, width)
        result = tl.trans(total)
        if GATE_UP:
            gate, up = tl.split(tl.reshape(result, (BLOCK_M, width, 2)))
            result = gated_mul(gate, up, GATE_UP)
        if BIAS:
            result += tl.load(bias_ptr + outs, mask=outs < outputs, other=0.0).to(tl.float32)[None, :]
        mask = row_mask & (outs < outputs)[None, :]
        places = rows.to(tl.int64)[:, None] * outputs + outs[None, :]
        tl.store(out_ptr + places, result.to(out_ptr.dtype.element_ty), mask=mask)


def linear(
    x_MK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, partial: Tensor, counters: Tensor, *, gate_up: int = 0,
    tile: Tile | None = None, apart: bool | None = None, shared_bytes: int = H200.shared_bytes, pdl: bool,
) -> Tensor:  # fmt: skip
    """y = x @ W^T + bias [M, O], with SiLU-mul behind where asked (then [M, O / 2]). A row of y has the same bits
    whatever M is, and wherever the row is.

    ``tile``, ``apart`` (segments as programs): how the work is divided, by default by what is likely fast and fits a
    program's ``shared_bytes`` (DeviceTraits); no bit depends on them. ``partial`` float32 has room for
    ``workspace_floats``, or segments are not programs; ``counters`` int32 [COUNTERS] is zero and is left zero; both are
    for one stream.
    """
    x_MK = x_MK.contiguous()
    rows, inner = x_MK.shape
    weight_rows = weight_OK.shape[0]
    outputs = weight_rows // (2 if gate_up else 1)
    out_MO = torch.empty(rows, outputs, dtype=x_MK.dtype, device=x_MK.device)
    if rows == 0:
        return out_MO
    segments = segments_of(weight_rows, inner)
    tile = tile or tile_for(rows, segments, x_MK.dtype, shared_bytes)
    columns = min(tile.columns, max(16, triton.next_power_of_2(inner)))
    width = tile.weights // (2 if gate_up else 1)
    tiles = triton.cdiv(outputs, width) * triton.cdiv(rows, tile.tokens)
    fits = segments * tiles * tile.weights * tile.tokens <= partial.numel() and tiles <= counters.numel()
    if apart is None:  # many tokens fill the GPU with tiles alone, and write no sums
        apart = rows <= 64 or tiles < _WAVE
    apart = apart and segments > 1 and fits
    prefetch = min(256, inner // segments // 64 * 64) if apart or rows <= 64 else 0
    _invariant_linear_kernel[(tiles, segments if apart else 1)](
        x_MK, weight_OK, weight_OK if bias_O is None else bias_O, out_MO, partial, counters, rows, outputs,
        K=inner, BLOCK_M=tile.tokens, BLOCK_O=tile.weights, BLOCK_K=columns, SEGMENTS=segments, APART=apart,
        TOGETHER=_TOGETHER, STAGES=tile.stages, GATE_UP=gate_up, BIAS=bias_O is not None,
        PREFETCH=1 << (prefetch.bit_length() - 1) if prefetch and x_MK.element_size() == 2 else 0,
        PRECISION="ieee" if x_MK.dtype == torch.float32 else "tf32", PDL=pdl, num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out_MO
