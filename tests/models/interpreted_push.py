"""Three ranks in one process, through Triton's interpreter: products that put their parts into the other ranks' places,
and the sums behind them. ``TRITON_INTERPRET=1 python -m ...``

After every launch the memory of all ranks is compared, byte by byte, with what that launch should have written: a wrong
address would be in another GPU's memory. Ranks run one after the other, so nothing is waited for: the products of all
ranks come before the sum of the first.

Knows: the layout of parallel/places.py, once more. Does not know: GPUs, where ranks run at once
(tests/gpu/test_symmetric.py).
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
from parallel import one_shot_triton
from parallel.one_shot_triton import one_shot
from parallel.places import Places, memory_bytes
from tests.models.interpreted_kernels import REFERENCE, InterpretedKernels, check, randn

RANKS, ROWS, ROW_BYTES = 3, 13, 512
WIDTH, INNER = 96, 512
CHOICES: tuple[Choice, ...] = (
    Gemv(4, 256, 2),
    Skinny(16, 32, 128, 1, 3, 4, 128),
    Skinny(8, 16, 128, 2, 3, 4, 128),  # two blocks of rows, split
)


@triton.jit
def _wait_for_nobody(flag_ptr, exchange):  # type: ignore[no-untyped-def]
    tl.load(flag_ptr)


class Emulated:
    """The memory of every rank, and what it should hold."""

    def __init__(self) -> None:
        self._memory = [torch.zeros(memory_bytes(RANKS, ROWS, ROW_BYTES), dtype=torch.uint8) for _ in range(RANKS)]
        addresses = tuple(memory.data_ptr() for memory in self._memory)
        self.places = [self.places_of(rank, addresses) for rank in range(RANKS)]
        self._parts = torch.zeros(RANKS, 2, RANKS, ROWS, ROW_BYTES, dtype=torch.uint8)
        self._flags = torch.zeros(RANKS, ROWS, RANKS, dtype=torch.int32)
        self._exchanges = torch.zeros(RANKS, ROWS, dtype=torch.int32)

    @staticmethod
    def places_of(rank: int, addresses: tuple[int, ...]) -> Places:
        return Places(addresses, torch.zeros(ROWS, dtype=torch.int32), rank, ROWS, ROW_BYTES)

    def expect_push(self, rank: int, part: Tensor) -> None:
        raw = part.contiguous().view(torch.uint8)
        for other, row in itertools.product(range(RANKS), range(len(part))):
            if other != rank:
                self._parts[other, self._exchanges[rank, row] % 2, rank, row, : raw.shape[1]] = raw[row]

    def expect_sum(self, rank: int, rows: int) -> None:
        self._exchanges[rank, :rows] += 1
        for other in range(RANKS):
            if other != rank:
                self._flags[other, :rows, rank] = self._exchanges[rank, :rows]

    def check(self, what: object) -> None:
        for rank, (memory, places) in enumerate(zip(self._memory, self.places, strict=True)):
            expected = torch.cat([self._parts[rank].flatten(), self._flags[rank].view(torch.uint8).flatten()])
            wrong = (memory != expected).nonzero()
            assert not len(wrong), f"{what}: byte {int(wrong[0])} of rank {rank}'s memory"
            assert torch.equal(places.exchanges, self._exchanges[rank]), what


def products(emulated: Emulated, kernels: InterpretedKernels, turn: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Each rank's part, from a product that pushed it."""
    choice = CHOICES[turn % len(CHOICES)]
    rows = 1 + turn * 3 % (4 if isinstance(choice, Gemv) else ROWS)
    for rank, places in enumerate(emulated.places):
        x, weight = randn(rows, INNER, dtype=dtype), randn(WIDTH, INNER, dtype=dtype) * INNER**-0.5
        bias = randn(WIDTH, dtype=dtype) if rank == 0 and turn % 2 else None
        part = kernels._product(x, weight, bias, choice, gate_up=False, places=places)
        check(part, REFERENCE.linear(x, weight, bias), dtype, (turn, choice))
        assert torch.equal(part, kernels._product(x, weight, bias, choice, gate_up=False)), (turn, choice)
        emulated.expect_push(rank, part)
        emulated.check((turn, "product", rank, choice))
        yield part


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    one_shot_triton._wait_until = _wait_for_nobody
    kernels = InterpretedKernels()
    options: dict[str, Any] = {"norm_N": torch.rand(WIDTH), "eps": 1e-6, "pdl": False}
    for dtype in (torch.float16, torch.float32):
        emulated = Emulated()
        options["norm_N"] = options["norm_N"].to(dtype)
        for turn in range(15 if dtype == torch.float16 else 1):  # every choice for several counts, odd and even
            pushed = turn % 7 != 6
            parts = list(products(emulated, kernels, turn, dtype))
            rows = len(parts[0])
            residual = randn(rows, WIDTH, dtype=dtype) if turn % 3 else None
            if not pushed:  # another sum in between, of parts that it writes itself
                parts = [part + 1 for part in parts]
            total = sum(part.float() for part in parts).to(dtype)  # type: ignore[union-attr]
            total = total if residual is None else (total.float() + residual.float()).to(dtype)
            expected = REFERENCE.rms_norm(total, options["norm_N"], 1e-6)
            for rank, (part, places) in enumerate(zip(parts, emulated.places, strict=True)):
                normed, kept = one_shot(part, places, residual_TN=residual, pushed=pushed, **options)
                if not pushed:
                    emulated.expect_push(rank, part)
                emulated.expect_sum(rank, rows)
                emulated.check((turn, "sum", rank))
                if pushed or rank == RANKS - 1:  # else the ranks behind it have written nothing yet
                    assert torch.equal(kept, total), (turn, rank)
                    check(normed, expected, dtype, (turn, rank))
    kernels.check_counters()


if __name__ == "__main__":
    main()
