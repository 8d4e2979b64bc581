"""One-shot and two-shot all-reduces between processes, interpreted: ``TRITON_INTERPRET=1 python -m ...``.

A second time with fewer programs than rows, and fewer rows of buffers than a message has: launches follow each other.

Knows: how processes that were forked share memory at the same addresses. Does not know: GPUs, whose stores may arrive
in another order; all_reduce.py compares every bit there before it times anything. In float32, since the
interpreter copies a 16-bit number by bytes, of which another process may see one; a GPU stores it whole.
"""

from __future__ import annotations

import mmap
import multiprocessing
import random
import time
from collections.abc import Callable

import torch
from torch import Tensor

from parallel.comm import all_reduce_triton, symmetric_all_reduce
from parallel.comm.peer_buffers import SENTINEL
from tests.models.kernels.interpreted_kernels import REFERENCE
from tests.parallel.comm.exchange_cases import LOOKS_LIKE_SENTINEL

RANKS, ROWS, WIDTH, TURNS = 3, 5, 96, 12
ORDERS = ((1,), (2, 1), (1, 2, 2), (2, 2), (1, 1))  # steps of the sums that follow each other
MOST_OFF = 1e-5  # another turn's row would be off by ones


def given(turn: int) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """(every rank's part, the residual, the norm's weights), known to all."""
    generator = torch.Generator().manual_seed(turn)
    rows = 1 + turn * 3 % ROWS
    made = torch.randn(RANKS + 1, rows, WIDTH, generator=generator)
    made[: RANKS - turn % 2, :, 7] = LOOKS_LIKE_SENTINEL
    norm = torch.rand(WIDTH, generator=generator)
    return list(made[:RANKS]), made[RANKS] if turn % 3 else None, norm


def expected(turn: int) -> tuple[Tensor, Tensor]:
    parts, residual, norm = given(turn)
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total += part
    kept = total if residual is None else total + residual
    return REFERENCE.rms_norm(kept, norm, 1e-6), kept


def rank(number: int, memory: list[Tensor]) -> None:
    torch.set_num_threads(1)
    most = symmetric_all_reduce.buffer_rows(RANKS)
    use_counts, uses = torch.zeros(most, dtype=torch.int32), 0
    made = symmetric_all_reduce.AllReduceDispatch([one.data_ptr() for one in memory], use_counts, number, pdl=False)
    ways = {1: made.one_shot, 2: made.two_shot}
    late = random.Random(number)
    for turn in range(TURNS):
        parts, residual, norm = given(turn)
        normed, kept = expected(turn)
        uses += len(ORDERS[turn % len(ORDERS)]) * -(-len(kept) // most)
        for steps in ORDERS[turn % len(ORDERS)]:
            time.sleep(late.choice((0, 0, 0.02)))
            norms, sums_ = ways[steps](parts[number], residual_TN=residual, norm_N=norm, eps=1e-6)
            for found, wanted in ((sums_, kept), (norms, normed)):
                off = float((found - wanted).abs().max())
                assert off < MOST_OFF, f"{steps} steps: off by {off}, rank {number}, turn {turn}"
    assert use_counts[0] == uses


def shared(size: int) -> list[Tensor]:
    """Every rank's memory, the same for all processes that are forked from this one."""
    return [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.int16).fill_(SENTINEL) for _ in range(RANKS)]


def in_processes(rank: Callable[[int, list[Tensor]], None], size: int) -> None:
    """``rank`` of every number at once, over ``size`` bytes a rank. Raises where one fails or does not come back."""
    memory = shared(size)
    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=rank, args=(number, memory)) for number in range(RANKS)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(600)
        one.kill()
    assert [one.exitcode for one in ranks] == [0] * RANKS


def few_at_once(number: int, memory: list[Tensor]) -> None:
    """A program has up to two rows of a launch, a message up to two launches."""
    all_reduce_triton.MOST_AT_ONCE = all_reduce_triton.PROGRAMS_OF_MANY = 2
    symmetric_all_reduce.ROWS = 3
    rank(number, memory)


if __name__ == "__main__":
    for each in (rank, few_at_once):
        in_processes(each, symmetric_all_reduce.all_reduce_buffer_bytes(RANKS))
