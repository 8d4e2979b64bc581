"""x @ W^T with four-bit weights and 16-bit activations, on tensor cores, for few rows.

Knows: how codes become 16-bit numbers in registers, and the product W [O, K] times x^T [K, M] of these. Does not know:
how numbers were quantised (parallel/layers/weight.py), or when it is the best choice (choice_table.py).

Weights are the tall operand and tokens the narrow one, as in skinny.py. A 16-bit word holds the codes of four columns,
4j to 4j + 3. Bit operations on two words at a time give the numbers of all columns 4j of a step, then of all 4j + 1,
and so on. x is put into that order, so no code changes its thread. Numbers are exact in 16 bits:

    int4   code | exponent of 128 (bfloat16) or 1024 (float16), less the same with the zero. The sums of a group's steps
           are scaled in float32. Where a step has several groups, numbers are scaled in 16 bits before.
    e2m1   sign, exponent and fraction are moved to where 16-bit floats have them, which is code * 2^(1 - bias), and
           multiplied with the group's scale. Neither a float8 scale nor a power of two makes that inexact; the scale
           carries most of 2^(bias - 1) and the finished sum the rest, so that both have a 16-bit exponent (``_LIFT``).

With PARTS each warp sums its own part of K, and the parts are added in order in shared memory: many loads are under way
at once, and no program waits for another. With SPLIT programs share K, as in skinny.py. Both are deterministic.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.dependent_launch import prefetch_to_l2
from models.kernels.matmul.codes import as_float, readable
from models.kernels.matmul.epilogue import store_rows, sum_of_parts
from parallel.comm.matmul_push_triton import load_use_counts
from parallel.comm.peer_buffers import PeerBuffers, push_arguments
from parallel.layers.weight import Weight, WeightFormat

_INT4 = """{{
    .reg .b32 p, q, r;
    shr.u32 p, $4, 4;
    shr.u32 q, $4, 8;
    shr.u32 r, $4, 12;
    lop3.b32 $0, $4, 0x000F000F, {one}, 0xEA;
    lop3.b32 $1, p, 0x000F000F, {one}, 0xEA;
    lop3.b32 $2, q, 0x000F000F, {one}, 0xEA;
    lop3.b32 $3, r, 0x000F000F, {one}, 0xEA;
}}"""
_E2M1_BFLOAT16 = tl.constexpr("""{
    .reg .b32 h, p, q, r, s;
    shr.u32 h, $4, 8;
    and.b32 p, $4, 0x000F000F;
    and.b32 q, $4, 0x00F000F0;
    and.b32 r, h, 0x000F000F;
    and.b32 s, h, 0x00F000F0;
    mul.lo.u32 p, p, 4160;
    mul.lo.u32 q, q, 260;
    mul.lo.u32 r, r, 4160;
    mul.lo.u32 s, s, 260;
    and.b32 $0, p, 0x81C081C0;
    and.b32 $1, q, 0x81C081C0;
    and.b32 $2, r, 0x81C081C0;
    and.b32 $3, s, 0x81C081C0;
}""")  # a product is a copy with the sign in its place, and one with the rest
_E2M1_FLOAT16 = tl.constexpr("""{
    .reg .b32 p, q, r, a, b, c, d;
    shl.b32 p, $4, 12;
    shl.b32 q, $4, 8;
    shl.b32 r, $4, 4;
    shr.u32 a, p, 3;
    shr.u32 b, q, 3;
    shr.u32 c, r, 3;
    shr.u32 d, $4, 3;
    and.b32 a, a, 0x0E000E00;
    and.b32 b, b, 0x0E000E00;
    and.b32 c, c, 0x0E000E00;
    and.b32 d, d, 0x0E000E00;
    lop3.b32 $0, p, 0x80008000, a, 0xEA;
    lop3.b32 $1, q, 0x80008000, b, 0xEA;
    lop3.b32 $2, r, 0x80008000, c, 0xEA;
    lop3.b32 $3, $4, 0x80008000, d, 0xEA;
}""")
_INT4_BFLOAT16 = tl.constexpr(_INT4.format(one="0x43004300"))
_INT4_FLOAT16 = tl.constexpr(_INT4.format(one="0x64006400"))
_REGISTERS = tl.constexpr("=r,=r,=r,=r,r")  # two words a register
EXPERT_COLUMNS = 128  # of a step over experts' matrices
INT4, NVFP4, MXFP4 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # CODES; 0: numbers of no four bits


@triton.jit
def numbers_of(words, CODES: tl.constexpr, dtype: tl.constexpr):
    """Of int16 words: the numbers of columns 4j, 4j + 1, 4j + 2, 4j + 3; see above for what they are off by."""
    if dtype == tl.bfloat16:
        numbers = tl.inline_asm_elementwise(
            _INT4_BFLOAT16 if CODES == INT4 else _E2M1_BFLOAT16, _REGISTERS, [words], (tl.bfloat16,) * 4, True, 2
        )
    else:
        numbers = tl.inline_asm_elementwise(
            _INT4_FLOAT16 if CODES == INT4 else _E2M1_FLOAT16, _REGISTERS, [words], (tl.float16,) * 4, True, 2
        )
    return numbers


@triton.jit
def pairs_of(words, CODES: tl.constexpr, dtype: tl.constexpr):
    """The same of int32 words: pairs of numbers in a register, of columns j and j + 4."""
    if dtype == tl.bfloat16:
        pairs = tl.inline_asm_elementwise(
            _INT4_BFLOAT16 if CODES == INT4 else _E2M1_BFLOAT16, _REGISTERS, [words], (tl.int32,) * 4, True, 1
        )
    else:
        pairs = tl.inline_asm_elementwise(
            _INT4_FLOAT16 if CODES == INT4 else _E2M1_FLOAT16, _REGISTERS, [words], (tl.int32,) * 4, True, 1
        )
    return pairs


@triton.jit
def factors_of(scale, CODES: tl.constexpr, dtype: tl.constexpr):
    """Stored scales in dtype; those of e2m1 times 2^(bias - 1) / _LIFT."""
    if CODES == MXFP4:  # into the exponent; what a 16-bit float does not reach becomes zero, or the largest power
        exponent = scale.to(tl.int32)
        if dtype == tl.bfloat16:
            factor = (tl.minimum(exponent + 118, 254) << 7).to(tl.int16).to(dtype, bitcast=True)
        else:
            factor = (tl.minimum(tl.maximum(exponent - 100, 0), 30) << 10).to(tl.int16).to(dtype, bitcast=True)
    elif CODES == NVFP4:
        factor = (as_float(scale) * (2.0**118 if dtype == tl.bfloat16 else 2.0**7)).to(dtype)
    else:
        factor = scale.to(dtype)
    return factor


_LIFT = {(2, torch.bfloat16): 2.0**8, (3, torch.bfloat16): 2.0**8, (2, torch.float16): 2.0**7, (3, torch.float16): 4.0}


@triton.jit
def of_words(groups, PER_GROUP: tl.constexpr):
    """[..., groups] -> [..., groups * PER_GROUP], or as it is where it can be broadcast."""
    wide = groups
    if groups.shape[-1] > 1:  # Triton unpacks no shapes
        wide = tl.broadcast_to(tl.expand_dims(groups, -1), groups.shape + [PER_GROUP])  # noqa: RUF005
        wide = tl.reshape(wide, groups.shape[:-1] + [groups.shape[-1] * PER_GROUP])  # noqa: RUF005
    return wide


@triton.jit
def four_bit_sums(
    x_rows,  # [BLOCK_M] pointers to rows of x
    row_mask,  # [BLOCK_M]
    weight_ptr,  # int16 [rows, K / 4]
    scale_ptr,  # [rows, groups]
    zero_ptr,
    factor_ptr,  # float32 [rows]
    weight_rows,  # [BLOCK_O], which rows
    first,  # step
    K: tl.constexpr,
    STEPS: tl.constexpr,  # of BLOCK_K columns from ``first`` on, in each of PARTS
    WHOLE: tl.constexpr,  # all of these columns are below K
    SCALE_COLUMNS: tl.constexpr,  # columns of a scale
    CODES: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr,
    LIFT: tl.constexpr,  # by which sums are multiplied
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,  # warps, if there are several
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sums [BLOCK_O, BLOCK_M] of products over these columns, those below K."""
    dtype: tl.constexpr = x_rows.dtype.element_ty
    one: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
    WORDS: tl.constexpr = BLOCK_K // 4
    groups_of_row: tl.constexpr = (K + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    AFTER: tl.constexpr = CODES == INT4 and (SCALE_COLUMNS % BLOCK_K == 0 or SCALE_COLUMNS >= K)  # sums are scaled
    groups: tl.constexpr = 1 if AFTER else BLOCK_K // SCALE_COLUMNS  # of a step
    weight_rows = weight_rows.to(tl.int64)
    words, scales = weight_rows * (K // 4), weight_rows * groups_of_row
    if PARTS == 1:
        begin = first
        words, scales = words[:, None], scales[:, None]
        inputs, x_mask = x_rows[:, None], row_mask[:, None]
        acc = tl.zeros((weight_rows.shape[0], x_rows.shape[0]), tl.float32)
    else:
        begin = (first + tl.arange(0, PARTS) * STEPS)[:, None, None]
        words, scales = words[None, :, None], scales[None, :, None]
        inputs, x_mask = x_rows[None, :, None], row_mask[None, :, None]
        acc = tl.zeros((PARTS, weight_rows.shape[0], x_rows.shape[0]), tl.float32)
    words = weight_ptr + words + (begin * WORDS + tl.arange(0, WORDS))
    inputs = inputs + (begin * BLOCK_K + tl.arange(0, BLOCK_K))
    group = begin * BLOCK_K // SCALE_COLUMNS if AFTER else begin * groups + tl.arange(0, groups)
    scale = tl.load(scale_ptr + scales + group, mask=group < groups_of_row, other=0.0)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        number = begin + step
        if WHOLE:
            w = tl.load(words + step * WORDS, eviction_policy="evict_first")
            x = tl.load(inputs + step * BLOCK_K, mask=x_mask, other=0.0)
        else:
            x_there = x_mask & (number * BLOCK_K + tl.arange(0, BLOCK_K) < K)
            w = tl.load(words + step * WORDS, mask=number * WORDS + tl.arange(0, WORDS) < K // 4, other=0)
            x = tl.load(inputs + step * BLOCK_K, mask=x_there, other=0.0)
        if AFTER:  # one step ahead
            group = (number + 1) * BLOCK_K // SCALE_COLUMNS
            next_scale = tl.load(scale_ptr + scales + group, mask=group < groups_of_row, other=0.0)
        else:
            group = number * groups + tl.arange(0, groups)
            if WHOLE:
                scale = tl.load(scale_ptr + scales + group)
            else:
                scale = tl.load(scale_ptr + scales + group, mask=group < groups_of_row, other=0.0)
        w0, w1, w2, w3 = numbers_of(w, CODES, dtype)
        if CODES == INT4:
            if ZEROS:
                zero_group = number * BLOCK_K // SCALE_COLUMNS if AFTER else group
                zero = tl.load(zero_ptr + scales + zero_group, mask=zero_group < groups_of_row, other=0)
                less = of_words(zero.to(dtype) + one, WORDS // groups)
            else:
                less = tl.full((), one + 8.0, dtype)
            w0, w1, w2, w3 = w0 - less, w1 - less, w2 - less, w3 - less
        if not AFTER:
            factor = of_words(factors_of(scale, CODES, dtype), WORDS // groups)
            w0, w1, w2, w3 = w0 * factor, w1 * factor, w2 * factor, w3 * factor
        numbers = tl.join(tl.join(w0, w1), tl.join(w2, w3))
        x = tl.reshape(x, x.shape[:-1] + [WORDS, 4])  # noqa: RUF005
        if PARTS == 1:
            numbers = tl.reshape(tl.permute(numbers, (0, 3, 2, 1)), (weight_rows.shape[0], BLOCK_K))
            x = tl.reshape(tl.permute(x, (0, 2, 1)), (x_rows.shape[0], BLOCK_K))
        else:
            numbers = tl.reshape(tl.permute(numbers, (0, 1, 4, 3, 2)), (PARTS, weight_rows.shape[0], BLOCK_K))
            x = tl.reshape(tl.permute(x, (0, 1, 3, 2)), (PARTS, x_rows.shape[0], BLOCK_K))
        if AFTER:
            acc += tl.dot(numbers, tl.trans(x)) * scale.to(tl.float32)
            scale = next_scale
        else:
            acc = tl.dot(numbers, tl.trans(x), acc)
    if PARTS > 1:
        acc = tl.sum(acc, 0)
    acc = acc * LIFT
    if FACTORS:
        acc *= tl.load(factor_ptr + weight_rows)[:, None]
    return acc


@triton.jit(do_not_specialize_on_alignment=["M"])  # any number of rows runs the code of its bucket
def _four_bits_kernel(
    x_ptr,
    weight_ptr,  # int16 [outputs, K / 4], or twice the outputs with GATE_UP
    scale_ptr, zero_ptr, factor_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr, M, outputs,
    memory,  # addresses of all ranks' peer buffers, where PUSH
    use_counts_ptr, K: tl.constexpr, SCALE_COLUMNS: tl.constexpr, CODES: tl.constexpr, ZEROS: tl.constexpr,
    FACTORS: tl.constexpr, LIFT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,  # weight rows a tile; the output has half as many columns when GATE_UP
    BLOCK_K: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, GATE_UP: tl.constexpr,
    BIAS: tl.constexpr,
    PREFETCH: tl.constexpr,  # columns of each part of the tile's weights to prefetch to L2
    PUSH: tl.constexpr,  # also push the result into the peers' buffers
    RANK: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = BLOCK_O // 2 if GATE_UP else BLOCK_O
    steps: tl.constexpr = (K + SPLIT * PARTS * BLOCK_K - 1) // (SPLIT * PARTS * BLOCK_K)
    length: tl.constexpr = steps * PARTS * BLOCK_K
    tile = tl.program_id(0)
    part = tl.program_id(1)
    block_m = tl.program_id(2)
    tile_rows = tl.arange(0, BLOCK_O)
    if GATE_UP:  # tile rows 2j and 2j+1 are gate row j and up row j
        weight_rows = tile * width + tile_rows // 2 + (tile_rows % 2) * outputs
    else:
        weight_rows = tile * width + tile_rows
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if PDL:
        if PREFETCH > 0:
            lines: tl.constexpr = PREFETCH // 256  # of 128 bytes
            ahead = tl.arange(0, PARTS * lines)
            columns = part * length + ahead // lines * (steps * BLOCK_K) + ahead % lines * 256
            prefetch_to_l2(weight_ptr + weight_rows.to(tl.int64)[:, None] * (K // 4) + (columns // 4)[None, :])
        gdc_wait()
        gdc_launch_dependents()
    use_counts = 0
    if PUSH:
        use_counts = load_use_counts(use_counts_ptr, rows, M)  # early, so that it has arrived when the tile is done
    acc = four_bit_sums(
        x_ptr + rows.to(tl.int64) * K, rows < M, weight_ptr, scale_ptr, zero_ptr, factor_ptr, weight_rows,
        part * (PARTS * steps), K, steps, length * SPLIT == K, SCALE_COLUMNS, CODES, ZEROS, FACTORS, LIFT, BLOCK_K,
        PARTS, STAGES,
    )  # fmt: skip
    last = True
    if SPLIT > 1:
        tiles = tl.num_programs(0) * tl.num_programs(2)
        here = block_m * tl.num_programs(0) + tile
        last, acc = sum_of_parts(acc, part, here, tiles, partial_ptr, counter_ptr, SPLIT)
    if last:
        outs = tile * width + tl.arange(0, width)
        store_rows(
            tl.trans(acc), rows, outs, out_ptr, bias_ptr, M, outputs, use_counts, memory, GATE_UP, BIAS, PUSH, RANK,
            WORLD, ROWS, ROW_BYTES,
        )  # fmt: skip


def fits(form: WeightFormat, inner: int, block_k: int) -> bool:
    """Whether steps of ``block_k`` columns have whole groups of a matrix, or groups of int4 whole steps."""
    columns = form.block[1] or inner if form.block else 0
    narrow = columns >= 16 and columns & (columns - 1) == 0 and columns <= block_k
    return inner % 4 == 0 and (narrow or (form.code == "int4" and (columns % block_k == 0 or columns == inner)))


def memory_of(weight: Weight) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, zeros, factors, as the kernels take them."""
    words = weight.data.view(torch.int16)
    scale, zero, factor = (
        words if one is None else readable(one) for one in (weight.scale, weight.zero, weight.factor)
    )
    return words, scale, zero, factor


def constants_of(weight: Weight, dtype: torch.dtype) -> dict[str, Any]:
    """What the kernels know of a format, for activations of ``dtype``."""
    form = weight.format
    assert form.block is not None
    codes = {torch.float8_e4m3fn: 2, torch.uint8: 3}.get(form.scale_dtype, 1)
    return {
        "SCALE_COLUMNS": form.block[1] or weight.inner,
        "CODES": codes,
        "ZEROS": weight.zero is not None,
        "FACTORS": weight.factor is not None,
        "LIFT": _LIFT.get((codes, dtype), 1.0),
    }


def shared_bytes(block_m: int, block_o: int, columns: int, stages: int) -> int:
    """About what a program needs whose step takes so many columns; a copy of x is split into its four places."""
    return stages * columns * (block_m * 2 + block_o // 2) + columns * block_m * 2


def workspace_floats(rows: int, weight_rows: int, block_m: int, split: int) -> int:
    """Floats of workspace that a launch needs."""
    return 0 if split == 1 else split * weight_rows * triton.cdiv(rows, block_m) * block_m


def four_bits(
    x_MK: Tensor, weight: Weight, partial: Tensor, counters: Tensor, *, gate_up: int = 0, block_m: int,
    block_o: int, block_k: int, parts: int, split: int, stages: int, warps: int, prefetch: int,
    buffers: PeerBuffers | None = None, pdl: bool,
) -> Tensor:  # fmt: skip
    """y = x @ W^T + bias [M, O], of 16-bit dtype, with SiLU-mul behind where asked (then [M, O / 2]).

    The weight ``fits``, and ``block_o`` divides its rows. With several ``parts`` there are as many warps. ``partial``
    float32 holds workspace_floats(...) at least, ``counters`` int32, one a tile, is zero and is left zero; both are for
    one stream.
    """
    rows, inner = x_MK.shape
    out_width = weight.outputs // (2 if gate_up else 1)
    out_MO = torch.empty(rows, out_width, dtype=x_MK.dtype, device=x_MK.device)
    _four_bits_kernel[weight.outputs // block_o, split, triton.cdiv(rows, block_m)](
        x_MK, *memory_of(weight), x_MK if weight.bias is None else weight.bias, out_MO, partial, counters, rows,
        out_width, K=inner, **constants_of(weight, x_MK.dtype), BLOCK_M=block_m, BLOCK_O=block_o, BLOCK_K=block_k,
        PARTS=parts, SPLIT=split, STAGES=stages, GATE_UP=gate_up, BIAS=weight.bias is not None, PREFETCH=prefetch,
        **push_arguments(buffers), PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out_MO
