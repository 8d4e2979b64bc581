"""Products of up to 32 rows with four-bit weights: codes become numbers in registers, which feed wgmma.

Knows: which thread of a warpgroup holds which codes, numbers and sums, and x [M, K] @ W^T of these.
Does not know: how codes become numbers (four_bits.py), products by mma.sync (fragments.py), when it is the best choice
(choice_table.py).

Weights are the tall operand, in registers as in fragments.py: thread 4g + t of a warp holds 32 neighbouring columns of
rows g and g + 8 of its 16. x passes through shared memory, in the order that puts its columns where those of the
weights are. So no code changes its thread, and x is read once for 64 rows of the weights. With SPLIT programs share K.
"""

# ruff: noqa: RUF005  Triton adds tuples, and unpacks none
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disable-error-code="assignment, misc, var-annotated, unreachable"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.matmul import fragments
from models.kernels.matmul.epilogue import store_rows, sum_of_parts
from models.kernels.matmul.four_bits import constants_of, memory_of
from models.kernels.matmul.fragments import groups_of, pairs_of_word, scaled_after, with_codes
from models.row_buckets import power_of_two_from
from parallel.comm.matmul_push_triton import load_use_counts
from parallel.comm.peer_buffers import PeerBuffers, push_arguments
from parallel.layers.weight import Weight, WeightFormat

BLOCK_O = 64  # weight rows of a warpgroup


@triton.jit
def _joined(parts, COUNT: tl.constexpr, LEVELS: tl.constexpr):
    """2^LEVELS tensors [...] as one [..., 2, 2, ...]: the first axis of two tells the first half from the second."""
    for level in tl.static_range(LEVELS):
        joined = ()
        for i in tl.static_range(COUNT >> (level + 1)):
            joined = joined + (tl.join(parts[i], parts[i + (COUNT >> (level + 1))]),)
        parts = joined
    return parts[0]


@triton.jit
def _by_row(low, high, BLOCK_M: tl.constexpr):
    """[64, BLOCK_M] of what threads hold of rows g and g + 8."""
    both = tl.reshape(tl.join(low, high), (4, 8, 4, 2, 1, 1))
    both = tl.broadcast_to(both, (4, 8, 4, 2, BLOCK_M // 8, 2))
    return tl.reshape(tl.permute(both, (0, 3, 1, 4, 2, 5)), (64, BLOCK_M))


@triton.jit
def _x_of(x_ptr, rows, M, column, WHOLE: tl.constexpr, K: tl.constexpr):
    columns = column + tl.arange(0, 128)
    there = (rows < M)[:, None]
    if not WHOLE:
        there = there & (columns < K)[None, :]
    return tl.load(x_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :], mask=there, other=0.0)


@triton.jit
def _with_step(
    acc, x, codes, scales, zeros, SCALE_COLUMNS: tl.constexpr, K: tl.constexpr, CODES: tl.constexpr,
    ZEROS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """``acc`` and the products of 128 columns, of which ``codes`` and the others begin with."""
    AFTER: tl.constexpr = scaled_after(CODES, SCALE_COLUMNS, K)
    GROUPS: tl.constexpr = groups_of(SCALE_COLUMNS)
    dtype: tl.constexpr = x.dtype
    halves = ()  # row g or g + 8, word, place, column j or j + 4
    for k in tl.static_range(2):
        for word in tl.static_range(4):
            pairs = pairs_of_word(
                codes[4 * k + word], scales[GROUPS * k + word * GROUPS // 4],
                zeros[GROUPS * k + word * GROUPS // 4] if ZEROS else 0, CODES, ZEROS, AFTER, dtype,
            )  # fmt: skip
            for place in tl.static_range(4):
                low, high = pairs[place].to(tl.int16), (pairs[place] >> 16).to(tl.int16)
                halves = halves + (low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))
    # A fragment of wgmma has columns 2t, 2t + 1, 2t + 8 and 2t + 9 of 16: two places of a word.
    numbers = tl.reshape(_joined(halves, 64, 6), (4, 8, 4, 2, 4, 2, 2, 2))
    numbers = tl.reshape(tl.permute(numbers, (0, 3, 1, 4, 5, 6, 2, 7)), (64, 128))
    x = tl.permute(tl.reshape(x, (BLOCK_M, 4, 4, 2, 2, 2)), (0, 2, 4, 5, 1, 3))
    x = tl.trans(tl.reshape(x, (BLOCK_M, 128)))
    if AFTER:
        acc += tl.dot(numbers, x) * _by_row(scales[0].to(tl.float32), scales[1].to(tl.float32), BLOCK_M)
    else:
        acc = tl.dot(numbers, x, acc)
    return acc


@triton.jit(do_not_specialize=["M"])  # any number of rows runs the code of its bucket
def _warpgroup_kernel(
    x_ptr,
    weight_ptr,  # [outputs, K / 2] bytes, or twice the outputs with GATE_UP
    scale_ptr, zero_ptr, factor_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr, M, outputs,
    memory,  # addresses of all ranks' peer buffers, where PUSH
    use_counts_ptr, K: tl.constexpr, SCALE_COLUMNS: tl.constexpr, CODES: tl.constexpr, ZEROS: tl.constexpr,
    FACTORS: tl.constexpr, LIFT: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,  # steps whose codes are loaded before they are needed
    GATE_UP: tl.constexpr, BIAS: tl.constexpr,
    PUSH: tl.constexpr,  # also push the result into the peers' buffers
    RANK: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    steps: tl.constexpr = (K + SPLIT * 128 - 1) // (SPLIT * 128)
    WHOLE: tl.constexpr = steps * SPLIT * 128 == K
    GROUPS: tl.constexpr = groups_of(SCALE_COLUMNS)
    ZERO: tl.constexpr = 2 * GROUPS if ZEROS else 0
    width: tl.constexpr = 32 if GATE_UP else 64  # columns of the output
    tile, part = tl.program_id(0), tl.program_id(1)
    thread = tl.arange(0, 128)
    row = thread // 32 * 16 + thread % 32 // 4
    if GATE_UP:  # tile rows 2j and 2j+1 are gate row j and up row j
        low = tile * width + row // 2 + row % 2 * outputs
        high = low + 4
    else:
        low = tile * width + row
        high = low + 8
    begin = part * (steps * 128)
    first = begin + thread % 4 * 32
    codes, scales, zeros = (), (), ()
    for step in tl.static_range(AHEAD):
        column = first + step * 128
        if not WHOLE:
            column = tl.minimum(column, K - 32)  # of other columns x is zero
        codes, scales, zeros = with_codes(
            codes, scales, zeros, weight_ptr, scale_ptr, zero_ptr, (low, high), column, K, SCALE_COLUMNS, ZEROS
        )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows, outs = tl.arange(0, BLOCK_M), tile * width + tl.arange(0, width)
    x = _x_of(x_ptr, rows, M, begin, WHOLE, K)
    acc = tl.zeros((64, BLOCK_M), tl.float32)
    # One stage: more copy x through shared memory twice. Unrolled, tuples are renamed, and no register moves.
    for step in tl.range(steps - AHEAD, num_stages=1, loop_unroll_factor=AHEAD):
        column = first + (step + AHEAD) * 128
        if not WHOLE:
            column = tl.minimum(column, K - 32)
        codes, scales, zeros = with_codes(
            codes, scales, zeros, weight_ptr, scale_ptr, zero_ptr, (low, high), column, K, SCALE_COLUMNS, ZEROS
        )
        next_x = _x_of(x_ptr, rows, M, begin + (step + 1) * 128, WHOLE, K)
        acc = _with_step(acc, x, codes, scales, zeros, SCALE_COLUMNS, K, CODES, ZEROS, BLOCK_M)
        codes, scales, zeros = codes[8:], scales[2 * GROUPS :], zeros[ZERO:]
        x = next_x
    for step in tl.static_range(AHEAD):
        acc = _with_step(acc, x, codes, scales, zeros, SCALE_COLUMNS, K, CODES, ZEROS, BLOCK_M)
        if step < AHEAD - 1:
            x = _x_of(x_ptr, rows, M, begin + (steps - AHEAD + step + 1) * 128, WHOLE, K)
            codes, scales, zeros = codes[8:], scales[2 * GROUPS :], zeros[ZERO:]
    if FACTORS:
        acc *= _by_row(tl.load(factor_ptr + low) * LIFT, tl.load(factor_ptr + high) * LIFT, BLOCK_M)
    else:
        acc *= LIFT
    use_counts = 0
    if PUSH:
        use_counts = load_use_counts(use_counts_ptr, rows, M)
    last = True
    if SPLIT > 1:
        last, acc = sum_of_parts(acc, part, tile, tl.num_programs(0), partial_ptr, counter_ptr, SPLIT)
    if last:
        store_rows(
            tl.trans(acc), rows, outs, out_ptr, bias_ptr, M, outputs, use_counts, memory, GATE_UP, BIAS, PUSH, RANK,
            WORLD, ROWS, ROW_BYTES,
        )  # fmt: skip


def fits(form: WeightFormat, outputs: int, inner: int, split: int, ahead: int) -> bool:
    """As in fragments.py, and whether rows are whole tiles and a program has ``ahead`` steps."""
    steps = -(-inner // (fragments.STEP * split))
    return outputs % BLOCK_O == 0 and steps >= ahead and fragments.fits(form, outputs, inner)


def block_m_of(rows: int) -> int:
    """Tokens of a tile."""
    return max(16, power_of_two_from(rows))


def workspace_floats(rows: int, outputs: int, split: int) -> int:
    """Floats of workspace that a launch needs, of a weight with so many rows."""
    return 0 if split == 1 else split * outputs * block_m_of(rows)


def warpgroup(
    x_MK: Tensor, weight: Weight, partial: Tensor, counters: Tensor, *, gate_up: int = 0, split: int, ahead: int,
    buffers: PeerBuffers | None = None, pdl: bool,
) -> Tensor:  # fmt: skip
    """y = x @ W^T + bias [M, O] of at most 32 rows of 16-bit dtype, followed by SiLU-mul where asked (then
    [M, O / 2]).

    The weight ``fits``. ``partial`` float32 holds workspace_floats(...) at least, ``counters`` int32, one for BLOCK_O
    rows of the weight, is zero and is left zero; both are for one stream.
    """
    rows, inner = x_MK.shape
    out_width = weight.outputs // (2 if gate_up else 1)
    out_MO = torch.empty(rows, out_width, dtype=x_MK.dtype, device=x_MK.device)
    _warpgroup_kernel[weight.outputs // BLOCK_O, split](
        x_MK, *memory_of(weight), x_MK if weight.bias is None else weight.bias, out_MO, partial, counters, rows,
        out_width, K=inner, **constants_of(weight, x_MK.dtype), BLOCK_M=block_m_of(rows), SPLIT=split, AHEAD=ahead,
        GATE_UP=gate_up, BIAS=weight.bias is not None, **push_arguments(buffers), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out_MO
