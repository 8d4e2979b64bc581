"""Gather and commit in Triton, one launch each: rows or packed tokens gathered by slot, samples written back by slot.

Knows: the arithmetic of gather.py and commit.py, which hold the torch references. Does not know: which words of a
record mean what (columns come as tensors, strides included), the forward pass and the sampling between the two.

``begin`` and ``begin_packed`` are plain launches, without programmatic dependent launch: what they write has landed
before the embedding starts. See models/kernels/dependent_launch.py.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.dependent_launch import dependent_launches

_PAGES = 1024  # of a row's page table that one program copies
_ROWS = 256  # that the one program of ``finish`` takes at a time


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _begin_kernel(
    rows_ptr, records_ptr, last_token_ptr, length_ptr, finished_ptr, pages_ptr, out_records_ptr, out_pages_ptr,
    token_ptr, position_ptr, kv_slot_ptr, live_ptr, kv_length_ptr, drawn_ptr, ended_ptr, words, last_token_stride,
    slots, max_blocks,
    BLOCK_SIZE: tl.constexpr, WORDS: tl.constexpr, PAGES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(rows_ptr + row)
    page_index = part * PAGES + tl.arange(0, PAGES)
    in_table = page_index < max_blocks
    for group in tl.static_range(GROUPS):
        pages = tl.load(pages_ptr + (group * slots + slot) * max_blocks + page_index, mask=in_table, other=0)
        tl.store(out_pages_ptr + (group * tl.num_programs(0) + row) * max_blocks + page_index, pages, mask=in_table)
    if part == 0:
        word = tl.arange(0, WORDS)
        record = tl.load(records_ptr + slot * words + word, mask=word < words, other=0)
        token = tl.load(last_token_ptr + slot * last_token_stride)
        length = tl.load(length_ptr + slot * words)
        live = tl.load(finished_ptr + slot * words) == 0
        position = tl.where(live, length - 1, 0)
        for group in tl.static_range(GROUPS):
            page_ptr = pages_ptr + (group * slots + slot) * max_blocks + position // BLOCK_SIZE
            page = tl.load(page_ptr, mask=live, other=0).to(tl.int64)
            place = page * BLOCK_SIZE + position % BLOCK_SIZE
            tl.store(kv_slot_ptr + group * tl.num_programs(0) + row, place)
        tl.store(out_records_ptr + row * words + word, record, mask=word < words)
        tl.store(token_ptr + row, token)
        tl.store(position_ptr + row, position.to(tl.int64))
        tl.store(kv_length_ptr + row, tl.where(live, length, 1))
        tl.store(drawn_ptr + row, length.to(tl.int64))
        tl.store(live_ptr + row, live)
        tl.store(ended_ptr + row, live == 0)


@triton.jit(
    do_not_specialize=["rows", "positions"],
    do_not_specialize_on_alignment=["rows_ptr", "drawn_token_ptr", "count_ptr", "finish_ptr"],
)
def _finish_kernel(
    rows_ptr, drawn_token_ptr, count_ptr, finish_ptr, old_token_ptr, old_length_ptr, old_finished_ptr, last_token_ptr,
    length_ptr, finished_ptr, history_ptr, ring_ptr, appended_ptr, rows, positions, words, last_token_stride,
    ring_stride, entries, stamps,
    REMEMBERS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    appended = tl.load(appended_ptr)
    entry_ptr = ring_ptr + (appended.to(tl.int32) % entries).to(tl.int64) * ring_stride
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < rows
        slot = tl.load(rows_ptr + row, mask=inside, other=0)
        token = tl.load(drawn_token_ptr + row, mask=inside, other=0)
        count = tl.load(count_ptr + row, mask=inside, other=0)
        finish = tl.load(finish_ptr + row, mask=inside, other=0)
        old_token = tl.load(old_token_ptr + row * last_token_stride, mask=inside, other=0)
        old_length = tl.load(old_length_ptr + row * words, mask=inside, other=0)
        old_finished = tl.load(old_finished_ptr + row * words, mask=inside, other=0)
        # Padding rows share slot 0: all of them write the values that it has.
        tl.store(last_token_ptr + slot * last_token_stride, tl.where(count > 0, token, old_token), mask=inside)
        tl.store(length_ptr + slot * words, old_length + count, mask=inside)
        tl.store(finished_ptr + slot * words, tl.where(old_finished == 0, finish, old_finished), mask=inside)
        if REMEMBERS:
            tl.store(history_ptr + slot * positions + old_length, token.to(tl.int32), mask=inside & (count > 0))
        tl.store(entry_ptr + 1 + row, token.to(tl.int32), mask=inside)
        tl.store(entry_ptr + 1 + rows + row, count, mask=inside)
        tl.store(entry_ptr + 1 + 2 * rows + row, finish, mask=inside)
    tl.store(entry_ptr, appended.to(tl.int32))
    tl.debug_barrier()  # every thread has read the counter before one of them moves it on
    tl.store(appended_ptr, tl.where(appended + 1 == stamps, 0, appended + 1))


@triton.jit(do_not_specialize=["tokens", "rows", "token_programs"])
def _begin_packed_kernel(
    token_ids_ptr, positions_ptr, slots_ptr, row_slots_ptr, decodes_ptr, last_token_ptr, length_ptr, finished_ptr,
    max_length_ptr, pages_ptr,
    guesses_ptr,  # int64 [slots, GUESSES], when there are some
    depth_ptr,  # int64 [slots, GUESSES + 1], when TREE
    out_token_ptr, out_position_ptr, out_kv_slot_ptr, out_kv_length_ptr, out_ghost_ptr, tokens, rows, token_programs,
    words, last_token_stride, slots, max_blocks,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, GUESSES: tl.constexpr, TREE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < token_programs:
        token = program * BLOCK + tl.arange(0, BLOCK)
        inside = token < tokens
        slot = tl.load(slots_ptr + token, mask=inside, other=0)
        position = tl.load(positions_ptr + token, mask=inside, other=0)
        token_id = tl.load(token_ids_ptr + token, mask=inside, other=0)
        newest = inside & (position < 0)
        live = tl.load(finished_ptr + slot * words, mask=newest, other=1) == 0
        length = tl.load(length_ptr + slot * words, mask=newest, other=1)
        latest = tl.load(last_token_ptr + slot * last_token_stride, mask=newest, other=0)
        behind = tl.where(newest, -1 - position, 0)  # the newest token
        kept = tl.where(live, (length - 1).to(tl.int64) + behind, 0)
        position = tl.where(newest, kept, position)
        there = inside & (live | (newest == 0))
        for group in tl.static_range(GROUPS):
            page_ptr = pages_ptr + (group * slots + slot) * max_blocks + position // BLOCK_SIZE
            place = tl.load(page_ptr, mask=there, other=0).to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
            tl.store(out_kv_slot_ptr + group * tokens + token, place, mask=inside)
        if GUESSES > 0:
            guess = tl.load(guesses_ptr + slot * GUESSES + behind - 1, mask=newest & (behind > 0), other=0)
            latest = tl.where(behind > 0, guess, latest)
            ahead = behind
            if TREE:
                ahead = tl.load(depth_ptr + slot * (GUESSES + 1) + behind, mask=newest, other=0)
            most = tl.load(max_length_ptr + slot * words, mask=newest, other=0)
            past = (live == 0) | (length + ahead >= most)
            position = tl.where(newest, tl.where(past, 0, position - behind + ahead), position)
        tl.store(out_token_ptr + token, tl.where(newest, latest, token_id), mask=inside)
        tl.store(out_position_ptr + token, position, mask=inside)
    else:
        row = (program - token_programs) * BLOCK + tl.arange(0, BLOCK)
        inside = row < rows
        slot = tl.load(row_slots_ptr + row, mask=inside, other=0)
        decodes = tl.load(decodes_ptr + row, mask=inside, other=0) != 0
        live = tl.load(finished_ptr + slot * words, mask=decodes, other=1) == 0
        length = tl.load(length_ptr + slot * words, mask=decodes, other=0)
        tl.store(out_kv_length_ptr + row, tl.where(decodes, tl.where(live, length, 1) + GUESSES, 0), mask=inside)
        tl.store(out_ghost_ptr + row, decodes & (live == 0), mask=inside)


class Begun(NamedTuple):
    """Rows of N tokens, gathered by slot: records int32 [B * N, words], each row's once per token; pages int32
    [G, B, max_blocks] and kv_slot int64 [G, B, N] of G groups; token, position int64 and live bool [B, N]; kv_length
    int32 [B]; drawn int64 and ended bool [B * N]. For gather.Rows.
    """

    records: Tensor
    pages: Tensor
    token: Tensor
    position: Tensor
    kv_slot: Tensor
    live: Tensor
    kv_length: Tensor
    drawn: Tensor
    ended: Tensor

    @classmethod
    def empty(cls, groups: int, rows: int, tokens: int, words: int, max_blocks: int, device: torch.device) -> Self:
        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        return cls(
            records=empty(rows * tokens, words, dtype=torch.int32),
            pages=empty(groups, rows, max_blocks, dtype=torch.int32), token=empty(rows, tokens),
            position=empty(rows, tokens), kv_slot=empty(groups, rows, tokens),
            live=empty(rows, tokens, dtype=torch.bool), kv_length=empty(rows, dtype=torch.int32),
            drawn=empty(rows * tokens), ended=empty(rows * tokens, dtype=torch.bool),
        )  # fmt: skip


def begin(
    rows_B: Tensor, slots: tuple[Tensor, Tensor, Tensor, Tensor], block_tables_GSP: Tensor, block_size: int
) -> Begun:
    """All that a decode step reads of slots ``rows_B`` (int64, contiguous), as new tensors.

    ``slots``: records int32, contiguous, and their columns last_token int64, length and finished int32. Block tables
    int32, contiguous.
    """
    rows, (_, words), (groups, _, max_blocks) = len(rows_B), slots[0].shape, block_tables_GSP.shape
    begun = Begun.empty(groups, rows, 1, words, max_blocks, rows_B.device)
    pages = min(_PAGES, triton.next_power_of_2(max_blocks))
    _begin_kernel[(rows, triton.cdiv(max_blocks, pages))](
        rows_B, *slots, block_tables_GSP, *begun, words, slots[1].stride(0), block_tables_GSP.shape[1], max_blocks,
        BLOCK_SIZE=block_size, WORDS=triton.next_power_of_2(words), PAGES=pages, GROUPS=groups, num_warps=4,
    )  # fmt: skip
    return begun


def begin_packed(
    staged: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], columns: tuple[Tensor, Tensor, Tensor, Tensor],
    block_tables_GSP: Tensor, block_size: int, guesses_SQ: Tensor | None = None, depth_SN: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """gather.Packed of staged chunks, as new tensors. ``staged``: token_ids_T, positions_T, slots_T, slots_R, decodes_R
    of Chunks. ``columns`` of the slot table: last_token int64, length, finished and max_length int32. Block tables
    int32, contiguous. ``guesses_SQ`` and ``depth_SN`` int64, contiguous."""
    token_ids_T, rows_R = staged[0], staged[3]
    tokens, rows, device = len(token_ids_T), len(rows_R), rows_R.device
    longs = [torch.empty_like(token_ids_T) for _ in range(2)]
    kv_slots_GT = torch.empty(len(block_tables_GSP), tokens, dtype=torch.int64, device=device)
    kv_length_R = torch.empty(rows, dtype=torch.int32, device=device)
    ghost_R = torch.empty(rows, dtype=torch.bool, device=device)
    token_programs = triton.cdiv(tokens, _ROWS)
    _begin_packed_kernel[(token_programs + triton.cdiv(rows, _ROWS),)](
        *staged, *columns, block_tables_GSP, token_ids_T if guesses_SQ is None else guesses_SQ,
        token_ids_T if depth_SN is None else depth_SN, *longs, kv_slots_GT, kv_length_R, ghost_R, tokens, rows,
        token_programs, columns[1].stride(0), columns[0].stride(0), *block_tables_GSP.shape[1:],
        BLOCK_SIZE=block_size, BLOCK=_ROWS, GUESSES=0 if guesses_SQ is None else guesses_SQ.shape[1],
        TREE=depth_SN is not None, GROUPS=len(block_tables_GSP), num_warps=4,
    )  # fmt: skip
    return longs[0], longs[1], kv_slots_GT, kv_length_R, ghost_R


def finish(
    rows_B: Tensor, token_B: Tensor, count_B: Tensor, finish_B: Tensor, old: tuple[Tensor, Tensor, Tensor],
    table: tuple[Tensor, Tensor, Tensor], history_SL: Tensor | None, ring_EX: Tensor, appended_1: Tensor, stamps: int,
) -> None:  # fmt: skip
    """Write what a step drew into slots ``rows_B`` and into the ring's next entry, and move the ring's counter on.

    rows and token int64, count and finish int32, contiguous; ring int32, its rows contiguous; appended int64.
    ``old`` and ``table``: last_token int64, length and finished int32, columns of the gathered records and of the slot
    table; a column has the same stride in both. ``history_SL`` int32, contiguous, or None. appended is below stamps, at
    most 2**31. One program does it all, so that the counter moves once.
    """
    last_token, length, _ = table
    pdl = dependent_launches(rows_B.device)
    _finish_kernel[(1,)](
        rows_B, token_B, count_B, finish_B, *old, *table, ring_EX if history_SL is None else history_SL, ring_EX,
        appended_1, len(rows_B), 0 if history_SL is None else history_SL.shape[1], length.stride(0),
        last_token.stride(0), ring_EX.stride(0), len(ring_EX), stamps,
        REMEMBERS=history_SL is not None, BLOCK=_ROWS, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["count_ptr", "kv_slot_ptr"])
def _show_kernel(count_ptr, kv_slot_ptr, gained_ptr, kept_kv_slot_ptr, last_ptr, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    gained = tl.load(count_ptr + row, mask=inside, other=0) > 0
    kv_slot = tl.load(kv_slot_ptr + row, mask=inside, other=0)
    tl.store(gained_ptr + row, gained, mask=inside)
    tl.store(kept_kv_slot_ptr + row, tl.where(gained, kv_slot, 0), mask=inside)
    tl.store(last_ptr + row, row.to(tl.int64), mask=inside)


def show(count_B: Tensor, kv_slots_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(gained bool, kept_kv_slots int64, 0 to B - 1 int64), [B] each, of counts (int32) and KV places (int64), both
    contiguous: whether a row gained a token, where its newest one's entry goes if it did, the trash block if not."""
    gained_B = torch.empty(len(count_B), dtype=torch.bool, device=count_B.device)
    kept_B, last_B = torch.empty_like(kv_slots_B), torch.empty_like(kv_slots_B)
    _show_kernel[(triton.cdiv(len(count_B), _ROWS),)](
        count_B, kv_slots_B, gained_B, kept_B, last_B, len(count_B), BLOCK=_ROWS, num_warps=4
    )
    return gained_B, kept_B, last_B
