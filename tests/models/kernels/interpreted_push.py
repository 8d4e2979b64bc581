"""Three ranks in one process, through Triton's interpreter: products that put their parts into the other ranks' places,
and the sums behind them. ``TRITON_INTERPRET=1 python -m ...``

After every launch the memory of all ranks is compared, byte by byte, with what that launch should have written or
emptied: a wrong address would be in another GPU's memory. Ranks run one after the other, so nothing is waited for: the
products of all ranks come before the sum of the first.

Knows: the layout of parallel/comm/peer_buffers.py, once more. Does not know: GPUs, where ranks run at once
(tests/gpu/test_symmetric.py), or sums that wait (interpreted_all_reduce.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from models.kernels.matmul.choice_table import Choice, Gemv, Skinny
from parallel.comm.all_reduce_triton import all_reduce_rows
from parallel.comm.peer_buffers import SENTINEL, PeerBuffers, peer_buffer_bytes
from parallel.layers.weight import Weight
from tests.models.kernels.interpreted_kernels import REFERENCE, check, interpreted_kernels, randn
from tests.models.kernels.nvidia_kernels import Nvidia, check_counters

RANKS, ROWS, ROW_BYTES = 3, 13, 512
WIDTH, INNER = 96, 512
CHOICES: tuple[Choice, ...] = (
    Gemv(4, 256, 2),
    Skinny(16, 32, 128, 1, 3, 4, 128),
    Skinny(8, 16, 128, 2, 3, 4, 128),  # two blocks of rows, split
)


class Emulated:
    """The memory of every rank, and what it should hold."""

    def __init__(self) -> None:
        size = peer_buffer_bytes(RANKS, ROWS, ROW_BYTES) // 2
        self._memory = [torch.full((size,), SENTINEL, dtype=torch.int16) for _ in range(RANKS)]
        addresses = tuple(memory.data_ptr() for memory in self._memory)
        self.use_counts = torch.zeros(RANKS, ROWS, dtype=torch.int32)
        self.buffers = [PeerBuffers(addresses, self.use_counts[rank], rank, ROWS, ROW_BYTES) for rank in range(RANKS)]
        self._expected = torch.full((RANKS, 2, RANKS, ROWS, ROW_BYTES // 2), SENTINEL, dtype=torch.int16)

    def expect_push(self, rank: int, part: Tensor) -> None:
        raw = part.contiguous().view(torch.int16)
        for other, row in itertools.product(range(RANKS), range(len(part))):
            if other != rank:
                self._expected[other, self.use_counts[rank, row] % 2, rank, row, : raw.shape[1]] = raw[row]

    def expect_emptied(self, rank: int, rows: int) -> None:
        for row in range(rows):
            self._expected[rank, (self.use_counts[rank, row] - 1) % 2, :, row] = SENTINEL

    def check(self, what: object) -> None:
        for rank, memory in enumerate(self._memory):
            wrong = (memory != self._expected[rank].flatten()).nonzero()
            assert not len(wrong), f"{what}: half word {int(wrong[0])} of rank {rank}'s memory"


def products(emulated: Emulated, kernels: Nvidia, turn: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Each rank's part, from a product that pushed it."""
    choice = CHOICES[turn % len(CHOICES)]
    rows = 1 + turn * 3 % (4 if isinstance(choice, Gemv) else ROWS)
    for rank, buffers in enumerate(emulated.buffers):
        x, weight = randn(rows, INNER, dtype=dtype), randn(WIDTH, INNER, dtype=dtype) * INNER**-0.5
        weight[0] = 0
        x[:, 0], weight[0, 0] = -1e-4, 1e-4  # their product is minus zero in float16: what empty memory holds
        bias = randn(WIDTH, dtype=dtype) if rank == 0 and turn % 2 else None
        matrix = Weight.of(weight, bias)
        part = kernels.matmul.run(x, matrix, choice, gate_up=False, buffers=buffers)
        check(part, REFERENCE.linear(x, matrix), dtype, (turn, choice))
        assert torch.equal(part, kernels.matmul.run(x, matrix, choice, gate_up=False)), (turn, choice)
        emulated.expect_push(rank, part + 0.0)  # minus zero is sent as zero
        emulated.check((turn, "product", rank, choice))
        yield part


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kernels = interpreted_kernels()
    options: dict[str, Any] = {"norm_N": torch.rand(WIDTH), "eps": 1e-6, "pdl": False}
    minus_zeros = 0
    for dtype in (torch.float16, torch.float32):
        emulated = Emulated()
        options["norm_N"] = options["norm_N"].to(dtype)
        counts = torch.zeros(ROWS, dtype=torch.int32)
        for turn in range(15 if dtype == torch.float16 else 2):  # every choice for several counts, odd and even
            parts = list(products(emulated, kernels, turn, dtype))
            rows = len(parts[0])
            minus_zeros += sum(int((part.view(torch.int16) == SENTINEL).sum()) for part in parts if dtype.itemsize == 2)
            residual = randn(rows, WIDTH, dtype=dtype) if turn % 3 else None
            total = sum(part.float() for part in parts).to(dtype)  # type: ignore[union-attr]
            total = total if residual is None else (total.float() + residual.float()).to(dtype)
            expected = REFERENCE.rms_norm(total, options["norm_N"], 1e-6)
            counts[:rows] += 1
            for rank, (part, buffers) in enumerate(zip(parts, emulated.buffers, strict=True)):
                normed, kept = all_reduce_rows(part, buffers, residual_TN=residual, pushed=True, **options)
                assert torch.equal(buffers.use_counts, counts), (turn, rank)
                emulated.expect_emptied(rank, rows)
                emulated.check((turn, "sum", rank))
                assert torch.equal(kept, total), (turn, rank)
                check(normed, expected, dtype, (turn, rank))
    assert minus_zeros > 0, "no part had what empty memory holds"
    check_counters(kernels)


if __name__ == "__main__":
    main()
