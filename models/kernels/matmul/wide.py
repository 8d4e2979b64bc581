"""x @ W^T for up to 256 rows with tiles loaded by the tensor memory accelerator (TMA): sm_90 and later.

Knows: one program keeps all rows and a tile of weight rows that need not be a power of two (192 of 24576 make 128
programs, one wave of an H200's 132 multiprocessors), and may split K. Does not know: when it is the best choice
(choice_table.py).

From 64 rows on, tokens are the tall operand of the tensor cores and weights the narrow one. With fewer rows it is the
other way around, as in skinny.py: padded to 64, tokens would be a quarter to a half of what a program reads. TMA fills
rows beyond the last with zeros. With SiLU-mul behind, a tile holds as many gate rows as up rows, loaded as one TMA box
of three dimensions.

A split is summed as in skinny.py: by the last program of a tile, in split order. Weights are prefetched to L2
before ``gdc_wait``.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from models.kernels.dependent_launch import prefetch_to_l2
from models.kernels.matmul.epilogue import gated_mul
from models.kernels.traits import TALL_ROWS
from parallel.comm.quantised import Activations


@triton.jit
def _prefetch(
    weight_ptr, first, outputs, start,
    K: tl.constexpr, TILE: tl.constexpr, PREFETCH: tl.constexpr, GATE_UP: tl.constexpr,
):  # fmt: skip
    """Prefetches PREFETCH columns from ``start`` of the TILE weight rows behind the output columns from ``first``."""
    tile_rows = tl.arange(0, TILE)
    if GATE_UP:
        tile_rows = tile_rows % (TILE // 2) + tile_rows // (TILE // 2) * outputs
    line: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    lines = start + tl.arange(0, PREFETCH // line) * line
    prefetch_to_l2(weight_ptr + (first + tile_rows).to(tl.int64)[:, None] * K + lines[None, :])


@triton.jit
def _tile(weight_desc, first, k, TILE: tl.constexpr, BLOCK_K: tl.constexpr, GATE_UP: tl.constexpr):
    """Weight rows [TILE, BLOCK_K]; with GATE_UP half of them are gate rows, half up rows."""
    if GATE_UP:
        rows = weight_desc.load([0, first, k]).reshape(TILE, BLOCK_K)
    else:
        rows = weight_desc.load([first, k])
    return rows


@triton.jit
def _sums(BLOCK_M: tl.constexpr, TILE: tl.constexpr, TALL_TOKENS: tl.constexpr):
    """Zeros [BLOCK_M, TILE], or across where weights are the tall operand."""
    if TALL_TOKENS:
        zeros = tl.zeros((BLOCK_M, TILE), tl.float32)
    else:
        zeros = tl.zeros((TILE, BLOCK_M), tl.float32)
    return zeros


@triton.jit
def _add(acc, x, tile, x_scales, rows, M, scales, SCALED: tl.constexpr, TALL_TOKENS: tl.constexpr):
    """``acc`` and the product of tokens [BLOCK_M, BLOCK_K] and weights [TILE, BLOCK_K], in the shape of ``acc``.

    ``SCALED``: of codes; ``x_scales``, ``scales``: where the scales of these columns are, of token 0 and of the
    weight rows (``_scale_rows``).
    """
    if SCALED:
        x_scale = tl.load(x_scales + rows, mask=rows < M, other=0.0)
        scale = tl.load(scales)
        if TALL_TOKENS:
            total = acc + tl.dot(x, tile.T) * (x_scale[:, None] * scale)
        else:
            total = acc + tl.dot(tile, x.T) * (x_scale[None, :] * scale)
    elif TALL_TOKENS:
        total = tl.dot(x, tile.T, acc)
    else:
        total = tl.dot(tile, x.T, acc)
    return total


@triton.jit
def _scale_rows(
    scale_ptr, first, outputs,
    K: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATE_UP: tl.constexpr,
    TALL_TOKENS: tl.constexpr,
    SHARED: tl.constexpr,  # all rows of a tile have one scale: its one address saves a third of the registers
):  # fmt: skip
    """Addresses of the first scale of a tile's weight rows: [TILE] along its axis of the sums, one where SHARED."""
    if SHARED:
        rows = first
    else:
        rows = tl.arange(0, TILE)
        if GATE_UP:
            rows = rows % (TILE // 2) + rows // (TILE // 2) * outputs
        rows = tl.expand_dims(first + rows, 0 if TALL_TOKENS else 1)
    return scale_ptr + rows // ROWS * tl.cdiv(K, COLUMNS)


@triton.jit
def _keep(acc, partial_ptr, part, here, tiles, TILE: tl.constexpr, BLOCK_M: tl.constexpr):
    within = tl.arange(0, BLOCK_M)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    tl.store(partial_ptr + (part * tiles + here).to(tl.int64) * (BLOCK_M * TILE) + within, acc)


@triton.jit
def _total(partial_ptr, here, tiles, TILE: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT: tl.constexpr):
    within = tl.arange(0, BLOCK_M)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    acc = tl.zeros((BLOCK_M, TILE), tl.float32)
    for part in tl.static_range(SPLIT):
        acc += tl.load(
            partial_ptr + (part * tiles + here).to(tl.int64) * (BLOCK_M * TILE) + within, cache_modifier=".cg"
        )
    return acc


@triton.jit
def _finish(
    acc, out_ptr, bias_ptr, first, M, outputs,
    TILE: tl.constexpr, BLOCK_M: tl.constexpr, GATE_UP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Stores the output columns from ``first``."""
    width: tl.constexpr = TILE // 2 if GATE_UP else TILE
    result = acc
    if GATE_UP:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, width)), (0, 2, 1)))
        result = gated_mul(gate, up, GATE_UP)
    outs = first + tl.arange(0, width)
    if BIAS:
        result += tl.load(bias_ptr + outs).to(tl.float32)[None, :]
    rows = tl.arange(0, BLOCK_M)
    where = rows.to(tl.int64)[:, None] * outputs + outs[None, :]
    tl.store(out_ptr + where, result.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None])


@triton.jit(do_not_specialize_on_alignment=["M"])  # any number of rows runs the code of its bucket
def _wide_kernel(
    x_desc,  # boxes of [BLOCK_M, BLOCK_K]
    first_desc,  # boxes of [FIRST, BLOCK_K], or [2, FIRST / 2, BLOCK_K] of [gate | up, outputs, K] when GATE_UP
    rest_desc,  # the same with REST
    x_scale_ptr,  # float32 [K / SCALE_COLUMNS, x_pitch], where SCALE_ROWS
    x_pitch, weight_ptr,
    scale_ptr,  # float32, one a block of SCALE_ROWS x SCALE_COLUMNS weights
    bias_ptr, out_ptr, partial_ptr, counter_ptr, M, outputs,
    K: tl.constexpr, BLOCK_M: tl.constexpr,
    FIRST: tl.constexpr,  # weight rows of a tile's first sums, and of its second ones: both are powers of two, or 0
    REST: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,  # 0: neither operand has scales
    SCALE_COLUMNS: tl.constexpr,  # a multiple of BLOCK_K
    GATE_UP: tl.constexpr, BIAS: tl.constexpr,
    PREFETCH: tl.constexpr,  # columns of the tile's weights to prefetch to L2
    LATE: tl.constexpr,  # as in skinny.py
    TALL_TOKENS: tl.constexpr,  # tokens are the tall operand, and not the weights
    PDL: tl.constexpr,
):  # fmt: skip
    halves: tl.constexpr = 2 if GATE_UP else 1
    tile = tl.program_id(0)
    part = tl.program_id(1)
    first = tile * ((FIRST + REST) // halves)
    second = first + FIRST // halves
    start = part * (K // SPLIT)
    if PDL:
        if PREFETCH > 0:
            _prefetch(weight_ptr, first, outputs, start, K, FIRST, PREFETCH, GATE_UP)
            if REST > 0:
                _prefetch(weight_ptr, second, outputs, start, K, REST, PREFETCH, GATE_UP)
        gdc_wait()
        if not LATE:
            gdc_launch_dependents()
    acc = _sums(BLOCK_M, FIRST, TALL_TOKENS)
    if REST > 0:
        more = _sums(BLOCK_M, REST, TALL_TOKENS)
    scaled: tl.constexpr = SCALE_ROWS > 0
    rows = tl.arange(0, BLOCK_M)
    if scaled:
        shared: tl.constexpr = SCALE_ROWS % FIRST == 0 and REST == 0 and not GATE_UP
        scales = _scale_rows(
            scale_ptr, first, outputs, K, FIRST, SCALE_ROWS, SCALE_COLUMNS, GATE_UP, TALL_TOKENS, shared
        )
        rest_scales = _scale_rows(
            scale_ptr, second, outputs, K, REST or FIRST, SCALE_ROWS, SCALE_COLUMNS, GATE_UP, TALL_TOKENS, False
        )
    else:
        scales, rest_scales = scale_ptr, scale_ptr
    for k in tl.range(start, start + K // SPLIT, BLOCK_K, num_stages=STAGES):
        x = x_desc.load([0, k])
        group = k // SCALE_COLUMNS
        x_scales = x_scale_ptr + group * x_pitch
        tile_rows = _tile(first_desc, first, k, FIRST, BLOCK_K, GATE_UP)
        acc = _add(acc, x, tile_rows, x_scales, rows, M, scales + group, scaled, TALL_TOKENS)
        if REST > 0:
            rest_rows = _tile(rest_desc, second, k, REST, BLOCK_K, GATE_UP)
            more = _add(more, x, rest_rows, x_scales, rows, M, rest_scales + group, scaled, TALL_TOKENS)
    if PDL and LATE:
        gdc_launch_dependents()
    if not TALL_TOKENS:
        acc = tl.trans(acc)
        if REST > 0:
            more = tl.trans(more)

    last = True
    if SPLIT > 1:
        tiles = tl.num_programs(0)
        rest_ptr = partial_ptr + SPLIT * tiles * (BLOCK_M * FIRST)
        _keep(acc, partial_ptr, part, tile, tiles, FIRST, BLOCK_M)
        if REST > 0:
            _keep(more, rest_ptr, part, tile, tiles, REST, BLOCK_M)
        tl.debug_barrier()  # all threads have stored their partial sums before one counts them
        last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if last:
            acc = _total(partial_ptr, tile, tiles, FIRST, BLOCK_M, SPLIT)
            if REST > 0:
                more = _total(rest_ptr, tile, tiles, REST, BLOCK_M, SPLIT)
            tl.store(counter_ptr + tile, 0)
    if last:
        _finish(acc, out_ptr, bias_ptr, first, M, outputs, FIRST, BLOCK_M, GATE_UP, BIAS)
        if REST > 0:
            _finish(more, out_ptr, bias_ptr, second, M, outputs, REST, BLOCK_M, GATE_UP, BIAS)


def sums_of(block_o: int) -> tuple[int, int]:
    """A tile's weight rows as (FIRST, REST): a power of two, and half of it or 0. Raises ValueError for other sizes."""
    first = 1 << (block_o.bit_length() - 1)
    if block_o not in (first, first + first // 2):
        raise ValueError(f"a tile of {block_o} weight rows is neither a power of two nor one and a half of it")
    return first, block_o - first


def workspace_floats(weight_rows: int, block_m: int, split: int) -> int:
    """Floats of workspace that a launch needs."""
    return 0 if split == 1 else split * weight_rows * block_m


def wide(
    x_MK: Activations, weight_OK: Tensor, bias_O: Tensor | None, partial: Tensor, counters: Tensor, *,
    scale: Tensor | None = None, block: tuple[int, int] = (0, 0), gate_up: int = 0, block_m: int, block_o: int,
    block_k: int, split: int, stages: int, warps: int, prefetch: int, late: bool = False, pdl: bool,
) -> Tensor:  # fmt: skip
    """y = x @ W^T + bias [M, O], of 16-bit dtype, with SiLU-mul behind where asked (then [M, O / 2]); M <= ``block_m``.

    ``block_o`` (see ``sums_of``) must divide the weight's rows, ``block_k * split`` its columns. ``partial`` float32
    holds workspace_floats(...) at least, ``counters`` int32, one a tile, is zero and is left zero; both are for one
    stream. Where x and weights are 8-bit codes: ``scale`` float32, one a ``block`` of rows and columns, which are a
    multiple of ``block_k`` or all; x has scales of as many columns.
    """
    rows, inner = x_MK.shape
    weight_rows = weight_OK.shape[0]
    first, rest = sums_of(block_o)
    out_width = weight_rows // (2 if gate_up else 1)
    out_MO = torch.empty(rows, out_width, dtype=x_MK.dtype, device=weight_OK.device)
    x, *x_scale = (x_MK, weight_OK, 0) if isinstance(x_MK, Tensor) else (x_MK.codes[:rows], *x_MK.memory[1:])

    def boxes(size: int) -> TensorDescriptor:
        if gate_up:
            return TensorDescriptor.from_tensor(weight_OK.view(2, out_width, inner), [2, size // 2, block_k])
        return TensorDescriptor.from_tensor(weight_OK, [size, block_k])

    _wide_kernel[weight_rows // block_o, split](
        TensorDescriptor.from_tensor(x, [block_m, block_k]), boxes(first), boxes(rest or first), *x_scale, weight_OK,
        weight_OK if scale is None else scale, weight_OK if bias_O is None else bias_O, out_MO, partial, counters, rows,
        out_width,
        K=inner, BLOCK_M=block_m, FIRST=first, REST=rest, BLOCK_K=block_k, SPLIT=split, STAGES=stages,
        SCALE_ROWS=block[0], SCALE_COLUMNS=block[1] or inner, GATE_UP=gate_up, BIAS=bias_O is not None,
        PREFETCH=prefetch, LATE=late, TALL_TOKENS=block_m >= TALL_ROWS, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out_MO
