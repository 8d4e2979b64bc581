"""Products and experts with FP8 weights on a GPU, against float32 formulas, by every kernel that takes a shape.

Run: python3 -m pytest -m gpu tests/gpu/test_fp8_gpu.py
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from models.inputs import DecodeAttention
from models.ops.rows_reference.dense import simulated
from parallel.comm.quantised import SEPARATE, Quantised
from parallel.layers.weight import Weight, fp8
from runtime.execute.device.cpu_twin import open_device
from tests.plant import reference_kernels

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from models.kernels.matmul.choice_table import Choice, Decoded, Gemv, LinearShape, Scaled, Skinny, Wide
    from models.kernels.matmul.codes import quantise
    from tests.models.kernels.nvidia_kernels import Nvidia, invariant_nvidia_kernels, nvidia_kernels

BLOCKS = [(128, 128), (1, 0), (32, 32), (64, 96), (2, 16)]
SIZES = [(512, 1536), (768, 2304)]
ROWS = [1, 3, 16, 33, 64, 128, 200, 300]


@pytest.fixture(scope="module")
def kernels() -> Nvidia:
    return nvidia_kernels("cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    poison = torch.full((64 << 20,), math.nan, device="cuda")  # freed at once: torch.empty finds NaN, not zeros
    del poison


def codes(shape: tuple[int, ...], block: tuple[int, int], bias: bool = False) -> Weight:
    """Other scales in every block; activations stay near 1."""
    form = fp8(*block)
    data = torch.randn(*shape, device="cuda").mul(100).clamp(-448, 448).to(form.dtype)
    scale = torch.rand(*shape[:-2], *form.grid(*shape[-2:]), device="cuda").add(0.1) * (0.01 * shape[-1] ** -0.5)
    return Weight(data, form, torch.randn(shape[-2], device="cuda").bfloat16() if bias else None, scale)


def near(found: Tensor, expected: Tensor, what: object, bound: float = 1e-2) -> None:
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    assert error < bound, f"{what}: relative error {error:.1e}"


def narrow(choice: Choice) -> bool:
    return isinstance(choice, (Wide, Scaled)) or (isinstance(choice, Skinny) and choice.narrow)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("sizes", "block"), [*itertools.product(SIZES, BLOCKS)], ids=str)
def test_products(kernels: Nvidia, sizes: tuple[int, int], block: tuple[int, int], rows: int) -> None:
    weight, x_TN = codes(sizes, block, bias=True), torch.randn(rows, sizes[1], device="cuda").bfloat16()
    numbers, bias = weight.plain(torch.float32), weight.bias
    assert bias is not None
    kept = x_TN.float()
    shape = LinearShape.of(x_TN, weight)
    tried: dict[tuple[str, bool], int] = {}
    for choice in kernels.matmul.candidates(shape):
        kind = type(choice).__name__, narrow(choice)
        tried[kind] = tried.get(kind, 0) + 1
        if tried[kind] <= 4:
            x = simulated(x_TN, block[1] or sizes[1]) if narrow(choice) else kept
            found = kernels.matmul.run(x_TN, weight, choice, gate_up=False)
            near(found, x @ numbers.t() + bias, choice)
            gate, up = (x @ numbers.t()).chunk(2, -1)
            if isinstance(choice, (Gemv, Skinny, Wide)):
                found = kernels.matmul.run(x_TN, weight.unbiased, choice, gate_up=True)
                near(found, torch.nn.functional.silu(gate) * up, (choice, "gate_up"), 2e-2)
    assert ("Decoded", False) in tried


@pytest.mark.parametrize("rows", [1, 16, 100])
def test_ops_with_norms_and_parts(kernels: Nvidia, rows: int) -> None:
    weight = codes((768, 1536), (128, 128))
    plain = Weight.of(torch.randn(64, 1536, device="cuda").mul(1536**-0.5).bfloat16())
    joined = Weight.joined([weight, plain])
    x, residual = (torch.randn(rows, 1536, device="cuda").bfloat16() for _ in range(2))
    norm = torch.rand(1536, device="cuda").bfloat16()
    found, total = kernels.add_norm_linear(x.clone(), residual.clone(), norm, 1e-6, joined)
    expected_total = (x.float() + residual.float()).bfloat16()
    hidden = expected_total.float() * torch.rsqrt(expected_total.float().square().mean(-1, keepdim=True) + 1e-6)
    expected = (hidden * norm.float()) @ joined.plain(torch.float32).float().t()
    assert torch.equal(total, expected_total)
    near(found, expected, "codes and numbers", 4e-2)
    found, _ = kernels.add_norm_gate_up(x.clone(), residual.clone(), norm, 1e-6, weight)
    gate, up = ((hidden * norm.float()) @ weight.plain(torch.float32).t()).chunk(2, -1)
    near(found, torch.nn.functional.silu(gate) * up, "gate_up", 6e-2)


@pytest.mark.parametrize("block", [(1, 0), (128, 128)])
def test_matrices_of_one_choice_keep_their_own_groups(kernels: Nvidia, block: tuple[int, int]) -> None:
    """What runs a choice is shared by all shapes: a group of activations is as wide as each matrix says."""
    for inner in (1024, 2048, 1024):
        weight, x_TN = codes((512, inner), block), torch.randn(300, inner, device="cuda").bfloat16()
        expected = simulated(x_TN, block[1] or inner) @ weight.plain(torch.float32).t()
        near(kernels.linear(x_TN, weight), expected, (block, inner))


@pytest.mark.parametrize("activations", ["never", "auto", "always"])
def test_the_option_decides_whether_activations_are_quantised(kernels: Nvidia, activations: str) -> None:
    weight, made = codes((512, 512), (128, 128)), kernels.matmul
    before = made.fp8_activations
    made.fp8_activations = activations
    made._forget()
    try:
        x_TN = torch.randn(40, 512, device="cuda").bfloat16()
        kinds = {narrow(choice) for choice in made.candidates(LinearShape.of(x_TN, weight)) if choice != Decoded()}
        assert kinds == {"never": {False}, "auto": {False, True}, "always": {True}}[activations]
        exact = x_TN.float() @ weight.plain(torch.float32).t()
        error = float((made.linear(x_TN, weight).float() - exact).norm() / exact.norm())
        assert error < 5e-3 if activations == "never" else 5e-3 < error < 4e-2
    finally:
        made.fp8_activations = before
        made._forget()


@pytest.mark.parametrize("tokens", [1, 5, 64, 700])
@pytest.mark.parametrize("block", [(128, 128), (1, 0), (32, 32)], ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_experts(kernels: Nvidia, tokens: int, block: tuple[int, int], gated: bool) -> None:
    experts, hidden, inner, choices = 16, 512, 384, 4
    gate_up = codes((experts, inner * (2 if gated else 1), hidden), block)
    down = codes((experts, hidden, inner), block)
    x_TN = torch.randn(tokens, hidden, device="cuda").bfloat16()
    weights_TC = torch.rand(tokens, choices, device="cuda")
    chosen = [torch.randperm(experts, device="cuda")[:choices] for _ in range(tokens)]
    local_TC = torch.stack(chosen).int()
    local_TC[0, 0] = -1
    expected = reference_kernels().expert_mlp(x_TN.float(), gate_up, down, weights_TC, local_TC, all_experts=experts)
    for made in (kernels, invariant_nvidia_kernels("cuda")):
        found = made.expert_mlp(x_TN, gate_up, down, weights_TC, local_TC, all_experts=experts)
        near(found, expected, made.name, 7e-2)


def test_deterministic_products_do_not_depend_on_the_batch() -> None:
    made, weight = invariant_nvidia_kernels("cuda"), codes((768, 1536), (128, 128))
    x_TN = torch.randn(200, 1536, device="cuda").bfloat16()
    whole = made.linear(x_TN, weight)
    for rows in (1, 7, 64):
        assert torch.equal(made.linear(x_TN[:rows], weight), whole[:rows])
    near(whole, x_TN.float() @ weight.plain(torch.float32).t(), "deterministic")


# -- activations as codes -----------------------------------------------------------------------------------------


def same_codes(found: Quantised, numbers: Tensor) -> None:
    """``found`` has the bits that a launch of its own makes of ``numbers``."""
    expected = quantise(numbers.contiguous(), found.group, pdl=True)
    assert torch.equal(found.codes[: len(numbers)].view(torch.uint8), expected.codes[: len(numbers)].view(torch.uint8))
    assert torch.equal(found.scale[:, : len(numbers)], expected.scale[:, : len(numbers)])


def test_activations_are_cut_before_they_are_quantised() -> None:
    x_TN = torch.randn(37, 1536, device="cuda").bfloat16() * 4
    same_codes(quantise(x_TN, 1536, pdl=True, cap=3.0), x_TN.clamp(-3, 3))


def test_a_launch_that_only_quantises_is_counted_at_each_replay() -> None:
    device, x_TN = open_device("cuda:0"), torch.randn(7, 512, device="cuda").bfloat16()
    before = SEPARATE.count

    def work() -> None:
        quantise(x_TN, 128, pdl=True)

    graph = device.capture(work, name="codes", warmups=1)
    assert SEPARATE.count == before + 1
    for _ in range(3):
        graph.replay()
    assert SEPARATE.count == before + 4
    device.close()


@pytest.mark.parametrize("tokens", [1, 37, 256])
@pytest.mark.parametrize(("width", "group"), [(1536, 128), (1536, 1536), (4096, 128), (512, 32)])
def test_rows_are_quantised_where_they_are_made(kernels: Nvidia, tokens: int, width: int, group: int) -> None:
    x, residual, both = (torch.randn(tokens, n, device="cuda").bfloat16() for n in (width, width, 2 * width))
    norm = torch.rand(width, device="cuda").bfloat16()

    def room(*, numbers: bool = False) -> Quantised:
        return Quantised.empty(tokens, width, group, x.dtype, "cuda", numbers=numbers)

    into = room(numbers=True)
    hidden, _ = kernels.add_rms_norm(x.clone(), residual.clone(), norm, 1e-6, into)
    assert into.numbers is not None
    assert torch.equal(into.numbers, hidden)
    assert torch.equal(hidden, kernels.add_rms_norm(x.clone(), residual.clone(), norm, 1e-6)[0])
    same_codes(into, hidden)
    kernels.rms_norm(x, norm, 1e-6, into)
    same_codes(into, kernels.rms_norm(x, norm, 1e-6))
    kernels.silu_mul(both, into=(into := room()))
    same_codes(into, kernels.silu_mul(both))
    kernels.sigmoid_mul(x, residual, into=(into := room()))
    same_codes(into, kernels.sigmoid_mul(x, residual))


@pytest.mark.parametrize(("rows", "query_len"), [(1, 1), (8, 1), (64, 1), (256, 1), (8, 4), (3, 16)])
@pytest.mark.parametrize(("dim", "group"), [(128, 128), (64, 128)])
def test_attention_quantises_heads(kernels: Nvidia, rows: int, query_len: int, dim: int, group: int) -> None:
    heads, kv_heads, page = 8, 2, 64
    kv_layer = torch.randn(2, 400, page, kv_heads, dim, device="cuda").bfloat16()
    table = torch.randint(1, 400, (rows, 12), dtype=torch.int32, device="cuda")
    lengths = torch.randint(query_len, 12 * page, (rows,), dtype=torch.int32, device="cuda")
    q_THD = torch.randn(rows * query_len, heads, dim, device="cuda").bfloat16()
    inputs = kernels.plan_decode(DecodeAttention(table, lengths, query_len, 12 * page), heads, kv_layer)
    numbers = kernels.decode_attention(q_THD, kv_layer, inputs, dim**-0.5).flatten(1)
    into = Quantised.empty(len(q_THD), heads * dim, group, q_THD.dtype, "cuda")
    kernels.decode_attention(q_THD, kv_layer, inputs, dim**-0.5, into=into)
    same_codes(into, numbers)


@pytest.mark.parametrize("rows", [2, 16, 33, 64, 128])
def test_products_read_and_store_codes(kernels: Nvidia, rows: int) -> None:
    weight, x_TN = codes((1024, 1536), (128, 128)), torch.randn(rows, 1536, device="cuda").bfloat16()
    made = kernels.matmul
    coded = quantise(x_TN, 128, pdl=True)
    for choice in made.candidates(LinearShape.of(x_TN, weight, gate_up=True)):
        if not narrow(choice):
            continue
        plain = made.run(x_TN, weight, choice, gate_up=True)
        assert torch.equal(made.run(coded, weight, choice, gate_up=True), plain), choice
        into = Quantised.empty(rows, 512, 128, x_TN.dtype, "cuda")
        made.run(coded, weight, choice, gate_up=True, into=into)
        same_codes(into, plain)


def test_layers_hand_codes_on(kernels: Nvidia) -> None:
    """gate_up to down, by what is chosen for both."""
    gate_up, down = codes((3072, 1536), (128, 128)), codes((1536, 1536), (128, 128))
    x_TN = torch.randn(32, 1536, device="cuda").bfloat16()
    into = kernels.quantised_for(down, 32, x_TN.dtype)
    assert into is not None
    hidden = simulated(kernels.gate_up(x_TN, gate_up), 128)
    kernels.gate_up(x_TN, gate_up, into)
    near(kernels.linear(into, down), hidden @ down.plain(torch.float32).t(), "down of codes")
    assert kernels.quantised_for(Weight.of(x_TN), 32, x_TN.dtype) is None
