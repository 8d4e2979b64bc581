"""The sums of tests/gpu/sum_candidates.py between processes, interpreted: ``TRITON_INTERPRET=1 python -m ...``.

Knows: how processes that were forked share memory at the same addresses. Does not know: GPUs, whose stores may arrive
in another order; bench_all_reduce.py compares every bit there before it times anything.
"""

from __future__ import annotations

import mmap
import multiprocessing
import random
import sys
import time

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel.one_shot_triton import one_shot
from parallel.places import Places, memory_bytes
from tests.gpu import sum_candidates
from tests.models.interpreted_kernels import REFERENCE

RANKS, ROWS, WIDTH, TURNS = 3, 5, 96, 12
ROW_BYTES = 2 * WIDTH
MOST_OFF = 0.08  # the interpreter cuts bfloat16 off instead of rounding; another turn's row would be off by ones


@triton.jit
def _spin(flag_ptr, exchange):  # type: ignore[no-untyped-def]
    seen = tl.load(flag_ptr, volatile=True)
    while seen < exchange:
        seen = tl.load(flag_ptr, volatile=True)


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


def rank(number: int, memory: list[Tensor], flagged_memory: list[Tensor]) -> None:
    torch.set_num_threads(1)
    rest = (torch.zeros(ROWS, dtype=torch.int32), number, ROWS, ROW_BYTES)
    places = Places(tuple(one.data_ptr() for one in memory), *rest)
    own = Places(tuple(one.data_ptr() for one in flagged_memory), torch.zeros_like(rest[0]), *rest[1:])
    late = random.Random(number)
    for turn in range(TURNS):
        parts, residual, norm = given(turn)
        part = parts[number]
        time.sleep(late.choice((0, 0, 0.02)))
        found = [
            sum_candidates.flagged(part, residual, norm, 1e-6, own, pdl=False),
            sum_candidates.two_steps(part, residual, norm, 1e-6, places, pdl=False),
        ]
        if turn % 2:  # takes turns with the protocol whose places it shares
            found.append(one_shot(part, places, residual_TN=residual, norm_N=norm, eps=1e-6, pdl=False))
        normed, kept = expected(turn)
        for name, (norms, sums) in zip(("flagged", "two steps", "one shot"), found, strict=False):
            for one, other in ((sums, kept), (norms, normed)):
                off = float((one.float() - other.float()).abs().max())
                assert off < MOST_OFF, f"{name}: off by {off}, rank {number}, turn {turn}"
    assert places.exchanges[0] == TURNS + TURNS // 2
    assert own.exchanges[0] == TURNS


def shared(size: int) -> list[Tensor]:
    """Every rank's memory, the same for all processes that are forked from this one."""
    return [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) for _ in range(RANKS)]


def main() -> None:
    sum_candidates._wait_until = _spin
    sys.modules[one_shot.__module__].__dict__["_wait_until"] = _spin
    memory = shared(memory_bytes(RANKS, ROWS, ROW_BYTES))
    flagged_memory = shared(sum_candidates.flagged_bytes(RANKS, ROWS, WIDTH))
    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=rank, args=(number, memory, flagged_memory)) for number in range(RANKS)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(120)
        one.kill()
    assert [one.exitcode for one in ranks] == [0] * RANKS


if __name__ == "__main__":
    main()
