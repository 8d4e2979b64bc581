"""The back of the decode attention kernels: where a unit's result goes, and how the splits of a row become one.

Knows: the next unit of a program's share of the work list, partial results in the workspace, counters.
Does not know: scores (decode.py, decode_list.py), how the list was made (decode_work.py).

A row with one split is written at once. Of a row with more, the last program to finish a group of FAN splits merges
them in split order; where there are several groups, the last program to finish one merges the groups in their order.
So no program reads more than FAN partial results twice, and bits do not depend on which program is last.

With APART no program merges: ``merge_splits`` does in another launch, in which a few query rows are a program. One
program that merges many query rows of many splits takes longer than that launch.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.inputs import DecodeAttention
from models.kernels.attention.decode_work import SplitRule, splits_of_rows
from models.kernels.attention.query import first_key, padded_dim, with_sinks
from models.kernels.interface import PLAIN, AttentionKind
from models.row_buckets import power_of_two_from
from parallel.comm.quantise_triton import quantised
from parallel.comm.quantised import Activations, memory_of

_QUERY_ROWS = 4  # of a program of merge_splits
_AT_ONCE = 8  # splits whose sums such a program loads together


@triton.jit
def unit_of(units_ptr, item, items, K, FIRST: tl.constexpr = False):
    """(row, kv head, length, split, splits, keys a split) of one item of the list; row 0 of length 0 beyond its end.

    ``FIRST``: of a program's first item, anything beyond the end: the loads do not wait for the number of items, and
    the list has room for them.
    """
    unit = units_ptr + 4 * (1 + item // K)
    if FIRST:
        there = True
    else:
        there = item < items
    row = tl.load(unit, mask=there, other=0, cache_modifier=".cg").to(tl.int64)
    length = tl.load(unit + 1, mask=there, other=0, cache_modifier=".cg")
    packed = tl.load(unit + 2, mask=there, other=0, cache_modifier=".cg")
    keys = tl.load(unit + 3, mask=there, other=0, cache_modifier=".cg")
    return row, item % K, length, packed & 0xFFFF, packed >> 16, keys


@triton.jit
def finish_unit(
    acc,  # [ROWS, BLOCK_D] float32, relative to peak
    peak,  # [ROWS]
    total,  # [ROWS]
    out,  # as write_rows takes it
    partial_ptr,  # float32 [B * K, most + groups, REAL_ROWS, BLOCK_D]
    stats_ptr,  # float32 [B * K, most + groups, 2, REAL_ROWS]: maximum and sum
    counter_ptr,  # int32 [B * K, groups + 1]
    row,
    token,  # the row's first
    count,  # its tokens
    head, split, splits, most, K,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, REAL_ROWS: tl.constexpr,
    FAN: tl.constexpr,
    MERGE: tl.constexpr,  # partial results loaded at once
    ALONE: tl.constexpr,  # no row has a second split
    APART: tl.constexpr = False,  # merge_splits follows
    SINKS: tl.constexpr = False,
    sinks_ptr=None,  # float32 [H]
):  # fmt: skip
    if SINKS and ALONE:
        total = with_sinks(total, peak, sinks_ptr, head * GROUP + tl.arange(0, ROWS) % GROUP)
    if ALONE:
        write_rows(out, acc, total, token, head, 0, count, K, GROUP, D, BLOCK_D, ROWS)
    else:
        if splits == 1:
            if SINKS:
                total = with_sinks(total, peak, sinks_ptr, head * GROUP + tl.arange(0, ROWS) % GROUP)
            write_rows(out, acc, total, token, head, 0, count, K, GROUP, D, BLOCK_D, ROWS)
        elif APART:
            slot = (row * K + head) * most
            _keep(
                partial_ptr + slot * (REAL_ROWS * BLOCK_D), stats_ptr + slot * (2 * REAL_ROWS), split, acc, peak, total,
                BLOCK_D, ROWS, REAL_ROWS,
            )  # fmt: skip
        else:
            groups = (most + FAN - 1) // FAN
            pair = row * K + head
            partial = partial_ptr + pair * (most + groups) * (REAL_ROWS * BLOCK_D)
            stats = stats_ptr + pair * (most + groups) * (2 * REAL_ROWS)
            counter = counter_ptr + pair * (groups + 1)
            _keep(partial, stats, split, acc, peak, total, BLOCK_D, ROWS, REAL_ROWS)
            tl.debug_barrier()  # every thread's partial sums are written before one thread counts them
            group = split // FAN
            first = group * FAN
            members = tl.minimum(splits - first, FAN)
            if tl.atomic_add(counter + group, 1, sem="acq_rel", scope="gpu") == members - 1:
                tl.store(counter + group, 0)
                some, their_peak, some_total = _merged(
                    partial, stats, first, members, 0, BLOCK_D, REAL_ROWS, REAL_ROWS, FAN, MERGE
                )
                if splits <= FAN:
                    if SINKS:
                        some_total = with_sinks(
                            some_total, their_peak, sinks_ptr, head * GROUP + tl.arange(0, REAL_ROWS) % GROUP
                        )
                    write_rows(out, some, some_total, token, head, 0, count, K, GROUP, D, BLOCK_D, REAL_ROWS)
                else:
                    _keep(partial, stats, most + group, some, their_peak, some_total, BLOCK_D, REAL_ROWS, REAL_ROWS)
                    tl.debug_barrier()
                    used = (splits + FAN - 1) // FAN
                    if tl.atomic_add(counter + groups, 1, sem="acq_rel", scope="gpu") == used - 1:
                        tl.store(counter + groups, 0)
                        every, every_peak, every_total = _merged(
                            partial, stats, most, used, 0, BLOCK_D, REAL_ROWS, REAL_ROWS, FAN, MERGE
                        )
                        if SINKS:
                            every_total = with_sinks(
                                every_total, every_peak, sinks_ptr, head * GROUP + tl.arange(0, REAL_ROWS) % GROUP
                            )
                        write_rows(out, every, every_total, token, head, 0, count, K, GROUP, D, BLOCK_D, REAL_ROWS)


@triton.jit
def write_rows(
    out,  # (result [T, H, D], nothing, 0), or (codes, scales [H, pitch], pitch): a head's dims share a scale
    acc,  # [ROWS, BLOCK_D] float32
    total,  # [ROWS]
    token,  # the row's first
    head,
    base,  # the first query row
    count, K,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Stores acc / total."""
    rows, dims = base + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tokens, heads = token + rows // GROUP, head * GROUP + rows % GROUP
    where = (tokens * K * GROUP + heads)[:, None] * D + dims[None, :]
    there = rows < GROUP * count
    mask = there[:, None] & (dims < D)[None, :]
    if out[0].dtype.element_ty.primitive_bitwidth == 8:
        codes, scales = quantised(acc.to(tl.bfloat16))
        tl.store(out[0] + where, codes, mask=mask)
        tl.store(out[1] + heads * out[2] + tokens, scales, mask=there)
    else:
        tl.store(out[0] + where, acc.to(out[0].dtype.element_ty), mask=mask)


@triton.jit
def _keep(partial, stats, slot, acc, peak, total, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, REAL_ROWS: tl.constexpr):
    rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    within = (slot * REAL_ROWS + rows)[:, None] * BLOCK_D + dims[None, :]
    tl.store(partial + within, acc, mask=(rows < REAL_ROWS)[:, None])
    tl.store(stats + slot * 2 * REAL_ROWS + rows, peak, mask=rows < REAL_ROWS)
    tl.store(stats + (slot * 2 + 1) * REAL_ROWS + rows, total, mask=rows < REAL_ROWS)


@triton.jit
def _merged(
    partial, stats, first, count, base,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr, REAL_ROWS: tl.constexpr, FAN: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """(sums [ROWS, BLOCK_D], maximum, total) of ``count`` partial results from ``first`` on, at most FAN; of ROWS query
    rows from ``base`` on."""
    rows, dims, parts = base + tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, FAN)
    where = (first + parts)[:, None] * 2 * REAL_ROWS + rows[None, :]
    counted = (parts < count)[:, None]
    peaks = tl.load(stats + where, mask=counted, other=-float("inf"), cache_modifier=".cg")
    totals = tl.load(stats + where + REAL_ROWS, mask=counted, other=0.0, cache_modifier=".cg")
    peak = tl.max(peaks, 0)
    # A query that sees no key of these splits keeps -inf; subtracting it would make NaN of its weights.
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.sum(totals * tl.exp2(peaks - shift[None, :]), 0)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for begin in tl.range(0, count, MERGE):
        some = begin + tl.arange(0, MERGE)
        there = some < count
        own = stats + (first + some)[:, None] * 2 * REAL_ROWS + rows[None, :]
        weight = tl.exp2(tl.load(own, mask=there[:, None], other=-float("inf"), cache_modifier=".cg") - shift[None, :])
        tile = partial + ((first + some)[:, None, None] * REAL_ROWS + rows[None, :, None]) * BLOCK_D
        theirs = tl.load(tile + dims[None, None, :], mask=there[:, None, None], other=0.0, cache_modifier=".cg")
        acc += tl.sum(theirs * weight[:, :, None], 0)
    return acc, peak, total


def merged_at_once(real_rows: int, block_d: int, fan: int, warps: int) -> int:
    """MERGE: with more, ptxas spills to keep twice as many programs on a multiprocessor."""
    return max(1, min(fan, (4096 if warps <= 2 else 2048) // (real_rows * block_d)))


@triton.jit(do_not_specialize=["fewest", "longest", "most"])
def _merge_splits_kernel(
    lengths_ptr, out_ptr, out_scale_ptr, out_pitch,
    partial_ptr,  # float32 [B * K, most, REAL_ROWS, BLOCK_D]
    stats_ptr,  # float32 [B * K, most, 2, REAL_ROWS]
    sinks_ptr, K,
    fewest,  # decode_work.SplitRule
    longest, most,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, QUERY_LEN: tl.constexpr, ROWS: tl.constexpr,
    REAL_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,  # at least ``most``
    MERGE: tl.constexpr, SKIP_EMPTY: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + row, cache_modifier=".cg")
    length -= first_key(length, QUERY_LEN, WINDOW, BLOCK_N)
    splits, _ = splits_of_rows(length, BLOCK_N, fewest, longest, most, SKIP_EMPTY)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if splits > 1:
        slot = (row * K + head) * most
        partial, stats = partial_ptr + slot * (REAL_ROWS * BLOCK_D), stats_ptr + slot * (2 * REAL_ROWS)
        acc, peak, total = _merged(partial, stats, 0, splits, base, BLOCK_D, ROWS, REAL_ROWS, SPLITS, MERGE)
        if SINKS:
            total = with_sinks(total, peak, sinks_ptr, head * GROUP + (base + tl.arange(0, ROWS)) % GROUP)
        out = (out_ptr, out_scale_ptr, out_pitch)
        write_rows(out, acc, total, row * QUERY_LEN, head, base, QUERY_LEN, K, GROUP, D, BLOCK_D, ROWS)


def merge_splits(
    out: Activations, heads: int, head_dim: int, inputs: DecodeAttention, rule: SplitRule, kv_heads: int,
    partial: Tensor, stats: Tensor, pdl: bool, kind: AttentionKind = PLAIN,
) -> None:  # fmt: skip
    """Merges into ``out`` what the launch before it kept APART. In split order, so bits are always the same."""
    rows = inputs.kv_lengths_B.shape[0]
    real_rows = power_of_two_from(heads // kv_heads * inputs.query_len)
    few = min(_QUERY_ROWS, real_rows)
    most = power_of_two_from(rule.most)
    _merge_splits_kernel[(real_rows // few, kv_heads, rows)](
        inputs.kv_lengths_B, *memory_of(out), partial, stats, stats if kind.sinks_H is None else kind.sinks_H, kv_heads,
        rule.fewest, rule.longest, rule.most,
        GROUP=heads // kv_heads, D=head_dim, BLOCK_D=padded_dim(head_dim), QUERY_LEN=inputs.query_len, ROWS=few,
        REAL_ROWS=real_rows, BLOCK_N=rule.block, SPLITS=most, MERGE=min(_AT_ONCE, most), SKIP_EMPTY=inputs.skip_empty,
        WINDOW=kind.window or 0, SINKS=kind.sinks_H is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
