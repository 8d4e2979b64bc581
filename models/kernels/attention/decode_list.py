"""Paged decode attention over a work list: rows of any lengths keep all multiprocessors busy until the end.

Knows: flash-decoding (Dao et al. 2023) of one split of one row and kv head, with keys and values loaded through
pointers, or by the tensor memory accelerator (TMA; sm_90 and later). Does not know: how a query is made (query.py), how
rows are split and ordered (decode_work.py), how splits are merged (decode_merge.py), which of the two is better
(decode_choice.py).

The grid is fixed and one-dimensional: of n programs each takes every n-th item (unit of the list, kv head), in most
steps one. Programs without an item leave at once. The GPU starts programs in order, so the largest splits begin first.

TMA is made to save energy (docs/decisions/0010): with a thousand pairs or more of row and kv head, memory bandwidth is
saturated and the step runs into the GPU's power limit, so a kernel that draws less leaves a higher clock to the GEMMs
around it. Hence:

* Scores are keys x queries: a group of up to 8 query heads is padded to 8 columns; queries x keys would pad it to 16
  rows. The tensor cores do half the work for the same keys.
* TMA computes addresses. The block of the newest tokens is loaded through pointers instead: it is partly filled, and
  this program has just written a key into it that TMA might not see yet.
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
from models.kernels.attention.decode import by_pointers
from models.kernels.attention.decode_merge import finish_unit, merged_at_once, unit_of
from models.kernels.attention.decode_work import MERGED_AT_ONCE, DecodeWork
from models.kernels.attention.kv_element import numbers_of_pairs
from models.kernels.attention.query import (
    block_to_l2,
    first_key,
    kind_arguments,
    kind_constants,
    padded_dim,
    query,
    rotation_arguments,
    steady_of_rotation,
    weights_of_keys,
)
from models.kernels.interface import PLAIN, AttentionKind, Rotation
from models.kv_group import FP8
from models.row_buckets import power_of_two_from
from parallel.comm.quantised import Activations, memory_of

MOST_QUERY_ROWS = 16  # of a kv head, by TMA; more were not tried
HEAD_DIMS = (64, 128)  # by TMA; 256 was not tried
LINE_BYTES = 128
_FEWEST_QUERY_ROWS = 8, 16  # columns of the narrowest product by TMA, rows of the narrowest one by pointers


@triton.jit
def _plus_values(v, weights, even, odd, decay, PAIRS: tl.constexpr):
    """Sums [D, ROWS] of values [BLOCK_N, D] by weights [BLOCK_N, ROWS], added to ``even``, times ``decay``. PAIRS: of
    float8 codes, int16 [BLOCK_N, D / 2], which turns faster than single bytes; even dims and odd dims apart."""
    if PAIRS:
        low, high = numbers_of_pairs(v)
        even = tl.dot(tl.trans(low), weights.to(tl.float16), even * decay[None, :])
        odd = tl.dot(tl.trans(high), weights.to(tl.float16), odd * decay[None, :])
    else:
        even = tl.dot(tl.trans(v), weights.to(v.dtype), even * decay[None, :])
    return even, odd


@triton.jit
def _by_tma(
    q, keys_ptr, values_ptr, keys_desc, values_desc, table_row, held, newest_page, length, count, begin, whole, end,
    head, rows, scale_log2e, K, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CAUSAL: tl.constexpr, ONE_NEWEST: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The same of blocks ``begin`` to ``end``, those before ``whole`` by TMA; ``held``: the first one's page,
    ``newest_page``: with ONE_NEWEST, that of block ``whole``. WINDOW asks for ONE_NEWEST."""
    PAIRS: tl.constexpr = keys_ptr.dtype.element_ty == tl.float8e4nv
    WIDE: tl.constexpr = D // 2 if PAIRS else D
    dims, value_dims = tl.arange(0, D), tl.arange(0, WIDE)
    if PAIRS:
        pairs_ptr = values_ptr.to(tl.pointer_type(tl.int16))
    else:
        pairs_ptr = values_ptr
    if ONE_NEWEST:
        newest = whole * BLOCK_N + tl.arange(0, BLOCK_N)
        newest_head = ((newest_page * PAGE + newest % PAGE) * K + head)[:, None]
        newest_mask = (newest < length)[:, None] & (whole < end)
        newest_k = tl.load(keys_ptr + newest_head * D + dims[None, :], mask=newest_mask, other=0.0)
        newest_v = tl.load(pairs_ptr + newest_head * WIDE + value_dims[None, :], mask=newest_mask, other=0)
    across = tl.trans(q)
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    totals = tl.zeros((BLOCK_N, ROWS), tl.float32)
    acc, odd = tl.zeros((WIDE, ROWS), tl.float32), tl.zeros((WIDE, ROWS), tl.float32)
    for block in tl.range(begin, whole, num_stages=STAGES):
        first = held * PAGE + block * BLOCK_N % PAGE
        # The next block's page, one step ahead: otherwise loads would wait for loads.
        held = tl.load(table_row + (block + 1) * BLOCK_N // PAGE, mask=block + 1 < whole, other=0)
        k = keys_desc.load([first, head * D]).to(q.dtype)
        scores = tl.dot(k, across) * scale_log2e
        if WINDOW:
            seen = block * BLOCK_N + tl.arange(0, BLOCK_N) >= length - WINDOW
            scores = tl.where(seen[:, None], scores, -float("inf"))
        weights, peak, decay = weights_of_keys(scores, peak, 0)
        totals = totals * decay[None, :] + weights
        v = values_desc.load([first, head * WIDE])
        acc, odd = _plus_values(v, weights, acc, odd, decay, PAIRS)
    if ONE_NEWEST:
        if whole < end:
            # Masked once more: as loaded, the tile would go to shared memory, and be waited for, before the loop.
            k = tl.where((newest < length)[:, None], newest_k.to(q.dtype), 0.0)
            scores = tl.dot(k, across) * scale_log2e
            seen = newest < length
            if WINDOW:
                seen = seen & (newest >= length - WINDOW)
            scores = tl.where(seen[:, None], scores, -float("inf"))
            weights, peak, decay = weights_of_keys(scores, peak, 0)
            totals = totals * decay[None, :] + weights
            acc, odd = _plus_values(newest_v, weights, acc, odd, decay, PAIRS)
    else:
        visible = length - count + 1 + rows // GROUP  # keys that each query may see
        if not CAUSAL:
            visible = tl.full((ROWS,), 0, tl.int32) + length
        for block in tl.range(whole, end, num_stages=1):
            keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
            page = tl.load(table_row + block * BLOCK_N // PAGE).to(tl.int64)
            where = ((page * PAGE + keys % PAGE) * K + head)[:, None]
            mask = (keys < length)[:, None]
            k = tl.load(keys_ptr + where * D + dims[None, :], mask=mask, other=0.0).to(q.dtype)
            scores = tl.dot(k, across) * scale_log2e
            scores = tl.where(keys[:, None] < visible[None, :], scores, -float("inf"))
            weights, peak, decay = weights_of_keys(scores, peak, 0)
            totals = totals * decay[None, :] + weights
            v = tl.load(pairs_ptr + where * WIDE + value_dims[None, :], mask=mask, other=0)
            acc, odd = _plus_values(v, weights, acc, odd, decay, PAIRS)
    if PAIRS:
        acc = tl.reshape(tl.permute(tl.join(acc, odd), (0, 2, 1)), (D, ROWS))
    return tl.trans(acc), peak, tl.sum(totals, 0)


@triton.jit(do_not_specialize=["most"])
def _attend_list_kernel(
    q_ptr,  # q [T, H, D], or packed qkv [T, (H + 2K) * D] when ROPE
    keys_ptr, values_ptr,
    keys_desc,  # when TMA: the same as keys_ptr, [pages * S, K * D] in boxes of [BLOCK_N, D]
    values_desc,  # likewise; of float8 codes pairs of them, as int16
    page_table_ptr,
    units_ptr,  # DecodeWork.units_U4
    starts_ptr,  # int32 [B], when RAGGED: each row's first token, and how many it has, at most QUERY_LEN
    queries_ptr,
    tree_ptr,  # int32 [B, QUERY_LEN], when TREE: DecodeAttention.tree_BQ
    out_ptr,
    out_scale_ptr,  # where out is codes, a scale for each head
    out_pitch, partial_ptr, stats_ptr, counter_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, positions_ptr, slots_ptr, eps,
    scale_log2e,
    cap,  # query.kind_arguments
    sinks_ptr,  # float32 [H], when SINKS
    table_width, most, K,
    TMA: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP * QUERY_LEN, padded to what the tensor cores take
    REAL_ROWS: tl.constexpr,  # the same, padded to a power of two only
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    LINES: tl.constexpr,  # 128-byte lines of a head
    FAN: tl.constexpr, MERGE: tl.constexpr, ALONE: tl.constexpr,
    ONE_NEWEST: tl.constexpr,  # a token a row: the only block that TMA does not load
    RAGGED: tl.constexpr, CAUSAL: tl.constexpr, TREE: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    PITCH: tl.constexpr,  # elements from a token's qkv to the next one's, when ROPE
    WINDOW: tl.constexpr,  # keys that a query sees, or 0: all
    BLOCK: tl.constexpr,  # of the list's rule: windows begin at multiples of it
    CAP: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # With programs of the next product beside these, 8 rows of 8B FP8 take 7% longer (docs/lab/measurements/gemm.md).
    CODES: tl.constexpr = keys_ptr.dtype.element_ty == tl.float8e4nv and out_ptr.dtype.element_ty == tl.float8e4nv
    LATE: tl.constexpr = ONE_NEWEST and CODES
    item = tl.program_id(0)
    programs = tl.num_programs(0)
    # Read before the wait: the predecessor wrote q, but never the list, a page or a position.
    items = tl.load(units_ptr, cache_modifier=".cg") * K
    row, head, length, split, splits, keys_each = unit_of(units_ptr, item, items, K, True)
    steady = steady_of_rotation(
        cos_sin_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, row, head, K, D, BLOCK_D, ROTARY, ROPE, NORM,
        item < items,
    )  # fmt: skip
    if PDL:
        start = first_key(length, QUERY_LEN, WINDOW, BLOCK) + split * keys_each
        if (item < items) & (start < length):  # older keys and values are in memory: their first block
            table_row = page_table_ptr + row * table_width
            first = start // BLOCK_N
            block_to_l2(keys_ptr, values_ptr, table_row, first, length, head, K, D, BLOCK_D, PAGE, BLOCK_N, LINES)
            if TMA:  # noqa: SIM102 -- and the one that TMA does not load
                if split == splits - 1:
                    newest = (length - 1) // BLOCK_N
                    block_to_l2(
                        keys_ptr, values_ptr, table_row, newest, length, head, K, D, BLOCK_D, PAGE, BLOCK_N, LINES
                    )
        # One program waits even where there is nothing to do, or the successor would start before the predecessor ends.
        if (item < items) | (item == 0):
            gdc_wait()
            if not LATE:
                gdc_launch_dependents()
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
        if TMA:  # the table is asked here, so that it is not waited for later
            begin = (first_key(length, QUERY_LEN, WINDOW, BLOCK) + split * keys_each) // BLOCK_N
            end = tl.minimum(begin + keys_each // BLOCK_N, (length + BLOCK_N - 1) // BLOCK_N)
            if WINDOW:  # older blocks may be another request's by now
                begin = tl.maximum(begin, (length - WINDOW) // BLOCK_N)
            # Blocks of older keys only, which every query sees.
            whole = tl.maximum(tl.minimum(end, tl.maximum(length - count, 0) // BLOCK_N), begin)
            held = tl.load(table_row + begin * BLOCK_N // PAGE, mask=whole > begin, other=0)
            newest_page = 0
            if ONE_NEWEST:
                newest_page = tl.load(table_row + whole * BLOCK_N // PAGE, mask=whole < end, other=0).to(tl.int64)
        # The program that reads the row's newest key is the one that writes it.
        q = query(
            q_ptr, keys_ptr, values_ptr, steady, eps, token, count, head, rows, split == splits - 1, PITCH, K, GROUP,
            D, BLOCK_D, ROTARY, ROPE, NORM,
        )  # fmt: skip
        if TMA:
            acc, peak, total = _by_tma(
                q, keys_ptr, values_ptr, keys_desc, values_desc, table_row, held, newest_page, length, count, begin,
                whole, end, head, rows, scale_log2e, K, GROUP, D, PAGE, ROWS, BLOCK_N, STAGES, CAUSAL, ONE_NEWEST,
                WINDOW,
            )  # fmt: skip
        else:
            acc, peak, total = by_pointers(
                q, keys_ptr, values_ptr, table_row, tree_ptr, row, length, count,
                first_key(length, QUERY_LEN, WINDOW, BLOCK) + split * keys_each, keys_each, head, rows, scale_log2e,
                cap, K, GROUP, D, BLOCK_D, PAGE, QUERY_LEN, ROWS, BLOCK_N, STAGES, CAUSAL, TREE, WINDOW, CAP,
            )  # fmt: skip
        finish_unit(
            acc, peak, total, (out_ptr, out_scale_ptr, out_pitch), partial_ptr, stats_ptr, counter_ptr, row, token,
            count, head, split, splits, most, K, GROUP, D, BLOCK_D, ROWS, REAL_ROWS, FAN, MERGE, ALONE, False, SINKS,
            sinks_ptr,
        )  # fmt: skip
        item = (done + 1) * programs + tl.where(done % 2 == 1, first_of_round, across_round)
        row, head, length, split, splits, keys_each = unit_of(units_ptr, item, items, K)
        # Masked instead of skipped: values kept for the case of none left would take registers during the loop above.
        steady = steady_of_rotation(
            cos_sin_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, row, head, K, D, BLOCK_D, ROTARY, ROPE, NORM,
            item < items,
        )  # fmt: skip
    if PDL and LATE:
        gdc_launch_dependents()


def supports_tma(heads: int, kv_layer: Tensor, inputs: DecodeAttention, block_n: int) -> bool:
    """Whether ``attend_list`` takes these by TMA, with ``block_n`` keys a block; assumes a device with TMA.

    Queries are of the dtype of ``kv_layer``, which is contiguous, or of 16 bits where that is float8.
    """
    _, _, page, kv_heads, head_dim = kv_layer.shape
    return (
        kv_layer.dtype in (torch.bfloat16, torch.float16, FP8)
        and head_dim in HEAD_DIMS
        and heads // kv_heads * inputs.query_len <= MOST_QUERY_ROWS
        and inputs.tree_BQ is None
        and page % block_n == 0
    )


def attend_list(
    q_TX: Tensor, heads: int, kv_layer: Tensor, inputs: DecodeAttention, work: DecodeWork, scale: float,
    workspace: Tensor, counters: Tensor, *, rotation: Rotation | None = None, out_THD: Activations | None = None,
    tma: bool, block_n: int, stages: int, warps: int, programs: int, pdl: bool, kind: AttentionKind = PLAIN,
) -> Tensor:  # fmt: skip
    """decode.decode_attention over ``work``, which plan_decode made of the same ``inputs``. Returns [T, H, D].

    ``tma``: for what ``supports_tma`` accepts, without a soft cap, and of one token a row with a window. ``block_n``
    divides the rule's ``block``. ``programs``: of the grid; any number is right. ``workspace`` float32 and ``counters``
    int32, all zero and left zero, have what workspace_floats and counters_of of decode_work.py say. The launch before
    this one may write q_TX, but not lengths, pages, positions, slots or the list.
    """
    _, _, page, kv_heads, head_dim = kv_layer.shape
    rows, most = inputs.kv_lengths_B.shape[0], work.rule.most
    group = heads // kv_heads
    real_rows = power_of_two_from(group * inputs.query_len)
    block_d = padded_dim(head_dim)
    if out_THD is None:
        tokens = rows * inputs.query_len if inputs.starts_B is None else q_TX.shape[0]
        out_THD = torch.empty(tokens, heads, head_dim, dtype=q_TX.dtype, device=q_TX.device)
    out, *out_scale = memory_of(out_THD)
    slots = rows * kv_heads * (most + -(-most // MERGED_AT_ONCE))
    keys, values = kv_layer.view(2, -1, kv_heads * head_dim) if tma else kv_layer
    if tma:
        values = values.view(torch.int16) if kv_layer.dtype == FP8 else values
        keys, values = (
            TensorDescriptor.from_tensor(each, [block_n, each.shape[1] // kv_heads]) for each in (keys, values)
        )
    _attend_list_kernel[(min(programs, kv_heads * (len(work.units_U4) - 1)),)](
        q_TX, kv_layer[0], kv_layer[1], keys, values, inputs.page_table_BP, work.units_U4,
        inputs.kv_lengths_B if inputs.starts_B is None else inputs.starts_B,
        inputs.kv_lengths_B if inputs.queries_B is None else inputs.queries_B,
        work.units_U4 if inputs.tree_BQ is None else inputs.tree_BQ, out, *out_scale, workspace,
        workspace[slots * real_rows * block_d :] if most > 1 else workspace, counters,
        *rotation_arguments(rotation, q_TX), *kind_arguments(kind, scale, q_TX), inputs.page_table_BP.stride(0), most,
        kv_heads,
        TMA=tma, GROUP=group, D=head_dim, BLOCK_D=block_d, PAGE=page, QUERY_LEN=inputs.query_len,
        ROWS=max(_FEWEST_QUERY_ROWS[not tma], real_rows), REAL_ROWS=real_rows, BLOCK_N=block_n, STAGES=stages,
        LINES=max(1, block_d * kv_layer.element_size() // LINE_BYTES), FAN=MERGED_AT_ONCE,
        MERGE=merged_at_once(real_rows, block_d, MERGED_AT_ONCE, warps), ALONE=most == 1,
        ONE_NEWEST=inputs.query_len == 1, RAGGED=inputs.starts_B is not None, CAUSAL=inputs.causal,
        TREE=inputs.tree_BQ is not None, ROPE=rotation is not None,
        NORM=rotation is not None and rotation.q_norm_D is not None,
        ROTARY=head_dim if rotation is None else rotation.cos_sin_LR.shape[1],
        PITCH=0 if rotation is None else q_TX.stride(0),
        BLOCK=work.rule.block if kind.window else 1,
        **kind_constants(kind),
        PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
