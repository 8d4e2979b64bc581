"""Products of up to eight rows with four-bit weights, in registers.

Knows: which thread holds which codes, numbers and sums of ``mma.sync``'s m16n8k16, and x [M, K] @ W^T of these.
Does not know: how codes become numbers (four_bits.py), experts (experts/streamed_four_bits.py).

Every tensor has one element a thread. Weights are the tall operand: a fragment is 16 of their rows, and 8 tokens.
Thread 4g + t of a warp holds rows g and g + 8 of the weights, and token g. A sum does not depend on the order of its
columns, so a step gives each thread 32 neighbouring columns of its rows, which one 16-byte load brings, and takes the
columns of x to match. No code changes its thread, and nothing passes through shared memory until each warp's sums are
done. Warps, and with SPLIT programs, share K: many loads are under way at once. Parts are added in order.
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

from models.kernels.matmul.epilogue import store_rows, sum_of_parts
from models.kernels.matmul.four_bits import INT4, constants_of, factors_of, memory_of, pairs_of
from parallel.comm.matmul_push_triton import load_use_counts
from parallel.comm.peer_buffers import PeerBuffers, push_arguments
from parallel.layers.weight import Weight, WeightFormat

STEP = 128  # columns of a warp's step
_LOAD = tl.constexpr("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {$0,$1,$2,$3}, [$4];")
_LOAD_WHERE = tl.constexpr("""{
    .reg .pred p;
    setp.ne.b32 p, $5, 0;
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
    @p ld.global.v4.b32 {$0,$1,$2,$3}, [$4];
}""")
_PRODUCT = """mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32
    {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};"""
_PRODUCT_BFLOAT16, _PRODUCT_FLOAT16 = (tl.constexpr(_PRODUCT.format(kind)) for kind in ("bf16", "f16"))
_LOW, _HIGH = tl.constexpr("prmt.b32 $0, $1, $2, 0x5410;"), tl.constexpr("prmt.b32 $0, $1, $2, 0x7632;")


@triton.constexpr_function
def scaled_after(codes, scale_columns, inner):
    """Whether the sums of 128 columns are scaled, not their numbers."""
    return codes == INT4.value and (scale_columns % STEP == 0 or scale_columns >= inner)


@triton.constexpr_function
def groups_of(scale_columns):
    """Groups of a thread's columns of a step."""
    return 2 if scale_columns < 32 else 1


@triton.jit
def _load(address):
    a, b, c, d = tl.inline_asm_elementwise(_LOAD, "=r,=r,=r,=r,l", [address], (tl.int32,) * 4, is_pure=False, pack=1)
    return (a, b, c, d)


@triton.jit
def _load_where(address, there):
    """16 bytes, zeros where not ``there``."""
    return tl.inline_asm_elementwise(
        _LOAD_WHERE, "=r,=r,=r,=r,l,r", [address, there.to(tl.int32)], (tl.int32,) * 4, is_pure=False, pack=1
    )


@triton.jit
def _pairs(words):
    """Of 16-bit numbers (0, 1), (2, 3), (4, 5), (6, 7): (0, 4), (1, 5), (2, 6), (3, 7)."""
    a = tl.inline_asm_elementwise(_LOW, "=r,r,r", [words[0], words[2]], tl.int32, is_pure=True, pack=1)
    b = tl.inline_asm_elementwise(_HIGH, "=r,r,r", [words[0], words[2]], tl.int32, is_pure=True, pack=1)
    c = tl.inline_asm_elementwise(_LOW, "=r,r,r", [words[1], words[3]], tl.int32, is_pure=True, pack=1)
    d = tl.inline_asm_elementwise(_HIGH, "=r,r,r", [words[1], words[3]], tl.int32, is_pure=True, pack=1)
    return (a, b, c, d)


@triton.jit
def _fma(a, b, c, dtype: tl.constexpr):
    """a * b + c of pairs of ``dtype``."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;" if dtype == tl.bfloat16 else "fma.rn.f16x2 $0, $1, $2, $3;",
        "=r,r,r,r", [a, b, c], tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _twice(number):
    """A pair of the same 16-bit float."""
    bits = number.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


@triton.jit
def _product(low, high, x, sums, dtype: tl.constexpr):
    """``sums`` and the products of eight columns: of rows g and g + 8, ``low`` and ``high``."""
    constraints: tl.constexpr = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    for half in tl.static_range(2):
        a, b, c, d = tl.inline_asm_elementwise(
            _PRODUCT_BFLOAT16 if dtype == tl.bfloat16 else _PRODUCT_FLOAT16, constraints,
            [low[2 * half], high[2 * half], low[2 * half + 1], high[2 * half + 1], x[2 * half], x[2 * half + 1],
             sums[0], sums[1], sums[2], sums[3]],
            (tl.float32,) * 4, is_pure=True, pack=1,
        )  # fmt: skip
        sums = (a, b, c, d)
    return sums


@triton.jit
def with_codes(
    codes, scales, zeros, weight_ptr, scale_ptr, zero_ptr, rows, column, K: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    ZEROS: tl.constexpr,
):  # fmt: skip
    """Appends 32 columns of both ``rows``, from ``column`` on: for each row 4 words, and 1 or 2 scales and zeros."""
    groups: tl.constexpr = (K + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    for k in tl.static_range(2):
        row = rows[k].to(tl.int64)
        codes = codes + _load(weight_ptr.to(tl.int64) + row * (K // 2) + column // 2)
        for part in tl.static_range(groups_of(SCALE_COLUMNS)):
            group = row * groups + column // SCALE_COLUMNS + part
            scales = scales + (tl.load(scale_ptr + group),)
            if ZEROS:
                zeros = zeros + (tl.load(zero_ptr + group),)
    return codes, scales, zeros


@triton.jit
def pairs_of_word(
    word, scale, zero, CODES: tl.constexpr, ZEROS: tl.constexpr, AFTER: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Numbers of eight columns, in pairs j and j + 4; times their scale, unless sums are scaled AFTER."""
    offset: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0  # of int4
    one, minus_zero = _twice(tl.full(word.shape, 1.0, dtype)), _twice(tl.full(word.shape, -0.0, dtype))
    found = ()
    four = pairs_of(word, CODES, dtype)
    for place in tl.static_range(4):
        pair = four[place]
        if ZEROS:
            pair = _fma(pair, one, _twice(-(zero.to(dtype) + offset)), dtype)
        elif CODES == INT4:
            pair = _fma(pair, one, _twice(tl.full(word.shape, -(offset + 8.0), dtype)), dtype)
        if not AFTER:
            pair = _fma(pair, _twice(factors_of(scale, CODES, dtype)), minus_zero, dtype)
        found = found + (pair,)
    return found


@triton.jit
def fragment_sums(
    x_rows,  # pointers to the tokens' rows of x
    there,  # whether they exist
    weight_ptr,  # [rows, K / 2] bytes
    scale_ptr,  # [rows, groups]
    zero_ptr,
    factor_ptr,  # float32 [rows]
    rows,  # (g, g + 8) of the weights
    first,  # columns of the first step
    STRIDE: tl.constexpr,  # columns from one step to the next
    STEPS: tl.constexpr,
    AHEAD: tl.constexpr,  # steps whose codes are loaded before they are needed
    WHOLE: tl.constexpr,  # all of these columns are below K
    K: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, CODES: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr, LIFT: tl.constexpr,
    PDL: tl.constexpr,  # wait for the predecessor before x is read
):  # fmt: skip
    """Sums of (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1), row by token, over this thread's warp's columns."""
    dtype: tl.constexpr = x_rows.dtype.element_ty
    AFTER: tl.constexpr = scaled_after(CODES, SCALE_COLUMNS, K)
    GROUPS: tl.constexpr = groups_of(SCALE_COLUMNS)
    nothing = tl.zeros(first.shape, tl.float32)
    codes, scales, zeros, sums = (), (), (), (nothing, nothing, nothing, nothing)
    for step in tl.static_range(STEPS + AHEAD):
        if step < STEPS:
            column = first + step * STRIDE
            if not WHOLE:
                column = tl.minimum(column, K - 32)  # of other columns x is zero
            codes, scales, zeros = with_codes(
                codes, scales, zeros, weight_ptr, scale_ptr, zero_ptr, rows, column, K, SCALE_COLUMNS, ZEROS
            )
        if PDL and step == AHEAD - 1:
            gdc_wait()
            gdc_launch_dependents()
        if step >= AHEAD:
            column = first + (step - AHEAD) * STRIDE
            new = (nothing, nothing, nothing, nothing) if AFTER else sums
            for word in tl.static_range(4):  # of eight columns
                numbers = ()
                for k in tl.static_range(2):
                    numbers = numbers + pairs_of_word(
                        codes[4 * k + word], scales[GROUPS * k + word * GROUPS // 4],
                        zeros[GROUPS * k + word * GROUPS // 4] if ZEROS else 0, CODES, ZEROS, AFTER, dtype,
                    )  # fmt: skip
                asked = there if WHOLE else there & (column < K)
                x = _pairs(_load_where((x_rows + column + 8 * word).to(tl.int64), asked))
                new = _product(numbers[:4], numbers[4:], x, new, dtype)
            if AFTER:
                low, high = scales[0].to(tl.float32), scales[1].to(tl.float32)
                sums = (
                    sums[0] + new[0] * low, sums[1] + new[1] * low, sums[2] + new[2] * high, sums[3] + new[3] * high
                )  # fmt: skip
            else:
                sums = new
            codes, scales = codes[8:], scales[2 * GROUPS :]
            if ZEROS:
                zeros = zeros[2 * GROUPS :]
    if FACTORS:
        low, high = tl.load(factor_ptr + rows[0]) * LIFT, tl.load(factor_ptr + rows[1]) * LIFT
    else:
        low, high = nothing + LIFT, nothing + LIFT
    return (sums[0] * low, sums[1] * low, sums[2] * high, sums[3] * high)


@triton.jit
def tile_of(sums, WARPS: tl.constexpr):
    """[8 tokens, 16 rows] of four sums a thread: those of all warps, in order."""
    sums = tl.join(tl.join(sums[0], sums[1]), tl.join(sums[2], sums[3]))  # [threads, token, half]
    sums = tl.sum(tl.reshape(sums, (WARPS, 8, 4, 2, 2)), 0)
    return tl.reshape(tl.permute(sums, (1, 2, 3, 0)), (8, 16))


@triton.jit(do_not_specialize=["M"])  # any number of rows runs the same code
def _fragments_kernel(
    x_ptr,
    weight_ptr,  # [outputs, K / 2] bytes, or twice the outputs with GATE_UP
    scale_ptr, zero_ptr, factor_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr, M, outputs,
    memory,  # addresses of all ranks' peer buffers, where PUSH
    use_counts_ptr, K: tl.constexpr, SCALE_COLUMNS: tl.constexpr, CODES: tl.constexpr, ZEROS: tl.constexpr,
    FACTORS: tl.constexpr, LIFT: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr, WARPS: tl.constexpr,
    GATE_UP: tl.constexpr, BIAS: tl.constexpr,
    PUSH: tl.constexpr,  # also push the result into the peers' buffers
    RANK: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    stride: tl.constexpr = SPLIT * WARPS * 128
    steps: tl.constexpr = (K + stride - 1) // stride
    width: tl.constexpr = 8 if GATE_UP else 16  # columns of the output
    tile, part = tl.program_id(0), tl.program_id(1)
    thread = tl.arange(0, 32 * WARPS)
    g, t = thread % 32 // 4, thread % 4
    if GATE_UP:  # tile rows 2j and 2j+1 are gate row j and up row j
        low = tile * 8 + g // 2 + g % 2 * outputs
        high = low + 4
    else:
        low = tile * 16 + g
        high = low + 8
    sums = fragment_sums(
        x_ptr + g.to(tl.int64) * K, g < M, weight_ptr, scale_ptr, zero_ptr, factor_ptr, (low, high),
        (part * (steps * WARPS) + thread // 32) * 128 + t * 32, WARPS * 128, steps, AHEAD, steps * stride == K, K,
        SCALE_COLUMNS, CODES, ZEROS, FACTORS, LIFT, PDL,
    )  # fmt: skip
    rows, outs = tl.arange(0, 8), tile * width + tl.arange(0, width)
    use_counts = 0
    if PUSH:
        use_counts = load_use_counts(use_counts_ptr, rows, M)
    acc = tile_of(sums, WARPS)
    last = True
    if SPLIT > 1:
        last, acc = sum_of_parts(acc, part, tile, tl.num_programs(0), partial_ptr, counter_ptr, SPLIT)
    if last:
        store_rows(
            acc, rows, outs, out_ptr, bias_ptr, M, outputs, use_counts, memory, GATE_UP, BIAS, PUSH, RANK, WORLD, ROWS,
            ROW_BYTES,
        )  # fmt: skip


def fits(form: WeightFormat, outputs: int, inner: int) -> bool:
    """Whether 32 columns of a row are 16 bytes of codes of one group, or of two, and rows whole tiles."""
    columns = form.block[1] or inner if form.block else 0
    return outputs % 16 == 0 and inner % 32 == 0 and (columns == 16 or (columns > 0 and columns % 32 == 0))


def workspace_floats(outputs: int, split: int) -> int:
    """Floats of workspace that a launch needs, of a weight with so many rows."""
    return 0 if split == 1 else split * outputs * 8


def fragments(
    x_MK: Tensor, weight: Weight, partial: Tensor, counters: Tensor, *, gate_up: int = 0, split: int, ahead: int,
    warps: int, buffers: PeerBuffers | None = None, pdl: bool,
) -> Tensor:  # fmt: skip
    """y = x @ W^T + bias [M, O] of at most 8 rows of 16-bit dtype, with SiLU-mul behind where asked (then [M, O / 2]).

    The weight ``fits``. ``ahead`` is at most the steps of a warp. ``partial`` float32 holds workspace_floats(...) at
    least, ``counters`` int32, one for 16 rows of the weight, is zero and is left zero; both are for one stream.
    """
    rows, inner = x_MK.shape
    out_width = weight.outputs // (2 if gate_up else 1)
    out_MO = torch.empty(rows, out_width, dtype=x_MK.dtype, device=x_MK.device)
    _fragments_kernel[weight.outputs // 16, split](
        x_MK, *memory_of(weight), x_MK if weight.bias is None else weight.bias, out_MO, partial, counters, rows,
        out_width, K=inner, **constants_of(weight, x_MK.dtype), SPLIT=split, AHEAD=ahead, WARPS=warps, GATE_UP=gate_up,
        BIAS=weight.bias is not None, **push_arguments(buffers), PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out_MO
