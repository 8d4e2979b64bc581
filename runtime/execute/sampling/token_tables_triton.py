"""Tables of grammars in Triton: masks, states of draft tokens, states after samples; a launch each.

Knows: the arithmetic of token_tables.py, which holds the torch references. Does not know: which requests have a table.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.execute.sampling.draw_triton import ANY_NUMBER, ANY_POINTER
from runtime.execute.slots.feature import RowView
from runtime.grammar_tables.token_table import SINK, START

_BLOCK = 8192


@triton.jit
def _table_of(rows_ptr, slot):
    begin, following = tl.load(rows_ptr + slot * 4), tl.load(rows_ptr + slot * 4 + 1)
    return begin, following, tl.load(rows_ptr + slot * 4 + 2)


@triton.jit
def _after(pool_ptr, begin, following, classes, state, token):
    of = tl.load(pool_ptr + begin + tl.maximum(token, 0)).to(tl.int32)
    return tl.load(pool_ptr + following + state * classes + of).to(tl.int32)


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _mask_kernel(
    logits_ptr, pool_ptr, rows_ptr, slots_ptr, states_ptr, logits_stride, vocab, vocab_start,
    NOTHING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin, following, classes = _table_of(rows_ptr, tl.load(slots_ptr + row))
    if classes > 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocab
        state = tl.load(states_ptr + row)
        of = tl.load(pool_ptr + begin + vocab_start + column, mask=inside, other=0).to(tl.int32)
        after = tl.load(pool_ptr + following + state * classes + of, mask=inside, other=0)
        place = logits_ptr + row * logits_stride + column
        barred = inside & (after == NOTHING)
        tl.store(place, tl.load(place, mask=barred, other=0.0) + float("-inf"), mask=barred)


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _states_kernel(
    pool_ptr, rows_ptr, slots_ptr, tokens_ptr, tokens_stride, parents_ptr, states_ptr,
    WIDTH: tl.constexpr, TREE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    begin, following, classes = _table_of(rows_ptr, slot)
    state = tl.load(rows_ptr + slot * 4 + 3)
    states_ptr += row * WIDTH
    tl.store(states_ptr, state)
    for node in tl.range(1, WIDTH):
        if TREE:
            tl.debug_barrier()  # the parent's state is in memory
            state = tl.load(states_ptr + tl.load(parents_ptr + row * WIDTH + node))
        if classes > 0:
            token = tl.load(tokens_ptr + row * tokens_stride + node)
            state = tl.maximum(_after(pool_ptr, begin, following, classes, state, token), FIRST)
        else:
            state = state * 0  # int32, as in the other branch
        tl.store(states_ptr + node, state)


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _advance_kernel(pool_ptr, rows_ptr, slots_ptr, tokens_ptr, gained_ptr, tokens_stride):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    begin, following, classes = _table_of(rows_ptr, slot)
    if (classes > 0) & (tl.load(gained_ptr + row) != 0):
        state = tl.load(rows_ptr + slot * 4 + 3)
        token = tl.load(tokens_ptr + row * tokens_stride)
        tl.store(rows_ptr + slot * 4 + 3, _after(pool_ptr, begin, following, classes, state, token))


def mask_by_tables(logits_RV: Tensor, rows: tuple[tuple[Tensor, Tensor], Tensor, Tensor], vocab_start: int) -> Tensor:
    """In place, of float32 logits. ``rows``: RowTables of token_tables.py."""
    (pool_PE, rows_S4), slots_R, states_R = rows
    if logits_RV.dtype != torch.float32 or logits_RV.stride(1) != 1:
        raise ValueError(f"logits are {logits_RV.dtype} with strides {logits_RV.stride()}: edit them first")
    count, vocab = logits_RV.shape
    _mask_kernel[(count, triton.cdiv(vocab, _BLOCK))](
        logits_RV, pool_PE, rows_S4, slots_R, states_R, logits_RV.stride(0), vocab, vocab_start,
        NOTHING=SINK, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return logits_RV


def table_states(tables: tuple[Tensor, Tensor], view: RowView) -> Tensor:
    """int32 [B, W]."""
    (pool_PE, rows_S4), tokens_BW = tables, view.tokens_BW
    states_BW = torch.empty(tokens_BW.shape, dtype=torch.int32, device=tokens_BW.device)
    parents = tokens_BW if view.tree is None else view.tree.parents_BN.contiguous()
    _states_kernel[(len(tokens_BW),)](
        pool_PE, rows_S4, view.slots_B, tokens_BW, tokens_BW.stride(0), parents, states_BW,
        WIDTH=tokens_BW.shape[1], TREE=view.tree is not None, FIRST=START, num_warps=1,
    )  # fmt: skip
    return states_BW


def advance_tables(tables: tuple[Tensor, Tensor], slots_B: Tensor, tokens_B: Tensor, gained_B: Tensor) -> None:
    pool_PE, rows_S4 = tables
    _advance_kernel[(len(slots_B),)](pool_PE, rows_S4, slots_B, tokens_B, gained_B, tokens_B.stride(0), num_warps=1)
