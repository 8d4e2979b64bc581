"""Weights as values, and as parameters of the modules that hold them."""

from __future__ import annotations

import torch

from parallel.comm.collectives import SingleRank
from parallel.layers.linear import RowParallel
from parallel.layers.shard import ShardContext, ShardedModule
from parallel.layers.weight import Weight, plain
from tests.plant import reference_kernels

CONTEXT = ShardContext(SingleRank(), reference_kernels(), torch.bfloat16)


class Two(ShardedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = CONTEXT.weight(6, 4, bias=True)
        self.gate = CONTEXT.weight(3, 4, bias=True)
        self.shared = self.weight.unbiased


def test_tensors_of_weights_are_parameters_once() -> None:
    module = Two()
    assert [name for name, _ in module.named_parameters()] == ["weight", "weight_bias", "gate", "gate_bias"]
    assert module.weight.data is dict(module.named_parameters())["weight"]
    assert module.weight.format == plain(torch.bfloat16)


def test_rows_share_memory() -> None:
    weight = Weight.of(torch.arange(12.0).view(4, 3), torch.arange(4.0))
    part = weight.rows(1, 2)
    assert (part.outputs, part.inner) == (2, 3)
    part.data.zero_()
    assert weight.data[1:3].eq(0).all()
    assert part.bias is not None
    assert part.bias.tolist() == [1.0, 2.0]


def test_a_stack_has_the_rows_and_biases_of_its_parts_in_order() -> None:
    parts = [Weight.of(torch.full((2, 3), float(n)), torch.full((2,), float(n))) for n in range(2)]
    stacked = Weight.stacked(parts)
    assert stacked.data[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert stacked.bias is not None
    assert stacked.bias.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert Weight.stacked([part.unbiased for part in parts]).bias is None


def test_a_format_has_a_name_for_tables_and_its_bytes() -> None:
    assert (plain(torch.bfloat16).name, plain(torch.float32).nbytes(6, 4)) == ("bfloat16", 96)


def test_a_bias_is_added_by_the_first_rank_alone() -> None:
    class Second(SingleRank):
        rank, size = 1, 2

    layers = [
        RowParallel(4, 6, ShardContext(ranks, CONTEXT.kernels, torch.float32), bias=True)
        for ranks in (SingleRank(), Second())
    ]
    assert [layer.own.bias is not None for layer in layers] == [True, False]
    assert all(layer.own.data is layer.weight.data for layer in layers)
