"""Paged attention of windows over a work list by TMA, with queries as the tall operand: sm_90 and later.

Knows: several new tokens a row (verification, a drafter's block, a draft tree), whole blocks of older keys loaded by
the tensor memory accelerator (TMA), the newest ones by pointers. Does not know: how rows are split and ordered
(decode_work.py), how splits are merged (decode_merge.py), when this kernel is better (decode_choice.py).

Every query sees every key before the window, so whole blocks of those need no mask and no bound. A block's page is
asked for one block ahead, and as many blocks as there are stages, but one, are in flight; by pointers Triton keeps half
as many, for an address that is itself loaded takes a stage. Keys from the window on are masked, by position or by tree,
and unwritten ones are zeroed, which TMA would not do.
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
from models.kernels.attention.decode_list import HEAD_DIMS, LINE_BYTES
from models.kernels.attention.decode_merge import finish_unit, unit_of
from models.kernels.attention.decode_work import MERGED_AT_ONCE, DecodeWork
from models.kernels.attention.query import LOG2_E, block_to_l2, nodes_seen, query, seen_in_tree, weights_of_keys
from models.kv_group import FP8
from models.row_buckets import power_of_two_from
from parallel.comm.quantised import Activations, memory_of

QUERY_ROWS = range(16, 129)  # of a kv head


@triton.jit(do_not_specialize=["most"])
def _attend_window_kernel(
    q_ptr,  # [T, H, D]
    keys_ptr, values_ptr,
    keys_desc,  # the same as keys_ptr: [pages * S, K * D] in boxes of [BLOCK_N, D]
    values_desc, page_table_ptr,
    units_ptr,  # DecodeWork.units_U4
    tree_ptr,  # int32 [B, QUERY_LEN], when TREE: DecodeAttention.tree_BQ
    out_ptr,
    out_scale_ptr,  # where out is codes, a scale for each head
    out_pitch, partial_ptr, stats_ptr, counter_ptr, scale_log2e, table_width, most, K,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, QUERY_LEN: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP * QUERY_LEN, padded to a power of two
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    LINES: tl.constexpr,  # 128-byte lines of a head
    FAN: tl.constexpr, ALONE: tl.constexpr, CAUSAL: tl.constexpr, TREE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    programs = tl.num_programs(0)
    # Read before the wait: the predecessor wrote q and the newest keys, but never the list or a page.
    items = tl.load(units_ptr, cache_modifier=".cg") * K
    row, head, length, split, splits, keys_each = unit_of(units_ptr, item, items, K, True)
    if PDL:
        if (item < items) & (split * keys_each < length):
            table_row = page_table_ptr + row * table_width
            first = split * keys_each // BLOCK_N
            block_to_l2(keys_ptr, values_ptr, table_row, first, length, head, K, D, D, PAGE, BLOCK_N, LINES)
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
    for done in tl.range(0, rounds, num_stages=1, disable_licm=True):
        token = row * QUERY_LEN
        table_row = page_table_ptr + row * table_width
        begin = split * keys_each // BLOCK_N
        end = tl.minimum(begin + keys_each // BLOCK_N, (length + BLOCK_N - 1) // BLOCK_N)
        whole = tl.maximum(tl.minimum(end, tl.maximum(length - QUERY_LEN, 0) // BLOCK_N), begin)
        held = tl.load(table_row + begin * BLOCK_N // PAGE, mask=whole > begin, other=0)
        q = query(
            q_ptr, keys_ptr, values_ptr, 0, 0.0, token, QUERY_LEN, head, rows, False, 0, K, GROUP, D, D, D, False, False
        )
        peak = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, D), tl.float32)
        for block in tl.range(begin, whole, num_stages=STAGES):
            first = held * PAGE + block * BLOCK_N % PAGE
            held = tl.load(table_row + (block + 1) * BLOCK_N // PAGE, mask=block + 1 < whole, other=0)
            k = keys_desc.load([first, head * D]).to(q.dtype)
            scores = tl.dot(q, tl.trans(k)) * scale_log2e
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp2(scores - new_peak[:, None])
            decay = tl.exp2(peak - new_peak)
            total = total * decay + tl.sum(weights, 1)
            v = values_desc.load([first, head * D]).to(q.dtype)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None])
            peak = new_peak
        for block in tl.range(whole, end, num_stages=1):
            keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
            page = tl.load(table_row + block * BLOCK_N // PAGE).to(tl.int64)
            where = ((page * PAGE + keys % PAGE) * K + head)[:, None] * D + dims[None, :]
            mask = (keys < length)[:, None]
            k = tl.load(keys_ptr + where, mask=mask, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k)) * scale_log2e
            seen = (keys < length)[None, :]
            if TREE:
                seen = seen_in_tree(nodes_seen(tree_ptr, row, rows, GROUP, QUERY_LEN), keys, length, QUERY_LEN)
            elif CAUSAL:
                seen = keys[None, :] < (length - QUERY_LEN + 1 + rows // GROUP)[:, None]
            scores = tl.where(seen, scores, -float("inf"))
            weights, peak, decay = weights_of_keys(scores, peak, 1)
            total = total * decay + tl.sum(weights, 1)
            v = tl.load(values_ptr + where, mask=mask, other=0.0).to(q.dtype)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None])
        finish_unit(
            acc, peak, total, (out_ptr, out_scale_ptr, out_pitch), partial_ptr, stats_ptr, counter_ptr, row, token,
            QUERY_LEN, head, split, splits, most, K, GROUP, D, D, ROWS, ROWS, FAN, 1, ALONE,
        )  # fmt: skip
        item = (done + 1) * programs + tl.where(done % 2 == 1, first_of_round, across_round)
        row, head, length, split, splits, keys_each = unit_of(units_ptr, item, items, K)


def supports(heads: int, kv_layer: Tensor, inputs: DecodeAttention, block_n: int) -> bool:
    """Whether ``attend_windows`` takes these, with ``block_n`` keys a block; assumes a device with TMA."""
    _, _, page, kv_heads, head_dim = kv_layer.shape
    return (
        kv_layer.dtype in (torch.bfloat16, torch.float16, FP8)
        and head_dim in HEAD_DIMS
        and inputs.starts_B is None
        and heads // kv_heads * inputs.query_len in QUERY_ROWS
        and page % block_n == 0
    )


def attend_windows(
    q_THD: Tensor, kv_layer: Tensor, inputs: DecodeAttention, work: DecodeWork, scale: float, workspace: Tensor,
    counters: Tensor, *, out_THD: Activations | None = None, stages: int, warps: int, programs: int, pdl: bool,
) -> Tensor:  # fmt: skip
    """decode_list.attend_list for what ``supports`` accepts: query_len tokens of each row, rotated before. A block
    of keys is that of the list's rule."""
    _, _, page, kv_heads, head_dim = kv_layer.shape
    (tokens, heads, _), rows, most = q_THD.shape, inputs.kv_lengths_B.shape[0], work.rule.most
    group = heads // kv_heads
    query_rows = power_of_two_from(group * inputs.query_len)
    if out_THD is None:
        out_THD = torch.empty(tokens, heads, head_dim, dtype=q_THD.dtype, device=q_THD.device)
    out, *out_scale = memory_of(out_THD)
    block_n, boxes = work.rule.block, kv_layer.view(2, -1, kv_heads * head_dim)
    slots = rows * kv_heads * (most + -(-most // MERGED_AT_ONCE))
    _attend_window_kernel[(min(programs, kv_heads * (len(work.units_U4) - 1)),)](
        q_THD, kv_layer[0], kv_layer[1], TensorDescriptor.from_tensor(boxes[0], [block_n, head_dim]),
        TensorDescriptor.from_tensor(boxes[1], [block_n, head_dim]), inputs.page_table_BP, work.units_U4,
        work.units_U4 if inputs.tree_BQ is None else inputs.tree_BQ, out, *out_scale, workspace,
        workspace[slots * query_rows * head_dim :] if most > 1 else workspace, counters, scale * LOG2_E,
        inputs.page_table_BP.stride(0), most, kv_heads,
        GROUP=group, D=head_dim, PAGE=page, QUERY_LEN=inputs.query_len, ROWS=query_rows, BLOCK_N=block_n, STAGES=stages,
        LINES=max(1, head_dim * kv_layer.element_size() // LINE_BYTES), FAN=MERGED_AT_ONCE, ALONE=most == 1,
        CAUSAL=inputs.causal, TREE=inputs.tree_BQ is not None, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
