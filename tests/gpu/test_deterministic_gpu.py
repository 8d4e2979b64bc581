"""The deterministic mode on a GPU: products, attention, experts and sampling of any number of rows, and whole engines.

A row alone, among others, at another place and in another kind of step has the same bits, at the sizes of real models;
and what is computed is right. tests/bench/determinism.py is the long form.

Run: python3 -m pytest -m gpu tests/gpu/test_deterministic_gpu.py
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from models.inputs import DecodeAttention, PrefillAttention
from models.kernels.interface import Rotation
from models.ops.select import select_kernels
from parallel.layers.weight import Weight
from runtime.execute.device.cuda import CudaDevice
from runtime.execute.sampling.inputs import SamplingVariant
from tests.gpu.expert_cases import Layer
from tests.gpu.test_engine_gpu import SHAPE
from tests.gpu.test_mamba_gpu import HYBRID as NEMOTRON
from tests.models.kv_layers import empty_kv_layer
from tests.plant import reference_kernels
from tests.runtime.engine.rig import rig
from tests.runtime.engine.same_bits import CONDITIONS, answers, difference, plainly, questions
from tests.runtime.engine.test_deterministic import chains_change_no_bit
from tests.runtime.engine.test_experts import EXPERTS
from tests.runtime.engine.test_mixed import last_layer_for_draws

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from models.kernels.attention import invariant as attention
    from models.kernels.matmul import invariant as matmul
    from models.kernels.matmul.invariant import Tile, segments_of
    from tests.models.kernels.nvidia_kernels import InvariantNvidia, invariant_nvidia_kernels

REFERENCE = reference_kernels()
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def kernels() -> InvariantNvidia:
    return invariant_nvidia_kernels("cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    poison = torch.full((64 << 20,), math.nan, device="cuda")  # freed at once: torch.empty finds NaN, not zeros
    del poison


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(BF16)


def same(found: Tensor, expected: Tensor, what: object) -> None:
    """Bit for bit, but for the sign of zeros."""
    other = int((found != expected).sum())
    assert other == 0, f"{what}: {other} of {found.numel()} differ, by {float((found - expected).abs().max()):.2e}"


def close(found: Tensor, expected: Tensor) -> None:
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.01, f"relative error {error:.1e}"


@pytest.mark.parametrize(
    ("outputs", "inner", "gate_up"),
    [(4096, 12288, False), (24576, 4096, True), (1000, 328, False)],
    ids=str,
)
def test_products(kernels: InvariantNvidia, outputs: int, inner: int, gate_up: bool) -> None:
    """Of 8B, in one segment and in several, and of a weight that is no multiple of anything."""
    x, weight = randn(700, inner), randn(outputs, inner) * inner**-0.5

    def product(x: Tensor, **more: Any) -> Tensor:
        sums, counters = kernels.sums, kernels.counters
        return matmul.linear(x, weight, None, sums, counters, gate_up=gate_up, pdl=kernels.pdl, **more)

    together = product(x)
    plain = REFERENCE.linear(x.float(), Weight.of(weight.float()))
    close(together, REFERENCE.silu_mul(plain) if gate_up else plain)
    for rows in (1, 2, 7, 16, 33, 64, 65, 128, 129, 256):
        picked = torch.randperm(700, device="cuda")[:rows]
        same(product(x[picked]), together[picked], (rows, "rows"))
    tiles = [Tile(16, 64, 128, 3, 4), Tile(64, 64, 128, 3, 4), Tile(128, 128, 128, 3, 8)]
    for tile in tiles if segments_of(outputs, inner) > 1 else ():
        for apart in (False, True):
            same(product(x[:40], tile=tile, apart=apart), together[:40], (tile, apart))
    assert not kernels.counters.any()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 4, 128), (16, 16, 64), (16, 2, 512)], ids=str)
def test_attention(kernels: InvariantNvidia, heads: int, kv_heads: int, dim: int) -> None:
    """A row's queries in one prefill, in chunks beside others, in decode steps of 1 to 256 rows, and in windows."""
    length, page, scale = 1700, 64, dim**-0.5
    kv = empty_kv_layer(60, page, kv_heads, dim, BF16, "cuda").fill_(math.nan)
    table = (torch.randperm(54, device="cuda") + 1).int().view(2, 27)
    flat, rows = kv.flatten(1, 2), torch.arange(length, device="cuda")
    for row in table:
        flat[:, row[rows // page].long() * page + rows % page] = randn(2, length, kv_heads, dim)
    q = randn(length, heads, dim)

    def prefill(*spans: tuple[int, int]) -> Tensor:
        """Queries [first, end) of row 1, then of row 0, in turn; those of the last are returned."""
        last = len(spans) - 1
        pages = table[[(last - place) % 2 for place in range(len(spans))]]
        inputs = PrefillAttention(pages, tuple(end - first for first, end in spans), tuple(end for _, end in spans))
        inputs = kernels.plan_prefill(inputs, heads, kv)
        packed = torch.cat([q[first:end] for first, end in spans])
        first, end = spans[-1]
        return kernels.prefill_attention(packed, kv, inputs, scale)[first - end :]

    whole = prefill((0, length))
    close(whole, REFERENCE.prefill_attention(q, kv, PrefillAttention(table[:1], (length,), (length,)), scale))
    for spans in (((0, 64),), ((0, 9), (37, 700)), ((3, 1400), (1600, 1700)), ((0, 1), (512, 513))):
        first, end = spans[-1]
        same(prefill(*spans), whole[first:end], ("chunk", spans))

    def decode(ends: list[int], new: int = 1, **more: Any) -> Tensor:
        lengths = torch.tensor(ends, dtype=torch.int32, device="cuda")
        inputs = DecodeAttention(table[[0] * len(ends)], lengths, new, 27 * page)
        mine = torch.cat([q[end - new : end] for end in ends])
        chunks, counters = kernels.attention_sums, kernels.attention_counters
        return attention.decode_attention(
            mine, kv, inputs, scale, chunks, counters, multiprocessors=132, pdl=kernels.pdl, **more
        )

    places = [1, 31, 32, 33, 64, 65, 511, 512, 513, 1024, 1025, 1650, 1700]
    for rows_of_step in (1, 7, 64, 256):
        ends = (places * 20)[:rows_of_step]
        same(decode(ends), whole[[end - 1 for end in ends]], ("decode", rows_of_step))
    for sharing in (1, 2, 4):
        same(decode(places, sharing=sharing), whole[[end - 1 for end in places]], ("sharing", sharing))
        windows = decode([4, 514, 1700], 4, sharing=sharing).view(3, 4, heads, dim)
        for window, end in zip(windows, (4, 514, 1700), strict=True):
            same(window, whole[end - 4 : end], ("window", end, sharing))
    assert not kernels.attention_counters.any()


def test_rows(kernels: InvariantNvidia) -> None:
    """Norms, SiLU-mul, rotation and routing."""
    x, residual, weight = randn(600, 4096), randn(600, 4096), randn(4096)
    normed, total = kernels.add_rms_norm(x, residual.clone(), weight, 1e-6)
    gated = kernels.silu_mul(x)
    logits = torch.randn(600, 128, device="cuda")
    local, real = torch.arange(128, dtype=torch.int32, device="cuda"), torch.ones(600, dtype=torch.bool, device="cuda")
    routed = kernels.route_top_k(logits, 8, True, local, real)
    kv = empty_kv_layer(12, 64, 8, 128, BF16, "cuda")
    qkv, angles = randn(600, 48 * 128), torch.randn(600, 128, device="cuda")
    places = torch.arange(600, device="cuda")

    def rotated(rows: Tensor) -> tuple[Tensor, Tensor]:
        turn = Rotation(weight[:128], weight[128:256], 1e-6, angles, places[rows], places[rows] + 64)
        q = kernels.rope_and_cache(qkv[rows], 32, kv, turn)
        return q, kv.flatten(1, 2)[:, places[rows] + 64].clone()

    turned, written = rotated(places)
    for count in (1, 5, 64, 300):
        rows = torch.randperm(600, device="cuda")[:count]
        found = kernels.add_rms_norm(x[rows], residual[rows], weight, 1e-6)
        same(found[0], normed[rows], ("norm", count))
        same(found[1], total[rows], ("residual", count))
        same(kernels.silu_mul(x[rows]), gated[rows], ("SiLU-mul", count))
        routed_alone = kernels.route_top_k(logits[rows], 8, True, local, real[rows])
        for mine, everyones in zip(routed_alone, routed, strict=True):
            same(mine, everyones[rows], ("routing", count))
        q, kept = rotated(rows)
        same(q, turned[rows], ("rotation", count))
        same(kept, written[:, rows], ("cache", count))


def test_products_in_float32(kernels: InvariantNvidia) -> None:
    """Without tensor cores, in tiles of 16 and of 32 tokens."""
    x, weight = torch.randn(200, 4096, device="cuda"), torch.randn(4096, 4096, device="cuda")
    together = kernels.linear(x, Weight.of(weight))
    torch.testing.assert_close(together, x @ weight.T, atol=1e-2, rtol=1e-4)
    for count in (1, 16, 17, 64, 130):
        rows = torch.randperm(200, device="cuda")[:count]
        same(kernels.linear(x[rows], Weight.of(weight)), together[rows], ("float32", count))


def test_experts(kernels: InvariantNvidia) -> None:
    """30B-A3B's: lists of one token and of hundreds, in tiles for either."""
    layer = Layer(2048, 768, 128, 128, 8, BF16)
    x, matrices, (weights, local) = layer.tokens(4096), layer.weights(), layer.chosen(4096)
    gate_up, down = matrices

    def mlp(rows: Tensor) -> Tensor:
        return kernels.expert_mlp(x[rows], gate_up, down, weights[rows], local[rows], all_experts=128)

    together = mlp(torch.arange(4096, device="cuda"))
    close(together[:16], REFERENCE.expert_mlp(x[:16], gate_up, down, weights[:16], local[:16], all_experts=128))
    for count in (1, 4, 7, 64, 256, 512, 1024, 2048):
        rows = torch.randperm(4096, device="cuda")[:count]
        same(mlp(rows), together[rows], ("experts", count))


VARIANT = SamplingVariant(random=True, filters=True, penalties=True, min_tokens=True, logprobs=True, top_logprobs=5)
SHAPES: dict[str, dict[str, object]] = {
    "dense": SHAPE,
    "sparse": SHAPE | EXPERTS | {"moe_intermediate_size": 64, "decoder_sparse_step": 1},
    "Mamba-2": NEMOTRON,
}


def gpu_rig(shape: str, **limits: Any) -> Any:
    """An engine on the GPU, in bfloat16."""
    device = CudaDevice(torch.device("cuda:0"))
    if "blocks" in limits:  # same_bits.py counts in blocks of 8 tokens
        limits["blocks"] //= 2
    kernels = select_kernels(device.torch_device, BF16, 128, deterministic=True)
    return rig(device=device, kernels=kernels, shape=SHAPES[shape], dtype=BF16, block_size=16, **limits)


@pytest.mark.parametrize("shape", SHAPES)
def test_engines(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every condition of same_bits.py, in bfloat16, with prefill captured and eager."""
    over = partial(gpu_rig, shape)
    requests = questions(1, 24, longest=60)  # so long that 9 blocks do not hold eight of them
    expected = plainly(over, requests)
    taken = last_layer_for_draws(monkeypatch)
    for number, (name, limits, counter) in enumerate(CONDITIONS):
        buckets = (16, 32, 48, 64) if number % 2 and limits.get("max_prefill_tokens", 64) == 64 else ()
        with over(**(limits | {"prefill_buckets": buckets})) as engine:
            found = answers(engine, requests)
            assert engine.counters[counter] > 0, f"{name}: nothing was tried"
        told = difference(found, expected)
        assert (told.flips, told.bits) == (0, 0), f"{name}: {told}"
    assert any(taken) == (shape != "Mamba-2")  # its last layer has nothing that draws do not need


@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_chains(shape: str, width: int) -> None:
    """Guesses of which half are right, alone and beside chunks of prompts in captured steps."""
    most = 8 + 2 * width
    chains_change_no_bit(
        partial(gpu_rig, shape), questions(1, 8, longest=60), width, blocks=160, prefill_buckets=(16, most)
    )
