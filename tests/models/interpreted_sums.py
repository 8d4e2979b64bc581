"""Every kernel of parallel/ that sums, between processes, interpreted: ``TRITON_INTERPRET=1 python -m ...``.

Knows: how processes that were forked share memory at the same addresses. Does not know: GPUs, whose stores may arrive
in another order; bench_all_reduce.py compares every bit there before it times anything.
"""

from __future__ import annotations

import mmap
import multiprocessing
import random
import time

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel import parts_triton, sums
from tests.models.interpreted_kernels import REFERENCE

RANKS, ROWS, WIDTH, TURNS = 3, 5, 96, 12
ORDERS = (("marked",), ("two steps", "one shot"), ("one shot", "marked", "two steps"), ("marked", "marked"))
MOST_OFF = 0.08  # the interpreter cuts bfloat16 off instead of rounding; another turn's row would be off by ones


@triton.jit
def _spin(flag_ptrs, exchange):  # type: ignore[no-untyped-def]
    while tl.min(tl.load(flag_ptrs, volatile=True) + tl.zeros((1,), tl.int32), 0) < exchange:
        pass


def given(turn: int) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """(every rank's part, the residual, the norm's weights), known to all."""
    generator = torch.Generator().manual_seed(turn)
    rows = 1 + turn * 3 % ROWS
    made = torch.randn(RANKS + 1, rows, WIDTH, generator=generator).bfloat16()
    norm = torch.rand(WIDTH, generator=generator).bfloat16()
    return list(made[:RANKS]), made[RANKS] if turn % 3 else None, norm


def expected(turn: int) -> tuple[Tensor, Tensor]:
    parts, residual, norm = given(turn)
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total += part.float()
    kept = total.bfloat16() if residual is None else (total.bfloat16().float() + residual.float()).bfloat16()
    return REFERENCE.rms_norm(kept, norm, 1e-6), kept


def rank(number: int, memory: list[Tensor]) -> None:
    torch.set_num_threads(1)
    exchanges = torch.zeros(sums.ROWS, dtype=torch.int32)
    made = sums.Sums([one.data_ptr() for one in memory], exchanges, number, pdl=False)
    ways = {"marked": made.marked, "one shot": made.one_shot, "two steps": made.two_steps}
    late = random.Random(number)
    for turn in range(TURNS):
        parts, residual, norm = given(turn)
        normed, kept = expected(turn)
        for name in ORDERS[turn % len(ORDERS)]:  # they take turns with the rows' counts
            time.sleep(late.choice((0, 0, 0.02)))
            norms, sums_ = ways[name](parts[number], residual_TN=residual, norm_N=norm, eps=1e-6)
            for found, wanted in ((sums_, kept), (norms, normed)):
                off = float((found.float() - wanted.float()).abs().max())
                assert off < MOST_OFF, f"{name}: off by {off}, rank {number}, turn {turn}"
    assert exchanges[0] == sum(len(ORDERS[turn % len(ORDERS)]) for turn in range(TURNS))


def shared(size: int) -> list[Tensor]:
    """Every rank's memory, the same for all processes that are forked from this one."""
    return [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) for _ in range(RANKS)]


def main() -> None:
    parts_triton._wait_until = _spin
    memory = shared(sums.memory_bytes(RANKS))
    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=rank, args=(number, memory)) for number in range(RANKS)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(120)
        one.kill()
    assert [one.exitcode for one in ranks] == [0] * RANKS


if __name__ == "__main__":
    main()
