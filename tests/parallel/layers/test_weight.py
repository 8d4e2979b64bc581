"""Weights as values, and as parameters of the modules that hold them."""

from __future__ import annotations

import pytest
import torch

from parallel.comm.collectives import SingleRank
from parallel.layers.linear import RowParallel
from parallel.layers.shard import ShardContext, ShardedModule
from parallel.layers.weight import Weight, WeightFormat, fp8, int4, mxfp4, nvfp4, plain
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


FORMATS = [int4(4, torch.float16), int4(4, torch.bfloat16, zeros=True), int4(0, torch.float32), mxfp4(4), nvfp4(4)]


def random_codes(form: WeightFormat, outputs: int, inner: int) -> Weight:
    grid = form.grid(outputs, inner)
    scale = torch.randint(120, 130, grid, dtype=torch.uint8)
    if form.scale_dtype != torch.uint8:
        scale = (torch.rand(grid) + 0.5).to(form.scale_dtype)
    return Weight(
        torch.randint(0, 256, (outputs, inner // 2), dtype=torch.uint8),
        form,
        scale=scale,
        zero=torch.randint(1, 16, grid, dtype=torch.uint8) if form.zeros else None,
        factor=torch.rand(outputs) if form.factors else None,
    )


def meaning(weight: Weight, row: int, column: int) -> float:
    """By the formula, one number."""
    code = int(weight.data[row, column // 2]) >> (4 * (column % 2)) & 15
    group = column // (weight.format.block[1] or weight.inner) if weight.format.block else 0
    assert weight.scale is not None
    if weight.format.code == "int4":
        zero = 8 if weight.zero is None else int(weight.zero[row, group])
        return (code - zero) * float(weight.scale[row, group])
    number = (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7] * (-1 if code & 8 else 1)
    if weight.scale.dtype == torch.uint8:
        return float(number * 2.0 ** (int(weight.scale[row, group]) - 127))
    assert weight.factor is not None
    return float(torch.tensor(number * float(weight.scale[row, group])) * weight.factor[row])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: str(form.name))
def test_four_bits_mean_what_the_formula_says(form: WeightFormat) -> None:
    weight = random_codes(form, 6, 8)
    assert (weight.outputs, weight.inner) == (6, 8)
    expected = torch.tensor([[meaning(weight, row, column) for column in range(8)] for row in range(6)])
    assert torch.equal(weight.plain(torch.float32), expected)
    assert torch.equal(weight.plain(torch.bfloat16), expected.bfloat16())
    assert torch.equal(weight.rows(2, 3).plain(torch.float32), expected[2:5])
    both = Weight.stacked([weight, weight])
    assert torch.equal(both.plain(torch.float32), torch.cat((expected, expected)))
    assert torch.equal(
        Weight.joined([weight, both]).rows(5, 4).plain(torch.float32), both.rows(5, 4).plain(torch.float32)
    )
    x_TN = torch.randn(3, 8)
    torch.testing.assert_close(reference_kernels().linear(x_TN, weight), x_TN @ expected.T)


def test_columns_of_codes_may_be_in_another_order() -> None:
    weight = random_codes(int4(4, torch.float16, ordered=True), 6, 8)
    order = torch.tensor([3, 1, 0, 7, 2, 6, 5, 4])
    expected = torch.empty(6, 8)
    expected[:, order] = weight.plain(torch.float32)
    assert torch.equal(
        Weight(weight.data, weight.format, scale=weight.scale, order=order).plain(torch.float32), expected
    )


def test_names_and_bytes_of_four_bits() -> None:
    forms = int4(128, torch.float16), int4(128, torch.bfloat16, zeros=True), mxfp4(), nvfp4(), fp8(128, 128)
    names = ["int4_1x128", "int4z_1x128", "mxfp4_1x32", "nvfp4_1x16", "fp8_128x128"]
    assert [form.name for form in forms] == names
    cells = 256 * 1024
    bytes_ = [cells // 2 + cells // 64, cells // 2 + 3 * cells // 128, cells // 2 + cells // 32]
    assert [form.nbytes(256, 1024) for form in forms[:3]] == bytes_
    assert nvfp4().nbytes(256, 1024) == cells // 2 + cells // 16 + 256 * 4
    assert mxfp4().in_blocks(1, 16).name == "mxfp4_1x16"
