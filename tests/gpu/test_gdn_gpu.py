"""Gated delta nets on a GPU: kernels against the torch reference, captured steps of any lengths, engines over them.

What the recurrence means is compared with transformers on the CPU (tests/models/test_parity.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.inputs import StateRows
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.schedule.request import Request
from tests.gpu.test_device_gpu import no_synchronisation
from tests.gpu.test_engine_gpu import EVERYTHING, SHAPE, gpu_rig
from tests.models.kernels.nvidia_kernels import Nvidia, invariant_nvidia_kernels, nvidia_kernels
from tests.models.kernels.recurrent.chunk_cases import AT_EDGES, both
from tests.models.kernels.recurrent.delta_cases import DeltaCase, Made, run_pieces
from tests.models.tiny_delta import FAMILIES, ON_GPU
from tests.plant import Kernels, reference_kernels
from tests.runtime.engine.rig import run
from tests.runtime.engine.test_depths import mixture, outcome
from tests.runtime.engine.test_hybrid import on_banks
from tests.runtime.engine.test_poison import fill_with_nan, idle_blocks

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
LENGTHS = (700, 3, 130, 16, 17, 64, 1, 65)
REFERENCE = reference_kernels()
# Relative to the norm. float32 through tf32x3 products; bfloat16 rounds operands of every product to 8 bits.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
WINDOWS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # promised of a round's state, which no tensor core computes


@pytest.fixture(scope="module")
def kernels() -> Nvidia:
    return nvidia_kernels(DEVICE)


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [5, 40, 700])
@pytest.mark.parametrize(("k_heads", "v_heads", "dim"), [(4, 8, 128), (2, 6, 64), (1, 2, 48)])
def test_any_cut_equals_the_reference(
    kernels: Nvidia, dtype: torch.dtype, most: int, k_heads: int, v_heads: int, dim: int
) -> None:
    case = DeltaCase(k_heads, v_heads, dim, dim, LENGTHS, dtype, device=DEVICE)
    expected, states = run_pieces(REFERENCE, case, most)
    found, found_states = run_pieces(kernels, case, most)
    for a, b in zip(found, expected, strict=True):
        assert off(a, b) < BOUNDS[dtype]
    assert off(found_states, states) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("k_heads", "v_heads", "dim"), [(2, 6, 128), (4, 4, 64), (1, 2, 40)])
def test_rows_end_anywhere_in_a_chunk(
    kernels: Nvidia, dtype: torch.dtype, k_heads: int, v_heads: int, dim: int
) -> None:
    for lengths, most in (
        (AT_EDGES, 32),
        ((3, 64, 1, 2), 0),
        ((1000, 16, 17, 700), 16),
        ((65, 65), 16),
        ((40, 40), 40),
    ):
        case = DeltaCase(k_heads, v_heads, dim, dim, lengths, dtype, device=DEVICE)
        found, expected = both(case, most, kernels.pdl)
        for a, b in zip(found, expected, strict=True):
            assert not len(b) or off(a, b) < BOUNDS[torch.float32 if dtype == torch.float32 else torch.bfloat16]


def test_repeated_tokens_do_not_blow_up(kernels: Nvidia) -> None:
    """Keys that are all alike and nothing that decays: the triangle of a chunk is as far from the unit as it can be."""
    for dtype in (torch.float32, torch.bfloat16):
        case = DeltaCase(2, 4, 128, 128, (500, 100), dtype, repeats=True, device=DEVICE)
        for a, b in zip(run_pieces(kernels, case, 600)[0], run_pieces(REFERENCE, case, 600)[0], strict=True):
            assert bool(a.isfinite().all())
            assert off(a, b) < 4 * BOUNDS[dtype]


@pytest.mark.parametrize("most", [0, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_a_row_beside_unused_rows(
    kernels: Nvidia, dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``most``: programs that hold a head's state whole; else it streams."""
    monkeypatch.setattr("models.kernels.recurrent.delta_step._FEW_PROGRAMS", most)
    case = DeltaCase(4, 8, 128, 128, (12, 12, 12), dtype, device=DEVICE)
    made = [case.made(), case.made()]
    slots_B = torch.tensor([3, 0, 1, 0, 2], device=DEVICE)
    for position in range(12):
        x, nobody_X = made[0].projected, torch.full_like(made[0].projected[0][0], float("nan"))
        projected_TX = torch.stack([x[2][position], nobody_X, x[0][position], nobody_X, x[1][position]])
        positions_T = torch.tensor([position, 0, position, 0, position], device=DEVICE)
        expected, found = (
            k.conv_gated_delta(
                projected_TX, m.weight_CJ, m.window_SJC, m.rule, m.state_SHVK, StateRows(slots_B), positions_T
            )[[0, 2, 4]]
            for k, m in zip((REFERENCE, kernels), made, strict=True)
        )
        assert off(found, expected) < BOUNDS[dtype] / 4
    assert torch.equal(made[1].window_SJC[1:4], made[0].window_SJC[1:4])
    assert off(made[1].state_SHVK[1:4], made[0].state_SHVK[1:4]) < BOUNDS[dtype] / 4
    assert bool(made[1].state_SHVK[4:].isnan().all())


def test_a_captured_launch_reads_lengths_on_the_device(kernels: Nvidia) -> None:
    """One graph of 96 tokens and four rows, replayed for other cuts."""
    case = DeltaCase(4, 8, 128, 128, (96, 96, 96, 96), torch.bfloat16, device=DEVICE)
    ends_B, slots_B = torch.zeros(4, dtype=torch.int64, device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    positions_T = torch.zeros(96, dtype=torch.int64, device=DEVICE)
    made, oracle = case.made(), case.made()
    projected_TX = made.projected[0].clone()

    def step(k: Kernels, m: Made) -> Tensor:
        rows = StateRows(slots_B, ends_B)
        return k.conv_gated_delta(projected_TX, m.weight_CJ, m.window_SJC, m.rule, m.state_SHVK, rows, positions_T)

    step(kernels, made)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TV = step(kernels, made)
    for m in (made, oracle):
        m.window_SJC[1:5] = m.state_SHVK[1:5] = 0.0
    at = [0, 0, 0, 0]
    for lengths in ((96, 0, 0, 0), (1, 1, 70, 24), (20, 20, 20, 20), (0, 1, 1, 64)):
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        positions = [at[row] + t for row, length in enumerate(lengths) for t in range(length)]
        positions_T[: len(positions)] = torch.tensor(positions, device=DEVICE)
        ends_B.copy_(torch.tensor(starts[1:], device=DEVICE))
        slots_B.copy_(torch.arange(1, 5, device=DEVICE))
        projected_TX.copy_(torch.randn_like(projected_TX))
        graph.replay()
        expected = step(REFERENCE, oracle)
        assert off(out_TV[: starts[-1]], expected[: starts[-1]]) < BOUNDS[torch.bfloat16]
        assert off(made.state_SHVK[1:5], oracle.state_SHVK[1:5]) < BOUNDS[torch.bfloat16]
        at = [before + length for before, length in zip(at, lengths, strict=True)]


def test_the_deterministic_kernels_do_not_see_cuts() -> None:
    case = DeltaCase(2, 4, 128, 128, (120, 33, 5), torch.bfloat16, device=DEVICE)
    kernels = invariant_nvidia_kernels(DEVICE)
    whole, states = run_pieces(kernels, case, 200)
    for most, seed in ((1, 2), (7, 3), (64, 4)):
        again, same = run_pieces(kernels, case, most, seed)
        assert all(torch.equal(a, b) for a, b in zip(again, whole, strict=True))
        assert torch.equal(same, states)


def test_ends(kernels: Nvidia) -> None:
    for width in (2048, 2050):
        x, y, hidden = (torch.randn(9, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
        gate = torch.randn(width, device=DEVICE, dtype=torch.bfloat16) / 45
        assert off(kernels.sigmoid_mul(x, y), REFERENCE.sigmoid_mul(x, y)) < 5e-3
        assert off(kernels.gated_add(x, y, hidden, gate), REFERENCE.gated_add(x, y, hidden, gate)) < 5e-3


# -- engines -----------------------------------------------------------------------------------------------------------

FAMILY = pytest.mark.parametrize("family", FAMILIES)
BUCKETS = pytest.mark.parametrize("buckets", [(16, 32, 48, 64), ()], ids=["graphs", "kernels"])


def shape(family: str) -> dict[str, object]:
    return SHAPE | FAMILIES[family] | ON_GPU


@FAMILY
@BUCKETS
def test_depths_agree(family: str, buckets: tuple[int, ...]) -> None:
    """In float32; chunks are cut alike at every depth here, for no prefix is found."""
    requests = mixture(1)
    runs = []
    for depth in (0, 2, 4):
        with gpu_rig(
            "triton", depth=depth, dtype=torch.float32, shape=shape(family), prefill_buckets=buckets
        ) as engine:
            runs.append(outcome(run(engine, requests)))
    assert sum(runs[1][i] != runs[0][i] for i in runs[0]) <= 1
    assert sum(runs[2][i] != runs[0][i] for i in runs[0]) <= 1


@FAMILY
@BUCKETS
def test_poisoned_state_and_blocks_change_nothing(family: str, buckets: tuple[int, ...]) -> None:
    requests = mixture(11)
    with gpu_rig(depth=2, shape=shape(family), prefill_buckets=buckets) as engine:
        clean = run(engine, requests)
    with gpu_rig(depth=2, shape=shape(family), prefill_buckets=buckets) as engine:

        def poison(_: object, turn: int) -> None:
            on_banks(engine, [0, *engine.scheduler.slots._free], float("nan"))
            fill_with_nan(engine, idle_blocks(engine))

        assert outcome(run(engine, requests, poison)) == outcome(clean)
        assert engine.counters["ghost_rows"] > 0


@FAMILY
def test_no_step_synchronises(family: str) -> None:
    variants = (SamplingVariant(), EVERYTHING)
    with gpu_rig(depth=2, shape=shape(family), variants=variants) as engine:
        requests = mixture(3)
        run(engine, requests)  # lazily captured variants are captured here
        again = [Request(100 + r.request_id, r.prompt_token_ids, r.sampling, r.stop_token_ids) for r in requests]
        with no_synchronisation():
            assert len(run(engine, again)) == len(requests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_takes_in_what_is_kept(kernels: Nvidia, dtype: torch.dtype) -> None:
    """State is as it was while a window is looked at, and then that of the tokens that were kept, in the same bits
    where the others are NaN."""
    case = DeltaCase(4, 8, 128, 128, (40, 40), dtype, device=DEVICE)
    made, single = case.made(), case.made()
    slots_B = torch.tensor([2, 0, 1], device=DEVICE)
    at = [0, 0]
    for width, kept in ((17, (4, 17)), (2, (1, 2)), (16, (0, 3))):
        parts = [made.projected[1][at[1] : at[1] + width], made.projected[0][:width] * float("nan")]
        parts.append(made.projected[0][at[0] : at[0] + width])
        starts = (at[1], 0, at[0])
        positions_T = torch.cat([torch.arange(start, start + width, device=DEVICE) for start in starts])
        before = made.window_SJC[1:3].clone(), made.state_SHVK[1:3].clone()
        projected_TX = torch.cat(parts)
        given = (made.weight_CJ, made.window_SJC, made.rule, made.state_SHVK)
        kernels.conv_gated_delta(projected_TX, *given, StateRows(slots_B, frozen=True), positions_T)
        assert torch.equal(made.window_SJC[1:3], before[0])
        assert torch.equal(made.state_SHVK[1:3], before[1])
        kept_B = torch.tensor([kept[1], 0, kept[0]], dtype=torch.int32, device=DEVICE)
        rows = StateRows(slots_B, kept_B=kept_B)
        refused_T = (torch.arange(width, device=DEVICE) >= kept_B[:, None]).flatten()
        window_SJC, state_SHVK = made.window_SJC.clone(), made.state_SHVK.clone()
        kernels.conv_gated_delta(projected_TX, made.weight_CJ, window_SJC, made.rule, state_SHVK, rows, positions_T)
        poisoned_TX = projected_TX.masked_fill(refused_T[:, None], float("nan"))
        kernels.conv_gated_delta(poisoned_TX, *given, rows, positions_T)
        assert bool(made.state_SHVK[1:3].isfinite().all())
        assert torch.equal(made.window_SJC[1:3], window_SJC[1:3])
        assert torch.equal(made.state_SHVK[1:3], state_SHVK[1:3])
        for sequence, count in enumerate(kept):
            slot = torch.tensor([sequence + 1], device=DEVICE)
            for position in range(at[sequence], at[sequence] + count):
                REFERENCE.conv_gated_delta(
                    single.projected[sequence][position : position + 1],
                    single.weight_CJ,
                    single.window_SJC,
                    single.rule,
                    single.state_SHVK,
                    StateRows(slot),
                    torch.tensor([position], device=DEVICE),
                )
            at[sequence] += count
        assert torch.equal(made.window_SJC[1:3], single.window_SJC[1:3])
        assert off(made.state_SHVK[1:3], single.state_SHVK[1:3]) < WINDOWS[dtype]
