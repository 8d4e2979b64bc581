"""The end of a fused matrix product on one tile of sums: SiLU-mul or GELU-mul, bias, push and store.

Knows: what follows the sums in gemv.py, skinny.py and the kernels of four-bit weights, of which programs may share K.
Does not know: how sums are computed, or normed.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from parallel.comm.matmul_push_triton import push


@triton.jit
def gelu_mul(gate, up):
    """GELU's approximation by tanh: 0.5 (1 + tanh(z)) is sigmoid(2 z)."""
    return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up


@triton.jit
def gated_mul(gate, up, GATE_UP: tl.constexpr):
    """SiLU-mul where ``gate_up`` of the call is 1 or True, GELU-mul where it is 2."""
    if GATE_UP == 2:
        result = gelu_mul(gate, up)
    else:
        result = gate * tl.sigmoid(gate) * up
    return result


@triton.jit
def sum_of_parts(acc, part, tile, tiles, partial_ptr, counter_ptr, SPLIT: tl.constexpr):
    """(whether this program ends last of the SPLIT of ``tile``, for that one their sum, in the order of the parts).

    acc: float32 [R, C]. partial_ptr: float32 [SPLIT, tiles, R, C]. counter_ptr: int32 [tiles], zero, and left zero.
    """
    area: tl.constexpr = acc.shape[0] * acc.shape[1]
    within = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
    tl.store(partial_ptr + (part * tiles + tile).to(tl.int64) * area + within, acc)
    tl.debug_barrier()  # all threads have stored their partial sums before one counts them
    last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if last:
        acc = tl.zeros(acc.shape, tl.float32)
        for other in tl.static_range(SPLIT):
            where = (other * tiles + tile).to(tl.int64) * area + within
            acc += tl.load(partial_ptr + where, cache_modifier=".cg")
        tl.store(counter_ptr + tile, 0)
    return last, acc


@triton.jit
def store_rows(
    result,  # float32 [R, O]; [R, 2 * O] with GATE_UP: gate and up of each output in turn
    rows,  # int32 [R], of which those below M exist
    outs,  # int32 [O]
    out_ptr, bias_ptr, M,
    outputs,  # rows of the output have so many elements
    use_counts,  # int32 [R], where PUSH (parallel/comm/peer_buffers.py)
    memory,
    GATE_UP: tl.constexpr, BIAS: tl.constexpr,
    PUSH: tl.constexpr,  # also push the result into the peers' buffers
    RANK: tl.constexpr, WORLD: tl.constexpr, ROWS: tl.constexpr, ROW_BYTES: tl.constexpr,
):  # fmt: skip
    """Applies SiLU-mul and bias to a tile of sums, and stores it, to the peers' buffers too where PUSH."""
    if GATE_UP:
        gate, up = tl.split(tl.reshape(result, (rows.shape[0], outs.shape[0], 2)))
        result = gated_mul(gate, up, GATE_UP)
    if BIAS:
        result += tl.load(bias_ptr + outs).to(tl.float32)[None, :]
    where = rows.to(tl.int64)[:, None] * outputs + outs[None, :]
    result = result.to(out_ptr.dtype.element_ty)
    if PUSH:
        push(result, rows, outs, (rows < M)[:, None], use_counts, memory, RANK, WORLD, ROWS, ROW_BYTES)
    tl.store(out_ptr + where, result, mask=(rows < M)[:, None])
