"""Tables of grammars in Triton: how kernels read them; states of draft tokens and masks of drafters, a launch each.

Knows: the arithmetic of token_tables.py, which holds the torch references. Does not know: which requests have a table;
masks of samples and states after them, which logit_edits_triton.py makes with all other edits.
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

_BLOCK = 4096


@triton.jit
def table_of(rows_ptr, slot):
    """Where a slot's classes and next states begin in the pool, and how many classes there are; 0: no table."""
    begin, following = tl.load(rows_ptr + slot * 4), tl.load(rows_ptr + slot * 4 + 1)
    return begin, following, tl.load(rows_ptr + slot * 4 + 2)


@triton.jit
def state_after(pool_ptr, begin, following, classes, state, token):
    """After one more token, int32; one that does not exist counts as the first."""
    of = tl.load(pool_ptr + begin + tl.maximum(token, 0)).to(tl.int32)
    return tl.load(pool_ptr + following + state * classes + of).to(tl.int32)


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _states_kernel(
    pool_ptr, rows_ptr, forced_ptr, slots_ptr, tokens_ptr, tokens_stride, parents_ptr, states_ptr,
    WIDTH: tl.constexpr, TREE: tl.constexpr, FIRST: tl.constexpr, FORCED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    begin, following, classes = table_of(rows_ptr, slot)
    state = tl.load(rows_ptr + slot * 4 + 3)
    states_ptr += row * WIDTH
    if classes == 0:
        state = tl.load(forced_ptr + slot * FORCED)
    tl.store(states_ptr, state)
    for node in tl.range(1, WIDTH):
        if TREE:
            tl.debug_barrier()  # the parent's state is in memory
            state = tl.load(states_ptr + tl.load(parents_ptr + row * WIDTH + node))
        if classes > 0:
            token = tl.load(tokens_ptr + row * tokens_stride + node)
            state = tl.maximum(state_after(pool_ptr, begin, following, classes, state, token), FIRST)
        else:
            state = tl.load(forced_ptr + slot * FORCED + node, mask=node < FORCED, other=0)
        tl.store(states_ptr + node, state)


@triton.jit(do_not_specialize=ANY_NUMBER, do_not_specialize_on_alignment=ANY_POINTER)
def _bar_kernel(
    logits_ptr, ids_ptr, pool_ptr, rows_ptr, slots_ptr, states_ptr, tokens_ptr, after_ptr, logits_stride, tokens_stride,
    vocab, vocab_start, size,
    AFTER: tl.constexpr, NOTHING: tl.constexpr, FIRST: tl.constexpr, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    begin, following, classes = table_of(rows_ptr, slot)
    if classes > 0:
        if AFTER:
            token = tl.load(tokens_ptr + row * tokens_stride)
            state = state_after(pool_ptr, begin, following, classes, tl.load(states_ptr + row), token)
            state = tl.maximum(state, FIRST)
        else:
            state = tl.load(rows_ptr + slot * 4 + 3)
        tl.store(after_ptr + row, state)  # the same by every program of the row
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tokens = column + vocab_start
        inside = (column < vocab) & (tokens < size)
        if HAS_IDS:
            tokens = tl.load(ids_ptr + tokens, mask=inside, other=0).to(tl.int32)
        of = tl.load(pool_ptr + begin + tokens, mask=inside, other=0).to(tl.int32)
        after = tl.load(pool_ptr + following + state * classes + of, mask=inside, other=0)
        barred = inside & (after == NOTHING)
        tl.store(logits_ptr + row * logits_stride + column, float("-inf"), mask=barred)


def table_states(tables: tuple[Tensor, Tensor, Tensor], view: RowView) -> Tensor:
    """int32 [B, W]."""
    (pool_PE, rows_S4, forced_SF), tokens_BW = tables, view.tokens_BW
    states_BW = torch.empty(tokens_BW.shape, dtype=torch.int32, device=tokens_BW.device)
    parents = tokens_BW if view.tree is None else view.tree.parents_BN.contiguous()
    _states_kernel[(len(tokens_BW),)](
        pool_PE, rows_S4, forced_SF, view.slots_B, tokens_BW, tokens_BW.stride(0), parents, states_BW,
        WIDTH=tokens_BW.shape[1], TREE=view.tree is not None, FIRST=START, FORCED=forced_SF.shape[1], num_warps=1,
    )  # fmt: skip
    return states_BW


def bar(
    logits_RV: Tensor, tables: tuple[Tensor, Tensor, Tensor], slots_R: Tensor, before: tuple[Tensor, Tensor] | None,
    vocab_start: int, size: int, ids_V: Tensor | None,
) -> Tensor:  # fmt: skip
    """token_tables.bar. Logits and tokens may be strided by row."""
    (pool_PE, rows_S4, _), (rows, vocab) = tables, logits_RV.shape
    if logits_RV.stride(1) != 1:
        raise ValueError(f"a drafter's logits have strides {logits_RV.stride()}: a row's must lie side by side")
    after_R = torch.empty(rows, dtype=torch.int32, device=logits_RV.device)
    states_R, tokens_R = (after_R, slots_R) if before is None else before
    _bar_kernel[(rows, triton.cdiv(vocab, _BLOCK))](
        logits_RV, slots_R if ids_V is None else ids_V, pool_PE, rows_S4, slots_R, states_R, tokens_R, after_R,
        logits_RV.stride(0), tokens_R.stride(0), vocab, vocab_start, size,
        AFTER=before is not None, NOTHING=SINK, FIRST=START, HAS_IDS=ids_V is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return after_R
