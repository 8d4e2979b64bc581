"""Gather and commit of draft windows in Triton, one launch each: rows gathered by slot, samples committed by slot.

Knows: the arithmetic of gather.py, commit.py and sampling/acceptance.py, which hold the torch references. Does
not know: which words of a record mean what (columns come as tensors, strides included), how a path through a tree is
found, the forward pass and the sampling between the two.

Both are plain launches, without programmatic dependent launch, as those of step_io_triton.py.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.execute.step.step_io_triton import Begun

_PAGES = 1024  # of a row's page table that one program copies
_AT_ONCE = 2048  # tokens that the one program of ``commit`` takes at a time


@triton.jit(do_not_specialize=["tokens", "guesses_stride"], do_not_specialize_on_alignment=["guesses_ptr", "depth_ptr"])
def _begin_window_kernel(
    rows_ptr, records_ptr, last_token_ptr, length_ptr, finished_ptr, max_length_ptr, guesses_ptr, depth_ptr, pages_ptr,
    out_records_ptr, out_pages_ptr, token_ptr, position_ptr, kv_slot_ptr, live_ptr, kv_length_ptr, drawn_ptr, ended_ptr,
    tokens, guesses_stride, words, last_token_stride, slots, max_blocks,
    BLOCK_SIZE: tl.constexpr, TREE: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr, PAGES: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(rows_ptr + row)
    page_index = part * PAGES + tl.arange(0, PAGES)
    in_table = page_index < max_blocks
    for group in tl.static_range(GROUPS):
        pages = tl.load(pages_ptr + (group * slots + slot) * max_blocks + page_index, mask=in_table, other=0)
        tl.store(out_pages_ptr + (group * tl.num_programs(0) + row) * max_blocks + page_index, pages, mask=in_table)
    if part == 0:
        token = tl.arange(0, TOKENS)
        inside = token < tokens
        word = tl.arange(0, WORDS)
        record = tl.load(records_ptr + row * words + word, mask=word < words, other=0)
        places = (row * tokens + token)[:, None] * words + word[None, :]
        copies = tl.broadcast_to(record[None, :], (TOKENS, WORDS))
        tl.store(out_records_ptr + places, copies, mask=inside[:, None] & (word < words)[None, :])

        length = tl.load(length_ptr + row * words)
        going = tl.load(finished_ptr + row * words) == 0
        most = tl.load(max_length_ptr + row * words)
        last = tl.load(last_token_ptr + row * last_token_stride)
        guess = tl.load(guesses_ptr + row * guesses_stride + token - 1, mask=inside & (token > 0), other=0)
        if TREE:
            depth = tl.load(depth_ptr + row * tokens + token, mask=inside, other=0)
        else:
            depth = token.to(tl.int64)
        drawn = length.to(tl.int64) + depth
        live = going & (drawn < most)
        kept = tl.where(going, length + token - 1, 0)
        page_of = kept // BLOCK_SIZE
        there = inside & going & (page_of < max_blocks)
        at = row * tokens + token
        for group in tl.static_range(GROUPS):
            page = tl.load(pages_ptr + (group * slots + slot) * max_blocks + page_of, mask=there, other=0).to(tl.int64)
            place = page * BLOCK_SIZE + kept % BLOCK_SIZE
            tl.store(kv_slot_ptr + group * tl.num_programs(0) * tokens + at, place, mask=inside)
        tl.store(token_ptr + at, tl.where(token == 0, last, guess), mask=inside)
        tl.store(position_ptr + at, tl.where(live, drawn - 1, 0), mask=inside)
        tl.store(live_ptr + at, live, mask=inside)
        tl.store(drawn_ptr + at, drawn, mask=inside)
        tl.store(ended_ptr + at, live == 0, mask=inside)
        tl.store(kv_length_ptr + row, tl.where(going, length, 1) + (tokens - 1))


_UNALIGNED = ("rows", "drawn", "count", "finish", "guesses", "nodes", "limit", "scripted", "token_id", "position")


@triton.jit(
    do_not_specialize=["rows", "tokens", "guesses_stride", "positions", "limited"],
    do_not_specialize_on_alignment=[*(f"{name}_ptr" for name in _UNALIGNED), "kv_slot_ptr"],
)
def _commit_window_kernel(
    rows_ptr, drawn_ptr, count_ptr, finish_ptr, guesses_ptr, nodes_ptr, limit_ptr, scripted_ptr, token_id_ptr,
    position_ptr, kv_slot_ptr, old_token_ptr, old_length_ptr, old_finished_ptr, last_token_ptr, length_ptr,
    finished_ptr, history_ptr, ring_ptr, appended_ptr, out_token_ptr, out_count_ptr, out_finish_ptr, out_slot_ptr,
    out_kept_ptr, out_kept_kv_slot_ptr, out_last_ptr, out_gained_ptr, path_ptr, path_token_id_ptr, path_position_ptr,
    path_kv_slot_ptr, rows, tokens, guesses_stride, positions, words, last_token_stride, ring_stride, entries, stamps,
    limited, STOP: tl.constexpr, ERROR: tl.constexpr, NO_GUESS: tl.constexpr, WIDTH: tl.constexpr, TREE: tl.constexpr,
    SCRIPTED: tl.constexpr, REMEMBERS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program takes ROWS rows at a time, a lane for each of a row's WIDTH tokens."""
    appended = tl.load(appended_ptr)
    entry_ptr = ring_ptr + (appended.to(tl.int32) % entries).to(tl.int64) * ring_stride
    lane = tl.arange(0, LANES)[None, :]
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        real = row < rows
        inside = real[:, None] & (lane < WIDTH)
        guessed = real[:, None] & (lane < WIDTH - 1)
        cell = (row * WIDTH)[:, None] + lane
        if TREE:
            node = tl.load(nodes_ptr + cell, mask=inside, other=0)
        else:
            node = tl.broadcast_to(lane, (ROWS, LANES)).to(tl.int64)
        at = (row.to(tl.int64) * tokens)[:, None] + node
        token = tl.load(drawn_ptr + at, mask=inside, other=0)
        counts = tl.load(count_ptr + at, mask=inside, other=0)
        finish = tl.load(finish_ptr + at, mask=inside, other=0)
        guess = tl.load(guesses_ptr + (row * guesses_stride)[:, None] + lane, mask=guessed, other=NO_GUESS)
        if SCRIPTED:
            scripted = tl.load(scripted_ptr + row, mask=real, other=0)
            if TREE:
                scripted = tl.minimum(scripted, tl.sum((guessed & (guess != NO_GUESS)).to(tl.int32), 1))
            foreseen = guessed & (lane < scripted[:, None])
            given = foreseen & (finish != ERROR)
            token = tl.where(given, guess, token)
            finish = tl.where(given & (finish == STOP), 0, finish)
        else:
            foreseen = guessed & (token == guess)
        # A row ends at its first lane from which it does not go on.
        end = tl.min(tl.where(foreseen & (finish == 0), LANES, lane), 1)
        reached = inside & (lane <= end[:, None])
        limit = tl.load(limit_ptr + row, mask=real & (limited != 0), other=WIDTH)
        reached = reached & (lane < limit[:, None])
        count = tl.sum(tl.where(reached, counts, 0), 1)
        reason = tl.sum(tl.where(reached, finish, 0), 1)
        newest_lane = tl.maximum(count - 1, 0)
        newest = tl.sum(tl.where(inside & (lane == newest_lane[:, None]), token, 0), 1)

        slot = tl.load(rows_ptr + row, mask=real, other=0)
        old_token = tl.load(old_token_ptr + row * last_token_stride, mask=real, other=0)
        old_length = tl.load(old_length_ptr + row * words, mask=real, other=0)
        old_finished = tl.load(old_finished_ptr + row * words, mask=real, other=0)
        # Padding rows share slot 0: all of them write the values that it has.
        tl.store(last_token_ptr + slot * last_token_stride, tl.where(count > 0, newest, old_token), mask=real)
        tl.store(length_ptr + slot * words, old_length + count, mask=real)
        tl.store(finished_ptr + slot * words, tl.where(old_finished == 0, reason, old_finished), mask=real)
        kept = inside & (lane < count[:, None])
        if REMEMBERS:
            place = (slot * positions + old_length)[:, None] + lane
            tl.store(history_ptr + place, token.to(tl.int32), mask=kept)
        tl.store(entry_ptr + 1 + cell, token.to(tl.int32), mask=inside)
        tl.store(entry_ptr + 1 + rows * WIDTH + row, count, mask=real)
        tl.store(entry_ptr + 1 + rows * (WIDTH + 1) + row, reason, mask=real)

        kv_slot = tl.load(kv_slot_ptr + (row * tokens)[:, None] + lane, mask=inside, other=0)
        tl.store(out_token_ptr + cell, token, mask=inside)
        tl.store(out_count_ptr + row, count, mask=real)
        tl.store(out_finish_ptr + row, reason, mask=real)
        tl.store(out_slot_ptr + cell, tl.broadcast_to(slot[:, None], (ROWS, LANES)), mask=inside)
        tl.store(out_kept_ptr + cell, kept, mask=inside)
        tl.store(out_kept_kv_slot_ptr + cell, tl.where(kept, kv_slot, 0), mask=inside)
        tl.store(out_last_ptr + row, (row * WIDTH + newest_lane).to(tl.int64), mask=real)
        tl.store(out_gained_ptr + row, count > 0, mask=real)
        if TREE:
            tl.store(path_ptr + cell, at, mask=inside)
            tl.store(path_token_id_ptr + cell, tl.load(token_id_ptr + at, mask=inside, other=0), mask=inside)
            tl.store(path_position_ptr + cell, tl.load(position_ptr + at, mask=inside, other=0), mask=inside)
            tl.store(path_kv_slot_ptr + cell, kv_slot, mask=inside)
    tl.store(entry_ptr, appended.to(tl.int32))
    tl.debug_barrier()  # every thread has read the counter before one of them moves it on
    tl.store(appended_ptr, tl.where(appended + 1 == stamps, 0, appended + 1))


def begin(
    rows_B: Tensor, records_BX: Tensor, columns: tuple[Tensor, Tensor, Tensor, Tensor], guesses_BQ: Tensor,
    depth_BN: Tensor | None, block_tables_GSP: Tensor, block_size: int,
) -> Begun:  # fmt: skip
    """All that a window of N = Q + 1 tokens reads of slots ``rows_B`` (int64, contiguous), as new tensors.

    records int32 [B, words], gathered already, contiguous; ``columns`` of them: last_token int64, length, finished and
    max_length int32. ``guesses_BQ`` int64. ``depth_BN`` int64, contiguous: of the nodes of trees; None of chains.
    Block tables int32, contiguous.
    """
    rows, words, (groups, slots, max_blocks) = len(rows_B), records_BX.shape[1], block_tables_GSP.shape
    guesses_BQ = guesses_BQ if guesses_BQ.stride(1) == 1 else guesses_BQ.contiguous()
    tokens = guesses_BQ.shape[1] + 1
    begun = Begun.empty(groups, rows, tokens, words, max_blocks, rows_B.device)
    pages = min(_PAGES, triton.next_power_of_2(max_blocks))
    _begin_window_kernel[(rows, triton.cdiv(max_blocks, pages))](
        rows_B, records_BX, *columns, guesses_BQ, guesses_BQ if depth_BN is None else depth_BN, block_tables_GSP,
        *begun, tokens, guesses_BQ.stride(0), words, columns[0].stride(0), slots, max_blocks,
        BLOCK_SIZE=block_size, TREE=depth_BN is not None, TOKENS=triton.next_power_of_2(tokens),
        WORDS=triton.next_power_of_2(words), PAGES=pages, GROUPS=groups, num_warps=4,
    )  # fmt: skip
    return begun


class CommittedWindow(NamedTuple):
    """What ``commit`` returns, of W tokens a row: token int64 [B, W], counts and finish int32 [B], which are
    acceptance.Acceptance's; slot, kept_kv_slot int64 and kept bool [B, W], last int64 and gained bool [B], token_id,
    position, kv_slot int64 [B, W] and, of trees, path int64 [B, W], which are commit.Shown's.
    """

    token: Tensor
    counts: Tensor
    finish: Tensor
    slot: Tensor
    kept: Tensor
    kept_kv_slot: Tensor
    last: Tensor
    gained: Tensor
    token_id: Tensor
    position: Tensor
    kv_slot: Tensor
    path: Tensor | None


def commit(
    rows_B: Tensor, drawn: tuple[Tensor, Tensor, Tensor], guesses_BQ: Tensor, nodes_BW: Tensor | None,
    limits: tuple[Tensor | None, Tensor | None], asked: tuple[Tensor, Tensor, Tensor],
    old: tuple[Tensor, Tensor, Tensor], table: tuple[Tensor, Tensor, Tensor], history_SL: Tensor | None,
    ring: tuple[Tensor, Tensor, int], *, codes: tuple[int, int], no_guess: int,
) -> CommittedWindow:  # fmt: skip
    """Accept the draws of a window, write them into slots ``rows_B`` and the ring's next entry, move its counter on.

    ``drawn``: token int64, count and finish int32, contiguous, [B * N]. ``guesses_BQ`` int64: what they are compared
    with, of trees those along the path of ``nodes_BW`` (int64 [B, Q + 1], contiguous), where there are none
    ``no_guess``. ``limits``: most tokens a row and drafts that a script keeps, integers [B], or None. ``asked``: token
    ids, positions and KV places of the N tokens, int64, contiguous. ``old`` and ``table`` as of step_io_triton.finish.
    ``history_SL`` int32, contiguous, or None. ``ring``: its entries int32, the counter int64, its stamps. ``codes``:
    the finish codes of STOP and ERROR. One program does it all, so that the counter moves once.
    """
    guesses_BQ = guesses_BQ if guesses_BQ.stride(1) == 1 else guesses_BQ.contiguous()
    rows, width, tokens = len(rows_B), guesses_BQ.shape[1] + 1, asked[0].shape[1]
    limit_B, scripted_B = (None if part is None else part.contiguous() for part in limits)
    buffer_EX, appended_1, stamps = ring

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=rows_B.device)

    path = None if nodes_BW is None else tuple(empty(rows, width) for _ in range(4))
    committed = CommittedWindow(
        token=empty(rows, width), counts=empty(rows, dtype=torch.int32), finish=empty(rows, dtype=torch.int32),
        slot=empty(rows, width), kept=empty(rows, width, dtype=torch.bool), kept_kv_slot=empty(rows, width),
        last=empty(rows), gained=empty(rows, dtype=torch.bool), token_id=asked[0] if path is None else path[1],
        position=asked[1] if path is None else path[2], kv_slot=asked[2] if path is None else path[3],
        path=None if path is None else path[0],
    )  # fmt: skip
    lanes = triton.next_power_of_2(width)
    _commit_window_kernel[(1,)](
        rows_B, *drawn, guesses_BQ, rows_B if nodes_BW is None else nodes_BW, drawn[1] if limit_B is None else limit_B,
        rows_B if scripted_B is None else scripted_B, *asked, *old, *table,
        buffer_EX if history_SL is None else history_SL, buffer_EX, appended_1, *committed[:8],
        *((committed.token,) * 4 if path is None else path), rows, tokens, guesses_BQ.stride(0),
        0 if history_SL is None else history_SL.shape[1], table[1].stride(0), table[0].stride(0), buffer_EX.stride(0),
        len(buffer_EX), stamps, int(limit_B is not None),
        STOP=codes[0], ERROR=codes[1], NO_GUESS=no_guess, WIDTH=width, TREE=nodes_BW is not None,
        SCRIPTED=scripted_B is not None, REMEMBERS=history_SL is not None, LANES=lanes,
        ROWS=min(triton.next_power_of_2(rows), max(1, _AT_ONCE // lanes)), num_warps=8,
    )  # fmt: skip
    return committed
