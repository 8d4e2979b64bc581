"""Who asks whom to put a part into other ranks' places, and that only where both the collectives and the kernel can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.kernels.matmul.choice_table import Blas, Choice, CublasLt, Gemv, LinearShape, Skinny, Wide
from models.kernels.traits import H200
from parallel.comm.collectives import Collectives, PendingAllReduce, SingleRank
from parallel.comm.peer_buffers import PeerBuffers, push_arguments
from parallel.comm.quantised import Quantised
from parallel.layers.linear import RowParallel
from parallel.layers.shard import ShardContext
from parallel.layers.weight import Weight
from tests.plant import Kernels, Op, kernels_with, reference_kernels

BUFFERS = PeerBuffers((16, 32), torch.zeros(4, dtype=torch.int32), rank=0, rows=4, row_bytes=64)


class Told(SingleRank):
    """Two ranks, of which this one notes what it is asked to sum; ``rows`` is the most that has places."""

    size = 2

    def __init__(self, rank: int = 0, rows: int = 4) -> None:
        self.rank, self._rows = rank, rows
        self.all_reduces: list[tuple[Tensor, bool]] = []

    def push_buffers(self, tokens: int, width: int, dtype: torch.dtype) -> PeerBuffers | None:
        return BUFFERS if tokens <= self._rows else None

    def all_reduce_before_norm(self, x_TN: Tensor, *, pushed: bool = False) -> Tensor | PendingAllReduce:
        return PendingAllReduce(x_TN, self, pushed)

    def all_reduce_norm(
        self,
        x_TN: Tensor,
        residual_TN: Tensor | None,
        norm_N: Tensor,
        eps: float,
        *,
        pushed: bool = False,
        into: Quantised | None = None,
    ) -> tuple[Tensor, Tensor]:
        self.all_reduces.append((x_TN, pushed))
        return x_TN, x_TN


class Pushing:
    """Kernels whose products have pushed every result, and what they were asked to push."""

    def __init__(self) -> None:
        self.pushed: list[tuple[PeerBuffers, Tensor | None]] = []
        self.kernels = kernels_with(linear_push=self.linear_push)

    def linear_push(self, linear: Op, buffers: PeerBuffers, x_TN: Tensor, weight: Weight) -> tuple[Tensor, bool]:
        self.pushed.append((buffers, weight.bias))
        return linear(buffers, x_TN, weight)[0], True


def layer(collectives: Collectives, kernels: Kernels) -> RowParallel:
    made = RowParallel(6, 8, ShardContext(collectives, kernels, torch.float32), bias=True)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pushing_product_is_given_places_and_its_all_reduce_is_told(rank: int) -> None:
    collectives, pushing = Told(rank), Pushing()
    product = layer(collectives, pushing.kernels)
    x = torch.randn(3, 3)
    part = product(x)
    assert isinstance(part, PendingAllReduce)
    bias = product.weight.bias if rank == 0 else None
    assert pushing.pushed == [(BUFFERS, bias)]
    assert torch.equal(part.part_TN, pushing.kernels.linear(x, Weight.of(product.weight.data, bias)))
    assert collectives.all_reduces == []
    part.normed(None, torch.ones(8), 1e-6)
    assert collectives.all_reduces == [(part.part_TN, True)]


def test_a_kernel_that_cannot_push_leaves_it_to_the_all_reduce() -> None:
    collectives = Told()
    part = layer(collectives, reference_kernels())(torch.randn(3, 3))
    part.normed(None, torch.ones(8), 1e-6)
    assert [pushed for _, pushed in collectives.all_reduces] == [False]


def test_without_places_nothing_is_pushed() -> None:
    pushing = Pushing()
    part = layer(Told(rows=2), pushing.kernels)(torch.randn(3, 3))
    assert isinstance(part, PendingAllReduce)
    assert not part.pushed
    alone = layer(SingleRank(), pushing.kernels)
    assert isinstance(alone(torch.randn(3, 6)), Tensor)
    assert pushing.pushed == []


@pytest.mark.parametrize(
    ("choice", "rows", "pushes"),
    [
        (Blas(), 3, False),
        (CublasLt("00", 1), 16, False),
        (Gemv(4, 256, 2), 3, True),
        (Gemv(1, 256, 2), 3, True),
        (Skinny(16, 32, 128, 1, 3, 4, 128), 32, True),
        (Skinny(16, 32, 128, 1, 3, 4, 128), 33, False),
        (Wide(64, 32, 64, 1, 3, 4, 128), 16, False),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else type(value).__name__,
)
def test_kernels_for_few_rows_push_few_rows(
    choice: Choice, rows: int, pushes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    from models.ops import tuned
    from models.ops.rows_nvidia.products import product as usual

    x, weight = torch.randn(rows, 8), Weight.of(torch.randn(4, 8))
    asked = []

    def product(products: object, shape: LinearShape, choice: Choice, into: bool) -> tuple[Any, bool]:
        def run(*given: object, buffers: PeerBuffers | None = None) -> tuple[Tensor, Tensor]:
            asked.append((*given, buffers))
            return x, x

        return run, usual(products, shape, choice)[1]

    matmul = object.__new__(tuned.TunedProducts)
    matmul.traits, matmul.pdl, matmul._lt = H200, False, None
    matmul._partial = matmul._counters = torch.empty(0)
    matmul._resolved, matmul._runs = {LinearShape(rows, 4, 8, torch.float32): choice}, {}
    monkeypatch.setattr(tuned, "product", product)
    assert matmul.linear_push(BUFFERS, x, weight) == (x, pushes)
    assert asked == [(x, weight, BUFFERS if pushes else None)]


def test_a_kernel_without_places_is_given_none_of_them() -> None:
    with_places, without = push_arguments(BUFFERS), push_arguments(None)
    assert with_places.keys() == without.keys()
    assert (with_places["PUSH"], without["PUSH"]) == (True, False)
    assert without["memory"] is without["use_counts_ptr"] is None
