"""Paged decode attention over a work list by TMA, made to save energy: sm_90 and later.

Knows: the loads and products of decode_tma.py, of one split. Does not know: how rows are split and ordered
(decode_work.py), how splits are merged (decode_merge.py), when this kernel is better (decode_choice.py).
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
from models.kernels.attention.decode_merge import finish_unit, merged_at_once, unit_of
from models.kernels.attention.decode_tma import FEWEST_QUERY_ROWS, LINE_BYTES, weights_of_keys
from models.kernels.attention.decode_work import MERGED_AT_ONCE, DecodeWork
from models.kernels.attention.query import (
    LOG2_E,
    block_to_l2,
    power_of_two_above,
    query,
    rotation_arguments,
    steady_of_rotation,
)
from models.kernels.interface import Rotation


@triton.jit(do_not_specialize=["most"])
def _attend_list_tma_kernel(
    q_ptr,  # q [T, H, D], or packed qkv [T, (H + 2K) * D] when ROPE
    keys_ptr,
    values_ptr,
    keys_desc,  # the same as keys_ptr: [pages * S, K * D] in boxes of [BLOCK_N, D]
    values_desc,
    page_table_ptr,
    units_ptr,  # DecodeWork.units_U4
    starts_ptr,  # int32 [B], when RAGGED: each row's first token, and how many it has, at most QUERY_LEN
    queries_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    counter_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    eps,
    scale_log2e,
    table_width,
    most,
    K,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP * QUERY_LEN, padded to what the tensor cores take
    REAL_ROWS: tl.constexpr,  # the same, padded to a power of two only
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,  # 128-byte lines of a head
    FAN: tl.constexpr,
    MERGE: tl.constexpr,
    ALONE: tl.constexpr,
    ONE_NEWEST: tl.constexpr,  # a token a row: the only block that TMA does not load
    RAGGED: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROPE: tl.constexpr,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    PDL: tl.constexpr,
):
    item = tl.program_id(0)
    programs = tl.num_programs(0)
    # Read before the wait: the predecessor wrote q, but never the list, a page or a position.
    items = tl.load(units_ptr, cache_modifier=".cg") * K
    row, head, length, split, splits, keys_each = unit_of(units_ptr, item, items, K, True)
    steady = steady_of_rotation(
        cos_sin_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, row, head, K, D, D, ROTARY, ROPE, NORM,
        item < items,
    )  # fmt: skip
    if PDL:
        if (item < items) & (split * keys_each < length):  # the first block, and the one that TMA does not load
            table_row = page_table_ptr + row * table_width
            first = split * keys_each // BLOCK_N
            block_to_l2(keys_ptr, values_ptr, table_row, first, length, head, K, D, D, PAGE, BLOCK_N, LINES)
            if split == splits - 1:
                newest = (length - 1) // BLOCK_N
                block_to_l2(keys_ptr, values_ptr, table_row, newest, length, head, K, D, D, PAGE, BLOCK_N, LINES)
        # One program waits even where there is nothing to do, or the successor would start before the predecessor ends.
        if (item < items) | (item == 0):
            gdc_wait()
            gdc_launch_dependents()
    dims = tl.arange(0, D)
    rows = tl.arange(0, ROWS)
    # Every other round goes backwards: who had the most keys in one has the fewest in the next.
    first_of_round, across_round = item, programs - 1 - item
    full_rounds = items // programs
    mine_of_last = tl.where(full_rounds % 2 == 0, first_of_round, across_round)
    rounds = full_rounds + (mine_of_last < items % programs).to(tl.int32)
    # What stays the same in every round is made anew: kept, it would take a hundred registers during the loop within.
    for done in tl.range(0, rounds, num_stages=1, disable_licm=True):
        if RAGGED:
            token = tl.load(starts_ptr + row, cache_modifier=".cg").to(tl.int64)
            count = tl.load(queries_ptr + row, cache_modifier=".cg")
        else:
            token = row * QUERY_LEN
            count = QUERY_LEN
        table_row = page_table_ptr + row * table_width
        begin = split * keys_each // BLOCK_N
        end = tl.minimum(begin + keys_each // BLOCK_N, (length + BLOCK_N - 1) // BLOCK_N)
        # Blocks of older keys only, which every query sees.
        whole = tl.maximum(tl.minimum(end, tl.maximum(length - count, 0) // BLOCK_N), begin)
        held = tl.load(table_row + begin * BLOCK_N // PAGE, mask=whole > begin, other=0)
        if ONE_NEWEST:  # asked for here, so that neither the table nor its block is waited for behind the loop
            newest_page = tl.load(table_row + whole * BLOCK_N // PAGE, mask=whole < end, other=0).to(tl.int64)
        q = query(
            q_ptr, keys_ptr, values_ptr, steady, eps, token, count, head, rows, split == splits - 1, K, GROUP, D, D,
            ROTARY, ROPE, NORM,
        )  # fmt: skip
        if ONE_NEWEST:
            newest = whole * BLOCK_N + tl.arange(0, BLOCK_N)
            newest_where = ((newest_page * PAGE + newest % PAGE) * K + head)[:, None] * D + dims[None, :]
            newest_mask = (newest < length)[:, None] & (whole < end)
            newest_k = tl.load(keys_ptr + newest_where, mask=newest_mask, other=0.0)
            newest_v = tl.load(values_ptr + newest_where, mask=newest_mask, other=0.0)
        across = tl.trans(q)
        peak = tl.full((ROWS,), -float("inf"), tl.float32)
        totals = tl.zeros((BLOCK_N, ROWS), tl.float32)
        acc = tl.zeros((D, ROWS), tl.float32)
        for block in tl.range(begin, whole, num_stages=STAGES):
            first = held * PAGE + block * BLOCK_N % PAGE
            # The next block's page, one step ahead: otherwise loads would wait for loads.
            held = tl.load(table_row + (block + 1) * BLOCK_N // PAGE, mask=block + 1 < whole, other=0)
            k = keys_desc.load([first, head * D])
            weights, peak, decay = weights_of_keys(tl.dot(k, across) * scale_log2e, peak)
            totals = totals * decay[None, :] + weights
            v = values_desc.load([first, head * D])
            acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc * decay[None, :])
        if ONE_NEWEST:
            if whole < end:
                # Masked once more: as loaded, the tile would go to shared memory, and be waited for, before the loop.
                k = tl.where((newest < length)[:, None], newest_k, 0.0)
                scores = tl.dot(k, across) * scale_log2e
                scores = tl.where((newest < length)[:, None], scores, -float("inf"))
                weights, peak, decay = weights_of_keys(scores, peak)
                totals = totals * decay[None, :] + weights
                acc = tl.dot(tl.trans(newest_v), weights.to(newest_v.dtype), acc * decay[None, :])
        else:
            visible = length - count + 1 + rows // GROUP  # keys that each query may see
            if not CAUSAL:
                visible = tl.full((ROWS,), 0, tl.int32) + length
            for block in tl.range(whole, end, num_stages=1):
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
        finish_unit(
            tl.trans(acc), peak, tl.sum(totals, 0), out_ptr, partial_ptr, stats_ptr, counter_ptr, row, token, count,
            head, split, splits, most, K, GROUP, D, D, ROWS, REAL_ROWS, FAN, MERGE, ALONE,
        )  # fmt: skip
        item = (done + 1) * programs + tl.where(done % 2 == 1, first_of_round, across_round)
        row, head, length, split, splits, keys_each = unit_of(units_ptr, item, items, K)
        # Masked instead of skipped: values kept for the case of none left would take registers during the loop above.
        steady = steady_of_rotation(
            cos_sin_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, row, head, K, D, D, ROTARY, ROPE, NORM,
            item < items,
        )  # fmt: skip


def attend_list_tma(
    q_TX: Tensor,
    heads: int,
    kv_layer: Tensor,
    inputs: DecodeAttention,
    work: DecodeWork,
    scale: float,
    workspace: Tensor,
    counters: Tensor,
    *,
    rotation: Rotation | None = None,
    out_THD: Tensor | None = None,
    block_n: int,
    stages: int,
    warps: int,
    programs: int,
    pdl: bool,
) -> Tensor:
    """decode_balanced.attend_list for what ``decode_tma.supports`` accepts; ``kv_layer`` is contiguous."""
    _, _, page, kv_heads, head_dim = kv_layer.shape
    rows, most = inputs.kv_lengths_B.shape[0], work.rule.most
    group = heads // kv_heads
    real_rows = power_of_two_above(group * inputs.query_len)
    if out_THD is None:
        tokens = rows * inputs.query_len if inputs.starts_B is None else q_TX.shape[0]
        out_THD = torch.empty(tokens, heads, head_dim, dtype=q_TX.dtype, device=q_TX.device)
    boxes = kv_layer.view(2, -1, kv_heads * head_dim)
    slots = rows * kv_heads * (most + -(-most // MERGED_AT_ONCE))
    _attend_list_tma_kernel[(min(programs, kv_heads * (len(work.units_U4) - 1)),)](
        q_TX,
        kv_layer[0],
        kv_layer[1],
        TensorDescriptor.from_tensor(boxes[0], [block_n, head_dim]),
        TensorDescriptor.from_tensor(boxes[1], [block_n, head_dim]),
        inputs.page_table_BP,
        work.units_U4,
        inputs.kv_lengths_B if inputs.starts_B is None else inputs.starts_B,
        inputs.kv_lengths_B if inputs.queries_B is None else inputs.queries_B,
        out_THD,
        workspace,
        workspace[slots * real_rows * head_dim :] if most > 1 else workspace,
        counters,
        *rotation_arguments(rotation, q_TX),
        scale * LOG2_E,
        inputs.page_table_BP.stride(0),
        most,
        kv_heads,
        GROUP=group,
        D=head_dim,
        PAGE=page,
        QUERY_LEN=inputs.query_len,
        ROWS=max(FEWEST_QUERY_ROWS, real_rows),
        REAL_ROWS=real_rows,
        BLOCK_N=block_n,
        STAGES=stages,
        LINES=head_dim * kv_layer.element_size() // LINE_BYTES,
        FAN=MERGED_AT_ONCE,
        MERGE=merged_at_once(real_rows, head_dim, MERGED_AT_ONCE, warps),
        ALONE=most == 1,
        ONE_NEWEST=inputs.query_len == 1,
        RAGGED=inputs.starts_B is not None,
        CAUSAL=inputs.causal,
        ROPE=rotation is not None,
        NORM=rotation is not None and rotation.q_norm_D is not None,
        ROTARY=head_dim if rotation is None else rotation.cos_sin_LR.shape[1],
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out_THD
