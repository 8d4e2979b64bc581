"""Paged decode attention without a host-side plan, optionally fused with the query's norm, rotation and cache write.

Knows: flash-decoding over the NHD pages [2, pages, S, K, D] for query_len causal tokens a row (Dao et al. 2023,
"Flash-Decoding"). Does not know: how a query is made (query.py), how splits are merged (decode_merge.py), when
decode_list.py is faster (decode_choice.py).

A program is (row, kv head, split), and there are as many splits as the longest row could need. Splits divide the row's
*live* length, which is read on the device, so the same captured launch balances any length; programs after a row's
last split leave at once. That is fastest for a few rows; for many it would be too many programs.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.inputs import DecodeAttention
from models.kernels.attention.decode_merge import finish_unit, merge_splits
from models.kernels.attention.decode_work import MERGED_AT_ONCE, SplitRule, splits_of_rows
from models.kernels.attention.kv_element import numbers_of_pairs
from models.kernels.attention.query import (
    block_to_l2,
    capped,
    depth_in_tree,
    first_key,
    kind_arguments,
    kind_constants,
    nodes_seen,
    padded_dim,
    query,
    rotation_arguments,
    seen_in_tree,
    steady_of_rotation,
    weights_of_keys,
)
from models.kernels.interface import PLAIN, AttentionKind, Rotation
from models.row_buckets import power_of_two_from
from parallel.comm.quantised import Activations, memory_of


@triton.jit
def by_pointers(
    q, keys_ptr, values_ptr, table_row, tree_ptr, row, length, count, start, keys_each, head, rows, scale_log2e, cap, K,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, QUERY_LEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CAUSAL: tl.constexpr, TREE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """``keys_each`` keys from ``start`` on: (sums [ROWS, BLOCK_D], maxima [ROWS], sums of weights [ROWS])."""
    dims = tl.arange(0, BLOCK_D)
    blocks = tl.minimum(keys_each // BLOCK_N, (length - start + BLOCK_N - 1) // BLOCK_N)
    visible = length - count + 1 + rows // GROUP  # keys that each row may see
    if not CAUSAL:
        visible = tl.full((ROWS,), 0, tl.int32) + length
    nodes = 0
    if TREE:
        nodes = nodes_seen(tree_ptr, row, rows, GROUP, QUERY_LEN)
    bound = visible - WINDOW  # the first key that each row may see
    if TREE and WINDOW:
        bound = length - QUERY_LEN + 1 + depth_in_tree(nodes, QUERY_LEN) - WINDOW
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    PAIRS: tl.constexpr = values_ptr.dtype.element_ty == tl.float8e4nv  # of values, with sums of even and of odd dims
    WIDE: tl.constexpr = BLOCK_D // 2 if PAIRS else BLOCK_D
    if PAIRS:
        values_ptr = values_ptr.to(tl.pointer_type(tl.int16))
    acc, odd = tl.zeros((ROWS, WIDE), tl.float32), tl.zeros((ROWS, WIDE), tl.float32)
    # Counted from 0: where nothing but the bounds of a loop within depends on a value, Triton 3.6 takes that of the
    # first round for all (its pull request 9036), and ``keys_each`` would be such a value.
    for block in tl.range(0, blocks, num_stages=STAGES):
        first_key = start + block * BLOCK_N
        keys = first_key + tl.arange(0, BLOCK_N)
        if PAGE % BLOCK_N == 0:
            page = tl.load(table_row + first_key // PAGE).to(tl.int64)
            slots = page * PAGE + keys % PAGE
        else:
            pages = tl.load(table_row + keys // PAGE, mask=keys < length, other=0)
            slots = pages.to(tl.int64) * PAGE + keys % PAGE
        where = (slots * K + head)[:, None] * D + dims[None, :]
        there = keys < length
        if WINDOW:  # pages before the window may be another request's by now
            there = there & (keys >= length - count + 1 - WINDOW)
        mask = there[:, None] & (dims < D)[None, :]
        k = tl.load(keys_ptr + where, mask=mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2e
        if CAP:
            scores = capped(scores, cap)
        seen = keys[None, :] < visible[:, None]
        if TREE:
            seen = seen_in_tree(nodes, keys, length, QUERY_LEN)
        if WINDOW:
            seen = seen & (keys[None, :] >= bound[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        weights, peak, decay = weights_of_keys(scores, peak, 1)
        total = total * decay + tl.sum(weights, 1)
        if PAIRS:
            pairs = tl.arange(0, WIDE)
            where = (slots * K + head)[:, None] * (D // 2) + pairs[None, :]
            mask = there[:, None] & (pairs < D // 2)[None, :]
            v, second = numbers_of_pairs(tl.load(values_ptr + where, mask=mask, other=0))
            odd = tl.dot(weights.to(q.dtype), second.to(q.dtype), odd * decay[:, None], input_precision="ieee")
        else:
            v = tl.load(values_ptr + where, mask=mask, other=0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
    if PAIRS:
        acc = tl.reshape(tl.join(acc, odd), (ROWS, BLOCK_D))
    return acc, peak, total


@triton.jit(do_not_specialize=["fewest", "longest", "most"])
def _decode_attention_kernel(
    q_ptr,  # q [T, H, D], or packed qkv [T, (H + 2K) * D] when ROPE
    keys_ptr, values_ptr, page_table_ptr, lengths_ptr,
    tree_ptr,  # int32 [B, QUERY_LEN], when TREE: DecodeAttention.tree_BQ
    out_ptr,
    out_scale_ptr,  # where out is codes, a scale for each head
    out_pitch, partial_ptr, stats_ptr, counter_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, positions_ptr, slots_ptr, eps,
    scale_log2e,
    cap,  # query.kind_arguments
    sinks_ptr,  # float32 [H], when SINKS
    table_width, K,
    fewest,  # decode_work.SplitRule
    longest, most,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, QUERY_LEN: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP * QUERY_LEN, padded to what the tensor cores take
    REAL_ROWS: tl.constexpr,  # the same, padded to a power of two only
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    LINES: tl.constexpr,  # 128-byte lines of a head
    FAN: tl.constexpr, MERGE: tl.constexpr, ALONE: tl.constexpr, APART: tl.constexpr, SKIP_EMPTY: tl.constexpr,
    CAUSAL: tl.constexpr, TREE: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr,
    PITCH: tl.constexpr,  # elements from a token's qkv to the next one's, when ROPE
    WINDOW: tl.constexpr,  # keys that a query sees, or 0: all
    CAP: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    # Read before the wait: the predecessor wrote q, but never a length, a page or a position.
    length = tl.load(lengths_ptr + row, cache_modifier=".cg")
    start = first_key(length, QUERY_LEN, WINDOW, BLOCK_N)
    splits, keys_each = splits_of_rows(length - start, BLOCK_N, fewest, longest, most, SKIP_EMPTY)
    if split < splits:
        table_row = page_table_ptr + row * table_width
        begin = start + split * keys_each
        steady = steady_of_rotation(
            cos_sin_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, row, head, K, D, BLOCK_D, ROTARY, ROPE, NORM
        )
        if PDL:
            if begin < length:  # older keys and values are in memory: prefetch their first block to L2
                first = begin // BLOCK_N
                block_to_l2(keys_ptr, values_ptr, table_row, first, length, head, K, D, BLOCK_D, PAGE, BLOCK_N, LINES)
            gdc_wait()
            gdc_launch_dependents()
        rows = tl.arange(0, ROWS)
        token = row * QUERY_LEN
        # The program that reads the row's newest key is the one that writes it.
        q = query(
            q_ptr, keys_ptr, values_ptr, steady, eps, token, QUERY_LEN, head, rows, split == splits - 1, PITCH, K,
            GROUP, D, BLOCK_D, ROTARY, ROPE, NORM,
        )  # fmt: skip
        acc, peak, total = by_pointers(
            q, keys_ptr, values_ptr, table_row, tree_ptr, row, length, QUERY_LEN, begin, keys_each, head, rows,
            scale_log2e, cap, K, GROUP, D, BLOCK_D, PAGE, QUERY_LEN, ROWS, BLOCK_N, STAGES, CAUSAL, TREE, WINDOW, CAP,
        )  # fmt: skip
        finish_unit(
            acc, peak, total, (out_ptr, out_scale_ptr, out_pitch), partial_ptr, stats_ptr, counter_ptr, row, token,
            QUERY_LEN, head, split, splits, most, K, GROUP, D, BLOCK_D, ROWS, REAL_ROWS, FAN, MERGE, ALONE, APART,
            SINKS, sinks_ptr,
        )  # fmt: skip
    elif (head + row + split == 0) & PDL:  # one waits, or the successor would start before the predecessor ends
        gdc_wait()


def decode_attention(
    q_TX: Tensor, heads: int, kv_layer: Tensor, inputs: DecodeAttention, rule: SplitRule, scale: float,
    workspace: Tensor, counters: Tensor, *, rotation: Rotation | None = None, out_THD: Activations | None = None,
    stages: int, warps: int, pdl: bool, merged: int | None = None, apart: bool = False, kind: AttentionKind = PLAIN,
) -> Tensor:  # fmt: skip
    """See Ops.decode_attention, or with ``rotation`` Ops.rope_cache_attend: q_TX is packed qkv then, and
    query_len 1.

    The predecessor launch may write q_TX, but not lengths, pages, positions or slots: with ``pdl`` these are read while
    it still runs. A block of keys is that of ``rule``. ``workspace`` float32 and ``counters`` int32, all zero and left
    zero, have what workspace_floats and counters_of of decode_work.py say; both are for one stream. ``merged``:
    splits that a program merges at once, a power of two up to MERGED_AT_ONCE; None: as many as registers have room for.
    ``apart``: they are merged by a second launch, see decode_merge.py.
    """
    _, _, page, kv_heads, head_dim = kv_layer.shape
    rows, most = inputs.kv_lengths_B.shape[0], rule.most
    group = heads // kv_heads
    real_rows = power_of_two_from(group * inputs.query_len)
    block_d = padded_dim(head_dim)
    if out_THD is None:
        out_THD = torch.empty(rows * inputs.query_len, heads, head_dim, dtype=q_TX.dtype, device=q_TX.device)
    out, *out_scale = memory_of(out_THD)
    groups = 0 if apart else -(-most // MERGED_AT_ONCE)
    sums = rows * kv_heads * (most + groups) * real_rows * block_d
    stats = workspace[sums:] if most > 1 else workspace
    if merged is None and (real_rows >= 8 or warps >= 4):
        merged = 1  # two at once took up to twice as long (tests/bench/window_attention.py)
    elif merged is None:  # more than most rows have would only take registers, and with them other programs' place
        merged = min(8192 // (real_rows * block_d), power_of_two_from(rule.fewest))
    _decode_attention_kernel[(kv_heads, rows, most)](
        q_TX, kv_layer[0], kv_layer[1], inputs.page_table_BP, inputs.kv_lengths_B,
        inputs.kv_lengths_B if inputs.tree_BQ is None else inputs.tree_BQ, out, *out_scale, workspace, stats, counters,
        *rotation_arguments(rotation, q_TX), *kind_arguments(kind, scale, q_TX), inputs.page_table_BP.stride(0),
        kv_heads, rule.fewest, rule.longest, most,
        GROUP=group, D=head_dim, BLOCK_D=block_d, PAGE=page, QUERY_LEN=inputs.query_len, ROWS=max(16, real_rows),
        REAL_ROWS=real_rows, BLOCK_N=rule.block, STAGES=stages, LINES=max(1, block_d * kv_layer.element_size() // 128),
        FAN=MERGED_AT_ONCE, MERGE=max(1, min(MERGED_AT_ONCE, merged)), ALONE=most == 1, APART=apart,
        SKIP_EMPTY=inputs.skip_empty, CAUSAL=inputs.causal, TREE=inputs.tree_BQ is not None, ROPE=rotation is not None,
        NORM=rotation is not None and rotation.q_norm_D is not None,
        ROTARY=head_dim if rotation is None else rotation.cos_sin_LR.shape[1],
        PITCH=0 if rotation is None else q_TX.stride(0),
        **kind_constants(kind),
        PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    if apart and most > 1:
        merge_splits(out_THD, heads, head_dim, inputs, rule, kv_heads, workspace, stats, pdl, kind)
    return out
