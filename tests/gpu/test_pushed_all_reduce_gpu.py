"""Products that put their parts into the other ranks' memory, and the sums behind them, on two GPUs, and on four where
there are four: the same bits as where the sum does it, alone and in graphs, with ranks late by turns, between other
exchanges.

Knows: which products push, and in which orders sums come. Does not know: sums without products (test_symmetric.py).

Run: python3 -m pytest -m multigpu tests/gpu/test_pushed_all_reduce_gpu.py    # -k two-ranks, -k four-ranks: only those
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.kernels.matmul.choice_table import Blas, Choice, Gemv, LinearShape, Skinny, Wide
from models.ops.rows_nvidia.products import MAX_PUSHED_ROWS
from parallel.comm.collectives import PendingAllReduce
from parallel.comm.symmetric_all_reduce import SymmetricCollectives
from parallel.layers.linear import RowParallel
from parallel.layers.shard import ShardContext
from tests.gpu.ranks_on_gpus import OWN_GPUS, free_port, joined, late_by_turns, leave, on_gpus
from tests.gpu.untyped import Stream, spawn
from tests.models.kernels.nvidia_kernels import nvidia_kernels

BF16 = torch.bfloat16
INNER, WIDTH = 2048, 4096
EPS = 1e-6
TURNS = 120
CASES: tuple[tuple[Choice, tuple[int, ...]], ...] = (  # with rows of one bucket each
    (Gemv(4, 512, 2, 1024), (1,)),
    (Gemv(2, 1024, 4), (3, 4)),
    (Gemv(1, 1024, 4), (2,)),
    (Skinny(8, 16, 256, 1, 4, 1, 256), (5, 8)),
    (Skinny(8, 32, 128, 3, 5, 2, 128), (7,)),
    (Skinny(16, 64, 128, 1, 5, 4, 1024), (9, 16)),
    (Skinny(16, 64, 128, 2, 5, 4, 128), (16,)),
    (Skinny(16, 64, 128, 1, 7, 4, 128, late=True), (16,)),
    (Skinny(8, 64, 128, 4, 7, 4, 128, late=True), (8,)),
    (Skinny(32, 64, 128, 1, 5, 4, 128), (17, 32)),
    # None of the following pushes.
    (Wide(64, 32, 128, 1, 8, 4, 256), (33, 64)),
    (Blas(), (400,)),
)


@pytest.mark.multigpu
@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [on_gpus(2), on_gpus(4)])
def test_a_product_that_pushes_and_its_all_reduce_are_what_they_were(ranks: int) -> None:
    spawn(_rank, args=(free_port(), ranks), nprocs=ranks)


def _rank(rank: int, port: int, ranks: int) -> None:
    made = joined(rank, port, ranks)
    with torch.device("cuda", rank):
        layers = [Layer(made, inner, WIDTH) for inner in (INNER, 3 * INNER)]  # three: one choice splits K so
        for layer in layers:
            for choice, counts in CASES:
                if layer.inner == INNER and isinstance(choice, Skinny) and choice.split == 3:
                    continue
                for rows in counts:
                    layer.check(choice, rows)
        check_behind_each_other(layers[0])
        check_graph(layers[0])
    leave()


class Layer:
    """A row-parallel product with a bias, and the norm behind its sum."""

    def __init__(self, made: SymmetricCollectives, inner: int, width: int) -> None:
        self.made, self.inner, self.width = made, inner, width
        self.kernels = nvidia_kernels(torch.device("cuda", made.rank), prefill="triton")
        self.product = RowParallel(made.size * inner, width, ShardContext(made, self.kernels, BF16), bias=True)
        torch.manual_seed(made.rank)
        self.product.weight.data.copy_(torch.randn(width, inner) * inner**-0.5)
        torch.manual_seed(made.size)
        assert self.product.weight.bias is not None
        self.product.weight.bias.copy_(torch.randn(width))
        self.norm = torch.rand(width).to(BF16)

    def inputs(self, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        """(this rank's share of the tokens, the residual, which is the same everywhere)"""
        torch.manual_seed(seed)
        residual = torch.randn(rows, self.width).to(BF16)
        torch.manual_seed(1000 * (1 + self.made.rank) + seed)
        return torch.randn(rows, self.inner).to(BF16), residual

    def choose(self, choice: Choice, rows: int) -> None:
        shape = LinearShape(rows, self.width, self.inner, BF16)
        self.kernels.matmul.choose(shape, choice)
        assert self.kernels.matmul.choice(shape) == choice, f"{choice} does not fit {shape.key}"

    def run(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """As a model runs it."""
        part = self.product(x)
        assert isinstance(part, PendingAllReduce)
        choice = self.kernels.matmul.choice(LinearShape(len(x), self.width, self.inner, BF16))
        assert part.pushed == (isinstance(choice, Gemv | Skinny) and len(x) <= MAX_PUSHED_ROWS), choice
        return part.normed(residual, self.norm, EPS)

    def run_unpushed(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        part = self.made.all_reduce_before_norm(self.kernels.linear(x, self.product.own))
        assert isinstance(part, PendingAllReduce)
        assert not part.pushed
        return part.normed(residual, self.norm, EPS)

    def check(self, choice: Choice, rows: int) -> None:
        self.choose(choice, rows)
        x, residual = self.inputs(rows, seed=rows)
        expected = x.float() @ self.product.weight.data.float().T
        dist.all_reduce(expected)
        assert self.product.weight.bias is not None
        expected += self.product.weight.bias.float()
        for before in (residual, None, residual):  # three: both places are used
            normed, kept = self.run(x, before)
            for found, other in zip((normed, kept), self.run_unpushed(x, before), strict=True):
                assert torch.equal(found, other), f"{choice}, {rows} rows: not what an own push gives"
            total = expected if before is None else expected + before.float()
            assert float((kept.float() - total).norm() / total.norm()) < 6e-3, (choice, rows)
            copies = [torch.empty_like(normed) for _ in range(self.made.size)]
            dist.all_gather(copies, normed)
            assert all(torch.equal(copy, normed) for copy in copies), f"{choice}, {rows} rows: the ranks differ"


def check_behind_each_other(layer: Layer) -> None:
    """Products and sums of other rows each time, without anything between them, and some exchanges of other kinds."""
    made, found = layer.made, []
    for choice, counts in CASES:
        if not isinstance(choice, Skinny) or choice.split != 3:
            for rows in counts:
                layer.choose(choice, rows)  # of two choices for a bucket the last
    counts = (1, 16, 3, 32, 64, 8, 400, 7, 12, 5, 2, 33)
    given = [layer.inputs(rows, seed=number) for number, rows in enumerate(counts)]
    ones = torch.ones(300, 256, dtype=BF16)
    for turn in late_by_turns(made.rank, made.size, TURNS, OWN_GPUS.late):
        number = turn * 5 % len(counts)
        found.append((number, layer.run(*given[number])))
        if turn % 7 == 3:
            assert bool((made.all_reduce(ones * (turn % 16)) == made.size * (turn % 16)).all())
        if turn % 11 == 5:
            layer.run_unpushed(*given[(number + 1) % len(counts)])
    expected = [layer.run_unpushed(*one) for one in given]
    for turn, (number, (normed, kept)) in enumerate(found):
        assert torch.equal(normed, expected[number][0]), f"turn {turn}, {counts[number]} rows"
        assert torch.equal(kept, expected[number][1]), f"turn {turn}, {counts[number]} rows"


def check_graph(layer: Layer) -> None:
    """A step of several layers, replayed again and again while ranks are late by turns."""
    made, counts = layer.made, (8, 16, 32, 3, 64, 12, 1, 32)
    given = [torch.zeros(rows, layer.inner, dtype=BF16) for rows in counts]

    def step(run: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]) -> list[Tensor]:
        out: list[Tensor] = []
        for number, x in enumerate(given):
            out += run(x, None)
            if number % 3 == 2:
                out += layer.run_unpushed(x, out[-1])
                out.append(made.all_reduce(out[-1]))
        return out

    side = Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(layer.run)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = step(layer.run)

    def fill(seed: int) -> None:
        for number, x in enumerate(given):
            x.copy_(layer.inputs(len(x), seed=100 * seed + number)[0])

    found = []
    for turn in late_by_turns(made.rank, made.size, TURNS, OWN_GPUS.late):
        if turn % 10 == 0:
            fill(turn)
        graph.replay()
        found.append([one.clone() for one in out])
    for turn, ones in enumerate(found):
        if turn % 10 == 0:
            fill(turn)
            expected = step(layer.run_unpushed)
        for one, other in zip(ones, expected, strict=True):
            assert torch.equal(one, other), f"replay {turn}, {len(one)} rows"
    graph.reset()
