"""Paged decode attention of many rows by TMA, made to save energy: sm_90 and later.

Knows: whole blocks of keys and values loaded by the tensor memory accelerator (TMA), with keys as the tall operand of
the tensor cores. Does not know: how a query is made (query.py), how a row is split between programs (decode.py), when
this kernel is the better one (decode_choice.py).

A program has all keys of one (row, kv head). With a thousand pairs or more, memory bandwidth is saturated and the step
runs into the GPU's power limit, so a kernel that draws less power leaves a higher clock to the matrix products around
it. Hence:

* Scores are keys x queries: a group of up to 8 query heads is padded to 8 columns; queries x keys would pad it to 16
  rows. The tensor cores do half the work for the same keys.
* TMA computes addresses. The block of the newest tokens is loaded by pointers instead: it is partly filled, and this
  program has just written a key into it that TMA might not see yet.
* Sums of weights stay in the threads that made them until the end.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from models.inputs import DecodeAttention
from models.kernels.attention.query import (
    LOG2_E,
    block_to_l2,
    power_of_two_above,
    query,
    rotation_arguments,
    steady_of_rotation,
)
from models.kernels.interface import Rotation

MOST_QUERY_ROWS = 16  # of a kv head; more were not tried
FEWEST_QUERY_ROWS = 8  # columns of the narrowest product
HEAD_DIMS = (64, 128)  # 256 was not tried
LINE_BYTES = 128


@triton.jit
def weights_of_keys(scores, peak):
    """Online softmax: (weights [keys, rows], the rows' new maximum, the factor of older sums)."""
    new_peak = tl.maximum(peak, tl.max(scores, 0))
    # A row that has seen no key yet keeps -inf; subtracting it would make NaN of its weights.
    shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    return tl.exp2(scores - shift[None, :]), new_peak, tl.exp2(peak - shift)


@triton.jit
def _attend_many_kernel(
    q_ptr,  # q [T, H, D], or packed qkv [T, (H + 2K) * D] when ROPE
    keys_ptr,
    values_ptr,
    keys_desc,  # the same as keys_ptr: [pages * S, K * D] in boxes of [BLOCK_N, D]
    values_desc,
    page_table_ptr,
    lengths_ptr,
    out_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    eps,
    scale_log2e,
    table_width,
    K,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP * QUERY_LEN, padded to what the tensor cores take
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,  # 128-byte lines of a head
    CAUSAL: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)
    dims = tl.arange(0, D)
    table_row = page_table_ptr + row * table_width
    length = tl.load(lengths_ptr + row, cache_modifier=".cg")
    blocks = (length + BLOCK_N - 1) // BLOCK_N
    whole = tl.maximum(length - QUERY_LEN, 0) // BLOCK_N  # blocks of older keys only, which every query sees
    steady = steady_of_rotation(
        cos_sin_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, row, head, K, D, D, ROTARY, ROPE, NORM
    )
    if PDL:
        if blocks > 0:  # the first block, and the one that TMA does not load
            block_to_l2(keys_ptr, values_ptr, table_row, 0, length, head, K, D, D, PAGE, BLOCK_N, LINES)
            block_to_l2(keys_ptr, values_ptr, table_row, blocks - 1, length, head, K, D, D, PAGE, BLOCK_N, LINES)
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.arange(0, ROWS)
    q = query(
        q_ptr, keys_ptr, values_ptr, steady, eps, row * QUERY_LEN, QUERY_LEN, head, rows, True, K, GROUP, D, D, ROTARY,
        ROPE, NORM,
    )  # fmt: skip
    across = tl.trans(q)
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    totals = tl.zeros((BLOCK_N, ROWS), tl.float32)
    acc = tl.zeros((D, ROWS), tl.float32)
    held = tl.load(table_row, mask=whole > 0, other=0)
    for block in tl.range(0, whole, num_stages=STAGES):
        first = held * PAGE + block * BLOCK_N % PAGE
        # The next block's page, one step ahead: otherwise loads would wait for loads.
        held = tl.load(table_row + (block + 1) * BLOCK_N // PAGE, mask=block + 1 < whole, other=0)
        k = keys_desc.load([first, head * D])
        weights, peak, decay = weights_of_keys(tl.dot(k, across) * scale_log2e, peak)
        totals = totals * decay[None, :] + weights
        v = values_desc.load([first, head * D])
        acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc * decay[None, :])
    visible = length - QUERY_LEN + 1 + rows // GROUP  # keys that each query may see
    if not CAUSAL:
        visible = tl.full((ROWS,), 0, tl.int32) + length
    for block in tl.range(whole, blocks, num_stages=1):
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        page = tl.load(table_row + block * BLOCK_N // PAGE).to(tl.int64)
        where = ((page * PAGE + keys % PAGE) * K + head)[:, None] * D + dims[None, :]
        mask = (keys < length)[:, None]
        k = tl.load(keys_ptr + where, mask=mask, other=0.0)
        scores = tl.dot(k, across) * scale_log2e
        scores = tl.where(keys[:, None] < visible[None, :], scores, -float("inf"))
        weights, peak, decay = weights_of_keys(scores, peak)
        totals = totals * decay[None, :] + weights
        v = tl.load(values_ptr + where, mask=mask, other=0.0)
        acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc * decay[None, :])
    total = tl.sum(totals, 0)
    acc = tl.trans(acc / tl.where(total == 0.0, 1.0, total)[None, :])
    out_row = out_ptr + (row * QUERY_LEN * K * GROUP + head * GROUP) * D
    where = ((rows // GROUP) * K * GROUP + rows % GROUP)[:, None] * D + dims[None, :]
    tl.store(out_row + where, acc.to(out_ptr.dtype.element_ty), mask=(rows < GROUP * QUERY_LEN)[:, None])


def supports(heads: int, kv_layer: Tensor, inputs: DecodeAttention, block_n: int) -> bool:
    """Whether ``attend_many`` takes these, with ``block_n`` keys a block; assumes a device with TMA.

    Queries are of the dtype of ``kv_layer``.
    """
    _, _, page, kv_heads, head_dim = kv_layer.shape
    return (
        kv_layer.dtype in (torch.bfloat16, torch.float16)
        and head_dim in HEAD_DIMS
        and heads // kv_heads * inputs.query_len <= MOST_QUERY_ROWS
        and page % block_n == 0
    )


def attend_many(
    q_TX: Tensor,
    heads: int,
    kv_layer: Tensor,
    inputs: DecodeAttention,
    scale: float,
    *,
    rotation: Rotation | None = None,
    block_n: int,
    stages: int,
    warps: int,
    pdl: bool,
) -> Tensor:
    """decode.decode_attention without splits, for what ``supports`` accepts. Returns [T, H, D], fresh.

    ``kv_layer`` is contiguous. The same rules hold for early reads and for rows of length 0.
    """
    _, _, page, kv_heads, head_dim = kv_layer.shape
    rows = inputs.kv_lengths_B.shape[0]
    group = heads // kv_heads
    out_THD = torch.empty(rows * inputs.query_len, heads, head_dim, dtype=q_TX.dtype, device=q_TX.device)
    boxes = kv_layer.view(2, -1, kv_heads * head_dim)
    _attend_many_kernel[(kv_heads, rows)](
        q_TX,
        kv_layer[0],
        kv_layer[1],
        TensorDescriptor.from_tensor(boxes[0], [block_n, head_dim]),
        TensorDescriptor.from_tensor(boxes[1], [block_n, head_dim]),
        inputs.page_table_BP,
        inputs.kv_lengths_B,
        out_THD,
        *rotation_arguments(rotation, q_TX),
        scale * LOG2_E,
        inputs.page_table_BP.stride(0),
        kv_heads,
        GROUP=group,
        D=head_dim,
        PAGE=page,
        QUERY_LEN=inputs.query_len,
        ROWS=max(FEWEST_QUERY_ROWS, power_of_two_above(group * inputs.query_len)),
        BLOCK_N=block_n,
        STAGES=stages,
        LINES=head_dim * kv_layer.element_size() // LINE_BYTES,
        CAUSAL=inputs.causal,
        ROPE=rotation is not None,
        NORM=rotation is not None and rotation.q_norm_D is not None,
        ROTARY=head_dim if rotation is None else rotation.cos_sin_LR.shape[1],
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out_THD
