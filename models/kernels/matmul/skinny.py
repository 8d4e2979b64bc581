"""x @ W^T for a few to a few hundred rows on tensor cores: weights are the tall operand, tokens the narrow one.

Knows: the product W [O, K] times x^T [K, M], with split K so that every multiprocessor streams weights.
Does not know: when it is the best choice (choice_table.py).

The split is deterministic: partial sums go to a workspace, and the last program of a tile (found by a counter) adds
them in split order, so the result does not depend on which program is last. The counter returns to zero, so a captured
graph can be replayed. Weights are prefetched to L2 before ``gdc_wait``. A ``late`` launch lets the next one start when
its own weights are read: what that one prefetches then comes while this one ends, and not beside its weights.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.dependent_launch import prefetch_to_l2
from models.kernels.matmul.codes import as_float
from models.kernels.matmul.epilogue import store_rows
from parallel.comm.matmul_push_triton import load_use_counts
from parallel.comm.peer_buffers import PeerBuffers, push_arguments
from parallel.comm.quantised import Activations, Quantised, memory_of

COUNTERS = 8192  # tiles a launch may have when it splits K


@triton.jit(do_not_specialize_on_alignment=["M"])  # any number of rows runs the code of its bucket
def _skinny_kernel(
    x_ptr,
    x_scale_ptr,  # float32 [K / SCALE_COLUMNS, x_pitch], where NARROW
    x_pitch, residual_ptr, norm_ptr, weight_ptr,
    scale_ptr,  # float32, one a block of SCALE_ROWS x SCALE_COLUMNS weights
    bias_ptr, out_ptr, residual_out_ptr, partial_ptr,
    squares_ptr,  # float32 [SPLIT, tiles, BLOCK_M]
    counter_ptr, eps, M, outputs,
    memory,  # addresses of all ranks' peer buffers, where PUSH
    use_counts_ptr,
    K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,  # weight rows a tile; the output has half as many columns when GATE_UP
    BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,  # 0: weights have no scales
    SCALE_COLUMNS: tl.constexpr,  # a multiple of BLOCK_K
    NARROW: tl.constexpr,  # activations are codes, too, with a scale for each row and SCALE_COLUMNS
    NORM: tl.constexpr, ADD: tl.constexpr, GATE_UP: tl.constexpr, BIAS: tl.constexpr,
    PREFETCH: tl.constexpr,  # columns of the tile's weights to prefetch to L2
    LATE: tl.constexpr,  # the next launch may start behind the last weights, not with the first ones
    PUSH: tl.constexpr,  # also push the result into the peers' buffers
    RANK: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = BLOCK_O // 2 if GATE_UP else BLOCK_O
    steps: tl.constexpr = K // BLOCK_K // SPLIT
    tile = tl.program_id(0)
    part = tl.program_id(1)
    block_m = tl.program_id(2)
    tile_rows = tl.arange(0, BLOCK_O)
    if GATE_UP:  # tile rows 2j and 2j+1 are gate row j and up row j
        weight_rows = tile * width + tile_rows // 2 + (tile_rows % 2) * outputs
    else:
        weight_rows = tile * width + tile_rows
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_K)
    first = part * steps * BLOCK_K
    weight_row_ptrs = weight_ptr + weight_rows.to(tl.int64)[:, None] * K + first
    weights = weight_row_ptrs + cols[None, :]
    inputs = rows.to(tl.int64)[:, None] * K + first + cols[None, :]
    blocked: tl.constexpr = SCALE_ROWS > 0 and SCALE_COLUMNS < K
    if blocked:
        scales = scale_ptr + weight_rows // SCALE_ROWS * tl.cdiv(K, SCALE_COLUMNS)
    row_mask = (rows < M)[:, None]
    if PDL:
        if PREFETCH > 0:
            line: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
            lines = tl.arange(0, PREFETCH // line) * line
            prefetch_to_l2(weight_row_ptrs + lines[None, :])
        gdc_wait()
        if not LATE:
            gdc_launch_dependents()
    use_counts = 0
    if PUSH:
        use_counts = load_use_counts(use_counts_ptr, rows, M)  # early, so that it has arrived when the tile is done
    acc = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        w = tl.load(weights + step * BLOCK_K, eviction_policy="evict_first")
        x = tl.load(x_ptr + inputs + step * BLOCK_K, mask=row_mask, other=0.0)
        if ADD:
            y = tl.load(residual_ptr + inputs + step * BLOCK_K, mask=row_mask, other=0.0)
            x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
            tl.store(residual_out_ptr + inputs + step * BLOCK_K, x, mask=row_mask & (tile == 0))
        if NORM:  # the rows' scale is applied to the finished sums
            h = x.to(tl.float32)
            squares += tl.sum(h * h, 1)
            x = (h * tl.load(norm_ptr + first + step * BLOCK_K + cols).to(tl.float32)[None, :]).to(x.dtype)
        if SCALE_ROWS == 0:
            acc = tl.dot(w, tl.trans(x), acc)
        else:
            factor = tl.full((1, 1), 1.0, tl.float32)
            if blocked:
                factor = tl.load(scales + (first + step * BLOCK_K) // SCALE_COLUMNS)[:, None]
            if NARROW:
                group = (first + step * BLOCK_K) // SCALE_COLUMNS
                x_scale = tl.load(x_scale_ptr + group * x_pitch + rows, mask=rows < M, other=0.0)
                acc += tl.dot(w, tl.trans(x)) * (factor * x_scale[None, :])
            else:
                acc += tl.dot(as_float(w).to(x.dtype), tl.trans(x)) * factor
    if PDL and LATE:
        gdc_launch_dependents()

    last = True
    if SPLIT > 1:
        tiles = tl.num_programs(0) * tl.num_programs(2)
        here = block_m * tl.num_programs(0) + tile
        within = tile_rows[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        area: tl.constexpr = BLOCK_O * BLOCK_M
        tl.store(partial_ptr + (part * tiles + here).to(tl.int64) * area + within, acc)
        if NORM:
            tl.store(squares_ptr + (part * tiles + here) * BLOCK_M + tl.arange(0, BLOCK_M), squares)
        tl.debug_barrier()  # all threads have stored their partial sums before one counts them
        last = tl.atomic_add(counter_ptr + here, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if last:
            acc = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
            for other in tl.static_range(SPLIT):
                where = (other * tiles + here).to(tl.int64) * area + within
                acc += tl.load(partial_ptr + where, cache_modifier=".cg")
            if NORM:
                squares = tl.zeros((BLOCK_M,), tl.float32)
                for other in tl.static_range(SPLIT):
                    theirs = squares_ptr + (other * tiles + here) * BLOCK_M + tl.arange(0, BLOCK_M)
                    squares += tl.load(theirs, cache_modifier=".cg")
            tl.store(counter_ptr + here, 0)
    if last:
        outs = tile * width + tl.arange(0, width)
        result = tl.trans(acc)
        if SCALE_ROWS > 0 and SCALE_COLUMNS == K:
            result *= tl.load(scale_ptr + weight_rows // SCALE_ROWS)[None, :]
        if NORM:
            result = result * tl.rsqrt(squares / K + eps)[:, None]
        store_rows(
            result, rows, outs, out_ptr, bias_ptr, M, outputs, use_counts, memory, GATE_UP, BIAS, PUSH, RANK, WORLD,
            ROWS, ROW_BYTES,
        )  # fmt: skip


def workspace_floats(rows: int, weight_rows: int, block_m: int, block_o: int, split: int) -> int:
    """Floats of workspace that a launch needs."""
    return 0 if split == 1 else split * (weight_rows + weight_rows // block_o) * triton.cdiv(rows, block_m) * block_m


def skinny(
    x_MK: Activations, weight_OK: Tensor, bias_O: Tensor | None, partial: Tensor, counters: Tensor, *,
    scale: Tensor | None = None, block: tuple[int, int] = (0, 0), norm_K: Tensor | None = None, eps: float = 0.0,
    residual_MK: Tensor | None = None, gate_up: int = 0, block_m: int, block_o: int, block_k: int, split: int,
    stages: int, warps: int, prefetch: int, late: bool = False, buffers: PeerBuffers | None = None, pdl: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, residual') as gemv.py's ``gemv``: y = x @ W^T + bias [M, O] with, where given, rms_norm(x + residual) in
    front and SiLU-mul behind; residual' is x or, with a residual, a fresh tensor.

    ``block_o`` must divide the weight's rows, ``block_k * split`` its columns. ``partial`` float32 holds
    workspace_floats(...) at least, ``counters`` int32 [COUNTERS] is zero and is left zero; both are for one stream.
    ``scale`` float32: of 8-bit weights, one a ``block`` of rows and columns, whose columns are a multiple of
    ``block_k`` or all. x may be codes then, without norm and residual, with scales of as many columns.
    """
    rows, inner = x_MK.shape
    weight_rows = weight_OK.shape[0]
    out_width = weight_rows // (2 if gate_up else 1)
    x, *x_scale = memory_of(x_MK)
    out_MO = torch.empty(rows, out_width, dtype=x_MK.dtype, device=x.device)
    residual_out_MK = x if residual_MK is None else torch.empty_like(residual_MK)
    grid = (weight_rows // block_o, split, triton.cdiv(rows, block_m))
    _skinny_kernel[grid](
        x, *x_scale, x if residual_MK is None else residual_MK, x if norm_K is None else norm_K, weight_OK,
        weight_OK if scale is None else scale, weight_OK if bias_O is None else bias_O, out_MO, residual_out_MK,
        partial, partial[split * weight_rows * grid[2] * block_m :] if split > 1 else partial, counters, eps, rows,
        out_width,
        K=inner, BLOCK_M=block_m, BLOCK_O=block_o, BLOCK_K=block_k, SPLIT=split, STAGES=stages, SCALE_ROWS=block[0],
        SCALE_COLUMNS=block[1] or inner, NARROW=isinstance(x_MK, Quantised), NORM=norm_K is not None,
        ADD=residual_MK is not None, GATE_UP=gate_up, BIAS=bias_O is not None, PREFETCH=prefetch, LATE=late,
        **push_arguments(buffers),
        PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out_MO, residual_out_MK
