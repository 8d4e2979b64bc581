"""x @ W^T for one to four rows: a GEMV that streams weights, with RMSNorm fused in front and SiLU-mul behind.

Knows: the arithmetic of one to four activation rows against a row-major weight [O, K].
Does not know: when it is the best choice (choice_table.py).

A program owns a few rows of W and the whole of K, so programs need no reduction between them. Before ``gdc_wait`` it
loads its first weights and prefetches more to L2: weights are constant, so memory works while the predecessor drains.
RMSNorm needs no pass of its own: sum(h^2) is accumulated beside the product and scales the finished sums.
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


@triton.jit
def _gemv_kernel(
    x_ptr, residual_ptr, norm_ptr, weight_ptr,
    scale_ptr,  # float32, one a block of SCALE_ROWS x SCALE_COLUMNS weights
    bias_ptr, out_ptr, residual_out_ptr,
    hidden_ptr,  # what is multiplied, with KEEP: of one chunk
    eps, M,
    outputs,  # rows of the output; a gate-up weight has 2 * outputs rows
    memory,  # addresses of all ranks' peer buffers, where PUSH
    use_counts_ptr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,  # a power of two; the last chunk of K may be shorter
    BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr,
    SCALE_ROWS: tl.constexpr,  # 0: weights have no scales
    SCALE_COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,  # neighbouring products that a thread sums at once, of one scale
    NORM: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr, GATE_UP: tl.constexpr, BIAS: tl.constexpr,
    PREFETCH: tl.constexpr,  # columns after the first chunk to prefetch, a power of two or 0
    PREFETCH_PROGRAMS: tl.constexpr,  # later programs start after the predecessor has ended
    PUSH: tl.constexpr,  # also push the result into the peers' buffers
    RANK: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunks: tl.constexpr = (K + CHUNK - 1) // CHUNK
    pid = tl.program_id(0)
    outs = pid * BLOCK_O + tl.arange(0, BLOCK_O)
    if GATE_UP:  # tile rows 2j and 2j+1 are gate row j and up row j
        tile = tl.arange(0, 2 * BLOCK_O)
        weight_rows = pid * BLOCK_O + tile // 2 + (tile % 2) * outputs
    else:
        weight_rows = outs
    # All tensors are [rows, weight rows, columns]: one layout needs no exchange between warps.
    cols = tl.arange(0, CHUNK)[None, None, :]
    rows = tl.arange(0, BLOCK_M)
    row_mask = (rows < M)[:, None, None]
    weights = weight_ptr + weight_rows.to(tl.int64)[None, :, None] * K + cols
    inputs = rows.to(tl.int64)[:, None, None] * K + cols

    blocked: tl.constexpr = SCALE_ROWS > 0 and SCALE_COLUMNS < K
    ragged: tl.constexpr = K % CHUNK > 0
    here = cols < K if ragged and chunks == 1 else tl.full((1, 1, 1), True, tl.int1)
    w = tl.load(weights, mask=here, other=0.0, eviction_policy="evict_first")
    if blocked:
        scale_rows = scale_ptr + (weight_rows // SCALE_ROWS)[None, :, None] * tl.cdiv(K, SCALE_COLUMNS)
        vectors = (tl.arange(0, CHUNK // VECTOR) * VECTOR)[None, None, :]
        w_scale = tl.load(scale_rows + vectors // SCALE_COLUMNS)  # early: most others are in the same lines
    if NORM:
        scale = tl.load(norm_ptr + cols, mask=here, other=0.0)
    if PDL:
        if PREFETCH > 0 and pid < PREFETCH_PROGRAMS:
            line: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
            lines = CHUNK + tl.arange(0, PREFETCH // line) * line
            prefetch_to_l2(weight_ptr + weight_rows.to(tl.int64)[:, None] * K + lines[None, :])
        gdc_wait()
        gdc_launch_dependents()
    use_counts = 0
    if PUSH:
        use_counts = load_use_counts(use_counts_ptr, rows, M)  # early, so that it has arrived when the tile is done
    # A thread sums neighbouring products at once: a fraction of the registers of a whole tile of sums.
    acc = tl.zeros((BLOCK_M, weight_rows.shape[0], CHUNK // VECTOR), tl.float32)
    squares = tl.zeros((BLOCK_M, 1, CHUNK // VECTOR), tl.float32)
    for chunk in tl.static_range(chunks):
        mask = row_mask & here
        if chunk + 1 < chunks:
            if ragged and chunk + 2 == chunks:
                here = cols < K - (chunk + 1) * CHUNK
            w_next = tl.load(weights + (chunk + 1) * CHUNK, mask=here, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + inputs + chunk * CHUNK, mask=mask, other=0.0)
        if ADD:
            y = tl.load(residual_ptr + inputs + chunk * CHUNK, mask=mask, other=0.0)
            x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
            tl.store(residual_out_ptr + inputs + chunk * CHUNK, x, mask=mask & (pid == chunk))
        h = x.to(tl.float32)
        if NORM:
            squares += tl.sum(tl.reshape(h * h, (BLOCK_M, 1, CHUNK // VECTOR, VECTOR)), 3)
            h = h * scale.to(tl.float32)
        products = h * as_float(w)
        sums = tl.sum(tl.reshape(products, (BLOCK_M, weight_rows.shape[0], CHUNK // VECTOR, VECTOR)), 3)
        if blocked:
            if chunk > 0:
                w_scale = tl.load(scale_rows + (chunk * CHUNK + vectors) // SCALE_COLUMNS)
            sums *= w_scale
        acc += sums
        if chunk + 1 < chunks:
            w = w_next
            if NORM:
                scale = tl.load(norm_ptr + (chunk + 1) * CHUNK + cols, mask=here, other=0.0)
    result = tl.sum(acc, 2)
    if SCALE_ROWS > 0 and SCALE_COLUMNS == K:
        result *= tl.load(scale_ptr + weight_rows // SCALE_ROWS)[None, :]
    if NORM:
        inverse = tl.rsqrt(tl.sum(squares, 2) / K + eps)
        result = result * inverse
        if KEEP:
            hidden = x.to(tl.float32) * inverse[:, :, None] * scale.to(tl.float32)
            tl.store(hidden_ptr + inputs, hidden.to(hidden_ptr.dtype.element_ty), mask=row_mask & here & (pid == 0))
    store_rows(
        result, rows, outs, out_ptr, bias_ptr, M, outputs, use_counts, memory, GATE_UP, BIAS, PUSH, RANK, WORLD, ROWS,
        ROW_BYTES,
    )  # fmt: skip


def gemv(
    x_MK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, *, scale: Tensor | None = None,
    block: tuple[int, int] = (0, 0), norm_K: Tensor | None = None, eps: float = 0.0, residual_MK: Tensor | None = None,
    gate_up: int = 0, block_o: int, chunk: int, warps: int, prefetch: int = 0, first_wave: int = 0,
    buffers: PeerBuffers | None = None, wide: bool = False, hidden_MK: Tensor | None = None, pdl: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, residual'): y = x @ W^T + bias with, where given, rms_norm(x + residual) in front and SiLU-mul behind.

    ``block_o`` must divide the output's width; ``chunk`` is a power of two, which divides the inner width where weights
    have a ``scale``. ``prefetch`` is 0 or a power of two from 64, at most the columns after the first chunk, and only
    the first ``first_wave`` programs prefetch. ``scale`` float32: of 8-bit weights, one a ``block`` of rows and
    columns, whose columns are a multiple of 8 or all. ``wide``: y is float32. residual' is x, or a fresh tensor where a
    residual is given: every program reads all inputs, so none is overwritten. ``hidden_MK`` gets the normed x, where
    K is one chunk.
    """
    rows, inner = x_MK.shape
    out_width = weight_OK.shape[0] // (2 if gate_up else 1)
    out_MO = torch.empty(rows, out_width, dtype=torch.float32 if wide else x_MK.dtype, device=x_MK.device)
    residual_out_MK = x_MK if residual_MK is None else torch.empty_like(x_MK)
    _gemv_kernel[(out_width // block_o,)](
        x_MK, x_MK if residual_MK is None else residual_MK, x_MK if norm_K is None else norm_K, weight_OK,
        weight_OK if scale is None else scale, weight_OK if bias_O is None else bias_O, out_MO, residual_out_MK,
        x_MK if hidden_MK is None else hidden_MK, eps, rows, out_width,
        K=inner, CHUNK=chunk, BLOCK_M=triton.next_power_of_2(rows), BLOCK_O=block_o, SCALE_ROWS=block[0],
        SCALE_COLUMNS=block[1] or inner, VECTOR=16 if scale is not None and (block[1] or inner) % 16 == 0 else 8,
        NORM=norm_K is not None, ADD=residual_MK is not None, KEEP=hidden_MK is not None, GATE_UP=gate_up,
        BIAS=bias_O is not None, PREFETCH=prefetch, PREFETCH_PROGRAMS=first_wave,
        **push_arguments(buffers),
        PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out_MO, residual_out_MK
