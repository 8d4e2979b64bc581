"""Three ranks in one process, through Triton's interpreter: products that put their parts into the other ranks' marked
words, and the sums behind them. ``TRITON_INTERPRET=1 python -m ...``

After every launch the memory of all ranks is compared, byte by byte, with what that launch should have written: a wrong
address would be in another GPU's memory. Ranks run one after the other, so nothing is waited for: the products of all
ranks come before the sum of the first.

Knows: the layout of parallel/places.py, once more. Does not know: GPUs, where ranks run at once
(tests/gpu/test_symmetric.py), or sums that wait (interpreted_sums.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.choice_table import Choice, Gemv, Skinny
from parallel import parts_triton
from parallel.marked_sum_triton import marked_sum
from parallel.one_shot_triton import one_shot
from parallel.places import Places, marked_bytes, part_bytes
from tests.models.interpreted_kernels import REFERENCE, InterpretedKernels, check, randn

RANKS, ROWS, ROW_BYTES = 3, 13, 512
WIDTH, INNER = 96, 512
HALF = torch.float16
CHOICES: tuple[Choice, ...] = (
    Gemv(4, 256, 2),
    Skinny(16, 32, 128, 1, 3, 4, 128),
    Gemv(2, 256, 2),
    Skinny(8, 16, 128, 2, 3, 4, 128),  # two blocks of rows, split
)


@triton.jit
def _wait_for_nobody(flag_ptrs, exchange):  # type: ignore[no-untyped-def]
    tl.load(flag_ptrs)


class Emulated:
    """The memory of every rank, and what it should hold."""

    def __init__(self) -> None:
        behind = part_bytes(RANKS, ROWS, ROW_BYTES)
        size = behind + marked_bytes(RANKS, ROWS, ROW_BYTES)
        self._memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(RANKS)]
        addresses = tuple(memory.data_ptr() for memory in self._memory)
        self.exchanges = torch.zeros(RANKS, ROWS, dtype=torch.int32)
        self.parts = [Places(addresses, self.exchanges[rank], rank, ROWS, ROW_BYTES) for rank in range(RANKS)]
        later = tuple(address + behind for address in addresses)
        self.marked = [Places(later, self.exchanges[rank], rank, ROWS, ROW_BYTES) for rank in range(RANKS)]
        self._parts = torch.zeros(RANKS, 2, RANKS, ROWS, ROW_BYTES, dtype=torch.uint8)
        self._flags = torch.zeros(RANKS, ROWS, RANKS, dtype=torch.int32)
        self._words = torch.zeros(RANKS, 2, RANKS, ROWS, ROW_BYTES // 4, 2, dtype=torch.int32)
        self._exchanges = torch.zeros(RANKS, ROWS, dtype=torch.int32)

    def expect_words(self, rank: int, part: Tensor) -> None:
        """Of the next exchange, at the other ranks."""
        payload = part.contiguous().view(torch.int32)
        for other, row in itertools.product(range(RANKS), range(len(part))):
            if other != rank:
                mark = self._exchanges[rank, row] + 1
                words = self._words[other, mark % 2, rank, row, : payload.shape[1]]
                words[:, 0], words[:, 1] = payload[row], mark

    def expect_sum(self, rank: int, rows: int) -> None:
        self._exchanges[rank, :rows] += 1

    def expect_part(self, rank: int, part: Tensor) -> None:
        """And the flags that say so, of the exchange that was counted last."""
        raw, rows = part.contiguous().view(torch.uint8), len(part)
        for other in range(RANKS):
            if other != rank:
                for row in range(rows):
                    self._parts[other, (self._exchanges[rank, row] - 1) % 2, rank, row, : raw.shape[1]] = raw[row]
                self._flags[other, :rows, rank] = self._exchanges[rank, :rows]

    def check(self, what: object) -> None:
        for rank, memory in enumerate(self._memory):
            kinds = (self._parts[rank], self._flags[rank], self._words[rank])
            expected = torch.cat([kind.contiguous().view(torch.uint8).flatten() for kind in kinds])
            wrong = (memory != expected).nonzero()
            assert not len(wrong), f"{what}: byte {int(wrong[0])} of rank {rank}'s memory"
        assert torch.equal(self.exchanges, self._exchanges), what


def products(emulated: Emulated, kernels: InterpretedKernels, turn: int) -> Iterator[Tensor]:
    """Each rank's part, from a product that pushed it."""
    choice = CHOICES[turn % len(CHOICES)]
    rows = 1 + turn * 3 % (4 if isinstance(choice, Gemv) else ROWS)
    for rank, places in enumerate(emulated.marked):
        x, weight = randn(rows, INNER, dtype=HALF), randn(WIDTH, INNER, dtype=HALF) * INNER**-0.5
        bias = randn(WIDTH, dtype=HALF) if rank == 0 and turn % 2 else None
        part = kernels._product(x, weight, bias, choice, gate_up=False, places=places)
        check(part, REFERENCE.linear(x, weight, bias), HALF, (turn, choice))
        assert torch.equal(part, kernels._product(x, weight, bias, choice, gate_up=False)), (turn, choice)
        emulated.expect_words(rank, part)
        emulated.check((turn, "product", rank, choice))
        yield part


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parts_triton._wait_until = _wait_for_nobody
    kernels = InterpretedKernels()
    options: dict[str, Any] = {"norm_N": torch.rand(WIDTH).to(HALF), "eps": 1e-6, "pdl": False}
    emulated = Emulated()
    for turn in range(20):  # every choice for several counts, odd and even
        parts = list(products(emulated, kernels, turn))
        rows = len(parts[0])
        residual = randn(rows, WIDTH, dtype=HALF) if turn % 3 else None
        total = sum(part.float() for part in parts).to(HALF)  # type: ignore[union-attr]
        total = total if residual is None else (total.float() + residual.float()).to(HALF)
        expected = REFERENCE.rms_norm(total, options["norm_N"], 1e-6)
        for rank, (part, places) in enumerate(zip(parts, emulated.marked, strict=True)):
            normed, kept = marked_sum(part, places, residual_TN=residual, pushed=True, **options)
            emulated.expect_sum(rank, rows)
            emulated.check((turn, "sum", rank))
            assert torch.equal(kept, total), (turn, rank)
            check(normed, expected, HALF, (turn, rank))
        if turn % 7 == 6:  # another kind of sum in between, of the same rows
            for rank, (part, places) in enumerate(zip(parts, emulated.parts, strict=True)):
                one_shot(part, places, **options)
                emulated.expect_sum(rank, rows)
                emulated.expect_part(rank, part)
                emulated.check((turn, "one shot", rank))
    kernels.check_counters()


if __name__ == "__main__":
    main()
