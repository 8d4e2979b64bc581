"""Mamba-2, its experts without a gate and its router on a GPU: kernels against the recurrence, engines over all of it.

Run: python3 -m pytest -m gpu tests/gpu/test_mamba_gpu.py
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from models.inputs import StateRows
from models.kernels.recurrent.mamba2 import Mamba2Weights
from models.kernels.sigmoid_routing import SigmoidRouting, route_sigmoid
from parallel.layers.weight import Weight
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.schedule.request import Request
from tests.gpu.test_device_gpu import no_synchronisation
from tests.gpu.test_engine_gpu import EVERYTHING, SHAPE, gpu_rig
from tests.models.kernels.recurrent.mamba_cases import banks, check, random_weights, width
from tests.models.tiny_nemotron import NEMOTRON
from tests.plant import reference_kernels
from tests.runtime.engine.rig import run
from tests.runtime.engine.test_depths import mixture, outcome
from tests.runtime.engine.test_hybrid import on_banks
from tests.runtime.engine.test_poison import fill_with_nan, idle_blocks

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from tests.models.kernels.nvidia_kernels import Nvidia, nvidia_kernels

REFERENCE = reference_kernels()
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}
# Convolutions are rounded to bfloat16, which flips a last bit here and there; sums between chunks are in TF32.
STATE_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-3}
NANO = (64, 64, 8, 128, 4)  # heads, head_dim, groups, state size, taps
SIZES = [NANO, (16, 64, 2, 128, 4), (6, 48, 3, 24, 3)]
HYBRID = SHAPE | NEMOTRON | {"mamba_head_dim": 32, "ssm_state_size": 48, "moe_intermediate_size": 32}
BUCKETS = pytest.mark.parametrize("buckets", [(16, 32, 48, 64), ()], ids=["graphs", "kernels"])


@pytest.fixture(scope="module")
def kernels() -> Nvidia:
    return nvidia_kernels("cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    poison = torch.full((64 << 20,), math.nan, device="cuda")  # freed at once: torch.empty finds NaN, not zeros
    del poison


def made(sizes: tuple[int, int, int, int, int], dtype: torch.dtype) -> Mamba2Weights:
    return random_weights(*sizes, dtype, device="cuda")


def on_gpu(*values: int) -> Tensor:
    return torch.tensor(values, device="cuda")


@pytest.mark.parametrize("rows", [1, 3, 16, 40, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_captured_step_follows_the_recurrence(
    kernels: Nvidia, sizes: tuple[int, int, int, int, int], dtype: torch.dtype, rows: int
) -> None:
    """Replayed with other slots, positions and ghosts each time, what it reads is what the device holds then."""
    weights = made(sizes, dtype)
    window, state = banks(weights, dtype, slots=rows + 4)
    theirs = window.clone(), state.clone()
    projected = torch.empty(rows, width(weights), dtype=dtype, device="cuda")
    slots, positions = torch.zeros(rows, dtype=torch.int64, device="cuda"), torch.zeros_like(projected[:, 0]).long()
    projected.zero_()

    def launch() -> Tensor:
        return kernels.mamba2(projected, weights, window, state, StateRows(slots), positions)

    launch()  # of the null slot only
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = launch()
    for step in range(7):
        projected.copy_(torch.randn(rows, width(weights), device="cuda"))
        slots.copy_(1 + torch.randperm(rows + 2, device="cuda")[:rows])
        slots[torch.rand(rows, device="cuda") < 0.2] = 0
        positions.copy_(torch.randint(0, 1000, (rows,), device="cuda"))
        live = slots != 0
        projected[~live] = math.nan
        graph.replay()
        expected = REFERENCE.mamba2(projected, weights, *theirs, StateRows(slots), positions)
        if bool(live.any()):
            check(found[live], expected[live], TOLERANCE[dtype], ("step", sizes, rows, step))
        check(state[1:-1], theirs[1][1:-1], STATE_TOLERANCE[dtype], ("state", sizes, rows, step))
        assert torch.equal(window[1:-1], theirs[0][1:-1])
    assert all(bank[[0, -1]].isnan().all() for bank in (window, state))


@pytest.mark.parametrize("lengths", [(1,), (700,), (3, 0, 1, 65, 2, 128, 33, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_captured_scan_follows_the_recurrence(
    kernels: Nvidia, sizes: tuple[int, int, int, int, int], dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    """Rows of any length with padding behind them and a ghost among them; lengths are read when it is replayed."""
    weights = made(sizes, dtype)
    tokens, rows = sum(lengths) + 11, len(lengths) + 1
    window, state = banks(weights, dtype, slots=rows + 3)
    theirs = window.clone(), state.clone()
    projected = torch.zeros(tokens, width(weights), dtype=dtype, device="cuda")
    slots, ends, positions = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (rows, rows, tokens))

    def launch() -> Tensor:
        return kernels.mamba2(projected, weights, window, state, StateRows(slots, ends), positions)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = launch()
    for turn in range(2):
        order = torch.randperm(len(lengths)).tolist()
        counts = [lengths[i] for i in order] + [5]  # the last one is a ghost
        firsts = [sum(counts[:i]) for i in range(rows)]
        projected.copy_(torch.randn(tokens, width(weights), device="cuda"))
        projected[firsts[-1] :] = math.nan
        slots.copy_(on_gpu(*(1 + i for i in order), 0))
        ends.copy_(on_gpu(*counts).cumsum(0))
        at = [100 * turn + step for count in counts for step in range(count)]
        positions.copy_(on_gpu(*at, *[0] * (tokens - len(at))))
        graph.replay()
        expected = REFERENCE.mamba2(projected, weights, *theirs, StateRows(slots, ends), positions)
        live = firsts[-1]
        check(found[:live], expected[:live], TOLERANCE[dtype], ("scan", sizes, lengths, turn))
        check(state[1:-1], theirs[1][1:-1], STATE_TOLERANCE[dtype], ("state", sizes, lengths, turn))
        assert torch.equal(window[1:-1], theirs[0][1:-1])
    assert state[[0, -1]].isnan().all()


def test_a_step_goes_on_where_a_scan_ended(kernels: Nvidia) -> None:
    """The same tokens by a scan and by steps: the same state, up to TF32."""
    weights, dtype, length = made(NANO, torch.bfloat16), torch.bfloat16, 200
    projected = torch.randn(length, width(weights), device="cuda").to(dtype)
    at_once, stepwise = banks(weights, dtype), banks(weights, dtype)
    for bank in (*at_once, *stepwise):
        bank.zero_()
    slots, positions = on_gpu(3), torch.arange(length, device="cuda")
    found = kernels.mamba2(projected, weights, *at_once, StateRows(slots, on_gpu(length)), positions)
    parts = [
        kernels.mamba2(projected[t : t + 1], weights, *stepwise, StateRows(slots), positions[t : t + 1])
        for t in range(length)
    ]
    check(found, torch.cat(parts), TOLERANCE[dtype], "outputs")
    check(at_once[1][3], stepwise[1][3], STATE_TOLERANCE[dtype], "state")
    assert torch.equal(at_once[0][3], stepwise[0][3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 3712), (300, 24), (5000, 100), (0, 7)])
def test_relu2(kernels: Nvidia, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape, device="cuda").to(dtype)
    torch.testing.assert_close(kernels.relu2(x), REFERENCE.relu2(x.float()).to(dtype))


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 32, 256, 2048, 6000])
def test_experts_without_a_gate(kernels: Nvidia, tokens: int) -> None:
    """Of Nemotron-3-Nano: by every kernel that the number of tokens chooses."""
    hidden, inner, experts, choices = 2688, 1856, 16, 6
    x = torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16)
    x[-1] = math.nan
    up = (torch.randn(experts, inner, hidden, device="cuda") * hidden**-0.5).to(torch.bfloat16)
    down = (torch.randn(experts, hidden, inner, device="cuda") * inner**-0.5).to(torch.bfloat16)
    scores, chosen = torch.rand(tokens, experts, device="cuda").topk(choices)
    chosen[-1] = -1  # goes nowhere, and nobody sees it
    found = kernels.expert_mlp(x, Weight.of(up), Weight.of(down), scores, chosen.int(), all_experts=experts)
    wide = Weight.of(up.float()), Weight.of(down.float())
    expected = REFERENCE.expert_mlp(x.float(), *wide, scores, chosen.int(), all_experts=experts)
    assert found[-1].tolist() == [0.0] * hidden
    if tokens > 1:
        check(found[:-1], expected[:-1], 1e-2, tokens)


@pytest.mark.parametrize("tokens", [1, 40, 3000])
def test_a_sigmoid_router_is_captured_and_chooses_by_exact_scores(kernels: Nvidia, tokens: int) -> None:
    hidden, experts = 2688, 128
    x, weight = (torch.randn(n, hidden, device="cuda").to(torch.bfloat16) for n in (tokens, experts))
    weight *= hidden**-0.5
    bias, local = torch.randn(experts, device="cuda") / 10, torch.arange(experts, device="cuda").int() - 64
    real, load = torch.rand(tokens, device="cuda") < 0.9, torch.zeros(experts, dtype=torch.int64, device="cuda")
    routing = SigmoidRouting(6, True, groups=8, top_groups=4, scale=2.5)

    def launch() -> tuple[Tensor, Tensor]:
        return kernels.route_sigmoid(kernels.router_logits(x, Weight.of(weight)), bias, routing, local, real, load)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, chosen = launch()
    load.zero_()
    x.normal_()
    graph.replay()
    exact = x.double() @ weight.double().T
    counted = torch.zeros_like(load)
    expected, ids = route_sigmoid(exact, bias.double(), routing, local, real, counted)
    same = (chosen == ids).all(1)
    assert int(same.sum()) >= 0.99 * tokens  # scores that are nearly equal may change places
    check(weights[same], expected[same], 1e-5, tokens)
    assert int((load - counted).abs().sum()) <= 0.02 * tokens * 6
    assert int(load.sum()) == 6 * int(real.sum())


@BUCKETS
def test_poisoned_state_and_blocks_change_nothing(buckets: tuple[int, ...]) -> None:
    requests = mixture(11)
    with gpu_rig(depth=2, shape=HYBRID, prefill_buckets=buckets) as engine:
        clean = run(engine, requests)
    with gpu_rig(depth=2, shape=HYBRID, prefill_buckets=buckets) as engine:

        def poison(_: object, turn: int) -> None:
            on_banks(engine, [0, *engine.scheduler.slots._free], float("nan"))
            fill_with_nan(engine, idle_blocks(engine))

        assert outcome(run(engine, requests, poison)) == outcome(clean)
        assert engine.counters["ghost_rows"] > 0


@BUCKETS
def test_no_step_synchronises(buckets: tuple[int, ...]) -> None:
    variants = (SamplingVariant(), EVERYTHING)
    with gpu_rig(depth=2, shape=HYBRID, prefill_buckets=buckets, variants=variants) as engine:
        requests = mixture(3)
        run(engine, requests)  # lazily captured variants are captured here
        again = [Request(100 + r.request_id, r.prompt_token_ids, r.sampling, r.stop_token_ids) for r in requests]
        with no_synchronisation():
            assert len(run(engine, again)) == len(requests)


@BUCKETS
def test_depths_agree(buckets: tuple[int, ...]) -> None:
    """Law 9, exactly, which is promised in float32; there the recurrence takes tokens one by one in every step."""
    requests, exact = mixture(2), torch.float32
    with gpu_rig("triton", depth=0, dtype=exact, shape=HYBRID, prefill_buckets=buckets) as engine:
        serial = outcome(run(engine, requests))
    for depth in (1, 4):
        with gpu_rig("triton", depth=depth, dtype=exact, shape=HYBRID, prefill_buckets=buckets) as engine:
            assert outcome(run(engine, requests)) == serial
