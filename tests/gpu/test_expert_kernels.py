"""Routing and experts on a GPU against float64 formulas; captured once, they serve every routing.

Run: python3 -m pytest -m gpu tests/gpu/test_expert_kernels.py
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from models.kernels.experts.tiles import LongListTiles, Tiles
from parallel.layers.weight import Weight
from tests.gpu.expert_cases import Layer
from tests.gpu.untyped import Stream
from tests.plant import reference_kernels

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from models.kernels.experts import grouped_tma
    from models.kernels.experts.grouped import expert_mlp
    from tests.models.kernels.nvidia_kernels import Nvidia, nvidia_kernels

REFERENCE = reference_kernels()
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
QWEN = Layer(2048, 768, 128, 64, 8, torch.bfloat16)
LAYERS = [
    QWEN,
    Layer(4096, 1792, 8, 8, 2, torch.bfloat16),
    Layer(512, 96, 12, 6, 5, torch.float16),
    Layer(256, 64, 16, 16, 4, torch.float32),
    Layer(48, 16, 8, 4, 2, torch.bfloat16),  # the narrowest tiles
    Layer(40, 24, 6, 3, 2, torch.bfloat16),  # what the kernels do not take
]


@pytest.fixture(scope="module")
def kernels() -> Nvidia:
    return nvidia_kernels("cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    poison = torch.full((64 << 20,), math.nan, device="cuda")  # freed at once: torch.empty finds NaN, not zeros
    del poison


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 256, 4099])
def test_route_top_k(kernels: Nvidia, tokens: int, renormalise: bool) -> None:
    logits, local = QWEN.logits(tokens).float(), QWEN.local()
    real = torch.arange(tokens, device="cuda") % 5 != 1
    mine, theirs = (torch.zeros(128, dtype=torch.int64, device="cuda") for _ in range(2))
    weights, chosen = kernels.route_top_k(logits, 8, renormalise, local, real, mine)
    expected, ids = REFERENCE.route_top_k(logits, 8, renormalise, local, real, theirs)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(chosen, ids)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_a_router_behind_a_norm_is_captured(kernels: Nvidia, tokens: int, wide: bool) -> None:
    """Up to four tokens in one launch; the normed input is what the norm alone makes, but for its last digit."""
    x, residual, weight = (torch.randn(n, 2048, device="cuda").bfloat16() for n in (tokens, tokens, 272))
    norm, router = 1 + torch.randn(2048, device="cuda") / 9, Weight.of(weight * 2048**-0.5)
    expected = REFERENCE.add_norm_logits(
        x.double(), residual.double(), norm.double(), 1e-6, Weight.of(router.data.double()), wide=wide
    )
    kept = residual.clone()
    kernels.add_norm_logits(x, kept, norm, 1e-6, router, wide=wide)
    kept.copy_(residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.add_norm_logits(x, kept, norm, 1e-6, router, wide=wide)
    graph.replay()
    assert found[1].dtype == (torch.float32 if wide else torch.bfloat16)
    for one, other in zip(found, expected, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 4e-3


@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_shared_experts_are_further_choices(kernels: Nvidia, tokens: int) -> None:
    """After the logits of 256 experts is the gate's, then 15 columns that are not read."""
    logits = torch.randn(tokens, 272, dtype=torch.bfloat16, device="cuda")
    logits[:, 257:] = math.nan
    local, real = torch.arange(257, dtype=torch.int32, device="cuda"), torch.arange(tokens, device="cuda") % 5 != 1
    scale = torch.randn(256, device="cuda")
    found = kernels.route_top_k(logits, 8, True, local, real, None, 1, scale)
    expected = REFERENCE.route_top_k(logits, 8, True, local, real, None, 1, scale)
    torch.testing.assert_close(found[0], expected[0], atol=1e-6, rtol=1e-5)
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 9, 32, 100, 256, 3000])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.hidden}x{layer.inner}-{layer.experts}")
def test_expert_mlp(kernels: Nvidia, layer: Layer, tokens: int) -> None:
    (gate_up, down), x = layer.weights(), layer.tokens(tokens)
    weights, chosen = layer.chosen(tokens)
    if tokens > 1:
        x[-1], chosen[-1] = math.nan, -1
    found = kernels.expert_mlp(x, gate_up, down, weights, chosen, all_experts=layer.experts)
    expected = REFERENCE.expert_mlp(
        x.double(),
        Weight.of(gate_up.data.double()),
        Weight.of(down.data.double()),
        weights.double(),
        chosen,
        all_experts=layer.experts,
    )
    error = float((found.double() - expected).norm() / (expected.norm() + 1e-30))
    assert error < TOLERANCE[layer.dtype]
    again = kernels.expert_mlp(x, gate_up, down, weights, chosen, all_experts=layer.experts)
    assert torch.equal(found, again), "the same bits every time"
    if tokens > 1:
        assert not found[-1].any()
    gelu_up = replace(gate_up, gelu=True)
    found = kernels.expert_mlp(x, gelu_up, down, weights, chosen, all_experts=layer.experts)
    expected = REFERENCE.expert_mlp(
        x.double(),
        replace(gelu_up, data=gate_up.data.double()),
        Weight.of(down.data.double()),
        weights.double(),
        chosen,
        all_experts=layer.experts,
    )
    assert float((found.double() - expected).norm() / (expected.norm() + 1e-30)) < TOLERANCE[layer.dtype]


@pytest.mark.parametrize("group", [2, 8])
@pytest.mark.parametrize("tokens", [256, 3000])
def test_the_order_of_programs_does_not_change_a_bit(tokens: int, group: int) -> None:
    """Blocks of 16 tokens: 1 or 2 an expert, and about 12."""
    (gate_up, down), x = QWEN.weights(), QWEN.tokens(tokens)
    routed, tiles = QWEN.chosen(tokens), Tiles(16, 128, 128, 4, 4, group=1)
    found, expected = (
        expert_mlp(x, gate_up, down, *routed, True, (one, one), all_experts=QWEN.experts)
        for one in (replace(tiles, group=group), tiles)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("layer", [QWEN, LAYERS[1]], ids=["2048x768-128", "4096x1792-8"])
@pytest.mark.parametrize("tokens", [5, 900])
def test_long_lists_in_parts(layer: Layer, tokens: int, split: int) -> None:
    """And what is not long: lists of no token, of one, of less than a block."""
    (gate_up, down), x = layer.weights(), layer.tokens(tokens)
    weights, chosen = layer.chosen(tokens)
    tiles = LongListTiles(Tiles(128, 256, 64, 4, 8), Tiles(128, 256, 64, 4, 8), split)
    found = grouped_tma.expert_mlp(x, gate_up, down, weights, chosen, True, tiles)
    expected = expert_mlp(x, gate_up, down, weights, chosen, True, all_experts=layer.experts)
    assert float((found - expected).norm() / expected.norm()) < TOLERANCE[torch.bfloat16]
    assert torch.equal(found, grouped_tma.expert_mlp(x, gate_up, down, weights, chosen, True, tiles))


@pytest.mark.parametrize("tokens", [1, 32, 256, 4096])
def test_one_graph_serves_every_routing(kernels: Nvidia, tokens: int) -> None:
    """From no expert at all to everybody's same expert."""
    (gate_up, down), x = QWEN.weights(), QWEN.tokens(tokens)
    logits, local = QWEN.logits(tokens), QWEN.local()
    real = torch.ones(tokens, dtype=torch.bool, device="cuda")

    def run() -> torch.Tensor:
        routed = kernels.route_top_k(logits, 8, True, local, real)
        return kernels.expert_mlp(x, gate_up, down, *routed, all_experts=QWEN.experts)

    side = Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    same = torch.zeros_like(logits)
    same[:, 3:11] = 5.0
    for scores, everybody in ((QWEN.logits(tokens), True), (same, True), (QWEN.logits(tokens), False)):
        logits.copy_(scores)
        real.fill_(everybody)
        graph.replay()
        assert torch.equal(out, run())
        assert bool(out.any()) == everybody
