"""A candidate for sums of medium size: lines of 128 bytes that end in the number of their exchange. Not used by models.

Knows: that over NVLink the 128 bytes which eight neighbouring threads store in one instruction arrive together, on
which NCCL's LL128 protocol rests, too. So a line needs one mark of eight bytes, where marked words have one of four in
eight, and no store has to be waited for before a flag is raised. Does not know: links of which that is not true.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parallel.places import Places

PAYLOAD = tl.constexpr(15)  # words of eight bytes in a line of 16


@triton.jit
def _line_of(address, mark, rank, row, WORLD: tl.constexpr, ROWS: tl.constexpr, ROW_WORDS: tl.constexpr):
    place = (mark & 1) * WORLD + rank
    start = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
    return start + (place.to(tl.int64) * ROWS + row) * ROW_WORDS


@triton.jit
def _quarter(words, number: tl.constexpr):
    return (words >> (16 * number)).to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)


@triton.jit
def _bits(value, number: tl.constexpr):
    return (value.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int64) & 65535) << (16 * number)


@triton.jit
def _word(a, b, c, d):
    return _bits(a, 0) | _bits(b, 1) | _bits(c, 2) | _bits(d, 3)


@triton.jit
def _rounded(value):
    return value.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _read(mine, i, sent, slot, mark):
    """A row's lines, once all of them are of this exchange."""
    seen = tl.load(mine + i, mask=sent, other=0, volatile=True)
    while tl.max((sent & (slot == PAYLOAD) & (seen != mark)).to(tl.int32), 0) != 0:
        seen = tl.load(mine + i, mask=sent, other=0, volatile=True)
    return seen


@triton.jit
def _lines_kernel(
    x_ptr,  # int64 [rows, WORDS]: four bfloat16 a word, here and below
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    memory,  # WORLD addresses of int64 [2, WORLD, ROWS, ROW_WORDS]
    exchanges_ptr,  # int32 [ROWS], of this rank
    eps,
    WORDS: tl.constexpr,
    SENT: tl.constexpr,  # words of whole lines
    BLOCK: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    TWO_STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    slot = i % 16
    word = i // 16 * PAYLOAD + slot
    sent = i < SENT
    mask = (slot < PAYLOAD) & (word < WORDS)
    where = row.to(tl.int64) * WORDS + word
    weight = tl.load(weight_ptr + word, mask=mask, other=0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + where, mask=mask, other=0)
    residual = tl.load(residual_ptr + where, mask=mask & ADD, other=0)
    count = tl.load(exchanges_ptr + row, cache_modifier=".cg") + 1
    mark = count.to(tl.int64)
    owner = row % WORLD
    words = x
    if (not TWO_STEPS) or owner == RANK:
        if not TWO_STEPS:
            line = tl.where(slot == PAYLOAD, mark, x)
            for rank in tl.static_range(WORLD):
                if rank != RANK:
                    tl.store(_line_of(memory[rank], count, RANK, row, WORLD, ROWS, ROW_WORDS) + i, line, mask=sent)
        a = tl.zeros((BLOCK,), tl.float32)
        b = tl.zeros((BLOCK,), tl.float32)
        c = tl.zeros((BLOCK,), tl.float32)
        d = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(WORLD):
            part = x
            if rank != RANK:
                part = _read(_line_of(memory[RANK], count, rank, row, WORLD, ROWS, ROW_WORDS), i, sent, slot, mark)
            a += _quarter(part, 0)
            b += _quarter(part, 1)
            c += _quarter(part, 2)
            d += _quarter(part, 3)
        words = _word(a, b, c, d)
        if TWO_STEPS:
            line = tl.where(slot == PAYLOAD, mark, words)
            for rank in tl.static_range(WORLD):
                if rank != RANK:
                    tl.store(_line_of(memory[rank], count, RANK, row, WORLD, ROWS, ROW_WORDS) + i, line, mask=sent)
    else:
        address = memory[0]
        for rank in tl.static_range(1, WORLD):
            address = tl.where(owner == rank, memory[rank], address)
        line = tl.where(slot == PAYLOAD, mark, x)
        tl.store(_line_of(address, count, RANK, row, WORLD, ROWS, ROW_WORDS) + i, line, mask=sent)
        words = _read(_line_of(memory[RANK], count, owner, row, WORLD, ROWS, ROW_WORDS), i, sent, slot, mark)
    tl.debug_barrier()  # every thread has read the count before one thread changes it
    tl.store(exchanges_ptr + row, count)
    a, b, c, d = _quarter(words, 0), _quarter(words, 1), _quarter(words, 2), _quarter(words, 3)
    if ADD:
        a = _rounded(a + _quarter(residual, 0))
        b = _rounded(b + _quarter(residual, 1))
        c = _rounded(c + _quarter(residual, 2))
        d = _rounded(d + _quarter(residual, 3))
    tl.store(residual_out_ptr + where, _word(a, b, c, d), mask=mask)
    squares = tl.where(mask, a * a + b * b + c * c + d * d, 0.0)
    scale = tl.rsqrt(tl.sum(squares, 0) / (4 * WORDS) + eps)
    a *= scale * _quarter(weight, 0)
    b *= scale * _quarter(weight, 1)
    c *= scale * _quarter(weight, 2)
    d *= scale * _quarter(weight, 3)
    tl.store(out_ptr + where, _word(a, b, c, d), mask=mask)


def row_words(width: int) -> int:
    """Words of eight bytes that a row of so many bfloat16 takes in whole lines."""
    return -(-width // 60) * 16


def line_bytes(world: int, rows: int, width: int) -> int:
    """What each rank needs, all zero at first."""
    return 2 * world * rows * row_words(width) * 8


def lines(
    x_TN: Tensor,
    places: Places,
    *,
    residual_TN: Tensor | None = None,
    norm_N: Tensor,
    eps: float = 0.0,
    two_steps: bool = False,
    warps: int = 8,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """As parallel/one_shot_triton.py ``one_shot`` with a norm.

    ``places``: its memory is ``line_bytes`` for rows of this width, its counts are of no other protocol."""
    tokens, width = x_TN.shape
    out_TN, kept_TN = torch.empty_like(x_TN), torch.empty_like(x_TN)
    given = (x_TN, x_TN if residual_TN is None else residual_TN, norm_N, out_TN, kept_TN)
    size = row_words(width)
    _lines_kernel[(tokens,)](
        *(tensor.view(torch.int64) for tensor in given),
        places.memory,
        places.exchanges,
        eps,
        WORDS=width // 4,
        SENT=size,
        BLOCK=triton.next_power_of_2(size),
        ROW_WORDS=size,
        RANK=places.rank,
        WORLD=len(places.memory),
        ROWS=places.rows,
        ADD=residual_TN is not None,
        TWO_STEPS=two_steps,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out_TN, kept_TN
