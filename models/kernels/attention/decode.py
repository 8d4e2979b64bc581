"""Paged decode attention without a host-side plan, optionally fused with the query's norm, rotation and cache write.

Knows: flash-decoding over the NHD pages [2, pages, S, K, D] for query_len causal tokens a row (Dao et al. 2023,
"Flash-Decoding"). Does not know: how a query is made (query.py), when decode_tma.py is faster
(models/kernels/nvidia.py).

A program is (row, kv head, split). Splits divide the row's *live* length, which is read on the device, so the same
captured launch balances any length. The last program of a (row, head) to finish merges the splits in split order, so
the result does not depend on which program is last.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.inputs import DecodeAttention
from models.kernels.attention.query import (
    LOG2_E,
    block_to_l2,
    padded_dim,
    power_of_two_above,
    query,
    rotation_arguments,
    steady_of_rotation,
)
from models.kernels.interface import Rotation


@triton.jit
def _decode_attention_kernel(
    q_ptr,  # q [T, H, D], or packed qkv [T, (H + 2K) * D] when ROPE
    keys_ptr,
    values_ptr,
    page_table_ptr,
    lengths_ptr,
    out_ptr,
    partial_ptr,  # float32 [B * K, SPLITS, REAL_ROWS, BLOCK_D]
    stats_ptr,  # float32 [B * K, SPLITS, 2, REAL_ROWS]: running maximum and sum
    counter_ptr,
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
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP * QUERY_LEN, padded to what the tensor cores take
    REAL_ROWS: tl.constexpr,  # the same, padded to a power of two only
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,  # 128-byte lines of a head
    MERGE: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    PDL: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(0)
    dims = tl.arange(0, BLOCK_D)
    table_row = page_table_ptr + batch * table_width
    # Read before the wait: the predecessor wrote q, but never a length, a page or a position.
    length = tl.load(lengths_ptr + batch, cache_modifier=".cg")
    blocks = (length + BLOCK_N - 1) // BLOCK_N
    per_split = tl.maximum((blocks + SPLITS - 1) // SPLITS, 1)
    active = tl.maximum((blocks + per_split - 1) // per_split, 1)  # a row of length 0 still writes zeros
    begin = split * per_split
    end = tl.minimum(begin + per_split, blocks)
    steady = steady_of_rotation(
        cos_sin_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, batch, head, K, D, BLOCK_D, ROTARY, ROPE, NORM
    )
    if PDL:
        if begin < end:  # older keys and values are in memory: prefetch their first block to L2
            block_to_l2(keys_ptr, values_ptr, table_row, begin, length, head, K, D, BLOCK_D, PAGE, BLOCK_N, LINES)
        gdc_wait()
        gdc_launch_dependents()
    if split < active:
        rows = tl.arange(0, ROWS)
        row_mask = rows < GROUP * QUERY_LEN
        # The program that reads the row's newest key is the one that writes it.
        q = query(
            q_ptr, keys_ptr, values_ptr, steady, eps, batch * QUERY_LEN, QUERY_LEN, head, rows, split == active - 1, K,
            GROUP, D, BLOCK_D, ROTARY, ROPE, NORM,
        )  # fmt: skip
        visible = length - QUERY_LEN + 1 + rows // GROUP  # keys that each row may see
        peak = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
        for block in tl.range(begin, end, num_stages=STAGES):
            keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
            if PAGE % BLOCK_N == 0:
                page = tl.load(table_row + block * BLOCK_N // PAGE).to(tl.int64)
                slots = page * PAGE + keys % PAGE
            else:
                pages = tl.load(table_row + keys // PAGE, mask=keys < length, other=0)
                slots = pages.to(tl.int64) * PAGE + keys % PAGE
            where = (slots * K + head)[:, None] * D + dims[None, :]
            mask = (keys < length)[:, None] & (dims < D)[None, :]
            k = tl.load(keys_ptr + where, mask=mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2e
            scores = tl.where(keys[None, :] < visible[:, None], scores, -float("inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            # A row that sees no key of this split keeps -inf; subtracting it would make NaN of its weights.
            shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
            weights = tl.exp2(scores - shift[:, None])
            decay = tl.exp2(peak - shift)
            total = total * decay + tl.sum(weights, 1)
            v = tl.load(values_ptr + where, mask=mask, other=0.0)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
            peak = new_peak

        out_row = out_ptr + (batch * QUERY_LEN * K * GROUP + head * GROUP) * D
        if SPLITS == 1:
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            where = ((rows // GROUP) * K * GROUP + rows % GROUP)[:, None] * D + dims[None, :]
            tl.store(out_row + where, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & (dims < D)[None, :])
        else:
            pair = batch * K + head
            partial = partial_ptr + pair * SPLITS * REAL_ROWS * BLOCK_D
            stats = stats_ptr + pair * SPLITS * 2 * REAL_ROWS
            within = (split * REAL_ROWS + rows)[:, None] * BLOCK_D + dims[None, :]
            tl.store(partial + within, acc, mask=(rows < REAL_ROWS)[:, None])
            tl.store(stats + split * 2 * REAL_ROWS + rows, peak, mask=rows < REAL_ROWS)
            tl.store(stats + (split * 2 + 1) * REAL_ROWS + rows, total, mask=rows < REAL_ROWS)
            tl.debug_barrier()  # every thread's partial sums are written before one thread counts them
            if tl.atomic_add(counter_ptr + pair, 1, sem="acq_rel", scope="gpu") == active - 1:
                _merge_splits(
                    partial, stats, out_row, active, K, GROUP, D, BLOCK_D, QUERY_LEN, REAL_ROWS, SPLITS, MERGE
                )
                tl.store(counter_ptr + pair, 0)


@triton.jit
def _merge_splits(
    partial,
    stats,
    out_row,
    active,
    K,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    REAL_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGE: tl.constexpr,  # splits added at once
):
    rows, dims, parts = tl.arange(0, REAL_ROWS), tl.arange(0, BLOCK_D), tl.arange(0, SPLITS)
    where = parts[:, None] * 2 * REAL_ROWS + rows[None, :]
    counted = (parts < active)[:, None]
    peaks = tl.load(stats + where, mask=counted, other=-float("inf"), cache_modifier=".cg")
    totals = tl.load(stats + where + REAL_ROWS, mask=counted, other=0.0, cache_modifier=".cg")
    peak = tl.max(peaks, 0)
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.sum(totals * tl.exp2(peaks - shift[None, :]), 0)
    acc = tl.zeros((REAL_ROWS, BLOCK_D), tl.float32)
    for first in tl.range(0, active, MERGE):
        some = first + tl.arange(0, MERGE)
        there = some < active
        own = stats + some[:, None] * 2 * REAL_ROWS + rows[None, :]
        weight = tl.exp2(tl.load(own, mask=there[:, None], other=-float("inf"), cache_modifier=".cg") - shift[None, :])
        tile = partial + (some[:, None, None] * REAL_ROWS + rows[None, :, None]) * BLOCK_D + dims[None, None, :]
        theirs = tl.load(tile, mask=there[:, None, None], other=0.0, cache_modifier=".cg")
        acc += tl.sum(theirs * weight[:, :, None], 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out = ((rows // GROUP) * K * GROUP + rows % GROUP)[:, None] * D + dims[None, :]
    mask = (rows < GROUP * QUERY_LEN)[:, None] & (dims < D)[None, :]
    tl.store(out_row + out, acc.to(out_row.dtype.element_ty), mask=mask)


def choose_splits(rows: int, kv_heads: int, max_kv_length: int, block_n: int, programs: int) -> int:
    """Splits of a row: the largest power of two with at most ``programs`` programs, and no more than key blocks.

    Up to ``programs`` pairs of row and kv head get two splits even where these are more programs: two halves on one
    multiprocessor are faster than one whole row that has it to itself.
    """
    most, pairs = power_of_two_above(-(-max_kv_length // block_n)), rows * kv_heads
    wanted = max(1, programs // pairs, 2 * programs // pairs if 2 * pairs > programs else 1)
    return max(1, min(64, most, 1 << (wanted.bit_length() - 1)))


def workspace_floats(rows: int, kv_heads: int, query_rows: int, head_dim: int, splits: int) -> int:
    """Floats of workspace that a launch needs; ``query_rows`` is group size * query_len."""
    if splits == 1:
        return 0
    padded = power_of_two_above(query_rows)
    return rows * kv_heads * splits * padded * (padded_dim(head_dim) + 2)


def decode_attention(
    q_TX: Tensor,
    heads: int,
    kv_layer: Tensor,
    inputs: DecodeAttention,
    scale: float,
    workspace: Tensor,
    counters: Tensor,
    *,
    rotation: Rotation | None = None,
    block_n: int,
    splits: int,
    stages: int,
    warps: int,
    pdl: bool,
) -> Tensor:
    """See Kernels.decode_attention, or with ``rotation`` Kernels.rope_cache_attend: q_TX is packed qkv then, and
    query_len 1.

    The predecessor launch may write q_TX, but not lengths, pages, positions or slots: with ``pdl`` these are read while
    it still runs. Rows of length 0 give zeros. ``workspace`` float32 holds workspace_floats(...) at least;
    ``counters`` int32 has an entry a (row, kv head), all zero, and is left zero; both are for one stream.
    """
    _, _, page, kv_heads, head_dim = kv_layer.shape
    rows = inputs.kv_lengths_B.shape[0]
    group = heads // kv_heads
    real_rows = power_of_two_above(group * inputs.query_len)
    block_d = padded_dim(head_dim)
    out_THD = torch.empty(rows * inputs.query_len, heads, head_dim, dtype=q_TX.dtype, device=q_TX.device)
    merged = 8192 if real_rows < 16 else 4096  # values merged at once; above, a thread spills where splits are few
    _decode_attention_kernel[(splits, kv_heads, rows)](
        q_TX,
        kv_layer[0],
        kv_layer[1],
        inputs.page_table_BP,
        inputs.kv_lengths_B,
        out_THD,
        workspace,
        workspace[rows * kv_heads * splits * real_rows * block_d :] if splits > 1 else workspace,
        counters,
        *rotation_arguments(rotation, q_TX),
        scale * LOG2_E,
        inputs.page_table_BP.stride(0),
        kv_heads,
        GROUP=group,
        D=head_dim,
        BLOCK_D=block_d,
        PAGE=page,
        QUERY_LEN=inputs.query_len,
        ROWS=max(16, real_rows),
        REAL_ROWS=real_rows,
        BLOCK_N=block_n,
        SPLITS=splits,
        STAGES=stages,
        LINES=max(1, block_d * kv_layer.element_size() // 128),
        MERGE=max(1, min(splits, merged // (real_rows * block_d))),
        ROPE=rotation is not None,
        NORM=rotation is not None and rotation.q_norm_D is not None,
        ROTARY=head_dim if rotation is None else rotation.cos_sin_LR.shape[1],
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out_THD
