"""The sum of every rank's rows in one launch, each row added by one rank, for large messages between many GPUs.

Knows: that a row's parts go to the rank that adds them, and its sum from there to all. Does not know: process groups,
which sums that is good for (symmetric.py), where parts lie and how programs wait for each other (parts_triton.py).

Of ``size`` ranks each sends 2 (size - 1) / size messages instead of the size - 1 of one_shot_triton.py, and waits
twice. A sum comes back in the place of the part of the rank that added it. Parts are added in rank order, and what is
sent is rounded, so the bits are those of one_shot_triton.py.

Of dependent launches (models/kernels/dependent_launch.py) it keeps the rules.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parallel.one_shot_triton import launch
from parallel.parts_triton import others, row_of_part, store_summed, tell, tell_one, wait_for
from parallel.places import Places


@triton.jit
def _two_steps_kernel(
    x_ptr,  # [rows, N], this rank's part
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    memory,  # WORLD addresses, with a layout that parallel/places.py knows
    exchanges_ptr,  # int32 [ROWS], of this rank
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,  # WORLD, or the next power of two
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    where = row.to(tl.int64) * N + cols
    element: tl.constexpr = x_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + cols, mask=mask & NORM, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + where, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + where, mask=mask & ADD, other=0.0)
    before = tl.load(exchanges_ptr + row, cache_modifier=".cg")
    owner = row % WORLD
    summed = x
    if owner == RANK:
        wait_for(others(MOST, RANK, WORLD), memory[RANK], row, before + 1, WORLD, ROWS, ROW_BYTES)
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(WORLD):
            part = x
            if rank != RANK:
                begin = row_of_part(memory[RANK], before, rank, row, element, WORLD, ROWS, ROW_BYTES)
                part = tl.load(begin + cols, mask=mask, other=0.0, volatile=True)
            total += part.to(tl.float32)
        summed = total.to(element)
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                begin = row_of_part(memory[rank], before, RANK, row, element, WORLD, ROWS, ROW_BYTES)
                tl.store(begin + cols, summed, mask=mask)
        tell(memory, row, before + 1, MOST, RANK, WORLD, ROWS, ROW_BYTES)
    else:
        address = memory[0]
        for rank in tl.static_range(1, WORLD):
            address = tl.where(owner == rank, memory[rank], address)
        begin = row_of_part(address, before, RANK, row, element, WORLD, ROWS, ROW_BYTES)
        tl.store(begin + cols, x, mask=mask)
        tell_one(address, row, before + 1, RANK, WORLD, ROWS, ROW_BYTES)
        wait_for(owner, memory[RANK], row, before + 1, WORLD, ROWS, ROW_BYTES)
        begin = row_of_part(memory[RANK], before, owner, row, element, WORLD, ROWS, ROW_BYTES)
        summed = tl.load(begin + cols, mask=mask, other=0.0, volatile=True)
    tl.debug_barrier()  # every thread has read the count before one thread changes it
    tl.store(exchanges_ptr + row, before + 1)
    store_summed(summed, residual, weight, out_ptr, residual_out_ptr, where, mask, eps, N=N, ADD=ADD, NORM=NORM)


def two_steps(
    x_TN: Tensor,
    places: Places,
    *,
    residual_TN: Tensor | None = None,
    norm_N: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """As parallel/one_shot_triton.py ``one_shot``, through the same places: calls of both may take turns."""
    return launch(_two_steps_kernel, x_TN, places, residual_TN, norm_N, eps, pdl)
