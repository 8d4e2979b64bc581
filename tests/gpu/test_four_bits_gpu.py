"""Products and experts with four-bit weights on a GPU, against float64 formulas, by every kernel that takes a shape.

Run: python3 -m pytest -m gpu tests/gpu/test_four_bits_gpu.py
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parallel.layers.weight import Weight, WeightFormat, int4, mxfp4, nvfp4
from tests.plant import reference_kernels

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from models.kernels.matmul.choice_table import Decoded, LinearShape, Warpgroup
    from models.kernels.matmul.codes import decoded
    from tests.models.kernels.nvidia_kernels import Nvidia, invariant_nvidia_kernels, nvidia_kernels

BF16 = torch.bfloat16
FORMATS = [
    int4(128, BF16),
    int4(128, torch.float16, zeros=True),
    int4(64, torch.float32),
    int4(32, torch.float16, zeros=True),
    int4(16, BF16),
    int4(0, BF16),
    mxfp4(),
    mxfp4(16),
    nvfp4(),
]
NAMES = [f"{form.name}-{form.scale_dtype}" for form in FORMATS]
SIZES = [(512, 1536), (256, 2880)]
ROWS = [1, 20, 64, 200]
_TRIED = 3  # configurations of a shape: each is two kernels to compile


@pytest.fixture(scope="module")
def kernels() -> Nvidia:
    return nvidia_kernels("cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    poison = torch.full((64 << 20,), math.nan, device="cuda")  # freed at once: torch.empty finds NaN, not zeros
    del poison


def weight_of(shape: tuple[int, ...], form: WeightFormat, bias: bool = False) -> Weight:
    """Other scales, zeros and factors in every group; products stay near 1."""
    grid, size = (*shape[:-2], *form.grid(*shape[-2:])), shape[-1] ** -0.5 / 4
    spread, factor = torch.rand(grid, device="cuda") + 0.5, None
    if form.scale_dtype == torch.uint8:
        scale = torch.randint(-1, 2, grid, device="cuda").add(round(math.log2(size)) + 127).to(torch.uint8)
    elif form.factors:
        scale, factor = (spread * 16).to(form.scale_dtype), torch.rand(shape[:-1], device="cuda").add(0.5) * (size / 16)
    else:
        scale = (spread * size).to(form.scale_dtype)
    zero = torch.randint(0, 16, grid, dtype=torch.uint8, device="cuda") if form.zeros else None
    data = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device="cuda")
    offset = torch.randn(shape[:-1], device="cuda").to(BF16) if bias else None
    return Weight(data, form, offset, scale, zero=zero, factor=factor)


def near(found: Tensor, expected: Tensor, what: object, bound: float = 6e-3) -> None:
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    assert error < bound, f"{what}: relative error {error:.1e}"


def silu_mul(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=NAMES)
def test_products(kernels: Nvidia, form: WeightFormat, sizes: tuple[int, int], rows: int) -> None:
    weight = weight_of(sizes, form, bias=True)
    assert weight.bias is not None
    for dtype in (BF16, torch.float16) if rows == 20 else (BF16,):
        x = torch.randn(rows, sizes[1], device="cuda").to(dtype)
        typed = replace(weight, bias=weight.bias.to(dtype))
        expected = x.double() @ weight.plain(torch.float64).t()
        *ours, last = kernels.matmul.candidates(LinearShape.of(x, weight))
        assert last == Decoded()
        assert ours or rows > 64
        for choice in (*ours[:: -(-len(ours) // _TRIED) or 1], last):
            found = kernels.matmul.run(x, typed, choice, gate_up=False)
            near(found, expected + weight.bias.double(), (choice, dtype))
            found = kernels.matmul.run(x, typed.unbiased, choice, gate_up=True)
            near(found, silu_mul(expected), (choice, "gate_up", dtype), 1e-2)


@pytest.mark.parametrize("rows", [7, 29])
@pytest.mark.parametrize("form", FORMATS, ids=NAMES)
def test_products_of_a_warpgroup(kernels: Nvidia, form: WeightFormat, rows: int) -> None:
    """K that steps and programs divide, and K that they do not; four steps ahead as the 8B model has them."""
    sizes, dtype, split = ((512, 1536), BF16, 1) if rows == 7 else ((256, 2880), torch.float16, 3)
    weight, x = weight_of(sizes, form, bias=True), torch.randn(rows, sizes[1], device="cuda").to(dtype)
    assert weight.bias is not None
    expected, typed = x.double() @ weight.plain(torch.float64).t(), replace(weight, bias=weight.bias.to(dtype))
    for ahead in (2, 4) if form == FORMATS[0] else (2,):
        choice = Warpgroup(split, ahead)
        assert kernels.matmul.can_run(LinearShape.of(x, weight), choice)
        found = kernels.matmul.run(x, typed, choice, gate_up=False)
        near(found, expected + weight.bias.double(), choice)
        found = kernels.matmul.run(x, typed.unbiased, choice, gate_up=True)
        near(found, silu_mul(expected), (choice, "gate_up"), 1e-2)


@pytest.mark.parametrize("rows", [1, 16, 100])
def test_ops_with_norms_parts_and_orders(kernels: Nvidia, rows: int) -> None:
    weight = weight_of((768, 1536), int4(128, BF16))
    plain = Weight.of(torch.randn(64, 1536, device="cuda").mul(1536**-0.5).to(BF16))
    order = torch.randperm(1536, device="cuda", dtype=torch.int32)
    ordered = replace(weight_of((256, 1536), int4(128, torch.float16, zeros=True, ordered=True)), order=order)
    joined = Weight.joined([weight, plain, ordered])
    x, residual = (torch.randn(rows, 1536, device="cuda").to(BF16) for _ in range(2))
    norm = torch.rand(1536, device="cuda").to(BF16)
    found, total = kernels.add_norm_linear(x.clone(), residual.clone(), norm, 1e-6, joined)
    expected_total = (x.float() + residual.float()).to(BF16)
    hidden = expected_total.float() * torch.rsqrt(expected_total.float().square().mean(-1, keepdim=True) + 1e-6)
    expected = (hidden * norm.float()) @ joined.plain(torch.float32).float().t()
    assert torch.equal(total, expected_total)
    near(found, expected, "codes and numbers", 1e-2)
    for one in (weight, ordered):
        found, _ = kernels.add_norm_gate_up(x.clone(), residual.clone(), norm, 1e-6, one)
        near(found, silu_mul((hidden * norm.float()) @ one.plain(torch.float32).t()), "gate_up", 2e-2)
        near(kernels.linear(x, one), x.float() @ one.plain(torch.float32).t(), "linear")


@pytest.mark.parametrize("form", FORMATS, ids=NAMES)
def test_matrices_are_decoded_to_the_bit(form: WeightFormat) -> None:
    weight = weight_of((64, 1536), form)
    for dtype in (BF16, torch.float16, torch.float32):
        assert torch.equal(decoded(weight, dtype, True), weight.plain(dtype))


@pytest.mark.parametrize("form", FORMATS, ids=NAMES)
def test_deterministic_products_do_not_depend_on_the_batch(form: WeightFormat) -> None:
    made, weight = invariant_nvidia_kernels("cuda"), weight_of((768, 1536), form)
    x_TN = torch.randn(200, 1536, device="cuda").to(BF16)
    whole = made.linear(x_TN, weight)
    for rows in (1, 7, 64):
        assert torch.equal(made.linear(x_TN[:rows], weight), whole[:rows])
    near(whole, x_TN.float() @ weight.plain(torch.float32).t(), "deterministic")


@pytest.mark.parametrize("tokens", [1, 5, 64, 700])
@pytest.mark.parametrize("sizes", [(512, 384), (2880, 960)], ids=str)
@pytest.mark.parametrize(
    ("form", "gated", "limit"),
    [
        (mxfp4(), True, 7.0),
        (nvfp4(), False, None),
        (int4(128, BF16), True, None),
        (int4(32, BF16, zeros=True), True, 1.0),
    ],
    ids=["mxfp4", "nvfp4", "int4", "int4z"],
)
def test_experts(
    kernels: Nvidia, form: WeightFormat, gated: bool, limit: float | None, sizes: tuple[int, int], tokens: int
) -> None:
    """Biases come with a clamped activation (gpt-oss); lists depend on the tokens."""
    (hidden, inner), experts, choices = sizes, 16, 4
    gate_up = weight_of((experts, inner * (2 if gated else 1), hidden), form, bias=limit is not None)
    down = weight_of((experts, hidden, inner), form, bias=limit is not None)
    x_TN = torch.randn(tokens, hidden, device="cuda").to(BF16)
    weights_TC = torch.rand(tokens, choices, device="cuda")
    chosen = [torch.randperm(experts, device="cuda")[:choices] for _ in range(tokens)]
    local_TC = torch.stack(chosen).int()
    local_TC[0, 0] = -1
    wide, last = (
        Weight.of(one.plain(torch.float32), None if one.bias is None else one.bias.float()) for one in (gate_up, down)
    )
    expected = reference_kernels().expert_mlp(
        x_TN.float(), wide, last, weights_TC, local_TC, all_experts=experts, limit=limit
    )
    alone = []
    for made in (kernels, invariant_nvidia_kernels("cuda")):
        found = made.expert_mlp(x_TN, gate_up, down, weights_TC, local_TC, all_experts=experts, limit=limit)
        near(found, expected, made.name, 1e-2)
        assert not made.stood_in
        alone = [
            made.expert_mlp(x_TN[:1], gate_up, down, weights_TC[:1], local_TC[:1], all_experts=experts, limit=limit)
        ]
    assert torch.equal(alone[0], found[:1])  # of the deterministic mode
