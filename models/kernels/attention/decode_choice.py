"""Which launch decode attention gets: keys a block, stages and warps, splits of a row, by TMA or not, merged how.

Knows: what was measured on an H200 (docs/lab/measurements/attention.md), tables of choices for other shapes and
GPUs, and how much of it fits a device. Does not know: what the kernels compute (decode.py, decode_list.py,
decode_window.py), or who launches them (models/ops/rows_nvidia).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.inputs import DecodeAttention
from models.kernels.attention import decode_window
from models.kernels.attention.decode_list import supports_tma
from models.kernels.attention.decode_variant import DecodeShape, DecodeVariant, nearest_variant
from models.kernels.attention.decode_work import (
    ANY_LENGTH,
    COUNTERS,
    MERGED_AT_ONCE,
    MOST_SPLITS,
    SplitRule,
    choose_rule,
    choose_splits,
    counters_of,
    workspace_floats,
)
from models.kernels.attention.query import padded_dim
from models.kernels.traits import DeviceTraits
from models.kv_group import FP8, Planes
from models.row_buckets import power_of_two_from

MOST_BLOCK = 64  # keys of a block of any launch
_MANY_PAIRS = 1024  # (row, kv head) pairs; from here on a step on an H200 reached the power limit
_LIST_PAIRS = 256  # (row, kv head) pairs; with fewer, every split that a row could have is a program
_LIST_PAIRS_ALONE = 64  # the same of single tokens that TMA serves
_LIST_PAIRS_OF_ROWS = 32, 16  # the same, and from how many rows on: many rows differ more in length
_FEW_LISTED = 256  # pairs; of single tokens by TMA with fewer, a list has at most _MOST_OF_FEW splits a row
_MOST_OF_FEW = 16  # so splits of long rows have more keys, and are merged in one level
_FEW_PAIRS = 8  # of a single token's pairs: 64 keys a block and a split, as for the windows of few rows
_WINDOW_PAIRS = 16  # up to so many, and from 16 query rows on: the launches of _few_windows
_WINDOW_SPLITS = 8  # of their rows; long ones have more
_LONGEST_OF_WINDOW = 1024  # keys of such a split, where ``most`` allows it
_TALL_BLOCKS = range(17, 65)  # pairs for which 64 keys a block, and splits by choose_splits, were faster
_LONGEST_SPLIT = 1024  # keys of a split, where ``most`` allows it
_LONGEST_BY_POINTERS = 512  # the same where keys do not come by TMA
_LONGEST_OF_MIXED = 384  # the same of single tokens where most rows may be absent
_LONGEST_OF_MIXED_WINDOWS = 256
_PROGRAMS_EACH = 32  # of a multiprocessor: programs of balanced attention where the rows need fewer
_PROGRAMS_OF_FEW = 16  # the same with fewer than _FEW_LISTED pairs
_PROGRAMS_OF_MIXED_WINDOWS = 8
_TMA_BLOCK = 32  # keys
_FP8_PROGRAMS = 4  # or more a multiprocessor, for single tokens over a float8 cache, whose blocks have half the bytes
_WINDOW_BLOCK = 64  # keys, of windows over a list
_WINDOW_LONGEST = 2048  # keys of a split of theirs
_TALLEST_OF_MANY_WARPS = 256 * 256  # bytes of query rows
_TALLEST = 512 * 256  # bytes of query rows that any kernel compiles for on an H100
_SHARED_RESERVE = 27 << 10  # bytes of shared memory that decode attention leaves unused


class _SingleTokens(NamedTuple):
    """Single tokens over a list by TMA, all rows there, up to ``pairs`` of row and kv head."""

    pairs: int
    longest: int  # keys of a split
    programs: int  # of a multiprocessor, where the rows need fewer
    warps: int  # of up to 8 query heads a kv head


class WindowLaunch(NamedTuple):
    """How windows over a list are launched. ``tma``: by decode_window.py, with ``stages`` and ``warps``; else by
    pointers (decode_list.py), with those of ``DecodeChoice.variant``. ``programs``: of a multiprocessor.
    ``fewest``, ``longest`` and ``most``: of the rule by which rows are split."""

    tma: bool
    stages: int
    warps: int
    programs: int
    fewest: int
    longest: int
    most: int


# The best of chat-like and of equal lengths on an H200. Programs that find nothing to do cost time; but where rows have
# several splits each, too few programs mean one more round for some.
_SINGLE_TOKENS = (
    _SingleTokens(63, 128, 4, 1),
    _SingleTokens(127, 256, 8, 1),
    _SingleTokens(255, 384, 8, 1),
    _SingleTokens(1023, 768, 8, 2),
    _SingleTokens(2047, 768, 16, 1),
    _SingleTokens(ANY_LENGTH, _LONGEST_SPLIT, _PROGRAMS_EACH, 1),
)


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """For one device. ``pdl``: it has dependent launches, and with them TMA. ``variants``: measured ones, by shape.
    ``room``: floats of workspace for partial results.
    """

    traits: DeviceTraits
    pdl: bool
    variants: Mapping[str, DecodeVariant]
    room: int

    def variant(
        self, inputs: DecodeAttention, heads: int, kv_layer: Tensor, *, listed: bool = True
    ) -> tuple[bool, tuple[int, int, int]]:
        """Whether TMA serves these best, which only a list has, and (keys a block, stages, warps)."""
        rows, (_, _, _, kv_heads, head_dim) = inputs.kv_lengths_B.shape[0], kv_layer.shape
        query_rows = heads // kv_heads * inputs.query_len
        tuned = nearest_variant(self.variants, DecodeShape(rows * kv_heads, query_rows, head_dim, kv_layer.dtype))
        pairs = rows * kv_heads
        every_split = self.without_list(inputs, heads, kv_layer)
        by_tma = _by_tma(pairs, inputs.query_len) if tuned is None else tuned.tma
        if self.pdl and by_tma and listed and not every_split:  # the same GPUs have TMA and dependent launches
            warps = 1 if kv_layer.dtype == FP8 else _warps_by_tma(inputs, pairs)
            blocks = _tma_blocks(query_rows, warps) if tuned is None else tuned.blocks
            if supports_tma(heads, kv_layer, inputs, blocks[0]):
                return True, blocks
        row_bytes = padded_dim(head_dim) * max(2, kv_layer.element_size())  # as in products
        shared = self.traits.shared_bytes - _SHARED_RESERVE
        tall = power_of_two_from(query_rows)
        blocks = _attention_blocks(pairs, tall, row_bytes, shared, every_split=every_split)
        if tuned is not None and not tuned.tma:
            needed = _attention_shared(tuned.block_n, tuned.stages, tall, row_bytes)
            blocks = tuned.blocks if needed <= shared else blocks
        if kv_layer.dtype == FP8 and pairs >= _MANY_PAIRS:  # without TMA; 64 keys would spill
            blocks = 32, *blocks[1:]
        if kv_layer.dtype == FP8 and tall >= 128:  # with fewer warps the codes' conversion would spill
            blocks = *blocks[:2], 8
        if kv_layer.dtype == torch.float32:  # no tensor cores: the operands of tl.dot stay in registers
            blocks = min(blocks[0], 32), 3, 8
        return False, blocks

    def window(self, inputs: DecodeAttention, heads: int, kv_layer: Tensor) -> WindowLaunch | None:
        """How windows over a list are launched; None where every split is a program, or others serve."""
        if not self.pdl or inputs.query_len == 1:
            return None
        if not decode_window.supports(heads, kv_layer, inputs, _WINDOW_BLOCK):
            return None
        rows, (_, _, _, kv_heads, head_dim) = inputs.kv_lengths_B.shape[0], kv_layer.shape
        pairs, query_rows = rows * kv_heads, power_of_two_from(heads // kv_heads * inputs.query_len)
        # For so few pairs a plan and a merge cost as much as the list gains.
        if pairs < _FEW_PAIRS or (pairs == _FEW_PAIRS and query_rows < 64):
            return None
        launch = _window_launch(pairs, query_rows, self.traits.multiprocessors, absent=inputs.skip_empty)
        row_bytes = head_dim * max(2, kv_layer.element_size())
        fits = row_bytes * (2 * _WINDOW_BLOCK * (launch.stages - 1) + 3 * query_rows) <= self.traits.shared_bytes
        return launch if fits or not launch.tma else None

    def without_list(self, inputs: DecodeAttention, heads: int, kv_layer: Tensor) -> bool:
        """Whether every split that a row could have is a program. So few that none need be looked up are faster."""
        if inputs.starts_B is not None or inputs.skip_empty or self.window(inputs, heads, kv_layer) is not None:
            return False
        rows, kv_heads = inputs.kv_lengths_B.shape[0], kv_layer.shape[3]
        enough, (pairs, many_rows) = _LIST_PAIRS, _LIST_PAIRS_OF_ROWS
        if inputs.query_len == 1 and self.pdl and supports_tma(heads, kv_layer, inputs, _TMA_BLOCK):
            enough = pairs if rows >= many_rows else _LIST_PAIRS_ALONE
        return rows * kv_heads < enough

    def rule(self, inputs: DecodeAttention, heads: int, kv_layer: Tensor) -> SplitRule:
        """How rows are split."""
        rows, (_, _, _, kv_heads, head_dim) = inputs.kv_lengths_B.shape[0], kv_layer.shape
        by_tma, (block_n, _, _) = self.variant(inputs, heads, kv_layer)
        most, pairs, splits = inputs.max_kv_length, rows * kv_heads, MOST_SPLITS
        query_rows = heads // kv_heads * inputs.query_len
        tall = power_of_two_from(query_rows)
        fewest = choose_splits(rows, kv_heads, most, block_n, 0 if by_tma else self.traits.multiprocessors)
        window = self.window(inputs, heads, kv_layer)
        every_split = self.without_list(inputs, heads, kv_layer)
        if window is not None:
            block_n, fewest, longest, splits = _WINDOW_BLOCK, window.fewest, window.longest, window.most
        elif every_split and _few_windows(pairs, tall, head_dim):
            fewest, longest = _WINDOW_SPLITS, _LONGEST_OF_WINDOW
            splits = _most_of_window(pairs, _merged_apart(pairs, tall, head_dim))
        elif every_split:
            if pairs not in _TALL_BLOCKS:
                fewest = _fewest_splits(pairs, query_rows, self.traits.multiprocessors)
            # Programs of splits that no row has cost time, too: a long row gets twice as many as the others, and where
            # few pairs have a program for each multiprocessor already, no more.
            enough = pairs <= _FEW_PAIRS and pairs * fewest >= self.traits.multiprocessors
            longest = ANY_LENGTH if enough else max(block_n, -(-most // (2 * fewest)))
        elif inputs.skip_empty:
            longest = _LONGEST_OF_MIXED if inputs.query_len == 1 else _LONGEST_OF_MIXED_WINDOWS
        elif not by_tma:
            longest = _LONGEST_BY_POINTERS
        else:
            longest = _longest_by_tma(pairs, inputs.query_len)
            if pairs < _FEW_LISTED and inputs.query_len == 1:
                splits = _MOST_OF_FEW
            if kv_layer.dtype == FP8 and inputs.query_len == 1:
                fewest = max(fewest, _FP8_PROGRAMS * self.traits.multiprocessors // pairs)
        return choose_rule(
            rows, kv_heads, query_rows, head_dim, inputs.max_kv_length,
            block=block_n, longest=longest, fewest=fewest, most=splits, room=self.room,
        )  # fmt: skip

    def fits(self, rule: SplitRule, rows: int, kv_heads: int, query_rows: int, head_dim: int) -> bool:
        """Whether there is room for the partial results of this layer, which may not be that of the rule."""
        floats = workspace_floats(rows, kv_heads, query_rows, head_dim, rule.most)
        counters = counters_of(rows, kv_heads, rule.most)
        return floats <= self.room and counters <= COUNTERS

    def merges_apart(self, pairs: int, query_rows: int, head_dim: int) -> bool:
        """Whether splits of these rows are merged by another launch; asked where each split is a program."""
        return _merged_apart(pairs, power_of_two_from(query_rows), head_dim)


def longest_window(heads: int, planes: Planes) -> int | None:
    """Tokens of a row that decode attention takes at once, of 16 bits: the query rows of a key head, a power of two of
    them, must fit a program. 0 where not even one token does; None in float32, for any number."""
    key = planes[0]
    if key.dtype == torch.float32:
        return None
    rows = _TALLEST // (2 * padded_dim(key.dim))
    return (1 << rows.bit_length() - 1) // (heads // key.heads)


def programs_of(inputs: DecodeAttention, kv_heads: int, rule: SplitRule, multiprocessors: int, each: int) -> int:
    """Programs of balanced attention: for the splits that all rows have, or ``each`` a multiprocessor if more.

    Where rows may be absent there are no more than ``each``: programs that do nothing take time, too.
    """
    rows, full = inputs.kv_lengths_B.shape[0], -(-each * multiprocessors // kv_heads)
    return kv_heads * min(rows * rule.most, full if inputs.skip_empty else max(rows * rule.fewest, full))


def programs_each(inputs: DecodeAttention, kv_heads: int, by_tma: bool) -> int:
    """Of a multiprocessor, where the rows need fewer."""
    pairs = inputs.kv_lengths_B.shape[0] * kv_heads
    if inputs.skip_empty:
        return _PROGRAMS_EACH if inputs.query_len == 1 else _PROGRAMS_OF_MIXED_WINDOWS
    if inputs.query_len == 1 and by_tma:
        return _single_tokens(pairs).programs
    return _PROGRAMS_OF_FEW if pairs < _FEW_LISTED else _PROGRAMS_EACH


def _window_launch(pairs: int, query_rows: int, multiprocessors: int, *, absent: bool) -> WindowLaunch:
    """The fastest between products on an H200 (docs/lab/measurements/attention.md). Up to as many pairs as
    multiprocessors have one program each, with as many blocks of keys in flight as it has room for; more pairs have
    two. ``absent``: rows may be, so the number of pairs says little.
    """
    tma = query_rows < 128  # sums of more leave no registers for the ends of decode_window.py
    warps = 4 if tma else 8
    if absent or pairs > multiprocessors:
        stages, programs = (4 if query_rows <= 16 else 3, 2) if tma else (5, 1)
        fewest, longest = (2, _WINDOW_LONGEST // 2) if absent else (1, _WINDOW_LONGEST)
        return WindowLaunch(tma, stages, warps, programs, fewest, longest, MOST_SPLITS)
    stages = 4 if query_rows == 64 else 5
    fewest = min(multiprocessors // pairs, 4 if tma else 8)  # more take longer to merge than they save
    longest = _WINDOW_LONGEST
    if pairs <= _WINDOW_PAIRS:
        longest = longest * 3 // 4 if tma else longest // 2
    return WindowLaunch(tma, stages, warps, 1, fewest, longest, MERGED_AT_ONCE)


def window_programs(each: int, kv_heads: int, multiprocessors: int) -> int:
    """Programs over the list of windows, about ``each`` a multiprocessor: as many of each key head."""
    return kv_heads * max(1, each * multiprocessors // kv_heads)


def _few_windows(pairs: int, query_rows: int, head_dim: int) -> bool:
    """Whether windows of few rows, or many query heads of a key head, have launches that were measured for them
    (docs/lab/measurements/attention.md)."""
    return pairs <= _WINDOW_PAIRS and 16 <= query_rows <= 128 and padded_dim(head_dim) <= 256


def _merged_apart(pairs: int, query_rows: int, head_dim: int) -> bool:
    """Whether their splits are merged by another launch, since one program of a pair would take longer."""
    tall = query_rows * padded_dim(head_dim) >= 32 * 128
    return tall and pairs <= _FEW_PAIRS and _few_windows(pairs, query_rows, head_dim)


def _most_of_window(pairs: int, apart: bool) -> int:
    """Splits of a row of such a window, however long it is."""
    if pairs > _FEW_PAIRS:
        return _WINDOW_SPLITS
    return 4 * _WINDOW_SPLITS if pairs <= _FEW_PAIRS // 2 and not apart else 2 * _WINDOW_SPLITS


def _fewest_splits(pairs: int, query_rows: int, multiprocessors: int) -> int:
    """Splits of a row of decode.py, where there are as many blocks: two programs a multiprocessor, or some more.

    More than 16 are merged in two levels, which is worth it for the very fewest pairs and short tiles only; more than 8
    of tall tiles take longer to merge than their keys to read.
    """
    if pairs <= _FEW_PAIRS and query_rows < 16:
        return 64
    wanted = 1 << (max(1, 2 * multiprocessors // pairs).bit_length() - 1)
    return min(max(wanted, 4), 64 if pairs < 8 else 16 if query_rows < 64 else 8)


def _by_tma(pairs: int, query_len: int) -> bool:
    """Where TMA was faster over a list on an H200, or drew less power; of single tokens everywhere."""
    return query_len == 1 or pairs >= _MANY_PAIRS or _LIST_PAIRS <= pairs < 2 * _LIST_PAIRS


def _longest_by_tma(pairs: int, query_len: int) -> int:
    """Keys of a split over a list."""
    return _LONGEST_SPLIT if query_len > 1 else _single_tokens(pairs).longest


def _single_tokens(pairs: int) -> _SingleTokens:
    return next(one for one in _SINGLE_TOKENS if pairs <= one.pairs)


def _warps_by_tma(inputs: DecodeAttention, pairs: int) -> int:
    return 1 if inputs.query_len > 1 or inputs.skip_empty else _single_tokens(pairs).warps


def _tma_blocks(query_rows: int, warps: int = 1) -> tuple[int, int, int]:
    """(keys a block, stages, warps) of decode_list.py by TMA: the fastest layers on an H200."""
    return _TMA_BLOCK, 3, warps if query_rows <= 8 else 2


def _attention_blocks(
    pairs: int, query_rows: int, row_bytes: int, shared_bytes: int, *, every_split: bool = False
) -> tuple[int, int, int]:
    """(keys a block, stages, warps): the fastest on an H200 for ``pairs`` of row and kv head, cut to fit.
    ``every_split``: each split that a row could have is a program."""
    block_n, stages, warps = 64, 5, 4
    few_windows = every_split and _few_windows(pairs, query_rows, row_bytes // 2)
    if few_windows:
        block_n = 64 if query_rows * row_bytes <= 64 * 256 else 32
        warps = max(4, query_rows * row_bytes // (64 * 256) * 2)  # at most 128 sums a thread
    elif pairs >= 1024:
        stages, warps = 3, 2
    elif every_split and pairs <= _FEW_PAIRS and query_rows < 16 and row_bytes <= 256:
        stages = 3 if pairs > 1 else 5
    elif every_split and query_rows in (16, 32) and pairs >= _TALL_BLOCKS.stop:  # windows: two warps were too few
        block_n, stages = (64, 3) if query_rows == 16 else (32, 5)
    elif pairs >= 256 or (every_split and pairs not in _TALL_BLOCKS):
        block_n, warps = 32, 2
    if query_rows >= 64 and not few_windows:
        warps = max(4, query_rows // 16)  # fewer warps would spill so tall a tile
        if query_rows * row_bytes > _TALLEST_OF_MANY_WARPS:
            warps = 8  # more warps have too few registers each for the tensor cores' operands: ptxas refuses
    while block_n > 16 and _attention_shared(block_n, stages, query_rows, row_bytes) > shared_bytes:
        block_n //= 2
    return block_n, stages, warps


def _attention_shared(block_n: int, stages: int, query_rows: int, row_bytes: int) -> int:
    """An estimate of a program's shared memory in bytes; what Triton 3.6 compiles has up to 6 KiB more.

    Keys and values of a block are buffered (stages - 1) / 2 times, besides about three tiles of query rows.
    """
    return row_bytes * (block_n * (stages - 1) + 3 * query_rows)
