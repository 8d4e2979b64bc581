"""The work list of decode attention: which splits of which rows a step has, made on the device once a step.

Knows: how a row is divided (by its bucket and its own length, nothing else), and in which order splits are begun.
Does not know: keys or queries; which program takes which split (decode_list.py).

A captured launch has a fixed number of programs, but rows of any length. If each row had its programs, the
longest row of a step would decide how long attention takes. So a small kernel writes a list of all splits of all rows,
those with the most keys first, and the programs of attention take them in this order. Where a split begins and ends
does not depend on the other rows, nor does the order in which splits are merged: the list decides only who computes a
split and when, so a row's result has the same bits whatever else is in the step.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.inputs import DecodeAttention
from models.kernels.attention.query import first_key, padded_dim
from models.row_buckets import power_of_two_from

MERGED_AT_ONCE = 16  # splits that one program merges; more are merged in groups of as many, then the groups
MOST_SPLITS = MERGED_AT_ONCE**2  # of a row
COUNTERS = 1 << 16  # int32 counters that merging has; see counters_of
ANY_LENGTH = 1 << 30  # keys: more than a row has
_ROWS = 8  # of a program of the kernel below
_AT_ONCE = 16  # splits of each of these rows written at once


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How a row's keys are divided. All numbers are fixed for a bucket.

    ``block``: keys; splits begin at multiples of it. ``fewest``: splits of a row with at least so many blocks.
    ``longest``: keys of a split; only a row that would need more than ``most`` splits has longer ones.
    """

    block: int
    fewest: int
    longest: int
    most: int


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """``DecodeAttention.work`` of NvidiaOps: a step's list, for all its layers.

    units_U4 int32: [0, 0] is the number of splits n. Units 1 to n: row, its length, split + (the row's splits << 16),
    keys a split. What follows them is undefined.
    """

    units_U4: Tensor
    rule: SplitRule


def workspace_floats(rows: int, kv_heads: int, query_rows: int, head_dim: int, most: int) -> int:
    """Floats of workspace that attention needs; ``query_rows`` is group size * query_len."""
    if most == 1:
        return 0
    slots = most + -(-most // MERGED_AT_ONCE)
    return rows * kv_heads * slots * power_of_two_from(query_rows) * (padded_dim(head_dim) + 2)


def counters_of(rows: int, kv_heads: int, most: int) -> int:
    """Counters that attention needs: of each (row, kv head) one a group of splits, and one for the groups."""
    return 0 if most == 1 else rows * kv_heads * (1 + -(-most // MERGED_AT_ONCE))


def choose_splits(rows: int, kv_heads: int, max_kv_length: int, block_n: int, programs: int) -> int:
    """Splits of a row: the largest power of two with at most ``programs`` programs, and no more than key blocks.

    Up to ``programs`` pairs of row and kv head get two splits even where these are more programs: two halves on one
    multiprocessor are faster than one whole row that has it to itself.
    """
    most, pairs = power_of_two_from(-(-max_kv_length // block_n)), rows * kv_heads
    wanted = max(1, programs // pairs, 2 * programs // pairs if 2 * pairs > programs else 1)
    return max(1, min(64, most, 1 << (wanted.bit_length() - 1)))


def choose_rule(
    rows: int, kv_heads: int, query_rows: int, head_dim: int, max_kv_length: int, *, block: int, longest: int,
    fewest: int, room: int, most: int = MOST_SPLITS,
) -> SplitRule:  # fmt: skip
    """The rule of a bucket of ``rows``: ``fewest`` splits a row; up to ``most`` where one had over ``longest`` keys.

    ``room``: floats of the workspace, which no step can overflow: every row may be ``max_kv_length`` long.
    """
    longest = -(-longest // block) * block
    most = min(most, max(fewest, -(-max_kv_length // longest)))
    while most > 1 and (
        workspace_floats(rows, kv_heads, query_rows, head_dim, most) > room
        or counters_of(rows, kv_heads, most) > COUNTERS
    ):
        most -= 1
    return SplitRule(block, min(fewest, most), longest, most)


@triton.jit
def splits_of_rows(lengths, block, fewest, longest, most, SKIP_EMPTY: tl.constexpr):
    """(splits, keys a split) of rows of these lengths."""
    blocks = (lengths + block - 1) // block
    wanted = tl.minimum(tl.maximum((lengths + longest - 1) // longest, fewest), most)
    each = tl.maximum((blocks + wanted - 1) // wanted, 1)
    splits = tl.maximum((blocks + each - 1) // each, 1)
    if SKIP_EMPTY:
        splits = tl.where(lengths > 0, splits, 0)
    return splits, each * block


@triton.jit(do_not_specialize=["rows", "block", "fewest", "longest", "most"])
def _plan_decode_kernel(
    lengths_ptr,
    units_ptr,  # int32 [1 + rows * most, 4]
    rows, block, fewest, longest, most,
    QUERY_LEN: tl.constexpr,  # of the two, 0 where there is no window
    WINDOW: tl.constexpr,
    ALL: tl.constexpr,  # at least ``rows``
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr, SKIP_EMPTY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    every = tl.arange(0, ALL)
    lengths = tl.load(lengths_ptr + every, mask=every < rows, other=0)
    seen = lengths - first_key(lengths, QUERY_LEN, WINDOW, block)
    splits, keys = splits_of_rows(seen, block, fewest, longest, most, SKIP_EMPTY)
    splits = tl.where(every < rows, splits, 0)
    mine = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = mine < rows
    own_lengths = tl.load(lengths_ptr + mine, mask=there, other=0)
    own_seen = own_lengths - first_key(own_lengths, QUERY_LEN, WINDOW, block)
    own_splits, own_keys = splits_of_rows(own_seen, block, fewest, longest, most, SKIP_EMPTY)
    own_splits = tl.where(there, own_splits, 0)
    if tl.program_id(0) == 0:
        tl.store(units_ptr, tl.sum(splits, 0))
    # The most keys a split first; rows with as many in their own order.
    longer = keys[None, :] > own_keys[:, None]
    before = longer | ((keys[None, :] == own_keys[:, None]) & (every[None, :] < mine[:, None]))
    first = tl.sum(tl.where(before, splits[None, :], 0), 1)
    for start in tl.range(0, tl.max(own_splits, 0), AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)
        unit = units_ptr + 4 * (1 + first[:, None] + split[None, :])
        mask = split[None, :] < own_splits[:, None]
        tl.store(unit, tl.broadcast_to(mine[:, None], ROWS, AT_ONCE), mask=mask)
        tl.store(unit + 1, tl.broadcast_to(own_lengths[:, None], ROWS, AT_ONCE), mask=mask)
        tl.store(unit + 2, split[None, :] + (own_splits[:, None] << 16), mask=mask)
        tl.store(unit + 3, tl.broadcast_to(own_keys[:, None], ROWS, AT_ONCE), mask=mask)


def plan_decode(inputs: DecodeAttention, rule: SplitRule, pdl: bool, window: int | None = None) -> DecodeWork:
    """The list of ``inputs``'s rows. One launch, which may be captured; the launch before it may write the lengths.

    Attention reads the list while the launch before it still runs, so between the two there is at least one other.
    """
    rows = inputs.kv_lengths_B.shape[0]
    units_U4 = torch.empty(1 + rows * rule.most, 4, dtype=torch.int32, device=inputs.kv_lengths_B.device)
    _plan_decode_kernel[(-(-rows // _ROWS),)](
        inputs.kv_lengths_B, units_U4, rows, rule.block, rule.fewest, rule.longest, rule.most,
        QUERY_LEN=inputs.query_len if window else 0, WINDOW=window or 0, ALL=max(_ROWS, power_of_two_from(rows)),
        ROWS=_ROWS, AT_ONCE=_AT_ONCE, SKIP_EMPTY=inputs.skip_empty, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return DecodeWork(units_U4, rule)
